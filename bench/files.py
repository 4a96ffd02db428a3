"""The files of a benchmark: JSON, CSV, the report, its plots where matplotlib is there."""

import csv
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import report, serving
from .markdown import markdown

EXTRA = "pip install 'mlx-eagle[bench]'"
PLOTS = "plots"


def write_all(
    document: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    folder: Path,
    picture: str | None = None,
) -> None:
    """Write every file, and say where; plots and the picture where matplotlib is there."""
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    write_csv(folder / "results.csv", rows)
    blocks = serving.blocks if "serving" in document else report.blocks
    images = draw(document, folder, picture) if has_matplotlib() else []
    (folder / "report.md").write_text(markdown(blocks(document, images), folder))
    plots = f", {PLOTS}/" if images else ""
    print(f"Written to {folder}: report.md, results.json, results.csv{plots}")
    if picture is not None:
        print(f"Picture: {picture}")
    if not images:
        print(f"Without plots, which need matplotlib: {EXTRA}.")


def draw(document: Mapping[str, Any], folder: Path, picture: str | None) -> list[dict[str, Path]]:
    """The plots of the servers, or of every scenario with the picture."""
    from . import plots  # here, because matplotlib takes a second, and may be missing

    if "serving" in document:
        return [{"serving": plots.draw_serving(document["serving"], folder / PLOTS)}]
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


def has_matplotlib() -> bool:
    """Whether plots can be drawn: matplotlib comes with an extra of its own."""
    return importlib.util.find_spec("matplotlib") is not None
