"""Cutting a forward pass back to the rows that were kept, for each cache type of mlx-lm.

The invariant: between rounds a committed cache is valid through the last emitted token but
one, and no rejected entry can ever be attended to. Knows caches; knows nothing of tokens.

RULES is the table of strategies:

| cache | to keep the first rows of a window |
|---|---|
| KVCache, QuantizedKVCache, ChunkedKVCache | trim; a tree's branch (not Chunked) is moved to the front first |
| ConcatenateKVCache | trim, and cut the tail off the arrays |
| RotatingKVCache | cut the tail off the arrays: a window of two rows or more leaves them in time order. ``trim`` is silently wrong once the cache is full |
| ArraysCache (recurrent state) | restore the state from before the window, run the kept rows through those layers again |
| CacheList | each member by its own rule |
| anything else | refused by name before anything is generated |
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)


class TrimRollback:
    """Rows can be dropped by moving the offset back; what lies behind it is overwritten."""

    needs_rerun = False

    def __init__(self, cache: Any):
        self.cache = cache
        self.start = cache.offset

    def rollback(self, num_rows: int) -> None:
        surplus = self.cache.offset - (self.start + num_rows)
        if surplus > 0:
            self.cache.trim(surplus)

    def take(self, rows: list[int]) -> list:
        """Copies of the window's ``rows``: keys and values, or nothing where there are none."""
        cache = self.cache
        if cache.keys is None:
            return []  # a layer that does not attend
        index = mx.array([self.start + row for row in rows])
        return tree_map(lambda array: mx.take(array, index, axis=-2), [cache.keys, cache.values])

    def put(self, taken: list, num_rows: int) -> None:
        """Make these the window's only rows."""
        cache, end = self.cache, self.start + num_rows

        def written(array: mx.array, rows: mx.array) -> mx.array:
            array[..., self.start : end, :] = rows
            return array

        if taken:
            cache.keys, cache.values = tree_map(written, [cache.keys, cache.values], taken)
            cache.trim(cache.offset - end)


class ConcatenateRollback(TrimRollback):
    """The arrays are the cache: what is trimmed must leave them, or it is appended to."""

    def rollback(self, num_rows: int) -> None:
        super().rollback(num_rows)
        cache = self.cache
        if cache.keys is not None and cache.offset < cache.keys.shape[2]:
            empty = cache.offset == 0
            cache.keys = None if empty else cache.keys[..., : cache.offset, :]
            cache.values = None if empty else cache.values[..., : cache.offset, :]


class RotatingRollback:
    """Tail rows are cut off; dropping all of them needs the arrays from before."""

    needs_rerun = False

    def __init__(self, cache: RotatingKVCache):
        self.cache = cache
        self.start = cache.offset
        self._index = cache._idx
        # New handles: a one-row append writes into the arrays, and would into these too.
        self._keys = None if cache.keys is None else cache.keys[...]
        self._values = None if cache.values is None else cache.values[...]

    def rollback(self, num_rows: int) -> None:
        cache = self.cache
        surplus = cache.offset - (self.start + num_rows)
        if surplus <= 0:
            return
        if num_rows == 0:
            cache.keys, cache.values = self._keys, self._values
            cache.offset, cache._idx = self.start, self._index
            return
        length = cache.keys.shape[2] - surplus
        cache.keys = cache.keys[..., :length, :]
        cache.values = cache.values[..., :length, :]
        cache.offset -= surplus
        cache._idx = length

    def take(self, rows: list[int]) -> list:
        """What was there before the window, with the window's ``rows`` behind."""
        cache = self.cache
        length = cache.keys.shape[2] - (cache.offset - self.start)
        index = mx.array([*range(length), *(length + row for row in rows)])
        return [mx.take(array, index, axis=-2) for array in (cache.keys, cache.values)]

    def put(self, taken: list, num_rows: int) -> None:
        """Make that the cache."""
        cache = self.cache
        cache.keys, cache.values = taken
        cache.offset = self.start + num_rows
        cache._idx = cache.keys.shape[2]


class StateRollback:
    """A recurrent state has no rows: models rebind its entries, so the old ones are a snapshot."""

    needs_rerun = True

    def __init__(self, cache: ArraysCache):
        self.cache = cache
        self._entries = list(cache.cache)

    def rollback(self, num_rows: int) -> None:
        assert num_rows == 0, "a recurrent state is restored whole"
        self.cache.cache = list(self._entries)


