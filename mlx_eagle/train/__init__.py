"""Training draft heads: ``train`` makes one, and ``draw_curves`` draws how it went."""

from .curves import draw_curves
from .session import run, train
from .settings import TrainSettings
from .trainer import TrainReport

__all__ = ["TrainReport", "TrainSettings", "draw_curves", "run", "train"]
