"""Bytes of weights and caches, and the peak. Knows sizes, not meanings."""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters as they are stored (packed where quantized)."""
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def cache_bytes(cache: list) -> int:
    """Bytes held by mlx-lm caches."""
    return sum(entry.nbytes for entry in cache)


def peak_gigabytes() -> float:
    """Peak memory since the process started, in GB (1e9 bytes), as mlx-lm prints it."""
    return mx.get_peak_memory() / 1e9
