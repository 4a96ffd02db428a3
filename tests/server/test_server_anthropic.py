"""/v1/messages: Anthropic's own client on a pair that calls tools and thinks, as OpenAI's does."""

import pytest
from automaton import write_automaton
from grids import thorough
from serving import ask_json, ours
from test_server_tools import SCRIPTS, TOOLS

OWN_TOOLS = [
    {
        "name": tool["function"]["name"],
        "description": "Says it.",
        "input_schema": tool["function"]["parameters"],
        "cache_control": {"type": "ephemeral"},
    }
    for tool in TOOLS
]
DESCRIBED = [
    {
        "type": "function",
        "function": {
            "name": tool["name"],
            "parameters": tool["input_schema"],
            "description": tool["description"],
        },
    }
    for tool in OWN_TOOLS
]
EVENTS = [
    "message_start", "content_block_start", "content_block_delta", "content_block_stop",
    "message_delta", "message_stop",
]  # fmt: skip
KEY = "a-key"


@pytest.fixture(scope="module")
def anthropic():
    """Not at the top: every process of the tests would import it for its list of them."""
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def server(tmp_path_factory, anthropic):
    folder = tmp_path_factory.mktemp("messages")
    target = write_automaton(folder / "target", SCRIPTS)
    draft = write_automaton(folder / "draft", SCRIPTS, mistakes=4)
    flags = ("--model", target, "--draft-model", draft, "--api-key", KEY)
    with ours(*flags) as asked:
        asked.client.api_key = KEY
        asked.base = asked.url.removesuffix("/v1")
        options = {"base_url": asked.base, "max_retries": 0, "timeout": 30}
        with anthropic.Anthropic(api_key=KEY, **options) as asked.own:
            yield asked


def question(trigger: str, **more) -> dict:
    fields = {"model": "claude-of-today", "max_tokens": 60, "tools": OWN_TOOLS}
    return {**fields, "messages": [{"role": "user", "content": f"Please {trigger}"}], **more}


def blocks_of(message) -> list[tuple]:
    found = []
    for block in message.content:
        if block.type == "tool_use":
            assert block.id
            found.append((block.type, block.name, block.input))
        else:
            found.append((block.type, getattr(block, block.type)))
    return found


ANSWERS = {
    "!": ([("text", "Hello there.")], "end_turn"),
    "@": ([("text", "Let me look. "), ("tool_use", "get_weather", {"city": "Paris"})], "tool_use"),
    "#": (
        [("tool_use", "get_time", {"zone": "UTC"}), ("tool_use", "get_date", {})],
        "tool_use",
    ),
    "~": ([("thinking", "Hmm, better count."), ("text", "It is seven.")], "end_turn"),
    "&": (
        [("thinking", "A call, then."), ("tool_use", "get_date", {"zone": "GMT"})],
        "tool_use",
    ),
}


@pytest.mark.parametrize("trigger", thorough(ANSWERS, "@", "~"))
def test_messages_whole_and_streamed(server, trigger):
    """The blocks, the reasons, and the events in their order; drafted as any other answer."""
    blocks, reason = ANSWERS[trigger]
    message = server.own.messages.create(**question(trigger))
    assert (blocks_of(message), message.stop_reason) == (blocks, reason)
    assert message.role == "assistant" and message.type == "message"
    assert message.id.startswith("msg_") and message.stop_sequence is None
    with server.own.messages.stream(**question(trigger)) as stream:
        events = [event.type for event in stream if event.type in EVENTS]
        final = stream.get_final_message()
    assert (blocks_of(final), final.stop_reason) == (blocks, reason)
    assert final.usage.output_tokens == message.usage.output_tokens
    assert events[0] == "message_start" and events[-2:] == ["message_delta", "message_stop"]
    opened = 0
    for event in events[1:-2]:
        opened += {"content_block_start": 1, "content_block_stop": -1}.get(event, 0)
        assert opened in (0, 1) and not (event == "content_block_delta" and not opened)
    assert opened == 0 and events.count("content_block_start") == len(blocks)


