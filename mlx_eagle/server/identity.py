"""Identity of a model: digests that tell it from every other one whose caches may lie beside.

Neither names nor dates of files matter, but all that a forward pass can depend on does: the
weights, each at its place, and the numbers that are no weights, such as an adapter's scale.
"""

import hashlib
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

PIECE = 2**22  # elements summed at once: 16 MB beside the weights
FACTOR = 2654435761  # Knuth's, odd: factors of neighbours differ in all bits
OWN = frozenset({"_no_grad", "_training"})  # attributes of every module, of no effect here


def digest(*texts: str) -> str:
    """Hash texts to 32 digits."""
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


def module_digest(module: nn.Module) -> str:
    """Digest all arrays, numbers and words of a module and those in it."""
    factors = mx.arange(PIECE, dtype=mx.uint32) * mx.array(FACTOR, mx.uint32)
    factors = (factors ^ (factors >> 15)) | 1
    lines = []
    for path, inner in module.named_modules():
        own = sorted((name, _told(v)) for name, v in vars(inner).items() if name not in OWN)
        lines.append(f"{path}: {type(inner).__qualname__} {own}")
    for path, value in tree_flatten(module):
        is_array = isinstance(value, mx.array)
        told = f"{value.shape} {value.dtype} {_sums(value, factors)}" if is_array else _told(value)
        lines.append(f"{path} {told}")
    return digest(*sorted(lines))


def adapter_digest(path: str | None) -> str:
    """Digest how an adapter says that it was trained; "" without one."""
    try:
        return digest((Path(path) / "adapter_config.json").read_text("utf-8")) if path else ""
    except OSError:
        return ""


def _told(value: Any) -> str:
    """Describe a value that is no array; a function, say, has another address after each start."""
    if is_dataclass(value) or isinstance(value, bool | int | float | str | list | dict | None):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _sums(array: mx.array, factors: mx.array) -> list[int]:
    """Sum the bits of an array, piece by piece, each multiplied by a factor of its place."""
    flat = mx.contiguous(array).reshape(-1)
    is_even = flat.nbytes % mx.uint32.size == 0
    flat = flat.view(mx.uint32 if is_even else mx.uint8)
    pieces = [flat[i : i + PIECE].astype(mx.uint32) for i in range(0, flat.size, PIECE)]
    sums = [(piece * factors[: piece.size]).sum() for piece in pieces]
    found: Any = mx.stack(sums).tolist() if sums else []
    return list(found)
