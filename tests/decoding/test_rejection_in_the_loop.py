"""What the loop emits under rejection sampling, against the target alone, and with broken rules.

Target and head are real ones with caches, over so small a vocabulary that every text of three
tokens has a probability that can be computed, and seen often enough.
"""

import itertools
from collections import Counter

import mlx.core as mx
import pytest
from grids import thorough
from helpers import tiny_head, tiny_llama

from mlx_eagle.decoding import rejection
from mlx_eagle.decoding.loop import speculative_generate_step
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.tree import parse_tree

VOCAB, LENGTH, TEMP, PROMPT = 6, 3, 1.6, [1, 4, 0, 2]
TARGET = tiny_llama(seed=3, vocab_size=VOCAB, num_hidden_layers=6)
HEAD = tiny_head(TARGET, seed=5)  # drafts three of the six tokens
SHAPES = {"k=2": {"num_draft_tokens": 2}, **{t: {"tree": t} for t in ("2x2:4", "3x2:7", "3/2+1")}}


def exact_distribution() -> dict[tuple[int, ...], float]:
    """Of the first tokens, by the target alone: one text after the other, no cache, no head."""
    found = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        rows = TARGET(mx.array([PROMPT + list(text)]))[0, len(PROMPT) - 1 : -1]
        p = mx.softmax(rows / TEMP, axis=-1)
        found[text] = mx.prod(p[mx.arange(LENGTH), mx.array(text)]).item()
    return found


EXACT = exact_distribution()


def chi_square(num_runs: int, **options) -> tuple[float, float, float]:
    """The statistic, what it stays below in 999 of 1000 cases, and how often drafts were kept.

    Texts that are expected fewer than five times are one class.
    """
    counts: Counter = Counter()
    kept = 0
    for seed in range(num_runs):
        steps = speculative_generate_step(
            mx.array(PROMPT),
            TARGET,
            HEAD,
            max_tokens=LENGTH,
            sampler=Sampling(TEMP, seed=seed),
            acceptance="reject",
            **options,
        )
        made = list(steps)
        counts[tuple(token for token, _, _ in made)] += 1
        kept += sum(from_draft for _, _, from_draft in made)
    often = [text for text, p in EXACT.items() if num_runs * p >= 5]
    classes = [(counts[text], num_runs * EXACT[text]) for text in often]
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


@pytest.mark.parametrize("shape", thorough(SHAPES, "2x2:4"))
def test_the_first_tokens_have_the_targets_distribution(request, shape):
    num_runs = 3000 if request.node.get_closest_marker("exhaustive") else 150
    statistic, most, kept = chi_square(num_runs, **options_of(shape))
    assert statistic < most
    assert kept > 0.1


@pytest.mark.parametrize("shape", thorough(SHAPES, "2x2:4"))
@pytest.mark.parametrize(
    "what",
    thorough(
        ["nothing", "no division", "rest of p", "not normalized", "with replacement"],
        "no division",
    ),
)
def test_a_broken_rule_is_seen(request, monkeypatch, what, shape):
    if shape == "k=2" and what in ("not normalized", "with replacement"):
        pytest.skip("a chain has no second child")
    monkeypatch.setattr(rejection, "try_in_turn", broken(what))
    num_runs = 4000 if request.node.get_closest_marker("exhaustive") else 150
    statistic, most, _ = chi_square(num_runs, **options_of(shape))
    assert (statistic < most) == (what == "nothing")


def options_of(shape: str) -> dict:
    found = SHAPES[shape]
    return {"tree": parse_tree(found["tree"])} if "tree" in found else found
