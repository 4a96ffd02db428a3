"""/v1/responses: OpenAI's own client on a pair that calls tools and thinks, as in chats."""

import json
import shlex
import tomllib

import openai
import pytest
from automaton import write_automaton
from serving import ask_json, ours
from test_server_tools import SCRIPTS, TOOLS

from mlx_eagle.server.__main__ import agent_lines, announce
from mlx_eagle.server.answer_stream import RequestError
from mlx_eagle.server.engine import Schedule
from mlx_eagle.server.stored_responses import StoredResponses

SPACED = ["<tool_call>", '{"name":"get__da', 'te","arguments":{', "} }", "</tool_call>"]
OWN_SCRIPTS = {";": SPACED} | SCRIPTS
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]
ANSWERS = {
    "!": [("message", "Hello there.")],
    "@": [("message", "Let me look. "), ("function_call", "get_weather", {"city": "Paris"})],
    "#": [("function_call", "get_time", {"zone": "UTC"}), ("function_call", "get_date", {})],
    "~": [("reasoning", "Hmm, better count."), ("message", "It is seven.")],
    "&": [("reasoning", "A call, then."), ("function_call", "get_date", {"zone": "GMT"})],
}
PART = ("content_part.added", "{}.delta", "{}.done", "content_part.done")
EVENTS = {
    "message": [part.format("output_text") for part in PART],
    "reasoning": [part.format("reasoning_text") for part in PART],
    "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
}
"""What OpenAI's server sends between ``output_item.added`` and ``.done``, by the item's type."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("responses")
    target = write_automaton(folder / "target", OWN_SCRIPTS)
    draft = write_automaton(folder / "draft", OWN_SCRIPTS, mistakes=4)
    with ours("--model", target, "--draft-model", draft) as asked:
        yield asked


def ask(server, trigger: str, **more):
    fields = {"model": "x", "input": f"Please {trigger}", "tools": FUNCTIONS, "temperature": 0}
    return server.client.responses.create(**fields | {"max_output_tokens": 60} | more)


def num_read(response) -> int:
    """Tokens of its prompt that were not in a cache."""
    usage = response.usage
    return usage.input_tokens - usage.input_tokens_details.cached_tokens


def items_of(response) -> list[tuple]:
    found = []
    for item in response.output:
        assert item.id and item.status == "completed"
        if item.type == "function_call":
            assert item.call_id
            found.append((item.type, item.name, json.loads(item.arguments)))
        else:
            (part,) = item.content
            found.append((item.type, part.text))
    return found


@pytest.mark.parametrize("trigger", ANSWERS)
def test_responses_whole_and_streamed(server, trigger):
    """The items, and the events in OpenAI's order; the tokens are those of a chat."""
    whole = ask(server, trigger)
    assert (items_of(whole), whole.status) == (ANSWERS[trigger], "completed")
    events = list(ask(server, trigger, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert all(event.type.startswith("response.") for event in events)
    names = [event.type.removeprefix("response.") for event in events]
    distinct = [name for i, name in enumerate(names) if not i or name != names[i - 1]]
    expected = ["created", "in_progress"]
    for kind, *_ in ANSWERS[trigger]:
        expected += ["output_item.added", *EVENTS[kind], "output_item.done"]
    assert distinct == [*expected, "completed"]
    final = events[-1].response
    assert items_of(final) == ANSWERS[trigger] and final.output_text == whole.output_text
    for place, item in enumerate(final.output):
        own = [e for e in events if getattr(e, "output_index", None) == place]
        deltas = "".join(e.delta for e in own if e.type.endswith(".delta"))
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
        assert own[0].item.id == own[-1].item.id == item.id and own[-1].item == item
        assert {e.item_id for e in own[1:-1]} == {item.id}
    messages = [{"role": "user", "content": f"Please {trigger}"}]
    chat = server.complete(messages=messages, tools=TOOLS, max_tokens=60)
    for usage in (whole.usage, final.usage):
        assert usage.output_tokens == chat.usage.completion_tokens
        assert usage.input_tokens == chat.usage.prompt_tokens
        assert (usage.output_tokens_details.reasoning_tokens > 0) == (trigger in "~&")
    assert num_read(final) <= 2


def test_the_clients_own_stream(server):
    """It puts the items together from the events, and fails where one is missing."""
    with server.client.responses.stream(model="x", input="Please ~") as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert items_of(final) == ANSWERS["~"] and final.output_text == "It is seven."


def test_thoughts_are_the_summary_where_one_is_asked_for(server):
    events = list(ask(server, "~", stream=True, reasoning={"summary": "auto"}))
    item, message = events[-1].response.output
    assert [part.text for part in item.summary] == ["Hmm, better count."] and not item.content
    assert message.content[0].text == "It is seven."
    names = [event.type for event in events if "reasoning" in event.type]
    assert names[0] == "response.reasoning_summary_part.added"
    assert names[-2:] == [
        "response.reasoning_summary_text.done", "response.reasoning_summary_part.done",
    ]  # fmt: skip


CALL = {"type": "function_call", "call_id": "a1", "name": "get_weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "a1", "output": "22 and ^"}


def test_items_are_the_messages_of_a_chat(server):
    """Thoughts, text and calls of one answer are one message; the prompt is the same by tokens."""
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "Please &"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "A call."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Well.", "annotations": []}]},
        CALL,
        CALL | {"call_id": "a2", "name": "get_time"},
        RESULT | {"output": [{"type": "input_text", "text": "22"}]},
        RESULT | {"call_id": "a2"},
    ]  # fmt: skip
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": "{}"}}
        for name, function in (("a1", "get_weather"), ("a2", "get_time"))
    ]
    chat = [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Please &"},
        {"role": "assistant", "content": "Well.", "reasoning_content": "A call.",
         "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a1", "content": "22"},
        {"role": "tool", "tool_call_id": "a2", "content": "22 and ^"},
    ]  # fmt: skip
    other = server.complete(messages=chat, tools=TOOLS, max_tokens=60)
    got = ask(server, "", input=items, instructions="Be brief.")
    assert items_of(got) == [("message", "It has 22 degrees.")]
    assert other.choices[0].message.content == got.output_text
    assert got.usage.input_tokens == other.usage.prompt_tokens
    assert num_read(got) <= 2


def test_tools_within_a_namespace(server):
    """As Codex has them: called by a longer name here, and by their own there."""
    names = {"name": "get", "type": "namespace", "description": "Asks."}
    inner = [tool | {"name": tool["name"].removeprefix("get_")} for tool in FUNCTIONS]
    got = ask(server, "", input="Please ;", tools=[names | {"tools": inner}])
    assert items_of(got) == [("function_call", "date", {})]
    assert got.output[0].namespace == "get"
    result = RESULT | {"call_id": got.output[0].call_id, "output": "^"}
    own = [{"role": "user", "content": "Please ;"}, *got.output, result]
    again = ask(server, "", input=own, tools=[names | {"tools": inner}])
    assert again.output_text == "It has 22 degrees." and num_read(again) < 80


def test_what_the_system_says_later_the_user_says(server):
    items = [
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Please"},
        {"role": "developer", "content": "Mind !"}, {"role": "user", "content": "now"},
        {"role": "assistant", "content": "Yes."}, {"role": "developer", "content": "And !"},
    ]  # fmt: skip
    reminder = "<system-reminder>\n{}\n</system-reminder>".format
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": f"Please\n\n{reminder('Mind !')}\n\nnow"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": reminder("And !")},
    ]
    got = ask(server, "", input=items)
    server.complete(messages=chat, tools=TOOLS, max_tokens=1)
    same = ask(server, "", input=chat)
    assert got.usage.input_tokens == same.usage.input_tokens and num_read(same) <= 2


