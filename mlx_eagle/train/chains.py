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
from .chunks import Arrays, eval_in_chunks
from .given import Given
from .losses import TINY, compared, mixed_losses, picked
from .recipe import Recipe
from .settings import TrainSettings
from .student import Student
from .teacher import Teacher


class ChainTargets(NamedTuple):
    """Places to be drafted in a batch of (B, T) slots, K of them, and what the target adds.

    ``rows`` (K,): slots, numbered b * T + i, whose step 0 drafts the token at i + 2; in step k
    the slot k before each of them does. ``weights`` (K,): 1, or 0 for a row that only fills up.
    ``labels`` (K,): the tokens, where they are compared with. ``counts`` (num_steps,): slots that
    count in each step, averaged over all ranks. ``seen``: arrays of the target that the steps
    attend to, in turn.
    """

    rows: mx.array
    weights: mx.array
    labels: mx.array
    counts: mx.array
    seen: tuple[mx.array, ...] = ()


def chain_targets(
    rows: np.ndarray, labels: np.ndarray, shape: tuple[int, int], num_steps: int
) -> ChainTargets:
    """Make the targets of ``rows`` (K,) of a batch (B, T) and their ``labels`` (K,).

    One row at least, so that there is something to compute.
    """
    counts = np.array([(rows % shape[1] >= step).sum() for step in range(num_steps)])
    fill = (0, int(not len(rows)))
    weights = np.pad(np.ones(len(rows), np.float32), fill)
    slots, ids = (mx.array(np.pad(x, fill), mx.int32) for x in (rows, labels))
    return ChainTargets(slots, mx.array(weights), ids, mx.array(counts, mx.float32))


class ChainRecipe(Recipe):
    """A drafter whose steps are compared with the target, each with a weight of its own."""

    def __init__(
        self,
        settings: TrainSettings,
        student: Student,
        model: nn.Module,
        given: Given | None,
        teacher: Teacher,
    ):
        super().__init__(settings, student, model, given)
        self.teacher = teacher
        self.terms = settings.terms

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

    def context(self, tokens: np.ndarray, targets: ChainTargets) -> tuple[mx.array, Any]:
        """Return the target's features of tokens (B, T), and targets with all that steps read."""
        return self.teacher.features(tokens), targets

    def teach(self, batch: TokenBatch, epoch: int) -> tuple[mx.array, ChainTargets]:
        """Let the places be drafted whose tokens are of the answers, from the third on."""
        shape = batch.tokens.shape
        is_answer = np.zeros(shape, bool)
        is_answer[:, :-2] = batch.counts[:, 1:-1]
        (rows,) = is_answer.ravel().nonzero()
        labels = batch.tokens.ravel()[rows + 2]
        return self.context(batch.tokens, chain_targets(rows, labels, shape, self.depth))

    def compare(self, logits: mx.array, final: mx.array, labels: mx.array) -> Arrays:
        """Compare each step's logits (steps, k, V) with what the target told (k, width)."""
        by_text = self.settings.labels == "text"
        probs = None
        if not by_text or self.terms.keys() != {"ce"}:
            said = self.teacher.output(final).astype(mx.float32)
            labels = labels if by_text else mx.argmax(said, axis=-1)
            probs = mx.broadcast_to(mx.softmax(said, axis=-1), logits.shape)
        labels = mx.broadcast_to(labels, logits.shape[:-1])
        return list(mixed_losses(self.terms, logits, probs, labels))

    def summed(self, found: Arrays, weights: Arrays, counts: mx.array, num_slots: int) -> Arrays:
        """Return the loss of each step, of what ``compare`` found in its slots (K,).

        ``num_slots`` are all slots of the batch, ``counts`` (num_steps,) those that count.
        """
        counts = mx.maximum(counts, TINY)
        return [(x * own).sum() / n for x, own, n in zip(found, weights, counts, strict=True)]

    def losses(
        self, head: Any, embeddings: mx.array, features: mx.array, targets: Any
    ) -> mx.array:
        steps = self.steps(head, embeddings, features, targets)
        hidden, weights = picked(steps, targets.rows, targets.weights)

        def compare(begin: int, logits: mx.array) -> Arrays:
            own = slice(begin, begin + logits.shape[1])
            final = self.teacher.final(features, targets.rows[own] + 1)
            return self.compare(logits, final, targets.labels[own])

        project = partial(self.logits, head)
        found = compared(head, self.output_parts(), project, hidden, compare)
        num_slots = features.shape[0] * features.shape[1]
        return mx.stack(self.summed(found, weights, targets.counts, num_slots))

    def drafts(self, tokens: np.ndarray, rows: mx.array) -> np.ndarray:
        head = self.student.head
        features, targets = self.context(tokens, ChainTargets(rows, rows, rows, rows))
        embeddings = self.student.embed(mx.array(tokens))
        drafts = []
        for states in self.steps(head, embeddings, features, targets):
            picked = states.reshape(-1, states.shape[-1])[rows]
            ids = self.student.ids
            found = ids[eval_in_chunks(partial(self.choose, head), picked, len(ids))]
            drafts.append(np.array(found))
            mx.eval(states)
        return np.array(drafts)
