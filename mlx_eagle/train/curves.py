"""Curves of a run: the figures of its ``training.csv`` in one picture, drawn with matplotlib."""

import csv
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..system.atomic_folder import new_file
from .log import CSV

PICTURE = "training.png"
CHARTS = {
    "loss": "Loss: all steps together, and each step k",
    "match": "Acceptance at depth k, on what is held out",
    "mean_acceptance_length": "Mean acceptance length (tau) of drafts of k tokens",
}
"""Titles of the charts, by the columns of the table that they show."""


def draw_curves(output: str | Path) -> Path:
    """Draw the table in the folder of a run, and return the path of the picture beside it.

    Raises ValueError if matplotlib is missing, or if there is no such table to read.
    """
    table = Path(output).expanduser() / CSV
    if not table.is_file():
        raise ValueError(f"{table.parent} has no {CSV}: name the --output of a training run.")
    if find_spec("matplotlib") is None:
        raise ValueError("curves of them need matplotlib: pip install 'mlx-eagle[plots]'.")
    from matplotlib import colormaps  # here: it takes a second, and may be missing
    from matplotlib.figure import Figure

    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        charts = {column: lines_of(rows, column) for column in CHARTS}
    except ValueError as err:
        raise ValueError(f"{table} cannot be read ({err}): it is not as the run left it.") from err
    figure = Figure(figsize=(8, 11), layout="constrained")
    figure.suptitle(f"Training of {table.parent.resolve().name}")
    all_axes = figure.subplots(len(charts))
    for axes, (column, lines) in zip(all_axes, charts.items(), strict=True):
        shades = colormaps["viridis"].resampled(len(lines) + 1)  # from dark to light by depth
        for number, (name, line) in enumerate(lines.items()):
            axes.plot(*line, ".-", color=shades(number), label=name)
        axes.set_title(CHARTS[column] if lines else f"{CHARTS[column]}: no figures")
        axes.set_xlabel("batches")
        axes.grid(alpha=0.3)
        if lines:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    with new_file(table.with_name(PICTURE)) as draft:
        figure.savefig(draft, dpi=144)
    return table.with_name(PICTURE)


def lines_of(
    rows: Sequence[Mapping[str, str]], what: str
) -> dict[str, tuple[list[int], list[float]]]:
    """Take columns ``what`` and ``what_1``, ``what_2`` ... of a table, without empty ones.

    [{"iteration": "5", "loss": "2", "loss_1": "1.5", "match_1": ""}], "loss" ->
    {"all": ([5], [2.0]), "k = 1": ([5], [1.5])}
    """
    lines = {}
    for column in rows[0] if rows else ():
        stem, _, depth = column.rpartition("_")
        if column != what and not (stem == what and depth.isdecimal()):
            continue
        found = [(int(row["iteration"]), float(row[column])) for row in rows if row[column]]
        if found:
            batches, figures = zip(*found, strict=True)
            name = "all" if column == what else f"k = {depth}"
            lines[name] = (list(batches), list(figures))
    return lines
