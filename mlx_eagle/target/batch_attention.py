"""Whether a target can run several texts in one pass, and how many axes its masks must have.

The masks of a batch are (B, 1, R, S). Attention that keeps the heads of one key apart on an axis
of their own takes them as (B, 1, 1, R, S): the others would stand for its heads, which is an error
or, where there are as many texts as heads, the mask of another text. And there are models that
take one position for all texts. So each model is tried once.
"""

from copy import deepcopy
from typing import Any
from weakref import finalize

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .ragged import RaggedCaches, can_share

MASK_AXES = (4, 5)
# Of the greatest logit, what counts as noise in any case, and at most: a mask or a position gone
# astray changes more, and a model may be inconsistent with itself.
LEAST_NOISE, MOST_NOISE = 0.02, 0.1
_found: dict[int, int] = {}  # by the id of a model, as long as it lives


def batch_mask_axes(model: nn.Module) -> int:
    """The axes of masks with which texts in one pass get the logits of each run alone; 0: none.

    Measured once for each model, on a few tokens, whose caches ``can_share`` at least plainly.
    """
    if id(model) not in _found:
        _found[id(model)] = next((axes for axes in MASK_AXES if _is_exact(model, axes)), 0)
        finalize(model, _found.pop, id(model), None)
    return _found[id(model)]


def _is_exact(model: nn.Module, mask_axes: int) -> bool:
    """Whether two texts of unequal length in one pass get the logits that each gets alone."""
    try:
        return _probe(model, mask_axes)
    except (TypeError, ValueError, IndexError):
        return False


def _probe(model: nn.Module, mask_axes: int) -> bool:
    def run(tokens: list[int], cache: list[Any]) -> mx.array:
        logits: mx.array = model(mx.array([tokens]), cache=cache)
        mx.eval(logits)  # one by one: parts of a pipeline must all run them in this order
        return logits

    fresh = make_prompt_cache(model)
    num_rows = 2 if can_share(fresh) else 1  # of recurrent states only one is taken
    vocab_size = run([0], fresh).shape[-1]
    tokens = [vocab_size * i // 11 for i in range(2, 11)]
    texts = [(tokens[:4], tokens[4 : 4 + num_rows]), (tokens[6:7], tokens[7 : 7 + num_rows])]
    shared, alone = RaggedCaches(mask_axes), []
    for prefix, rows in texts:
        cache = make_prompt_cache(model)
        run(prefix, cache)
        shared.join(cache)
        alone.append(run(rows, deepcopy(cache)))
    expected = mx.concatenate(alone)
    logits = model(mx.array([rows for _, rows in texts]), cache=shared.open())
    mx.eval(logits)
    # What other kernels and other sums make of it in this model's arithmetic.
    whole = run([*texts[0][0], *texts[0][1]], make_prompt_cache(model))[:, -num_rows:]
    noise = 2 * _greatest(whole - alone[0]) / _greatest(expected)
    limit = min(max(noise, LEAST_NOISE), MOST_NOISE)
    return _greatest(logits - expected) <= limit * _greatest(expected)


def _greatest(values: mx.array) -> float:
    """The greatest size of a number; tokens that a model rules out have none."""
    size = mx.abs(values.astype(mx.float32))
    return float(mx.where(size < mx.inf, size, 0.0).max())
