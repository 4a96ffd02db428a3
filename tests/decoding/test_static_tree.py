"""Static trees: drafted as written down, and the text is the target's own."""

from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import build
from grids import thorough
from helpers import (
    PROMPT,
    VOCAB,
    Truth,
    left_in,
    plain,
    speculative,
    tiny_head,
    tiny_llama,
    truth_of,
)
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from tree_drafters import TREE_SCRIPTS, ScriptedStaticDrafter

import mlx_eagle
from mlx_eagle.decoding.accept import Match, normalized
from mlx_eagle.decoding.processors import LogitsProcessors
from mlx_eagle.decoding.rules import make_rule
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.base import Draft
from mlx_eagle.drafters.tree import EAGLE1, TreeShape, parse_tree

# The ranks on the way to each node: mc_sim_7b_63 of eagle/model/choices.py, SafeAILab/EAGLE.
PUBLISHED = (
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
)
PATHS = {
    "eagle1": PUBLISHED,
    "root2:3": "0 1 00 10 000 100",
    "root1:4": "0 00 000 0000",
    "3": "0 1 2",
    "3/2+0+1": "0 1 2 00 01 20",
    "2/1+2/0+2+1/1+0+1": "0 1 00 10 11 100 101 110 1000 1100",
}


def ranks(text: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, path)) for path in text.split()]


@pytest.mark.parametrize("text", PATHS)
def test_what_is_typed_is_the_tree(text):
    tree, paths = parse_tree(text), ranks(PATHS[text])
    rows = {(): 0} | {path: i + 1 for i, path in enumerate(paths)}
    assert list(tree.parents) == [rows[path[:-1]] for path in paths]
    assert (tree.nodes, tree.depth) == (len(paths), max(map(len, paths)))
    assert tree.width == max(path[-1] for path in paths) + 1
    for depth in range(1, tree.depth + 1):
        short = [path for path in paths if len(path) <= depth]
        assert tree.at_most(depth).parents == tree.parents[: len(short)]


def test_names_and_kinds():
    assert parse_tree("eagle1") is EAGLE1 and EAGLE1.nodes == 25
    assert parse_tree("4x5:16") == TreeShape(4, 5, 16)
    assert mlx_eagle.parse_tree("root2:2") == mlx_eagle.StaticTree(((2,), (1, 1)))


@pytest.mark.parametrize(
    "text, reason",
    {
        "": "give WIDTHxDEPTH:NODES",
        "eagle2": "give eagle1",
        "root2": "give eagle1",
        "root:": "give eagle1",
        "2/": "give eagle1",
        "2//1": "give eagle1",
        "2+x": "give WIDTHxDEPTH:NODES",
        "2+2": "at most one number a node",
        "2/1+1+1": "at most one number a node",
        "2/0": "one child or more",
        "0": "one child or more",
        "root0:3": "one child or more",
        "root-2:3": "one child or more",
        "root2:0": "no levels",
        "2000": "more than 1024 nodes",
        "root1:9999999999": "more than 1024 nodes",
        "root9999999999:2": "more than 1024 nodes",
    }.items(),
)
def test_impossible_trees_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        parse_tree(text)
    assert "the tree" in str(caught.value)


def naive_static(drafter, committed, features, paths) -> list[int]:
    """The token of every node, each one's ancestors run alone as a causal chain."""
    ids = drafter.to_target.tolist()

    @cache
    def best_first(tokens: tuple[int, ...]) -> list[int]:
        alone = drafter.begin()
        alone.extend(mx.array(committed), features)
        states = alone._seed
        for token in tokens:
            states = alone._forward(mx.array([token]), states)
        row = normalized(alone.head.logits(states))[0].tolist()
        return [ids[i] for i in sorted(range(len(row)), key=lambda i: (-row[i], i))]

    found = {(): ()}
    for path in paths:
        before = found[path[:-1]]
        found[path] = (*before, best_first(before)[path[-1]])
    return [found[path][-1] for path in paths]


@pytest.mark.parametrize("text", PATHS)
@pytest.mark.parametrize("seed", thorough(range(3), 0))
def test_the_tree_equals_a_naive_construction(text, seed):
    tree, paths = parse_tree(text), ranks(PATHS[text])
    drafter = tiny_head(tiny_llama(), seed=seed + 30).begin()
    committed = mx.random.randint(0, VOCAB, (9,), key=mx.random.key(seed))
    features = mx.random.normal((9, 3 * 64), key=mx.random.key(60 + seed))
    drafter.extend(committed, features)
    draft = drafter.propose_tree(tree, Match().pick_children)
    assert draft.tokens.tolist() == naive_static(drafter, committed.tolist(), features, paths)
    assert draft.parents.tolist() == list(tree.parents)
    assert (draft.tree_mask().sum(axis=1) - 1).tolist() == [0, *map(len, paths)]
    assert drafter.num_forwards == tree.depth  # one a level: extend's, then all but the last
    assert drafter.cache[0].offset == 9  # nothing of the tree stays in the head's cache


MODELS = {"llama": tiny_llama, "windowed gemma 3": lambda: build("gemma3_text")}


@pytest.fixture(scope="module", params=MODELS)
def target(request) -> tuple[nn.Module, Truth]:
    model = MODELS[request.param]()
    return model, truth_of(model, lambda: make_prompt_cache(model), 40)


