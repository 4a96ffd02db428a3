"""The plots of a document of results, and the picture for a README, drawn with matplotlib."""

from collections.abc import Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from .report import views

# Okabe and Ito's colours, which colour-blind readers can tell apart.
GREY, BLUE, ORANGE = "#8a8a8a", "#0072B2", "#E69F00"
GREEN, RED, PURPLE, SKY = "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)

STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "legend.frameon": False,
    "svg.hashsalt": "mlx-eagle",
}

PARTS = {"verify": BLUE, "draft": ORANGE, "accept": GREEN, "host": PURPLE}


# On white and on nearly black: at least 3 to 1 against both.
PICTURE_TEXT, PICTURE_GREY = "#7d828a", "#8a8f98"
PICTURE_BLUE, PICTURE_ORANGE = "#2f7fd6", "#c8701a"

PICTURE_STYLE = {
    "font.size": 13,
    "axes.titlesize": 14,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color",
         "ytick.color"),
        PICTURE_TEXT,
    ),
}  # fmt: skip


def draw_all(scenario: dict[str, Any], folder: Path, suffix: str = "") -> dict[str, Path]:
    """Draw every plot that the results allow; {name: SVG file}, and a PNG of that name.

    Of each of several drafters those of its costs, as "speedup-drafter1" and the like.
    """
    todo = [
        ("side_by_side", side_by_side, scenario),
        ("tokens_per_second", tokens_per_second, scenario),
    ]
    for view in views(scenario):
        last = view["suffix"]
        todo += [
            (f"speedup{last}", speedup, view),
            (f"verify_cost{last}", verify_cost, view),
            (f"acceptance{last}", acceptance, view),
            (f"round_time{last}", round_time, view),
        ]
    files = {}
    with plt.rc_context(STYLE):
        for name, draw, shown_of in todo:
            figure = draw(shown_of)
            if figure is not None:
                files[name] = save_figure(figure, folder / f"{name}{suffix}.svg")
    return files


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure as that SVG file, which is returned, and as a PNG."""
    figure.savefig(path, bbox_inches="tight")
    figure.savefig(path.with_suffix(".png"), dpi=144, bbox_inches="tight")
    plt.close(figure)
    return path


def chains(scenario: dict[str, Any]) -> list[dict[str, Any]]:
    """The configurations with a fixed k above 0, shortest first."""
    found = [
        c for c in scenario["configurations"] if c["kind"] == "chain" and c["num_draft_tokens"]
    ]
    return sorted(found, key=lambda c: c["num_draft_tokens"])


def speedup(scenario: dict[str, Any]) -> Figure | None:
    """Speedup and mean acceptance length against k: measured, and as the cost model has it."""
    found = [c for c in chains(scenario) if c["overall"]["speedup"]]
    if not found:
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4))
    sizes, overall = [c["num_draft_tokens"] for c in found], [c["overall"] for c in found]
    curve = scenario["curve"]
    _curve(left, curve, "speedup", "predicted: E / (c(k+1) + k d + overhead)")
    _curve(left, curve, "bound", "bound: tau / (c(k+1) + k d)", style=":", colour=GREEN)
    errors = [
        [max(0.0, f["speedup"] - f["speedup_by_prompt"]["q1"]) for f in overall],
        [max(0.0, f["speedup_by_prompt"]["q3"] - f["speedup"]) for f in overall],
    ]
    words = "measured (bars: middle half of the prompts)"
    left.errorbar(sizes, [f["speedup"] for f in overall], errors, fmt="o", color=BLUE, ms=8,
                  capsize=5, zorder=3, label=words)  # fmt: skip
    _levels(left, scenario)
    left.axhline(1.0, color=GREY, lw=1.2)
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    left.annotate("plain decoding", (0.995, 1.0), xycoords=("axes fraction", "data"), ha="right",
                  va="top", color="#555555", fontsize=9, bbox=box)  # fmt: skip
    left.set(xlabel="draft length k", ylabel="speedup over plain decoding", title="Speedup")
    _curve(right, curve, "mean_acceptance_length", "from the longest chain's acceptance")
    taus = [f["mean_acceptance_length"] for f in overall]
    right.plot(sizes, taus, "o", color=BLUE, ms=8, zorder=3, label="measured")
    right.set(xlabel="draft length k", ylabel="tau", title="Mean acceptance length (tau)")
    for axes in (left, right):
        axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
        axes.set_xticks(sorted({*sizes, *(point["k"] for point in curve)}))
    _legend_below(left)
    _legend_below(right)
    return figure


def _curve(
    axes: Axes, curve: list, key: str, label: str, style: str = "--", colour: str = RED
) -> None:
    if curve:
        xs, ys = [point["k"] for point in curve], [point[key] for point in curve]
        axes.plot(xs, ys, style, color=colour, lw=1.8, label=label)


def _levels(axes: Axes, scenario: dict[str, Any]) -> None:
    """Configurations that are not on the curve over k, as levels."""
    others = [c for c in scenario["configurations"] if c["kind"] in ("auto", "copies", "tree")]
    # The curve has the other colours.
    looks = cycle(product(("-.", "-"), (PURPLE, ORANGE, SKY)))
    for configuration, (style, colour) in zip(others, looks, strict=False):
        if value := configuration["overall"]["speedup"]:
            words = f"{configuration['label']}: {value:.2f}"
            axes.axhline(value, color=colour, lw=1.6, ls=style, label=words)


def _above(axes: Axes, words: str, x: float, y: float, points: int, **look: Any) -> None:
    """Write so many points above a place."""
    at = {"textcoords": "offset points", "xytext": (0, points), "ha": "center"}
    axes.annotate(words, (x, y), **at, **look)


def _legend_below(axes: Axes) -> None:
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=9)


def verify_cost(scenario: dict[str, Any]) -> Figure:
    """c(R) between its two extremes, flat and linear."""
    cost = {int(rows): value for rows, value in scenario["costs"]["verify_cost"].items()}
    rows = sorted(cost)
    figure, axes = plt.subplots(figsize=(6.6, 4.4))
    linear = "linear: every row costs a pass of its own"
    axes.plot(rows, rows, ":", color=GREY, lw=1.6, label=linear)
    axes.axhline(1.0, color=GREY, lw=1.6, ls="--", label="flat: rows are free")
    axes.plot(rows, [cost[r] for r in rows], "o-", color=BLUE, lw=2, ms=7, label="measured")
    for r in rows:
        _above(axes, f"{cost[r]:.2f}", r, cost[r], 9, fontsize=9, color=BLUE)
    top = max(cost.values())
    axes.set(
        xlabel="rows R of one verify pass (k + 1)",
        ylabel="c(R) = T(R) / T(1)",
        title="What verifying R tokens costs",
        ylim=(0, max(1.6, 1.25 * top)),
    )
    axes.set_xticks(rows)
    _legend_below(axes)
    return figure


def acceptance(scenario: dict[str, Any]) -> Figure | None:
    """Acceptance of the longest chain by position: given the one before, and from the root."""
    if not chains(scenario):
        return None
    configuration = chains(scenario)[-1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.0), sharey=True)
    titles = (
        ("acceptance_by_position", "Given that the one before was accepted"),
        ("cumulative_acceptance_by_position", "Of all rounds"),
    )
    names = [*configuration["sets"], *(["overall"] if len(configuration["sets"]) > 1 else [])]
    for axes, (key, title) in zip((left, right), titles, strict=True):
        for i, name in enumerate(names):
            figures = configuration["sets"].get(name) or configuration["overall"]
            xs = range(1, len(figures[key]) + 1)
            colour = "#222222" if name == "overall" else SERIES[i % len(SERIES)]
            axes.plot(xs, figures[key], "o-", color=colour, lw=2, ms=7, label=name)
        axes.set(xlabel="position in the draft", title=title, ylim=(0, 1.03))
        axes.set_xticks(range(1, configuration["num_draft_tokens"] + 1))
    left.set_ylabel("share accepted")
    right.legend(fontsize=9, loc="upper right")
    figure.suptitle(f"Acceptance by position, {configuration['label']}", fontsize=12, y=1.02)
    return figure


def round_time(scenario: dict[str, Any]) -> Figure | None:
    """One round in parts, for every k, and a plain step."""
    found = [c for c in chains(scenario) if "time_split" in c["overall"]]
    plain = scenario["plain_step_measured"]
    if not found or plain is None:
        return None
    figure, axes = plt.subplots(figsize=(6.6, 4.4))
    labels = ["plain step", *(c["label"] for c in found)]
    bar = axes.bar(labels[0], 1e3 * plain, 0.6, color=GREY)
    axes.bar_label(bar, ["1 token"], padding=4, fontsize=9)
    bottoms = [0.0] * len(found)
    for part, colour in PARTS.items():
        heights = [max(0.0, 1e3 * c["overall"]["time_split"][part]) for c in found]
        drawn = axes.bar(labels[1:], heights, 0.6, bottoms, color=colour, label=part)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    taus = [c["overall"]["mean_acceptance_length"] for c in found]
    axes.bar_label(drawn, [f"{tau:.2f} tokens" for tau in taus], padding=4, fontsize=9)
    axes.set(ylabel="milliseconds", title="Where a round's time goes")
    axes.set_ylim(0, 1.15 * max([1e3 * plain, *bottoms]))
    axes.grid(axis="x", visible=False)
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=9)
    return figure


def side_by_side(scenario: dict[str, Any]) -> Figure | None:
    """Speed, mean acceptance length and memory of each of several drafters, the fastest on top."""
    rows = scenario["side_by_side"][::-1]
    if not rows:
        return None
    figure, panels = plt.subplots(1, 3, figsize=(11, 1.4 + 0.55 * len(rows)), sharey=True)
    names = [
        f"{row['drafter']}\n{row['identical']} of {row['num_prompts']} identical" for row in rows
    ]
    drawn = (
        ("tokens per second", [row["tps"] for row in rows], BLUE,
         [f"{row['tps']:.3g} ({row['speedup']:.2f}x)" for row in rows]),
        ("mean acceptance length (tau)", [row["mean_acceptance_length"] for row in rows], GREEN,
         [f"{row['mean_acceptance_length']:.2f}" for row in rows]),
        ("peak memory, GB", [row["peak_bytes"] / 1e9 for row in rows], ORANGE,
         [f"{row['peak_bytes'] / 1e9:.2f}" for row in rows]),
    )  # fmt: skip
    for axes, (title, values, colour, words) in zip(panels, drawn, strict=True):
        drawn_bars = axes.barh(names, values, 0.6, color=colour)
        axes.bar_label(drawn_bars, words, padding=3, fontsize=9)
        axes.set_xlim(0, 1.35 * max(values))
        axes.set_xlabel(title)
        axes.grid(axis="y", visible=False)
    panels[0].axvline(rows[0]["plain_tps"], color=GREY, lw=1.4, ls="--")
    return figure


def tokens_per_second(scenario: dict[str, Any]) -> Figure | None:
    """Plain decoding and every speculative configuration, set by set."""
    configurations = timed(scenario)
    if not configurations:
        return None
    names = list(configurations[0]["sets"])
    num_bars = len(configurations) + 1
    figure, axes = plt.subplots(figsize=(max(6.6, 1.1 * len(names) * num_bars), 4.4))
    # Plain ran between the runs of every configuration; the bar is the mean of those medians.
    plain = [mean(c["sets"][name]["plain_tps"] for c in configurations) for name in names]
    drafted = [[c["sets"][name]["tps"] for name in names] for c in configurations]
    labels = ["plain (mlx-lm)", *(configuration["label"] for configuration in configurations)]
    colours = [GREY, *(SERIES[i % len(SERIES)] for i in range(len(configurations)))]
    for index, values in enumerate([plain, *drafted]):
        drawn = bars(axes, index, num_bars, values, colours[index], labels[index])
        axes.bar_label(drawn, fmt="{:.3g}", padding=3, fontsize=8)
    axes.set(ylabel="tokens per second", title="Speed by prompt set")
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="x", visible=False)
    axes.legend(ncols=min(4, num_bars), loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=9)
    return figure


def timed(scenario: dict[str, Any]) -> list[dict[str, Any]]:
    """The configurations that have a speed in every set."""
    return [c for c in scenario["configurations"] if all(f["tps"] for f in c["sets"].values())]


def bars(
    axes: Axes, index: int, num_bars: int, values: list[float], colour: str, label: str
) -> BarContainer:
    """Draw the bars of one series, ``index`` of ``num_bars`` in each group."""
    width = 0.8 / num_bars
    xs = [i + (index - (num_bars - 1) / 2) * width for i in range(len(values))]
    return axes.bar(xs, values, 0.92 * width, color=colour, label=label)


def is_auto(configuration: dict[str, Any]) -> bool:
    return configuration["kind"] != "tree" and configuration["num_draft_tokens"] is None


def shown(configurations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without copies and with them "auto", where that was timed, else the fastest."""
    best = []
    for copies in (False, True):
        those = [c for c in configurations if (c["kind"] == "copies") == copies]
        those.sort(key=lambda c: (not is_auto(c), -c["overall"]["speedup"]))
        best += those[:1]
    return best


