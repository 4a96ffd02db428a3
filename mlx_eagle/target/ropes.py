"""The rotary embeddings of a model, and the position that each row of a pass gets from them.

mlx-lm rotates row r of a pass by ``offset + r``. The rows of a tree need other positions, and
some rows need the very numbers that they would get one by one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

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


def evaluate_ropes(model: nn.Module) -> None:
    """Compute the arrays of a model's ropes, which are no parameters, in the thread that asks.

    Some are made lazily; what one thread has left undone, another thread cannot compute.
    """
    modules = [module for rope in find_ropes(model) for _, module in rope.named_modules()]
    mx.eval([a for module in modules for a in module.values() if isinstance(a, mx.array)])


class RowPositions:
    """How the rows of a pass are rotated: row r by ``offset + r``, unless a method says more."""

    def __init__(self) -> None:
        self.depths: mx.array | None = None
        self.one_by_one = False

    @contextmanager
    def of_tree(self, depths: mx.array) -> Iterator[None]:
        """Within, row r is rotated by ``offset + depths[r]``, depths (R,)."""
        self.depths = depths
        try:
            yield
        finally:
            self.depths = None

    @contextmanager
    def as_alone(self, num_rows: int) -> Iterator[None]:
        """Within, each row of a chain is rotated as it would be if it were run alone.

        Past the length that a model was trained for, a base that follows the end of the pass
        is another one for every row that is decoded.
        """
        self.one_by_one = num_rows > 1
        try:
            yield
        finally:
            self.one_by_one = False


class PositionedRope:
    """What a copy of a rope module does before its own class: it asks ``RowPositions``."""

    _row_positions: RowPositions

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """Rotate the rows of x (1, H, R, D)."""
        if self._row_positions.depths is not None:
            return self._at_depths(x, *args, **kwargs)
        if self._row_positions.one_by_one and isinstance(self, BY_LENGTH):
            return self._row_by_row(x, *args, **kwargs)
        return super().__call__(x, *args, **kwargs)

    def _at_depths(self, x: mx.array, offset: int = 0, **kwargs: Any) -> mx.array:
        # (1, H, R, D) -> (R, H, 1, D): one batch entry per row, each with an offset of its own.
        places = offset + self._row_positions.depths
        rows = super().__call__(x.transpose(2, 1, 0, 3), offset=places, **kwargs)
        return rows.transpose(2, 1, 0, 3)

    def _row_by_row(self, x: mx.array, offset: int = 0) -> mx.array:
        rotate, rows = super().__call__, mx.split(x, x.shape[-2], axis=-2)
        rotated = [rotate(row, offset=offset + r) for r, row in enumerate(rows)]
        return mx.concatenate(rotated, axis=-2)
