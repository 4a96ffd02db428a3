"""Operations of whole rounds of published targets: their layers, tiny weights, a head, k = 3."""

from collections import Counter
from operator import le
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
import true_configs as true
from graph import fused, graph_of_a_round, kernels, primitives
from grids import thorough
from mlx.utils import tree_map
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.eagle3 import Eagle3Drafter
from mlx_eagle.drafters.head import Eagle3Head
from mlx_eagle.target_model.states import recurrent_caches

NARROW = {
    "head_dim": 16, "global_head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "sliding_window": 8,
}  # fmt: skip
PROMPT = [0] * 12  # longer than the windows


class Counts(NamedTuple):
    """Primitives, and those of them that a kernel runs for."""

    primitives: int
    kernels: int


MOST = {
    "Llama-3.1-8B": (true.LLAMA_8B, (1549, 550), (1673, 620), (1673, 620)),
    "Qwen3-8B": (true.QWEN3_8B, (1813, 690), (1937, 760), (1937, 760)),
    "gpt-oss-20b": (true.GPT_OSS_20B, (2029, 822), (2153, 892), (2153, 892)),
    "Gemma-4-31B": (true.GEMMA4_31B, (3326, 1438), (3450, 1508), (3450, 1508)),
    "Gemma-4-26B-A4B": (true.GEMMA4_26B_A4B, (2901, 1413), (3025, 1483), (3025, 1483)),
    "Qwen3.5-27B": (true.QWEN35_27B, (3613, 1542), (3737, 1612), (3982, 1806)),
}
"""By target: ``Counts`` of a step, a round after a draft that was kept, one after a rejection."""


def silent(module: nn.Module) -> nn.Module:
    """A model without a weight above 0: whatever it reads, the first token is its choice."""
    module.update(tree_map(mx.zeros_like, module.parameters()))
    mx.eval(module.parameters())
    return module


def head_for(model: nn.Module, is_right: bool) -> Eagle3Drafter:
    """A head of EAGLE-3 that drafts the first token, or another one, whatever it reads."""
    config = Eagle3Config(
        hidden_size=64, target_hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=16, intermediate_size=96, vocab_size=64, draft_vocab_size=32,
    )  # fmt: skip
    to_target = mx.arange(32) + (0 if is_right else 1)
    taps = config.taps(len(model.layers))
    return Eagle3Drafter(silent(Eagle3Head(config)), nn.Embedding(64, 64), taps, to_target)


def counts(found: Counter) -> Counts:
    return Counts(found.total(), kernels(found))


def graph_of_mlx_lm(model: nn.Module, num_rows: int) -> Counter:
    """What a pass of mlx-lm's takes, with the choice behind it."""
    cache = make_prompt_cache(model)
    for rows in (PROMPT, [0] * num_rows):
        mx.eval(model(mx.array([rows]), cache=cache), [c.state for c in cache])
    with fused():
        logits = model(mx.zeros((1, num_rows), mx.int32), cache=cache)[0]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return primitives(mx.argmax(logprobs, axis=-1))


@pytest.mark.parametrize("name", thorough(MOST, "Llama-3.1-8B"))
def test_the_operations_of_a_round(name):
    """The target's share is what mlx-lm's own passes take; a rejection adds a tenth at most."""
    config, *most = MOST[name]
    model = silent(true.with_tiny_weights(config, **NARROW))
    right, wrong = head_for(model, True), head_for(model, False)
    step = counts(graph_of_a_round(model, right, PROMPT, 0))
    kept, rejected = (
        counts(graph_of_a_round(model, drafter, PROMPT, 3)) for drafter in (right, wrong)
    )
    for found, allowed in zip((step, kept, rejected), most, strict=True):
        assert all(map(le, found, allowed)), found
    windows = [c for c in make_prompt_cache(model) if type(c) is RotatingKVCache]
    theirs, theirs_of_four = (counts(graph_of_mlx_lm(model, rows)) for rows in (1, 4))
    assert step.kernels <= theirs.kernels
    assert step.primitives <= theirs.primitives + 2 * len(windows), (
        "slices, which nothing runs for"
    )
    # Three steps of the head and its pass over what is kept: the same whatever the target is.
    assert kept.kernels <= theirs_of_four.kernels + 70
    assert kept.primitives <= theirs_of_four.primitives + 124
    is_recurrent = any(recurrent_caches(make_prompt_cache(model)))
    assert is_recurrent == (rejected > kept) and rejected.primitives <= 1.1 * kept.primitives
