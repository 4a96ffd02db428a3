"""Grammars of requests, from ``response_format``, tools and ``grammar``.

A checked body is read into a ``Constraint``, a few texts. A grammar is made of it for the
tokenizer that is served, and kept for the next request with the same constraint.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..structured import Grammar, JSONSchema, Lark, Regex, Rules, embedded, read_schema
from ..system.fields import check_type
from .tool_calls import OfferedTool, write_calls

KEPT = 16  # grammars: an agent asks for a few forms again and again
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Constraint:
    """Constraint on an answer, in texts: equal ones can be recognised.

    ``schema`` is a JSON schema, ``grammar`` the syntax ("regex" or "lark") and the text of the
    field ``grammar``.
    """

    schema: str | None = None
    is_strict: bool = False
    grammar: tuple[str, str] | None = None
    tools: tuple[OfferedTool, ...] = ()
    must_call: bool = False
    calls_once: bool = False


def read_constraint(body: Mapping[str, Any]) -> Constraint | None:
    """Read the constraint that a request asks for; None if the text is free. Raises ValueError."""
    schema, is_strict = _schema(
        check_type("response_format", body.get("response_format") or {}, dict)
    )
    grammar = _grammar(check_type("grammar", body.get("grammar") or {}, dict))
    if schema is not None and grammar is not None:
        raise ValueError("response_format and grammar exclude each other: give one of them.")
    tools, must_call = _tools(body.get("tools") or [], body.get("tool_choice", "auto"))
    is_named = isinstance(body.get("tool_choice"), dict)  # then it is asked for once, as by OpenAI
    calls_once = is_named or body.get("parallel_tool_calls", True) is False
    if grammar is not None and must_call:
        raise ValueError("grammar and a forced tool_choice exclude each other: give one of them.")
    is_constrained = must_call or calls_once or any(strict for _, _, strict in tools)
    if schema is None and grammar is None and not (tools and is_constrained):
        return None
    return Constraint(schema, is_strict, grammar, tools, must_call, calls_once)


def _schema(response_format: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Read the schema of a ``response_format``, and whether it is strict."""
    match response_format.get("type", "text"):
        case "text":
            return None, False
        case "json_object":
            return json.dumps(ANY_OBJECT), True
        case "json_schema":
            inner = response_format.get("json_schema")
            if isinstance(inner, dict) and isinstance(inner.get("schema"), dict):
                return json.dumps(inner["schema"]), inner.get("strict") is True
            raise ValueError(
                "response_format has no json_schema with a schema, which are objects: give "
                '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.'
            )
    raise ValueError("response_format has an unknown type: give text, json_object or json_schema.")


def _grammar(field: Mapping[str, Any]) -> tuple[str, str] | None:
    if not field:
        return None
    syntaxes = [syntax for syntax in ("regex", "lark") if isinstance(field.get(syntax), str)]
    if len(syntaxes) != 1 or len(field) != 1:
        raise ValueError('grammar is neither {"regex": "..."} nor {"lark": "..."}.')
    return syntaxes[0], field[syntaxes[0]]


def _tools(tools: Sequence[Any], choice: Any) -> tuple[tuple[OfferedTool, ...], bool]:
    """Read the tools that may be called, and whether one of them must be."""
    found = []
    for tool in tools:
        function = check_type("a tool's function", tool.get("function") or {}, dict)
        parameters = json.dumps(function.get("parameters") or ANY_OBJECT)
        found.append((str(function.get("name")), parameters, function.get("strict") is True))
    if choice in ("auto", "none"):
        return (() if choice == "none" else tuple(found)), False
    named = choice.get("function") if isinstance(choice, dict) else None
    if choice != "required" and not isinstance(named, dict):
        raise ValueError(
            "tool_choice is unknown: give 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": ...}}.'
        )
    if isinstance(named, dict):
        found = [tool for tool in found if tool[0] == named.get("name")]
    if not found:
        raise ValueError("tool_choice forces a call, but the tool is not among tools.")
    return tuple(found), True


@lru_cache(KEPT)
def make_grammar(constraint: Constraint, tokenizer: TokenizerWrapper) -> Grammar:
    """Make the grammar that enforces ``constraint``. Raises ValueError if it is not possible."""
    if constraint.grammar is not None:
        syntax, text = constraint.grammar
        return (Regex if syntax == "regex" else Lark)(text, tokenizer)
    if constraint.schema is not None and not constraint.tools:
        return JSONSchema(constraint.schema, tokenizer, strict=constraint.is_strict)
    # Calls in the format that mlx-lm reads, and what may be said instead.
    has_text = constraint.schema is None and not constraint.must_call
    rules = write_calls(constraint.tools, tokenizer, constraint.calls_once, has_text)
    if constraint.must_call:
        start = ["start: calls"]
    elif constraint.schema is not None:
        schema = embedded(read_schema(constraint.schema), constraint.is_strict)
        start = ["start: said | calls", f"said: %json {schema}"]
    else:
        start = ["start: text? | calls"]
    return Rules("\n".join([*start, *rules]), tokenizer)
