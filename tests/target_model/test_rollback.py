"""Every cache type: the same tokens as plain decoding, and the same cache behind it."""

import random
from collections.abc import Callable
from copy import deepcopy

import mlx.core as mx
import pytest
from grids import thorough
from helpers import (
    FUSED,
    PROMPT,
    SCRIPTS,
    SIZES,
    ScriptedDrafter,
    Truth,
    left_in,
    num_primitives,
    plain,
    speculative,
    tiny_head,
    tiny_llama,
    tiny_qwen3,
    truth_of,
)
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.target_model import cache_view
from mlx_eagle.target_model.rollback import Checkpoint

WINDOW = 12  # smaller than prompt + text: crossed early in every test below
LAYERS = SIZES["num_hidden_layers"]

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
    return tiny_llama(**FUSED)


@pytest.fixture(scope="module", params=CACHES)
def make_cache(request):
    return lambda: [CACHES[request.param]() for _ in range(LAYERS)]


@pytest.fixture(scope="module")
def truth(model, make_cache) -> Truth:
    return truth_of(model, make_cache, 40)


@pytest.mark.parametrize("script", thorough(["all", "every length"], "every length"))
def test_same_text_and_same_cache(model, make_cache, truth, script):
    cache = make_cache()
    tokens, _ = speculative(
        model,
        ScriptedDrafter(truth.text, SCRIPTS[script]),
        PROMPT,
        40,
        num_draft_tokens=6,
        prompt_cache=cache,
    )
    assert tokens == truth.made
    assert left_in(model, cache) == truth.left


@pytest.mark.parametrize("num_taken", thorough(range(1, 15), 6))
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


