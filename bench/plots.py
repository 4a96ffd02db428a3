"""Plots of a document of results, and the picture for a README, drawn with matplotlib."""

from collections.abc import Callable, Mapping, Sequence
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

STYLE = Path(__file__).with_name("plots.mplstyle")
PICTURE_STYLE = Path(__file__).with_name("picture.mplstyle")
GREY = "#8a8a8a"  # plain decoding; C0 to C5 are the colours of the style
WIDE = (11, 4.4)  # inches, of two plots side by side
SINGLE = (6.6, 4.4)

Result = Mapping[str, Any]


def draw_all(document: Result, folder: Path) -> dict[str, Path]:
    """Draw every plot that the results allow, each as an SVG and a PNG; the SVG files by name.

    A name ends with the number of the drafter and that of the scenario, if there are several.
    """
    todo: list[tuple[Callable[[Any], Figure | None], str, Any]] = []
    for suffix, scenario in suffixed(document["scenarios"]):
        todo += [(plot, suffix, scenario) for plot in (side_by_side, tokens_per_second)]
        for drafter, view in views(scenario):
            plots = (speedup, verify_cost, acceptance, round_time)
            todo += [(plot, drafter + suffix, view) for plot in plots]
    if "serving" in document:
        todo.append((serving, "", document["serving"]))
    files = {}
    with plt.style.context(STYLE):
        for plot, suffix, shown in todo:
            figure = plot(shown)
            if figure is not None:
                file = folder / f"{plot.__name__}{suffix}.svg"
                files[file.stem] = file
                figure.savefig(file)
                figure.savefig(file.with_suffix(".png"))
                plt.close(figure)
    return files


def finish(axes: Axes, top: float = 1.06, columns: int = 1, **words: Any) -> None:
    """Set title and labels, begin the y axis at 0, leave room above, draw the legend below."""
    axes.set(**words)
    axes.set_ylim(0, top * axes.get_ylim()[1])
    below = -0.16 if axes.get_xlabel() else -0.1
    axes.legend(ncols=columns, loc="upper center", bbox_to_anchor=(0.5, below))


# --- costs of one drafter -----------------------------------------------------------------------


def speedup(view: Result) -> Figure | None:
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
    for i, configuration in enumerate(found):
        size = configuration["num_draft_tokens"]
        own = configuration["overall"]
        value = own["speedup"]
        spread = own["speedup_by_prompt"]
        error = [[max(0.0, value - spread["q1"])], [max(0.0, spread["q3"] - value)]]
        words = "" if i else "measured (bars: middle half of the prompts)"
        left.errorbar(size, value, error, fmt="C0o", capsize=5, zorder=3, label=words)
        right.plot(size, own["mean_acceptance_length"], "C0o", label="" if i else "measured")
    left.axhline(1.0, color=GREY, lw=1.2, label="plain decoding")
    looks = cycle(product(("-.", "-"), ("C3", "C1", "C4")))  # those that the curves leave
    kinds = ("auto", "copies", "tree", "exact")
    others = [c for c in view["configurations"] if c["kind"] in kinds and c["overall"]["speedup"]]
    for configuration, (style, colour) in zip(others, looks, strict=False):
        value = configuration["overall"]["speedup"]
        label = f"{configuration['label']}: {value:.2f}"
        left.axhline(value, color=colour, lw=1.6, ls=style, label=label)
    ticks = {"xlabel": "draft length k", "xticks": ks}
    finish(left, ylabel="speedup over plain decoding", title="Speedup", **ticks)
    finish(right, ylabel="tau", title="Mean acceptance length (tau)", **ticks)
    return figure


