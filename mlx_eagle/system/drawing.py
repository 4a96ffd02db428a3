"""What plots have in common: colours, style, and whether matplotlib is there to draw them.

matplotlib itself is not imported here: it takes a second, and comes with an extra.
"""

import importlib.util

EXTRA = "pip install 'mlx-eagle[bench]'"

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


def has_matplotlib() -> bool:
    """Whether plots can be drawn: matplotlib comes with an extra of its own."""
    return importlib.util.find_spec("matplotlib") is not None
