"""Training-time test and its losses, per step, on the slots of a batch that count.

Every slot drafts its own chain, all slots at once: step after step the head is fed what it drafted
before, as in decoding (Li et al. 2025, arXiv:2503.01840, section 3.3). The losses are those of
EAGLE-3's trainers, normalised as there: SpecForge's Eagle3 model, its ``LogSoftmaxLoss`` and its
LK losses are the reference.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..drafters.head import DraftAttention, DraftLayer, Eagle3Head

LOSSES = ("ce", "lk-alpha", "lk-lambda")
TINY = 1e-8


def is_compiled() -> bool:
    """Whether steps are compiled: on a GPU.

    On a CPU every fused kernel is a run of the C++ compiler, for minutes on end.
    """
    return bool(mx.default_device() == mx.gpu)


def padded(size: int, part: int) -> int:
    """``size``, up to a multiple of ``part`` where steps are compiled: one serves one shape."""
    return -(-size // part) * part if is_compiled() else size


def fast_exp(x: mx.array) -> mx.array:
    """e to the ``x``; on a CPU, MLX's powers take a quarter of the time of its exp."""
    return mx.exp(x) if is_compiled() else mx.power(math.e, x)


def softmax(x: mx.array) -> mx.array:
    """Over the last axis, in float32 and back to the type of ``x``."""
    if is_compiled():
        return mx.softmax(x, axis=-1, precise=True)
    return powers(x.astype(mx.float32)).astype(x.dtype)


def _powers(x: mx.array) -> mx.array:
    exps = fast_exp(x - x.max(axis=-1, keepdims=True))
    return exps / exps.sum(axis=-1, keepdims=True)