def test_a_conversation_with_tools_is_the_one_that_openais_client_has(server):
    """Results of tools, several blocks, system blocks: the prompt is token for token the same."""
    call = {"type": "tool_use", "id": "a1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "a1",
        "content": [{"type": "text", "text": "22"}],
    }
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Please @"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me look. "}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "and ^"}]},
    ]
    system = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    asked = question("x", messages=messages, system=system, tools=OWN_TOOLS)
    message = server.own.messages.create(**asked)
    assert blocks_of(message) == [("text", "It has 22 degrees.")]
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    chat = [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Please @"},
        {
            "role": "assistant",
            "content": "Let me look. ",
            "tool_calls": [{"id": "a1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a1", "content": "22"},
        {"role": "user", "content": "and ^"},
    ]
    other = server.client.chat.completions.create(
        model="x", messages=chat, tools=DESCRIBED, max_tokens=60
    )
    assert other.choices[0].message.content == "It has 22 degrees."
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == other.usage.prompt_tokens
    count = {name: asked[name] for name in ("model", "messages", "system", "tools")}
    assert server.own.messages.count_tokens(**count).input_tokens == other.usage.prompt_tokens


def test_what_the_system_says_between_messages(server):
    """As Claude Code reminds the model of something, behind a message or a tool's result."""
    call = {"type": "tool_use", "id": "a1", "name": "get_date", "input": {}}
    messages = [
        {"role": "user", "content": "Please"},
        {"role": "system", "content": "Mind x."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a1"}]},
        {"role": "system", "content": [{"type": "text", "text": "Mind ^."}]},
    ]
    function = {"name": "get_date", "arguments": "{}"}
    reminder = "<system-reminder>\n{}\n</system-reminder>".format
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": f"Please\n\n{reminder('Mind x.')}"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": ""},
        {"role": "user", "content": reminder("Mind ^.")},
    ]
    message = server.own.messages.create(**question("", messages=messages, system="Be kind."))
    assert blocks_of(message) == [("text", "It has 22 degrees.")]
    body = {"messages": chat, "tools": DESCRIBED}
    other = server.client.chat.completions.create(model="x", max_tokens=1, **body)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == other.usage.prompt_tokens
    cached = other.usage.prompt_tokens_details.cached_tokens
    assert cached >= other.usage.prompt_tokens - 2


def test_what_an_agent_changes_for_its_bill_is_no_prompt(server):
    """The caches of the turn before are used again, whatever it says there."""
    rules = "Rules. " * 40

    def ask(bill: str):
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={bill};"
        system = [{"type": "text", "text": header}, {"type": "text", "text": rules}]
        return server.own.messages.create(**question("!", system=system)).usage

    first, second = ask("a1b2c"), ask("d3e4f")
    total = first.input_tokens + first.cache_read_input_tokens
    assert second.input_tokens + second.cache_read_input_tokens == total
    assert second.cache_read_input_tokens > total - 5


@pytest.mark.parametrize("metadata", [{}, {"user_id": None}, {"user_id": "somebody"}])
def test_a_user_may_be_named(server, metadata):
    """Null is as good as no name."""
    message = server.own.messages.create(**question("!", metadata=metadata))
    assert blocks_of(message) == [("text", "Hello there.")]


def test_reasons_to_stop(server):
    message = server.own.messages.create(**question("!", max_tokens=1))
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 1
    message = server.own.messages.create(**question("!", stop_sequences=["zzz", "lo "]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "lo ")
    assert blocks_of(message) == [("text", "Hel")]
    for words, text in ((["o the"], "Hell"), (["re", "lo t"], "Hel"), (["Hello there"], "")):
        message = server.own.messages.create(**question("!", stop_sequences=words))
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", words[-1])
        assert "".join(block.text for block in message.content) == text
        chat = {"model": "x", "messages": question("!")["messages"], "max_tokens": 60}
        chat |= {"stop": words, "extra_body": {"include_draft": True}}
        got = server.client.chat.completions.create(**chat)
        assert (got.choices[0].message.content or "") == text
        assert got.choices[0].finish_reason == "stop"
        assert "".join(token["text"] for token in got.draft["tokens"]) == text
    message = server.own.messages.create(**question("!", stop_sequences=["zzz"]))
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_a_budget_ends_the_thoughts(server, num_draft_tokens):
    """The model is made to end them, and speaks; none at all where they are disabled."""
    more = {"extra_body": {"num_draft_tokens": num_draft_tokens}}
    enabled = {"type": "enabled", "budget_tokens": 1024}
    message = server.own.messages.create(**question("~", thinking=enabled, **more))
    assert blocks_of(message)[0] == ("thinking", "Hmm, better count.")
    short = more["extra_body"] | {"thinking": {"type": "enabled", "budget_tokens": 2}}
    message = server.own.messages.create(**question("~", extra_body=short))
    assert blocks_of(message)[0] == ("thinking", "Hmm, better ")
    disabled = {"type": "disabled"}
    message = server.own.messages.create(**question("~", thinking=disabled, **more))
    assert [block.type for block in message.content if block.type == "thinking"] == []
    assert server.own.messages.create(**question("!", thinking=disabled)).content[0].text


def test_thoughts_that_are_not_to_be_shown(server):
    more = {"thinking": {"type": "adaptive", "display": "omitted"}}
    message = server.own.messages.create(**question("~", **more))
    assert blocks_of(message) == [("thinking", ""), ("text", "It is seven.")]
    with server.own.messages.stream(**question("~", **more)) as stream:
        kinds = [event.delta.type for event in stream if event.type == "content_block_delta"]
        assert blocks_of(stream.get_final_message()) == blocks_of(message)
    assert "thinking_delta" not in kinds and "signature_delta" in kinds


PLACE = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}},
         "required": ["city"], "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_time"}])