def verify_cost(view: Result) -> Figure:
    """c(R) between its two extremes, flat and linear."""
    rows, costs = zip(*view["costs"]["verify_cost"].items(), strict=True)
    figure, axes = plt.subplots(figsize=SINGLE)
    axes.plot(rows, rows, ":", color=GREY, label="linear: every row costs a pass of its own")
    axes.axhline(1.0, color=GREY, ls="--", label="flat: rows are free")
    axes.plot(rows, costs, "C0o-", label="measured")
    write_above(axes, [f"{cost:.2f}" for cost in costs], rows, costs, "C0")
    axes.set_ylim(0, max(1.6, 1.25 * max(costs)))
    words = {"xlabel": "rows R of one verify pass (k + 1)", "ylabel": "c(R) = T(R) / T(1)"}
    finish(axes, 1.0, title="What verifying R tokens costs", xticks=rows, **words)
    return figure


def write_above(axes: Axes, words: Sequence[str], xs: Any, ys: Any, colour: str) -> None:
    """Write a few words above each point."""
    place = {"textcoords": "offset points", "xytext": (0, 9), "ha": "center"}
    for text, *point in zip(words, xs, ys, strict=True):
        axes.annotate(text, point, fontsize=9, color=colour, **place)


def acceptance(view: Result) -> Figure | None:
    """Acceptance of the longest chain by position: given the one before, and from the root."""
    found = chains(view["configurations"])
    if not found:
        return None
    longest = found[-1]
    figure, panels = plt.subplots(1, 2, figsize=WIDE, sharey=True)
    for axes, key, title in (
        (panels[0], "acceptance_by_position", "Given that the one before was accepted"),
        (panels[1], "cumulative_acceptance_by_position", "Of all rounds"),
    ):
        for name, own in longest["sets"].items():
            axes.plot(range(1, len(own[key]) + 1), own[key], "o-", label=name)
        if len(longest["sets"]) > 1:
            overall = longest["overall"][key]
            axes.plot(range(1, len(overall) + 1), overall, "o-", color="#222222", label="overall")
        words = {"xlabel": "position in the draft", "ylabel": "share accepted", "title": title}
        axes.set_ylim(0, 1.03)
        finish(axes, 1.0, xticks=range(1, longest["num_draft_tokens"] + 1), **words)
    figure.suptitle(f"Acceptance by position, {longest['label']}", y=1.02)
    return figure


def round_time(view: Result) -> Figure | None:
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
    axes.grid(axis="x", visible=False)
    finish(axes, 1.1, 4, ylabel="milliseconds", title="Where a round's time goes")
    return figure


# --- a scenario ---------------------------------------------------------------------------------


def side_by_side(scenario: Result) -> Figure | None:
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


def tokens_per_second(scenario: Result) -> Figure | None:
    """Plain decoding and every configuration, set by set."""
    configurations = timed(scenario)
    if not configurations:
        return None
    num_bars = len(configurations[0]["sets"]) * (len(configurations) + 1)
    figure, axes = plt.subplots(figsize=(max(6.6, 1.1 * num_bars), 4.4))
    bars(axes, configurations, [GREY, *(f"C{i}" for i in range(len(configurations)))], 8)
    axes.set_title("Speed by prompt set")
    return figure


def timed(scenario: Result) -> list[Result]:
    """The configurations that have a speed in every set."""
    return [c for c in scenario["configurations"] if all(f["tps"] for f in c["sets"].values())]


def bars(
    axes: Axes, shown: Sequence[Result], colours: Sequence[str], size: int, words: str = "{}"
) -> None:
    """Draw a group of bars per set: plain decoding, then configurations, in these ``words``.

    Above a bar are speed and ratio in a font of this ``size``.
    """
    sets = list(shown[0]["sets"])
    # Plain ran between the runs of every configuration; the bar is the mean of those medians.
    plain = [mean(c["sets"][name]["plain_tps"] for c in shown) for name in sets]
    series = [("plain decoding (mlx-lm)", plain, [f"{tps:.1f}" for tps in plain])]
    for configuration in shown:
        own = configuration["sets"].values()
        above = [f"{each['tps']:.1f}\n{each['speedup']:.2f}x" for each in own]
        label = words.format(configuration["label"])
        series.append((label, [each["tps"] for each in own], above))
    width = 0.8 / len(series)
    for i, (label, heights, above) in enumerate(series):
        xs = np.arange(len(sets)) + (i - len(shown) / 2) * width
        drawn = axes.bar(xs, heights, 0.92 * width, color=colours[i], label=label)
        axes.bar_label(drawn, above, padding=3, fontsize=size, color=colours[i])
    axes.grid(axis="x", visible=False)
    names = [name.replace("_", " ") for name in sets]
    ticks = {"xticks": range(len(sets)), "xticklabels": names}
    finish(axes, 1.22, min(4, len(series)), ylabel="tokens per second", **ticks)


