"""What the loop emits under rejection sampling, against the target alone, and with broken rules.

The vocabulary is so small that every text of three tokens has a probability that can be computed,
and is seen often enough. Targets are a table, and a real one with a real head and their caches.
"""

import itertools
from collections import Counter

import markov
import mlx.core as mx
import pytest
from grids import thorough
from helpers import tiny_head, tiny_llama

from mlx_eagle.decoding import rejection
from mlx_eagle.decoding.loop import speculative_generate_step
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.tree import parse_tree

LENGTH, TEMP = 3, 1.4
LLAMA = tiny_llama(seed=3, vocab_size=6)
PAIRS = {
    "table": (markov.TARGET, markov.DRAFTER, [markov.START], markov.VOCAB),
    "llama": (LLAMA, tiny_head(LLAMA, seed=5), [1, 4, 0, 2], 6),  # the head drafts three of six
}
SHAPES = {
    "k=2": {"num_draft_tokens": 2},
    **{text: {"tree": parse_tree(text)} for text in ("2x2:4", "3x2:7", "3/2+1")},
}


def exact_distribution(pair: str) -> dict[tuple[int, ...], float]:
    """Of the first tokens, by the target alone: one text after the other, no cache, no head."""
    target, _, prompt, vocab = PAIRS[pair]
    found = {}
    for text in itertools.product(range(vocab), repeat=LENGTH):
        rows = target(mx.array([prompt + list(text)]))[0, len(prompt) - 1 : -1]
        p = mx.softmax(rows / TEMP, axis=-1)
        found[text] = mx.prod(p[mx.arange(LENGTH), mx.array(text)]).item()
    return found


def chi_square(pair: str, shape: str, num_runs: int) -> tuple[float, float, float]:
    """The statistic, what it stays below in 999 of 1000 cases, and how often drafts were kept.

    Texts that are expected fewer than five times are one class.
    """
    target, drafter, prompt, _ = PAIRS[pair]
    counts: Counter = Counter()
    kept = 0
    for seed in range(num_runs):
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
    exact = exact_distribution(pair)
    often = [text for text, p in exact.items() if num_runs * p >= 5]
    classes = [(counts[text], num_runs * exact[text]) for text in often]
    classes.append((num_runs - sum(c for c, _ in classes), num_runs - sum(e for _, e in classes)))
    statistic = sum((count - expected) ** 2 / expected for count, expected in classes)
    df = len(classes) - 1
    # Wilson and Hilferty's approximation of the 0.999 quantile.
    return statistic, df * (1 - 2 / (9 * df) + 3.09 * (2 / (9 * df)) ** 0.5) ** 3, kept / num_runs


def broken(what: str):
    """``try_in_turn`` in plain Python, row by row, with a mistake; "nothing": without one."""

    def try_in_turn(p, q, ids, children, coins):
        kept, left = [], []
        columns = list(range(p.shape[1])) if ids is None else ids.tolist()
        for p_row, q_row, tried, coin in zip(
            p.tolist(), q.tolist(), children.tolist(), coins.tolist()
        ):
            rest, drawn = list(p_row), [0.0] * len(p_row)
            for column, x in zip(columns, q_row):
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
                    rest = [max(0.0, a - b) for a, b in zip(rest, drawn)]
                if what != "not normalized":
                    rest = [a / (sum(rest) or 1.0) for a in rest]
                if what != "with replacement":
                    drawn[token] = 0.0
                drawn = [b / (sum(drawn) or 1.0) for b in drawn]
            kept.append(outcome)
            left.append(rest if sum(rest) > 0 else p_row)
        return mx.array(kept), mx.array(left)

    return try_in_turn


def num_runs(request: pytest.FixtureRequest) -> int:
    return 4000 if request.node.get_closest_marker("exhaustive") else 300


@pytest.mark.parametrize("shape", thorough(SHAPES, "2x2:4"))
@pytest.mark.parametrize("pair", thorough(PAIRS, "table"))
def test_the_first_tokens_have_the_targets_distribution(request, pair, shape):
    statistic, most, kept = chi_square(pair, shape, num_runs(request))
    assert statistic < most
    assert kept > 0.1


MISTAKES = ["nothing", "no division", "rest of p", "not normalized", "with replacement"]


@pytest.mark.parametrize("shape", thorough(SHAPES, "2x2:4"))
@pytest.mark.parametrize("what", thorough(MISTAKES, "rest of p"))
@pytest.mark.parametrize("pair", thorough(PAIRS, "table"))
def test_a_broken_rule_is_seen(request, monkeypatch, pair, what, shape):
    if shape == "k=2" and what in ("not normalized", "with replacement"):
        pytest.skip("there is no second child in a chain")
    monkeypatch.setattr(rejection, "try_in_turn", broken(what))
    statistic, most, _ = chi_square(pair, shape, num_runs(request))
    assert (statistic < most) == (what == "nothing")
