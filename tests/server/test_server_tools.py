"""Tools and reasoning: the server's answers are mlx_lm.server's, drafted through the markers."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from automaton import write_automaton
from serving import ours, theirs

from mlx_eagle.batch.group import Group


def tool(name: str, argument: str) -> dict:
    properties = {argument: {"type": "string"}}
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


TOOLS = [tool("get_weather", "city"), tool("get_time", "zone"), tool("get_date", "zone")]
WEATHER = ['\n{"name": ', '"get_', 'weather"', ', "argu', 'ments": {"city"', ': "Pa', 'ris"', "}}"]
TIME = ['{"name": "get_time", ', '"arguments": {"zone"', ': "UTC', '"}}']
DATE = [' {"name":', '"get_date", ', '"arguments":', " {}", "} "]
SCRIPTS = {
    "!": ["Hel", "lo ", "there."],
    "@": ["Let me ", "look. ", "<tool_call>", *WEATHER, "</tool_call>"],
    "#": ["<tool_call>", *TIME, "</tool_call>", "<tool_call>", *DATE, "</tool_call>"],
    "~": ["<think>", "Hmm, ", "better ", "count.", "</think>", "It is ", "seven."],
    "&": ["<think>", "A call, ", "then.", "</think>", "<tool_call>", '[{"name": "get', '_date"',
          ', "arguments": {"zone', '": "GMT"}}]', "</tool_call>"],
    "%": ["Well, ", "<tool_call>", '{"name" ', "oops", "</tool_call>"],
    "=": ["Well: ", "<tool_call>", '["get_', 'time"]', "</tool_call>"],
    "|": ["So: ", "<tool_call>", ' {"name":"get', '_date"} ', "</tool_call>"],
    "^": ["It has ", "22 de", "grees."],
}  # fmt: skip
ANSWERS = {
    "!": ("Hello there.", None, [], "stop"),
    "@": ("Let me look. ", None, [("get_weather", {"city": "Paris"})], "tool_calls"),
    "#": (None, None, [("get_time", {"zone": "UTC"}), ("get_date", {})], "tool_calls"),
    "~": ("It is seven.", "Hmm, better count.", [], "stop"),
    "&": (None, "A call, then.", [("get_date", {"zone": "GMT"})], "tool_calls"),
    "%": ("Well, ", None, [], "tool_calls"),  # mlx-lm drops what it cannot parse
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    """A target that knows the scripts, and a draft model that is wrong now and then."""
    folder = tmp_path_factory.mktemp("automata")
    target = write_automaton(folder / "target", SCRIPTS)
    return target, write_automaton(folder / "draft", SCRIPTS, mistakes=4)


@pytest.fixture(scope="module")
def reference(folders):
    with theirs(folders[0]) as asked:
        yield asked


@pytest.fixture(scope="module")
def server(folders):
    with ours("--model", folders[0], "--draft-model", folders[1], "--usage-stats") as asked:
        yield asked


def question(trigger: str) -> dict:
    return {"messages": [{"role": "user", "content": f"Please {trigger}"}], "tools": TOOLS}


def calls_of(calls: list) -> list[tuple[str, dict]]:
    assert all(call.type == "function" and call.id for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def whole(asked, **options) -> tuple:
    """Content, reasoning, calls and the reason to finish."""
    choice = asked.complete(**options).choices[0]
    message = choice.message.to_dict()
    assert set(message) <= {"role", "content", "reasoning", "tool_calls"}
    calls = calls_of(choice.message.tool_calls or [])
    return message["content"], message.get("reasoning"), calls, choice.finish_reason


def streamed(asked, **options) -> tuple:
    """The same, put together from a stream."""
    choices = [chunk.choices[0] for chunk in asked.complete(**options, stream=True)]
    deltas = [choice.delta.to_dict() for choice in choices]
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert [call.index for call in calls] == list(range(len(calls)))
    (finish_reason,) = [c.finish_reason for c in choices if c.finish_reason]
    return content or None, reasoning or None, calls_of(calls), finish_reason


@pytest.mark.parametrize("read", [whole, streamed])
@pytest.mark.parametrize("trigger", ANSWERS)
def test_answers_are_those_of_mlx_lm_server(server, reference, trigger, read):
    got = read(server, **question(trigger))
    assert got == read(reference, **question(trigger)) == ANSWERS[trigger]


@pytest.mark.parametrize("trigger, said", [("=", "Well: "), ("|", "So: ")])
def test_calls_without_a_name_or_arguments_are_dropped(server, trigger, said):
    """mlx-lm drops what is not JSON; here its answer would break off."""
    for read in (whole, streamed):
        assert read(server, **question(trigger)) == (said, None, [], "tool_calls")


def test_drafts_are_kept_and_rejected_among_the_markers(server, reference):
    for trigger in ("@", "#", "&"):
        usage = server.complete(**question(trigger)).usage
        expected = reference.complete(**question(trigger)).usage
        assert usage.completion_tokens == expected.completion_tokens == len(SCRIPTS[trigger]) + 1
        assert 0 < usage.accepted_tokens < usage.drafted_tokens


@pytest.mark.parametrize("read", [whole, streamed])
@pytest.mark.parametrize("max_tokens", [2, 3, 7, 10, 11])
def test_answers_that_end_within_a_call(server, reference, max_tokens, read):
    options = question("@") | {"max_tokens": max_tokens}
    got = read(server, **options)
    assert got == read(reference, **options)
    assert got[3] == "length" and bool(got[2]) == (max_tokens == 11)  # the call is complete then


ENDED = {
    "look": ("Let me ", None, [], "stop"),
    "Paris": ("Let me look. ", None, [], "tool_calls"),  # its call was cut off
}


@pytest.mark.parametrize("stop", ["Paris", "look", "<tool_call>", "cat"])
def test_stop_words_within_calls_and_before(server, reference, stop):
    """Also those that begin or end within a token: mlx-lm takes these out, and goes on."""
    options = question("@") | {"stop": [stop]}
    for read in (whole, streamed):
        expected = ENDED.get(stop) or read(reference, **options)
        assert read(server, **options) == expected


@pytest.mark.parametrize("read", [whole, streamed])
def test_reasoning_that_the_template_begins(server, reference, read):
    options = question("~") | {"chat_template_kwargs": {"thinks_at_once": True}}
    got = read(server, **options)
    assert got == read(reference, **options) == ANSWERS["~"]


def test_a_result_is_answered_and_its_caches_are_used(server, reference):
    """The message of the client library goes back as it came."""

    def answer(asked) -> tuple:
        said = list(question("#")["messages"])
        for _ in range(2):
            message = asked.complete(messages=said, tools=TOOLS).choices[0].message
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": "^22"}
                for call in message.tool_calls or []
            ]
            said += [message, *results]
        return message.content, asked.complete(messages=said, tools=TOOLS).usage.prompt_tokens

    assert answer(server) == answer(reference)
    assert answer(server)[0] == "It has 22 degrees."


@pytest.mark.parametrize("trigger", ["@", "&"])
def test_a_call_goes_on_in_shared_rounds_from_any_token(server, trigger, monkeypatch):
    """And by itself again, two rounds later."""
    num_rounds, run = 0, Group.round

    def counting(self) -> list:
        nonlocal num_rounds
        num_rounds += 1
        return run(self)

    def shares(self, num_requests: int) -> bool:
        return num_alone < num_rounds <= num_alone + 3

    monkeypatch.setattr(Group, "round", counting)
    monkeypatch.setattr(Group, "_shares", shares)
    for num_alone in range(len(SCRIPTS[trigger]) // 2):
        num_rounds = 0
        assert streamed(server, **question(trigger), num_draft_tokens=1) == ANSWERS[trigger]
        assert num_rounds > num_alone


@pytest.mark.exhaustive
def test_eight_clients_with_tools(server):
    triggers = [*ANSWERS, "@", "#"]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda t: streamed(server, **question(t)), triggers))
    assert got == [ANSWERS[trigger] for trigger in triggers]
