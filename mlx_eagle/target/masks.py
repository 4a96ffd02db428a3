"""Masks for a pass of several rows where mlx-lm's own would not do.

Models take their mask from ``cache.make_mask``. For the time of a pass a cache gets a subclass of
its class that makes another one. That is safe where the same with a module would not be: a
cache belongs to one generation, and so to one thread at a time.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache


def exact_masks(caches: list, num_rows: int) -> AbstractContextManager[None]:
    """Within, each row of a chain sees what it would see if it were decoded alone.

    mlx-lm masks the rows of a block by distance alone. A RotatingKVCache that keeps its first
    tokens would then lose those, one per row, instead of the oldest of the others.
    """
    changed = []
    for cache in caches:
        keeps = type(cache) is RotatingKVCache and cache.keep > 0
        if keeps and num_rows > 1 and cache.offset + num_rows > cache.max_size:
            changed.append((cache, _KeepingCache))
    return _swapped_classes(changed)


@contextmanager
def tree_masks(caches: list, tree_mask: mx.array, depths: mx.array) -> Iterator[None]:
    """Within, a row sees what came before the pass, its ancestors in the pass, and itself.

    ``tree_mask[r, a]``, (R, R), says whether row a is row r or an ancestor of it; ``depths``
    (R,) is how far below the root each row lies. All caches must be of a type in ``MASKED``.
    """
    rows = _TreeRows(tree_mask, depths)
    for cache in caches:
        cache._tree_rows = rows
    try:
        with _swapped_classes([(cache, _TREE_CACHES[type(cache)]) for cache in caches]):
            yield
    finally:
        for cache in caches:
            del cache._tree_rows


@contextmanager
def _swapped_classes(pairs: list[tuple[Any, type]]) -> Iterator[None]:
    """Within, each cache has the class beside it; afterwards, also by an error, its own."""
    originals = [(cache, type(cache)) for cache, _ in pairs]
    for cache, changed in pairs:
        cache.__class__ = changed
    try:
        yield
    finally:
        for cache, original in originals:
            cache.__class__ = original


class _KeepingCache(RotatingKVCache):
    """A RotatingKVCache whose mask for a block of rows spares the first ``keep`` entries."""

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        length = min(self.max_size - 1, self.offset) + N
        index = mx.arange(length)[None]
        rows = mx.arange(self.offset, self.offset + N)[:, None]
        positions = mx.where(index < self.keep, index, index + (self.offset + N - length))
        recent = positions > rows - (self.max_size - self.keep)
        mask = (positions <= rows) & ((index < self.keep) | recent)
        return mask if window_size is None else mask & (positions > rows - window_size)


@dataclass(frozen=True)
class _TreeRows:
    """The rows of a pass that form a tree: their ancestors (R, R) and their depths (R,)."""

    mask: mx.array
    depths: mx.array


class _TreeMask:
    """What the caches below have in common: the mask of a pass whose rows form a tree."""

    _tree_rows: _TreeRows
    offset: int

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """Which of the entries before the pass and of its N rows each row sees, (N, S)."""
        past = self._past()
        rows = self.offset + self._tree_rows.depths
        distance = rows[:, None] - mx.concatenate([past, rows])[None]
        before = mx.ones((N, past.size), mx.bool_)
        mask = mx.concatenate([before, self._tree_rows.mask], axis=1)
        mask = self._within_cache(mask, distance)
        return mask if window_size is None else mask & (distance < window_size)

    def _past(self) -> mx.array:
        """Positions (P,) of the entries that stay in the cache beside the rows, in order."""
        return mx.arange(self.offset)

    def _within_cache(self, mask: mx.array, distance: mx.array) -> mx.array:
        """``mask`` (N, S) without what a cache that forgets would have forgotten by each row."""
        return mask


class _TreeKVCache(_TreeMask, KVCache):
    """A KVCache with a tree's mask."""


class _TreeQuantizedKVCache(_TreeMask, QuantizedKVCache):
    """A QuantizedKVCache with a tree's mask."""


class _TreeRotatingKVCache(_TreeMask, RotatingKVCache):
    """A RotatingKVCache with a tree's mask: it holds its first ``keep`` and the latest entries."""

    def _past(self) -> mx.array:
        length = min(self.max_size - 1, self.offset)
        index = mx.arange(length)
        return mx.where(index < self.keep, index, index + (self.offset - length))

    def _within_cache(self, mask: mx.array, distance: mx.array) -> mx.array:
        num_rows, num_columns = mask.shape
        kept = mx.arange(num_columns) < min(self.keep, num_columns - num_rows)
        return mask & (kept[None] | (distance < self.max_size - self.keep))


_TREE_CACHES: dict[type, type] = {
    KVCache: _TreeKVCache,
    QuantizedKVCache: _TreeQuantizedKVCache,
    RotatingKVCache: _TreeRotatingKVCache,
}

MASKED = tuple(_TREE_CACHES)
"""The cache types whose mask can be that of a tree."""
