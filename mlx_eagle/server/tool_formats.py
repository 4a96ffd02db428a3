"""Formats of tool calls, for the models that mlx-lm has parsers for.

A format is a row of texts. ``tool_calls.py`` makes grammars of them; ``readable`` prepares the
tools for a parser, so that it reads arguments in the types of their schemas.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]
PARSERS_FAIL = (
    ArithmeticError,  # a number too large
    AttributeError,
    LookupError,
    MemoryError,  # Python's own compiler, of texts that are nested too deeply
    RecursionError,
    SyntaxError,
    TypeError,
)
"""Errors besides ValueError that mlx-lm's parsers raise for texts that are no calls."""
ToolParser = Callable[[str, Any], Any]
"""Turns the text of a call, and the tools, into calls: one dict, or several in a list."""


class UnwritableCall(Exception):
    """Raised when a format cannot express a call."""


@dataclass(frozen=True)
class CallFormat:
    """Format of calls between a tokenizer's two marks.

    ``call`` has NAME, ARGUMENTS and perhaps INDEX, a number; ``argument`` KEY and VALUE, and none
    where the arguments are one JSON object. ``strings`` write a text bare, as TEXT, where JSON has
    quotes. ``calls`` stands between calls that share the marks, with ``before`` and ``after``
    around them all; None where each has its own. ``seen`` is in the chat templates that show this
    format, where a parser reads several; ``lead``, with the name of a RECIPIENT, comes first.
    With ``nests`` arrays and objects are written as the arguments are, else as JSON. A parser that
    ``goes_by_type`` reads a value as a string where the schema names no type, or several.
    """

    call: str
    argument: str = ""
    between: str = ""
    strings: tuple[str, ...] = ()
    calls: str | None = None
    before: str = ""
    after: str = ""
    seen: str = ""
    lead: str = ""
    nests: bool = False
    goes_by_type: bool = False


JSON_CALL = '{"name": "NAME", "arguments": ARGUMENTS}'
GLM = "<arg_key>KEY</arg_key>", "<arg_value>VALUE</arg_value>"
LONGCAT = "<longcat_arg_key>KEY</longcat_arg_key>", "<longcat_arg_value>VALUE</longcat_arg_value>"
BARE = ("TEXT",)
FORMATS: dict[str, tuple[CallFormat, ...]] = {
    "function_gemma": (
        CallFormat("call:NAME{ARGUMENTS}", "KEY:VALUE", ",", ("<escape>TEXT<escape>",)),
    ),
    "gemma4": (
        CallFormat("call:NAME{ARGUMENTS}", "KEY:VALUE", ",", ('<|"|>TEXT<|"|>',), nests=True),
    ),
    "glm47": (
        CallFormat(
            "NAME\nARGUMENTS", "\n".join([*GLM, ""]), "", BARE, seen="</arg_key>\n<arg_value>"
        ),
        CallFormat("NAMEARGUMENTS", "".join(GLM), "", BARE),
    ),
    "json_tools": (CallFormat(f"\n{JSON_CALL}\n"),),
    "kimi_k2": (
        CallFormat(
            "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS"
            "<|tool_call_end|>",
            calls="",
        ),
    ),
    "kimi_k3": (
        CallFormat(
            '<|open|>call tool="NAME" index="INDEX"<|sep|><|open|>json type="object"<|sep|>'
            "ARGUMENTS<|close|>json<|sep|><|close|>call<|sep|>",
            calls="",
        ),
    ),
    "longcat": (
        CallFormat("NAME\nARGUMENTS", "\n".join([*LONGCAT, ""]), "", BARE, seen="longcat_arg_key"),
        CallFormat(f"\n{JSON_CALL}\n"),
    ),
    "minicpm5": (
        CallFormat(
            '"NAME">ARGUMENTS',
            '<param name="KEY">VALUE</param>',
            strings=("TEXT", "<![CDATA[TEXT]]>"),
            goes_by_type=True,
        ),
    ),
    "minimax_m2": (
        CallFormat(
            '<invoke name="NAME">\nARGUMENTS</invoke>\n',
            '<parameter name="KEY">VALUE</parameter>\n',
            strings=BARE,
            calls="",
            before="\n",
            goes_by_type=True,
        ),
    ),
    "mistral": (
        CallFormat("NAME[ARGS]ARGUMENTS", seen="[ARGS]"),
        CallFormat(JSON_CALL, calls=", ", before=" [", after="]"),
    ),
    "muse_spark": (
        CallFormat(
            '<atem:invoke name="NAME">\nARGUMENTS</atem:invoke>\n',
            '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
            calls="",
            before="\n",
            lead="to=RECIPIENT<|message|>",
        ),
    ),
    "pythonic": (
        CallFormat("NAME(ARGUMENTS)", "KEY=VALUE", ", ", calls=", ", before="[", after="]"),
    ),
    "qwen3_coder": (
        CallFormat(
            "\n<function=NAME>\nARGUMENTS</function>\n",
            "<parameter=KEY>\nVALUE\n</parameter>\n",
            strings=BARE,
            goes_by_type=True,
        ),
    ),
}
FORMATS["laguna"] = FORMATS["glm47"]
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
         dict: "object"}  # fmt: skip
