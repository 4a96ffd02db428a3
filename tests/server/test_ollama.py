"""Ollama's API: what its clients ask, and that answers are those of OpenAI's API here."""

import http.client
import json
import re

import pytest
from automaton import write_automaton
from serving import ask_json, ours
from test_server_tools import ANSWERS, SCRIPTS, TOOLS

from mlx_eagle.server.client_session import ClientSession

KEY = "a-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ollama")
    target = write_automaton(folder / "target", SCRIPTS)
    draft = write_automaton(folder / "draft", SCRIPTS, mistakes=4)
    with ours("--model", target, "--draft-model", draft, "--max-tokens", "60") as asked:
        yield asked


def lines(asked, path: str, body: dict) -> list[dict]:
    """The lines of a stream, which is what one gets who says nothing."""
    connection = http.client.HTTPConnection(*asked.address, timeout=30)
    try:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200
        assert response.getheader("Content-Type") == "application/x-ndjson"
        return [json.loads(line) for line in response.read().decode().splitlines()]
    finally:
        connection.close()


def question(trigger: str, **more) -> dict:
    said = [{"role": "user", "content": f"Please {trigger}"}]
    return {"model": "local", "messages": said, "tools": TOOLS, **more}


def calls_of(message: dict) -> list[tuple[str, dict]]:
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]


@pytest.mark.parametrize("trigger", [trigger for trigger in ANSWERS if trigger != "%"])
def test_chats_whole_and_streamed(server, trigger):
    content, thoughts, calls, _ = ANSWERS[trigger]
    status, whole = ask_json(server, "/api/chat", question(trigger, stream=False))
    message = whole["message"]
    assert status == 200 and message["role"] == "assistant"
    assert (message["content"], message.get("thinking")) == (content or "", thoughts)
    assert calls_of(message) == calls
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    *parts, last = lines(server, "/api/chat", question(trigger))
    messages = [part["message"] for part in parts]
    assert "".join(part["content"] for part in messages) == message["content"]
    assert "".join(part.get("thinking", "") for part in messages) == (thoughts or "")
    assert [call for part in messages for call in calls_of(part)] == calls
    assert not any(part["done"] for part in parts) and last["done"]
    usage = server.complete(**question(trigger)).usage
    for end in (whole, last):
        assert end["prompt_eval_count"] == usage.prompt_tokens
        assert end["eval_count"] == usage.completion_tokens
        assert end["total_duration"] >= end["eval_duration"] >= 0
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", end["created_at"])


def test_results_of_tools(server):
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    said = [
        {"role": "user", "content": "Please @"},
        {"role": "assistant", "content": "Let me look. ", "tool_calls": [call]},
        {"role": "tool", "content": "^22", "tool_name": "get_weather"},
    ]
    body = {"model": "x", "messages": said, "tools": TOOLS, "stream": False}
    _, document = ask_json(server, "/api/chat", body)
    assert document["message"]["content"] == "It has 22 degrees."


def test_generate(server):
    """A question with its rules, or a text as it is."""
    body = {"model": "x", "prompt": "Please !", "system": "Be brief.", "stream": False}
    _, document = ask_json(server, "/api/generate", body)
    assert document["response"] == "Hello there." and document["done_reason"] == "stop"
    *parts, last = lines(server, "/api/generate", {k: v for k, v in body.items() if k != "stream"})
    assert "".join(part["response"] for part in parts) == "Hello there." and last["done"]
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Please !"}]
    same = server.complete(messages=said)
    assert last["prompt_eval_count"] == same.usage.prompt_tokens
    _, raw = ask_json(server, "/api/generate", {"prompt": "So !", "raw": True, "stream": False})
    plain = server.complete(prompt="So !", max_tokens=60)
    assert raw["response"] == plain.choices[0].text
    assert raw["prompt_eval_count"] == plain.usage.prompt_tokens


@pytest.mark.parametrize("path, held", [("/api/chat", "message"), ("/api/generate", "response")])
def test_a_request_for_nothing_loads_the_model(server, path, held):
    status, document = ask_json(server, path, {"model": "x", "keep_alive": -1})
    assert status == 200 and held in document and document["done_reason"] == "load"


