"""The training-time test: every slot drafts its own chain, all slots at once.

Step after step the head is fed what it drafted before, as in decoding (Li et al. 2025,
arXiv:2503.01840, section 3.3).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import mlx.core as mx

from ..drafters.head import DraftAttention, DraftLayer, Eagle3Head
from .exponentials import softmax


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
