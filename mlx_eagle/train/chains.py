"""Chains of drafts: the recipe of drafters that take a token after the other, all at once.

Slot i takes the token at i + 1 and the target's state at i. In step k (from 0) it takes the token
at i + 1 + k and the state that step k - 1 left in it, and drafts the token at i + 2 + k.
"""

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .batches import TokenBatch
from .chunks import Arrays
from .given import Given
from .losses import TINY, compared, mixed_losses, picked
from .recipe import GivenRecipe
from .settings import TrainSettings
from .student import Student
from .teacher import HiddenTeacher, filled_up


class ChainTargets(NamedTuple):
    """Tokens to be drafted in a batch of (B, T) slots, K of them, and what the target adds.

    ``rows`` (K,): slots, numbered b * T + i, whose step 0 drafts the token at i + 2; in step k
    the slot k before each of them does. ``weights`` (K,): 1, or 0 for rows that only fill up.
    ``labels`` (K,): the tokens. ``counts`` (num_steps,): slots that count in each step, averaged
    over all ranks. ``seen``: keys and values of the target that the steps attend to, in turn.
    """

    rows: mx.array
    weights: mx.array
    labels: mx.array
    counts: mx.array
    seen: tuple[mx.array, ...] = ()


def chain_targets(batch: TokenBatch, num_steps: int) -> ChainTargets:
    """Return the places of a batch that are drafted: tokens of answers from the third on."""
    size, length = batch.tokens.shape
    is_answer = np.zeros((size, length), bool)
    is_answer[:, : length - 2] = batch.counts[:, 1 : length - 1]
    (rows,) = is_answer.ravel().nonzero()
    labels = batch.tokens.ravel()[rows + 2]
    slots, weights, counts = filled_up(rows, (size, length), num_steps)
    labels = np.pad(labels, (0, len(slots) - len(rows)))
    return ChainTargets(slots, weights, mx.array(labels, mx.int32), counts)


class ChainRecipe(GivenRecipe):
    """A drafter whose steps are compared with the target, each with a weight of its own."""

    def __init__(
        self,
        settings: TrainSettings,
        student: Student,
        model: nn.Module,
        given: Given,
        taps: tuple[int, ...] = (),
    ):
        super().__init__(settings, student, model, given)
        self.teacher = HiddenTeacher(model, taps)
        self.terms = settings.losses().terms
        self.width = int(student.embed(mx.array([0])).shape[-1])

    @abstractmethod
    def steps(
        self, head: Any, embeddings: mx.array, features: mx.array, targets: Any
    ) -> Iterator[mx.array]:
        """Yield the hidden states (B, T, h) of each step, for ``logits``."""

    @abstractmethod
    def logits(self, head: Any, hidden: mx.array) -> mx.array:
        """Return logits (K, V) after hidden states (K, h), with gradients."""

    @abstractmethod
    def output_parts(self) -> tuple[str, ...]:
        """Name the parts of the head that turn states into logits."""

    def choose(self, head: Any, hidden: mx.array) -> mx.array:
        """Return the drafts (K,) after hidden states (K, h), as decoding chooses them."""
        return mx.argmax(self.logits(head, hidden), axis=-1)

    def context(self, tokens: np.ndarray, targets: ChainTargets) -> tuple[mx.array, ChainTargets]:
        """Return the target's features of tokens (B, T), and targets with all that steps read."""
        return self.teacher.features(tokens), targets

    def teach(
        self, batch: TokenBatch, epoch: int, num_ranks: int = 1
    ) -> tuple[mx.array, ChainTargets]:
        return self.context(batch.tokens, chain_targets(batch, self.depth))

    def losses(
        self, head: Any, embeddings: mx.array, features: mx.array, targets: ChainTargets
    ) -> mx.array:
        steps = self.steps(head, embeddings, features, targets)
        hidden, weights = picked(steps, targets.rows, targets.weights)
        taught = features.reshape(-1, features.shape[-1])[targets.rows + 1, -self.width :]
        by_text = self.settings.labels == "text"

        def compare(begin: int, logits: mx.array, final: mx.array) -> Arrays:
            ids = targets.labels[begin : begin + len(final)]
            probs = None
            if not by_text or self.terms.keys() != {"ce"}:
                said = self.teacher.output(final).astype(mx.float32)
                ids = ids if by_text else mx.argmax(said, axis=-1)
                probs = mx.broadcast_to(mx.softmax(said, axis=-1), logits.shape)
            ids = mx.broadcast_to(ids, logits.shape[:-1])
            return list(mixed_losses(self.terms, logits, probs, ids))

        more = [mx.stop_gradient(taught)]
        project = partial(self.logits, head)
        found = compared(head, self.output_parts(), project, hidden, more, compare)
        sums = [(x * own).sum() for x, own in zip(found, weights, strict=True)]
        return mx.stack(sums) / mx.maximum(targets.counts, TINY)

    def drafts(self, tokens: np.ndarray, rows: mx.array) -> np.ndarray:
        head = self.student.head
        features, targets = self.context(tokens, ChainTargets(rows, rows, rows, rows))
        embeddings = self.student.embed(mx.array(tokens))
        steps = self.steps(head, embeddings, features, targets)
        return self.chosen(steps, rows, lambda x: self.choose(head, x))
