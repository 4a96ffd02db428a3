"""Training-time test: every slot drafts a chain of its own, all slots at once.

In each step the head is fed what it drafted in the step before, as in decoding (Li et al. 2025,
arXiv:2503.01840, section 3.3).
"""

from collections.abc import Iterator, Sequence
from functools import partial

import mlx.core as mx

from ..drafters.head import DraftLayer, Eagle3Head
from .chunks import Arrays, chunk_rows, in_chunks, run_step


def outside(head: Eagle3Head) -> tuple[str, ...]:
    """Name the parts of a head that no step passes states through."""
    fusing = ("fc",) if head.config.fc_input == "features" else ()
    return ("lm_head", "input_norm", "fc_norm", "embed_tokens", "mask_hidden", *fusing)


def known_tokens(embeddings: mx.array, step: int) -> mx.array:
    """Return the embeddings of the tokens that slots take in a step, zeros behind the text."""
    known = embeddings[:, step + 1 :]
    return mx.pad(known, [(0, 0), (0, embeddings.shape[1] - known.shape[1]), (0, 0)])


def unroll(
    head: Eagle3Head,
    embeddings: mx.array,
    features: mx.array,
    num_steps: int,
    checkpoint: bool = False,
) -> Iterator[mx.array]:
    """Yield the states (B, T, h) of each of ``num_steps`` steps, for ``head.logits``.

    ``embeddings`` (B, T, h) are those of the batch's tokens, ``features`` (B, T, F) the
    target's taps at the same positions. In step j (from 0), slot i takes the token at
    i + 1 + j and, at position i + j, the state that step j - 1 left in it: step j of slot i is
    the j-th draft after a text that ends with token i + 1. It attends to the slots up to i of
    step 0 and to its own of the later steps. Texts are padded at their end. Slots near it, whose
    tokens are not known, take zeros, and their states mean nothing.

    With ``checkpoint``, each step is computed again for its gradient, and nothing in between is
    kept.
    """
    hidden = head.fuse(features)
    past: list[Arrays] = []
    for step in range(num_steps):
        known = known_tokens(embeddings, step)
        forward = partial(_advance, head, slots=None)
        hidden, *made = run_step(head, outside(head), forward, [known, hidden], past, checkpoint)
        past.append(made)
        yield hidden


def unroll_masked(
    head: Eagle3Head,
    tokens: mx.array,
    features: mx.array,
    chosen: Sequence[mx.array],
    checkpoint: bool = False,
) -> Iterator[mx.array]:
    """Yield the states of a P-EAGLE head's pass, for ``head.logits``, depth after depth.

    Depth 0 is step 0 of ``unroll``: (B, T, h), of ``tokens`` (B, T). At depth d there are
    (B, R_d, h): slot a takes at position a + d the mask token and no features; it attends to the
    slots up to a of depth 0, and to its own of the later depths. ``chosen[d - 1]`` (B, R_d)
    numbers the slots of depth d among those of the depth before.
    """
    embed = head.embed_tokens
    known = known_tokens(embed(tokens), 0)
    forward = partial(_advance, head, slots=None)
    given = [known, head.fuse(features)]
    hidden, *made = run_step(head, outside(head), forward, given, [], checkpoint)
    past = [made]
    yield hidden
    slots = mx.broadcast_to(mx.arange(tokens.shape[1]), tokens.shape)
    mask = embed(mx.array(head.config.mask_token_id))
    state = head.masked(1)
    for rows in chosen:
        slots = mx.take_along_axis(slots, rows, axis=1)
        index = rows[:, None, :, None]
        later = [[mx.take_along_axis(x, index, axis=2) for x in made] for made in past[1:]]
        past = [past[0], *later]
        shape = (*rows.shape, state.shape[-1])
        given = [mx.broadcast_to(x, shape) for x in (mask, state)]
        forward = partial(_advance, head, slots=slots)
        hidden, *made = run_step(head, outside(head), forward, given, past, checkpoint)
        past.append(made)
        yield hidden


