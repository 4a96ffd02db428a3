"""Training of EAGLE heads by a training-time test; see ``losses.py`` and ``unroll.py``."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..convert.layouts import HeadFiles, as_it_came, as_speculators_do
from ..drafters.head_weights import split_weights
from ..drafters.quantize import packed
from ..drafters.target_parts import find_embedding, rows_of_lm_head
from ..system.ranks import is_first
from .batches import TokenBatch
from .data import Examples
from .draft_vocabulary import resized, resized_vocabulary
from .given import Given
from .losses import TargetBatch, step_losses
from .memory import amount
from .recipe import Recipe
from .settings import CACHE_BITS, TrainSettings
from .student import Student, fresh_student
from .teacher import Teacher, cache_name
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


class Eagle3Recipe(Recipe):
    """An EAGLE head and its teacher."""

    def __init__(
        self,
        settings: TrainSettings,
        student: Student,
        model: nn.Module,
        given: Given | None,
        examples: Examples,
    ):
        super().__init__(settings, student, model, given)
        self.teacher = make_teacher(settings, model, student, examples)

    def teach(
        self, batch: TokenBatch, epoch: int, num_ranks: int = 1
    ) -> tuple[mx.array, TargetBatch]:
        return self.teacher.teach(batch, self.depth, num_ranks)

    def losses(
        self, head: Any, embeddings: mx.array, features: mx.array, targets: Any
    ) -> mx.array:
        return step_losses(head, embeddings, features, targets, self.settings.losses())

    def hidden(self, tokens: mx.array, features: mx.array) -> Iterator[mx.array]:
        """Yield the hidden states (B, T, h) of each draft in a row."""
        return unroll(self.student.head, self.student.embed(tokens), features, self.depth)

    def drafts(self, tokens: np.ndarray, rows: mx.array) -> np.ndarray:
        steps = self.hidden(mx.array(tokens), self.teacher.features(tokens))
        return self.chosen(steps, rows, lambda x: mx.argmax(self.student.head.logits(x), axis=-1))

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


def make_teacher(
    settings: TrainSettings, model: nn.Module, student: Student, examples: Examples
) -> Teacher:
    """Make the teacher, with its cache if one is asked for and there is room for it."""
    kind = settings.losses().kind
    needs_sums = kind not in ("ce", "kl")
    taught = (model, student.taps, student.ids)
    teacher = Teacher(*taught, needs_sums)
    if settings.cache_features is None:
        return teacher
    bits = settings.cache_bits
    name = cache_name(examples, *taught, kind if needs_sums else "ce", bits)
    cache = Path(settings.cache_features).expanduser() / name
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    needed = teacher.cache_bytes(examples.train, student, bits)
    taken = f"{cache} takes up to {amount(needed)}, and {amount(free)} are free"
    if needed > free and not any(cache.iterdir()):
        way_on = "leave out --cache-features"
        if teacher.cache_bytes(examples.train, student, CACHE_BITS) <= free:
            way_on = f"give --cache-bits {CACHE_BITS}, or {way_on}"
        raise ValueError(f"{taken}: {way_on}.")
    if is_first():
        print(f"{taken}.")
    teacher.keep_in(cache, bits)
    return teacher
