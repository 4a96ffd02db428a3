"""Size of a target's caches by the length of a text, from passes that are never computed."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from .cache_view import single_caches

LIMITS = ("max_size", "chunk_size")  # names in mlx-lm's caches of the most tokens one keeps
SHORT = (1, 2)
LONG = (256, 512)  # tokens; recurrent layers would take seconds to be unrolled over them


def cache_bytes(model: nn.Module, num_tokens: int) -> int:
    """Bytes of mlx-lm's caches after a text of ``num_tokens``.

    Layers x key heads x head dimension, for keys and values; at most a window where the layer has
    one. Recurrent states have one size, and what else grows does so as it does from 256 to 512
    tokens. The model needs no weights: MLX knows shapes and types of what it has not computed.
    """
    pairs = _pairs(model, SHORT)
    lengths = SHORT
    if any(not _has_keys(one) and _bytes(one) != _bytes(two) for one, two in pairs):
        pairs = _pairs(model, LONG)
        lengths = LONG
    return sum(_size(one, two, lengths, num_tokens) for one, two in pairs)


def _pairs(model: nn.Module, lengths: tuple[int, int]) -> list[tuple[Any, Any]]:
    """Each single cache of a model after texts of both lengths."""
    short = make_prompt_cache(model)
    long = make_prompt_cache(model)
    for caches, num_tokens in zip((short, long), lengths, strict=True):
        model(mx.zeros((1, num_tokens), mx.int32), cache=caches)
    return list(zip(single_caches(short), single_caches(long), strict=True))


def _has_keys(cache: Any) -> bool:
    return getattr(cache, "keys", None) is not None


def _size(one: Any, two: Any, lengths: tuple[int, int], num_tokens: int) -> int:
    """Bytes of one cache, which is filled to both lengths."""
    if _has_keys(one):
        limits = [limit for name in LIMITS if (limit := getattr(one, name, None)) is not None]
        kept: int = min([num_tokens, *limits])
        room: int = one.keys.shape[2]
        return _bytes(one) // room * kept
    short, long = lengths
    return _bytes(one) + (_bytes(two) - _bytes(one)) * (num_tokens - short) // (long - short)


def _bytes(cache: Any) -> int:
    """Bytes of a cache as it is, with the room that keys and values have to grow."""
    arrays = [cache.keys, cache.values] if _has_keys(cache) else cache.state
    leaves: Any = tree_flatten(arrays)  # a list, as no destination is given
    return sum(array.nbytes for _, array in leaves if isinstance(array, mx.array))
