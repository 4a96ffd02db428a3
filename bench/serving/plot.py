"""The plot of a document about servers, drawn with matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from mlx_eagle.system.drawing import GREY, SERIES, STYLE

from ..plots import save_figure
from .report import PLOT


def draw_serving(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Speed and time per token against the number of clients; an SVG, and a PNG beside it."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4))
        labels = list(dict.fromkeys(row["configuration"] for row in rows))
        # Plain ran between the loads of every configuration; those of the first are shown.
        first = [row for row in rows if row["configuration"] == labels[0]]
        _series(left, right, first, "plain", "mlx_lm.server", GREY)
        for i, label in enumerate(labels):
            own = [row for row in rows if row["configuration"] == label]
            words = f"mlx_eagle.server, {label}"
            _series(left, right, own, "speculative", words, SERIES[i % len(SERIES)])
        left.set(ylabel="tokens per second, all clients", title="Speed")
        right.set(ylabel="milliseconds per token", title="Time per token, median and worst")
        numbers = sorted({row["clients"] for row in rows})
        for axes in (left, right):
            axes.set_xlabel("clients at once")
            axes.set_xticks(range(len(numbers)), [str(number) for number in numbers])
            axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=9)
        return save_figure(figure, folder / f"{PLOT}.svg")


def _series(
    left: Axes,
    right: Axes,
    rows: Sequence[Mapping[str, Any]],
    who: str,
    label: str,
    colour: str,
) -> None:
    """One server's line in both plots, ratios beside its speed, a bar up to the worst answer."""
    xs = list(range(len(rows)))
    speeds = [row[who]["tps"] for row in rows]
    left.plot(xs, speeds, "o-", color=colour, lw=2, ms=7, label=label)
    if who == "speculative":
        for x, row in zip(xs, rows):
            if row["speedup"] is not None:
                left.annotate(f"{row['speedup']:.2f}x", (x, row[who]["tps"]), xytext=(0, 8),
                              textcoords="offset points", ha="center", fontsize=9,
                              color=colour)  # fmt: skip
    waits = [(x, row[who]["seconds_per_token"]) for x, row in zip(xs, rows)]
    timed = [(x, 1e3 * wait["median"], 1e3 * wait["worst"]) for x, wait in waits if wait]
    if timed:
        at, typical, worst = zip(*timed)
        above = [high - low for low, high in zip(typical, worst)]
        right.errorbar(at, typical, [[0.0] * len(above), above], fmt="o-", color=colour, lw=2,
                       ms=7, capsize=4, label=label)  # fmt: skip
