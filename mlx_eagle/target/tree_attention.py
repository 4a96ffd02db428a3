"""Tree attention on an unmodified mlx-lm model, through seams it already has.

A window of rows that form a tree needs two things of a model: a mask by which a row sees its
ancestors only, and a position a row. The mask comes from ``cache.make_mask``, which models
call; positions go into their rope modules, which take one offset a batch entry. Both are put
in place by swapping the class of an object, and taken back after the pass.
"""

from contextlib import AbstractContextManager
from weakref import finalize

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from .ropes import at_positions, find_ropes
from .swap import swapped_classes
from .tree_rows import ancestors

MASKED = (KVCache, QuantizedKVCache, RotatingKVCache)
PROBE_PREFIX, PROBE_ROOT = [3, 5, 7], 2
PROBE_TOKENS, PROBE_PARENTS = [4, 6, 8], [0, 0, 1]  # two children of the root, one grandchild
_refusals: dict[int, str] = {}  # by the id of a model, as long as it lives


def _mask_class(original: type, tree_mask: mx.array, depths: mx.array) -> type:
    """A cache whose mask lets a row see what came before the window and its ancestors in it."""

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        rotating = original is RotatingKVCache
        before = min(self.max_size - 1, self.offset) if rotating else self.offset
        keep = self.keep if rotating else 0
        index = mx.arange(before)
        past = mx.where(index < keep, index, index + (self.offset - before))
        columns = mx.concatenate([past, self.offset + depths])[None]
        rows = (self.offset + depths)[:, None]
        mask = mx.concatenate([mx.ones((N, before), mx.bool_), tree_mask], axis=1)
        if rotating:
            kept = mx.concatenate([index < keep, mx.zeros((N,), mx.bool_)])[None]
            mask = mask & (kept | (columns > rows - (self.max_size - keep)))
        return mask if window_size is None else mask & (columns > rows - window_size)

    return type(original.__name__, (original,), {"make_mask": make_mask})


def tree_attention(
    ropes: list[nn.Module], caches: list, tree_mask: mx.array
) -> AbstractContextManager[None]:
    """Within, a forward pass over R rows is one over the tree of ``reach`` (R, R)."""
    depths = tree_mask.sum(axis=1) - 1
    changed = [(rope, at_positions(type(rope), depths)) for rope in ropes]
    changed += [(cache, _mask_class(type(cache), tree_mask, depths)) for cache in caches]
    return swapped_classes(changed)


def check_trees(model: nn.Module, caches: list) -> None:
    """Raise ValueError, with the reason, where this model cannot verify a tree exactly.

    Cache types are looked up; the rest is measured, once for each model: a small tree on a few
    tokens must give the logits of each of its branches run alone.
    """
    for cache in caches:
        if type(cache) not in MASKED:
            names = ", ".join(kind.__name__ for kind in MASKED)
            raise ValueError(
                f"tree drafts need caches whose rows can be gathered ({names}), but this target "
                f"has a {type(cache).__name__}: leave the tree out and draft chains."
            )
    if id(model) not in _refusals:
        _refusals[id(model)] = _refusal(model)
        finalize(model, _refusals.pop, id(model))
    if _refusals[id(model)]:
        raise ValueError(_refusals[id(model)])


def _refusal(model: nn.Module) -> str:
    """Why this model cannot verify a tree exactly; empty where it can."""
    try:
        difference, scale = _probe(model, ancestors(mx.array(PROBE_PARENTS), 2))
    except (TypeError, ValueError) as err:
        return (
            f"this target cannot verify trees (a position a row fails in it: {err}): leave the "
            "tree out and draft chains."
        )
    if difference <= 0.02 * scale:
        return ""
    return (
        "this target does not verify trees exactly (its logits on a probe differ by "
        f"{difference:.2g}, of {scale:.2g}): its attention takes masks or positions from "
        "elsewhere; leave the tree out and draft chains."
    )


def _probe(model: nn.Module, tree_mask: mx.array) -> tuple[float, float]:
    """Greatest difference between a tree's logits and its branches', and the logits' size."""

    def run(tokens: list[int], cache: list) -> mx.array:
        logits = model(mx.array([tokens]), cache=cache)[0]
        mx.eval(logits)  # one by one: parts of a pipeline must all run them in this order
        return logits

    cache = make_prompt_cache(model)
    run(PROBE_PREFIX, cache)
    with tree_attention(find_ropes(model), cache, tree_mask):
        rows = run([PROBE_ROOT, *PROBE_TOKENS], cache)
    left, middle, grandchild = PROBE_TOKENS
    before = [*PROBE_PREFIX, PROBE_ROOT]
    first = run([*before, left, grandchild], make_prompt_cache(model))[-3:]
    second = run([*before, middle], make_prompt_cache(model))
    alone = mx.stack([first[0], first[1], second[-1], first[2]])
    difference = mx.abs(rows - alone).max().item()
    return difference, mx.abs(alone).max().item()
