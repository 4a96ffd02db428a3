"""Whether two outputs are the same, and how close the target's choice was where they differ."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step


def compare(
    model: nn.Module, prompt: list[int], plain: list[int], drafted: list[int]
) -> dict[str, Any]:
    """Identical, or the index of the first difference and the margin there (see ``margin``)."""
    index = first_difference(plain, drafted)
    if index is None:
        return {"identical": True, "index": None, "margin": None}
    scores = next_logprobs(model, prompt + plain[:index])
    return {"identical": False, "index": index, "margin": margin(scores, index, plain, drafted)}


def next_logprobs(model: nn.Module, tokens: list[int]) -> mx.array:
    """The target's log-probabilities (V,) after ``tokens``, by mlx-lm."""
    _, logprobs = next(generate_step(mx.array(tokens), model, max_tokens=1))
    return logprobs.astype(mx.float32)


def margin(scores: mx.array, index: int, *texts: list[int]) -> float:
    """How far below the best of scores (V,) the worst of the texts' tokens at ``index`` is.

    Two texts that part at a tie have a small one. Where one has ended it is the whole range of
    the scores: that is no tie.
    """
    found = [scores[text[index]] if index < len(text) else scores.min() for text in texts]
    return float((scores.max() - mx.stack(found).min()).item())


def parity_words(result: dict[str, Any]) -> str:
    """Parity in a few words."""
    if result["identical"]:
        return "identical"
    return f"differs from token {result['index']} on, margin {result['margin']:.2g}"


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Index of the first token in which two outputs differ; None where they are identical.

    [5, 6, 7], [5, 9, 7] -> 1; [5, 6], [5, 6, 7] -> 2
    """
    if left == right:
        return None
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