@pytest.mark.parametrize("script", thorough(TREE_SCRIPTS, "every length"))
@pytest.mark.parametrize("text", thorough(["eagle1", "root2:4"], "eagle1"))
def test_every_branch_can_be_kept(target, text, script):
    model, truth = target
    tree, cache = parse_tree(text), make_prompt_cache(model)
    drafter = ScriptedStaticDrafter(truth.text, TREE_SCRIPTS[script])
    tokens, stats = speculative(model, drafter, PROMPT, 40, tree=tree, prompt_cache=cache)
    assert tokens == truth.made
    assert left_in(model, cache) == truth.left
    if script == "all":
        assert stats.tau > tree.depth / 2


def test_any_sampler_has_its_own_text(target):
    """Match, with a closure that prefers other tokens than the model and throws no dice."""
    model, truth = target
    favours = 3 * mx.random.normal((VOCAB,), key=mx.random.key(9))

    def sampler(logprobs: mx.array) -> mx.array:
        return mx.argmax(logprobs + favours, axis=-1)

    expected = plain(model, PROMPT, 50, sampler=sampler)
    assert expected[:40] != truth.made
    scripted = ScriptedStaticDrafter(PROMPT + expected, TREE_SCRIPTS["every length"])
    for drafter in (tiny_head(model), scripted):
        tokens, _ = speculative(
            model, drafter, PROMPT, 40, tree=EAGLE1, sampler=sampler, acceptance="match"
        )
        assert tokens == expected[:40]


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", ["eagle1", "root2:3"])
def test_sampled_text_depends_on_the_seed_alone(target, text):
    model, _ = target
    for seed in range(3):
        sampler = Sampling(temp=0.8, seed=seed)
        alone, _ = speculative(
            model, tiny_head(model), PROMPT, 24, num_draft_tokens=0, sampler=sampler
        )
        tokens, _ = speculative(
            model, tiny_head(model), PROMPT, 24, tree=parse_tree(text), sampler=sampler
        )
        assert tokens == alone


def test_processors_do_not_wait_for_a_tree_whose_form_is_known(target):
    class OnDevice:
        """What the device has yet to compute: nobody asks for its values."""

        shape = (3,)

    seen, tree = [], parse_tree("2/1")
    draft = Draft(mx.array([7, 8, 9]), OnDevice(), tree.depth, tree.parents)
    processor = lambda tokens, logits: seen.append(tokens.tolist()) or logits  # noqa: E731
    processor.is_pure = True
    LogitsProcessors([processor]).process(mx.array([1, 2]), draft, mx.zeros((4, VOCAB)))
    assert seen == [[1, 2], [1, 2, 7], [1, 2, 8], [1, 2, 7, 9]]
    model, _ = target
    drafter = tiny_head(model).begin()
    drafter.extend(mx.array(PROMPT), mx.random.normal((len(PROMPT), drafter.width)))
    assert drafter.propose_tree(tree, Match().pick_children).static_parents == tree.parents
    assert (
        drafter.propose_tree(TreeShape.parse("2x2:3"), Match().pick_children).static_parents
        is None
    )


def test_processors_on_a_static_tree_give_plain_decodings_text(target):
    def processors():
        return make_logits_processors({3: 4.0}, repetition_penalty=1.8, repetition_context_size=6)

    model, _ = target
    expected = plain(model, PROMPT, 20, logits_processors=processors())
    tokens, _ = speculative(
        model, tiny_head(model), PROMPT, 20, tree=parse_tree("2/1+1"),
        logits_processors=processors(),
    )  # fmt: skip
    assert tokens == expected


@pytest.mark.exhaustive
def test_matching_keeps_the_law_of_two_tokens():
    """The rule on a tree of a Markov chain gives the exact joint distribution, by chi-square."""
    vocab, num_runs, tree = 4, 2000, parse_tree("root2:2")
    logits = 1.2 * mx.random.normal((vocab, vocab), key=mx.random.key(1))
    log_p = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    root, drafted = 0, [2, 1, 3, 2]
    draft = Draft(mx.array(drafted), mx.array(tree.parents), tree.depth)
    rule, tree_mask = make_rule("match", make_sampler(1.0)), draft.tree_mask()
    mx.random.seed(3)
    counts, num_kept = {}, 0
    for _ in range(num_runs):
        rows = logits[mx.array([root, *drafted])]
        verification = rule.open(0, tree.depth).verify(draft, tree_mask, rows)
        outcome = verification.read()
        kept, run = outcome.num_kept, outcome.run
        if kept == 0:  # the next round draws it
            run.append(mx.random.categorical(log_p[run[0]]).item())
        counts[tuple(run[:2])] = counts.get(tuple(run[:2]), 0) + 1
        num_kept += kept
    p = mx.exp(log_p).tolist()
    expected = {(a, b): p[root][a] * p[a][b] for a in range(vocab) for b in range(vocab)}
    terms = [(counts.get(ab, 0) - num_runs * e) ** 2 / e for ab, e in expected.items()]
    chi_square = sum(terms) / num_runs
    assert chi_square < 37.7  # 15 degrees of freedom, one run in a thousand is above
    assert num_kept > num_runs / 4


def test_a_tree_wider_than_the_draft_vocabulary_is_refused():
    model = tiny_llama()
    assert tiny_head(model).head.config.draft_vocab_size == 48
    for text in ("49", "49x1:49"):
        with pytest.raises(ValueError, match=r"gives a node 49 children.* only 48"):
            speculative(model, tiny_head(model), PROMPT, 9, tree=parse_tree(text))