def test_options_and_forms(server):
    def ask(**more) -> dict:
        body = question("!", stream=False, **more)
        del body["tools"]
        status, document = ask_json(server, "/api/chat", body)
        assert status == 200, document
        return document

    assert ask(options={"num_predict": 2})["done_reason"] == "length"
    assert (
        ask(options={"num_predict": -1, "seed": -1, "num_ctx": 4096, "stop": ["there"]})[
            "message"
        ]["content"]
        == "Hello "
    )
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    assert json.loads(ask(format=schema)["message"]["content"])["n"] in (1, 2)
    said = question("!")["messages"]
    same = server.complete(messages=said, response_format={"type": "json_object"}, max_tokens=60)
    text = ask(format="json")["message"]["content"]
    assert text == (same.choices[0].message.content or "")
    logprobs = ask(logprobs=True, top_logprobs=2)["logprobs"]
    assert len(logprobs[0]["top_logprobs"]) == 2 and logprobs[0]["token"] == "Hel"
    options = {"temperature": 1.0, "seed": 3, "repeat_penalty": 1.1, "repeat_last_n": -1}
    assert ask(options=options)["message"] == ask(options=options)["message"]


TEXTS = [{"type": "text", "text": "Hello"}]
WRONG = {
    "options": ({"options": 5}, "options is a number: give an object"),
    "a number": ({"options": {"temperature": "x"}}, "temperature is a string"),
    "mirostat": ({"options": {"mirostat": 2}}, "mirostat is not supported"),
    "messages": ({"messages": 5}, "messages is a number: give a list"),
    "a message": ({"messages": [5]}, "an object with a role"),
    "images": ({"messages": [{"role": "user", "content": "", "images": ["x"]}]}, "only text"),
    "calls": (
        {"messages": [{"role": "user", "tool_calls": [5]}]},
        "a tool call is a number: give an object",
    ),
    "content": ({"messages": [{"role": "user", "content": TEXTS}]}, "is a list: give a string"),
    "stream": ({"stream": "yes"}, "stream is a string: give a boolean"),
    "a form": ({"format": "xml"}, "the schema is not JSON"),
    "think": ({"think": 5}, "think is something else"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_said_in_its_own_shape(server, name):
    fields, sentence = WRONG[name]
    status, document = ask_json(server, "/api/chat", question("!") | fields)
    assert status == 400 and sentence in document["error"] and document["error"].endswith(".")


def test_an_error_within_a_stream_is_its_last_line(server, monkeypatch):
    def broken(self, *args, **more):
        raise KeyError("x")

    monkeypatch.setattr(ClientSession, "pieces", broken)
    (line,) = lines(server, "/api/chat", question("!"))
    assert line["error"].endswith("its log says why.")


def test_what_clients_ask_first(server):
    name = server.generator.model_provider.name
    _, found = ask_json(server, "/api/version", None, "GET")
    assert re.fullmatch(r"0\.\d+\.\d+", found["version"])
    for path in ("/api/tags", "/api/ps"):
        _, found = ask_json(server, path, None, "GET")
        (model,) = found["models"]
        assert model["model"] == name and model["size"] > 0 and len(model["digest"]) == 64
    status, found = ask_json(server, "/api/show", {"model": "local"})
    assert status == 200 and set(found["capabilities"]) == {"completion", "tools", "thinking"}
    kind = found["model_info"]["general.architecture"]
    provider = server.generator.model_provider
    assert found["model_info"].get(f"{kind}.context_length") == provider.context
    status, found = ask_json(server, "/api/pull", {"model": "x"})
    assert status == 404 and isinstance(found["error"], str)


def test_the_root_tells_browsers_from_programs(server):
    for accept, kind, sign in (
        ("text/html,*/*", "text/html; charset=utf-8", b"<!"),
        ("*/*", "text/plain; charset=utf-8", b"Ollama"),
    ):
        connection = http.client.HTTPConnection(*server.address, timeout=30)
        connection.request("GET", "/", headers={"Accept": accept})
        response = connection.getresponse()
        assert response.getheader("Content-Type") == kind
        content = response.read()
        connection.close()
        assert content.startswith(sign)
    assert content == b"Ollama is running"