def test_a_conversation_that_the_server_keeps(server):
    """The same prompt and caches as where the client keeps it; instructions do not stay."""
    first = ask(server, "@", instructions="Be brief.")
    call = first.output[-1].call_id
    result = RESULT | {"call_id": call, "output": "^"}
    second = ask(server, "", input=[result], previous_response_id=first.id)
    assert items_of(second) == [("message", "It has 22 degrees.")]
    assert second.previous_response_id == first.id
    own = [{"role": "user", "content": "Please @"}, *first.output, result]
    alone = ask(server, "", input=own, store=False)
    assert alone.usage.input_tokens == second.usage.input_tokens
    assert num_read(alone) <= 2
    third = ask(server, "!", previous_response_id=second.id, stream=True)
    assert list(third)[-1].response.status == "completed"
    client = server.client.responses
    assert client.retrieve(first.id) == first
    client.delete(first.id)
    for gone in (first.id, alone.id):  # deleted, and never stored
        with pytest.raises(openai.NotFoundError, match="there is no response resp_"):
            client.retrieve(gone)
    with pytest.raises(openai.BadRequestError, match="there is no response"):
        ask(server, "!", previous_response_id=first.id)
    with pytest.raises(openai.NotFoundError):
        client.delete(first.id)
    assert client.retrieve(second.id).output_text == "It has 22 degrees."


