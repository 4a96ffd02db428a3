"""Drafted slots beside the cache: the same drafts, and a cache that nobody writes to."""

import mlx.core as mx
import pytest
from grids import thorough
from heads import VARIANTS
from helpers import PROMPT, VOCAB, plain, primitives, speculative, tiny_head, tiny_llama

from mlx_eagle.decoding.accept import Match
from mlx_eagle.drafters.eagle3 import Eagle3Drafter
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.drafters.tree import parse_tree

MODEL = tiny_llama()
OF_ATTENTION = (
    "default", "qk norm", "qkv bias only", "three layers, every", "window", "mixed windows",
    "wide heads", "all key heads", "llama3 rope", "partial rope",
)  # fmt: skip


def begun(tail: bool, seed: int = 1, num_pairs: int = 9, **changes) -> Eagle3Drafter:
    drafter = tiny_head(MODEL, seed, **changes).begin()
    drafter.use_overlay(tail)
    tokens = mx.random.randint(0, VOCAB, (num_pairs,), key=mx.random.key(seed))
    drafter.extend(tokens, mx.random.normal((num_pairs, drafter.width), key=mx.random.key(7)))
    return drafter


@pytest.mark.parametrize("variant", thorough(OF_ATTENTION, "mixed windows", "qk norm"))
@pytest.mark.parametrize("seed", thorough([1, 2, 3], 1))
def test_chains_are_the_same(variant, seed):
    changes = VARIANTS[variant]
    for num_pairs in (1, 3, 9):
        ours, theirs = (begun(tail, seed, num_pairs, **changes) for tail in (True, False))
        for _ in range(2):  # the second is drafted from the same place
            assert ours.propose(7, Match().pick).tokens.tolist() == (
                theirs.propose(7, Match().pick).tokens.tolist()
            )
        assert ours.num_forwards == theirs.num_forwards


@pytest.mark.parametrize("shape", thorough(["2x3:6", "3x4:12", "root2:4"], "2x3:6"))
@pytest.mark.parametrize(
    "variant", thorough(["default", "three layers, every", "all key heads"], "default")
)
def test_trees_are_the_same(variant, shape):
    ours, theirs = (
        begun(tail, **VARIANTS[variant]).propose_tree(parse_tree(shape), Match().pick_children)
        for tail in (True, False)
    )
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.parents.tolist() == theirs.parents.tolist()


def test_a_lagging_cache_drafts_the_same():
    drafter, tokens = tiny_head(MODEL).with_draft_cache("lagging"), []
    for tail in (True, False):
        drafter.use_overlay(tail)
        tokens.append(speculative(MODEL, drafter, PROMPT, 15, num_draft_tokens=4))
    assert tokens[0][0] == tokens[1][0] and tokens[0][1].tau == tokens[1][1].tau


@pytest.mark.parametrize(
    "draft", [{"num_draft_tokens": 5}, {"tree": parse_tree("2x3:6")}], ids=str
)
def test_a_generation_is_the_same(draft):
    drafter, results = tiny_head(MODEL), []
    for tail in (True, False):
        drafter.use_overlay(tail)
        results.append(speculative(MODEL, drafter, PROMPT, 20, **draft))
    assert results[0][0] == results[1][0] == plain(MODEL, PROMPT, 20)
    assert results[0][1].accepted_histogram == results[1][1].accepted_histogram


def test_the_cache_is_neither_written_nor_moved():
    for tail, is_written in ((True, False), (False, True)):
        drafter = begun(tail)
        mx.eval([c.state for c in drafter.cache[:-1]])
        offset = drafter.cache[0].offset
        draft = drafter.propose(7, Match().pick)
        assert ("SliceUpdate" in primitives(draft.tokens)) is is_written
        assert drafter.cache[0].offset == offset


def test_who_can_keep_a_tail():
    assert tiny_head(MODEL).supports_overlay
    assert not LookupDrafter().supports_overlay