ALL = frozenset({*JSON_TYPES.values(), "null"})
MOST_REFERENCES = 20  # one behind the other, until a type is known


def readable(tools: Sequence[dict[str, Any]] | None, parser: Any) -> list[dict[str, Any]]:
    """Return the tools of a request as its parser needs them.

    If it goes by types, an argument whose values have one type, besides null, says so.
    """
    by_type = any(row.goes_by_type for row in FORMATS.get(format_of(parser), ()))
    found = []
    for tool in tools or []:
        function = tool.get("function")
        schema = function.get("parameters") if isinstance(function, dict) else None
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if by_type and isinstance(properties, dict):
            known: dict[str, set[str]] = {}
            typed = {name: _typed(each, schema, known) for name, each in properties.items()}
            tool = tool | {"function": function | {"parameters": schema | {"properties": typed}}}
        found.append(tool)
    return found


def checked(tool_parser: ToolParser) -> ToolParser:
    """Wrap a parser to raise only ValueError, for which mlx-lm drops the call.

    A call without arguments or a name would end the answer when it is formatted.
    """

    def parse(text: str, tools: Any) -> Any:
        try:
            parsed = tool_parser(text, tools)
        except PARSERS_FAIL as err:
            raise ValueError(f"the parser failed with {err!r}") from err
        for call in parsed if isinstance(parsed, list) else [parsed]:
            if not isinstance(call, dict) or not {"name", "arguments"} <= call.keys():
                raise ValueError("a call has no name or no arguments")
        return parsed

    return parse


def _typed(schema: Any, root: Schema, known: dict[str, set[str]]) -> Any:
    try:
        types = types_of(schema, root, known) - {"null"}
    except (UnwritableCall, TypeError, AttributeError, RecursionError):  # it cannot be read
        return schema
    types -= {"integer"} if "number" in types else set()
    if isinstance(schema, bool):
        return {}
    return schema | {"type": types.pop()} if len(types) == 1 else schema


def format_of(parser: Any) -> str:
    return str(getattr(parser, "__module__", "")).rpartition(".")[2]


def types_of(schema: Schema | bool, root: Schema, known: dict[str, set[str]]) -> set[str]:
    """Return the types of the values that may satisfy ``schema``, a part of ``root``.

    ``known`` holds the types of references, which may lead back to themselves: a type is allowed
    only if it is without following such a circle.
    """
    while True:
        before = dict(known)
        found = _types(schema, known)  # which adds the references in it
        for reference in [*known][::-1]:
            known[reference] = _types(_target(reference, root), known)
        if known == before:
            return found


def _types(schema: Schema | bool, known: dict[str, set[str]]) -> set[str]:
    if isinstance(schema, bool):
        return set(ALL) if schema else set()
    found = set(ALL)
    if "type" in schema:
        given = schema["type"]
        found &= {given} if isinstance(given, str) else set(given)
        found |= {"integer"} if "number" in found else set()
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if values is not None:
            found &= {JSON_TYPES.get(type(value), "null") for value in values}
    if "$ref" in schema:
        found &= known.setdefault(str(schema["$ref"]), set())
    for name in ("anyOf", "oneOf"):
        if name in schema:
            found &= set().union(*(_types(each, known) for each in schema[name]))
    for each in schema.get("allOf", []):
        found &= _types(each, known)
    return found


def _target(reference: str, root: Schema) -> Schema | bool:
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, dict) else None
    if not isinstance(found, dict | bool):
        raise UnwritableCall(f"the reference {reference!r}, which leads nowhere,")
    return found


def resolved(schema: Schema, root: Schema) -> Schema:
    """Resolve what ``schema`` refers to in ``root``, merged with its own keywords."""
    for _ in range(MOST_REFERENCES):
        if "$ref" not in schema:
            return schema
        target = _target(str(schema["$ref"]), root)
        target = target if isinstance(target, dict) else {} if target else {"enum": []}
        schema = target | {name: each for name, each in schema.items() if name != "$ref"}
    raise UnwritableCall("references that lead to each other")
