"""Every architecture with windows or recurrent states, stopped after any number of tokens."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import mlx.core as mx
import pytest
from architecture_configs import RECURRENT, VOCAB, WINDOWED
from architectures import ARCHITECTURES, PROMPT, build, may_part, recorded
from grids import thorough
from helpers import SCRIPTS, ScriptedDrafter, plain
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache
from tolerances import tolerance
from tree_drafters import ScriptedTreeDrafter

from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.drafters.tree import TreeShape
from mlx_eagle.target_model.cache_view import WindowCache, single_caches

TABLE = recorded()
NAMES = sorted({*RECURRENT, *WINDOWED} & ARCHITECTURES.keys())
KINDS = {
    "chain": (ScriptedDrafter, {"num_draft_tokens": 3}),
    "tree": (ScriptedTreeDrafter, {"tree": TreeShape.parse("2x3:6")}),
}
NUM_TOKENS = 8  # the windows hold 8, the prompt has 7


@pytest.mark.exhaustive
def test_these_are_all():
    """Of the architectures of the installed mlx-lm."""
    kinds = {
        name: {type(cache) for cache in single_caches(make_prompt_cache(build(name)))}
        for name in ARCHITECTURES
    }
    for kind, names in ((RotatingKVCache, WINDOWED), (ArraysCache, RECURRENT)):
        assert {name for name in kinds if kind in kinds[name]} == {*names} & kinds.keys()


def contents(cache: Any) -> tuple[type, int, list[mx.array]]:
    """What a cache of mlx-lm's holds, a window in the order of the text."""
    if isinstance(cache, ArraysCache):
        return type(cache), 0, [state for state in cache.cache if state is not None]
    arrays = [] if cache.keys is None else [cache.keys, cache.values]
    held = cache.offset
    if isinstance(cache, RotatingKVCache):
        arrays, held = [cache._temporal_order(a) for a in arrays], min(held, cache.max_size)
        arrays = [a[..., a.shape[2] - held :, :] for a in arrays]
    return type(cache), cache.offset, [a[..., :held, :] for a in arrays]


def assert_alike(ours: list, theirs: list) -> None:
    for a, b in zip(single_caches(ours), single_caches(theirs), strict=True):
        (*kind, mine), (*expected, others) = contents(a), contents(b)
        assert kind == expected and len(mine) == len(others)
        for x, y in zip(mine, others, strict=True):
            most = 10 * tolerance() * mx.abs(y).max().item()
            assert x.shape == y.shape and mx.allclose(x, y, 0, most).item()


def plain_caches(model, num_tokens: int) -> Iterator[tuple[int, list]]:
    """mlx-lm's tokens, and its caches if it is stopped after each."""
    cache = make_prompt_cache(model)
    for token, _ in generate_step(
        mx.array(PROMPT), model, max_tokens=num_tokens, prompt_cache=cache
    ):
        yield token, deepcopy(cache)


def has_windows(cache: list) -> bool:
    """Whether there are any that are being decoded on, which a caller sees as long as that is so.

    There are then no others.
    """
    kinds = {type(c) for c in single_caches(cache) if isinstance(c, RotatingKVCache)}
    assert kinds in (set(), {RotatingKVCache}, {WindowCache})
    return WindowCache in kinds


@pytest.mark.parametrize("name", thorough(NAMES, "baichuan_m1"))
def test_caches_are_mlx_lms_wherever_it_stops(name):
    """Chains, and trees where there are: what is in them, their classes, and what comes next."""
    if may_part(name):
        pytest.xfail("on Metal mlx-lm computes one row of it in another way than several")
    model = build(name)
    expected = list(plain_caches(model, NUM_TOKENS + 1))
    text = PROMPT + plain(model, PROMPT, NUM_TOKENS + 6)
    after = [plain(model, [7, 9], 3, prompt_cache=deepcopy(cache)) for _, cache in expected]
    for kind in KINDS.keys() & TABLE[name]:
        make, options = KINDS[kind]
        drafter = make(text, SCRIPTS["every length"], VOCAB)
        for num in range(1, NUM_TOKENS + 1):
            cache = make_prompt_cache(model)
            ours = speculative_generate_step(
                mx.array(PROMPT), model, drafter, max_tokens=99, prompt_cache=cache, **options
            )
            assert [next(ours)[0] for _ in range(num)] == [token for token, _ in expected[:num]]
            assert has_windows(cache) == (name in WINDOWED)
            ours.close()
            assert not has_windows(cache)
            assert_alike(cache, expected[num - 1][1])
            assert plain(model, [7, 9], 3, prompt_cache=cache) == after[num - 1]
