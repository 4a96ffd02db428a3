"""Values given on the command line: read, and held against what makes sense.

argparse names Python types in its own complaints; these readers say what to give instead.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

LARGEST = 2**31 - 1
"""The largest count that is taken: what mlx holds in 32 bits."""
LARGEST_SEED = 2**64 - 1
QUANTIZED_BITS = (2, 3, 4, 5, 6, 8)
"""What mlx packs weights and caches into."""
GROUP_SIZES = (32, 64, 128)
"""How many of them share a scale."""


def whole_number(text: str) -> int:
    """For ``type=`` of a flag: the integer that ``text`` says."""
    try:
        return int(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from err


def number(text: str) -> float:
    """For ``type=`` of a flag: the number that ``text`` says."""
    try:
        return float(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from err


def use_plain_types(parser: argparse.ArgumentParser) -> None:
    """Let every flag of ``parser`` that takes a number complain in plain words."""
    readers = {int: whole_number, float: number}
    for action in parser._actions:
        if action.type in (int, float):
            action.type = readers[action.type]


@dataclass(frozen=True)
class Range:
    """What the flag of ``name`` (an attribute of the parsed arguments) may be.

    ``low`` and ``high`` are included; ``wanted`` says them in words.
    """

    name: str
    low: float
    high: float
    wanted: str

    def check(self, value: float) -> None:
        """Raise ValueError where ``value`` is outside, or no number at all."""
        if not self.low <= value <= self.high:
            raise ValueError(f"{flag_of(self.name)} is {value}: give {self.wanted}.")


def check_ranges(args: argparse.Namespace, ranges: Iterable[Range]) -> None:
    """Raise ValueError for the first value outside its range; flags not given pass."""
    given = vars(args)
    for wanted in ranges:
        if given.get(wanted.name) is not None:
            wanted.check(given[wanted.name])


def check_choice(name: str, value: Any, choices: tuple[int, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``, or None."""
    if value is not None and value not in choices:
        listed = f"{', '.join(map(str, choices[:-1]))} or {choices[-1]}"
        raise ValueError(f"{flag_of(name)} is {value}: give {listed}.")


def flag_of(name: str) -> str:
    """The flag behind an attribute: top_p -> --top-p"""
    return "--" + name.replace("_", "-")
