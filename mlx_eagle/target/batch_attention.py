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

from .ragged import RaggedCaches
from .states import recurrent_caches
from .taps import Target

MASK_AXES = (4, 5)
# Of the greatest logit, what counts as noise in any case, and at most: a mask or a position gone
# astray changes more, and a model may be inconsistent with itself.
LEAST_NOISE, MOST_NOISE = 0.02, 0.1
_axes: dict[int, int] = {}  # by the id of a model, as long as it lives
_cuts_states: dict[int, bool] = {}  # the same


def batch_mask_axes(model: nn.Module) -> int:
    """The axes of masks with which texts in one pass get the logits of each run alone; 0: none.

    Measured once for each model, on a few tokens, whose caches ``can_share``.
    """
    if id(model) not in _axes:
        # Of recurrent states, which could not be cut, only one row is taken.
        num_rows = 1 if any(recurrent_caches(make_prompt_cache(model))) else 2
        _axes[id(model)] = next(
            (axes for axes in MASK_AXES if _is_exact(model, axes, num_rows)), 0
        )
        finalize(model, _axes.pop, id(model), None)
    return _axes[id(model)]


def cuts_states_by_text(model: nn.Module) -> bool:
    """Whether texts in one pass may keep, each for itself, a number of rows of recurrent states.

    Measured as ``batch_mask_axes``, which must have found some.
    """
    if id(model) not in _cuts_states:
        axes = batch_mask_axes(model)
        _cuts_states[id(model)] = _is_exact(model, axes, 1, num_cut=(1, 2))
        finalize(model, _cuts_states.pop, id(model), None)
    return _cuts_states[id(model)]


def _is_exact(
    model: nn.Module, mask_axes: int, num_rows: int, num_cut: tuple[int, int] | None = None
) -> bool:
    """Whether two texts of unequal length in one pass get the logits that each gets alone.

    With ``num_cut`` they do after a pass of which they keep these numbers of rows.
    """
    try:
        return _probe(model, mask_axes, num_rows, num_cut or (0, 0))
    except (TypeError, ValueError, IndexError):
        return False


def _probe(model: nn.Module, mask_axes: int, num_rows: int, num_cut: tuple[int, int]) -> bool:
    def run(tokens: list[int], cache: list[Any]) -> mx.array:
        logits: mx.array = model(mx.array([tokens]), cache=cache)
        mx.eval(logits)  # one by one: parts of a pipeline must all run them in this order
        return logits

    vocab_size = run([0], make_prompt_cache(model)).shape[-1]
    tokens = [vocab_size * i // 11 for i in range(2, 11)]
    texts = [(tokens[:4], tokens[4:]), (tokens[6:7], tokens[3:])]
    shared, alone = RaggedCaches(mask_axes), []
    for (prefix, rows), skipped in zip(texts, num_cut, strict=True):
        cache = make_prompt_cache(model)
        run(prefix, cache)
        shared.join(cache)
        if skipped:
            run(rows[:skipped], cache)
        alone.append(run(rows[skipped : skipped + num_rows], deepcopy(cache)))
    if any(num_cut):
        target, caches, size = Target(model), shared.open(), max(num_cut) + 1
        with target.recording(caches, size, shared.keep_updates):
            target.batch(mx.array([rows[:size] for _, rows in texts]), caches)
        shared.advance(num_cut)
    expected = mx.concatenate(alone)
    following = [rows[n : n + num_rows] for (_, rows), n in zip(texts, num_cut, strict=True)]
    logits = model(mx.array(following), cache=shared.open())
    mx.eval(logits)
    # What other kernels and other sums make of it in this model's arithmetic.
    prefix, rows = texts[0]
    text = [*prefix, *rows[: num_cut[0] + num_rows]]
    whole = run(text, make_prompt_cache(model))[:, -num_rows:]
    scale = _greatest(expected) or 1.0  # a model may say nothing at all of these tokens
    noise = 2 * _greatest(whole - alone[0]) / scale
    limit = min(max(noise, LEAST_NOISE), MOST_NOISE)
    return _greatest(logits - expected) <= limit * scale


def _greatest(values: mx.array) -> float:
    """The greatest size of a number; tokens that a model rules out have none."""
    size = mx.abs(values.astype(mx.float32))
    return float(mx.where(size < mx.inf, size, 0.0).max())
