"""Every kind of target, draft length, accept length and way to choose: plain mlx-lm's text.

Windows of sliding layers are smaller than the text, so they are crossed.
"""

import mlx.nn as nn
import pytest
from architectures import build, may_part
from grids import thorough
from helpers import PROMPT, SCRIPTS, VOCAB, ScriptedDrafter, plain, speculative, tiny_llama
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.decoding.sampling import Sampling

ARCHITECTURES = [
    "llama",
    "qwen3",
    "gemma3_text",
    "gpt_oss (20b)",
    "gemma4 (31B)",
    "qwen3_next",
    "lfm2",
    "mamba2",
    "falcon_h1",
    "rwkv7",
    "qwen3_moe",
]
NUM_TOKENS = 18


def quantized_weights() -> nn.Module:
    model = build("llama")
    nn.quantize(model, group_size=32, bits=4)
    return model


CASES = {name: (lambda name=name: build(name), {}) for name in ARCHITECTURES}
CASES["quantized weights"] = (quantized_weights, {})
CASES["quantized KV"] = (
    lambda: tiny_llama(head_dim=32),
    {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": len(PROMPT) + 5},
)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    make, options = CASES[request.param]
    if request.param in ARCHITECTURES and may_part(request.param):
        pytest.xfail("on Metal mlx-lm computes one row of it in another way than several")
    return make(), options


@pytest.fixture(scope="module", params=["greedy", "coupled"])
def truth(request, case):
    """What plain mlx-lm does: (sampler for a run, a text long enough for any draft, what follows).

    The last is the answer to the next request, on the cache that NUM_TOKENS of the text leave.
    """
    model, options = case

    def sampler():
        return None if request.param == "greedy" else Sampling(0.9, seed=5)

    text = plain(model, PROMPT, NUM_TOKENS + 8, sampler=sampler(), **options)
    assert len(set(text)) > 3, "a text without life tests nothing"
    cache = make_prompt_cache(model)
    plain(model, PROMPT, NUM_TOKENS, sampler=sampler(), prompt_cache=cache, **options)
    return sampler, PROMPT + text, next_request(model, cache, options)


def next_request(model, cache: list, options: dict) -> list[int]:
    return plain(model, [3, 4], 8, prompt_cache=cache, **options)


@pytest.mark.parametrize("script", thorough(["all", "none", "alternating"], "alternating"))
@pytest.mark.parametrize("k", thorough([1, 2, 3, 4, 5], 3))
def test_matrix(case, truth, k, script):
    (model, options), (sampler, text, follow) = case, truth
    cache = make_prompt_cache(model)
    tokens, stats = speculative(
        model,
        ScriptedDrafter(text, SCRIPTS[script], VOCAB),
        PROMPT,
        NUM_TOKENS,
        num_draft_tokens=k,
        sampler=sampler(),
        prompt_cache=cache,
        **options,
    )
    assert tokens == text[len(PROMPT) :][:NUM_TOKENS]
    if script == "all":
        assert stats.num_rejected == 0
    if script == "none":
        assert stats.num_accepted == 0
    assert next_request(model, cache, options) == follow
