"""Masks for a window of several rows where mlx-lm's own would not be those of one row at a time."""

from contextlib import AbstractContextManager

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from .swap import swapped_classes


def exact_masks(caches: list, num_rows: int) -> AbstractContextManager[None]:
    """Make a window of several rows see what each of them would see decoded alone.

    mlx-lm masks the rows of a block by distance alone. A RotatingKVCache that keeps its first
    tokens would then lose those, one a row, instead of the oldest of the others.
    """
    changed = []
    for cache in caches:
        keeps = type(cache) is RotatingKVCache and cache.keep > 0
        if keeps and num_rows > 1 and cache.offset + num_rows > cache.max_size:
            changed.append((cache, _KeepingCache))
    return swapped_classes(changed)


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
