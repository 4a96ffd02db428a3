"""Training drafters: ``train`` makes one for a model of mlx-lm, or adapts one."""

from .settings import TrainSettings
from .trainer import TrainReport, run, train

__all__ = ["TrainReport", "TrainSettings", "run", "train"]
