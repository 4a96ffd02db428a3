"""Rollback of a forward pass to the rows that were kept, for each cache type of mlx-lm.

Invariant: between rounds a committed cache is valid up to the second to last emitted token,
and no rejected entry can ever be attended to.

RULES is the table of strategies, a class for each; a checkpoint has an object for each cache:

* KVCache, QuantizedKVCache, ChunkedKVCache: trim; the branch of a tree (not in a ChunkedKVCache)
  is moved to the front first.
* ConcatenateKVCache: trim, and cut the tail off the arrays.
* WindowCache, which replaces a RotatingKVCache that keeps no first tokens: trim, as a KVCache.
* RotatingKVCache: cut the tail off the arrays, which a pass of at least two rows leaves in
  temporal order. ``trim`` is silently wrong once the cache is full.
* ArraysCache (recurrent state): recompute the state from what was recorded of the pass
  (``states.py``); if that is not enough, restore it and run the kept rows again.
* CacheList: each member by its own rule.
* Any other cache is refused by name before generation starts.

A checkpoint adds no cost to a pass of one row: nothing is copied.
"""

from collections.abc import Callable, Mapping, Sequence
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

from .cache_view import WindowCache, single_caches
from .states import KeptRows, StateUpdates


class TrimRollback:
    """Drops rows by moving the offset back; entries after it are overwritten later."""

    def __init__(self, cache: Any, num_rows: int | None = None):
        self.cache = cache
        self.start: int = cache.offset

    @property
    def _first_column(self) -> int:
        """Column of the first row of the pass; a WindowCache may have moved it in the pass."""
        cache = self.cache
        return int(getattr(cache, "_idx", cache.offset) - (cache.offset - self.start))

    def rollback(self, num_rows: int) -> None:
        surplus = self.cache.offset - (self.start + num_rows)
        if surplus > 0:
            self.cache.trim(surplus)

    def take(self, rows: list[int]) -> list[Any]:
        """Copies of these rows of the pass, keys and values; [] for a layer without any."""
        cache = self.cache
        if cache.keys is None:
            return []  # the layer does not attend
        index = mx.array([self._first_column + row for row in rows])
        arrays = [cache.keys, cache.values]
        taken: list[Any] = tree_map(lambda array: mx.take(array, index, axis=-2), arrays)
        return taken

    def put(self, taken: list[Any], num_rows: int) -> None:
        """Replace the rows of the pass by these."""
        cache = self.cache
        start = self._first_column

        def written(array: mx.array, rows: mx.array) -> mx.array:
            array[..., start : start + num_rows, :] = rows
            return array

        if taken:
            cache.keys, cache.values = tree_map(written, [cache.keys, cache.values], taken)
            cache.trim(cache.offset - self.start - num_rows)


class ConcatenateRollback(TrimRollback):
    """Cuts the arrays too: mlx-lm would append to all of them, trimmed rows included."""

    def rollback(self, num_rows: int) -> None:
        super().rollback(num_rows)
        cache = self.cache
        if cache.keys is not None and cache.offset < cache.keys.shape[2]:
            empty = cache.offset == 0
            cache.keys = None if empty else cache.keys[..., : cache.offset, :]
            cache.values = None if empty else cache.values[..., : cache.offset, :]


class RotatingRollback:
    """Cuts off tail rows; to drop all of them it needs the arrays from before the pass.

    A single row may be written into the arrays in place. Handles on them would turn that into a
    copy of the whole cache, and there is nothing to save: the slot that the row takes is empty,
    or has the entry that leaves the window with this very row, so no later row can see it.
    Therefore ``num_rows`` 1 keeps no handles if the arrays stay the same.
    """

    def __init__(self, cache: Any, num_rows: int | None = None):
        self.cache = cache
        self.start = cache.offset
        self._index = cache._idx
        self._arrays: list[Any] | None = None
        if num_rows != 1 or not _appends_in_place(cache):
            # New handles: rows that come one by one are written in place, and must not
            # change these.
            self._arrays = [None if a is None else a[...] for a in (cache.keys, cache.values)]

    def rollback(self, num_rows: int) -> None:
        cache = self.cache
        if num_rows == 0:
            if self._arrays is not None:
                cache.keys, cache.values = self._arrays
            cache.offset = self.start
            cache._idx = self._index
            return
        surplus = cache.offset - (self.start + num_rows)
        if surplus <= 0:
            return
        length = cache.keys.shape[2] - surplus
        cache.keys = cache.keys[..., :length, :]
        cache.values = cache.values[..., :length, :]
        cache.offset -= surplus
        cache._idx = length

    def take(self, rows: list[int]) -> list[Any]:
        """Copies of the entries before the pass, followed by these rows of the pass."""
        cache = self.cache
        length = cache.keys.shape[2] - (cache.offset - self.start)
        index = mx.array([*range(length), *(length + row for row in rows)])
        return [mx.take(array, index, axis=-2) for array in (cache.keys, cache.values)]

    def put(self, taken: list[Any], num_rows: int) -> None:
        """Replace the cache's entries by ``taken``."""
        cache = self.cache
        cache.keys, cache.values = taken
        cache.offset = self.start + num_rows
        cache._idx = cache.keys.shape[2]


def _appends_in_place(cache: Any) -> bool:
    """Whether a cache writes a single next row into its arrays in place."""
    if cache.keys is None or cache.keys.shape[2] > cache.max_size:
        return False
    length = cache.keys.shape[2]
    return bool(length == cache.max_size or cache.offset < length)


