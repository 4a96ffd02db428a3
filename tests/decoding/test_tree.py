"""Trees: exact as chains are, and grown as EAGLE-2 says."""

import gc
from contextlib import nullcontext
from itertools import chain

import mlx.core as mx
import numpy as np
import pytest
from grids import thorough
from helpers import (
    FUSED,
    PROMPT,
    VOCAB,
    ScriptedDrafter,
    caches_equal,
    plain,
    plain_with_cache,
    primitives,
    speculative,
    tiny_head,
    tiny_llama,
)
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from tree_drafters import TREE_SCRIPTS, ScriptedTreeDrafter

from mlx_eagle.decoding.accept import Match, normalized
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.base import Draft
from mlx_eagle.drafters.tree import TreeShape, parse_tree, rerank, top_k
from mlx_eagle.target_model import probe
from mlx_eagle.target_model.rollback import Checkpoint
from mlx_eagle.target_model.tree_rows import ancestors, kept_path

SHAPES = ["1x4:4", "2x1:2", "2x3:6", "3x4:12", "4x5:16"]
CACHES = {
    "plain": KVCache,
    "quantized": lambda: QuantizedKVCache(group_size=32, bits=8),
    "rotating": lambda: RotatingKVCache(max_size=12, keep=0),
    "rotating, keep 4": lambda: RotatingKVCache(max_size=14, keep=4),
}


@pytest.fixture(scope="module")
def model():
    return tiny_llama(**FUSED)


@pytest.mark.parametrize("shape", thorough(SHAPES, "3x4:12"))
def test_one_head_forward_a_level(model, shape):
    drafter = tiny_head(model)
    tokens, stats = speculative(model, drafter, PROMPT, 40, tree=TreeShape.parse(shape))
    assert tokens == plain(model, PROMPT, 40)
    assert stats.num_drafted > 0
    # The accept pass, and the levels after the first.
    depth = TreeShape.parse(shape).depth
    assert stats.num_head_forwards <= depth * stats.num_rounds
    assert stats.num_evals == stats.num_target_forwards


@pytest.fixture(scope="module")
def text(model) -> list[int]:
    return PROMPT + plain(model, PROMPT, 60)


@pytest.mark.parametrize("num_taken", thorough(range(1, 10), 1, 3, 6))
def test_closing_leaves_what_plain_decoding_leaves(model, text, num_taken):
    cache = make_prompt_cache(model)
    steps = speculative_generate_step(
        mx.array(PROMPT),
        model,
        ScriptedTreeDrafter(text, TREE_SCRIPTS["all"]),
        tree=TreeShape.parse("3x3:9"),
        max_tokens=-1,
        prompt_cache=cache,
    )
    tokens = [next(steps)[0] for _ in range(num_taken)]
    steps.close()
    assert tokens == text[len(PROMPT) :][:num_taken]
    _, reference = plain_with_cache(model, PROMPT, num_taken)
    assert caches_equal(cache, reference)


def test_processors_see_the_path_of_their_row(model):
    def processors():
        return make_logits_processors({3: 4.0}, repetition_penalty=1.8, repetition_context_size=6)

    expected = plain(model, PROMPT, 30, logits_processors=processors())
    drafter = ScriptedTreeDrafter(PROMPT + expected + [0] * 8, TREE_SCRIPTS["every length"])
    tokens, _ = speculative(
        model, drafter, PROMPT, 30, tree=TreeShape.parse("2x3:6"), logits_processors=processors()
    )
    assert tokens == expected


@pytest.mark.parametrize("tree", ["2x3:6", "2/2+1"])
def test_where_processors_wait_for_a_draft_the_pass_goes_on(model, monkeypatch, tree):
    """Only a tree that grew on the device is waited for; the verify pass is started before."""
    events, start, known = [], mx.async_eval, Draft.known_parents
    shape = (parse_tree(tree).nodes + 1, VOCAB)

    def started(*arrays) -> None:
        events.extend("pass" for a in arrays if isinstance(a, mx.array) and a.shape == shape)
        start(*arrays)

    def waited(draft: Draft) -> object:
        has_grown = draft.parents is not None and draft.static_parents is None
        events.append("wait" if has_grown else "known")
        return known(draft)

    monkeypatch.setattr(mx, "async_eval", started)
    monkeypatch.setattr(Draft, "known_parents", waited)
    _, stats = speculative(
        model, tiny_head(model), PROMPT, 12, tree=parse_tree(tree),
        logits_processors=make_logits_processors({3: 4.0}),
    )  # fmt: skip
    assert stats.num_rounds > 5
    assert "".join(events).count("passwait" if tree == "2x3:6" else "known") >= 5
    assert ("pass" in events) == ("wait" in events) == (tree == "2x3:6")


