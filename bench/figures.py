"""Figures of measured rows: each with its name in JSON, its heading and its form in tables.

A tuple of figures describes a row once: ``row_of`` computes what goes into the results, and
``table`` prints the same row in the report.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Figure:
    """A figure of a row.

    ``name`` is that in the results, "" if several others are shown together; ``heading`` that of
    its column, "" if it is not shown. ``show`` puts the value into words, or the whole row if
    there is no name. ``of`` computes the value from what was measured.
    """

    name: str
    heading: str = ""
    show: Callable[[Any], str] = str
    of: Callable[[Any], Any] | None = None


Figures = Sequence[Figure]


def row_of(figures: Figures, measured: Any) -> dict[str, Any]:
    """The values of all figures that are computed, ready for JSON."""
    return {each.name: each.of(measured) for each in figures if each.of is not None}


def table(figures: Figures, rows: Iterable[Mapping[str, Any]], heading: str = "") -> str:
    """A table of the figures that have headings, below a ``heading``; nothing without rows."""
    shown = [figure for figure in figures if figure.heading]
    cells = [[each.show(row[each.name] if each.name else row) for each in shown] for row in rows]
    drawn = markdown_table([figure.heading for figure in shown], cells)
    return f"{heading}\n\n{drawn}".strip() if cells else ""


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A pipe table; each row is one line, and bars inside cells are escaped."""

    def line(cells: Sequence[str]) -> str:
        shown = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(shown)} |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


def joined(blocks: Iterable[str]) -> str:
    """Headings, paragraphs and tables below each other; empty ones are left out."""
    return "\n\n".join(filter(None, blocks)) + "\n"


def ratio(part: float | None, whole: float | None) -> float | None:
    """``part`` over ``whole``; None if either is missing or ``whole`` is 0."""
    return part / whole if part is not None and whole else None


def median_of(values: Iterable[float | None]) -> float | None:
    """Median of the values that are not None; None without any."""
    present = [value for value in values if value is not None]
    return median(present) if present else None


def spread_of(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median, quartiles and extremes of the values that are not None; None without any."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    found = np.percentile(present, [50, 25, 75, 0, 100]).tolist()
    return dict(zip(("median", "q1", "q3", "min", "max"), found, strict=True), n=len(present))


def number(value: float | None, digits: int = 2, unit: str = "", factor: float = 1.0) -> str:
    """A number with ``digits`` after the point; "-" for None."""
    return "-" if value is None else f"{factor * value:.{digits}f}{unit}"


number3 = partial(number, digits=3)
times = partial(number, unit="x")  # "1.25x", of a ratio
milliseconds = partial(number, digits=1, factor=1e3)  # of seconds


def numbers(values: Sequence[float]) -> str:
    """Several numbers: "0.71 0.55"; "-" for none."""
    return " ".join(map(number, values)) or "-"


def with_spread(spread: Mapping[str, float] | None, middle: float | None = None) -> str:
    """ "5.10 [4.90-5.30]": the median, or ``middle`` in its place, and the quartiles."""
    if spread is None:
        return "-"
    middle = spread["median"] if middle is None else middle
    return f"{number(middle)} [{number(spread['q1'])}-{number(spread['q3'])}]"
