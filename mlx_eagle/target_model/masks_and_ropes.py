"""Masks and positions for a pass of several rows for which mlx-lm's own are wrong.

Models take their mask from ``cache.make_mask``. During a pass a cache gets a subclass of its
class that makes another mask. That is safe, unlike the same with a module, since a cache belongs
to one generation, and so to one thread at a time.

mlx-lm's rotary embeddings rotate row r of a pass by ``offset + r``. The rows of a tree need other
positions, and some rows need the very numbers that they would get one by one.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from .cache_view import WindowCache


def exact_masks(caches: list[Any], num_rows: int) -> AbstractContextManager[None]:
    """Let each row of a chain, in this block, see the same entries as in plain decoding.

    mlx-lm masks the rows of a block only by distance. A RotatingKVCache that keeps its first
    tokens would then lose these, one per row, instead of the oldest others.
    """
    keeping = [c for c in caches if num_rows > 1 and type(c) is RotatingKVCache and c.keep > 0]
    changed = [c for c in keeping if c.offset + num_rows > c.max_size]
    return tree_masks(changed, mx.tri(num_rows, dtype=mx.bool_), mx.arange(num_rows))


@contextmanager
def tree_masks(caches: list[Any], tree_mask: mx.array, depths: mx.array) -> Iterator[None]:
    """Let a row, in this block, see everything before the pass, its ancestors, and itself.

    ``tree_mask[r, a]``, (R, R), says whether row a is row r or an ancestor of it; ``depths``
    (R,) is the distance of each row from the root. All caches must be of a type in ``MASKED``.
    """
    originals = [type(cache) for cache in caches]
    for cache, original in zip(caches, originals, strict=True):
        cache._tree_rows = tree_mask, depths
        cache.__class__ = _TREE_CACHES[original]
    try:
        yield
    finally:
        for cache, original in zip(caches, originals, strict=True):
            cache.__class__ = original
            del cache._tree_rows


def slot_positions(num_slots: int, length: int, keep: int) -> mx.array:
    """Positions (num_slots,) of the first ``keep`` of ``length`` entries and the latest others."""
    index = mx.arange(num_slots)
    return (
        index if num_slots == length else mx.where(index < keep, index, index + length - num_slots)
    )


def _check_window(cache: Any, window_size: int | None) -> None:
    """Raise ValueError where a layer sees less than a cache that keeps its first tokens holds.

    mlx-lm gives a row on a full cache no window of its own where that is no shorter than the
    cache. A shorter one it lays over the cache's slots as if none were kept: it then hides other
    tokens than those that are too far back, at times the newest, as the slots have come to lie.
    """
    if window_size is not None and cache.keep and window_size < cache.max_size:
        raise ValueError(
            f"the target looks back {window_size} tokens, but its cache holds {cache.max_size} "
            f"and keeps the first {cache.keep}, where mlx-lm masks the wrong ones: give a "
            f"max_kv_size of {window_size} or less, or none."
        )


class _TreeMask:
    """Mixin in front of a cache's own class: the mask of a pass whose rows form a tree.

    A RotatingKVCache has the sizes that say what it forgets; other caches forget nothing.
    """

    _tree_rows: tuple[mx.array, mx.array]  # ancestors (R, R), depths (R,)
    offset: int
    keep: int = 0
    max_size: int = sys.maxsize

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """Mask (N, S): the entries before the pass, and of its N rows, that each row sees."""
        num_before = min(self.max_size - 1, self.offset)
        tree_mask, depths = self._tree_rows
        rows = self.offset + depths
        positions = mx.concatenate([slot_positions(num_before, self.offset, self.keep), rows])
        distance = rows[:, None] - positions[None]
        before = mx.ones((N, num_before), mx.bool_)
        mask = mx.concatenate([before, tree_mask], axis=1)
        if self.keep and self.offset + N > self.max_size:
            _check_window(self, window_size)
            window_size = None
        if self.max_size < sys.maxsize:
            kept = positions < self.keep
            mask = mask & (kept[None] | (distance < self.max_size - self.keep))
        return mask if window_size is None else mask & (distance < window_size)


_TREE_CACHES: dict[type, type] = {
    each: type(f"Tree{each.__name__}", (_TreeMask, each), {})
    for each in (KVCache, QuantizedKVCache, RotatingKVCache, WindowCache)
}

MASKED = tuple(_TREE_CACHES)
"""The cache types that can mask a tree."""


BY_LENGTH = (DynamicNTKScalingRoPE,)
"""Ropes whose base follows the end of the pass, computed in Python from one offset."""


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module in a model, itself included, with its name in the one that holds it.

    MLX's own method takes four times as long (0.9 ms of 32 layers), and every text begins with
    some walks.
    """
    found: list[tuple[str, Any]] = [("", model)]
    while found:
        name, value = found.pop()
        if isinstance(value, nn.Module):
            yield name, value
        members = value.items() if isinstance(value, dict) else enumerate(value)
        found += [(str(key), v) for key, v in members if isinstance(v, (dict, list))]


