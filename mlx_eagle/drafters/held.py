"""Features that wait for the token after them, in a cache that travels with the drafter's.

The last position of a request has features, but its pair needs the token that comes next.
Being a KVCache, the place they wait in is saved and loaded by mlx-lm, and trimming a prompt
cache empties it.
"""

import mlx.core as mx
from mlx_lm.models.cache import KVCache


def hold(cache: KVCache, features: mx.array) -> None:
    """Keep features (1, F) until the next ``hold``."""
    cache.keys, cache.values, cache.offset = features[None, None], features[None, None, :, :1], 1


def held(cache: KVCache) -> mx.array | None:
    """The features kept, (1, F); None where there are none or trimming has made them stale."""
    return cache.keys[0, 0] if cache.offset else None
