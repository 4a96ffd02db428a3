"""Answers held to a form: response_format, forced calls of tools, the field grammar."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pydantic
import pytest
from automaton import TEMPLATE, write_automaton
from schemas import SCHEMAS, record
from serving import ours
from test_server_fairness import post

from mlx_eagle import structured
from mlx_eagle.server import body

SCRIPTS = {
    "!": ["Hel", "lo ", "there."],
    "@": ["Let me ", "look. ", "<tool_call>", '{"name"', ': "get', "</tool_call>"],
    "~": ["<think>", "Hmm, ", "better ", "count.", "</think>", "It is ", "seven."],
}
PLACE = record(city={"enum": ["Paris", "Rome"]}, days={"type": "integer", "maximum": 20})
SCHEMA = PLACE | {"properties": PLACE["properties"] | {"days": {"$ref": "#/$defs/n"}},
                  "$defs": {"n": {"enum": [1, 2, 3]}}}  # fmt: skip


def tool(name: str, **more) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


TOOLS = [tool("get_weather"), tool("get_time")]


def form_of(schema: dict, strict: bool = True) -> dict:
    inner = {"name": "answer", "schema": schema, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("automata")
    target = write_automaton(folder / "target", SCRIPTS)
    draft = write_automaton(folder / "draft", SCRIPTS, mistakes=4)
    with ours("--model", target, "--draft-model", draft, "--max-tokens", "200") as asked:
        yield asked


def ask(server, trigger: str = "!", **fields):
    fields = {"max_tokens": 200} | fields
    return server.complete(messages=[{"role": "user", "content": trigger}], **fields).choices[0]


def check(value) -> None:
    assert list(value) == ["city", "days"]
    assert value["city"] in ("Paris", "Rome") and value["days"] in (1, 2, 3)


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
def test_a_schema_with_and_without_drafts(server, more):
    found = [
        ask(server, num_draft_tokens=k, **form_of(SCHEMA), **more).message.content
        for k in (0, 1, 4)
    ]
    check(json.loads(found[0]))
    assert len(set(found)) == 1


def test_several_clients_with_forms_of_their_own(server):
    names = ["enum", "union of types", "boolean", "const"]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda name: ask(server, **form_of(SCHEMAS[name])), names))
    for name, choice in zip(names, together, strict=True):
        json.loads(choice.message.content)
        alone = ask(server, num_draft_tokens=0, **form_of(SCHEMAS[name]))
        assert choice.message.content == alone.message.content


def test_a_stream(server):
    messages = [{"role": "user", "content": "!"}]
    chunks = server.complete(messages=messages, max_tokens=200, stream=True, **form_of(SCHEMA))
    check(json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks)))


def test_any_object(server):
    choice = ask(server, response_format={"type": "json_object"}, max_tokens=20)
    assert choice.message.content.startswith(('{"', "{}"))


def test_thoughts_come_before_the_form(server):
    choice = ask(server, "~", **form_of(SCHEMA))
    assert choice.message.reasoning == "Hmm, better count."
    check(json.loads(choice.message.content))


def test_a_grammar(server):
    choice = ask(server, grammar={"regex": "(ab|cd){3}"})
    assert re.fullmatch("(ab|cd){3}", choice.message.content) and choice.finish_reason == "stop"
    choice = ask(server, grammar={"lark": 'start: "x" ("y" | "z")'})
    assert choice.message.content in ("xy", "xz")
    several = server.complete(
        messages=[{"role": "user", "content": "!"}], n=3, grammar={"regex": "[ab]{6}"},
        temperature=1.0, max_tokens=99,
    ).choices  # fmt: skip
    assert all(re.fullmatch("[ab]{6}", choice.message.content) for choice in several)


CHOICES = {
    "required": (
        {"tool_choice": "required", "parallel_tool_calls": False},
        ["get_weather", "get_time"],
    ),
    "named": (
        {"tool_choice": {"type": "function", "function": {"name": "get_time"}}},
        ["get_time"],
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_forced_calls(server, name):
    fields, names = CHOICES[name]
    found = []
    for k in (0, 3):
        choice = ask(server, tools=TOOLS, num_draft_tokens=k, **fields)
        (call,) = choice.message.tool_calls  # a named tool is called once in any case
        assert choice.finish_reason == "tool_calls" and call.function.name in names
        check(json.loads(call.function.arguments))
        found.append((call.function.name, call.function.arguments))
    assert found[0] == found[1]


@pytest.mark.exhaustive
def test_forced_calls_in_a_format_that_is_not_json(tmp_path):
    """The argument of a referred type is read as one: to the parser itself it would be a text."""
    template = TEMPLATE.replace("<tool_call>", "<tool_call>\n<function=")
    target = write_automaton(tmp_path / "target", SCRIPTS, template=template)
    draft = write_automaton(tmp_path / "draft", SCRIPTS, mistakes=4, template=template)
    with ours("--model", target, "--draft-model", draft, "--max-tokens", "200") as asked:
        found = []
        for k in (0, 3):
            fields = {"tool_choice": "required", "parallel_tool_calls": False}
            choice = ask(asked, tools=TOOLS, num_draft_tokens=k, **fields)
            (call,) = choice.message.tool_calls
            check(json.loads(call.function.arguments))
            found.append((call.function.name, call.function.arguments))
        assert found[0] == found[1]


def test_a_form_is_read_once(server, monkeypatch):
    num_read, read = 0, body.read_constraint

    def counting(fields):
        nonlocal num_read
        num_read += 1
        return read(fields)

    monkeypatch.setattr(body, "read_constraint", counting)
    ask(server, max_tokens=1, **form_of(SCHEMA))
    assert num_read == 1


def test_free_text_and_one_call_at_most(server):
    choice = ask(server, "@", tools=TOOLS, parallel_tool_calls=False)
    assert choice.message.content == "Let me look. "
    (call,) = choice.message.tool_calls
    check(json.loads(call.function.arguments))
    choice = ask(server, "@", tools=[tool("get_time", strict=True)])
    assert all(check(json.loads(c.function.arguments)) is None for c in choice.message.tool_calls)
    choice = ask(server, "!", tools=TOOLS, parallel_tool_calls=False)
    assert choice.message.content.startswith("Hello there.")


def test_a_cut_answer_says_so(server):
    choice = ask(server, max_tokens=12, **form_of(SCHEMA))
    assert choice.finish_reason == "length" and '{"city": "Paris"'.startswith(
        choice.message.content
    )


BAD = {
    "a type": (form_of({"type": "colour"}), "Invalid type: colour"),
    "a keyword": (form_of({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "nothing": (form_of({"$ref": "#"}), "nothing satisfies it"),
    "a bomb": (form_of({"enum": list(range(9000))}), "values: give at most 4000"),
    "combined": (form_of({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"type": "null"}}}
                          for j in range(2)]} for i in range(16)]}), "schema too large"),
    "recursion": (form_of({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
                  "nothing satisfies it"),
    "a bomb in a tool": ({"tools": [tool("f") | {"function": {"name": "f", "parameters": {
                         "enum": list(range(9000))}}}], "tool_choice": "required"},
                         "values: give at most 4000"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "has no json_schema with"),
    "an expression": ({"grammar": {"regex": "("}}, "unclosed group"),
    "no grammar": ({"grammar": {"gbnf": "root"}}, "grammar is neither"),
    "grammar as text": ({"grammar": "x"}, "grammar is a string: give an object"),
    "two": (form_of({}) | {"grammar": {"regex": "a"}}, "exclude each other"),
    "no such tool": ({"tools": TOOLS, "tool_choice": {"type": "function", "function":
                     {"name": "f"}}}, "is not among tools"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_form_of_no_use_is_refused(server, name):
    fields, sentence = BAD[name]
    asked = {"messages": [{"role": "user", "content": "!"}], **fields}
    status, document = post(server, asked, "/v1/chat/completions")
    said = document["error"]["message"]
    assert status == 400 and sentence in said and "\n" not in said


def test_without_the_extra(server, monkeypatch):
    monkeypatch.setattr(structured, "LLMatcher", None)
    with pytest.raises(openai.BadRequestError, match="pip install 'mlx-eagle"):
        ask(server, **form_of({"type": "string", "maxLength": 3}))


def test_openais_client_parses(server):
    class Place(pydantic.BaseModel):
        city: Literal["Paris", "Rome"]
        days: int = pydantic.Field(ge=1, le=3)

    parsed = server.client.chat.completions.parse(
        model="x", messages=[{"role": "user", "content": "!"}], response_format=Place
    )
    check(parsed.choices[0].message.parsed.model_dump())


@pytest.mark.exhaustive
def test_a_slow_grammar_ends_its_own_request_alone(server, monkeypatch):
    monkeypatch.setattr(structured, "SLOW_MASK", 0.001)
    monkeypatch.setattr(structured, "MOST_SLOW", 0.05)
    free = {"grammar": {"regex": "[a-z]{60}"}}
    slow = {"grammar": {"lark": 'start: /[a-c]{3}/ "' + "x" * 40_000 + '"'}}
    alone = ask(server, **free).message.content
    with ThreadPoolExecutor(2) as pool:
        good, bad = pool.submit(ask, server, **free), pool.submit(ask, server, **slow)
        with pytest.raises(openai.BadRequestError, match="takes too long to check"):
            bad.result()
        assert good.result().message.content == alone
