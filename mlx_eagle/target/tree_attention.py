"""Whether a target can verify draft trees, which takes two things of an unmodified mlx-lm model.

A row of a tree sees its ancestors only, and stands at the position of its depth. Masks come from
the caches (``masks.py``), positions go into the rope modules (``ropes.py``); a model that takes
either from elsewhere would give wrong logits, so each model is tried once.
"""

from weakref import finalize

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .masks import MASKED
from .stand_in import StandIn
from .tree_rows import ancestors

PROBE_PREFIX, PROBE_ROOT = [3, 5, 7], 2
PROBE_TOKENS, PROBE_PARENTS = [4, 6, 8], [0, 0, 1]  # two children of the root, one grandchild
_refusals: dict[int, str] = {}  # by the id of a model, as long as it lives


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
        finalize(model, _refusals.pop, id(model), None)
    if _refusals[id(model)]:
        raise ValueError(_refusals[id(model)])


def _refusal(model: nn.Module) -> str:
    """Why this model cannot verify a tree exactly; empty where it can."""
    try:
        difference, scale = _probe(model, ancestors(mx.array(PROBE_PARENTS), 2))
    except (TypeError, ValueError) as err:
        return (
            f"this target cannot verify trees (one position per row fails in it: {err}): leave "
            "the tree out and draft chains."
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

    def run(model: nn.Module, tokens: list[int], cache: list) -> mx.array:
        logits = model(mx.array([tokens]), cache=cache)[0]
        mx.eval(logits)  # one by one: parts of a pipeline must all run them in this order
        return logits

    cache, stand_in = make_prompt_cache(model), StandIn(model)
    run(model, PROBE_PREFIX, cache)
    with stand_in.tree_attention(cache, tree_mask):
        rows = run(stand_in.model, [PROBE_ROOT, *PROBE_TOKENS], cache)
    left, middle, grandchild = PROBE_TOKENS
    before = [*PROBE_PREFIX, PROBE_ROOT]
    first = run(model, [*before, left, grandchild], make_prompt_cache(model))[-3:]
    second = run(model, [*before, middle], make_prompt_cache(model))
    alone = mx.stack([first[0], first[1], second[-1], first[2]])
    difference = mx.abs(rows - alone).max().item()
    return difference, mx.abs(alone).max().item()
