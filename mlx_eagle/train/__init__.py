"""Training draft heads: ``train`` a head, and have a target give ``answers`` to learn from."""

from .settings import TrainSettings
from .trainer import TrainReport, run, train

__all__ = ["TrainReport", "TrainSettings", "run", "train"]
