"""The files of a benchmark: JSON, CSV, the report, its plots where matplotlib is there."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_eagle.system import render
from mlx_eagle.system.drawing import EXTRA, has_matplotlib
from mlx_eagle.system.render import Block

from . import report
from .serving import report as serving

PLOTS = "plots"


def write_all(
    document: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    folder: Path,
    picture: str | None = None,
) -> None:
    """Write every file of the report, and say where; plots where matplotlib is there."""
    write_figures(document, rows, folder)
    images = draw_plots(document, folder, picture)
    write_pages(report.TITLE, report.blocks(document, images), folder)
    if picture is not None:
        print(f"Picture: {picture}")
    if not images:
        print(f"Without plots, which need matplotlib: {EXTRA}.")


def write_serving(
    document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], folder: Path
) -> None:
    """The same for what was measured of servers."""
    write_figures(document, rows, folder)
    images = []
    if has_matplotlib():
        from .serving import plot  # here, because matplotlib takes a second, and may be missing

        images.append(plot.draw_serving(document["serving"], folder / PLOTS))
    write_pages(serving.TITLE, serving.blocks(document, images), folder)
    if not images:
        print(f"Without a plot, which needs matplotlib: {EXTRA}.")


def write_figures(
    document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], folder: Path
) -> None:
    """The document as JSON, the rows as CSV."""
    text = json.dumps(document, indent=1)
    (folder / "results.json").write_text(text + "\n")
    write_csv(folder / "results.csv", rows)


def write_pages(title: str, blocks: Sequence[Block], folder: Path) -> None:
    """The report as Markdown and HTML; says where all files are."""
    (folder / "report.md").write_text(render.markdown(blocks, folder))
    (folder / "report.html").write_text(render.html_page(title, blocks))
    plots = f", {PLOTS}/" if has_matplotlib() else ""
    print(f"Written to {folder}: report.md, report.html, results.json, results.csv{plots}")


def draw_plots(
    document: Mapping[str, Any], folder: Path, picture: str | None
) -> list[Mapping[str, Path]]:
    """The plots of every scenario, and the picture; nothing where matplotlib is missing."""
    if not has_matplotlib():
        return []
    # Here, because matplotlib takes a second, and may be missing.
    from . import plots
    from .picture import draw_picture

    if picture is not None:
        draw_picture(document, Path(picture).expanduser())
    many = len(document["scenarios"]) > 1
    return [
        plots.draw_all(scenario, folder / PLOTS, f"-{number + 1}" if many else "")
        for number, scenario in enumerate(document["scenarios"])
    ]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A row per run."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def brief(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without the figures of single prompts, for ``--json``."""
    scenarios = [
        {key: value for key, value in scenario.items() if key != "prompts"}
        | {"identical": [row["parity"]["identical"] for row in scenario["prompts"]].count(True),
           "batch_size": len(scenario["prompts"])}
        for scenario in document["scenarios"]
    ]  # fmt: skip
    return {**document, "scenarios": scenarios}
