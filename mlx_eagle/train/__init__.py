"""Training draft heads: ``train`` a head, and have a target give ``answers`` to learn from."""

from .log import write_page
from .session import run, train
from .settings import TrainSettings
from .trainer import TrainReport

__all__ = ["TrainReport", "TrainSettings", "run", "train", "write_page"]
