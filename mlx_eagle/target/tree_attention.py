"""Draft trees in a target: their rows as arrays, and whether a model can verify them exactly.

A row of a tree sees its ancestors only, and stands at the position of its depth. Masks come from
the caches, positions go into the rope modules (``masks_and_ropes.py`` has both); a model that
takes either from elsewhere would give wrong logits, so each model is tried once.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .cache_view import WindowCache
from .masks_and_ropes import MASKED
from .stand_in import StandIn


def each_itself(num_rows: int) -> mx.array:
    """Which row is which: true where row and column are the same, (R, R)."""
    index = mx.arange(num_rows)  # comparing takes fewer operations than ``mx.eye``
    return index[:, None] == index


def ancestors(parents: mx.array, depth: int) -> mx.array:
    """Whether row a lies on the path to row r, itself included: parents (k,) -> (k + 1, k + 1).

    ``depth`` is the greatest depth in the tree. Row 0 is the root, row i + 1 is token i:
    parents [0, 0, 2] -> [[1,0,0,0], [1,1,0,0], [1,0,1,0], [1,0,1,1]].
    """
    size = parents.shape[0] + 1
    own = each_itself(size)
    up = mx.concatenate([mx.zeros((1,), parents.dtype), parents])
    tree_mask = own
    for _ in range(depth):
        tree_mask = own | tree_mask[up]
    return tree_mask


def kept_path(keep: mx.array, tree_mask: mx.array) -> tuple[mx.array, mx.array]:
    """The kept branch: keep (k,) tokens, tree_mask (R, R) -> (rows (R,), number kept ()).

    Rows of the branch come first, root before leaf; the others follow. At most one child of
    a row is kept, since siblings are different tokens, so the kept rows form one branch.
    """
    size = tree_mask.shape[0]
    lost = mx.concatenate([mx.zeros((1,), mx.bool_), ~keep])
    on_branch = ~mx.any(tree_mask & lost[None], axis=1)
    index = mx.arange(size)
    rows = mx.argsort(mx.where(on_branch, index, size + index))
    return rows, on_branch.sum() - 1


def families(parents: mx.array, width: int) -> tuple[mx.array, mx.array]:
    """Which child of its parent each token is, (k,), and the rows of each row's children.

    Of the children (k + 1, ``width``), in the order of rows, 0 stands for none:
    parents [0, 0, 2], width 2 -> [0, 1, 0] and [[1, 2], [0, 0], [3, 0], [0, 0]].
    """
    index = mx.arange(parents.shape[0])
    is_sibling = parents[:, None] == parents
    ranks = (is_sibling & (index < index[:, None])).sum(axis=1).astype(mx.int32)
    children = mx.zeros((parents.shape[0] + 1, width), mx.int32)
    return ranks, children.at[parents, ranks].add(index.astype(mx.int32) + 1)


def positions_of_one_scale(model: nn.Module) -> int | None:
    """How many positions on end have the same attention scale; None where all have.

    In Ministral's and Mistral 4's layers (as in Llama 4's) queries grow with the position, a step
    at a time, and mlx-lm counts positions row by row, also in a tree: its rows must all lie
    between two steps.
    """
    for module in model.modules():
        rope = getattr(getattr(module, "args", None), "rope_parameters", None) or {}
        if rope.get("llama_4_scaling_beta"):
            return int(rope["original_max_position_embeddings"])
    return None


PROBE_PARENTS = [0, 0, 1]  # two children of the root, and one of the first of them
LEAST_NOISE = 0.02  # of the greatest logit; a mask or a position gone astray changes far more
_refusals: dict[int, str] = {}  # by the id of a model, as long as it lives


def check_trees(model: nn.Module, caches: list[Any]) -> None:
    """Raise ValueError, with the reason, where this model cannot verify a tree exactly.

    Cache types are looked up; the rest is measured, once for each model: a small tree on a few
    tokens must give the logits of each of its branches run alone.
    """
    for cache in caches:
        if type(cache) not in MASKED:
            names = ", ".join(kind.__name__ for kind in MASKED if kind is not WindowCache)
            raise ValueError(
                f"tree drafts need caches whose rows can be gathered ({names}), but this target's "
                f"include {type(cache).__name__}: leave the tree out and draft chains."
            )
    if id(model) not in _refusals:
        _refusals[id(model)] = _refusal(model)
        finalize(model, _refusals.pop, id(model), None)
    if _refusals[id(model)]:
        raise ValueError(_refusals[id(model)])


def _refusal(model: nn.Module) -> str:
    """Why this model cannot verify a tree exactly; empty where it can."""
    try:
        found = _probe(model)
    except (TypeError, ValueError) as err:
        return (
            f"this target cannot verify trees (one position per row fails in it: {err}): leave "
            "the tree out and draft chains."
        )
    if found.difference <= max(2 * found.noise, LEAST_NOISE * found.scale):
        return ""
    return (
        "this target does not verify trees exactly (its logits on a probe differ by "
        f"{found.difference:.2g}, of {found.scale:.2g}): its attention takes masks or positions "
        "from elsewhere; leave the tree out and draft chains."
    )


@dataclass(frozen=True)
class _Probe:
    """Greatest differences of logits, and the greatest logit: a tree's against its branches'.

    ``noise`` is that of a branch against itself, run in two parts: what other kernels and other
    sums make of it in this model's arithmetic.
    """

    difference: float
    noise: float
    scale: float


def _probe(model: nn.Module) -> _Probe:
    """Run a small tree, and each of its branches as a chain.

    All passes that are compared have four rows, so that all take the same kernels: on a GPU these
    change with the number of rows, and round otherwise. The tokens are from the middle of the
    vocabulary, because models are at their most sensitive on special ones.
    """

    def run(model: nn.Module, tokens: list[int], cache: list[Any]) -> mx.array:
        logits: mx.array = model(mx.array([tokens]), cache=cache)[0]
        mx.eval(logits)  # one by one: parts of a pipeline must all run them in this order
        return logits

    vocab_size = model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1]
    *prefix, root, left, right, below, last, end = (vocab_size * i // 11 for i in range(2, 11))
    before, stand_in = make_prompt_cache(model), StandIn(model)
    run(model, prefix, before)
    cache = deepcopy(before)
    with stand_in.tree_attention(cache, ancestors(mx.array(PROBE_PARENTS), 2)):
        tree = run(stand_in.model, [root, left, right, below], cache)
    first = run(model, [root, left, below, last], deepcopy(before))
    second = run(model, [root, right, last, end], deepcopy(before))
    parts = [run(model, tokens, before) for tokens in ([root], [left, below, last])]
    alone = mx.stack([first[0], first[1], second[1], first[2]])
    return _Probe(
        float(mx.abs(tree - alone).max()),
        float(mx.abs(mx.concatenate(parts) - first).max()),
        float(mx.abs(alone).max()),
    )