def shown(configurations: Sequence[Result]) -> list[Result]:
    """One configuration without copies and one with: "auto" if it was timed, else the fastest."""
    best = []
    for copies in (False, True):
        own = [c for c in configurations if (c["kind"] == "copies") == copies]
        chains = [c for c in own if c["kind"] not in ("tree", "exact")]
        auto = [c for c in chains if c["num_draft_tokens"] is None]
        fastest = sorted(auto or own, key=lambda c: -c["overall"]["speedup"])
        best += fastest[:1]
    return best


def draw_picture(document: Result, path: Path) -> None:
    """Draw the speed of plain and drafted decoding per prompt set: one picture for a README.

    Drafted is "auto" if that was measured, else the fastest configuration, then the one with
    copies. The background is transparent, and every colour can be told from a white and from a
    dark page. Raises ValueError if no set could be timed.
    """
    configurations = shown(timed(document["scenarios"][0]))
    if not configurations:
        raise ValueError(f"--picture {path} was not drawn: the outputs are too short to be timed.")
    conditions = document["conditions"]
    device = conditions["blas"] if conditions["device"] == "cpu" else "GPU"
    with plt.style.context([STYLE, PICTURE_STYLE]):
        figure, axes = plt.subplots(figsize=(8.4, 4.2))
        bars(axes, configurations, ["C0", "C1", "C2"], 12, "with drafts ({})")
        axes.set_title(conditions["model"])
        figure.text(0.5, -0.1, f"{conditions['chip']}, {device}", ha="center", fontsize=10)
        figure.savefig(path, transparent=True)
        plt.close(figure)


# --- servers ------------------------------------------------------------------------------------


def serving(rows: Sequence[Result]) -> Figure:
    """Speed and time per token against the number of clients, ratios over our speeds.

    A bar goes from the median time per token up to that of the worst answer.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=WIDE)
    labels = list(dict.fromkeys(row["configuration"] for row in rows))
    # Plain ran between the loads of every configuration; those of the first are shown.
    lines = [("plain", labels[0], "mlx_lm.server", GREY)]
    for i, label in enumerate(labels):
        lines.append(("speculative", label, f"mlx_eagle.server, {label}", f"C{i}"))
    clients = list(dict.fromkeys(row["clients"] for row in rows))
    xs = range(len(clients))
    for role, label, words, colour in lines:
        own = [row for row in rows if row["configuration"] == label]
        speeds = [row[role]["tps"] for row in own]
        left.plot(xs, speeds, "o-", color=colour, label=words)
        if role == "speculative":
            ratios = [f"{row['speedup']:.2f}x" if row["speedup"] else "" for row in own]
            write_above(left, ratios, xs, speeds, colour)
        waits = [row[role]["seconds_per_token"] or dict.fromkeys(("median", "worst"), np.nan)
                 for row in own]  # fmt: skip
        medians = np.array([1e3 * wait["median"] for wait in waits])
        above = [1e3 * wait["worst"] for wait in waits] - medians
        look = {"fmt": "o-", "color": colour, "capsize": 4}
        right.errorbar(xs, medians, [0 * above, above], label=words, **look)
    ticks = {"xlabel": "clients at once", "xticks": xs, "xticklabels": clients}
    finish(left, 1.1, ylabel="tokens per second, all clients", title="Speed", **ticks)
    title = "Time per token, median and worst"
    finish(right, 1.1, ylabel="milliseconds per token", title=title, **ticks)
    return figure
