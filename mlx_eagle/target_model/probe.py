"""Probes of a target: whether it computes trees and batches exactly.

A row of a tree sees only its ancestors, and has the position of its depth. The masks of a batch
are (B, 1, R, S). Attention with a separate axis for the heads of one key needs (B, 1, 1, R, S):
with fewer axes the texts would be taken for its heads, which is an error or, if there are as many
texts as heads, the mask of another text.

Masks come from the caches, positions from the rope modules (``masks_and_ropes.py`` has both). A
model that takes either from elsewhere, or one position for all texts, would give wrong logits. So
each model is tried once.
"""

from copy import deepcopy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .cache_view import WindowCache
from .masks_and_ropes import MASKED
from .per_model import PerModel
from .ragged import RaggedCaches
from .stand_in import StandIn
from .states import recurrent_caches
from .target import Target
from .tree_rows import ancestors

PROBE_PARENTS = [0, 0, 1]  # two children of the root, and one of the first of them
LEAST_NOISE = 0.02  # of the greatest logit; a wrong mask or position changes far more
MOST_NOISE = 0.1  # of a batch, where a model is inconsistent with itself
_refusals: PerModel[str] = PerModel()


def check_trees(model: nn.Module, caches: list[Any]) -> None:
    """Raise ValueError, with the reason, if this model cannot verify a tree exactly.

    Cache types are looked up; the rest is measured, once for each model: a small tree on a few
    tokens must give the logits of each of its branches run by itself.
    """
    if any(recurrent_caches(caches)):
        raise ValueError(
            "tree drafts need caches whose rows can be gathered, but this target has recurrent "
            "layers, whose state follows one branch only: leave the tree out and draft chains."
        )
    for cache in caches:
        if type(cache) not in MASKED:
            names = ", ".join(each.__name__ for each in MASKED if each is not WindowCache)
            raise ValueError(
                f"tree drafts need caches whose rows can be gathered ({names}), but this target's "
                f"include {type(cache).__name__}: leave the tree out and draft chains."
            )
    if refusal := _refusals.get(lambda: _refusal(model), model):
        raise ValueError(refusal)


def _logits(model: nn.Module, tokens: list[int], cache: list[Any]) -> mx.array:
    """Logits of a pass, (R, V), computed at once: all parts of a pipeline run in this order."""
    logits: mx.array = model(mx.array([tokens]), cache=cache)[0]
    mx.eval(logits)
    return logits


def _refusal(model: nn.Module) -> str:
    """Reason why this model cannot verify a tree exactly; "" if it can."""
    try:
        difference, noise, scale = _probe(model)
    except (TypeError, ValueError) as err:
        return (
            f"this target cannot verify trees (one position per row fails in it: {err}): leave "
            "the tree out and draft chains."
        )
    if difference <= max(2 * noise, LEAST_NOISE * scale):
        return ""
    return (
        "this target does not verify trees exactly (its logits on a probe differ by "
        f"{difference:.2g}, of {scale:.2g}): its attention takes masks or positions "
        "from elsewhere; leave the tree out and draft chains."
    )


