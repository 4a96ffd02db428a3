"""Verify passes over a latent cache: no more work than single rows take, and the same numbers."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from math import prod

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import build
from grids import thorough
from helpers import PROMPT
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tolerances import tolerance

from mlx_eagle.drafters.mtp import MTPDrafter, make_mtp_head
from mlx_eagle.target_model.cache_view import single_caches
from mlx_eagle.target_model.ragged import RaggedCaches
from mlx_eagle.target_model.target import Target
from mlx_eagle.target_model.tree_rows import ancestors

LATENT = [
    "bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
    "glm_moe_dsa", "kimi_k25", "kimi_k3", "kimi_linear", "kimi_vl", "longcat_flash",
    "longcat_flash_ngram", "mistral4",
]  # fmt: skip
CHOOSING = ["deepseek_v32", "glm_moe_dsa"]  # they attend to some columns only
AN_EIGHTH = {
    "num_attention_heads": 8, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_n_heads": 4, "index_topk": 2048,
}  # fmt: skip
"""As published, each width an eighth and a sixteenth of the heads."""
ROWS = mx.array([3, 50, 7, 80])
OTHER = mx.array(9)


def model_of(name: str) -> nn.Module:
    return build(name, **(AN_EIGHTH if name in CHOOSING else {}))


def caches_of(model: nn.Module, num_tokens: int) -> list:
    """Caches of ``num_tokens``: the prompt's, and behind it as many zeros as are missing."""
    caches = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=caches)
    mx.eval([cache.state for cache in caches])
    for cache in single_caches(caches):
        if isinstance(cache, KVCache):
            missing = (0, num_tokens + 256 - cache.keys.shape[2])
            for name in ("keys", "values"):
                array = getattr(cache, name)
                setattr(cache, name, mx.pad(array, [(0, 0), (0, 0), missing, (0, 0)]))
            cache.offset = num_tokens
    mx.eval([cache.state for cache in caches])
    return caches


def multiplications(run: Callable[[mx.array], mx.array], rows: mx.array) -> int:
    """Those of attention in the graph of ``run``: products of more than a matrix of weights."""
    found: list[dict] = []
    mx.export_function(found.append, run, rows)
    products = [part for part in found if part.get("name") == "Matmul"]
    count = 0
    for product in products:
        (_, left, _), (_, right, _) = product["inputs"]
        if len(left) > 2:
            count += prod(left) * right[-1]
    return count


def verified(model: nn.Module, caches: list) -> Callable[[mx.array], mx.array]:
    """A pass of ours over a chain."""
    target = Target(model)

    def run(tokens: mx.array) -> mx.array:
        with target.matching_single_row(caches, tokens.size):
            return target(tokens, caches)[0]

    return run


def own(model: nn.Module, caches: list) -> Callable[[mx.array], mx.array]:
    return lambda tokens: model(tokens[None], cache=caches)[0]


@pytest.mark.parametrize("num_tokens", [4096, 16384])
@pytest.mark.parametrize("name", thorough(LATENT, "glm4_moe_lite", "mistral4"))
def test_four_rows_multiply_little_more_than_four_steps(name, num_tokens):
    model = model_of(name)
    caches = caches_of(model, num_tokens)
    rows = multiplications(verified(model, deepcopy(caches)), ROWS)
    step = multiplications(own(model, caches), ROWS[:1])
    assert 0 < rows <= 1.3 * ROWS.size * step


