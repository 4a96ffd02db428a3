"""Fields of requests: known, meant by another name, refused, or ignored with a word in the log."""

import json
import re
import time

import pytest
from serving import ENDLESS, ask_json, ours

from mlx_eagle.server.body import NUMBERS, TYPES
from mlx_eagle.server.request_fields import KNOWN, MAPPED, REFUSED
from mlx_eagle.server.routes import ROUTES

USER = [{"role": "user", "content": "Hello"}]
BODIES = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 20},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 20},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 20},
    "/v1/messages": {"messages": USER, "max_tokens": 20},
}
NUMBER = {"type": "integer", "minimum": 10, "maximum": 99}


@pytest.fixture(scope="module")
def server(pair):
    flags = ("--model", pair["target"], "--num-draft-tokens", "0")
    template = (
        "{{ enable_thinking | default('') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with ours(*flags, "--chat-template", template) as asked:
        yield asked


def text_of(path: str, document: dict) -> str:
    if path == "/v1/responses":
        return document["output"][0]["content"][0]["text"]
    if path == "/v1/messages":
        return document["content"][0]["text"]
    choice = document["choices"][0]
    return choice["text"] if path == "/v1/completions" else choice["message"]["content"]


def logged(caplog, path: str) -> str:
    """The line of a request, which is written after its answer."""
    until = time.monotonic() + 20
    while not (lines := [each.message for each in caplog.records if path in each.message]):
        assert time.monotonic() < until
        time.sleep(0.01)
    (line,) = lines
    return line


FORMS = {
    "guided_regex": ("[a-c]{3}[0-9]", "[a-c]{3}[0-9]"),
    "guided_choice": (["Oslo", "a b"], "Oslo|a b"),
    "guided_json": (NUMBER, "[1-9][0-9]"),
    "json_schema": (json.dumps(NUMBER), "[1-9][0-9]"),
    "format": (NUMBER, "[1-9][0-9]"),
    "structured_outputs": ({"choice": ["x1"], "json": None}, "x1"),
    "grammar": ({"regex": "[xyz]{4}"}, "[xyz]{4}"),
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", FORMS)
def test_forms_by_the_names_of_other_servers(server, path, name):
    value, pattern = FORMS[name]
    status, document = ask_json(server, path, BODIES[path] | {name: value})
    assert status == 200, document
    assert re.fullmatch(pattern, text_of(path, document))


@pytest.mark.parametrize("path", BODIES)
def test_numbers_by_the_names_of_other_servers(server, path):
    def ask(**more) -> str:
        status, document = ask_json(server, path, BODIES[path] | {"logit_bias": ENDLESS} | more)
        assert status == 200, document
        return text_of(path, document)

    own = ask(repetition_penalty=1.9, repetition_context_size=5)
    assert ask(repeat_penalty=1.9, repeat_last_n=5) == own != ask()
    status, document = ask_json(
        server, path, BODIES[path] | {"repeat_penalty": 1.9, "repetition_penalty": 1.2}
    )
    assert status == 400 and "exclude each other" in document["error"]["message"]
    status, document = ask_json(server, path, BODIES[path] | {"repeat_penalty": "x"})
    assert status == 400 and "repetition_penalty is a string" in document["error"]["message"]


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/completions"])
@pytest.mark.parametrize("field, said", [
    ({"enable_thinking": False}, "False"), ({"think": False}, "False"), ({"think": True}, "True"),
    ({"think": "high"}, "True"),
])  # fmt: skip
def test_thinking_by_the_names_of_other_servers(server, path, field, said):
    status, document = ask_json(server, path, BODIES[path] | field)
    assert status == 200, document
    usage = document["usage"]
    size = usage.get("prompt_tokens") or usage["input_tokens"] + usage.get(
        "cache_read_input_tokens", 0
    )
    assert size == len("Hello" + said)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["typical_p", "min_tokens", "ignore_eos", "mirostat", "adapters",
                                  "guided_grammar", "suffix"])  # fmt: skip
def test_fields_that_would_change_the_answer_are_refused(server, path, name):
    status, document = ask_json(server, path, BODIES[path] | {name: 0.5})
    message = document["error"]["message"]
    assert (
        status == 400 and name in message and re.search("leave it out|start the server", message)
    )
    for neutral in REFUSED[name]:
        assert ask_json(server, path, BODIES[path] | {name: neutral})[0] == 200


@pytest.mark.parametrize("path", BODIES)
def test_hints_are_answered_and_logged(server, path, caplog):
    caplog.set_level("INFO")
    hints = {"verbosity": "low", "safety": 5, "metadata": {}}
    status, _ = ask_json(server, path, BODIES[path] | hints)
    line = logged(caplog, path)
    assert status == 200 and line.endswith(", ignored safety, verbosity")


def test_effort_where_the_template_knows_none(pair, caplog):
    caplog.set_level("INFO")
    with ours("--model", pair["target"], "--num-draft-tokens", "0") as asked:
        for path, more in (
            ("/v1/chat/completions", {"reasoning_effort": "low"}),
            ("/v1/responses", {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}),
        ):
            assert ask_json(asked, path, BODIES[path] | more)[0] == 200
    lines = [each.message for each in caplog.records if "reasoning_effort is ig" in each.message]
    assert len(lines) == 2


@pytest.mark.parametrize("path, kind", [
    ("/v1/chat/completions", "web_search"), ("/v1/responses", "web_search_preview"),
    ("/v1/messages", "web_search_20250305"),
])  # fmt: skip
def test_searches_of_the_web_are_no_tools_here(server, path, kind, caplog):
    caplog.set_level("INFO")
    tool = {"type": kind, "name": "web_search"}
    status, _ = ask_json(server, path, BODIES[path] | {"tools": [tool]})
    line = logged(caplog, path)
    assert status == 200 and line.endswith(f", ignored the tool {kind}")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_draft_model_that_is_not_served(server, path):
    status, document = ask_json(server, path, BODIES[path] | {"draft_model": "x"})
    assert status == 404 and "leave draft_model out" in document["error"]["message"]


WRONG = {
    "guided_choice": ([], "a list of texts"),
    "guided_json": ("{", "the schema is not JSON"),
    "structured_outputs": ({"json": {}, "regex": "a"}, "give one"),
    "think": (5, "think is something else"),
    "enable_thinking": (0, ""),
}


@pytest.mark.parametrize("name", [name for name in WRONG if WRONG[name][1]])
def test_values_that_are_wrong(server, name):
    value, sentence = WRONG[name]
    status, document = ask_json(
        server, "/v1/completions", BODIES["/v1/completions"] | {name: value}
    )
    assert status == 400 and sentence in document["error"]["message"]


def test_the_table_has_every_field_that_is_checked():
    checked = {*NUMBERS, *(name for names in TYPES.values() for name in names)}
    assert checked <= KNOWN["chat"] and checked <= KNOWN["text"]
    assert not MAPPED.keys() & REFUSED.keys()
    assert {*(route.fields for route in ROUTES.values()), "options"} == KNOWN.keys()
