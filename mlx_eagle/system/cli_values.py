"""Command lines: a mistake costs one sentence, values are checked, ``--version`` is the same.

argparse prints all flags for a wrong one, and names Python types in its complaints.
"""

import argparse
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.metadata import version
from itertools import takewhile
from typing import Any, NoReturn, get_args, get_type_hints

from .. import __version__
from .fields import suggestion

LARGEST = 2**31 - 1
"""The largest count that is taken: what mlx holds in 32 bits."""
LARGEST_SEED = 2**64 - 1
QUANTIZED_BITS = (2, 3, 4, 5, 6, 8)
"""Bits per number into which mlx packs weights and caches."""
GROUP_SIZES = (32, 64, 128)
"""Numbers that share a scale."""


def read_number(make: type, text: str) -> Any:
    """For ``type=`` of a flag, with the kind bound: the int or the float that ``text`` says."""
    try:
        return make(text)
    except ValueError as err:
        what = "a whole number" if make is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from err


READERS: dict[Any, Any] = {make: partial(read_number, make) for make in (int, float)}


def layer_numbers(text: str) -> tuple[int, ...]:
    """For ``type=`` of a flag: "2,16,29" -> (2, 16, 29)"""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of layers: give numbers from 0 on with commas, as in 2,16,29"
        )
    return tuple(map(int, words))


class Parser(argparse.ArgumentParser):
    """argparse's parser with complaints of one sentence that suggest what was meant."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        flags = [flag for action in self._actions for flag in action.option_strings]
        takers = [action for action in self._actions if action.nargs == argparse.REMAINDER]
        last = {flag for action in takers for flag in action.option_strings}  # the rest is theirs
        for word in takewhile(lambda word: word not in last, given):
            # Before argparse misses what was meant by it.
            name = word.partition("=")[0]
            if name.startswith("--") and not any(flag.startswith(name) for flag in flags):
                self.error(_no_flag(name, flags))
        found, unknown = self.parse_known_args(given, namespace)
        if unknown:
            word = unknown[0]
            self.error(_no_flag(word, flags) if word[0] == "-" else _stray(word, given, flags))
        return found

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = suggestion(str(value), known) or f": give {_listed(known)}"
            raise argparse.ArgumentError(action, f"there is no {value!r}{near}")

    def error(self, message: str) -> NoReturn:
        sentence = " ".join(message.removeprefix("argument ").split()).rstrip(".")
        end = "" if sentence.endswith("?") else "."
        self.exit(2, f"error: {sentence}{end} More: {self.prog} --help\n")


def _listed(values: Iterable[Any]) -> str:
    """Words for a choice: "2, 3 or 4"."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def _no_flag(name: str, flags: list[str]) -> str:
    """The complaint about a flag that does not exist."""
    return f"there is no flag {name}{suggestion(name, flags)}"


def _stray(word: str, given: list[str], flags: list[str]) -> str:
    """The complaint about a word that belongs to no flag: quotes are probably missing."""
    end = given.index(word)
    begin = max((i for i, each in enumerate(given[:end]) if each in flags), default=end)
    if begin == end:
        return f"{word!r} belongs to no flag"
    rest = (i for i, each in enumerate(given) if i > end and each.startswith("-"))
    value = shlex.quote(" ".join(given[begin + 1 : next(rest, len(given))]))
    what = "the prompt" if given[begin] in ("-p", "--prompt") else "a value of several words"
    return f"{word!r} belongs to no flag: quote {what}, {given[begin]} {value}"


def use_plain_words(parser: argparse.ArgumentParser) -> None:
    """Let any parser, such as mlx-lm's, complain as ``Parser`` does; also about numbers."""
    parser.__class__ = Parser
    for action in parser._actions:
        action.type = READERS.get(action.type, action.type)


def group_flags(parser: argparse.ArgumentParser, groups: Mapping[str, Collection[str]]) -> None:
    """Let ``--help`` show flags in groups: titles, and the attributes of the flags below them.

    Flags of no group stay in front. The usage is one line: the groups say the same.
    """
    parser.usage = "%(prog)s [flags]"
    for title, names in groups.items():
        found = [action for action in parser._optionals._group_actions if action.dest in names]
        if found:
            group = parser.add_argument_group(title)
        for action in found:
            parser._optionals._group_actions.remove(action)
            group._group_actions.append(action)


@dataclass(frozen=True)
class Range:
    """Values that the flag of ``name`` (an attribute of the parsed arguments) may have.

    ``low`` and ``high`` are included; ``wanted`` puts them into words.
    """

    name: str
    low: float
    high: float
    wanted: str

    def check(self, value: float) -> None:
        """Raise ValueError where ``value`` is outside, or no number at all."""
        if isinstance(value, str):
            raise ValueError(f"{flag_of(self.name)} is {value!r}: give a number.")
        if not self.low <= value <= self.high:
            raise ValueError(f"{flag_of(self.name)} is {value}: give {self.wanted}.")


def check_ranges(args: object, ranges: Iterable[Range]) -> None:
    """Raise ValueError for the first value outside its range; flags not given pass."""
    given = vars(args)
    for wanted in ranges:
        if given.get(wanted.name) is not None:
            wanted.check(given[wanted.name])


def check_choice(name: str, value: Any, choices: tuple[int, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``, or None."""
    if value is not None and value not in choices:
        raise ValueError(f"{flag_of(name)} is {value}: give {_listed(choices)}.")


def setting(text: str, default: Any = None, *, least: int | None = None, **options: Any) -> Any:
    """A field of a dataclass whose fields are flags, with its help text.

    ``options``: ``type``, ``choices`` and ``metavar`` are argparse's, ``aliases`` other flags,
    ``range`` all of a ``Range`` but its name; ``least`` is the smallest whole number.
    """
    if least is not None:
        options["range"] = (least, LARGEST, f"{least} or more")
    return field(default=default, metadata={"help": text, **options})


def add_flags(parser: argparse.ArgumentParser, settings: type) -> None:
    """Add a flag for each field of ``settings``; none has a default of its own."""
    hints = get_type_hints(settings)
    for each in fields(settings):
        kind = (*get_args(hints[each.name]), hints[each.name])[0]
        is_switch = kind is bool
        how: Any = {"action": argparse.BooleanOptionalAction} if is_switch else {"type": kind}
        how |= {k: v for k, v in each.metadata.items() if k in ("type", "choices", "metavar")}
        text = each.metadata["help"]
        if isinstance(each.default, int | float | str) and not is_switch:
            text = f"{text.removesuffix('.')} (default {each.default})."
        names = (flag_of(each.name), *each.metadata.get("aliases", ()))
        parser.add_argument(*names, default=None, help=text, **how)


def check_values(settings: Any) -> None:
    """Raise ValueError for the first field outside its range, or that is none of its choices."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if value is not None and "range" in each.metadata:
            Range(each.name, *each.metadata["range"]).check(value)
        if "choices" in each.metadata:
            check_choice(each.name, value, each.metadata["choices"])


def flag_of(name: str) -> str:
    """The flag behind an attribute: top_p -> --top-p"""
    return "--" + name.replace("_", "-")


def add_version_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--version``: our version, and those of mlx and mlx-lm."""
    parser.add_argument("--version", action="version", version=f"%(prog)s {versions()}")


def versions() -> str:
    """Our version, then MLX's and mlx-lm's: "0.2.0 (mlx 0.32.4, mlx-lm 0.32.2)"."""
    return f"{__version__} (mlx {version('mlx')}, mlx-lm {version('mlx-lm')})"
