"""The operations of lazily built graphs: what one step asks of the device."""

import io
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


def primitives(*arrays: mx.array) -> Counter:
    """Operations in the graph that computes ``arrays``, by name; in dot they are rectangles."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    lines = [line for line in graph.getvalue().splitlines() if "shape=rectangle" in line]
    return Counter(re.search(r'label ?= ?"(\w*)', line).group(1) for line in lines)


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
