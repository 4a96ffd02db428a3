"""A window on a head's cache: its first slots, the newest ones, and nothing between.

Xiao et al. 2023, arXiv:2309.17453 (StreamingLLM), with the positions that the slots have in the
text. So a draft costs the same on any context, and the cache is of one size. mlx-lm's
RotatingKVCache is what holds it: that type is saved with prompt caches and can be rolled back.
Its own mask leaves the first slots out; the one here has them.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

SINKS = 4
"""Slots at the front that stay: softmax has to put its weight somewhere, and has learned there."""


def check_window(size: int | None, own: int | None) -> None:
    """Raise ValueError for a window of no slots, or where a head has one of its ``own``."""
    if size is None:
        return
    if size < 1:
        raise ValueError(
            f"the draft window is {size}: give the number of slots to keep, 1 or more, or leave "
            "it out."
        )
    if own is not None:
        raise ValueError(
            f"this head was trained with a window of {own} slots of its own: leave the draft "
            "window out."
        )


def make_window(size: int) -> RotatingKVCache:
    """An empty cache that keeps the first ``SINKS`` slots and the last ``size``."""
    return RotatingKVCache(SINKS + size, keep=SINKS)


def slots_of(num_columns: int, num_slots: int) -> mx.array:
    """Which slot each column holds, (S,), in order, where the text has ``num_slots``."""
    columns = mx.arange(num_columns)
    return mx.where(columns < SINKS, columns, columns + num_slots - num_columns)


def columns_after(cache: RotatingKVCache, num_rows: int) -> int:
    """How many columns there are in a pass of two rows or more: each row finds its window."""
    return min(cache.offset, cache.max_size - 1) + num_rows


def seen_by_rows(cache: RotatingKVCache, num_rows: int) -> mx.array | None:
    """Which columns the rows of a pass see, (m, S): the first slots, and the last of the window.

    None where that is all that a causal pass sees, as of one row, which finds nothing else there.
    """
    end = cache.offset + num_rows
    if num_rows == 1 or end <= cache.max_size:
        return None
    slots = slots_of(columns_after(cache, num_rows), end)
    rows = slots[-num_rows:, None]
    return (slots <= rows) & ((slots < SINKS) | (slots > rows - (cache.max_size - SINKS)))


def drop_last(cache: RotatingKVCache, num_rows: int) -> None:
    """Take back the last rows of a pass of two or more."""
    if num_rows > 0:
        cache.keys, cache.values = (
            array[..., :-num_rows, :] for array in (cache.keys, cache.values)
        )
        cache.offset -= num_rows
        cache._idx = cache.keys.shape[2]


def beside(caches: Sequence[RotatingKVCache]) -> list[KVCache]:
    """What a draft sees of ``caches``, in the order of the text, in others that end with it.

    In those a drafted row would overwrite slots that are still needed once it is rejected. What
    is copied is as long as the window, not as the text.
    """
    return [_copy(cache) for cache in caches]


def _copy(cache: RotatingKVCache) -> KVCache:
    made, parts = KVCache(), [cache._temporal_order(a) for a in (cache.keys, cache.values)]
    surplus = parts[0].shape[2] - cache.max_size
    if surplus > 0:  # left by a pass of several rows
        first = SINKS + surplus
        parts = [mx.concatenate([a[..., :SINKS, :], a[..., first:, :]], axis=2) for a in parts]
    made.keys, made.values = parts
    made.offset = made.keys.shape[2]
    return made
