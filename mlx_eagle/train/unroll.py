"""Training-time test: every slot drafts a chain of its own, all slots at once.

In each step the head is fed what it drafted in the step before, as in decoding (Li et al. 2025,
arXiv:2503.01840, section 3.3).
"""

from collections.abc import Iterator

import mlx.core as mx

from ..drafters.head import DraftAttention, DraftLayer, Eagle3Head
from .chunks import Arrays, chunk_rows, in_chunks, with_weights
from .compiled import softmax

OUTSIDE = ("lm_head", "input_norm", "fc_norm")
"""Parts of a head that no step passes states through. ``fc`` is one too if it fuses features."""


def unroll(
    head: Eagle3Head,
    embeddings: mx.array,
    features: mx.array,
    num_steps: int,
    checkpoint: bool = False,
    first: int = 0,
) -> Iterator[mx.array]:
    """Yield the states (B, T - first, h) of each of ``num_steps`` steps, for ``head.logits``.

    ``embeddings`` (B, T, h) are those of the batch's tokens, ``features`` (B, T, F) the
    target's taps at the same positions. In step j (from 0), slot i takes the token at
    i + 1 + j and, at position i + j, the state that step j - 1 left in it: step j of slot i is
    the j-th draft after a text that ends with token i + 1. It attends to the slots up to i of
    step 0 and to its own of the later steps. Texts are padded at their end. Slots near it, whose
    tokens are not known, take zeros, and their states mean nothing. The chains of slots before
    ``first``, which are not needed, end with step 0.

    With ``checkpoint``, each step is computed again for its gradient, and nothing in between is
    kept.
    """
    hidden = head.fuse(features)
    past: list[Arrays] = []
    forward = _checkpointed if checkpoint else _advance
    for step in range(num_steps):
        known = embeddings[:, step + 1 :]
        padding = [(0, 0), (0, embeddings.shape[1] - known.shape[1]), (0, 0)]
        hidden, *made = forward(head, mx.pad(known, padding), hidden, past, first)
        past.append(made)
        if step == 0:
            embeddings = embeddings[:, first:]
        yield hidden


def _advance(
    head: Eagle3Head, embeddings: mx.array, hidden: mx.array, past: list[Arrays], first: int
) -> Arrays:
    """Compute the step after ``past``: states (B, T - first, h), then keys and values by layer.

    Keys and values have shape (B, Hkv, R, D); ``past`` holds them for each earlier step. Step 0
    takes all slots. For those before ``first``, its last layer computes only keys and values.
    """
    step = len(past)
    made: Arrays = []
    start = first if step else 0
    embeddings, hidden = head.enter(embeddings, hidden)
    for i, layer in enumerate(head.layers):
        x, residual = layer.enter(embeddings, hidden)
        q, k, v = _project(layer.self_attn, x, start + step)
        made += [k, v]
        chains = [*past, made]
        keys = [chain[2 * i] for chain in chains]
        values = [chain[2 * i + 1] for chain in chains]
        skip = first if step == 0 and i == len(head.layers) - 1 else 0
        attended = _attend(layer, q, keys, values, start, skip)
        hidden = layer.leave(residual[:, skip:], attended)
    return [head.leave(hidden), *made]


def _checkpointed(
    head: Eagle3Head, embeddings: mx.array, hidden: mx.array, past: list[Arrays], first: int
) -> Arrays:
    """Compute what ``_advance`` does, but keep only its inputs and outputs for the gradient."""
    outside = (*OUTSIDE, "fc") if head.config.fc_input == "features" else OUTSIDE
    num = 2 * len(head.layers)

    def inner(_: int, rows: Arrays) -> Arrays:
        embeddings, hidden, *flat = rows
        chains = [flat[i : i + num] for i in range(0, len(flat), num)]
        return _advance(head, embeddings, hidden, chains, first)

    rows = [embeddings, hidden, *(x for made in past for x in made)]
    parts = [name for name in head.trainable_parameters() if name not in outside]
    return with_weights(head, parts, inner, rows, len(hidden), again=True)


def _attend(
    layer: DraftLayer, q: mx.array, keys: Arrays, values: Arrays, start: int, skip: int
) -> mx.array:
    """Attend from the slots of one layer, q (B, H, R, D), the first of them slot ``start``.

    ``keys`` and ``values`` (B, Hkv, R, D) are those of every step, the newest last. The first
    ``skip`` slots do not attend, so the result has shape (B, R - skip, h).
    """
    attention = layer.self_attn
    window = layer.window
    step = len(keys) - 1
    q = q[:, :, skip:]
    start = start + skip
    batch, _, rows, width = q.shape
    # Queries by the key head they share: (B, Hkv, G, R, D).
    q = q.reshape(batch, attention.num_kv_heads, -1, rows, width) * attention.scale
    # In its own chain a slot sees those steps that the window has not left behind.
    first = 1 if window is None else max(1, step - window + 1)
    num_own = len(keys) - first
    keys = [k[:, :, None] for k in (keys[0], *keys[first:])]
    values = [v[:, :, None] for v in (values[0], *values[first:])]

    def attend(begin: int, rows: Arrays, shared: Arrays) -> Arrays:
        q, *own = rows
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
    """Attend in step ``step`` from q (B, Hkv, G, R, D), the slots from ``start`` on.

    ``shared`` are the keys and values (B, Hkv, 1, T, D) of step 0; ``own_keys`` and
    ``own_values`` (B, Hkv, 1, R, D) are the slots' own of later steps.
    """
    end = start + q.shape[-2]
    low = 0 if window is None else min(max(0, start + step - window + 1), end - 1)
    keys, values = (array[..., low:end, :] for array in shared)
    slots = mx.arange(low, end)
    places = mx.arange(start, end)[:, None]
    visible = slots <= places
    if window is not None:
        visible = visible & (places + step < slots + window)
    unseen = mx.where(visible, 0.0, -mx.inf).astype(q.dtype)
    scores = mx.addmm(unseen, q, keys.swapaxes(-1, -2))
    own = [(q * k).sum(axis=-1, keepdims=True) for k in own_keys]
    weights = softmax(mx.concatenate([scores, *own], axis=-1))
    # One split: the gradient of each separate slice would be as large as all of them.
    parts = mx.split(weights, [end - low + i for i in range(len(own))], axis=-1)
    out = parts[0] @ values
    for part, v in zip(parts[1:], own_values, strict=True):
        out = out + part * v
    return out


def _project(
    attention: DraftAttention, x: mx.array, position: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Project x (B, R, h) to queries (B, H, R, D), keys and values (B, Hkv, R, D).

    ``position`` is that of the first row.
    """
    batch, rows, _ = x.shape
    heads = attention.qkv_proj(x).reshape(batch, rows, -1, attention.head_dim).swapaxes(1, 2)
    num_heads = attention.num_heads
    q, k, v = mx.split(heads, [num_heads, num_heads + attention.num_kv_heads], axis=1)
    if "q_norm" in attention:
        q = attention.q_norm(q)
        k = attention.k_norm(k)
    return attention.rope(q, offset=position), attention.rope(k, offset=position), v
