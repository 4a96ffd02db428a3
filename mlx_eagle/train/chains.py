"""Chains of drafts: the recipe of drafters that take a token after the other, all at once.

Slot i takes the token at i + 1 and the target's state at i. In step k (from 0) it takes the token
at i + 1 + k and the state that step k - 1 left in it, and drafts the token at i + 2 + k.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .batches import TokenBatch
from .chunks import Arrays, chunk_rows, eval_in_chunks, with_weights
from .compiled import padded, softmax
from .given import Given, GivenRecipe
from .losses import TINY, first_slot, mixed_losses, slots_at
from .settings import LossSettings, TrainSettings
from .student import Student
from .teacher import PARTS, HiddenTeacher


class ChainTargets(NamedTuple):
    """Tokens to be drafted in a batch of (B, T) slots, K of them, and what the target adds.

    ``rows`` (K,): slots, numbered b * T + i, whose step 0 drafts the token at i + 2; in step k
    the slot k before each of them does. ``weights`` (K,): 1, or 0 for rows that only fill up.
    ``labels`` (K,): the tokens. ``counts`` (num_steps,): slots that count in each step, averaged
    over all ranks.
    """

    rows: mx.array
    weights: mx.array
    labels: mx.array
    counts: mx.array
    keys: tuple[mx.array, ...] = ()
    values: tuple[mx.array, ...] = ()


def chain_targets(batch: TokenBatch, num_steps: int, extra: int = 0) -> ChainTargets:
    """Return the places of a batch that are drafted: tokens of answers from the third on."""
    size, length = batch.tokens.shape
    is_answer = np.zeros((size, length), bool)
    is_answer[:, : length - 2] = batch.counts[:, 1 : length - 1]
    (rows,) = is_answer.ravel().nonzero()
    labels = batch.tokens.ravel()[rows + 2]
    counts = np.array([(rows % length >= step).sum() for step in range(num_steps)])
    fill = padded(max(1, len(rows)), -(-size * length // PARTS)) - len(rows)
    return ChainTargets(
        mx.array(np.pad(rows, (0, fill)), mx.int32),
        mx.array(np.repeat([1.0, 0.0], [len(rows), fill]), mx.float32),
        mx.array(np.pad(labels, (0, fill)), mx.int32),
        mx.array(counts, mx.float32),
    )


def known_tokens(embeddings: mx.array, step: int, first: int) -> mx.array:
    """Return the embeddings of the tokens that slots from ``first`` on take in a step.

    Behind the text they are zeros.
    """
    known = embeddings[:, first + step + 1 :]
    missing = embeddings.shape[1] - first - known.shape[1]
    return mx.pad(known, [(0, 0), (0, missing), (0, 0)])


class ChainRecipe(GivenRecipe):
    """A drafter whose steps are compared with the target, each with a weight of its own."""

    def __init__(
        self,
        settings: TrainSettings,
        student: Student,
        model: nn.Module,
        given: Given,
        teacher: HiddenTeacher,
    ):
        super().__init__(settings, student, model, given)
        self.teacher = teacher
        self.depth = settings.losses().num_steps
        self.weights = settings.losses().weights

    @abstractmethod
    def steps(
        self,
        head: Any,
        embeddings: mx.array,
        features: mx.array,
        targets: ChainTargets,
        settings: LossSettings,
        first: int,
    ) -> Iterator[mx.array]:
        """Yield the hidden states (B, T - first, h) of each step, for ``logits``."""

    @abstractmethod
    def logits(self, head: Any, hidden: mx.array) -> mx.array:
        """Return logits (K, V) after hidden states (K, h), with gradients."""

    @abstractmethod
    def output_parts(self) -> tuple[str, ...]:
        """Name the parts of the head that turn states into logits."""

    def final(self, features: mx.array) -> mx.array:
        """Return the states that enter the target's output matrix, of features."""
        return features[..., -self.width :]

    @property
    def width(self) -> int:
        return int(self.student.embed(mx.array([0])).shape[-1])

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
        self,
        head: nn.Module,
        embeddings: mx.array,
        features: mx.array,
        targets: tuple[Any, ...],
        settings: LossSettings,
    ) -> mx.array:
        given = ChainTargets(*targets)
        length = embeddings.shape[1]
        begin: Any = given
        first = first_slot(begin, length, self.depth)
        picked: Arrays = []
        weights: Arrays = []
        for step, hidden in enumerate(
            self.steps(head, embeddings, features, given, settings, first)
        ):
            slots, counts = slots_at(given.rows, given.weights, length, step, first)
            picked.append(hidden.reshape(-1, hidden.shape[-1])[slots])
            weights.append(counts)
        final = self.final(features)
        taught = final.reshape(-1, final.shape[-1])[given.rows + 1]
        found = self._compared(head, picked, mx.stop_gradient(taught), given.labels, settings)
        sums = [(x * own).sum() for x, own in zip(found, weights, strict=True)]
        return mx.stack(sums) / mx.maximum(given.counts, TINY)

    def _compared(
        self,
        head: nn.Module,
        picked: Arrays,
        taught: mx.array,
        labels: mx.array,
        settings: LossSettings,
    ) -> Arrays:
        """Compare each step's hidden states (K, h) with the target's (K, h) or the labels (K,)."""
        num_steps = len(picked)
        vocab_size = len(self.student.ids)
        terms = settings.terms
        by_text = self.settings.labels == "text"
        is_by_text = by_text and terms.keys() == {"ce"}

        def compare(begin: int, rows: Arrays) -> Arrays:
            *hidden, final = rows
            own = len(final)
            shape = (num_steps, own, vocab_size)
            logits = self.logits(head, mx.concatenate(hidden)).astype(mx.float32).reshape(shape)
            ids = labels[begin : begin + own]
            probs = None
            if not is_by_text:
                said = self.teacher.output(final).astype(mx.float32)
                ids = ids if by_text else mx.argmax(said, axis=-1)
                probs = mx.broadcast_to(softmax(said), shape)
            return list(mixed_losses(terms, logits, probs, mx.broadcast_to(ids, shape[:-1])))

        size = chunk_rows(vocab_size * num_steps)
        parts = self.output_parts()
        return with_weights(head, parts, compare, [*picked, taught], size, again=False)

    def drafts(self, tokens: np.ndarray, rows: mx.array, begin: int) -> np.ndarray:
        head = self.student.head
        none = ChainTargets(rows, rows, rows, rows)
        features, targets = self.context(tokens, none)
        embeddings = self.student.embed(mx.array(tokens))
        settings = self.settings.losses()
        choose: Callable[[mx.array], mx.array] = lambda x: self.choose(head, x)  # noqa: E731
        drafts = []
        for hidden in self.steps(head, embeddings, features, targets, settings, begin):
            picked = hidden.reshape(-1, hidden.shape[-1])[rows]
            drafts.append(eval_in_chunks(choose, picked, len(self.student.ids)))
            mx.eval(drafts[-1], hidden)
        return np.array(mx.stack(drafts))
