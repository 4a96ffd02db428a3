"""Training-time test and its losses, per step, on the slots of a batch that count.

Every slot drafts its own chain, all slots at once: step after step the head is fed what it drafted
before, as in decoding (Li et al. 2025, arXiv:2503.01840, section 3.3). The losses are those of
EAGLE-3's trainers, normalised as there: SpecForge's Eagle3 model, its ``LogSoftmaxLoss`` and its
LK losses are the reference.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..drafters.head import DraftAttention, DraftLayer, Eagle3Head
from .settings import LossSettings

TINY = 1e-8
CHUNK_BYTES = 2**27  # of the largest array that attention or a loss makes: some four are alive
ROWS_ALIKE = 16  # rows that a tile of a GPU's matrix product takes
OUTPUT = ("norm", "lm_head")
"""The parts of a head that make logits of its states."""
OUTSIDE = ("lm_head", "input_norm", "fc_norm")
"""The parts that no step takes states through; nor through ``fc``, where it fuses features."""

Arrays = list[mx.array]


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


@mx.custom_function
def powers(x: mx.array) -> mx.array:
    """The softmax over the last axis, by ``fast_exp``."""
    exps = fast_exp(x - x.max(axis=-1, keepdims=True))
    return exps / exps.sum(axis=-1, keepdims=True)


def _gradient(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    of_output = cotangent * output
    return of_output - output * of_output.sum(axis=-1, keepdims=True)


powers.vjp(_gradient)


def chunk_rows(width: int) -> int:
    """How many rows of ``width`` numbers in float32 make up a chunk."""
    return max(ROWS_ALIKE, CHUNK_BYTES // (4 * width) // ROWS_ALIKE * ROWS_ALIKE)


def eval_in_chunks(
    function: Callable[[mx.array], mx.array], rows: mx.array, width: int
) -> mx.array:
    """``function`` of rows, a chunk after the other, each row made into ``width`` numbers."""
    size, parts = chunk_rows(width), []
    for begin in range(0, len(rows), size):
        parts.append(function(rows[begin : begin + size]))
        mx.eval(parts[-1])
    return mx.concatenate(parts)


def in_chunks(
    function: Callable[[int, Arrays, Arrays], Arrays],
    rows: Arrays,
    shared: Arrays,
    size: int,
    axis: int,
    again: bool,
) -> Arrays:
    """``function(begin, rows, shared)`` of at most ``size`` rows at a time, one after the other.

    ``rows`` are arrays cut along ``axis``, as what comes out is put together along it; ``begin``
    is the number of the first row. What the function makes is let go, and made again for
    gradients, which go to ``rows`` and ``shared`` alone. Without ``again`` it is kept where one
    chunk holds all rows.
    """
    num, total = len(rows), rows[0].shape[axis]
    if total <= size and not again:
        return function(0, rows, shared)
    spans = [(begin, min(begin + size, total)) for begin in range(0, total, size)]

    def cut(arrays: Arrays, begin: int, end: int, after: Arrays) -> Arrays:
        where = (slice(begin, end),) if axis == 0 else (..., slice(begin, end), slice(None))
        parts = list(arrays) if len(spans) == 1 else [array[where] for array in arrays]
        return mx.depends(parts, after) if after else parts

    def joined(made: list[Arrays]) -> Arrays:
        if len(made) == 1:
            return list(made[0])
        return [mx.concatenate(parts, axis) for parts in zip(*made, strict=True)]

    @mx.custom_function
    def run(*arrays: mx.array) -> Arrays:
        made: list[Arrays] = []
        for begin, end in spans:
            own = cut(arrays[:num], begin, end, made[-1] if made else [])
            made.append(function(begin, own, arrays[num:]))
        return joined(made)

    @run.vjp
    def gradient(arrays: Arrays, cotangents: Arrays, _: Arrays) -> Arrays:
        made: list[Arrays] = []
        sums: Arrays = []
        for begin, end in spans:
            after = [*made[-1], *sums] if made else list(cotangents)
            own = cut(arrays[:num], begin, end, after)

            def made_again(*arrays: mx.array, begin: int = begin) -> Arrays:
                return function(begin, list(arrays[:num]), list(arrays[num:]))

            given = [*own, *arrays[num:]]
            _, found = mx.vjp(made_again, given, cut(cotangents, begin, end, []))
            made.append(found[:num])
            sums = [x + y for x, y in zip(sums, found[num:], strict=True)] if sums else found[num:]
        # What the rows' gradients lead to waits for the others, which nobody asks for so soon:
        # else all that they are made of stays until then.
        return [*(mx.depends(joined(made), sums) if sums else joined(made)), *sums]

    return run(*rows, *shared)


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
    past: list[Arrays] = []
    forward = _checkpointed if checkpoint else _advance
    for step in range(num_steps):
        known = embeddings[:, step + 1 :]
        padding = [(0, 0), (0, embeddings.shape[1] - known.shape[1]), (0, 0)]
        states, *made = forward(head, mx.pad(known, padding), states, past, first)
        past.append(made)
        if step == 0:
            embeddings = embeddings[:, first:]
        yield states


def _advance(
    head: Eagle3Head, embeddings: mx.array, states: mx.array, past: list[Arrays], first: int
) -> Arrays:
    """The step after ``past``: its states (B, T - first, h), then keys and values of each layer.

    These, (B, Hkv, R, D), are what ``past`` has of each step. Step 0 is given all slots, and of
    those before ``first`` the last layer gives these alone.
    """
    step, made = len(past), []
    start = first if step else 0
    embeddings, states = head.enter(embeddings, states)
    for i, layer in enumerate(head.layers):
        x, residual = layer.enter(embeddings, states)
        q, k, v = _project(layer.self_attn, x, start + step)
        made += [k, v]
        keys, values = ([chain[2 * i + j] for chain in (*past, made)] for j in (0, 1))
        skip = first if step == 0 and i == len(head.layers) - 1 else 0
        attended = _attend(layer, q, keys, values, start, skip)
        states = layer.leave(residual[:, skip:], attended)
    return [head.leave(states), *made]


def _checkpointed(
    head: Eagle3Head, embeddings: mx.array, states: mx.array, past: list[Arrays], first: int
) -> Arrays:
    """The same, keeping only what goes in and comes out."""
    outside = (*OUTSIDE, "fc") if head.config.fc_input == "features" else OUTSIDE
    num = 2 * len(head.layers)

    def inner(_: int, rows: Arrays) -> Arrays:
        embeddings, states, *flat = rows
        chains = [flat[i : i + num] for i in range(0, len(flat), num)]
        return _advance(head, embeddings, states, chains, first)

    rows = [embeddings, states, *(x for made in past for x in made)]
    parts = [name for name in head.trainable_parameters() if name not in outside]
    return _with_weights(head, parts, inner, rows, len(states), again=True)


def _with_weights(
    head: Eagle3Head,
    parts: Iterable[str],
    function: Callable[[int, Arrays], Arrays],
    rows: Arrays,
    size: int,
    again: bool,
) -> Arrays:
    """``in_chunks`` of a function of these parts of the head, whose weights get gradients too."""
    trained = head.trainable_parameters()
    own = {name: trained[name] for name in parts if name in trained}
    flat = dict(tree_flatten(own))

    def inner(begin: int, rows: Arrays, shared: Arrays) -> Arrays:
        head.update(tree_unflatten(list(zip(flat, shared, strict=True))))
        return function(begin, rows)

    found = in_chunks(inner, rows, list(flat.values()), size, 0, again)
    head.update(own)
    return found


def _attend(
    layer: DraftLayer, q: mx.array, keys: Arrays, values: Arrays, start: int, skip: int
) -> mx.array:
    """Attention of one layer's slots from ``start`` on, q (B, H, R, D), in the last step.

    ``keys`` and ``values`` (B, Hkv, R, D) are those of every step. The first ``skip`` slots do not
    attend: (B, R - skip, h).
    """
    attention, window, step = layer.self_attn, layer.window, len(keys) - 1
    q, start = q[:, :, skip:], start + skip
    batch, _, rows, width = q.shape
    # Queries by the key head they share: (B, Hkv, G, R, D).
    q = q.reshape(batch, attention.num_kv_heads, -1, rows, width) * attention.scale
    # Of its own chain a slot sees the steps that a window has not left behind.
    first = 1 if window is None else max(1, step - window + 1)
    num_own = len(keys) - first
    keys = [k[:, :, None] for k in (keys[0], *keys[first:])]
    values = [v[:, :, None] for v in (values[0], *values[first:])]

    def attend(begin: int, rows: Arrays, shared: Arrays) -> Arrays:
        q, own = rows[0], rows[1:]
        return [_attended(q, own[:num_own], own[num_own:], shared, start + begin, step, window)]

    size = chunk_rows(q.size // (rows * width) * (start + rows))
    own = [q, *keys[1:], *values[1:]]
    out = in_chunks(attend, own, [keys[0], values[0]], size, -2, again=True)[0]
    out = out.reshape(batch, attention.num_heads, rows, width)
    return attention.o_proj(out.swapaxes(1, 2).reshape(batch, rows, -1))


def _attended(
    q: mx.array,
    own_keys: Arrays,
    own_values: Arrays,
    shared: Arrays,
    start: int,
    step: int,
    window: int | None,
) -> mx.array:
    """What slots from ``start`` on, q (B, Hkv, G, R, D), see in that step.

    ``shared``, keys and values (B, Hkv, 1, T, D), are those of step 0, ``own_keys`` and
    ``own_values`` (B, Hkv, 1, R, D) the slots' own of later steps.
    """
    end = start + q.shape[-2]
    low = 0 if window is None else min(max(0, start + step - window + 1), end - 1)
    keys, values = (array[..., low:end, :] for array in shared)
    slots, places = mx.arange(low, end), mx.arange(start, end)[:, None]
    visible = slots <= places
    if window is not None:
        visible = visible & (places + step < slots + window)
    hidden = mx.where(visible, 0.0, -mx.inf).astype(q.dtype)
    scores = mx.addmm(hidden, q, keys.swapaxes(-1, -2))
    own = [(q * k).sum(axis=-1, keepdims=True) for k in own_keys]
    weights = softmax(mx.concatenate([scores, *own], axis=-1))
    # Split at once: the gradient of each slice alone would be as large as all of them.
    parts = mx.split(weights, [end - low + i for i in range(len(own))], axis=-1)
    out = parts[0] @ values
    for part, v in zip(parts[1:], own_values, strict=True):
        out = out + part * v
    return out


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


class TargetBatch(NamedTuple):
    """What the target says where it counts, K rows of a batch of (B, T) slots.

    ``rows`` (K,): slots, numbered row by row (b * T + i), whose first draft counts: slot i
    drafts what follows token i + 1. In step j the slot j before each of them is the one whose
    draft is of the same place, so one set of rows serves all steps. ``weights`` (K,): 1, or 0
    for rows that only fill up. ``probs`` (K, Vd) float32: the target's, among the tokens that
    can be drafted, and ``shares`` (K,) how much of all that it may say is one of these.
    ``num_slots`` (): what a step's sum of cross-entropies is divided by.
    ``counts`` (num_steps,): how many slots count in each step, on the average of all ranks.
    """

    rows: mx.array
    weights: mx.array
    probs: mx.array
    shares: mx.array
    num_slots: mx.array
    counts: mx.array


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
    """The loss of every step, (num_steps,) float32, not weighted yet; see ``unroll``."""
    length = embeddings.shape[1]
    first = first_slot(targets, length, settings.num_steps)
    states, weights = [], []
    steps = unroll(head, embeddings, features, settings.num_steps, settings.checkpoint, first)
    for step, given in enumerate(steps):
        slots, counts = slots_at(targets.rows, targets.weights, length, step, first)
        states.append(given.reshape(-1, given.shape[-1])[slots])
        weights.append(counts)
    found = _compared(head, states, targets, settings)
    losses = []
    for step, counts in enumerate(weights):
        losses.append(_loss(found[step :: len(weights)], counts, targets, step, settings))
    return mx.stack(losses)


@mx.custom_function
def cross_entropies(logits: mx.array, target: mx.array) -> tuple[mx.array, mx.array]:
    """Of logits (..., Vd) with probabilities (..., Vd): (...), and the logits' log sums (...)."""
    largest = logits.max(axis=-1, keepdims=True)
    log_z = mx.log(fast_exp(logits - largest).sum(axis=-1)) + largest[..., 0]
    # The target's probabilities sum to 1: that much of log_z.
    return log_z - (target * logits).sum(axis=-1), log_z


