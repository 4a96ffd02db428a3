"""Drafters where they do not belong cost one sentence; and a copy of one drafts the same."""

import importlib
from copy import deepcopy

import mlx.core as mx
import pytest
from drafter_pairs import LLAMA, PAIRS, tiny_mtp, tiny_qwen3_next
from grids import thorough
from helpers import PROMPT, plain, speculative, tiny_head, tiny_llama
from mlx_lm.models.cache import make_prompt_cache

NARROW = {"hidden_size": 32}


def generate_in_mlx_lm(model, drafter) -> None:
    module = importlib.import_module("mlx_lm.generate")
    assert module.speculative_generate_step.__module__ == "mlx_lm.generate"
    next(module.speculative_generate_step(mx.array(PROMPT), model, drafter, max_tokens=4))


@pytest.mark.parametrize("name", PAIRS)
def test_mlx_lm_before_we_are_installed(name):
    with pytest.raises(ValueError, match=r"call mlx_eagle.install\(\)"):
        generate_in_mlx_lm(LLAMA, PAIRS[name][1])


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]])
@pytest.mark.parametrize(
    "model, drafter",
    [
        (tiny_llama(**NARROW), tiny_head(tiny_llama())),
        (tiny_llama(**NARROW), tiny_head(tiny_llama()).with_draft_cache("lagging")),
        (tiny_qwen3_next(**NARROW), tiny_mtp(tiny_qwen3_next())),
    ],
    ids=["eagle-3", "lagging", "mtp"],
)
def test_a_target_of_another_hidden_size(model, drafter, prompt):
    cache = make_prompt_cache(model) + drafter.make_cache()
    with pytest.raises(ValueError, match=r"features .* wide, and this target's are .* wide"):
        speculative(model, drafter, prompt, 4, prompt_cache=cache)


@pytest.mark.parametrize("name", thorough(PAIRS, "eagle-3"))
def test_a_deep_copy_drafts_the_same(name):
    model, drafter = PAIRS[name]
    expected, stats = speculative(model, drafter, PROMPT, 16)
    tokens, stats_of_copy = speculative(model, deepcopy(drafter), PROMPT, 16)
    assert tokens == expected
    assert stats_of_copy.accepted_histogram == stats.accepted_histogram


@pytest.mark.parametrize("num_left", [0, 1])
@pytest.mark.parametrize("k", [0, 3])
def test_a_prompt_cache_with_too_few_layers(k, num_left):
    model = tiny_llama()
    cache = make_prompt_cache(model)
    del cache[num_left:]
    with pytest.raises(ValueError, match=f"holds {num_left} caches, but the target has 2"):
        speculative(model, tiny_head(model), PROMPT, 4, num_draft_tokens=k, prompt_cache=cache)
    assert all(layer.empty() for layer in cache)


def test_a_prompt_cache_of_the_target_alone_is_enough():
    model = tiny_llama()
    cache = make_prompt_cache(model)
    tokens, _ = speculative(model, tiny_head(model), PROMPT, 8, prompt_cache=cache)
    assert tokens == plain(model, PROMPT, 8)
