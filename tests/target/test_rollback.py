"""Every cache type: the same tokens as plain decoding, and the same cache behind it."""

import mlx.core as mx
import pytest
from grids import thorough
from helpers import (
    PROMPT,
    SCRIPTS,
    ScriptedDrafter,
    Truth,
    left_in,
    plain,
    speculative,
    tiny_head,
    tiny_llama,
    tiny_qwen3,
    truth_of,
)
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_eagle.decoding.loop import speculative_generate_step
from mlx_eagle.target.rollback import Checkpoint

WINDOW = 12  # smaller than prompt + text: crossed early in every test below
LAYERS = 6

CACHES = {
    "plain": KVCache,
    "concatenated": ConcatenateKVCache,
    "quantized": lambda: QuantizedKVCache(group_size=32, bits=8),
    "rotating": lambda: RotatingKVCache(max_size=WINDOW, keep=0),
    "rotating, keep 4": lambda: RotatingKVCache(max_size=WINDOW, keep=4),
    "rotating, window after the text": lambda: RotatingKVCache(max_size=200, keep=4),
    "rotating, window as long as the prompt": lambda: RotatingKVCache(len(PROMPT), keep=2),
}


@pytest.fixture(scope="module")
def model():
    return tiny_llama(head_dim=32)


@pytest.fixture(scope="module", params=CACHES)
def make_cache(request):
    return lambda: [CACHES[request.param]() for _ in range(LAYERS)]


@pytest.fixture(scope="module")
def truth(model, make_cache) -> Truth:
    return truth_of(model, make_cache, 40)


@pytest.mark.parametrize("script", thorough(SCRIPTS, "none", "every length"))
@pytest.mark.parametrize("k", thorough([1, 3, 6], 3))
def test_same_text_and_same_cache(model, make_cache, truth, k, script):
    cache = make_cache()
    tokens, _ = speculative(
        model,
        ScriptedDrafter(truth.text, SCRIPTS[script]),
        PROMPT,
        40,
        num_draft_tokens=k,
        prompt_cache=cache,
    )
    assert tokens == truth.made
    assert left_in(model, cache) == truth.left


@pytest.mark.parametrize("num_taken", thorough(range(1, 15), 1, 6, 8))
def test_closing_leaves_the_cache_of_plain_decoding(model, make_cache, truth, num_taken):
    cache, reference = make_cache(), make_cache()
    drafter = ScriptedDrafter(truth.text, SCRIPTS["all"])
    ours = speculative_generate_step(
        mx.array(PROMPT), model, drafter, num_draft_tokens=3, max_tokens=14, prompt_cache=cache
    )
    theirs = generate_step(mx.array(PROMPT), model, max_tokens=14, prompt_cache=reference)
    for _ in range(num_taken):
        assert next(ours)[0] == next(theirs)[0]
    ours.close()
    theirs.close()
    assert left_in(model, cache) == left_in(model, reference)


@pytest.fixture(scope="module", params=thorough([0, 3, len(PROMPT), 12, 20, 1000], 3, 12))
def quantized(request, model) -> tuple[dict, Truth]:
    """Options to quantize the cache from some token on, and plain decoding with them."""
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": request.param}
    return options, truth_of(model, lambda: make_prompt_cache(model), 30, **options)


@pytest.mark.parametrize("script", thorough(SCRIPTS, "every length"))
def test_kv_bits_from_any_start(model, quantized, script):
    options, truth = quantized
    cache = make_prompt_cache(model)
    tokens, _ = speculative(
        model,
        ScriptedDrafter(truth.text, SCRIPTS[script]),
        PROMPT,
        30,
        num_draft_tokens=4,
        prompt_cache=cache,
        **options,
    )
    assert tokens == truth.made
    assert left_in(model, cache) == truth.left


@pytest.fixture(scope="module")
def quantized_soon(model) -> tuple[dict, list[int]]:
    """Options to quantize the cache after six tokens, and a text that goes beyond."""
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": len(PROMPT) + 6}
    return options, PROMPT + plain(model, PROMPT, 40, **options)


@pytest.mark.parametrize("num_taken", thorough(range(1, 12), 5, 6, 7))
def test_closing_around_the_start_of_quantization(model, quantized_soon, num_taken):
    options, longer = quantized_soon
    cache, reference = make_prompt_cache(model), make_prompt_cache(model)
    ours = speculative_generate_step(
        mx.array(PROMPT),
        model,
        ScriptedDrafter(longer, SCRIPTS["all"]),
        num_draft_tokens=3,
        max_tokens=-1,
        prompt_cache=cache,
        **options,
    )
    theirs = generate_step(
        mx.array(PROMPT), model, max_tokens=-1, prompt_cache=reference, **options
    )
    for _ in range(num_taken):
        assert next(ours)[0] == next(theirs)[0]
    ours.close()
    theirs.close()
    assert left_in(model, cache) == left_in(model, reference)


@pytest.mark.parametrize("size", [9, 12, 16])
def test_max_kv_size(size):
    model = tiny_qwen3()  # has no make_cache of its own, so mlx-lm makes rotating ones
    expected = plain(model, PROMPT, 40, max_kv_size=size)
    tokens, _ = speculative(
        model, tiny_head(model), PROMPT, 40, num_draft_tokens=3, max_kv_size=size
    )
    assert tokens == expected
    assert expected != plain(model, PROMPT, 40)


def test_kv_bits_with_a_rotating_cache_is_refused():
    model = tiny_qwen3()
    with pytest.raises(ValueError, match="RotatingKVCache, which mlx-lm cannot quantize"):
        speculative(model, tiny_head(model), PROMPT, 4, kv_bits=8, max_kv_size=16)


def test_an_unknown_cache_is_refused_by_name_before_anything_runs(model):
    class StrangeCache(KVCache):
        pass

    cache = [StrangeCache() for _ in range(LAYERS)]
    with pytest.raises(ValueError, match="StrangeCache"):
        speculative(model, tiny_head(model), PROMPT, 4, prompt_cache=cache)
    assert all(c.empty() for c in cache)


def test_a_pass_that_breaks_off_half_way_is_undone(model, make_cache):
    cache = make_cache()
    plain(model, PROMPT, 20, prompt_cache=cache)
    reference = make_cache()
    plain(model, PROMPT, 20, prompt_cache=reference)
    window = Checkpoint(cache)
    rows = mx.ones((1, 2, 3, 32))
    for c in cache[:3]:
        c.update_and_fetch(rows, rows)
    window.rollback(0)
    assert left_in(model, cache) == left_in(model, reference)


@pytest.mark.parametrize("k", [0, 3])
def test_the_callers_list_gets_the_quantized_caches(model, k):
    """mlx-lm replaces caches in the caller's list when it quantizes them; so does ours."""
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 10}
    drafter = tiny_head(model)
    cache = make_prompt_cache(model) + drafter.make_cache()
    speculative(model, drafter, PROMPT, 20, num_draft_tokens=k, prompt_cache=cache, **options)
    assert {type(c) for c in cache[:LAYERS]} == {QuantizedKVCache}
    assert {type(c) for c in cache[LAYERS:]} == {KVCache}


@pytest.mark.parametrize("k", [0, 3])
def test_stop_tokens_end_the_generation(model, k):
    text = plain(model, PROMPT, 20)
    tokens, _ = speculative(
        model, tiny_head(model), PROMPT, 20, num_draft_tokens=k, stop_tokens=[text[6]]
    )
    assert tokens == text[: text.index(text[6]) + 1]