def _probe(model: nn.Module) -> tuple[float, float, float]:
    """Run a small tree, and each of its branches as a chain.

    Returns the greatest difference of their logits, the same for a branch run in two parts (the
    effect of other kernels and other sums in this model's arithmetic), and the greatest logit.

    All compared passes have four rows, so that they take the same kernels: on a GPU kernels change
    with the number of rows, and round differently. The tokens are from the middle of the
    vocabulary, because models are most sensitive on special ones.
    """
    vocab_size = _logits(model, [0], make_prompt_cache(model)).shape[-1]
    *prefix, root, left, right, below, last, end = (vocab_size * i // 11 for i in range(2, 11))
    before = make_prompt_cache(model)
    stand_in = StandIn(model)
    _logits(model, prefix, before)
    cache = deepcopy(before)
    with stand_in.tree_attention(cache, ancestors(mx.array(PROBE_PARENTS), 2)):
        tree = _logits(stand_in.model, [root, left, right, below], cache)
    first = _logits(model, [root, left, below, last], deepcopy(before))
    second = _logits(model, [root, right, last, end], deepcopy(before))
    halves = [_logits(model, tokens, before) for tokens in ([root], [left, below, last])]
    single = mx.stack([first[0], first[1], second[1], first[2]])
    return (
        float(mx.abs(tree - single).max()),
        float(mx.abs(mx.concatenate(halves) - first).max()),
        float(mx.abs(single).max()),
    )


MASK_AXES = (4, 5)
_axes: PerModel[int] = PerModel()
_cuts_states: PerModel[bool] = PerModel()


def batch_mask_axes(model: nn.Module) -> int:
    """Mask axes with which texts in one pass get the logits of separate passes; 0: none.

    It is measured once per model, on a few tokens, if its caches ``can_share``.
    """

    def measure() -> int:
        # Of recurrent states, which could not be cut, only one row is taken.
        num_rows = 1 if any(recurrent_caches(make_prompt_cache(model))) else 2
        return next((axes for axes in MASK_AXES if _is_exact(model, axes, num_rows)), 0)

    return _axes.get(measure, model)


def cuts_states_by_text(model: nn.Module) -> bool:
    """Whether each text of a pass can keep its own number of rows in recurrent states.

    It is measured like ``batch_mask_axes``, which must not be 0.
    """
    axes = batch_mask_axes(model)
    return _cuts_states.get(lambda: _is_exact(model, axes, 1, num_cut=(1, 2)), model)


def _is_exact(
    model: nn.Module, mask_axes: int, num_rows: int, num_cut: tuple[int, int] = (0, 0)
) -> bool:
    """Whether two texts of unequal length in one pass get the logits of separate passes.

    ``num_cut``: the same after a pass of which they keep these numbers of rows.
    """
    vocab_size = _logits(model, [0], make_prompt_cache(model)).shape[-1]
    tokens = [vocab_size * i // 11 for i in range(2, 11)]
    texts = [(tokens[:4], tokens[4:]), (tokens[6:7], tokens[3:])]
    shared = RaggedCaches(mask_axes)
    single = []
    following = [rows[n : n + num_rows] for (_, rows), n in zip(texts, num_cut, strict=True)]
    try:
        for (prefix, rows), skipped, after in zip(texts, num_cut, following, strict=True):
            cache = make_prompt_cache(model)
            _logits(model, prefix, cache)
            shared.join(cache)
            if skipped:
                _logits(model, rows[:skipped], cache)
            single.append(_logits(model, after, cache))
        if any(num_cut):
            target = Target(model)
            caches = shared.open()
            size = max(num_cut) + 1
            with target.recording(caches, size, shared.keep_updates):
                target.batch(mx.array([rows[:size] for _, rows in texts]), caches)
            shared.advance(num_cut)
        logits = model(mx.array(following), cache=shared.open())
        mx.eval(logits)
    except (TypeError, ValueError, IndexError):
        return False
    expected = mx.stack(single)
    # What other kernels and other sums make of it in this model's arithmetic.
    prefix, rows = texts[0]
    text = [*prefix, *rows[: num_cut[0] + num_rows]]
    whole = _logits(model, text, make_prompt_cache(model))[-num_rows:]
    scale = _greatest(expected) or 1.0  # a model may say nothing at all of these tokens
    noise = 2 * _greatest(whole - single[0]) / scale
    limit = min(max(noise, LEAST_NOISE), MOST_NOISE)
    return _greatest(logits - expected) <= limit * scale


def _greatest(values: mx.array) -> float:
    """The greatest finite absolute value; a model may rule out tokens with infinite ones."""
    size = mx.abs(values.astype(mx.float32))
    return float(mx.where(size < mx.inf, size, 0.0).max())
