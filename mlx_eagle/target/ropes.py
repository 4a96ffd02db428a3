"""The rotary embeddings of a model, and the position each row of a window gets from them.

mlx-lm rotates row r of a pass by ``offset + r``. A window of rows may need other positions (a
tree), or the very numbers that its rows would get one by one. Both are had by swapping the
class of the rope objects; knows neither masks nor caches.
"""

from contextlib import AbstractContextManager

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from .swap import swapped_classes

BY_LENGTH = (DynamicNTKScalingRoPE,)
"""Ropes whose base follows the end of the pass, computed in Python from one offset."""


def find_ropes(model: nn.Module) -> list[nn.Module]:
    """The rotary embedding modules of a model's layers, by the name mlx-lm gives them."""
    found: dict[int, nn.Module] = {}
    for layer in model.layers:
        for name, module in layer.named_modules():
            if name.split(".")[-1] in ("rope", "rotary_emb"):
                found[id(module)] = module
    return list(found.values())


def at_positions(original: type[nn.Module], depths: mx.array) -> type[nn.Module]:
    """A rope that rotates row r by ``offset + depths[r]`` instead of ``offset + r``."""

    def call(self, x: mx.array, offset: int = 0, **kwargs) -> mx.array:
        # (1, H, R, D) -> (R, H, 1, D): one batch entry a row, each with an offset of its own.
        rows = original.__call__(self, x.transpose(2, 1, 0, 3), offset=offset + depths, **kwargs)
        return rows.transpose(2, 1, 0, 3)

    return type(original.__name__, (original,), {"__call__": call})


def exact_ropes(ropes: list[nn.Module], num_rows: int) -> AbstractContextManager[None]:
    """Make a chain of several rows get the rotations that each of them would get alone.

    Past the length a model was trained for, a base that follows the end of the pass is another
    one for every row that is decoded.
    """
    changed = []
    if num_rows > 1:
        changed = [(r, _row_by_row(type(r))) for r in ropes if isinstance(r, BY_LENGTH)]
    return swapped_classes(changed)


def _row_by_row(original: type[nn.Module]) -> type[nn.Module]:
    """A rope that takes the rows of (1, H, R, D) one at a time."""

    def call(self, x: mx.array, offset: int = 0) -> mx.array:
        rows = mx.split(x, x.shape[-2], axis=-2)
        rotated = [original.__call__(self, row, offset=offset + r) for r, row in enumerate(rows)]
        return mx.concatenate(rotated, axis=-2)

    return type(original.__name__, (original,), {"__call__": call})