@pytest.mark.parametrize("name", thorough(LATENT, "deepseek_v3", "deepseek_v32"))
def test_rows_get_the_numbers_of_single_ones(name):
    """Of a chain, of a tree, and of several texts at once, where mlx-lm's caches can."""
    model = build(name)
    prompt = mx.arange(40)
    before = make_prompt_cache(model)
    model(prompt[None], cache=before)
    caches = deepcopy(before)
    steps = [own(model, caches)(token[None]) for token in ROWS]
    expected = mx.concatenate(steps)
    most = 10 * tolerance() * mx.abs(expected).max()
    assert mx.abs(verified(model, deepcopy(before))(ROWS) - expected).max() < most
    if any(type(cache) is not KVCache for cache in before):
        return
    tree = ancestors(mx.array([0, 1, 0]), 3)  # the chain's first rows, and another below the root
    target = Target(model)
    logits, _ = target(mx.concatenate([ROWS[:3], OTHER[None]]), deepcopy(before), tree)
    assert mx.abs(logits[:3] - expected[:3]).max() < most
    caches = deepcopy(before)
    other = [own(model, caches)(token[None]) for token in (ROWS[0], OTHER)]
    assert mx.abs(logits[3] - other[1][0]).max() < most
    shared = RaggedCaches()
    short = make_prompt_cache(model)
    model(prompt[None, :9], cache=short)
    shared.join(before)
    shared.join(short)
    logits, _ = target.batch(mx.stack([ROWS, ROWS[::-1]]), shared.open())
    assert mx.abs(logits[0] - expected).max() < most
    steps = [own(model, short)(token[None]) for token in ROWS[::-1]]
    assert mx.abs(logits[1] - mx.concatenate(steps)).max() < most


@pytest.mark.parametrize("name", ["glm4_moe_lite", "mistral4"])
def test_it_never_multiplies_more_than_mlx_lm(name):
    model = build(name)
    saves = set()
    for num_tokens in (8, 40, 200):
        for num_rows in (2, 8, 20, 60):
            tokens = mx.arange(num_rows)
            ours, theirs = (
                multiplications(kind(model, caches_of(model, num_tokens)), tokens)
                for kind in (verified, own)
            )
            assert ours <= theirs
            saves.add(ours < theirs)
    assert saves == {True, False}


def test_prompts_stay_mlx_lms():
    model = build("glm4_moe_lite")
    caches = caches_of(model, 400)
    target = Target(model)
    run = multiplications(lambda tokens: target(tokens, deepcopy(caches))[0], ROWS)
    assert run == multiplications(own(model, deepcopy(caches)), ROWS)


def test_projections_may_be_quantized():
    model = build("glm4_moe_lite", kv_lora_rank=64, qk_nope_head_dim=32, v_head_dim=32)
    nn.quantize(model, 32, 4)
    caches = caches_of(model, 60)
    rows = verified(model, deepcopy(caches))(ROWS)
    steps = [own(model, caches)(token[None]) for token in ROWS]
    expected = mx.concatenate(steps)
    assert mx.abs(rows - expected).max() < 10 * tolerance() * mx.abs(expected).max()


@pytest.mark.parametrize("name", thorough(["deepseek_v3", "glm4_moe_lite"], "glm4_moe_lite"))
def test_an_mtp_layer_absorbs_too(name):
    """What it makes of four accepted tokens is what single ones make, and takes no more."""
    model = build(name)
    drafter = MTPDrafter(make_mtp_head(model), model).begin()
    embeddings, states = (mx.random.normal((1, 304, 64)) for _ in range(2))
    before = drafter.head.make_cache()
    drafter.head(embeddings[:, :300], states[:, :300], before)
    mx.eval(drafter.head.parameters(), embeddings, states, [cache.state for cache in before])

    def run(forward: Callable, start: int, end: int, caches: list, given=embeddings) -> mx.array:
        return forward(given[:, start:end], states[:, start:end], caches)

    caches = deepcopy(before)
    steps = [run(drafter.head, i, i + 1, caches) for i in range(300, 304)]
    expected = mx.concatenate(steps, axis=1)
    made = run(drafter.forward, 300, 304, deepcopy(before))
    assert mx.abs(made - expected).max() < 10 * tolerance() * mx.abs(expected).max()
    rows, step = (
        multiplications(partial(run, forward, 300, end, deepcopy(before)), embeddings)
        for forward, end in ((drafter.forward, 304), (drafter.head, 301))
    )
    assert 0 < rows <= 1.3 * 4 * step
