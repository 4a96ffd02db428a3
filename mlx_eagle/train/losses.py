"""Losses of the training-time test, one per step, over the slots of a batch that count.

They are those of EAGLE-3's trainers and are normalised as there: SpecForge's Eagle3 model, its
``LogSoftmaxLoss`` and its LK losses are the reference.
"""

from collections.abc import Callable, Iterable, Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.losses import cross_entropy

from .chunks import Arrays, chunk_rows, with_weights

TINY = 1e-8  # in place of a count of 0, which is divided by
TINIEST = 1e-37  # in place of an acceptance rate of 0, whose logarithm is taken: float32 holds it


def picked(steps: Iterable[mx.array], rows: mx.array, weights: mx.array) -> tuple[Arrays, Arrays]:
    """Return each step's hidden states (K, h) in the slots that count, and their weights (K,).

    ``steps`` yield hidden states (B, T, h); ``rows`` and ``weights`` are as in ``ChainTargets``.
    Rows 1, 5 and 6 of texts of 5 slots are in step 1 slots 0, none (5 begins a text), and 5.
    """
    found: Arrays = []
    counts: Arrays = []
    for step, hidden in enumerate(steps):
        is_there = (rows % hidden.shape[1] >= step) & (weights > 0)
        slots = mx.where(is_there, rows - step, 0)
        found.append(hidden.reshape(-1, hidden.shape[-1])[slots])
        counts.append(weights * is_there)
    return found, counts


def compared(
    head: nn.Module,
    parts: Iterable[str],
    project: Callable[[mx.array], mx.array],
    hidden: Arrays,
    compare: Callable[[int, mx.array], Arrays],
) -> Arrays:
    """Return what ``compare(begin, logits)`` makes of each step's hidden states (K, h).

    ``project`` makes logits of states by the ``parts`` of a head. Rows of all steps are taken a
    chunk at a time, because logits are the largest arrays there are: from row ``begin`` on,
    logits (num_steps, k, V) in float32. The results are (K,).
    """

    def inner(begin: int, rows: Arrays) -> Arrays:
        logits = project(mx.concatenate(rows)).astype(mx.float32)
        return compare(begin, logits.reshape(len(rows), -1, logits.shape[-1]))

    width = project(hidden[0][:1]).shape[-1]
    size = chunk_rows(width * len(hidden))
    return with_weights(head, parts, inner, hidden, size, again=False)


def mixed_losses(
    terms: Mapping[str, float],
    logits: mx.array,
    probs: mx.array | None,
    labels: mx.array | None = None,
) -> mx.array:
    """Compare logits (..., V) with the target's probabilities (..., V), or with labels (...).

    Returns the sums (...) of ``TrainSettings.terms``: "ce" is of the labels, all others of the
    probabilities.
    """
    total = mx.zeros(logits.shape[:-1])
    if labels is not None and "ce" in terms:
        total = total + terms["ce"] * cross_entropy(logits, labels)
    if probs is not None and "kl" in terms:
        least = -(probs * mx.log(mx.maximum(probs, TINIEST))).sum(axis=-1)
        total = total + terms["kl"] * (cross_entropy(logits, probs) - least)
    rejected = terms.get("tv", 0.0) + 2 * terms.get("l1", 0.0)
    if probs is not None and rejected:
        kept = mx.minimum(probs, mx.softmax(logits, axis=-1)).sum(axis=-1)
        total = total + rejected * (1 - kept)
    return total
