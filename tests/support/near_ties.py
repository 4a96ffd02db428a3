"""Texts in half precision, where no two kernels round alike: is each token nearly the best?

Independent of the loop: one pass of mlx-lm's model over the whole text says what every token
should have been, and its passes of one row how far rounding goes.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from tolerances import tolerance

from mlx_eagle.decoding.sampling import Sampling

LAST_PLACE = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


def logits_of(model: nn.Module, tokens: list[int], rows: int) -> mx.array:
    """Logits (n, V) in float32 after each of ``tokens``, in passes of so many rows."""
    cache, found = make_prompt_cache(model), []
    for start in range(0, len(tokens), rows):
        logits = model(mx.array([tokens[start : start + rows]]), cache=cache)[0]
        mx.eval(logits)
        found.append(logits.astype(mx.float32))
    return mx.concatenate(found)


def gaps(
    model: nn.Module, prompt: list[int], text: list[int], sampling: Sampling | None = None
) -> mx.array:
    """How far below the best each token of ``text`` is, (n,); 0 where it is the best.

    By logits after what stands before it, or by what ``sampling`` draws the best of.
    """
    tokens = prompt + text[:-1]
    scores = logits_of(model, tokens, len(tokens))[len(prompt) - 1 :]
    if sampling is not None:
        scores = sampling.scores(scores) + sampling.noises(0, len(text), scores.shape[-1])
    chosen = mx.take_along_axis(scores, mx.array(text)[:, None], axis=-1)[:, 0]
    return scores.max(axis=-1) - chosen


def near_tie(model: nn.Module, tokens: list[int], dtype: mx.Dtype) -> float:
    """The greatest gap that rounding explains: of two scores, each in a pass of its own size."""
    whole, single = logits_of(model, tokens, len(tokens)), logits_of(model, tokens, 1)
    rounding, size = (x.max().item() for x in (mx.abs(whole - single), mx.abs(whole)))
    most = max(1e-4, 2 * tolerance(dtype)) * size  # or anything would be a near-tie
    assert rounding <= most, f"{rounding} of {size} is no rounding in {dtype}"
    # Where these passes happen to round alike, others need not: a unit in the last place.
    return max(3 * rounding, LAST_PLACE[dtype] * size)
