"""White space beside calls is no text in any API, whole or streamed, and blocks have one order."""

import json

import pytest
from automaton import write_automaton
from serving import ask_json, ours
from test_server_tools import TOOLS


def called(name: str, number: int) -> list[str]:
    """A call in one piece, unlike every other."""
    document = {"name": name, "arguments": {"zone": "UTC"}}
    return ["<tool_call>", " " * number + json.dumps(document), "</tool_call>"]


SCRIPTS = {
    "!": [*called("get_time", 1), "\n\n", *called("get_date", 1), "\n "],
    "@": ["<think>", "Hmm.", "</think>", " \n", "\n\t", *called("get_time", 2), "  ", "\t\n",
          *called("get_date", 2)],
    "#": ["So: ", *called("get_time", 3), " \t", "Then", " this.", "\t ", *called("get_date", 3)],
    "~": ["\t\t", "Hello", " you.", "\n\n\n"],
    "^": ["\n \n", " \t "],
}  # fmt: skip
THOUGHT = ("thinking", "Hmm.")
CALLS = [("call", "get_time"), ("call", "get_date")]
BLOCKS = {
    "!": CALLS,
    "@": [THOUGHT, *CALLS],
    "#": [("text", "So: "), CALLS[0], ("text", " \tThen this.\t "), CALLS[1]],
    "~": [("text", "\t\tHello you.\n\n\n")],
    "^": [("text", "\n \n \t ")],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("margins")
    target = write_automaton(folder / "target", SCRIPTS)
    with ours("--model", target, "--num-draft-tokens", "0") as asked:
        yield asked


def user(trigger: str) -> list[dict]:
    return [{"role": "user", "content": f"Please {trigger}"}]


@pytest.mark.parametrize("trigger", SCRIPTS)
def test_chats(server, trigger):
    body = {"messages": user(trigger), "tools": TOOLS, "include_draft": True}
    text = "".join(text for kind, text in BLOCKS[trigger] if kind == "text")
    answer = server.complete(**body, max_tokens=60)
    message = answer.choices[0].message
    assert (message.content or "") == text
    names = [("call", call.function.name) for call in message.tool_calls or []]
    assert names == [block for block in BLOCKS[trigger] if block[0] == "call"]
    tokens = [t for t in answer.draft["tokens"] if "reasoning" not in t]
    assert "".join(token["text"] for token in tokens) == text
    streamed = ""
    for chunk in server.complete(**body, max_tokens=60, stream=True):
        content = chunk.choices[0].delta.content or ""
        told = [t["text"] for t in chunk.draft["tokens"] if "reasoning" not in t]
        assert content == "".join(told)
        streamed += content
    assert streamed == text


@pytest.mark.parametrize("trigger", SCRIPTS)
def test_messages(server, trigger):
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
        for tool in TOOLS
    ]
    body = {"messages": user(trigger), "tools": tools, "max_tokens": 60}
    _, document = ask_json(server, "/v1/messages", body)

    def shown(block: dict) -> tuple[str, str]:
        if block["type"] == "tool_use":
            return "call", block["name"]
        return block["type"], block[block["type"]]

    assert list(map(shown, document["content"])) == BLOCKS[trigger]
    anthropic = pytest.importorskip("anthropic")
    url = server.url.removesuffix("/v1")
    options = {"api_key": "x", "base_url": url, "max_retries": 0, "timeout": 30}
    with (
        anthropic.Anthropic(**options) as client,
        client.messages.stream(model="x", **body) as stream,
    ):
        final = json.loads(stream.get_final_message().to_json())
    assert list(map(shown, final["content"])) == BLOCKS[trigger]


@pytest.mark.parametrize("trigger", SCRIPTS)
def test_responses(server, trigger):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    whole = server.client.responses.create(model="x", input=user(trigger), tools=tools)

    def shown(item) -> tuple[str, str]:
        if item.type == "function_call":
            return "call", item.name
        return "thinking" if item.type == "reasoning" else "text", item.content[0].text

    assert list(map(shown, whole.output)) == BLOCKS[trigger]
    *_, last = server.client.responses.create(
        model="x", input=user(trigger), tools=tools, stream=True
    )
    assert list(map(shown, last.response.output)) == BLOCKS[trigger]