def test_items_that_are_named_only(server):
    """As Vercel's `ai` sends them: the prompt is that of the items themselves."""
    first = ask(server, "@", instructions="Be brief.")
    question = {"role": "user", "content": "Please @"}
    result = RESULT | {"call_id": first.output[-1].call_id, "output": "^"}
    named = [{"type": "item_reference", "id": item.id} for item in first.output]
    named[0].pop("type")  # OpenAI's API asks for none
    second = ask(server, "", input=[question, *named, result])
    whole = ask(server, "", input=[question, *first.output, result])
    assert items_of(second) == items_of(whole) == [("message", "It has 22 degrees.")]
    assert second.usage.input_tokens == whole.usage.input_tokens
    (asked, *_) = server.client.responses.input_items.list(second.id, order="asc")
    alone = ask(server, "", input=[{"type": "item_reference", "id": asked.id}])
    assert items_of(alone) == items_of(first)
    ask(server, "", input=[question | {"id": ["no name"]}])  # and is kept
    server.client.responses.delete(first.id)
    server.client.responses.delete(second.id)
    server.client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError, match="there is no item msg_"):
        ask(server, "", input=[question, *named])
    with pytest.raises(openai.BadRequestError, match="an item_reference has no id"):
        ask(server, "", input=[{"type": "item_reference"}])


def test_the_items_that_a_response_answers(server):
    """All of the conversation before it, page by page in either order, by OpenAI's client."""
    first = ask(server, "@", instructions="Be brief.")
    result = RESULT | {"call_id": first.output[-1].call_id, "output": "^"}
    second = ask(server, "", input=[result], previous_response_id=first.id)
    pages = server.client.responses.input_items
    (item,) = pages.list(first.id)
    assert (item.type, item.role, item.content[0].text) == ("message", "user", "Please @")
    items = list(pages.list(second.id, order="asc", limit=1))
    assert items[0].content == item.content and items[0].id.startswith("msg_")
    ids = [item.id for item in items]
    assert ids[1:3] == [item.id for item in first.output] and items[3].output == "^"
    assert list(pages.list(second.id, limit=3)) == items[::-1]
    again = [each.model_dump(exclude_none=True) for each in items]
    same = ask(server, "", input=again, store=False)
    assert items_of(same) == items_of(second) and num_read(same) <= 2
    for query, sentence in (
        ("order=up", "order is unknown"), ("limit=0", "limit is 0: give 1 to 100"),
        ("after=msg_0", "there is no item msg_0"), ("limit=" + "1" * 5000, "limit is 111"),
    ):  # fmt: skip
        path = f"/v1/responses/{second.id}/input_items?{query}"
        status, document = ask_json(server, path, None, "GET")
        assert status == 400 and sentence in document["error"]["message"]
    for path, status in (("other", 404), ("", 200), ("?stream=true", 400)):
        path = path if path.startswith("?") else f"/{path}"
        assert ask_json(server, f"/v1/responses/{first.id}{path}", None, "GET")[0] == status


