"""Calls of tools: grammars that write them as a model's own format has them.

How a parser of mlx-lm reads a value, by the schema of its argument, is not written here again:
the parser is tried on samples when a grammar is made.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from operator import index
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..structured import as_terminal, embedded, read_schema, spelled
from .tool_formats import (
    ALL,
    FORMATS,
    CallFormat,
    Schema,
    UnwritableCall,
    checked,
    format_of,
    readable,
    resolved,
    types_of,
)

OfferedTool = tuple[str, str, bool]
"""Name, schema of the arguments in JSON, and whether it is strict."""
Reader = Callable[[str], Any]
"""Parses a text in some place of a call."""
SAMPLES: dict[str, tuple[Any, ...]] = {
    "string": ("a b", "7", 'é\n"\\', "{b"),
    "integer": (7, -12),
    "number": (7, 0.5, -1.5e-07),
    "boolean": (True, False),
    "null": (None,),
    "array": ([], ["a", True, None, 0.5]),
    "object": ({}, {"a": {"b": [False]}}),
}
"""Sample values of each type, to test whether a parser reads them as JSON."""
BARE_WORDS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((" a", "\ta"), r"\s(?s:.*)"),
    (("a ", "a\n"), r"(?s:.*)\s"),
    (("null", "NULL", "None", "nil"), r"\s*(?i:null|none|nil)\s*"),
    (("None # a", "null # a"), r"\s*(?i:null|none|nil)\W(?s:.*)"),
    (("7", "-0.5", "1_0", "+1", ".5"), r"\s*[-+.]*\p{N}(?s:.*)"),
    (("nan", "-inf", "Infinity"), r"\s*[-+]?(?i:nan|inf|infinity)\s*"),
    (("true", "False", "yes", "off", "on", "no"), r"\s*(?i:true|false|yes|no|on|off)\s*"),
    (("True # a", "true # a"), r"\s*(?i:true|false)\W(?s:.*)"),
    (('{"a": 1}', "{1}"), r"\s*\{(?s:.*)"),
    (("[1]",), r"\s*\[(?s:.*)"),
    (("(1, 2)", "()"), r"\s*\((?s:.*)"),
    (('"a"', "'a'", "b'a'"), "\\s*[a-zA-Z]{0,2}[\"'](?s:.*)"),
    (("...",), r"\s*\.\.\.(?s:.*)"),
    (("set()",), r"\s*set\((?s:.*)"),
    (("<![CDATA[a]]>",), r"\s*<!\[CDATA\[(?s:.*)"),
    (("a\0b",), r"(?s:.*)\x00(?s:.*)"),
)
"""Texts that a parser may take for something else, with a pattern for all of their kind."""
UNHELD = frozenset({"not", "if", "dependentRequired", "dependentSchemas", "minProperties",
                    "maxProperties", "patternProperties", "prefixItems", "contains",
                    "uniqueItems"})  # fmt: skip
"""Keywords that our grammars cannot enforce for a value that is not written as JSON."""
OF_CHOICES = frozenset({"anyOf", "oneOf", "allOf"})
MOST_BRANCHES = 1000  # of all choices in the arrays and objects of a request's tools
DEFINITIONS = ("$defs", "definitions")
FREELY = "give tool_choice 'auto', and neither strict nor parallel_tool_calls false."


def write_calls(
    tools: Sequence[OfferedTool], tokenizer: TokenizerWrapper, calls_once: bool, has_text: bool
) -> list[str]:
    """Rules of a grammar in which ``calls`` is a call of one of ``tools``, or several.

    With ``has_text`` the calls have free text before them, and the rule ``text`` is such a text
    without calls. Raises ValueError if the format of the tokenizer's parser cannot express the
    schemas.
    """
    kind = format_of(tokenizer.tool_parser)
    if kind not in FORMATS:
        raise ValueError(
            "the calls of this model's tools have no format that an answer can be held to (those "
            f"that mlx-lm reads as {', '.join(sorted(FORMATS))} can be): {FREELY}"
        )
    if has_text and (tokenizer.structural_markers or tokenizer.response_transitions):
        raise ValueError(
            f"free text cannot stand before calls that are held to a schema in the format {kind}: "
            "give tool_choice 'required', or 'auto' without strict and parallel_tool_calls."
        )
    template = str(tokenizer.chat_template).replace("\\n", "\n")
    reason = ""
    for row in FORMATS[kind]:
        if row.seen in template or row.seen in tokenizer.get_vocab():
            try:
                return _Writer(row, tokenizer, tools).rules_of(calls_once, has_text)
            except UnwritableCall as err:
                reason = reason or str(err)
            except RecursionError as err:
                raise ValueError("the parameters of a tool are nested too deeply.") from err
            except (TypeError, AttributeError) as err:
                raise ValueError(
                    "the parameters of a tool are no JSON schema: some keyword has a value of the "
                    "wrong kind."
                ) from err
    raise ValueError(f"this model's format of calls ({kind}) cannot hold to {reason}: {FREELY}")


class _Writer:
    """Writes the rules of one format for the tools of one request."""

    def __init__(self, row: CallFormat, tokenizer: TokenizerWrapper, tools: Sequence[OfferedTool]):
        self.row = row
        self.tokenizer = tokenizer
        self._tools = [(name, read_schema(schema), strict) for name, schema, strict in tools]
        offered = [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema, _ in self._tools
        ]
        self._offered = readable(offered, tokenizer.tool_parser)
        self._parser = checked(tokenizer.tool_parser)
        self._rules: list[str] = []
        self._num_branches = 0

    def rules_of(self, calls_once: bool, has_text: bool) -> list[str]:
        names = [self._call(*tool) for tool in self._tools]
        self._rules.append("call: " + " | ".join(names))
        row = self.row
        start = spelled(self.tokenizer.tool_call_start, self.tokenizer)
        end = self._literal(self.tokenizer.tool_call_end or "")
        if has_text:
            opening = self._opening(start)
        else:
            name = " /[a-zA-Z0-9_.:-]{1,64}/ "
            opening = name.join(map(self._literal, row.lead.split("RECIPIENT"))) + f" {start}"
        if row.calls is None:
            more = "" if calls_once else f'("\\n"? {start} call {end})*'
            calls = f"{opening} call {end} {more}"
        else:
            more = "" if calls_once else f"({self._literal(row.calls)} call)*"
            before = self._literal(row.before)
            after = self._literal(row.after)
            calls = f"{opening} {before} call {more} {after} {end}"
        return [f"calls: {calls}", *self._rules]

    def _opening(self, start: str) -> str:
        """Return free text up to the first mark, which does not occur in it."""
        plain, rest = _split_plain(start)
        if not plain:
            self._rules += ["text: TEXT", "TEXT: /(?s:.+)/"]
            return f"TEXT? {start}"
        without = f"/(?s:.*)/ & ~(/(?s:.*)/ {plain} /(?s:.*)/)"
        self._rules += ["text: TEXT", f"TEXT: /(?s:.+)/ & {without}"]
        self._rules.append(f"OPENING: ({without}) {plain}")
        return f"OPENING {rest}"

    def _call(self, name: str, schema: Schema, strict: bool) -> str:
        self._root = schema
        self._strict = strict
        self._known: dict[tuple[str, str], str] = {}
        self._contents: dict[str, str] = {}
        self._types_known: dict[str, set[str]] = {}
        head, tail = self.row.call.replace("NAME", name).split("ARGUMENTS")
        before = " /[0-9]{1,3}/ ".join(self._literal(part) for part in head.split("INDEX"))
        if not isinstance(schema.get("properties") or {}, dict):
            raise TypeError("properties")
        argument = self.row.argument.replace("KEY", "a") or '{"a": VALUE}'
        samples = self._samples()
        if not any(self._read(name, argument.replace("VALUE", value)) for value in samples):
            raise UnwritableCall(f"the name of the tool {name!r}")
        if not self.row.argument:
            arguments = self._json(schema)
        else:
            arguments = self._arguments(schema, lambda text: self._read(name, text))
        return self._rule("call", f"{before} {arguments} {self._literal(tail)}")

    def _samples(self) -> list[str]:
        """Return texts of values, at least one of which has the type that a parser expects."""
        return ["7", *(spelling.replace("TEXT", "b") for spelling in self.row.strings)]

    def _read(self, name: str, arguments: str) -> Any:
        """Parse a call with these arguments; None if the result is not that call."""
        row = self.row
        call = row.call.replace("NAME", name).replace("INDEX", "0")
        text = f"{row.before}{call.replace('ARGUMENTS', arguments)}{row.after}"
        try:
            parsed = self._parser(text, self._offered)
        except ValueError:
            return None
        parsed = parsed[0] if isinstance(parsed, list) and len(parsed) == 1 else parsed
        is_right = isinstance(parsed, dict) and parsed["name"] == name
        return parsed["arguments"] if is_right else None

    def _arguments(self, schema: Schema, read: Reader) -> str:
        """Write the rule of all arguments, in the order of the schema's properties.

        ``read`` parses a text in their place.
        """
        schema = resolved(schema, self._root)
        self._check_keywords(schema, UNHELD | OF_CHOICES)
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        if not all(name in properties for name in required):
            raise UnwritableCall("required arguments that have no schema")
        if not required and read("") != {}:
            raise UnwritableCall("a call without arguments")
        between = self._literal(self.row.between)
        first = rest = '""'  # what may follow where nothing was written yet, and behind another
        for name, inner in reversed(properties.items()):
            argument = self._argument(name, inner, read)
            new_first = f"{argument} {rest}"
            new_rest = f"{between} {argument} {rest}"
            if name not in required:
                new_first = f"{new_first} | {first}"
                new_rest = f"{new_rest} | {rest}"
            first = self._rule("first", new_first)
            rest = self._rule("rest", new_rest)
        return self._rule("arguments", first)

    def _argument(self, name: str, schema: Schema, read: Reader) -> str:
        head, tail = self.row.argument.replace("KEY", name).split("VALUE")

        def read_value(text: str) -> Any:
            found = read(f"{head}{text}{tail}")
            return found[name] if isinstance(found, dict) and list(found) == [name] else None

        if all(read_value(sample) is None for sample in self._samples()):
            raise UnwritableCall(f"the argument {name!r}")
        try:
            value = self._value(schema, tail, read_value)
        except UnwritableCall as err:
            raise UnwritableCall(f"{err} in the argument {name!r}") from err
        return self._rule("argument", f"{self._literal(head)} {value}")

    def _value(self, schema: Schema | bool, tail: str, read: Reader) -> str:
        """Write the rule of a value followed by ``tail``, which ends it."""
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        key = json.dumps(schema), tail
        if key in self._known:
            return self._known[key]
        name = self._known[key] = f"value_{len(self._rules)}_{len(self._known)}"
        types = self._types(schema)
        left = set(types)  # to be written as JSON
        parts = []
        is_quoted = any(each != "TEXT" for each in self.row.strings)
        if "string" in types and (is_quoted or not _reads_json("string", read)):
            parts += self._strings(schema, tail, read)
            left -= {"string"}
        if self.row.nests:
            for each in types & {"array", "object"}:
                parts += self._nested(each, schema, tail, read)
            left -= {"array", "object"}
        unread = {each for each in left if not _reads_json(each, read)}
        if types == ALL:  # a schema that names none: what can be written
            left -= unread
        elif unread:
            raise UnwritableCall(f"a value of the type {min(unread)}")
        if left:
            narrowed = schema if left == types else {"allOf": [schema, {"type": sorted(left)}]}
            parts.append(f"{self._json(narrowed)} {self._literal(tail)}")
        if not parts:
            raise UnwritableCall("a schema that nothing satisfies")
        self._rules.append(f"{name}: " + " | ".join(parts))
        return name

    def _strings(self, schema: Schema, tail: str, read: Reader) -> list[str]:
        """List the alternatives for strings written without the quotes of JSON."""
        content = self._content(schema)
        found = []
        for spelling in self.row.strings:
            head, end = spelling.split("TEXT")
            if content is None or read(f"{head}a b{end}") != "a b":
                continue

            def is_read(text: str, head: str = head, end: str = end) -> bool:
                return bool(read(f"{head}{text}{end}") == text)

            marks = {self.row.call.partition("ARGUMENTS")[2], "}", *self.row.strings}
            marks |= {end, tail, *self.row.argument.partition("VALUE")[::2]}
            marks = {part.strip() for mark in marks for part in mark.split("TEXT")}
            marks = {mark for mark in marks if mark and not is_read(f"a{mark}b")}
            marks |= {self.tokenizer.tool_call_end or ""} - {""}
            words = [kind for samples, kind in BARE_WORDS if not all(map(is_read, samples))]
            without = [f"~(/(?s:.*)/ {_quoted(mark)} /(?s:.*)/)" for mark in sorted(marks)]
            without += [f"~/{kind}/" for kind in words]
            name = f"STRING_{len(self._rules)}"
            self._rules.append(f"{name}_TEXT: " + " & ".join([content, *without]))
            plain, rest = _split_plain(self._literal(end + tail))
            self._rules.append(f"{name}: {name}_TEXT {plain}")
            found.append(f"{self._literal(head)} {name} {rest}")
        if not found and content is not None:
            raise UnwritableCall("a value of the type string")
        return found

    def _content(self, schema: Schema | bool) -> str | None:
        """Write a terminal of the strings that satisfy ``schema``; None if there are none."""
        if isinstance(schema, bool):
            return "/(?s:.*)/" if schema else None
        if "string" not in self._types(schema):
            return None
        self._check_keywords(schema, UNHELD)
        parts: list[str | None] = []
        for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
            if values is not None:
                texts = [_quoted(value) for value in values if isinstance(value, str)]
                parts.append(f"({' | '.join(texts)})" if texts else None)
        if "pattern" in schema:
            parts.append(f"({as_terminal(schema['pattern'])})")
        if "minLength" in schema or "maxLength" in schema:
            fewest = index(schema.get("minLength", 0))
            most = schema.get("maxLength")
            parts.append(f"/(?s:.{{{fewest},{'' if most is None else index(most)}}})/")
        if "$ref" in schema:
            parts.append(self._content_behind(str(schema["$ref"])))
        for name in ("anyOf", "oneOf"):
            if name in schema:
                found = [text for each in schema[name] if (text := self._content(each))]
                if name == "oneOf" and len(found) > 1 and self._strict:
                    raise UnwritableCall("oneOf with several kinds of strings")
                parts.append(f"({' | '.join(found)})" if found else None)
        parts += [self._content(each) for each in schema.get("allOf", [])]
        if None in parts:
            return None
        return " & ".join(filter(None, parts)) or "/(?s:.*)/"

    def _content_behind(self, reference: str) -> str | None:
        """Name the terminal of the strings behind a reference; None if it leads back to itself."""
        if reference not in self._contents:
            self._contents[reference] = ""
            content = self._content(resolved({"$ref": reference}, self._root))
            if content is not None:
                name = f"CONTENT_{len(self._rules)}"
                self._rules.append(f"{name}: {content}")
                self._contents[reference] = name
        return self._contents[reference] or None

    def _nested(self, kind: str, schema: Schema, tail: str, read: Reader) -> list[str]:
        """List the alternatives for arrays or objects, written as the arguments are."""
        found = []
        for branch in self._branches(schema):
            if kind not in self._types(branch):
                continue
            if kind == "object" and branch.get("properties"):
                inner = self._arguments(branch, lambda text: read("{" + text + "}"))
                found.append(f'"{{" {inner} "}}" {self._literal(tail)}')
                continue
            self._check_keywords(branch, UNHELD)
            if kind == "object":
                inner = branch.get("additionalProperties", True)
                value = self._value({} if inner is True else inner, "", lambda text: _only(
                    read("{a:" + text + "}")))  # fmt: skip
                item = f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {value}'
                brackets = "{}"
            else:
                items = branch.get("items", {})
                item = self._value(items, "", lambda text: _only(read(f"[{text}]")))
                brackets = "[]"
            fewest = branch.get("minItems", 0)
            most = branch.get("maxItems")
            more = f'("," {item}){{{max(fewest - 1, 0)},{"" if most is None else most - 1}}}'
            more = "" if most == 1 else more
            several = "" if most == 0 else f"({item} {more})" + ("" if fewest else "?")
            found.append(f'"{brackets[0]}" {several} "{brackets[1]}" {self._literal(tail)}')
        return found

    def _branches(self, schema: Schema | bool) -> Iterator[Schema]:
        """Yield the schemas one of which a value satisfies, without references and choices."""
        if isinstance(schema, bool):
            yield from [{}] if schema else []
            return
        schema = resolved(schema, self._root)
        self._num_branches += 1
        if self._num_branches > MOST_BRANCHES:
            raise UnwritableCall("choices without an end")
        if "allOf" in schema:
            raise UnwritableCall("allOf")
        inner = [*schema.get("anyOf", []), *schema.get("oneOf", [])]
        others = {name: value for name, value in schema.items() if name not in ("anyOf", "oneOf")}
        for each in inner:
            for branch in self._branches(each):
                yield others | branch
        if not inner:
            yield schema

    def _types(self, schema: Schema | bool) -> set[str]:
        return types_of(schema, self._root, self._types_known)

    def _check_keywords(self, schema: Schema, unheld: frozenset[str]) -> None:
        if self._strict and (found := sorted(schema.keys() & unheld)):
            raise UnwritableCall(f"the keyword {found[0]!r}")

    def _json(self, schema: Schema) -> str:
        """Write the rule of a value in JSON; the schema of an argument gets its definitions."""
        shared = {}
        if self.row.argument and '"$ref"' in json.dumps(schema):
            shared = {name: self._root[name] for name in DEFINITIONS if name in self._root}
            for target in re.findall(r'"\$ref": "([^"]*)"', json.dumps(shared | dict(schema))):
                if not target.startswith(tuple(f"#/{name}/" for name in DEFINITIONS)):
                    raise UnwritableCall(f"the reference {target!r}")
        return self._rule("json", f"%json {embedded(shared | dict(schema), self._strict)}")

    def _rule(self, noun: str, body: str) -> str:
        name = f"{noun}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _literal(self, text: str) -> str:
        return spelled(text, self.tokenizer) if text else ""


def _reads_json(kind: str, read: Reader) -> bool:
    """Whether the parser reads values of this type as JSON does."""
    return all(
        json.dumps(read(json.dumps(value, ensure_ascii=False))) == json.dumps(value)
        for value in SAMPLES[kind]
    )


def _only(value: Any) -> Any:
    """Return the one value in an array or an object; None for anything else."""
    values = list(value.values()) if isinstance(value, dict) else value
    return values[0] if isinstance(values, list) and len(values) == 1 else None


def _split_plain(spelling: str) -> tuple[str, str]:
    """Split a spelling at its first special token: only the first part can be in a terminal."""
    plain, mark, rest = spelling.partition("<[")
    return plain.strip(), mark + rest


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
