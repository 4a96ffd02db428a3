"""Parity of two texts: where they first differ, and how close the choice was there."""

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from mlx_eagle.decoding.sampling import Sampling

from .configurations import Cell


def compare(
    model: nn.Module, prompt: list[int], *texts: list[int], sampling: Sampling | None = None
) -> dict[str, Any]:
    """Compare a plain and a drafted answer: identical, or where they part and the margin there."""
    index = first_difference(*texts)
    if index is None:
        return {"identical": True, "index": None, "margin": None}
    scores = next_scores(model, prompt + texts[0][:index], sampling, index)
    return {"identical": False, "index": index, "margin": margin(scores, index, *texts)}


def compare_texts(
    model: nn.Module, cells: Iterable[Cell], sampling: Sampling | None = None
) -> None:
    """Set the parity of cells: the texts of the first plain run against those of the other."""
    for cell in cells:
        texts = zip(cell.prompts, cell.plain[0].texts, cell.runs[0].texts, strict=True)
        cell.parity = [compare(model, *each, sampling=sampling) for each in texts]


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Index of the first token in which two outputs differ; None if they are identical.

    [5, 6, 7], [5, 9, 7] -> 1; [5, 6], [5, 6, 7] -> 2
    """
    if left == right:
        return None
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def next_scores(
    model: nn.Module, tokens: list[int], sampling: Sampling | None, position: int
) -> mx.array:
    """Scores (V,), by mlx-lm, whose largest is the token after ``tokens``.

    They are log-probabilities; of a ``sampling``, with the noise of the ``position``-th drawn.
    """
    _, logprobs = next(generate_step(mx.array(tokens), model, max_tokens=1))
    if sampling is None:
        return logprobs.astype(mx.float32)
    return sampling.log_probabilities(logprobs) + sampling.noise(position, logprobs.shape[-1])


def margin(scores: mx.array, index: int, *texts: list[int]) -> float:
    """Distance from the best of ``scores`` (V,) to the worse of the texts' tokens at ``index``.

    Near 0 is a tie. If one text has already ended, the distance is the whole range of scores,
    which is no tie.
    """
    found = [scores[text[index]] if index < len(text) else scores.min() for text in texts]
    return float((scores.max() - mx.stack(found).min()).item())


def parity_words(result: dict[str, Any]) -> str:
    """Describe a result of ``compare`` in a few words."""
    if result["identical"]:
        return "identical"
    return f"differs from token {result['index']} on, margin {result['margin']:.2g}"


def count_identical(results: Sequence[dict[str, Any]]) -> str:
    """Number of identical answers among all of them: "3 of 4"."""
    return f"{sum(result['identical'] for result in results)} of {len(results)}"


def largest_margin(results: Sequence[dict[str, Any]]) -> str:
    """The largest margin of the answers that differ; "-" if none does."""
    margins = [result["margin"] for result in results if not result["identical"]]
    return f"{max(margins):.2g}" if margins else "-"
