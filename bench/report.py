"""The report on a document of results in Markdown, from the template ``report.md.jinja``."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mlx_eagle.system.device import load_note, megabytes

from .figures import milliseconds, number
from .parity import count_identical, largest_margin, parity_words
from .summary import suffixed, views

Document = Mapping[str, Any]
PLOTS = "plots"  # folder of the images, beside the report


def report(document: Document, images: Mapping[str, Path] | None = None) -> str:
    """The whole report, results first, with the plots that were drawn, by name.

    Without any ``images``, it is the part that is printed: a sentence per configuration, speed,
    acceptance, parity.
    """
    scenarios = []
    for suffix, scenario in suffixed(document["scenarios"]):
        found = [(each, {**view, "rows": rows_of(view)}) for each, view in views(scenario)]
        more = {"rows": rows_of(scenario), "views": found, "suffix": suffix}
        scenarios.append({**scenario, **more})
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        finalize=cell,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    text = environment.get_template("report.md.jinja").render(
        {**document, "serving": document.get("serving"), "scenarios": scenarios},
        note=load_note(document["conditions"]["load_average"]),
        images=images or {},
        whole=images is not None,
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"  # blank lines where a part is left out


def cell(value: Any) -> Any:
    """A value in the template: a number with two digits, "-" for None, a text on one line.

    What is marked as ``safe`` stays as it is.
    """
    if value is None or isinstance(value, float):
        return number(value)
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return " ".join(value.split()).replace("|", "\\|")
    return value


def rows_of(scenario: Document) -> list[Document]:
    """Figures of every set and configuration, then overall if there are several sets."""
    configurations = scenario["configurations"]
    names = list(configurations[0]["sets"])
    found = [(name, c, c["sets"][name]) for name in names for c in configurations]
    if len(names) > 1:
        found += [("overall", c, c["overall"]) for c in configurations]
    return [{"set": name, "configuration": c["label"], **own} for name, c, own in found]


def advice(rows: Sequence[Document]) -> str:
    """A sentence about the first of several drafters, the fastest one."""
    best = rows[0]
    speedup = f"{best['speedup']:.2f}x of plain."
    if best["speedup"] <= 1:
        return f"Take none: the fastest, {best['drafter']}, is at {speedup}"
    return f"Take {best['drafter']}, {best['configuration']}: {speedup}"


FILTERS: dict[str, Callable[..., str]] = {
    "advice": advice,
    "histogram": lambda counts: " ".join(f"{k}:{n}" for k, n in enumerate(counts)) or "-",
    "identical": count_identical,
    "lengths": "{0[min]:.0f} to {0[max]:.0f} (median {0[median]:.0f}) tokens".format,
    "margin": largest_margin,
    "mb": megabytes,
    "millions": lambda count: f"{count / 1e6:.1f} M",
    "ms": milliseconds,
    "n3": partial(number, digits=3),
    "numbers": lambda values: " ".join(map(number, values)) or "-",
    "parity": parity_words,
    "x": partial(number, unit="x"),
}
"""Words for the figures in the template."""