def test_a_tool_that_must_be_called(server, choice):
    tools = [tool | {"input_schema": PLACE} for tool in OWN_TOOLS]
    choice = choice | {"disable_parallel_tool_use": True}
    asked = question("!", tools=tools, tool_choice=choice, max_tokens=200)
    message = server.own.messages.create(**asked)
    *_, (kind, name, given) = blocks_of(message)  # perhaps behind thoughts
    assert (kind, message.stop_reason) == ("tool_use", "tool_use")
    assert name == choice.get("name", name) and name in [tool["name"] for tool in tools]
    assert given in ({"city": "Paris"}, {"city": "Rome"})


def post(server, body: object, path: str = "/v1/messages?beta=true") -> tuple[int, dict]:
    return ask_json(server, path, body, head={"x-api-key": KEY})


USER = {"role": "user", "content": "Hello"}
CHOICES = [[{"properties": {f"{i}{j}": {"type": "null"}}} for j in range(2)] for i in range(16)]
COMBINED = {"allOf": [{"anyOf": choices} for choices in CHOICES]}
WRONG = {
    "no limit": ({"max_tokens": None}, "the request has no max_tokens"),
    "no messages": ({"messages": []}, "the request has no messages"),
    "no messages but a prompt of the system": (
        {"messages": [{"role": "system", "content": []}], "system": "Be brief."},
        "the request has no messages",
    ),
    "a message of nothing": (
        {"messages": [{"role": "system", "content": []}]},
        "the request has no messages",
    ),
    "a prefill": (
        {"messages": [USER, {"role": "assistant", "content": "It"}]},
        "the last message is not the user's",
    ),
    "a text": ({"messages": "Hello"}, "messages is a string: give a list"),
    "a role": ({"messages": [{"role": "tool", "content": "a"}]}, "give user, assistant or system"),
    "a number": ({"messages": [{"role": "user", "content": 5}]}, "a text or a list of blocks"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "a block of type 'image': only text",
    ),
    "a result of nothing": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "no tool_use_id",
    ),
    "a call of nothing": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, USER]},
        "a tool_use has no name",
    ),
    "system": ({"system": 5}, "system is something else than a text"),
    "a tool of theirs": (
        {"tools": [{"type": "code_execution_20250522", "name": "code_execution"}]},
        "code_execution is not the client's",
    ),
    "a forced tool": ({"tool_choice": {"type": "any"}}, "forces a call, but the tool is not"),
    "a bomb in a tool": (
        {
            "tools": [{"name": "f", "input_schema": {"enum": list(range(9000))}}],
            "tool_choice": {"type": "any"},
        },
        "values: give at most 4000",
    ),
    "a bomb that is folded": (
        {"tools": [{"name": "f", "input_schema": COMBINED}], "tool_choice": {"type": "any"}},
        "schema too large",
    ),
    "a choice": ({"tool_choice": "auto"}, "tool_choice is a string: give an object"),
    "thinking": ({"thinking": {"type": "loud"}}, "thinking is loud: enable or disable it"),
    "a budget": ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "budget is a string"),
    "a form": ({"output_format": {"type": "xml"}}, "is no object of type json_schema"),
    "hot": ({"temperature": -1}, "temperature is -1"),
    "stop": ({"stop_sequences": [5]}, "stop is something else"),
    "metadata": ({"metadata": "x"}, "metadata is a string: give an object"),
    "a user": (
        {"metadata": {"user_id": 5}},
        "metadata.user_id is a number: give a string",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_said_in_its_own_shape(server, name):
    fields, sentence = WRONG[name]
    body = {"model": "claude", "max_tokens": 5, "messages": [USER]} | fields
    status, document = post(server, body)
    assert status == 400 and document["type"] == "error"
    assert document["error"]["type"] == "invalid_request_error"
    assert sentence in document["error"]["message"]


def test_errors_by_their_kind(server, anthropic):
    with pytest.raises(anthropic.BadRequestError, match="temperature is -1"):
        server.own.messages.create(**question("!", extra_body={"temperature": -1}))
    options = {"base_url": server.base, "max_retries": 0, "timeout": 30}
    wrong = anthropic.Anthropic(api_key="wrong", **options)
    with wrong, pytest.raises(anthropic.AuthenticationError) as error:
        wrong.messages.create(**question("!"))
    assert error.value.body["error"]["type"] == "authentication_error"
    with anthropic.Anthropic(auth_token=KEY, api_key=None, **options) as bearer:
        assert bearer.messages.create(**question("!")).content[0].text == "Hello there."
    with pytest.raises(anthropic.NotFoundError) as error:
        server.own.messages.batches.list()
    assert error.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.NotFoundError) as error:
        server.own.messages.batches.create(requests=[])
    assert error.value.body["error"]["type"] == "not_found_error"


