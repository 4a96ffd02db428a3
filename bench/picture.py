"""The picture for a README: speed per prompt set, on a background that may be white or dark."""

from pathlib import Path
from typing import Any

from mlx_eagle.system.drawing import STYLE

from .plots import bars, plt, timed

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

    Drafted is "auto" where that was measured, else the fastest configuration; beside it stands
    what was drafted with copies. The background is left open, and every colour can be told from
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
        for one, colour in zip(configurations, (PICTURE_BLUE, PICTURE_ORANGE)):
            series.append((one, "tps", colour, f"with drafts ({one['label']})"))
        for index, (one, key, colour, words) in enumerate(series):
            values = [figures[key] for figures in one["sets"].values()]
            xs = bars(axes, index, len(series), values, colour, words)
            for x, value, figures in zip(xs, values, one["sets"].values()):
                ratio = f"\n{figures['speedup']:.2f}x" if key == "tps" else ""
                axes.annotate(f"{value:.1f}{ratio}", (x, value), textcoords="offset points",
                              xytext=(0, 4), ha="center", fontsize=12, color=colour)  # fmt: skip
        axes.set(ylabel="tokens per second", title=conditions["model"])
        axes.set_ylim(0, 1.22 * axes.get_ylim()[1])
        axes.set_xticks(range(len(names)), names)
        axes.grid(visible=False)
        axes.legend(ncols=len(series), loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=11)
        device = conditions["blas"] if conditions["device"] == "cpu" else "GPU"
        figure.text(0.5, -0.1, f"{conditions['chip']}, {device}", ha="center", fontsize=10)
        figure.savefig(path, dpi=144, bbox_inches="tight", transparent=True)
        plt.close(figure)