def draw_picture(document: dict[str, Any], path: Path) -> None:
    """Draw the speed of plain and drafted decoding per prompt set: one picture for a README.

    Drafted is "auto" where that was measured, else the fastest configuration, then
    the one with copies. The background is left open, and every colour can be told from
    white and from a dark page alike. Raises ValueError where no set could be timed.
    """
    conditions = document["conditions"]
    configurations = shown(timed(document["scenarios"][0]))
    if not configurations:
        raise ValueError(f"--picture {path} was not drawn: the outputs are too short to be timed.")
    names = [name.replace("_", " ") for name in configurations[0]["sets"]]
    with plt.rc_context(STYLE | PICTURE_STYLE):
        figure, axes = plt.subplots(figsize=(8.4, 4.2))
        series = [(configurations[0], "plain_tps", PICTURE_GREY, "plain decoding (mlx-lm)")]
        for one, colour in zip(configurations, (PICTURE_BLUE, PICTURE_ORANGE), strict=False):
            series.append((one, "tps", colour, f"with drafts ({one['label']})"))
        for index, (one, key, colour, words) in enumerate(series):
            sets = list(one["sets"].values())
            drawn = bars(axes, index, len(series), [f[key] for f in sets], colour, words)
            ratios = [f"\n{f['speedup']:.2f}x" if key == "tps" else "" for f in sets]
            labels = [f"{f[key]:.1f}{ratio}" for f, ratio in zip(sets, ratios, strict=True)]
            axes.bar_label(drawn, labels, padding=4, fontsize=12, color=colour)
        axes.set(ylabel="tokens per second", title=conditions["model"])
        axes.set_ylim(0, 1.22 * axes.get_ylim()[1])
        axes.set_xticks(range(len(names)), names)
        axes.grid(visible=False)
        axes.legend(ncols=len(series), loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=11)
        device = conditions["blas"] if conditions["device"] == "cpu" else "GPU"
        figure.text(0.5, -0.1, f"{conditions['chip']}, {device}", ha="center", fontsize=10)
        figure.savefig(path, dpi=144, bbox_inches="tight", transparent=True)
        plt.close(figure)


def draw_serving(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Speed and time per token against the number of clients; an SVG and a PNG."""
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
        return save_figure(figure, folder / "serving.svg")


def _series(
    left: Axes,
    right: Axes,
    rows: Sequence[Mapping[str, Any]],
    who: str,
    label: str,
    colour: str,
) -> None:
    """One server's line in both plots: ratios over its speeds, a bar up to the worst answer."""
    left.plot([row[who]["tps"] for row in rows], "o-", color=colour, lw=2, ms=7, label=label)
    waits = []
    for x, row in enumerate(rows):
        if who == "speculative" and row["speedup"] is not None:
            words = f"{row['speedup']:.2f}x"
            _above(left, words, x, row[who]["tps"], 8, fontsize=9, color=colour)
        if wait := row[who]["seconds_per_token"]:
            typical = 1e3 * wait["median"]
            waits.append((x, typical, 1e3 * wait["worst"] - typical))
    if waits:
        at, medians, above = zip(*waits, strict=True)
        right.errorbar(at, medians, [[0.0] * len(above), above], fmt="o-", color=colour, lw=2,
                       ms=7, capsize=4, label=label)  # fmt: skip