def _gradients(
    primals: tuple[mx.array, mx.array],
    cotangents: tuple[mx.array, mx.array],
    outputs: tuple[mx.array, mx.array],
) -> tuple[mx.array, mx.array]:
    logits, target = primals
    of_entropies, of_log_z = (cotangent[..., None] for cotangent in cotangents)
    drafted = fast_exp(logits - outputs[1][..., None])
    of_logits = (of_entropies + of_log_z) * drafted - of_entropies * target
    return of_logits, -of_entropies * logits


cross_entropies.vjp(_gradients)


def _loss(
    found: Arrays, weights: mx.array, targets: TargetBatch, step: int, settings: LossSettings
) -> mx.array:
    """One step's loss, (), of what ``_compared`` found of it."""
    loss = (found[0] * weights).sum() / targets.num_slots
    if settings.kind == "ce":
        return loss
    accepted, count = found[1], mx.maximum(targets.counts[step], TINY)
    if settings.kind == "lk-alpha":
        logs = mx.where(accepted > 0, mx.log(mx.maximum(accepted, 1e-37)), 0.0)
        return -(logs * weights).sum() / count
    rate = (accepted * weights).sum() / count
    share = settings.kl_scale * mx.exp(-settings.kl_decay * mx.stop_gradient(rate))
    return share * loss + (1 - share) * (1 - rate)


def _compared(
    head: Eagle3Head, states: Arrays, targets: TargetBatch, settings: LossSettings
) -> Arrays:
    """Of each step's states (K, h) its cross-entropies (K,), and but for "ce" the acceptance
    rates (K,) behind all of these.

    In chunks of rows of all steps at once, for logits are the largest arrays there are.
    """
    num_drafted = targets.probs.shape[-1]

    def compare(begin: int, rows: Arrays) -> Arrays:
        own = slice(begin, begin + len(rows[0]))
        shape = len(rows), len(rows[0]), num_drafted
        logits = head.logits(mx.concatenate(rows)).astype(mx.float32).reshape(shape)
        probs = mx.broadcast_to(targets.probs[own], shape)
        entropies, log_z = cross_entropies(logits, probs)
        if settings.kind == "ce":
            return list(entropies)
        drafted = mx.exp(logits - log_z[..., None])
        of_all = probs * targets.shares[own, None]
        return [*entropies, *mx.minimum(of_all, drafted).sum(axis=-1)]

    size = chunk_rows(num_drafted * len(states))
    return _with_weights(head, OUTPUT, compare, states, size, again=False)
