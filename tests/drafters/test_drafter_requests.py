"""Several requests on one prompt cache: the drafter's part of it misses nothing."""

import gc

import mlx.core as mx
import pytest
from drafter_pairs import PAIRS, QWEN3_NEXT, SHOWN, tiny_lfm2, tiny_mamba2
from grids import thorough
from helpers import PROMPT, caches_equal, plain, speculative, tiny_llama
from mlx_lm.generate import generation_stream
from mlx_lm.models import llama
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.model_drafter import ModelDrafter
from mlx_eagle.drafters.mtp import MTPDrafter
from mlx_eagle.target_model.target import Target

TURNS = [PROMPT, [9, 33, 7], [12], [50, 51, 52, 53]]


def pair_cache(model, drafter) -> list:
    return make_prompt_cache(model) + drafter.make_cache()


def assert_drafter_missed_nothing(drafter, model, cache: list, text: list[int]) -> None:
    """The drafter's part of ``cache`` equals what it is after ``text`` in one piece."""
    num_target = len(make_prompt_cache(model))
    assert len(cache) == num_target + len(drafter.make_cache())
    ours, whole = cache[num_target:], drafter.make_cache()
    if isinstance(drafter, ModelDrafter) and len(whole) > 1:
        drafter.model(mx.array([text]), cache=whole)
        assert caches_equal(ours, whole)
    elif isinstance(drafter, MTPDrafter):
        _, features = Target(model, drafter.taps)(mx.array(text), make_prompt_cache(model))
        other = drafter.begin(whole)
        other.extend(mx.array(text[1:]), features[:-1])
        assert caches_equal(ours[:1], whole[:1])
        assert mx.allclose(ours[1].keys[0, 0], features[-1:], rtol=1e-3, atol=1e-3).item()


@pytest.mark.parametrize("name", thorough(PAIRS, "eagle-3", "lookup", "draft model"))
@pytest.mark.parametrize("k", thorough([1, 3], 3))
def test_several_requests_on_one_cache(name, k, tmp_path):
    model, drafter = PAIRS[name]
    cache, reference, text = pair_cache(model, drafter), make_prompt_cache(model), []
    num_target, file = len(reference), str(tmp_path / "cache.safetensors")
    for turn in TURNS:
        tokens, _ = speculative(model, drafter, turn, 9, num_draft_tokens=k, prompt_cache=cache)
        assert tokens == plain(model, turn, 9, prompt_cache=reference)
        text += turn + tokens
        if not isinstance(drafter, ModelDrafter) or type(drafter.model) is llama.Model:
            assert_drafter_missed_nothing(drafter, model, cache, text)
        save_prompt_cache(file, cache)
        cache = load_prompt_cache(file)
    assert len(cache) == num_target + len(drafter.make_cache())


def test_a_draft_model_with_a_full_window_carries_it_over_requests():
    model, drafter = PAIRS["draft model, rotating"]
    cache, text = pair_cache(model, drafter), []
    for turn in TURNS:
        tokens, _ = speculative(model, drafter, turn, 9, num_draft_tokens=3, prompt_cache=cache)
        text += turn + tokens
    ours = cache[len(make_prompt_cache(model)) :]
    assert [c.offset for c in ours] == [len(text)] * len(ours)
    expected = plain(drafter.model, [*text, 3, 4], 12)
    assert plain(drafter.model, [3, 4], 12, prompt_cache=ours) == expected


@pytest.mark.parametrize(
    "model", [tiny_mamba2(), tiny_lfm2(), QWEN3_NEXT], ids=lambda m: m.model_type
)
def test_a_recurrent_draft_model_knows_the_turns_before(model, tmp_path):
    """As its own draft model it is right in every round, also where a turn was left early."""
    drafter = ModelDrafter(model)
    cache, reference, text = pair_cache(model, drafter), make_prompt_cache(model), []
    for turn, num_taken in zip(TURNS, (13, 6, 13, 13), strict=True):
        stats = Stats()
        steps = speculative_generate_step(
            mx.array(turn), model, drafter,
            num_draft_tokens=3, max_tokens=13, prompt_cache=cache, stats=stats,
        )  # fmt: skip
        tokens = [next(steps)[0] for _ in range(num_taken)]
        steps.close()
        assert tokens == plain(model, turn, num_taken, prompt_cache=reference)
        assert stats.num_accepted == stats.num_drafted > 0 or num_taken < 13
        text += turn + tokens
        assert cache[-1].keys[0, 0, : cache[-1].offset, 0].tolist() == text
        save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
        cache = load_prompt_cache(str(tmp_path / "cache.safetensors"))


def test_a_trimmed_prompt_cache_leaves_a_recurrent_draft_model_its_tokens():
    drafter = ModelDrafter(tiny_mamba2())
    model = tiny_llama()
    cache = pair_cache(model, drafter)
    text = PROMPT + speculative(model, drafter, PROMPT, 10, prompt_cache=cache)[0]
    trim_prompt_cache(cache, 5)
    seen, other = drafter.begin(cache[-1:]), drafter.begin()
    seen.extend(mx.array([3, 4]), None)
    other.extend(mx.array([*text[:-5], 3, 4]), None)
    assert mx.allclose(seen.pending()[0], other.pending()[0], rtol=1e-3, atol=1e-4).item()


@pytest.fixture
def no_collector():
    """Only counting references frees anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("num_taken", thorough([3, 12], 12))
@pytest.mark.parametrize("name", thorough(PAIRS, "eagle-3"))
def test_caches_are_freed_at_once(name, num_taken, no_collector):
    model, drafter = PAIRS[name]
    left = []
    for _ in range(3):
        steps = speculative_generate_step(
            mx.array(PROMPT), model, drafter, num_draft_tokens=3, max_tokens=12
        )
        for _ in range(num_taken):
            next(steps)
        steps.close()
        del steps
        mx.synchronize(generation_stream)
        left.append(mx.get_active_memory())
    assert left[1] == left[2]  # the first makes what is kept for all: masks, compiled functions


@pytest.mark.parametrize("num_taken", thorough([1, 2, 4], 2))
@pytest.mark.parametrize("name", SHOWN)
def test_left_early(name, num_taken):
    model, drafter = PAIRS[name]
    cache = pair_cache(model, drafter)
    steps = speculative_generate_step(
        mx.array(PROMPT), model, drafter, num_draft_tokens=3, max_tokens=-1, prompt_cache=cache
    )
    text = PROMPT + [next(steps)[0] for _ in range(num_taken)]
    steps.close()
    if name != "draft model, rotating":
        assert_drafter_missed_nothing(drafter, model, cache, text)
    tokens, _ = speculative(model, drafter, [3, 4], 9, num_draft_tokens=3, prompt_cache=cache)
    assert tokens == plain(model, [*text, 3, 4], 9)


@pytest.mark.parametrize("num_trimmed", [1, 4, 12])
@pytest.mark.parametrize("name", ["lookup", "draft model"])
def test_trimmed_to_a_common_prefix(name, num_trimmed):
    model, drafter = PAIRS[name]
    cache = pair_cache(model, drafter)
    text = PROMPT + speculative(model, drafter, PROMPT, 10, prompt_cache=cache)[0]
    trim_prompt_cache(cache, num_trimmed)
    text = text[:-num_trimmed]
    tokens, _ = speculative(model, drafter, [3, 4], 9, prompt_cache=cache)
    assert tokens == plain(model, [*text, 3, 4], 9)
    assert_drafter_missed_nothing(drafter, model, cache, [*text, 3, 4, *tokens])