@pytest.mark.exhaustive
def test_coupled_trees_depend_on_the_seed_alone(model):
    for seed in range(6):
        alone, _ = speculative(
            model, tiny_head(model), PROMPT, 30, num_draft_tokens=0, sampler=Sampling(seed=seed)
        )
        for shape in ("2x3:6", "4x5:16"):
            tokens, _ = speculative(
                model,
                tiny_head(model),
                PROMPT,
                30,
                tree=TreeShape.parse(shape),
                sampler=Sampling(seed=seed),
            )
            assert tokens == alone


@pytest.mark.parametrize("k", thorough([1, 2, 3, 6, 10, 11], 3, 11))
@pytest.mark.parametrize("size", [48, 2049])
def test_the_best_are_those_of_a_stable_sort(size, k):
    """Picked one by one or sorted; of equal ones, the first comes first."""
    scores = mx.random.randint(0, 40, (5, size), key=mx.random.key(k)).astype(mx.float32)
    rows = scores.tolist()
    expected = [sorted(range(size), key=lambda i: (-row[i], i))[:k] for row in rows]
    assert top_k(scores, k).tolist() == expected
    assert top_k(scores[0], k).tolist() == expected[0]


def test_picking_from_a_vocabulary_takes_few_kernels():
    """Metal sorts 32000 columns in ten or more; here they are three more for every pick."""
    scores = mx.random.normal((4, 32000))
    mx.eval(scores)
    kernels = ("Arange", "ArgReduce", "Equal", "Select", "Concatenate")

    def count(k: int) -> int:
        found = primitives(top_k(scores, k))
        assert not {"ArgSort", "AsType"} & set(found)
        return sum(found.count(name) for name in kernels)

    assert [count(k) for k in (1, 2, 4)] == [1, 6, 12]


def naive_tree(drafter, committed_tokens, features, shape):
    """EAGLE-2's tree with every node evaluated as a causal chain of its own."""
    ids = drafter.to_target.tolist()

    def log_q(path):
        """log q after a path of draft tokens, by running it alone on a fresh cache."""
        alone = drafter.begin()
        alone.extend(mx.array(committed_tokens), features)
        states = alone._seed
        for token in path:
            states = alone._forward(mx.array([token]), states)
        return normalized(alone.head.logits(states))[0].tolist()

    def children(path, score):
        row = log_q(path)
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))[: shape.width]
        return [([*path, ids[i]], score + row[i]) for i in order]

    # (path, score, index of origin), in the order of generation
    candidates = [(path, score, -1) for path, score in children([], 0.0)]
    beam = list(range(shape.width))
    for _ in range(shape.depth - 1):
        first = len(candidates)
        for index in beam:
            path, score, _ = candidates[index]
            candidates += [(p, s, index) for p, s in children(path, score)]
        level = range(first, len(candidates))
        beam = sorted(level, key=lambda i: (-candidates[i][1], i))[: shape.width]
    best = sorted(range(len(candidates)), key=lambda i: (-candidates[i][1], i))[: shape.nodes]
    chosen = sorted(best)
    tokens = [candidates[i][0][-1] for i in chosen]
    parents = [0 if candidates[i][2] < 0 else chosen.index(candidates[i][2]) + 1 for i in chosen]
    return tokens, parents


@pytest.mark.parametrize("shape", ["2x3:5", "3x4:11", "4x5:30"])
@pytest.mark.parametrize("seed", range(3))
def test_the_dynamic_tree_equals_a_naive_construction(shape, seed):
    model, shape = tiny_llama(), TreeShape.parse(shape)
    drafter = tiny_head(model, seed=seed + 20).begin()
    text = mx.random.randint(0, VOCAB, (9,), key=mx.random.key(seed))
    features = mx.random.normal((9, 3 * 64), key=mx.random.key(50 + seed))
    drafter.extend(text, features)
    draft = drafter.propose_tree(shape, Match().pick_children)
    tokens, parents = naive_tree(drafter, text.tolist(), features, shape)
    assert draft.tokens.tolist() == tokens
    assert draft.parents.tolist() == parents
    assert drafter.cache[0].offset == 9  # nothing of the tree stays in the head's cache


def test_ancestors_and_paths_against_plain_python():
    for seed in range(40):
        size = 1 + seed % 9
        draws = mx.random.uniform(shape=(size,), key=mx.random.key(seed)).tolist()
        parents = [int(x * (i + 1)) for i, x in enumerate(draws)]
        tree_mask = ancestors(mx.array(parents, dtype=mx.int32), size).tolist()
        for row in range(size + 1):
            path, at = {row}, row
            while at > 0:
                at = parents[at - 1]
                path.add(at)
            assert {a for a in range(size + 1) if tree_mask[row][a]} == path
        # A kept set with at most one kept child a row, as siblings are different tokens.
        keep, at = [False] * size, 0
        for i, parent in enumerate(parents):
            if parent == at and draws[i] > 0.3:
                keep[i], at = True, i + 1
        expected = [0] + [i + 1 for i in range(size) if keep[i]]
        rows, num_kept = kept_path(mx.array(keep), mx.array(tree_mask))
        assert num_kept.item() == len(expected) - 1
        assert rows.tolist()[: len(expected)] == expected
        assert sorted(rows.tolist()) == list(range(size + 1))


