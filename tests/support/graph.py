"""The operations of lazily built graphs: what one step asks of the device."""

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle import Sampling
from mlx_eagle.decoding.decoder import Limits
from mlx_eagle.decoding.loop import SingleRunner
from mlx_eagle.decoding.setup import open_decoder
from mlx_eagle.drafters.base import Drafter
from mlx_eagle.drafters.tree import LEAST_MATCHES, PLAIN, DraftPlan, DraftShape
from mlx_eagle.target_model.rollback import CacheQuantization


def primitives(*arrays: mx.array) -> Counter:
    """Operations in the graph that computes ``arrays``, by name; in dot they are rectangles."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    lines = [line for line in graph.getvalue().splitlines() if "shape=rectangle" in line]
    return Counter(re.search(r'label ?= ?"(\w*)', line).group(1) for line in lines)


VIEWS = (
    "AsStrided", "Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze",
    "Transpose", "Unflatten",
)  # fmt: skip
"""Operations that look at an array in another way, but for a reshape of what is not in order."""


def kernels(operations: Counter) -> int:
    """How many of them something has to run for on a GPU, each once."""
    return sum(count for name, count in operations.items() if name not in VIEWS)


@contextmanager
def fused() -> Iterator[None]:
    """Norm, rotary embedding, attention and the gated delta rule as one primitive each.

    So a GPU backend has them; a CPU backend spells them out in twenty. For counting only: the
    numbers are not computed. What is compiled must have run with the same shapes before, or the
    stand-ins would stay in compiled graphs.
    """

    def norm(x: mx.array, *_: Any, **__: Any) -> mx.array:
        return mx.stop_gradient(x)

    def attention(q: mx.array, k: mx.array, v: mx.array, **_: Any) -> mx.array:
        return mx.depends([q], [k, v])[0]

    def gated_delta_rule(
        q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, ...]:  # fmt: skip
        return tuple(mx.depends([v, state], [q, k, g, beta, *([] if mask is None else [mask])]))

    stand_ins: list[tuple[Any, str, Callable[..., Any]]] = [
        (mx.fast, "rms_norm", norm),
        (mx.fast, "layer_norm", norm),
        (mx.fast, "rope", norm),
        (mx.fast, "scaled_dot_product_attention", attention),
        (gated_delta, "gated_delta_ops", gated_delta_rule),
    ]
    originals = [getattr(module, name) for module, name, _ in stand_ins]
    for module, name, function in stand_ins:
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name, _), function in zip(stand_ins, originals, strict=True):
            setattr(module, name, function)


def graph_of_a_round(
    model: nn.Module,
    drafter: Drafter,
    prompt: list[int],
    k: int,
    sampler: Sampling | None = None,
    copy: int = 0,
) -> Counter:
    """The operations of one round after two others, fused as on a GPU; none is computed.

    A round drafts k tokens, or copies ``copy``, as it does behind any match.
    """
    decoder = open_decoder(
        model, drafter.begin(), make_prompt_cache(model), CacheQuantization(None, 64, 0),
        mx.default_stream(mx.default_device()), sampler=sampler, logits_processors=None,
        acceptance=None, copies=drafter.copies.begin((), prompt) if copy else None,
    )  # fmt: skip
    decoder.prefill(mx.array(prompt), 2048, lambda *_: None)
    generation = SingleRunner(decoder, Limits(-1, ()))
    plan = DraftPlan(DraftShape(k))
    if copy:
        plan = DraftPlan(PLAIN, (PLAIN._replace(copy=copy),) * len(LEAST_MATCHES))
    generation.finish(decoder.launch_first())
    for _ in range(2):
        generation.finish(generation.launch(plan))
    mx.eval([c.state for c in decoder.cache])
    with pytest.MonkeyPatch.context() as patch, fused():
        patch.setattr(mx, "async_eval", lambda *_: None)
        launched = generation.launch(plan)
        assert not copy or launched.num_drafted == copy
        pending = launched.verification.pending
        return primitives(*pending, *(decoder.drafter.pending() if k else []))
