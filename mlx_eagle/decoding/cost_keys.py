"""The names under which costs of rounds are kept: all that such a cost depends on.

But the versions of what computes them: these are kept beside the costs (``remembered.py``).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, QuantizedKVCache, RotatingKVCache

from ..drafters.base import Drafter
from ..system.device import device_name
from ..target.rollback import CacheQuantization
from .accept import Rule
from .guess import num_bytes
from .sampling import LogitsProcessor

SMALLEST_BUCKET = 512


def context_bucket(cache: Sequence[Any], num_ahead: int) -> int:
    """A power of two that ``num_ahead`` tokens behind what is in ``cache`` fit into."""
    length = num_ahead + max((getattr(c, "offset", 0) for c in cache), default=0)
    bucket = SMALLEST_BUCKET
    while bucket < length:
        bucket *= 2
    return bucket


def make_key(
    model: nn.Module,
    drafter: Drafter,
    cache: Sequence[Any],
    quantization: CacheQuantization,
    rule: Rule,
    processors: Sequence[LogitsProcessor],
    bucket: int,
    what: str,
) -> str:
    """All that the cost of a round depends on, at a context of up to ``bucket`` tokens."""
    modules = ", ".join(map(_describe, drafter.modules()))
    kind = f"{drafter.cost_key} {modules}"
    caches = ", ".join(sorted({_describe_cache(c) for c in cache}))
    if quantization.bits is not None:
        bits, size = quantization.bits, quantization.group_size
        caches += f", {bits} bits in groups of {size} from {quantization.start}"
    choice = f"{rule}, {len(processors)} processors"
    where = [device_name(), _describe(model), kind, caches, choice, f"context {bucket}"]
    return " | ".join([*where, what])


def _describe(module: nn.Module) -> str:
    """A model by what decides its speed: kind, layers, parameters, bytes, types, quantization."""
    weights = [weights for _, weights in tree_flatten(module.parameters())]
    kind = type(module).__module__.rsplit(".", 1)[-1]
    types = _joined(w.dtype for w in weights if mx.issubdtype(w.dtype, mx.floating))
    packed = _joined(
        f"{m.bits} bits in groups of {m.group_size} {getattr(m, 'mode', '')}".strip()
        for m in module.modules()
        if hasattr(m, "bits")
    )
    size = f"{sum(w.size for w in weights)} numbers {num_bytes(module)} bytes"
    return f"{kind} {len(module.layers)} layers {size} {types} {packed}".strip()


def _describe_cache(cache: Any) -> str:
    if isinstance(cache, CacheList):
        return f"({_joined(map(_describe_cache, cache.caches))})"
    name = type(cache).__name__
    if isinstance(cache, RotatingKVCache):
        return f"{name} of {cache.max_size}"
    if isinstance(cache, QuantizedKVCache):
        return f"{name} {cache.bits} bits in groups of {cache.group_size}"
    return name


def _joined(values: Iterable[object]) -> str:
    return "+".join(sorted({str(value).removeprefix("mlx.core.") for value in values}))