def _gradient(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    of_output = cotangent * output
    return of_output - output * of_output.sum(axis=-1, keepdims=True)


powers: Any = mx.custom_function(_powers)
powers.vjp(_gradient)


@dataclass
class ChainKeys:
    """One layer's keys and values of every step so far, each (B, Hkv, R, D)."""

    keys: list[mx.array] = field(default_factory=list)
    values: list[mx.array] = field(default_factory=list)


def unroll(
    head: Eagle3Head,
    embeddings: mx.array,
    features: mx.array,
    num_steps: int,
    checkpoint: bool = False,
    first: int = 0,
) -> Iterator[mx.array]:
    """States (B, T - first, h) of ``num_steps`` steps; ``head.logits`` takes them.

    ``embeddings`` (B, T, h) are those of the batch's tokens, ``features`` (B, T, F) the
    target's taps at the same positions. In step j (from 0) slot i takes the token at
    i + 1 + j and, at position i + j, the state that step j - 1 left in it: step j of slot i is
    the j-th draft after a text that ends with token i + 1. It attends to the slots up to i of
    step 0 and to its own of the later steps. Texts are padded at their end, and slots near it
    whose tokens are not known take zeros: what they give means nothing. Chains of slots before
    ``first``, which nobody asks about, end with step 0.

    ``checkpoint`` computes each step again for its gradient rather than keep what is between.
    """
    states = head.fuse(features)
    past = [ChainKeys() for _ in head.layers]
    forward = _checkpointed if checkpoint else _advance
    for step in range(num_steps):
        states = forward(head, _from(embeddings, step + 1), states, past, step, first)
        if step == 0:
            embeddings = embeddings[:, first:]
        yield states


def _from(rows: mx.array, start: int) -> mx.array:
    """Rows (B, T, h) from ``start`` on, with zeros after the last."""
    left = min(start, rows.shape[1])
    return mx.pad(rows[:, left:], [(0, 0), (0, left), (0, 0)])


def _advance(
    head: Eagle3Head,
    embeddings: mx.array,
    states: mx.array,
    past: list[ChainKeys],
    step: int,
    first: int,
) -> mx.array:
    """One step, which adds its keys and values to ``past``; states (B, T - first, h).

    Step 0 is given all slots, and of those before ``first`` the last layer gives these alone.
    """
    embeddings, states = head.enter(embeddings, states)
    for i, (layer, chain) in enumerate(zip(head.layers, past, strict=True), start=1):
        x, residual = layer.enter(embeddings, states)
        skip = first if step == 0 and i == len(past) else 0
        attended = _attend(layer, x, chain, step, first if step else 0, skip)
        states = layer.leave(residual[:, skip:], attended)
    return head.leave(states)


def _checkpointed(
    head: Eagle3Head,
    embeddings: mx.array,
    states: mx.array,
    past: list[ChainKeys],
    step: int,
    first: int,
) -> mx.array:
    """The same, keeping only what goes in and comes out."""

    def inner(parameters: dict, embeddings: mx.array, states: mx.array, flat: list) -> list:
        head.update(parameters)
        chains = [ChainKeys(list(keys), list(values)) for keys, values in flat]
        states = _advance(head, embeddings, states, chains, step, first)
        return [states, *((chain.keys[-1], chain.values[-1]) for chain in chains)]

    parameters = head.trainable_parameters()
    flat = [(chain.keys, chain.values) for chain in past]
    states, *new = mx.checkpoint(inner)(parameters, embeddings, states, flat)
    head.update(parameters)
    for chain, (keys, values) in zip(past, new, strict=True):
        chain.keys.append(keys)
        chain.values.append(values)
    return states


def _attend(
    layer: DraftLayer, x: mx.array, chain: ChainKeys, step: int, start: int, skip: int
) -> mx.array:
    """Attention of one layer's slots from ``start`` on in one step, x (B, R, I).

    The first ``skip`` of them do not attend: (B, R - skip, h).
    """
    attention = layer.self_attn
    q, k, v = _project(attention, x, start + step)
    chain.keys.append(k)
    chain.values.append(v)
    q, start = q[:, :, skip:], start + skip
    batch, _, rows, width = q.shape
    # Queries by the key head they share: (B, Hkv, G, R, D).
    q = q.reshape(batch, attention.num_kv_heads, -1, rows, width) * attention.scale
    # Of its own chain a slot sees the steps that a window has not left behind.
    first = 1 if layer.window is None else max(1, step - layer.window + 1)
    keys = [k[:, :, None] for k in (chain.keys[0], *chain.keys[first:])]
    values = [v[:, :, None] for v in (chain.values[0], *chain.values[first:])]
    num_slots = start + rows
    visible = _visible(num_slots, start, step, layer.window)
    hidden = mx.where(visible, 0.0, -mx.inf).astype(q.dtype)
    scores = mx.addmm(hidden, q, keys[0].swapaxes(-1, -2))
    own = [(q * k).sum(axis=-1, keepdims=True) for k in keys[1:]]
    weights = softmax(mx.concatenate([scores, *own], axis=-1))
    # Split at once: the gradient of each slice alone would be as large as all of them.
    parts = mx.split(weights, [num_slots + i for i in range(len(own))], axis=-1)
    out = parts[0] @ values[0]
    for part, v in zip(parts[1:], values[1:], strict=True):
        out = out + part * v
    out = out.reshape(batch, attention.num_heads, rows, width)
    return attention.o_proj(out.swapaxes(1, 2).reshape(batch, rows, -1))


def _project(
    attention: DraftAttention, x: mx.array, position: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries (B, H, R, D), keys and values (B, Hkv, R, D), the first at ``position``."""
    batch, rows, _ = x.shape
    heads = attention.qkv_proj(x).reshape(batch, rows, -1, attention.head_dim).swapaxes(1, 2)
    num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
    q, k, v = mx.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
    if "q_norm" in attention:
        q, k = attention.q_norm(q), attention.k_norm(k)
    return attention.rope(q, offset=position), attention.rope(k, offset=position), v


def _visible(num_slots: int, start: int, step: int, window: int | None) -> mx.array:
    """Which slots of step 0 those from ``start`` on see in that step, (T - start, T)."""
    slots = mx.arange(num_slots)
    rows = slots[start:, None]
    visible = slots <= rows
    if window is not None:
        visible = visible & (rows + step < slots + window)
    return visible


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
class TargetBatch:
    """What the target says where it counts, K rows of a batch of (B, T) slots.

    ``rows`` (K,): slots, numbered row by row (b * T + i), whose first draft counts: slot i
    drafts what follows token i + 1. In step j the slot j before each of them is the one whose
    draft is of the same place, so one set of rows serves all steps. ``weights`` (K,): 1, or 0
    for rows that only fill up. ``logits`` (K, Vd): the target's, of the tokens that can be
    drafted. ``log_z`` (K,): the logarithm of the sum of fast_exp over its whole
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


def first_slot(targets: TargetBatch, length: int, num_steps: int) -> int:
    """The first slot of any text that counts in any step, of ``length`` slots each.

    0 where steps are compiled, which has to be known before the rows are.
    """
    if is_compiled():
        return 0
    places = mx.where(targets.weights > 0, targets.rows % length, length)
    place = int(places.min().item())
    return max(0, place - num_steps + 1) if place < length else 0


def slots_at(
    rows: mx.array, weights: mx.array, length: int, step: int, first: int = 0
) -> tuple[mx.array, mx.array]:
    """The slots that count in a step, (K,), and their weights; see ``TargetBatch.rows``.

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
    targets: TargetBatch,
    settings: LossSettings,
) -> mx.array:
    """The loss of every step, (num_steps,) float32, not weighted yet.

    ``embeddings`` (B, T, h) and ``features`` (B, T, F) as ``unroll`` takes them.
    """
    length = embeddings.shape[1]
    first = first_slot(targets, length, settings.num_steps)
    probs = softmax(targets.logits)
    losses = []
    steps = unroll(head, embeddings, features, settings.num_steps, settings.checkpoint, first)
    for step, states in enumerate(steps):
        slots, weights = slots_at(targets.rows, targets.weights, length, step, first)
        picked = states.reshape(-1, states.shape[-1])[slots]
        score = _checkpointed_score if settings.checkpoint else _score
        losses.append(score(head, picked, weights, probs, targets, step, settings))
    return mx.stack(losses)


def _cross_entropies(logits: mx.array, target: mx.array) -> tuple[mx.array, mx.array]:
    """Of logits (K, Vd) with probabilities (K, Vd): (K,), and the logits' log sums (K,)."""
    largest = logits.max(axis=-1, keepdims=True)
    log_z = mx.log(fast_exp(logits - largest).sum(axis=-1)) + largest[:, 0]
    # The target's probabilities sum to 1: that much of log_z.
    return log_z - (target * logits).sum(axis=-1), log_z


def _gradients(
    primals: tuple[mx.array, mx.array],
    cotangents: tuple[mx.array, mx.array],
    outputs: tuple[mx.array, mx.array],
) -> tuple[mx.array, mx.array]:
    logits, target = primals
    of_entropies, of_log_z = (cotangent[:, None] for cotangent in cotangents)
    drafted = fast_exp(logits - outputs[1][:, None])
    of_logits = (of_entropies + of_log_z) * drafted - of_entropies * target
    return of_logits, -of_entropies * logits


cross_entropies: Any = mx.custom_function(_cross_entropies)
cross_entropies.vjp(_gradients)


def _score(
    head: Eagle3Head,
    states: mx.array,
    weights: mx.array,
    target: mx.array,
    targets: TargetBatch,
    step: int,
    settings: LossSettings,
) -> mx.array:
    """One step's loss, (), of states (K, h)."""
    logits = head.logits(states).astype(mx.float32)
    entropies, log_z = cross_entropies(logits, target)
    loss = (entropies * weights).sum() / targets.num_slots
    if settings.kind == "ce":
        return loss
    drafted = mx.exp(logits - log_z[:, None])
    of_all = mx.exp(targets.logits - targets.log_z[:, None])
    accepted = mx.minimum(of_all, drafted).sum(axis=-1)
    count = mx.maximum(targets.counts[step], TINY)
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
    targets: TargetBatch,
    step: int,
    settings: LossSettings,
) -> mx.array:
    """The same; logits (K, Vd), the largest arrays there are, are computed again."""

    def inner(parameters: dict, states: mx.array, *rest: mx.array) -> mx.array:
        head.update(parameters)
        weights, target, *arrays = rest
        return _score(head, states, weights, target, TargetBatch(*arrays), step, settings)

    parameters = head.trainable_parameters()
    arrays = targets.arrays()
    loss = mx.checkpoint(inner)(parameters, states, weights, target, *arrays)
    head.update(parameters)
    return loss