def test_a_tool_runner_keeps_its_conversation(server, anthropic):
    """It sends the new messages alone: the answer is that to the whole conversation."""

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Say the weather.

        Args:
            city: Where.
        """
        return f"^22 in {city}"

    fields = {"model": "local", "max_tokens": 60, "tools": [get_weather]}
    fields |= {"messages": [{"role": "user", "content": "Please @"}], "system": "Be brief."}
    seen = {}
    for is_kept in (True, False):
        more = {} if is_kept else {"thread": False}
        runner = server.own.beta.messages.tool_runner(**fields, **more)
        seen[is_kept] = [(blocks_of(each), each.usage) for each in runner]
    assert [blocks for blocks, _ in seen[True]] == [blocks for blocks, _ in seen[False]]
    assert len(seen[True]) == 2
    sizes = {
        is_kept: [use.input_tokens + use.cache_read_input_tokens for _, use in answers]
        for is_kept, answers in seen.items()
    }
    assert sizes[True] == sizes[False]


def test_a_thread_is_sent_whole(server, anthropic):
    """One that begins is answered; its libraries send the whole of one that is not found."""
    more = {"extra_body": {"thread": {"type": "create"}}}
    first = server.own.messages.create(**question("!"), **more)
    assert blocks_of(first) == blocks_of(server.own.messages.create(**question("!")))
    more["extra_body"]["thread"] = {"type": "continue", "previous_message_id": first.id}
    for ask in (server.own.messages.create, server.own.messages.count_tokens):
        fields = question("~") | more
        if ask == server.own.messages.count_tokens:
            del fields["max_tokens"]
        with pytest.raises(anthropic.NotFoundError) as lost:
            ask(**fields)
        assert lost.value.body["error"]["details"] == {"error_code": "thread_not_found"}
    with pytest.raises(anthropic.BadRequestError, match="thread is a string: give an object"):
        server.own.messages.create(**question("!"), extra_body={"thread": "create"})
