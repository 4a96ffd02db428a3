"""The files of a benchmark: JSON, CSV, the report, its plots where matplotlib is there."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_eagle.system import render
from mlx_eagle.system.drawing import EXTRA, has_matplotlib

from . import report
from .names import with_old_names

PLOTS = "plots"


def write_all(
    document: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    folder: Path,
    picture: str | None = None,
) -> None:
    """Write every file of the report, and say where; plots where matplotlib is there."""
    text = json.dumps(with_old_names(document), indent=1)
    (folder / "results.json").write_text(text + "\n")
    write_csv(folder / "results.csv", [with_old_names(row) for row in rows])
    images = draw_plots(document, folder, picture)
    blocks = report.blocks(document, images)
    (folder / "report.md").write_text(render.markdown(blocks, folder))
    (folder / "report.html").write_text(render.html_page(report.TITLE, blocks))
    plots = f", {PLOTS}/" if images else ""
    print(f"Written to {folder}: report.md, report.html, results.json, results.csv{plots}")
    if picture is not None:
        print(f"Picture: {picture}")
    if not images:
        print(f"Without plots, which need matplotlib: {EXTRA}.")


def draw_plots(
    document: Mapping[str, Any], folder: Path, picture: str | None
) -> list[Mapping[str, Path]]:
    """The plots of every scenario, and the picture; nothing where matplotlib is missing."""
    if not has_matplotlib():
        return []
    from . import plots  # here, because matplotlib takes a second, and may be missing

    if picture is not None:
        plots.draw_picture(document, Path(picture).expanduser())
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
