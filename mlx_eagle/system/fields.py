"""Types of the fields of JSON objects, and whether an object has them."""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 2**31 - 1
LONGEST_SHOWN = 60
LONGEST_NAME = 256
LONGEST_FILE_NAME = 255  # bytes, on every file system that matters


@dataclass(frozen=True)
class FieldType:
    """A type of values: its name in words, and a test of a value."""

    words: str
    holds: Callable[[Any], bool]


Table = Mapping[str, "FieldType | Table"]
"""Types expected of some keys of an object; an inner table stands for an inner object."""


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: float) -> bool:
    """Whether a number is one to compute with: no NaN, and below 2**63."""
    return abs(value) < 2**63


def whole(low: int = 0, high: int = LARGEST) -> FieldType:
    words = f"a whole number from {low}" + ("" if high == LARGEST else f" to {high}")
    return FieldType(words, lambda v: is_whole(v) and low <= v <= high)


def number_above(low: float, high: float = math.inf) -> FieldType:
    words = f"a number above {low:g}" + ("" if high == math.inf else f" and at most {high:g}")
    return FieldType(words, lambda v: is_number(v) and low < v <= high and is_finite(v))


def list_of(each: FieldType, words: str) -> FieldType:
    return FieldType(
        f"a list of {words}", lambda v: isinstance(v, list | tuple) and all(map(each.holds, v))
    )


def one_of(*names: str) -> FieldType:
    return FieldType(f"one of {', '.join(names)}", lambda v: isinstance(v, str) and v in names)


COUNT = whole()
NUMBER = FieldType("a finite number", lambda v: is_number(v) and is_finite(v))
POSITIVE = number_above(0)
BOOL = FieldType("true or false", lambda v: isinstance(v, bool))
TEXT = FieldType("a string", lambda v: isinstance(v, str))
OBJECT = FieldType("an object", lambda v: isinstance(v, Mapping))
LIST = FieldType("a list", lambda v: isinstance(v, list))
INT_LIST = list_of(COUNT, "whole numbers from 0")
TEXTS = list_of(TEXT, "strings")
FILE_NAME = FieldType(
    "the name of a file in the same folder",
    lambda v: (
        isinstance(v, str)
        and v.isprintable()
        and 0 < len(v.encode()) <= LONGEST_FILE_NAME
        and not {"/", "\\"} & set(v)
        and v not in (".", "..")
    ),
)


def type_of(value: Any) -> str:
    """The JSON type of a value, in words."""
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names[type(value)]


def check_type(name: str, value: Any, wanted: type) -> Any:
    """The value, if it is of that kind; ValueError, which names it, if it is not."""
    if not isinstance(value, wanted):
        raise ValueError(f"{name} is {type_of(value)}: give {type_of(wanted())}.")
    return value


def shown(value: Any) -> str:
    """A value as a message shows it: on one line, cut if it is long.

    {"a": [1, 2]} -> {"a": [1, 2]};  "x" * 999 -> "xxx...;  nested too deeply to print -> its type
    """
    if isinstance(value, list | tuple | Mapping) and len(value) > LONGEST_SHOWN:
        noun = "object" if isinstance(value, Mapping) else "list"
        return f"{'an' if noun == 'object' else 'a'} {noun} of {len(value)} entries"
    if isinstance(value, str):
        value = value[: LONGEST_SHOWN + 1]
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a complaint, ": did you mean max_tokens?", or nothing where none is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f": did you mean {near[0]}?" if near else ""


def check_names(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError, as Python does, for the first keyword argument that is not known."""
    names = sorted(known)
    for name in given:
        if name not in names:
            near = suggestion(name, names)
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{near}")


def check(values: Mapping[str, Any], table: Table, where: str | Path, prefix: str = "") -> None:
    """Raise ValueError for the first value that is not what ``table`` expects; nulls pass."""
    for key, expected in table.items():
        value = values.get(key)
        if value is None:
            continue
        wanted = expected if isinstance(expected, FieldType) else OBJECT
        if not wanted.holds(value):
            raise ValueError(f"{where}: {prefix}{key} is {shown(value)}, expected {wanted.words}")
        if not isinstance(expected, FieldType):
            check(value, expected, where, f"{prefix}{key}.")
