"""Training of EAGLE heads by a training-time test; see ``losses.py`` and ``unroll.py``."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.losses import cross_entropy
from mlx.utils import tree_flatten

from ..convert.layouts import HeadFiles, as_it_came, as_speculators_do
from ..drafters.head_weights import split_weights
from ..drafters.quantize import packed
from ..drafters.target_parts import find_embedding, rows_of_lm_head
from .batches import TokenBatch
from .chains import ChainRecipe, ChainTargets, chain_targets
from .chunks import Arrays
from .data import Examples
from .draft_vocabulary import resized, resized_vocabulary
from .given import Given
from .losses import TINIEST, TINY
from .settings import TrainSettings
from .student import Student, fresh_student
from .teacher import Teacher
from .unroll import unroll

DEFAULT_VOCABULARY = 32000  # tokens, as in published heads
UNTRAINED = {
    "num_parallel_heads": "has parallel heads",
    "latent": "attends to a latent (MLA)",
    "position_scale": "scales queries by their position",
    "branch_norms": "has layers of Gemma-4",
}
"""Fields of heads that are more than llama layers, and words for these."""
EMBEDDING = "embed_tokens."  # of names of a head's own table, which only P-EAGLE heads learn


class Eagle3Recipe(ChainRecipe):
    """An EAGLE head, whose drafts are compared with distributions of the target.

    Losses are normalised as in EAGLE-3's trainers: SpecForge's Eagle3 model, its
    ``LogSoftmaxLoss`` and its LK losses: minus the mean log of the acceptance rate (alpha), and
    cross-entropy mixed with one minus that rate (lambda).
    """

    def __init__(
        self, settings: TrainSettings, student: Student, model: nn.Module, given: Given | None
    ):
        if not student.taps:
            raise ValueError("the head taps no layer of the target, so it cannot be taught.")
        teacher = Teacher(model, student.taps, student.ids)
        super().__init__(settings, student, model, given, teacher)
        self._ids = np.array(student.ids)

    def teach(self, batch: TokenBatch, epoch: int) -> tuple[mx.array, ChainTargets]:
        features = self.teacher.read(batch)
        shape = batch.tokens.shape
        rows = self.counted(batch, features)
        return features, chain_targets(rows, np.zeros_like(rows), shape, self.depth)

    def counted(self, batch: TokenBatch, features: mx.array) -> np.ndarray:
        """Return the slots that count and whose first draft can be the target's choice, (K,)."""
        (rows,) = batch.counts.ravel().nonzero()
        if not len(rows):
            return rows
        final = self.teacher.final(features, mx.array(rows + 1, mx.int32))
        return rows[np.isin(self.teacher.choices(final, self.teacher.whole), self._ids)]

    def steps(
        self, head: Any, embeddings: mx.array, features: mx.array, targets: Any
    ) -> Iterator[mx.array]:
        given = features[..., : -self.teacher.width]
        return unroll(head, embeddings, given, self.depth, bool(self.settings.grad_checkpoint))

    def output_parts(self) -> tuple[str, ...]:
        return "norm", "lm_head"

    def logits(self, head: Any, hidden: mx.array) -> mx.array:
        return head.logits(hidden)

    def compare(self, logits: mx.array, final: mx.array, labels: mx.array) -> Arrays:
        probs = mx.broadcast_to(self.teacher.probs(final), logits.shape)
        entropies = cross_entropy(logits, probs)
        if self.settings.loss == "ce":
            return list(entropies)
        of_all = probs * self.teacher.shares(final)[:, None]
        return [*entropies, *mx.minimum(of_all, mx.softmax(logits, axis=-1)).sum(axis=-1)]

    def summed(self, found: Arrays, weights: Arrays, counts: mx.array, num_slots: int) -> Arrays:
        settings = self.settings
        pairs = zip(found[: self.depth], weights, strict=True)
        entropies = [(x * own).sum() / num_slots for x, own in pairs]
        if settings.loss == "ce":
            return entropies
        losses = []
        kept = zip(entropies, found[self.depth :], weights, counts, strict=True)
        for entropy, accepted, own, count in kept:
            count = mx.maximum(count, TINY)
            logs = mx.where(accepted > 0, mx.log(mx.maximum(accepted, TINIEST)), 0.0)
            loss = -(logs * own).sum() / count
            if settings.loss == "lk-lambda":
                rate = (accepted * own).sum() / count
                decay = mx.exp(-settings.kl_decay * mx.stop_gradient(rate))
                share = settings.kl_scale * decay
                loss = share * entropy + (1 - share) * (1 - rate)
            losses.append(loss)
        return losses

    def _stored(self, parameters: Any, dtype: mx.Dtype) -> dict[str, mx.array]:
        """Return parameters in ``dtype``, by their names in a converted folder."""
        stored = split_weights(dict(tree_flatten(parameters)), self.student.head.config)
        return {name: array.astype(dtype) for name, array in stored.items()}

    def files(self, notes: Mapping[str, Any], is_final: bool = False) -> HeadFiles:
        student = self.student
        config = student.head.config
        dtype = student.dtype if is_final else mx.float32
        values = config.to_dict() | dict(notes)
        arrays = self._stored(student.head.parameters(), dtype)
        if is_final:
            never = (f"{EMBEDDING}weight",)
            values, arrays = packed(values, arrays, self.quantization, never)
        if config.has_d2t:
            arrays["d2t"] = student.ids - mx.arange(len(student.ids), dtype=mx.int32)
        return values, arrays

    def published(self) -> HeadFiles | None:
        """Return the head as it came, or else as speculators publish it, if they have words."""
        student = self.student
        head = student.head
        if self.given is not None and self.given.published is not None:
            learnt = self._stored(head.trainable_parameters(), mx.float32)
            if found := as_it_came(self.given.published, learnt, student.ids):
                return found
        own = self._stored(head.parameters(), student.dtype)
        if head.config.lm_head_source != "file":
            own |= rows_of_lm_head(self.model, find_embedding(self.model)[0], student.ids)
        return as_speculators_do(head.config, own, student.taps, student.ids)


def make_student(
    settings: TrainSettings,
    student: Student | None,
    model: nn.Module,
    config: dict[str, Any],
    examples: Examples,
) -> Student:
    """Make a fresh head, or take that of --init, with the draft vocabulary that is asked for.

    Raises ValueError for a head that is more than llama layers.
    """
    _, vocab_size = find_embedding(model)
    own = np.array([] if student is None else student.ids, np.int32)
    size = settings.draft_vocab_size or len(own) or min(DEFAULT_VOCABULARY, vocab_size)
    if student is not None:
        c = student.head.config
        for what in (words for name, words in UNTRAINED.items() if getattr(c, name)):
            raise ValueError(
                f"{settings.init} {what}, and only heads of llama layers are trained here: start "
                "from another head, or from none."
            )
        if c.lm_head_source == "target_rows":  # they are learnt
            student.head.config = replace(c, lm_head_source="file")
        if size == len(own):
            return student
    ids = resized_vocabulary(examples.train, own, size, vocab_size)
    if student is None:
        return fresh_student(model, config, ids, settings)
    return resized(student, model, ids)