class ListRollback:
    """Each member by its own rule."""

    def __init__(self, cache: CacheList):
        self.cache = cache
        self._members = [RULES[type(member)](member) for member in cache.caches]
        self.needs_rerun = any(member.needs_rerun for member in self._members)

    def rollback(self, num_rows: int) -> None:
        for member in self._members:
            member.rollback(num_rows)


RULES: dict[type, Callable[[Any], Any]] = {
    KVCache: TrimRollback,
    QuantizedKVCache: TrimRollback,
    ChunkedKVCache: TrimRollback,
    ConcatenateKVCache: ConcatenateRollback,
    RotatingKVCache: RotatingRollback,
    ArraysCache: StateRollback,
    CacheList: ListRollback,
}
"""Matched by exact type: a subclass may keep state that these rules do not know."""


def check_supported(caches: list, whose: str) -> None:
    """Raise ValueError naming the first cache that cannot be rolled back exactly."""
    for cache in caches:
        if type(cache) not in RULES:
            names = ", ".join(kind.__name__ for kind in RULES)
            raise ValueError(
                f"the {whose} uses a {type(cache).__name__}, which speculative decoding cannot "
                f"roll back exactly (it can: {names}); generate without a draft model."
            )
        if type(cache) is CacheList:
            check_supported(cache.caches, whose)


@dataclass(frozen=True)
class CacheQuantization:
    """mlx-lm's ``kv_bits``: plain caches become quantized ones from ``start`` tokens on."""

    bits: int | None
    group_size: int
    start: int

    def check(self, caches: list) -> None:
        if self.bits is not None and any(type(c) is RotatingKVCache for c in caches):
            raise ValueError(
                "kv_bits asks for a quantized cache, but this model has a RotatingKVCache, "
                "which mlx-lm cannot quantize: leave kv_bits (and max_kv_size) out."
            )

    def apply(self, caches: list) -> None:
        maybe_quantize_kv_cache(caches, self.start, self.group_size, self.bits)

    def max_rows(self, caches: list) -> int | None:
        """Rows until a cache is to be quantized: a window must end there, as decoding does."""
        if self.bits is None:
            return None
        left = [self.start - c.offset for c in caches if hasattr(c, "to_quantized")]
        return min((n for n in left if n > 0), default=None)


class Checkpoint:
    """The rows that come on top of a list of caches from now on, to be cut to the first few.

    Made before the forward pass it covers. ``rerun(m)`` must run the first m of its rows
    through the model again, on top of what was there before the window; where
    ``reruns_layers`` was set, through those layers only whose caches need it.
    """

    def __init__(self, caches: list, rerun: Callable[[int], None] | None = None):
        self._caches = caches
        self._before = list(caches)
        self._undos = [RULES[type(cache)](cache) for cache in caches]
        self._rerun = rerun
        self.reruns_layers = False

    @property
    def recurrent(self) -> list:
        """The caches whose rows cannot be cut."""
        return [undo.cache for undo in self._undos if undo.needs_rerun]

    def rollback(self, num_rows: int) -> None:
        """Drop every row after the first ``num_rows``; rows cut before stay cut.

        Works also when the pass broke off half-way, with some caches updated and some not.
        Not to be called when every row stays.
        """
        self._caches[:] = self._before  # a cache may have been replaced by its quantized copy
        rerun = num_rows > 0 and bool(self.recurrent)
        for undo in self._undos:
            whole = rerun and (undo.needs_rerun or not self.reruns_layers)
            undo.rollback(0 if whole else num_rows)
        if rerun:
            self._rerun(num_rows)

    def rollback_to_branch(self, rows: list[int]) -> None:
        """Keep the given rows of a tree, root first, as if they had been a chain."""
        if rows == list(range(len(rows))):
            self.rollback(len(rows))
            return
        taken = [undo.take(rows) for undo in self._undos]
        # Started before anything is written: a buffer that is still to be read would be copied,
        # all of it, to be written.
        mx.async_eval(taken)
        for undo, arrays in zip(self._undos, taken):
            undo.put(arrays, len(rows))
