"""Figures of several measured values, and their form in texts and tables."""

from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A pipe table; each row is one line, and bars inside cells are escaped."""

    def line(cells: Sequence[str]) -> str:
        shown = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(shown)} |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


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


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number with ``digits`` after the point; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def milliseconds(seconds: float | None, digits: int = 1) -> str:
    """Seconds as milliseconds; "-" for None."""
    return number(None if seconds is None else 1e3 * seconds, digits)
