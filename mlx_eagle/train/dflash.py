"""Training of DFlash heads: cross-entropy with the target's choices."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from ..drafters.block_config import BlockConfig
from ..drafters.dflash import DFlashHead
from .block import BlockRecipe, flat_values, fresh_fields, write_fresh
from .chunks import Arrays
from .losses import label_entropies
from .settings import TrainSettings


class DFlashRecipe(BlockRecipe):
    """A DFlash head, whose slots know nothing of each other's choices."""

    def compare(
        self, hidden: mx.array, before: mx.array, labels: mx.array, final: mx.array
    ) -> Arrays:
        return [label_entropies(self.drafter.logits(hidden).astype(mx.float32), labels)]


def write_new(folder: Path, settings: TrainSettings, *target: Any) -> None:
    """Write a new head for a ``target`` (see ``fresh_fields``), as z-lab publishes them."""
    config = BlockConfig(**fresh_fields(settings, *target))
    values = flat_values(config, "DFlashDraftModel")
    write_fresh(folder, DFlashHead(config), settings.seed, values)
