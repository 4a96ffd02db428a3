"""Training of EAGLE heads by a training-time test; see ``losses.py`` and ``unroll.py``."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..drafters.head_weights import split_weights
from ..drafters.target_parts import find_embedding
from ..system.ranks import is_first
from .batches import TokenBatch
from .data import Examples
from .draft_vocabulary import resized, resized_vocabulary
from .given import Given, write_published
from .losses import TargetBatch, step_losses
from .memory import amount
from .published_head import published_files
from .recipe import Recipe
from .settings import CACHE_BITS, TrainSettings
from .student import HeadFiles, Student, fresh_student, packed, student_from
from .teacher import Teacher, cache_name
from .unroll import unroll

DEFAULT_VOCABULARY = 32000  # tokens, as in published heads
NEVER_QUANTIZED = ("embed_tokens.weight",)  # of a head's own matrices


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

    def _parameters(self) -> dict[str, mx.array]:
        head = self.student.head
        return split_weights(dict(tree_flatten(head.parameters())), head.config)

    def files(self, notes: Mapping[str, Any], is_final: bool = False) -> HeadFiles:
        student = self.student
        config = student.head.config
        arrays = self._parameters()
        values = config.to_dict() | dict(notes)
        if is_final:
            arrays = {name: array.astype(student.dtype) for name, array in arrays.items()}
            entry, arrays = packed(arrays, self.settings, NEVER_QUANTIZED)
            values |= entry
        if config.has_d2t:
            arrays["d2t"] = student.ids - mx.arange(len(student.ids), dtype=mx.int32)
        return values, arrays

    def write_published(self, folder: Path) -> str:
        came = None if self.given is None else self.given.published
        found = published_files(self.student, self._parameters(), self.model, came)
        return "" if found is None else write_published(folder, *found)


def make_student(
    settings: TrainSettings, model: nn.Module, config: dict[str, Any], examples: Examples
) -> Student:
    """Make a fresh head, or take that of --init, with the draft vocabulary that is asked for."""
    _, vocab_size = find_embedding(model)
    size = settings.draft_vocab_size
    if settings.init is None:
        size = size or min(DEFAULT_VOCABULARY, vocab_size)
        ids = resized_vocabulary(examples.train, np.array([], np.int32), size, vocab_size)
        return fresh_student(model, config, ids, settings)
    student = student_from(settings.init, model, settings.model)
    ids = np.array(student.ids)
    if size in (None, len(ids)):
        return student
    ids = resized_vocabulary(examples.train, ids, size, vocab_size)
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