def test_rerank_breaks_ties_by_order():
    scores = mx.array([-1.0, -1.0, -1.0, -1.0, -2.0, -1.0])
    origins = mx.array([-1, -1, 0, 0, 1, 1])
    chosen, parents = rerank(scores, origins, 4)
    assert chosen.tolist() == [0, 1, 2, 3]
    assert parents.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("text", ["", "4x5", "4:5", "axb:c", "0x3:3", "2x3:2", "2x2:9", "2x-1:3"])
def test_impossible_shapes_are_refused(text):
    with pytest.raises(ValueError, match="the tree"):
        TreeShape.parse(text)


def test_what_cannot_do_trees_is_refused(model):
    shape = TreeShape.parse("2x2:4")
    with pytest.raises(ValueError, match="proposes chains only"):
        speculative(model, ScriptedDrafter(PROMPT, lambda r, s: 0), PROMPT, 4, tree=shape)


def addresses(*trees) -> list[int]:
    """Where the arrays' buffers lie."""
    return [np.array(array, copy=False).ctypes.data for _, array in tree_flatten(trees)]


@pytest.mark.parametrize("name", ["plain", "quantized"])
def test_a_branch_is_moved_within_its_buffers(name):
    caches = [CACHES[name]() for _ in range(3)]

    def append(num_rows: int) -> None:
        for cache in caches:
            cache.update_and_fetch(*mx.random.normal((2, 1, 2, num_rows, 32)))
            mx.eval(cache.keys, cache.values)

    append(9)
    buffers = [addresses(cache.keys, cache.values) for cache in caches]
    window = Checkpoint(caches)
    append(4)
    rows = mx.array([*range(9), 9, 11, 12])
    expected = [tree_map(lambda a: a[..., rows, :], [c.keys, c.values]) for c in caches]
    mx.eval(expected)
    window.rollback_to_branch([0, 2, 3])
    mx.synchronize()  # as after the accept pass of a round
    for cache, arrays, buffer in zip(caches, expected, buffers, strict=True):
        mx.eval(cache.keys, cache.values)
        assert addresses(cache.keys, cache.values) == buffer, "the cache was copied"
        found = tree_flatten([cache.keys, cache.values])
        assert cache.offset == 12
        for (_, array), (_, wanted) in zip(found, tree_flatten(arrays), strict=True):
            assert mx.array_equal(array[..., :12, :], wanted).item()


@pytest.mark.parametrize(
    "difference, noise, sentence",
    [(0.0, 0.0, ""), (0.5, 0.01, "differ by 0.5, of 1"), (0.5, 0.3, ""), (0.01, 0.0, "")],
)
def test_a_target_is_probed_once(monkeypatch, difference, noise, sentence):
    probed, drafter = [], tiny_head(tiny_llama())
    found = difference, noise, 1.0
    monkeypatch.setattr(probe, "_probe", lambda model: probed.append(1) or found)
    model = tiny_llama()
    for _ in range(3):
        with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
            speculative(model, drafter, PROMPT, 4, tree=TreeShape.parse("2x2:4"))
    assert len(probed) == 1
    place = (None, id(model))
    assert place in probe._refusals._found
    del model
    gc.collect()
    assert place not in probe._refusals._found


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_the_passes_of_a_probe_have_as_many_rows(monkeypatch, dtype):
    """A GPU has other kernels for other numbers of rows, which round otherwise."""
    passes, model = [], tiny_llama(**FUSED)
    model.set_dtype(dtype)
    call = type(model).__call__

    def counted(self, tokens, *args, **kwargs):
        passes.append(tokens.tolist()[0])
        return call(self, tokens, *args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", counted)
    difference, noise, scale = probe._probe(model)
    _, prefix, *compared, root, rest = passes
    assert [len(tokens) for tokens in compared] == [4, 4, 4]
    assert root + rest == compared[1]
    assert min(chain(prefix, *compared)) > VOCAB // 8, "special tokens come first"
    assert difference <= max(2 * noise, probe.LEAST_NOISE * scale)


@pytest.mark.parametrize(
    "tree, changes, sentence",
    [
        ("60x1:60", {}, "gives a node 60 children, but the head drafts only 48"),
        ("2x2:4", {"sliding_window": 4}, "do not support a sliding window"),
        ("auto", {"sliding_window": 4}, "do not support a sliding window"),
    ],
)
def test_a_head_refuses_trees_before_anything_is_run(model, tree, changes, sentence):
    shape = tree if tree == "auto" else TreeShape.parse(tree)
    cache = make_prompt_cache(model)
    with pytest.raises(ValueError, match=sentence):
        speculative(model, tiny_head(model, **changes), PROMPT, 4, tree=shape, prompt_cache=cache)
    assert all(layer.empty() for layer in cache)
