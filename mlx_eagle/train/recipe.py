"""Recipe: how drafters of one kind are trained; each kind has a file of its own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters.quantize import Quantization
from .batches import TokenBatch
from .settings import LossSettings, TrainSettings
from .student import Student

HeadFiles = tuple[dict[str, Any], dict[str, mx.array]]


class Recipe(ABC):
    """A student, what its target tells of a batch, and its losses.

    ``depth`` is the length of its drafts in evaluations, ``weights`` (terms,) are those of its
    losses.
    """

    depth: int
    weights: mx.array

    def __init__(self, settings: TrainSettings, student: Student):
        self.settings = settings
        self.student = student

    @property
    def num_columns(self) -> int:
        """Number of losses and depths that the table of figures has columns for."""
        return max(self.depth, len(self.weights))

    @abstractmethod
    def teach(self, batch: TokenBatch, epoch: int, num_ranks: int = 1) -> tuple[mx.array, Any]:
        """Return features (B, T, F) and the target's other answers, with ``counts`` by term."""

    @abstractmethod
    def losses(
        self,
        head: nn.Module,
        embeddings: mx.array,
        features: mx.array,
        targets: tuple[mx.array, ...],
        settings: LossSettings,
    ) -> mx.array:
        """Compute the losses (terms,) of a batch, given the embeddings (B, T, h) of its tokens."""

    @abstractmethod
    def drafts(self, tokens: np.ndarray, rows: mx.array, begin: int) -> np.ndarray:
        """Draft greedily along tokens (B, T): target ids (depth, K), as if earlier ones were kept.

        ``rows`` (K,) are the slots, numbered row by row among those from ``begin`` on; slot i
        drafts what follows token i + 1.
        """

    @abstractmethod
    def files(
        self,
        notes: Mapping[str, Any],
        dtype: mx.Dtype | None = None,
        quantization: Quantization | None = None,
    ) -> HeadFiles:
        """Return ``config.json`` and the arrays of the converted folder; see ``head_files``."""

    def given_folder(self, scratch: Path) -> Path | None:
        """Return the converted folder that the run began with, made in ``scratch`` if need be."""
        return None

    def write_published(self, folder: Path) -> str:
        """Write the layout that the drafter came in; return what is there, for people."""
        return ""
