"""Training of DFlash2 heads: as DFlash, and the selector's choice among the candidates.

speculators 0.9, models/dflash2: both losses are weighed by position in one way, D-PACE each by its
own confidences. Which tokens are candidates is not learnt from; the target's choice takes the last
one's place where it is not among them.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.losses import cross_entropy

from .block import BlockRecipe
from .chunks import Arrays
from .given import Given
from .settings import TrainSettings
from .student import Student


class DFlash2Recipe(BlockRecipe):
    """A DFlash2 head, whose selector is told the text's token before each slot."""

    parts = ("candidate_selector",)

    def __init__(self, settings: TrainSettings, student: Student, model: nn.Module, given: Given):
        if student.dtype == mx.float16:
            raise ValueError(
                "a DFlash2 head exceeds the largest number of float16, which the target computes "
                "in: give --dtype bfloat16 or float32."
            )
        super().__init__(settings, student, model, given)

    def compare(
        self, states: mx.array, before: mx.array, labels: mx.array, final: mx.array
    ) -> Arrays:
        logits, _, found = self.drafter.slots(states)
        is_label = found == labels[..., None]
        last = mx.where(is_label.any(axis=-1), found[..., -1], labels)
        candidates = mx.concatenate([found[..., :-1], last[..., None]], axis=-1)
        rows = (x.reshape(-1, *x.shape[2:]) for x in (before, logits, states, candidates))
        scores = self.drafter.scores(*rows).astype(mx.float32).reshape(candidates.shape)
        place = mx.argmax(candidates == labels[..., None], axis=-1)
        return [cross_entropy(logits, labels), cross_entropy(scores, place)]
