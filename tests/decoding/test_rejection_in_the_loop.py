"""What the loop emits under rejection sampling, against the target alone, and with broken rules.

The vocabulary is so small that every text of three tokens has a probability that can be computed,
and is seen often enough. Targets are a table, and a real one with a real head and their caches.
"""

import itertools
from collections import Counter
from functools import cache

import markov
import mlx.core as mx
import pytest
from assistants import FULL, LARGE, SLIDING, tiny_assistant, tiny_gemma4
from chi_square import is_far_off
from grids import thorough
from helpers import tiny_head, tiny_llama

from mlx_eagle.decoding import rejection
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.tree import parse_tree

LENGTH, TEMP = 3, 1.4
# Few layers and numbers, for a case runs them some 10 000 times; and seeds with which the two
# differ so much that every mistake moves the first token's distribution by a tenth in chi-square
# per run, as its enumeration says.
SIZES = {"head_dim": 8, "intermediate_size": 32}
LLAMA = tiny_llama(seed=12, vocab_size=6, num_hidden_layers=3, hidden_size=32, **SIZES)
GEMMA = tiny_gemma4(
    seed=12,
    vocab_size=6,
    num_hidden_layers=2,
    layer_types=[SLIDING, FULL],
    **{**LARGE, **SIZES, "hidden_size": 32, "global_head_dim": 8},
)
CLUSTERS = {"num_centroids": 3, "centroid_top_k": 2}
PAIRS = {
    "table": (markov.TARGET, markov.DRAFTER, [markov.START], markov.VOCAB),
    # The head drafts three of six.
    "llama": (LLAMA, tiny_head(LLAMA, seed=42, **SIZES), [1, 4, 0, 2], 6),
    # Which four of six an assistant with clusters can draft differs from step to step.
    "gemma": (
        GEMMA,
        tiny_assistant(GEMMA, layer_types=(SLIDING, FULL), **CLUSTERS),
        [1, 4, 0, 2],
        6,
    ),
}
SHAPES = {
    "k=2": {"num_draft_tokens": 2},
    **{text: {"tree": parse_tree(text)} for text in ("2x2:4", "3x2:7", "3/2+1")},
}


@cache
def exact_distribution(pair: str) -> dict[tuple[int, ...], float]:
    """Of the first tokens, by the target alone: all texts in one pass, no cache, no head."""
    target, _, prompt, vocab = PAIRS[pair]
    texts = list(itertools.product(range(vocab), repeat=LENGTH))
    rows = target(mx.array([prompt + list(text) for text in texts]))[:, len(prompt) - 1 : -1]
    p = mx.softmax(rows / TEMP, axis=-1)
    chosen = mx.take_along_axis(p, mx.array(texts)[..., None], axis=-1)
    return dict(zip(texts, mx.prod(chosen, axis=(1, 2)).tolist(), strict=True))


def look(pair: str, shape: str, looks: list[int]) -> tuple[bool, float]:
    """Whether what the loop emits is far off after so many runs, or after fewer; drafts per run.

    What is right has to stand every look; what is wrong need not be run to the end.
    """
    target, drafter, prompt, _ = PAIRS[pair]
    exact = exact_distribution(pair)
    counts: Counter = Counter()
    kept = 0
    for seed in range(looks[-1]):
        steps = speculative_generate_step(
            mx.array(prompt),
            target,
            drafter,
            max_tokens=LENGTH,
            sampler=Sampling(TEMP, seed=seed),
            acceptance="reject",
            **SHAPES[shape],
        )
        made = list(steps)
        counts[tuple(token for token, _, _ in made)] += 1
        kept += sum(from_draft for _, _, from_draft in made)
        if counts.total() in looks and is_far_off(exact, counts):
            return True, kept / counts.total()
    return False, kept / looks[-1]


def broken(what: str):
    """``try_in_turn`` in plain Python, row by row, with a mistake; "nothing": without one."""

    def try_in_turn(p, q, ids, children, coins):
        kept, left = [], []
        columns = list(range(p.shape[1])) if ids is None else ids.tolist()
        for p_row, q_row, tried, coin in zip(
            p.tolist(), q.tolist(), children.tolist(), coins.tolist(), strict=True
        ):
            rest, drawn = list(p_row), [0.0] * len(p_row)
            for column, x in zip(columns, q_row, strict=True):
                drawn[column] = x
            outcome = -1
            for i, child in enumerate(tried):
                token = columns[child]
                if child < 0 or drawn[token] == 0:
                    continue
                chance = rest[token] if what == "no division" else rest[token] / drawn[token]
                if coin[i] < chance:
                    outcome = i
                    break
                if what != "rest of p":
                    rest = [max(0.0, a - b) for a, b in zip(rest, drawn, strict=True)]
                if what != "not normalized":
                    rest = [a / (sum(rest) or 1.0) for a in rest]
                if what != "with replacement":
                    drawn[token] = 0.0
                drawn = [b / (sum(drawn) or 1.0) for b in drawn]
            kept.append(outcome)
            left.append(rest if sum(rest) > 0 else p_row)
        return mx.array(kept), mx.array(left)

    return try_in_turn


@pytest.fixture
def looks(request: pytest.FixtureRequest) -> list[int]:
    """After how many runs to look; with gemma one takes as long as four with the table."""
    if request.node.get_closest_marker("exhaustive"):
        return [500, 1000, 2000, 4000]
    return [150] if "gemma" in request.node.name else [300]


FITTING = {f"{p}, {s}": (p, s) for p in PAIRS for s in SHAPES if p != "gemma" or s == "k=2"}


@pytest.mark.parametrize("case", thorough(FITTING, "table, 2x2:4"))
def test_the_first_tokens_have_the_targets_distribution(looks, case):
    far_off, kept = look(*FITTING[case], looks)
    assert not far_off
    assert kept > 0.1


MISTAKES = ["nothing", "no division", "rest of p", "not normalized", "with replacement"]
CASES = {
    f"{what}, {shape}": (what, shape)
    for shape in SHAPES
    # There is no second child in a chain.
    for what in (MISTAKES[:3] if shape == "k=2" else MISTAKES)
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pair", ["table", "llama"])
def test_a_broken_rule_is_seen(looks, monkeypatch, pair, case):
    what, shape = CASES[case]
    monkeypatch.setattr(rejection, "try_in_turn", broken(what))
    far_off, _ = look(pair, shape, looks)
    assert far_off == (what != "nothing")