def _advance(
    head: Eagle3Head,
    embeddings: mx.array,
    hidden: mx.array,
    past: list[Arrays],
    slots: mx.array | None,
) -> Arrays:
    """Compute the step after ``past``: hidden states (B, R, h), then keys and values by layer.

    Keys and values have shape (B, Hkv, R, D); ``past`` holds them for each earlier step. It takes
    all slots, or these (B, R).
    """
    step = len(past)
    made: Arrays = []
    embeddings, hidden = head.enter(embeddings, hidden)
    for i, layer in enumerate(head.layers):
        x, residual = layer.enter(embeddings, hidden)
        if slots is None:
            q, k, v = layer.self_attn.project(x, step)
        else:  # as rows of one text, for each has a position of its own
            flat = x.reshape(1, -1, x.shape[-1])
            found = layer.self_attn.project(flat, (slots + step).reshape(-1))
            q, k, v = (y.reshape(-1, *slots.shape, y.shape[-1]).swapaxes(0, 1) for y in found)
        made += [k, v]
        chains = [*past, made]
        keys = [chain[2 * i] for chain in chains]
        values = [chain[2 * i + 1] for chain in chains]
        hidden = layer.leave(residual, _attend(layer, q, keys, values, slots))
    return [head.leave(hidden), *made]


def _attend(
    layer: DraftLayer, q: mx.array, keys: Arrays, values: Arrays, chosen: mx.array | None
) -> mx.array:
    """Attend from the slots of one layer, q (B, H, R, D): all, or those ``chosen`` (B, R).

    ``keys`` and ``values`` (B, Hkv, R, D) are those of every step, the newest last.
    """
    attention = layer.self_attn
    window = layer.window
    step = len(keys) - 1
    batch, _, rows, width = q.shape
    # Queries by the key head they share: (B, Hkv, G, R, D).
    q = q.reshape(batch, attention.num_kv_heads, -1, rows, width) * attention.scale
    # A chain sees its own steps that the window has not left behind, and a draft of one pass all.
    first = max(1, step - window + 1) if chosen is None and window is not None else 1
    num_own = len(keys) - first
    keys = [k[:, :, None] for k in (keys[0], *keys[first:])]
    values = [v[:, :, None] for v in (values[0], *values[first:])]
    length = keys[0].shape[-2]

    def attend(begin: int, rows: Arrays, shared: Arrays) -> Arrays:
        q, *own = rows
        num = q.shape[-2]
        low = 0
        end = length
        if chosen is None:
            end = begin + num
            places = mx.arange(begin, end)[:, None]
            if window is not None:
                low = min(max(0, begin + step - window + 1), end - 1)
        else:
            places = chosen[:, None, None, begin : begin + num, None]
        slots = mx.arange(low, end)
        visible = slots <= places
        if window is not None:
            near = places + step < slots + window
            # Where the window has left all of step 0 behind, a draft of one pass sees its slot.
            visible &= near if chosen is None else near | (slots == places)
        unseen = mx.where(visible, 0.0, -mx.inf).astype(q.dtype)
        own_keys = own[:num_own]
        cut = [array[..., low:end, :] for array in shared]
        return [_attended(q, own_keys, own[num_own:], cut, unseen)]

    size = chunk_rows(q.size // (rows * width) * length)
    own = [q, *keys[1:], *values[1:]]
    out = in_chunks(attend, own, [keys[0], values[0]], size, -2, again=True)[0]
    out = out.reshape(batch, attention.num_heads, rows, width)
    return attention.o_proj(out.swapaxes(1, 2).reshape(batch, rows, -1))


def _attended(
    q: mx.array, own_keys: Arrays, own_values: Arrays, shared: Arrays, unseen: mx.array
) -> mx.array:
    """Attend from q (B, Hkv, G, R, D) to what is not ``unseen`` (..., R, N) of step 0, and itself.

    ``shared`` are N keys and values (B, Hkv, 1, N, D) of step 0; ``own_keys`` and ``own_values``
    (B, Hkv, 1, R, D) are the slots' own of later steps.
    """
    keys, values = shared
    scores = mx.addmm(unseen, q, keys.swapaxes(-1, -2))
    own = [(q * k).sum(axis=-1, keepdims=True) for k in own_keys]
    weights = mx.softmax(mx.concatenate([scores, *own], axis=-1), axis=-1, precise=True)
    # One split: the gradient of each separate slice would be as large as all of them.
    parts = mx.split(weights, [keys.shape[-2] + i for i in range(len(own))], axis=-1)
    out = parts[0] @ values
    for part, v in zip(parts[1:], own_values, strict=True):
        out = out + part * v
    return out
