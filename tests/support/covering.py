"""Covering arrays: few rows of a table in which each combination of a few values is tried."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def covering(
    axes: Mapping[str, Sequence[Any]],
    strength: int,
    allowed: Callable[[Row], bool] = lambda row: True,
    start: Sequence[Row] = (),
) -> list[Row]:
    """Rows in which each ``strength`` values of different axes stand together at least once.

    But for those that no ``allowed`` row holds. ``allowed`` is asked of unfinished rows too, and
    must not turn back to True as a row grows. What the rows of ``start`` hold is not wanted again.
    Greedy, and the same every time: each row begins with the first combination that is missing,
    and takes of each further axis the value that brings most of the others.
    """
    names = list(axes)
    wanted = {
        tuple(zip(chosen, values, strict=True)): None
        for chosen in combinations(names, strength)
        for values in product(*(axes[name] for name in chosen))
    }

    def held(row: Row) -> list[tuple]:
        return list(combinations([(name, row[name]) for name in names if name in row], strength))

    def finished(row: Row) -> Row | None:
        name = next((name for name in names if name not in row), None)
        if name is None:
            return row
        choices = [row | {name: value} for value in axes[name]]
        choices = [choice for choice in choices if allowed(choice)]
        choices.sort(key=lambda choice: -sum(part in wanted for part in held(choice)))
        return next(filter(None, map(finished, choices)), None)

    def strike(row: Row) -> None:
        for part in held(row):
            wanted.pop(part, None)

    for row in start:
        strike(row)
    rows = []
    while wanted:
        missing = next(iter(wanted))
        row = finished(dict(missing)) if allowed(dict(missing)) else None
        wanted.pop(missing)
        if row is not None:
            strike(row)
            rows.append({name: row[name] for name in names})
    return rows
