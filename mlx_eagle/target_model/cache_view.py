"""Keys and values in the order of the text: windows to decode with, and views to read.

mlx-lm's RotatingKVCache copies the whole window in every pass of two rows or more. While a request
is decoded, its windows are ``WindowCache``: entries in order, followed by empty columns, which a
pass writes to; attention gets a slice. When the columns are used up, after ``STEP`` tokens or
more, the window is copied to the front of new arrays, as mlx-lm's KVCache copies when it grows.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

STEP = 256  # columns by which arrays grow, as in mlx-lm


def single_caches(caches: Sequence[Any]) -> Iterator[Any]:
    """Yield the caches of all layers, the members of a ``CacheList`` one by one."""
    for cache in caches:
        if type(cache) is CacheList:
            yield from single_caches(cache.caches)
        else:
            yield cache


class WindowCache(RotatingKVCache):
    """A RotatingKVCache that keeps no first tokens, while decoding: see ``open_windows``.

    Column ``_idx`` of the arrays (1, H, C, D) is the first empty one, right after the newest
    entry; moving it back drops rows.
    """

    keys: Any
    values: Any
    most_rows = 1  # of any pass so far: they may be dropped after the next pass has begun
    num_seen = 0  # entries that the last pass attended to

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the rows of a pass, (1, H, R, D); return exactly the entries that they see."""
        num_rows = keys.shape[2]
        self.most_rows = max(self.most_rows, num_rows)
        if self.keys is None or self._idx + num_rows > self.keys.shape[2]:
            self._make_room(keys, values)
        end = self._idx + num_rows
        self.keys[..., self._idx : end, :] = keys
        self.values[..., self._idx : end, :] = values
        self.num_seen = min(self.max_size - 1, self.offset) + num_rows
        self.offset += num_rows
        self._idx = end
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The entries of the last pass again, for layers that share keys."""
        return self.newest(self.num_seen)

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        """Make arrays with the entries that rows may still see, and room for these and more."""
        num_kept = min(self._idx, self.max_size + self.most_rows)
        room = STEP + keys.shape[2]

        def grown(array: mx.array | None, rows: mx.array) -> mx.array:
            blank = mx.zeros((*rows.shape[:2], room, rows.shape[3]), rows.dtype)
            if array is None:
                return blank
            return mx.concatenate([array[..., self._idx - num_kept : self._idx, :], blank], axis=2)

        self.keys = grown(self.keys, keys)
        self.values = grown(self.values, values)
        self._idx = num_kept

    def newest(self, num_rows: int) -> tuple[mx.array, mx.array]:
        """The last ``num_rows`` entries."""
        start = self._idx - num_rows
        end = self._idx
        return self.keys[..., start:end, :], self.values[..., start:end, :]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """mlx-lm's mask, except for one row, for which mlx-lm masks the slots of a ring."""
        if N > 1:
            return super().make_mask(N, window_size, return_array)
        num_columns = min(self.max_size, self.offset + 1)
        if window_size is None or num_columns <= window_size:
            return None
        return mx.arange(num_columns) >= num_columns - window_size


def open_windows(caches: Sequence[Any]) -> None:
    """Turn windows that keep no first tokens into ``WindowCache``, until ``close_windows``."""
    for cache in single_caches(caches):
        if type(cache) is not RotatingKVCache or cache.keep > 0:
            continue
        if cache.keys is not None:
            cache.keys, cache.values = map(cache._temporal_order, (cache.keys, cache.values))
            cache._idx = cache.keys.shape[2]
        cache.__class__ = WindowCache


def close_windows(caches: Sequence[Any]) -> None:
    """Turn each ``WindowCache`` into mlx-lm's cache again, with only its window."""
    stock: Any = RotatingKVCache
    for cache in single_caches(caches):
        if type(cache) is not WindowCache:
            continue
        num_kept = min(cache.offset, cache.max_size)
        if cache.keys is not None:
            # Copied, since views would keep all columns in memory.
            arrays = tuple(mx.contiguous(array) for array in cache.newest(num_kept))
            cache.keys, cache.values = arrays if num_kept > 0 else (None, None)
        cache._idx = num_kept
        for name in ("most_rows", "num_seen"):
            cache.__dict__.pop(name, None)
        cache.__class__ = stock


IN_ORDER = (KVCache, ConcatenateKVCache, QuantizedKVCache)


class CacheView:
    """Caches of one request between two passes, read when they are asked for.

    An array that is read keeps the cache's buffer alive: the next pass copies all of it unless
    the reader has released the array, or has been computed, by then.
    """

    def __init__(self, caches: Sequence[Any], read: Callable[[Any], Any] = lambda cache: cache):
        """``read`` turns a cache in ``caches`` into the request's own when it is needed."""
        self._caches = caches
        self._read = read

    def __len__(self) -> int:
        return len(self._caches)

    def rows(self, index: int) -> tuple[mx.array, mx.array]:
        """Keys and values (1, H, S, D) of a cache: of all positions, or of its window.

        They are in the order of the text, first tokens that a window keeps included. Raises
        ValueError if the cache has no keys and values.
        """
        cache = self._read(self._caches[index])
        if type(cache) is WindowCache:
            num_rows = min(cache.offset, cache.max_size)
            return cache.newest(num_rows)
        if type(cache) is RotatingKVCache:
            keys, values = (cache._temporal_order(array) for array in (cache.keys, cache.values))
            surplus = keys.shape[2] - cache.max_size  # after a pass of several rows
            return cache._trim(surplus, keys), cache._trim(surplus, values)
        if type(cache) in IN_ORDER:
            arrays: Any = cache.keys, cache.values
            if type(cache) is QuantizedKVCache:
                packing: Any = {"group_size": cache.group_size, "bits": cache.bits}
                arrays = (mx.dequantize(*packed, **packing) for packed in arrays)
            keys, values = arrays
            return keys[..., : cache.offset, :], values[..., : cache.offset, :]
        raise ValueError(
            f"cache {index} of the target is a {type(cache).__name__}, which holds no keys "
            "and values that a drafter could read: use another drafter."
        )
