"""The page of a run: its loss and its acceptance over the batches, drawn from its table."""

import csv
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..system.drawing import BLUE, EXTRA, STYLE, has_matplotlib
from ..system.render import Block, Heading, Image, Paragraph, Table, html_page

CSV, PAGE = "training.csv", "training.html"
CAPTIONS = {
    "loss": "Loss over the batches: all steps of the training-time test together, and each.",
    "match": "How often the draft at each depth is the text's own token, on what is held out.",
    "length": "Mean acceptance length that drafts of k tokens would have, on what is held out.",
}

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Lines by their names: numbers of batches, and what stands at each."""


def write_page(output: str | Path) -> Path:
    """Draw ``training.csv`` in the folder of a run; the page, one HTML file beside it.

    Raises ValueError where matplotlib is missing, or there is no such table to read.
    """
    folder = Path(output).expanduser()
    if not has_matplotlib():
        raise ValueError(f"{PAGE} needs matplotlib: {EXTRA}.")
    table = folder / CSV
    if not table.is_file():
        raise ValueError(f"{folder} has no {CSV}: name the --output of a training run.")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    curves = {
        "loss": lines_of(rows, "loss"),
        "match": lines_of(rows, "match"),
        "length": lines_of(rows, "mean_acceptance_length"),
    }
    with tempfile.TemporaryDirectory() as scratch:
        blocks: list[Block] = [Heading(f"Training of {folder.resolve().name}", 1)]
        blocks += _last(curves)
        blocks += [
            Image(_draw(name, lines, Path(scratch) / f"{name}.svg"), CAPTIONS[name])
            for name, lines in curves.items()
            if lines
        ]
        text = html_page(folder.resolve().name, blocks)
    page, draft = folder / PAGE, folder / f".{PAGE}.{os.getpid()}"
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, page)
    finally:
        draft.unlink(missing_ok=True)
    return page


def lines_of(rows: Sequence[Mapping[str, str]], what: str) -> Series:
    """Columns ``what`` and ``what_1``, ``what_2`` ... against the batches; no empty ones.

    [{"iteration": "5", "loss": "2", "loss_1": "1.5", "match_1": ""}], "loss" ->
    {"loss": ([5], [2.0]), "1": ([5], [1.5])}
    """
    lines = {}
    for column in rows[0] if rows else ():
        stem, _, depth = column.rpartition("_")
        if column != what and not (stem == what and depth.isdecimal()):
            continue
        found = [(int(row["iteration"]), float(row[column])) for row in rows if row[column]]
        if found:
            batches, values = zip(*found)
            lines[column if column == what else depth] = (list(batches), list(values))
    return lines


def _last(curves: Mapping[str, Series]) -> list[Block]:
    """The last figures on what is held out, as a table."""
    match, length = curves["match"], curves["length"]
    if not match:
        return [Paragraph("Nothing was held out, so nothing was evaluated.")]
    number = next(iter(match.values()))[0][-1]
    rows = [
        [depth, f"{match[depth][1][-1]:.3f}", f"{length[depth][1][-1]:.3f}"] for depth in match
    ]
    return [
        Paragraph(f"On what is held out, after {number} batches:"),
        Table(["k", "match at that depth", "mean acceptance length"], rows),
    ]


def _draw(name: str, lines: Series, path: Path) -> Path:
    import matplotlib  # here, because it takes a second, and may be missing
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 4.2))
        axes = figure.subplots()
        shades = matplotlib.colormaps["viridis"]
        depths = [label for label in lines if label.isdecimal()]
        for label, (batches, values) in lines.items():
            if label in depths:
                colour = shades(0.9 * depths.index(label) / max(1, len(depths) - 1))
                words = f"k = {label}" if name == "length" else f"depth {label}"
                axes.plot(batches, values, "o-", ms=3, lw=1.4, color=colour, label=words)
            else:
                axes.plot(batches, values, lw=2.2, color=BLUE, label="all")
        titles = {
            "loss": "Loss",
            "match": "Acceptance by depth",
            "length": "Mean acceptance length (tau)",
        }
        axes.set(xlabel="batches", title=titles[name])
        axes.set_ylim(bottom=1.0 if name == "length" else 0.0)
        axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(path, bbox_inches="tight")
    return path