def test_kv_bits_from_any_start(model, quantized):
    options, truth = quantized
    cache = make_prompt_cache(model)
    tokens, _ = speculative(
        model,
        ScriptedDrafter(truth.text, SCRIPTS["every length"]),
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


def test_max_kv_size():
    model = tiny_qwen3()  # has no make_cache of its own, so mlx-lm makes rotating ones
    expected = plain(model, PROMPT, 40, max_kv_size=12)
    tokens, _ = speculative(
        model, tiny_head(model), PROMPT, 40, num_draft_tokens=3, max_kv_size=12
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
    rows = mx.ones((1, model.args.num_key_value_heads, 3, model.args.head_dim))
    for c in cache[:3]:
        c.update_and_fetch(rows, rows)
    window.rollback(0)
    assert left_in(model, cache) == left_in(model, reference)


STEP_CACHES = {
    "plain": KVCache,
    "concatenated": ConcatenateKVCache,
    "quantized": lambda: QuantizedKVCache(group_size=32, bits=8),
    "chunked": lambda: ChunkedKVCache(chunk_size=64),
    "rotating, full": lambda: RotatingKVCache(max_size=256, keep=4),
    "rotating, growing": lambda: RotatingKVCache(max_size=2048),
    "rotating, full with the next row": lambda: RotatingKVCache(max_size=301),
    "in a list": lambda: CacheList(KVCache(), RotatingKVCache(max_size=256)),
    "recurrent": lambda: ArraysCache(1),
}
NUM_FILLED, NUM_HEADS, WIDTH = 300, 8, 32


def append(cache, rows: mx.array) -> list[mx.array]:
    """What a layer does with rows (1, H, m, D): the arrays that attention then reads."""
    if isinstance(cache, CacheList):
        return [array for member in cache.caches for array in append(member, rows)]
    if isinstance(cache, ArraysCache):
        state = rows[..., -1:, :]
        cache[0] = state if cache[0] is None else 0.5 * cache[0] + state
        return [cache[0]]
    return [array for _, array in tree_flatten(list(cache.update_and_fetch(rows, rows + 1)))]


def random_rows(seed: int, num_rows: int) -> mx.array:
    rows = mx.random.normal((1, NUM_HEADS, num_rows, WIDTH), key=mx.random.key(seed))
    mx.eval(rows)
    return rows


def filled(name: str):
    """A cache after 300 rows, the last of them one by one, so that what can rotate has done so."""
    cache = STEP_CACHES[name]()
    mx.eval(append(cache, random_rows(0, 256)))
    for seed in range(1, NUM_FILLED - 256 + 1):
        mx.eval(append(cache, random_rows(seed, 1)))
    return cache


def cost_of_a_row(name: str, make_checkpoint: Callable) -> tuple[int, int]:
    """Operations of appending one row to a cache, and the most bytes that it takes at once."""
    cache, row = filled(name), random_rows(99, 1)
    mx.clear_cache()
    start = mx.get_active_memory()
    mx.reset_peak_memory()
    checkpoint = make_checkpoint([cache])
    arrays = append(cache, row)
    num_operations = num_primitives(*arrays)
    mx.eval(arrays)
    del checkpoint
    return num_operations, mx.get_peak_memory() - start


@pytest.mark.parametrize("name", STEP_CACHES)
def test_a_checkpoint_of_one_row_costs_nothing(name):
    """As many operations, and as much memory at once, as the same row takes in mlx-lm alone."""
    # When a buffer that is not needed any more is freed depends on timing: hence several times.
    plain_costs = [cost_of_a_row(name, lambda caches: None) for _ in range(3)]
    costs = [cost_of_a_row(name, lambda caches: Checkpoint(caches, num_rows=1)) for _ in range(3)]
    slack = NUM_HEADS * WIDTH * 4  # a row: what a recurrent state was is kept until it is read
    assert {num for num, _ in costs} == {num for num, _ in plain_costs}
    assert min(costs)[1] <= max(plain_costs)[1] + slack
    if name == "rotating, full":
        # That this can fail: where the number of rows is not known, keys and values are copied.
        unknown = cost_of_a_row(name, Checkpoint)[1]
        assert unknown >= 2 * 256 * NUM_HEADS * WIDTH * 4


@pytest.mark.parametrize("num_next", [1, 5])
@pytest.mark.parametrize("name", STEP_CACHES)
def test_a_single_row_is_taken_back(name, num_next):
    """Whatever comes next is what it would be without the row, to the last bit."""
    caches, twins = [filled(name), filled(name)], [filled(name), filled(name)]
    checkpoint = Checkpoint(caches, num_rows=1)
    mx.eval(append(caches[0], random_rows(98, 1)))  # then it fails: the other is as it was
    checkpoint.rollback(0)
    assert [vars(c).get("offset") for c in caches] == [vars(c).get("offset") for c in twins]
    for seed in range(3):
        rows = random_rows(100 + seed, num_next)
        for cache, twin in zip(caches, twins, strict=True):
            for ours, theirs in zip(append(cache, rows), append(twin, rows), strict=True):
                assert mx.array_equal(ours, theirs).item()


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


def test_a_cache_that_has_room_for_nothing_but_its_first_tokens(model):
    cache = make_prompt_cache(tiny_qwen3(), 4)  # and keeps 4
    with pytest.raises(ValueError, match=r"holds 4 tokens and keeps the first 4.*above 4"):
        speculative(model, tiny_head(model), PROMPT, 20, prompt_cache=cache)


def seen_by(keys: mx.array, mask: mx.array | str | None, num_rows: int) -> list[list[float]]:
    """The keys (1, H, S, D), by their first number, that each row of a pass sees, sorted."""
    columns = mx.arange(keys.shape[2])
    rows = columns[-num_rows:, None] if mask == "causal" else columns[-1:, None]
    seen = mask if isinstance(mask, mx.array) else columns[None] <= rows
    seen = mx.broadcast_to(seen, (num_rows, keys.shape[2])).tolist()
    numbers = keys[0, 0, :, 0].tolist()
    return [sorted(x for x, sees in zip(numbers, row, strict=True) if sees) for row in seen]


@pytest.mark.parametrize("window, size", [(None, 9), (9, 9), (5, 9), (None, 40)])
def test_windows_that_are_decoded_on_are_mlx_lms_rotating_ones(window, size, monkeypatch):
    """Passes of any rows of which any are kept, rounds taken back, and caches handed out."""
    monkeypatch.setattr(cache_view, "STEP", 3)
    dice, rows_so_far = random.Random(size), 0
    ours, theirs = [RotatingKVCache(size)], RotatingKVCache(size)
    for step in range(120):
        num_rows, num_before = dice.choice((1, 1, 2, 4, 7)), theirs.offset
        kept = dice.randrange(0 if num_before else 1, num_rows + 1)
        rows = random_rows(step, num_rows)
        cache_view.open_windows(ours)
        before, mask = Checkpoint(ours, num_rows=num_rows), ours[0].make_mask(num_rows, window)
        keys, values = ours[0].update_and_fetch(rows, -rows)
        assert mx.array_equal(keys, -values)
        twin = deepcopy(theirs)
        twin_mask = twin.make_mask(num_rows, window)
        twin_keys, _ = twin.update_and_fetch(rows, -rows)
        assert seen_by(keys, mask, num_rows) == seen_by(twin_keys, twin_mask, num_rows)
        if dice.random() < 0.3:  # the next round is under way, and undone
            upcoming = Checkpoint(ours, num_rows=2)
            ours[0].update_and_fetch(rows[..., :1, :], rows[..., :1, :])
            upcoming.rollback(0)
        if dice.random() < 0.2 and kept > 1:  # a branch that ends with the last row
            index = [*range(kept - 1), num_rows - 1]
            before.rollback_to_branch(index)
            rows = rows[..., mx.array(index), :]
        elif kept < num_rows:
            before.rollback(kept)
        for r in range(kept):
            theirs.update_and_fetch(rows[..., r : r + 1, :], -rows[..., r : r + 1, :])
        if dice.random() < 0.3 and theirs.offset > 0:
            cache_view.close_windows(ours)
            assert type(ours[0]) is RotatingKVCache and vars(ours[0]).keys() == vars(theirs).keys()
            assert ours[0].offset == theirs.offset and ours[0].keys.shape[2] <= size
            expected = theirs._temporal_order(theirs.keys)[..., -ours[0].keys.shape[2] :, :]
            assert mx.array_equal(ours[0].keys, expected)
        rows_so_far += kept
    assert theirs.offset == rows_so_far > 100


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_view_of_a_window_shows_the_first_rows_that_it_keeps(num_rows):
    """Also behind a pass of several rows, which leaves more than a window in the arrays."""
    cache = RotatingKVCache(6, keep=2)
    rows = random_rows(0, 12)
    for start in range(0, 12, num_rows):
        part = rows[..., start : start + num_rows, :]
        cache.update_and_fetch(part, -part)
    keys, values = cache_view.CacheView([cache]).rows(0)
    assert mx.array_equal(keys, rows[..., mx.array([0, 1, 8, 9, 10, 11]), :])
    assert mx.array_equal(values, -keys)
