"""Plots of a document of results, and the picture for a README, drawn with matplotlib."""

from collections.abc import Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .summary import chains, suffixed, views

STYLE = Path(__file__).parent / "plots.mplstyle"
GREY = "#8a8a8a"  # plain decoding; C0 to C5 are the colours of the style
WIDE = (11, 4.4)  # inches, of two plots side by side
SINGLE = (6.6, 4.4)

# At least 3 to 1 against white and against nearly black.
PICTURE_TEXT = "#7d828a"
PICTURE_GREY = "#8a8f98"
PICTURE_BLUE = "#2f7fd6"
PICTURE_ORANGE = "#c8701a"
PICTURE_STYLE = {
    "font.size": 13,
    "axes.titlesize": 14,
    "legend.fontsize": 11,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), PICTURE_TEXT),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), PICTURE_TEXT),
}


def draw_all(document: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Draw every plot that the results allow, each as an SVG and a PNG; the SVG files by name.

    A name ends with the number of the drafter and that of the scenario, if there are several.
    """
    todo = []
    for suffix, scenario in suffixed(document["scenarios"]):
        todo += [(plot.__name__ + suffix, plot, scenario) for plot in SCENARIO_PLOTS]
        for drafter, view in views(scenario):
            todo += [(plot.__name__ + drafter + suffix, plot, view) for plot in COST_PLOTS]
    if "serving" in document:
        todo.append(("serving", serving, document["serving"]))
    files = {}
    with plt.style.context(STYLE):
        for name, draw, shown in todo:
            figure = draw(shown)
            if figure is not None:
                files[name] = folder / f"{name}.svg"
                figure.savefig(files[name])
                figure.savefig(folder / f"{name}.png")
                plt.close(figure)
    return files


def legend_below(axes: Axes, columns: int = 1) -> None:
    """Draw the legend under the axes, and under their label if there is one."""
    below = -0.16 if axes.get_xlabel() else -0.1
    axes.legend(ncols=columns, loc="upper center", bbox_to_anchor=(0.5, below))


def leave_room(axes: Axes, factor: float) -> None:
    """Begin the y axis at 0, and make it longer by a factor."""
    axes.set_ylim(0, factor * axes.get_ylim()[1])


def bars(
    axes: Axes, names: Sequence[str], series: Sequence[tuple[str, str, Sequence[float]]]
) -> list[Any]:
    """Draw a group of bars per name; ``series`` have a label, a colour and a value per name."""
    width = 0.8 / len(series)
    drawn = []
    for index, (label, colour, values) in enumerate(series):
        xs = np.arange(len(names)) + (index - (len(series) - 1) / 2) * width
        drawn.append(axes.bar(xs, values, 0.92 * width, color=colour, label=label))
    axes.set_ylabel("tokens per second")
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="x", visible=False)
    legend_below(axes, min(4, len(series)))
    return drawn


def write_above(axes: Axes, words: str, x: float, y: float, colour: str) -> None:
    """Write a few words above a point."""
    place = {"textcoords": "offset points", "xytext": (0, 9), "ha": "center"}
    axes.annotate(words, (x, y), fontsize=9, color=colour, **place)


# --- costs of one drafter -----------------------------------------------------------------------


def speedup(view: Mapping[str, Any]) -> Figure | None:
    """Speedup and mean acceptance length against k: measured, and as the cost model has it."""
    found = [c for c in chains(view["configurations"]) if c["overall"]["speedup"]]
    if not found:
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=WIDE)
    ks = [point["k"] for point in view["curve"]]
    for axes, key, look, label in (
        (left, "speedup", "C5--", "predicted: tau / (c(k+1) + k d + overhead)"),
        (left, "bound", "C2:", "bound: tau / (c(k+1) + k d)"),
        (right, "mean_acceptance_length", "C5--", "from the longest chain's acceptance"),
    ):
        axes.plot(ks, [point[key] for point in view["curve"]], look, label=label)
    overall = [c["overall"] for c in found]
    sizes = [c["num_draft_tokens"] for c in found]
    speeds = np.array([f["speedup"] for f in overall])
    low, high = np.array([[f["speedup_by_prompt"][q] for f in overall] for q in ("q1", "q3")])
    errors = np.maximum(0.0, [speeds - low, high - speeds])
    words = "measured (bars: middle half of the prompts)"
    left.errorbar(sizes, speeds, errors, fmt="C0o", capsize=5, zorder=3, label=words)
    taus = [f["mean_acceptance_length"] for f in overall]
    right.plot(sizes, taus, "C0o", zorder=3, label="measured")
    left.axhline(1.0, color=GREY, lw=1.2, label="plain decoding")
    looks = cycle(product(("-.", "-"), ("C3", "C1", "C4")))  # those that the curves leave
    drawn = ("auto", "copies", "tree", "exact")
    others = [c for c in view["configurations"] if c["kind"] in drawn]
    for configuration, (style, colour) in zip(others, looks, strict=False):
        value = configuration["overall"]["speedup"]
        if value:
            label = f"{configuration['label']}: {value:.2f}"
            left.axhline(value, color=colour, lw=1.6, ls=style, label=label)
    left.set(ylabel="speedup over plain decoding", title="Speedup")
    right.set(ylabel="tau", title="Mean acceptance length (tau)")
    for axes in (left, right):
        axes.set(xlabel="draft length k", xticks=sorted({*sizes, *ks}))
        leave_room(axes, 1.06)
        legend_below(axes)
    return figure


def verify_cost(view: Mapping[str, Any]) -> Figure:
    """c(R) between its two extremes, flat and linear."""
    rows, costs = zip(*view["costs"]["verify_cost"].items(), strict=True)
    figure, axes = plt.subplots(figsize=SINGLE)
    axes.plot(rows, rows, ":", color=GREY, label="linear: every row costs a pass of its own")
    axes.axhline(1.0, color=GREY, ls="--", label="flat: rows are free")
    axes.plot(rows, costs, "C0o-", label="measured")
    for row, cost in zip(rows, costs, strict=True):
        write_above(axes, f"{cost:.2f}", row, cost, "C0")
    axes.set(
        xlabel="rows R of one verify pass (k + 1)",
        ylabel="c(R) = T(R) / T(1)",
        title="What verifying R tokens costs",
        xticks=rows,
        ylim=(0, max(1.6, 1.25 * max(costs))),
    )
    legend_below(axes)
    return figure


def acceptance(view: Mapping[str, Any]) -> Figure | None:
    """Acceptance of the longest chain by position: given the one before, and from the root."""
    found = chains(view["configurations"])
    if not found:
        return None
    longest = found[-1]
    figure, panels = plt.subplots(1, 2, figsize=WIDE, sharey=True)
    titles = {
        "acceptance_by_position": "Given that the one before was accepted",
        "cumulative_acceptance_by_position": "Of all rounds",
    }
    shown = dict(longest["sets"])
    if len(shown) > 1:
        shown["overall"] = longest["overall"]
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for name, figures in shown.items():
            colour = "#222222" if name == "overall" else None
            positions = range(1, len(figures[key]) + 1)
            axes.plot(positions, figures[key], "o-", color=colour, label=name)
        axes.set(xlabel="position in the draft", title=title, ylim=(0, 1.03))
        axes.set_xticks(range(1, longest["num_draft_tokens"] + 1))
    panels[0].set_ylabel("share accepted")
    panels[1].legend(loc="upper right")
    figure.suptitle(f"Acceptance by position, {longest['label']}", fontsize=12, y=1.02)
    return figure


def round_time(view: Mapping[str, Any]) -> Figure | None:
    """One round in parts, for every k, and a plain step."""
    found = [c for c in chains(view["configurations"]) if "time_split" in c["overall"]]
    plain = view["plain_step_measured"]
    if not found or plain is None:
        return None
    figure, axes = plt.subplots(figsize=SINGLE)
    axes.bar_label(axes.bar("plain step", 1e3 * plain, 0.6, color=GREY), ["1 token"], padding=4)
    labels = [c["label"] for c in found]
    bottoms = np.zeros(len(found))
    for part, colour in (("verify", "C0"), ("draft", "C1"), ("accept", "C2"), ("host", "C3")):
        heights = np.array([max(0.0, 1e3 * c["overall"]["time_split"][part]) for c in found])
        drawn = axes.bar(labels, heights, 0.6, bottoms, color=colour, label=part)
        bottoms += heights
    taus = [f"{c['overall']['mean_acceptance_length']:.2f} tokens" for c in found]
    axes.bar_label(drawn, taus, padding=4)
    axes.set(ylabel="milliseconds", title="Where a round's time goes")
    axes.set_ylim(0, 1.15 * max([1e3 * plain, *bottoms]))
    axes.grid(axis="x", visible=False)
    legend_below(axes, 4)
    return figure


COST_PLOTS = (speedup, verify_cost, acceptance, round_time)

# --- a scenario ---------------------------------------------------------------------------------


def side_by_side(scenario: Mapping[str, Any]) -> Figure | None:
    """Speed, mean acceptance length and memory of each of several drafters, the fastest on top."""
    rows = scenario["side_by_side"][::-1]
    if not rows:
        return None
    figure, panels = plt.subplots(1, 3, figsize=(11, 1.4 + 0.55 * len(rows)), sharey=True)
    names = [f"{r['drafter']}\n{r['identical']} of {r['num_prompts']} identical" for r in rows]
    speeds = [f"{r['tps']:.3g} ({r['speedup']:.2f}x)" for r in rows]
    for axes, colour, title, key, unit, words in (
        (panels[0], "C0", "tokens per second", "tps", 1, speeds),
        (panels[1], "C2", "mean acceptance length (tau)", "mean_acceptance_length", 1, None),
        (panels[2], "C1", "peak memory, GB", "peak_bytes", 1e9, None),
    ):
        values = [row[key] / unit for row in rows]
        drawn = axes.barh(names, values, 0.6, color=colour)
        axes.bar_label(drawn, words, fmt="{:.2f}", padding=3, fontsize=9)
        axes.set(xlabel=title, xlim=(0, 1.35 * max(values)))
        axes.grid(axis="y", visible=False)
    panels[0].axvline(rows[0]["plain_tps"], color=GREY, lw=1.4, ls="--")
    return figure


def tokens_per_second(scenario: Mapping[str, Any]) -> Figure | None:
    """Plain decoding and every configuration, set by set."""
    configurations = timed(scenario)
    if not configurations:
        return None
    names = list(configurations[0]["sets"])
    # Plain ran between the runs of every configuration; the bar is the mean of those medians.
    plain = [mean(c["sets"][name]["plain_tps"] for c in configurations) for name in names]
    series = [("plain (mlx-lm)", GREY, plain)]
    for i, c in enumerate(configurations):
        series.append((c["label"], f"C{i}", [own["tps"] for own in c["sets"].values()]))
    figure, axes = plt.subplots(figsize=(max(6.6, 1.1 * len(names) * len(series)), 4.4))
    for drawn in bars(axes, names, series):
        axes.bar_label(drawn, fmt="{:.3g}", padding=3, fontsize=8)
    axes.set_title("Speed by prompt set")
    return figure


SCENARIO_PLOTS = (side_by_side, tokens_per_second)


def timed(scenario: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The configurations that have a speed in every set."""
    return [c for c in scenario["configurations"] if all(f["tps"] for f in c["sets"].values())]


def shown(configurations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One configuration without copies and one with: "auto" if it was timed, else the fastest."""
    best = []
    for copies in (False, True):
        own = [c for c in configurations if (c["kind"] == "copies") == copies]
        chains = [c for c in own if c["kind"] not in ("tree", "exact")]
        auto = [c for c in chains if c["num_draft_tokens"] is None]
        fastest = sorted(auto or own, key=lambda c: -c["overall"]["speedup"])
        best += fastest[:1]
    return best


def draw_picture(document: Mapping[str, Any], path: Path) -> None:
    """Draw the speed of plain and drafted decoding per prompt set: one picture for a README.

    Drafted is "auto" if that was measured, else the fastest configuration, then the one with
    copies. The background is transparent, and every colour can be told from a white and from a
    dark page. Raises ValueError if no set could be timed.
    """
    configurations = shown(timed(document["scenarios"][0]))
    if not configurations:
        raise ValueError(f"--picture {path} was not drawn: the outputs are too short to be timed.")
    sets = configurations[0]["sets"]
    plain = [own["plain_tps"] for own in sets.values()]
    series = [("plain decoding (mlx-lm)", PICTURE_GREY, plain)]
    labels = [[f"{tps:.1f}" for tps in plain]]
    for c, colour in zip(configurations, (PICTURE_BLUE, PICTURE_ORANGE), strict=False):
        own = c["sets"].values()
        series.append((f"with drafts ({c['label']})", colour, [f["tps"] for f in own]))
        labels.append([f"{f['tps']:.1f}\n{f['speedup']:.2f}x" for f in own])
    conditions = document["conditions"]
    device = conditions["blas"] if conditions["device"] == "cpu" else "GPU"
    with plt.style.context([STYLE, PICTURE_STYLE]):
        figure, axes = plt.subplots(figsize=(8.4, 4.2))
        drawn = bars(axes, [name.replace("_", " ") for name in sets], series)
        for each, (_, colour, _), words in zip(drawn, series, labels, strict=True):
            axes.bar_label(each, words, padding=4, fontsize=12, color=colour)
        axes.set_title(conditions["model"])
        leave_room(axes, 1.22)
        axes.grid(visible=False)
        figure.text(0.5, -0.1, f"{conditions['chip']}, {device}", ha="center", fontsize=10)
        figure.savefig(path, transparent=True)
        plt.close(figure)


# --- servers ------------------------------------------------------------------------------------


def serving(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Speed and time per token against the number of clients, ratios over our speeds.

    A bar goes from the median time per token up to that of the worst answer.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=WIDE)
    labels = list(dict.fromkeys(row["configuration"] for row in rows))
    # Plain ran between the loads of every configuration; those of the first are shown.
    lines = [("plain", labels[0], "mlx_lm.server", GREY)]
    for i, label in enumerate(labels):
        lines.append(("speculative", label, f"mlx_eagle.server, {label}", f"C{i}"))
    for role, label, words, colour in lines:
        own = [row for row in rows if row["configuration"] == label]
        left.plot([row[role]["tps"] for row in own], "o-", color=colour, label=words)
        for x, row in enumerate(own):
            if role == "speculative" and row["speedup"] is not None:
                write_above(left, f"{row['speedup']:.2f}x", x, row[role]["tps"], colour)
        waits = [(x, row[role]["seconds_per_token"]) for x, row in enumerate(own)]
        waits = [(x, 1e3 * w["median"], 1e3 * w["worst"]) for x, w in waits if w is not None]
        if waits:
            at, medians, worst = np.array(waits).T
            up = [np.zeros(len(at)), worst - medians]
            right.errorbar(at, medians, up, fmt="o-", color=colour, capsize=4, label=words)
    left.set(ylabel="tokens per second, all clients", title="Speed")
    right.set(ylabel="milliseconds per token", title="Time per token, median and worst")
    numbers = list(dict.fromkeys(str(row["clients"]) for row in rows))
    for axes in (left, right):
        axes.set_xlabel("clients at once")
        axes.set_xticks(range(len(numbers)), numbers)
        leave_room(axes, 1.1)
        legend_below(axes)
    return figure