@pytest.mark.exhaustive
def test_a_conversation_longer_than_the_context(server, monkeypatch):
    """Without its oldest turns, as few of them as leave room for the answer, where it may be."""
    rules = {"role": "developer", "content": "Be kind."}
    turns: list[dict] = [{"role": "user", "content": "Please !"}]
    sizes = []
    for i in range(5):
        got = ask(server, "", input=[rules, *turns], instructions="Be brief.", max_output_tokens=1)
        sizes.append(got.usage.input_tokens)
        if i < 4:
            turns = [{"role": "user", "content": f"Turn {i}"}, CALL,
                     RESULT | {"output": "x" * 9 * i},
                     {"role": "assistant", "content": "Yes."}, *turns]  # fmt: skip
    more = {"input": [rules, *turns], "instructions": "Be brief.", "max_output_tokens": 200}
    for num_turns in (4, 2, 0):
        context = sizes[num_turns] + 200
        monkeypatch.setattr(server.generator.model_provider, "context", context)
        got = ask(server, "", truncation="auto", **more)
        assert (got.status, got.truncation) == ("completed", "auto")
        assert got.usage.input_tokens == sizes[num_turns]
        assert len(list(server.client.responses.input_items.list(got.id))) == 1 + len(turns)
    monkeypatch.setattr(server.generator.model_provider, "context", sizes[0] - 5)
    for truncation in ("auto", "disabled"):
        with pytest.raises(openai.BadRequestError, match="shorten it") as error:
            ask(server, "", truncation=truncation, **more)
        assert error.value.code == "context_length_exceeded"


def test_what_is_kept_is_bounded_in_time_and_size():
    now = [0.0]
    store = StoredResponses(seconds=60, max_bytes=1000, clock=lambda: now[0])

    def names() -> str:
        return "".join(sorted(store._kept))

    for name in "abcd":
        now[0] += 20
        store.keep({"id": name, "output": [], "text": "x" * 290}, [])
    assert names() == "bcd" and len(store._kept["b"][1]) > 290  # a is an hour old
    assert store.find("b")[0]["id"] == "b"
    store.keep({"id": "e", "output": [], "text": "x" * 290}, [])
    assert names() == "cde"  # no more than 1000 bytes
    now[0] += 60
    with pytest.raises(RequestError, match=r"there is no response e: .* are kept for 1 minutes"):
        store.find("e")
    assert names() == ""
    store.keep({"id": "f", "output": [], "text": "x" * 2000}, [])
    assert names() == ""


def test_a_response_that_was_cut_off(server):
    got = ask(server, "!", max_output_tokens=1)
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [(item.status, item.content[0].text) for item in got.output] == [("incomplete", "Hel")]
    *_, last = ask(server, "!", max_output_tokens=1, stream=True)
    assert last.type == "response.incomplete" and last.response.output_text == "Hel"


def test_logprobs_as_a_chat_has_them(server):
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (part,) = ask(server, "!", **more).output[0].content
    assert "".join(entry.token for entry in part.logprobs) == "Hello there."
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2, 2, 2]
    messages = [{"role": "user", "content": "Please !"}]
    chat = server.complete(messages=messages, tools=TOOLS, logprobs=True)
    expected = [entry.logprob for entry in chat.choices[0].logprobs.content]
    assert [entry.logprob for entry in part.logprobs] == pytest.approx(expected[:3])
    deltas = [e for e in ask(server, "!", **more, stream=True) if e.type.endswith("text.delta")]
    assert [x.logprob for e in deltas for x in e.logprobs] == pytest.approx(expected[:3])


def test_a_response_that_breaks_off(server, monkeypatch):
    """A stream ends with the response that has failed; a whole answer is an error."""

    def fail(schedule, active, emitted):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Schedule, "_say", fail)
    with pytest.raises(openai.InternalServerError, match="the device is gone"):
        ask(server, "!")
    events = list(ask(server, "!", stream=True))
    assert [event.type for event in events[-2:]] == ["response.in_progress", "response.failed"]
    assert events[-1].response.error.message == "the device is gone"
    assert events[-1].response.status == "failed"
    monkeypatch.undo()
    assert ask(server, "!").output_text == "Hello there."


def post(server, body: object) -> tuple[int, dict]:
    return ask_json(server, "/v1/responses", body)


