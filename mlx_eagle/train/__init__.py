"""Training draft heads: ``train`` makes one, and ``draw_curves`` draws how it went."""

from .curves import draw_curves
from .settings import TrainSettings
from .trainer import TrainReport, run, train

__all__ = ["TrainReport", "TrainSettings", "draw_curves", "run", "train"]
