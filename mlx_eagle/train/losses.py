"""What a head is scored by: per step, on the slots of a batch that count.

The losses of EAGLE-3's trainers, normalised as there: SpecForge's Eagle3 model, its
``LogSoftmaxLoss`` and its LK losses are the reference.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..drafters.head import Eagle3Head
from .compiled import is_compiled
from .exponentials import exponentials, softmax
from .unroll import unroll

LOSSES = ("ce", "lk-alpha", "lk-lambda")
TINY = 1e-8


@dataclass(frozen=True)
class LossSettings:
    """``num_steps`` of the training-time test, step j weighted by ``decay`` ** j.

    ``kind``: "ce", soft cross-entropy; "lk-alpha", minus the mean log of the acceptance rate;
    "lk-lambda", cross-entropy and one minus the acceptance rate, mixed by ``kl_scale`` *
    exp(-``kl_decay`` * acceptance rate).
    """

    num_steps: int = 7
    decay: float = 0.8
    kind: str = "ce"
    kl_scale: float = 1.0
    kl_decay: float = 1.0
    checkpoint: bool = False

    def __post_init__(self) -> None:
        if self.kind not in LOSSES:
            raise ValueError(f"loss is {self.kind!r}: give one of {', '.join(LOSSES)}.")
        if self.num_steps < 1:
            raise ValueError(f"ttt_steps is {self.num_steps}: give 1 or more.")

    @property
    def weights(self) -> mx.array:
        """The weight of each step, (num_steps,)."""
        return mx.array([self.decay**step for step in range(self.num_steps)])


@dataclass(frozen=True)
class Teaching:
    """What the target says where it counts, K rows of a batch of (B, T) slots.

    ``rows`` (K,): slots, numbered row by row (b * T + i), whose first draft counts: slot i
    drafts what follows token i + 1. In step j the slot j before each of them is the one whose
    draft is of the same place, so one set of rows serves all steps. ``weights`` (K,): 1, or 0
    for rows that only fill up. ``logits`` (K, Vd): the target's, of the tokens that can be
    drafted. ``log_z`` (K,): the logarithm of the sum of exponentials over its whole
    vocabulary. ``num_slots`` (): what a step's sum of cross-entropies is divided by.
    ``counts`` (num_steps,): how many slots count in each step, on the average of all ranks.
    """

    rows: mx.array
    weights: mx.array
    logits: mx.array
    log_z: mx.array
    num_slots: mx.array
    counts: mx.array

    def arrays(self) -> tuple[mx.array, ...]:
        return self.rows, self.weights, self.logits, self.log_z, self.num_slots, self.counts


def first_slot(teaching: Teaching, length: int, num_steps: int) -> int:
    """The first slot of any text that counts in any step, of ``length`` slots each.

    0 where steps are compiled, which has to be known before the rows are.
    """
    if is_compiled():
        return 0
    places = mx.where(teaching.weights > 0, teaching.rows % length, length)
    place = int(places.min().item())
    return max(0, place - num_steps + 1) if place < length else 0


def slots_at(
    rows: mx.array, weights: mx.array, length: int, step: int, first: int = 0
) -> tuple[mx.array, mx.array]:
    """The slots that count in a step, (K,), and their weights; see ``Teaching.rows``.

    They are numbered among those from ``first`` on, for nothing counts before it. Rows 1, 5 and 6
    of texts of 5 slots, in step 1: slots 0, none (5 begins a text), 5.
    """
    counts = (rows % length >= step) & (weights > 0)
    left_out = first * (rows // length + 1)
    return mx.where(counts, rows - step - left_out, 0), weights * counts


def step_losses(
    head: Eagle3Head,
    embeddings: mx.array,
    features: mx.array,
    teaching: Teaching,
    settings: LossSettings,
) -> mx.array:
    """The loss of every step, (num_steps,) float32, not weighted yet.

    ``embeddings`` (B, T, h) and ``features`` (B, T, F) as ``unroll`` takes them.
    """
    length = embeddings.shape[1]
    first = first_slot(teaching, length, settings.num_steps)
    target = softmax(teaching.logits)
    losses = []
    steps = unroll(head, embeddings, features, settings.num_steps, settings.checkpoint, first)
    for step, states in enumerate(steps):
        slots, weights = slots_at(teaching.rows, teaching.weights, length, step, first)
        picked = states.reshape(-1, states.shape[-1])[slots]
        score = _checkpointed_score if settings.checkpoint else _score
        losses.append(score(head, picked, weights, target, teaching, step, settings))
    return mx.stack(losses)


def _cross_entropies(logits: mx.array, target: mx.array) -> tuple[mx.array, mx.array]:
    """Of logits (K, Vd) with probabilities (K, Vd): (K,), and the logits' log sums (K,)."""
    largest = logits.max(axis=-1, keepdims=True)
    log_z = mx.log(exponentials(logits - largest).sum(axis=-1)) + largest[:, 0]
    # The target's probabilities sum to 1: that much of log_z.
    return log_z - (target * logits).sum(axis=-1), log_z


def _gradients(
    primals: tuple[mx.array, mx.array],
    cotangents: tuple[mx.array, mx.array],
    outputs: tuple[mx.array, mx.array],
) -> tuple[mx.array, mx.array]:
    logits, target = primals
    of_entropies, of_log_z = (cotangent[:, None] for cotangent in cotangents)
    drafted = exponentials(logits - outputs[1][:, None])
    of_logits = (of_entropies + of_log_z) * drafted - of_entropies * target
    return of_logits, -of_entropies * logits


cross_entropies: Any = mx.custom_function(_cross_entropies)
cross_entropies.vjp(_gradients)


def _score(
    head: Eagle3Head,
    states: mx.array,
    weights: mx.array,
    target: mx.array,
    teaching: Teaching,
    step: int,
    settings: LossSettings,
) -> mx.array:
    """One step's loss, (), of states (K, h)."""
    logits = head.logits(states).astype(mx.float32)
    entropies, log_z = cross_entropies(logits, target)
    loss = (entropies * weights).sum() / teaching.num_slots
    if settings.kind == "ce":
        return loss
    drafted = mx.exp(logits - log_z[:, None])
    of_all = mx.exp(teaching.logits - teaching.log_z[:, None])
    accepted = mx.minimum(of_all, drafted).sum(axis=-1)
    count = mx.maximum(teaching.counts[step], TINY)
    if settings.kind == "lk-alpha":
        logs = mx.where(accepted > 0, mx.log(mx.maximum(accepted, 1e-37)), 0.0)
        return -(logs * weights).sum() / count
    rate = (accepted * weights).sum() / count
    share = settings.kl_scale * mx.exp(-settings.kl_decay * mx.stop_gradient(rate))
    return share * loss + (1 - share) * (1 - rate)


def _checkpointed_score(
    head: Eagle3Head,
    states: mx.array,
    weights: mx.array,
    target: mx.array,
    teaching: Teaching,
    step: int,
    settings: LossSettings,
) -> mx.array:
    """The same; logits (K, Vd), the largest arrays there are, are computed again."""

    def inner(parameters: dict, states: mx.array, *rest: mx.array) -> mx.array:
        head.update(parameters)
        weights, target, *arrays = rest
        return _score(head, states, weights, target, Teaching(*arrays), step, settings)

    parameters = head.trainable_parameters()
    arrays = teaching.arrays()
    loss = mx.checkpoint(inner)(parameters, states, weights, target, *arrays)
    head.update(parameters)
    return loss
