"""Views of caches: keys and values in the order of the text, for those who only read them."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

IN_ORDER = (KVCache, ConcatenateKVCache, QuantizedKVCache)


class CacheView:
    """Caches of one request between two passes, as they are when something is read.

    An array that is read keeps the cache's buffer alive: the next pass copies all of it unless
    the reader has let go, or has been computed, by then.
    """

    def __init__(self, caches: Sequence[Any]):
        self._caches = caches

    def __len__(self) -> int:
        return len(self._caches)

    def rows(self, index: int) -> tuple[mx.array, mx.array]:
        """Keys and values (1, H, S, D) of that cache: of all positions, or those in its window.

        The newest row is the last. Raises ValueError where it holds no such rows.
        """
        cache = self._caches[index]
        if type(cache) is RotatingKVCache:
            parts = [cache._temporal_order(part) for part in (cache.keys, cache.values)]
            num_rows = min(cache.offset, cache.max_size, parts[0].shape[2])
        elif type(cache) in IN_ORDER:
            parts, num_rows = _arrays(cache), cache.offset
            parts = [part[..., :num_rows, :] for part in parts]
        else:
            raise ValueError(
                f"cache {index} of the target is a {type(cache).__name__}, which holds no keys "
                "and values that a drafter could read: use another drafter."
            )
        keys, values = (part[..., part.shape[2] - num_rows :, :] for part in parts)
        return keys, values


def _arrays(cache: Any) -> list[mx.array]:
    """Keys and values of a cache that is not empty, unpacked."""
    if not isinstance(cache, QuantizedKVCache):
        return [cache.keys, cache.values]
    parts: tuple[Any, Any] = (cache.keys, cache.values)
    return [
        mx.dequantize(packed, scales, biases, group_size=cache.group_size, bits=cache.bits)
        for packed, scales, biases in parts
    ]
