"""Counting the operations of lazily built graphs: what one step asks of the device."""

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.drafters.base import Drafter

from .part_timing import Bench

# Primitives that only look at their input differently, or are a constant: no kernel runs.
VIEWS = frozenset(
    [
        "Arange",
        "AsStrided",
        "Broadcast",
        "BroadcastAxes",
        "ExpandDims",
        "Flatten",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unflatten",
    ]
)


def primitives(*arrays: mx.array) -> Counter:
    """Operations in the graph that computes ``arrays``, by name; in dot they are rectangles."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    lines = [line for line in graph.getvalue().splitlines() if "shape=rectangle" in line]
    return Counter(re.search(r'label ?= ?"(\w*)', line).group(1) for line in lines)


def num_kernels(counts: Counter) -> int:
    """Of these operations, those that compute something."""
    return sum(count for name, count in counts.items() if name not in VIEWS)


@contextmanager
def fused() -> Iterator[None]:
    """Norm, rotary embedding and attention as one primitive each, as a GPU backend has them.

    A CPU backend spells them out in twenty. For counting only: the numbers are not computed.
    What is compiled must have run with the same shapes before, or the stand-ins would stay in
    compiled graphs.
    """

    def norm(x: mx.array, *_: Any, **__: Any) -> mx.array:
        return mx.stop_gradient(x)

    def attention(q: mx.array, k: mx.array, v: mx.array, **_: Any) -> mx.array:
        return mx.depends([q], [k, v])[0]

    stand_ins = {
        "rms_norm": norm,
        "layer_norm": norm,
        "rope": norm,
        "scaled_dot_product_attention": attention,
    }
    originals = {name: getattr(mx.fast, name) for name in stand_ins}
    for name, function in stand_ins.items():
        setattr(mx.fast, name, function)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(mx.fast, name, function)


def count_primitives(
    model: nn.Module, drafter: Drafter, context: list[int], sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """A row for each part of a round: its operations, fused as on a GPU, and its kernels.

    ``sizes`` are draft lengths k; a verify pass has k + 1 rows.
    """
    spelt_out = _count_parts(model, drafter, context, sizes, nullcontext)
    as_gpu = _count_parts(model, drafter, context, sizes, fused)
    plain = as_gpu["plain decode step"]
    rows = []
    for name, counts in as_gpu.items():
        rows.append(
            {
                "part": name,
                "primitives": counts.total(),
                "ratio": counts.total() / plain.total(),
                "kernels": num_kernels(counts),
                "kernel_ratio": num_kernels(counts) / num_kernels(plain),
                "primitives_here": spelt_out[name].total(),
            }
        )
    return rows


def _count_parts(
    model: nn.Module,
    drafter: Drafter,
    context: list[int],
    sizes: Sequence[int],
    how: Callable[[], Any],
) -> dict[str, Counter]:
    """Operations of every part by name; ``how`` makes the context in which graphs are built."""
    bench = Bench(model, drafter, context)
    parts = {"plain decode step": _count_plain(model, context, how)}
    for k in sizes:
        with bench.window(), how():
            parts[f"verify pass, k = {k}"] = _count(bench.verify(k + 1))
    for k in sizes:
        with bench.window(), how():
            parts[f"accept pass, k = {k}"] = _count(bench.accept(k + 1))
    bench.restart()
    with how():
        one, two = _count(bench.propose(1)), _count(bench.propose(2))
    parts["first draft token"] = one
    parts["draft step"] = two - one - Counter({"Concatenate": 1})  # which puts two together
    return parts


def _count_plain(model: nn.Module, context: list[int], how: Callable[[], Any]) -> Counter:
    """A step of mlx-lm's own decoding."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array(context[:-1])[None], cache=cache), [c.state for c in cache])
    with how():
        logits = model(mx.array(context[-1:])[None], cache=cache)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return primitives(mx.argmax(logprobs, axis=-1), logprobs.squeeze(0))


def _count(arrays: list[mx.array]) -> Counter:
    """Count, then compute, so that caches do not carry the graph into the next count."""
    counts = primitives(*arrays)
    mx.eval(arrays)
    return counts
