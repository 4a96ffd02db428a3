"""Whether two outputs are the same, and how close the target's choice was where they differ."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Index of the first token in which two outputs differ; None where they are identical.

    [5, 6, 7], [5, 9, 7] -> 1; [5, 6], [5, 6, 7] -> 2
    """
    if left == right:
        return None
    pairs = zip(left, right)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def compare(
    model: nn.Module, prompt: list[int], plain: list[int], drafted: list[int]
) -> dict[str, Any]:
    """Identical, or the index of the first difference and the top-2 logit margin there."""
    index = first_difference(plain, drafted)
    if index is None:
        return {"identical": True, "index": None, "margin": None}
    margin = top2_margin(model, prompt + plain[:index])
    return {"identical": False, "index": index, "margin": margin}


def top2_margin(model: nn.Module, tokens: list[int]) -> float:
    """Difference of the target's two largest logits after ``tokens``."""
    _, logprobs = next(generate_step(mx.array(tokens), model, max_tokens=1))
    best = mx.topk(logprobs.astype(mx.float32), 2)
    return mx.abs(best[0] - best[1]).item()


def parity_words(result: dict[str, Any]) -> str:
    """Parity in a few words."""
    if result["identical"]:
        return "identical"
    return f"differs from token {result['index']} on, margin {result['margin']:.2g}"