def find_ropes(model: nn.Module) -> list[nn.Module]:
    """The rotary embedding modules of a model's layers, by the name mlx-lm gives them."""
    named = (pair for layer in model.layers for pair in named_modules(layer))
    return list({id(m): m for name, m in named if name in ("rope", "rotary_emb")}.values())


def evaluate_ropes(model: nn.Module) -> None:
    """Compute the arrays of a model's ropes, which are no parameters, in the thread that asks.

    Some are made lazily; what one thread has left undone, another thread cannot compute.
    """
    modules = [module for rope in find_ropes(model) for _, module in rope.named_modules()]
    mx.eval([a for module in modules for a in module.values() if isinstance(a, mx.array)])


class RowPositions:
    """Positions by which the rows of a pass are rotated: ``offset + r`` by default.

    In a tree they are ``offset + depths[r]``, depths (R,). ``one_by_one`` rotates each row as if
    it were run by itself: some ropes' base depends on the end of the pass, beyond the length that
    the model was trained for, and so differs for every row that is decoded.
    """

    depths: mx.array | None = None
    one_by_one = False

    @contextmanager
    def using(self, depths: mx.array | None = None, one_by_one: bool = False) -> Iterator[None]:
        """Use these positions for the passes in this block."""
        self.depths = depths
        self.one_by_one = one_by_one
        try:
            yield
        finally:
            self.depths = None
            self.one_by_one = False


class PositionedRope(nn.Module):
    """Mixin for the copy of a rope module that takes its positions from ``RowPositions``."""

    _row_positions: RowPositions

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """Rotate the rows of x (1, H, R, D)."""
        if self._row_positions.depths is not None:
            return self._at_depths(x, self._row_positions.depths, *args, **kwargs)
        if self._row_positions.one_by_one and isinstance(self, BY_LENGTH):
            return self._row_by_row(x, *args, **kwargs)
        rotated: mx.array = super().__call__(x, *args, **kwargs)
        return rotated

    def _at_depths(
        self, x: mx.array, depths: mx.array, offset: int = 0, **kwargs: Any
    ) -> mx.array:
        # (1, H, R, D) -> (R, H, 1, D): one batch entry per row, each with its own offset.
        positions = depths + offset
        rows: mx.array = super().__call__(x.transpose(2, 1, 0, 3), offset=positions, **kwargs)
        return rows.transpose(2, 1, 0, 3)

    def _row_by_row(self, x: mx.array, offset: int = 0) -> mx.array:
        rotate = super().__call__
        rows = mx.split(x, x.shape[-2], axis=-2)
        rotated = [rotate(row, offset=offset + r) for r, row in enumerate(rows)]
        return mx.concatenate(rotated, axis=-2)


def positions_of_one_scale(model: nn.Module) -> int | None:
    """Number of consecutive positions with the same attention scale; None if all have it.

    In the layers of Ministral and Mistral 4 (and of Llama 4) queries are scaled by position, in
    steps, and mlx-lm counts positions row by row, even in a tree: so all rows of a tree must lie
    between two steps.
    """
    for _, module in named_modules(model):
        rope = getattr(getattr(module, "args", None), "rope_parameters", None) or {}
        if rope.get("llama_4_scaling_beta"):
            return int(rope["original_max_position_embeddings"])
    return None