class StateRollback:
    """Restores a recurrent state: models rebind its entries, so the old ones are a snapshot.

    A state has no rows; kept rows have to be applied to it again: see ``Checkpoint.restore``.
    """

    def __init__(self, cache: Any, num_rows: int | None = None):
        self.cache = cache
        self._entries = list(cache.cache)

    def rollback(self, num_rows: int) -> None:
        self.cache.cache = list(self._entries)


RULES: dict[type, Callable[[Any, int | None], Any]] = {
    KVCache: TrimRollback,
    QuantizedKVCache: TrimRollback,
    ChunkedKVCache: TrimRollback,
    ConcatenateKVCache: ConcatenateRollback,
    RotatingKVCache: RotatingRollback,
    WindowCache: TrimRollback,
    ArraysCache: StateRollback,
}
"""Matched by exact type: a subclass may keep state that these rules do not know."""


def check_supported(caches: Sequence[Any], whose: str) -> None:
    """Raise ValueError naming the first cache that cannot be rolled back exactly, if any."""
    for cache in single_caches(caches):
        if type(cache) not in RULES:
            known = [each for each in (*RULES, CacheList) if each is not WindowCache]
            names = ", ".join(each.__name__ for each in known)
            raise ValueError(
                f"the {whose} uses a {type(cache).__name__}, which speculative decoding cannot "
                f"roll back exactly (it can: {names}); generate without a draft model."
            )
        if type(cache) is RotatingKVCache and 0 < cache.max_size <= cache.keep:
            raise ValueError(
                f"a cache of the {whose} holds {cache.max_size} tokens and keeps the first "
                f"{cache.keep}, so that none is left for what follows: give a max_kv_size above "
                f"{cache.keep}."
            )


@dataclass(frozen=True)
class CacheQuantization:
    """mlx-lm's ``kv_bits``: plain caches become quantized ones from ``start`` tokens on."""

    bits: int | None
    group_size: int
    start: int

    def check(self, caches: list[Any]) -> None:
        if self.bits is not None and any(type(c) is RotatingKVCache for c in caches):
            raise ValueError(
                "kv_bits asks for a quantized cache, but this model has a RotatingKVCache, "
                "which mlx-lm cannot quantize: leave kv_bits (and max_kv_size) out."
            )

    def apply(self, caches: list[Any]) -> None:
        maybe_quantize_kv_cache(caches, self.start, self.group_size, self.bits)

    def fit(self, size: int, caches: list[Any]) -> int:
        """The number of draft tokens, at most ``size``, that fit before a cache is quantized.

        A pass must end at that point, as it does in plain decoding.
        """
        if self.bits is None:
            return size
        left: list[int] = [self.start - c.offset for c in caches if hasattr(c, "to_quantized")]
        return min([size, *(n - 1 for n in left if n > 0)])


class Checkpoint:
    """A snapshot of caches before a forward pass over some rows.

    ``rerun(m)`` must run the first m rows of the pass through the model again, after the restored
    entries; it is called if a cache's rows cannot be cut. ``num_rows`` is the number of rows of
    the pass, if it is known: a single row costs nothing. ``entries`` has a rollback object for
    each cache, by ``rules``.
    """

    def __init__(
        self,
        caches: list[Any],
        rerun: Callable[[int], None] | None = None,
        num_rows: int | None = None,
        rules: Mapping[type, Callable[[Any, int | None], Any]] = RULES,
    ):
        self._caches = caches
        self._before = list(caches)
        self.entries = [rules[type(cache)](cache, num_rows) for cache in single_caches(caches)]
        self._rerun = rerun
        self._updates: StateUpdates | None = None
        self._kept: KeptRows | None = None  # rows not yet in the recurrent states

    @property
    def recurrent(self) -> list[StateRollback]:
        """The entries whose rows cannot be cut."""
        return [entry for entry in self.entries if isinstance(entry, StateRollback)]

    def keep_updates(self, updates: StateUpdates | None) -> None:
        """Keep the pass's record of its state updates, which makes ``rerun`` unnecessary."""
        self._updates = updates

    def rollback(self, num_rows: int) -> None:
        """Drop every row after the first ``num_rows``; rows that were cut before stay cut.

        This also works after a pass that failed half-way, with only some caches updated. It must
        not be called when every row stays.
        """
        self.cut(num_rows)
        self.restore()

    def cut(self, num_rows: int) -> None:
        """``rollback``, but recurrent states that can be recomputed later wait for ``restore``."""
        self._caches[:] = self._before  # a cache may have been replaced by its quantized copy
        updates = self._updates if num_rows > 0 else None
        self._kept = None if updates is None else KeptRows((num_rows,), updates.num_rows)
        runs_again = num_rows > 0 and updates is None and bool(self.recurrent)
        for entry in self.entries:
            entry.rollback(0 if runs_again else num_rows)
        if runs_again:
            assert self._rerun is not None
            self._rerun(num_rows)

    @property
    def is_open(self) -> bool:
        """Whether recurrent states have yet to be computed: see ``restore``."""
        return self._kept is not None

    def restore(self) -> None:
        """Compute the recurrent states that ``cut`` deferred."""
        if self._updates is not None and self._kept is not None:
            for state in self.recurrent:
                state.cache.cache = self._updates.states(state.cache, self._kept)
        self._kept = None

    def rollback_to_branch(self, rows: list[int]) -> None:
        """Keep the given rows of a tree, root first, as if they had been a chain."""
        if rows == list(range(len(rows))):
            self.rollback(len(rows))
            return
        taken = [entry.take(rows) for entry in self.entries]
        # Started before anything is written: writing to a buffer that is yet to be read would
        # copy all of it.
        mx.async_eval(taken)
        for entry, arrays in zip(self.entries, taken, strict=True):
            entry.put(arrays, len(rows))