USER = {"role": "user", "content": "Hello"}
WRONG = {
    "nothing": ({"input": None}, "the request has no input"),
    "an empty list": ({"input": []}, "the request has no input"),
    "texts": ({"input": ["a"]}, "input is something else than a list of objects"),
    "a role": ({"input": [{"content": "a"}]}, "a message has no role"),
    "a number": ({"input": [USER | {"content": 5}]}, "content is something else than a list"),
    "an image": (
        {"input": [USER | {"content": [{"type": "input_image", "image_url": "x"}]}]},
        "a part of type 'input_image': only text",
    ),
    "a part": ({"input": [USER | {"content": [{"type": "input_text"}]}]}, "only text can be"),
    "another item": ({"input": [USER, {"type": "computer_call", "id": "x"}]}, "'computer_call'"),
    "thoughts": (
        {"input": [USER, {"type": "reasoning", "summary": 5}]},
        "the summary of a reasoning",
    ),
    "allowed": (
        {"tool_choice": {"type": "allowed_tools", "tools": 5}},
        "the tools of tool_choice",
    ),
    "no call": ({"input": [USER, {"type": "function_call", "name": "f"}]}, "has no call_id"),
    "bad arguments": ({"input": [USER, CALL | {"arguments": "{"}, RESULT]}, "are not JSON"),
    "a result": ({"input": [USER, RESULT | {"call_id": None}]}, "no call_id"),
    "parts of thoughts": (
        {"input": [USER, {"type": "reasoning", "summary": [5]}]},
        "a reasoning item",
    ),
    "instructions": ({"instructions": 5}, "instructions is a number: give a string"),
    "metadata": ({"metadata": []}, "metadata is a list: give an object"),
    "a foreign tool": ({"tools": [{"type": "local_shell"}]}, "local_shell is no function"),
    "a bomb in a tool": (
        {
            "tools": [
                {"type": "function", "name": "f", "parameters": {"enum": list(range(9000))}}
            ],
            "tool_choice": "required",
        },
        "values: give at most 4000",
    ),
    "a tool too long": (
        {
            "tools": [
                {
                    "type": "function",
                    "name": "f",
                    "strict": True,
                    "parameters": {"description": "a" * 200_001},
                }
            ]
        },
        "characters: give at most 200000",
    ),
    "no tool": ({"tools": [5]}, "tools is something else"),
    "a choice": ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    "a chat": ({"messages": [USER]}, "messages is not a field of /v1/responses: give input"),
    "a chat's limit": ({"max_tokens": 5}, "give max_output_tokens"),
    "in the background": ({"background": True}, "background is not supported"),
    "cut": ({"truncation": "last"}, "truncation is unknown: give 'auto' or 'disabled'"),
    "hot": ({"temperature": -1}, "temperature is -1"),
    "a limit": ({"max_output_tokens": "x"}, "max_tokens is a string"),
    "a limit of calls": ({"max_tool_calls": "x"}, "max_tool_calls is a string: give a number"),
    "a stop word": ({"stop": [5]}, "stop is something else"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_said(server, name):
    fields, sentence = WRONG[name]
    status, document = post(server, {"model": "x", "input": "Hello"} | fields)
    assert status == 400 and sentence in document["error"]["message"]
    assert document["error"]["type"] == "invalid_request_error"


def test_a_form_is_what_it_is_for_a_chat(server):
    """Taken or refused, in the same words."""
    schema = {"name": "f", "schema": {"type": "colour"}, "strict": True}
    form = {"type": "json_schema", **schema}
    status, document = post(server, {"input": "Hello", "text": {"format": form}})
    chat = {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(openai.BadRequestError) as error:
        server.complete(**chat)
    assert status == 400 and document["error"] == error.value.body


def test_what_an_agent_needs_is_printed(server, capsys):
    """Lines of a shell, with the address where each agent looks for it, and the key by name."""
    announce(server.server, server.generator)
    printed = capsys.readouterr().out.splitlines()
    lines = [line.strip() for line in printed if line.startswith("  ")]
    base = server.url.removesuffix("/v1")
    for has_key, found in ((False, lines), (True, agent_lines(base, True))):
        claude, codex, opencode = [shlex.split(line.partition(": ")[2]) for line in found]
        token = "$EAGLE_KEY" if has_key else "local"
        assert claude[:2] == [f"ANTHROPIC_BASE_URL={base}", f"ANTHROPIC_AUTH_TOKEN={token}"]
        provider = tomllib.loads(codex[-1])["model_providers"]["eagle"]
        assert provider.pop("name") and provider.pop("base_url") == server.url
        assert provider == ({"env_key": "EAGLE_KEY"} if has_key else {})
        assert codex[0] == "codex" and opencode[1:] == ["opencode", "-m", "eagle/local"]
        config = json.loads(opencode[0].removeprefix("OPENCODE_CONFIG_CONTENT="))
        options = config["provider"]["eagle"]["options"]
        assert options.pop("baseURL") == server.url
        assert options == ({"apiKey": "{env:EAGLE_KEY}"} if has_key else {})
