"""Several requests on one prompt cache: the target's text, and a drafter that missed nothing."""

import mlx.core as mx
import pytest
from helpers import PROMPT, plain, speculative, tiny_head, tiny_llama, tiny_qwen3
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from mlx_eagle.decoding.generate_step import speculative_generate_step

MODEL = tiny_llama()
DRAFTER = tiny_head(MODEL)
NUM_CACHES = len(make_prompt_cache(MODEL))
TURNS = [PROMPT, [9, 33, 7], [12], [50, 51, 52, 53, 54, 55], [1, 2]]


def pair_cache() -> list:
    return make_prompt_cache(MODEL) + DRAFTER.make_cache()


def head_slots(cache: list) -> tuple[mx.array, mx.array]:
    return cache[NUM_CACHES].keys_and_values()


def assert_drafter_missed_nothing(cache: list, text: list[int]) -> None:
    """The head's cache equals that of a drafter which saw ``text`` in one piece."""
    whole = pair_cache()
    speculative(MODEL, DRAFTER, text, 1, prompt_cache=whole)
    # After text and one token: a slot for every position but the last.
    ours, theirs = head_slots(cache), head_slots(whole)
    size = len(text) - 1
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape[2] >= size
        assert mx.allclose(a[..., :size, :], b[..., :size, :], atol=1e-4).item()


@pytest.mark.parametrize("k", [1, 3])
def test_five_turns(k):
    cache, reference, text = pair_cache(), make_prompt_cache(MODEL), []
    for turn in TURNS:
        tokens, _ = speculative(MODEL, DRAFTER, turn, 10, num_draft_tokens=k, prompt_cache=cache)
        assert tokens == plain(MODEL, turn, 10, prompt_cache=reference)
        text += turn + tokens
        assert [c.offset for c in cache[:NUM_CACHES]] == [len(text)] * NUM_CACHES
        assert cache[NUM_CACHES].offset == len(text) - 1
        assert_drafter_missed_nothing(cache, text)


def test_saved_and_loaded_between_turns(tmp_path):
    cache, text = pair_cache(), []
    file = str(tmp_path / "cache.safetensors")
    for turn in TURNS:
        save_prompt_cache(file, cache)
        cache = load_prompt_cache(file)
        tokens, _ = speculative(MODEL, DRAFTER, turn, 7, num_draft_tokens=3, prompt_cache=cache)
        text += turn + tokens
        assert_drafter_missed_nothing(cache, text)


@pytest.mark.parametrize("num_taken", [1, 2, 3, 4, 5])
def test_left_early(num_taken):
    cache = pair_cache()
    steps = speculative_generate_step(
        mx.array(PROMPT), MODEL, DRAFTER, num_draft_tokens=3, max_tokens=-1, prompt_cache=cache
    )
    tokens = [next(steps)[0] for _ in range(num_taken)]
    steps.close()
    speculative(MODEL, DRAFTER, [9, 33], 1, prompt_cache=cache)
    assert_drafter_missed_nothing(cache, PROMPT + tokens + [9, 33])


@pytest.mark.parametrize("num_trimmed", [1, 2, 6])
def test_trimmed_to_a_common_prefix(num_trimmed):
    cache, reference = pair_cache(), make_prompt_cache(MODEL)
    speculative(MODEL, DRAFTER, PROMPT, 10, num_draft_tokens=3, prompt_cache=cache)
    plain(MODEL, PROMPT, 10, prompt_cache=reference)
    for caches in (cache, reference):
        trim_prompt_cache(caches, num_trimmed)
    tokens, _stats = speculative(
        MODEL, DRAFTER, [4, 5, 6], 12, num_draft_tokens=3, prompt_cache=cache
    )
    assert tokens == plain(MODEL, [4, 5, 6], 12, prompt_cache=reference)
    # Slots still stand for positions: one a position but the last.
    assert cache[NUM_CACHES].offset == cache[0].offset - 1


def test_a_cache_without_a_head_part():
    cache, reference = make_prompt_cache(MODEL), make_prompt_cache(MODEL)
    for turn in TURNS[:3]:
        tokens, stats = speculative(
            MODEL, DRAFTER, turn, 10, num_draft_tokens=3, prompt_cache=cache
        )
        assert tokens == plain(MODEL, turn, 10, prompt_cache=reference)
        assert stats.num_drafted > 0
    assert len(cache) == NUM_CACHES


def test_a_cache_filled_by_plain_decoding():
    cache, reference = make_prompt_cache(MODEL), make_prompt_cache(MODEL)
    for caches in (cache, reference):
        plain(MODEL, PROMPT, 5, prompt_cache=caches)
    cache += DRAFTER.make_cache()
    tokens, _ = speculative(MODEL, DRAFTER, [7, 8], 12, num_draft_tokens=3, prompt_cache=cache)
    assert tokens == plain(MODEL, [7, 8], 12, prompt_cache=reference)


def test_the_context_limit_of_the_head_is_said_once():
    model = tiny_qwen3()
    drafter = tiny_head(model, max_position_embeddings=16)
    with pytest.warns(UserWarning, match="passed the 16 tokens") as said:
        tokens, _ = speculative(model, drafter, PROMPT, 30, num_draft_tokens=3)
    assert tokens == plain(model, PROMPT, 30)
    assert len(said) == 1
