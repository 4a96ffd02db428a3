"""Texts sampled with each kind of drafter: distributed as the target's.

Under rejection each token's q is that which it was drawn from: independent of the others for
DFlash, given the token before for DSpark and DFlash2, and 0 outside the candidates.
"""

import itertools
from collections import Counter
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from assistants import tiny_assistant, tiny_gemma4
from block_twin import tiny_dflash, tiny_dflash2, tiny_dspark
from chi_square import is_far_off
from drafter_pairs import tiny_mtp, tiny_qwen3_next
from helpers import tiny_head, tiny_llama

from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.base import Drafter

LENGTH, TEMP = 3, 1.4
SIZES = {"head_dim": 8, "intermediate_size": 32}
TARGET = tiny_llama(seed=12, vocab_size=6, num_hidden_layers=3, hidden_size=32, **SIZES)
PROMPT = [1, 4, 0, 2]
SMALL = {"head_dim": 8, "intermediate_size": 32, "mask_token_id": 3, "block_size": 4}
HYBRID = tiny_qwen3_next(seed=12, vocab_size=6)
GEMMA = tiny_gemma4(seed=12, vocab_size=6, vocab_size_per_layer_input=6, hidden_size=32)
PAIRS: dict[str, tuple[nn.Module, Drafter]] = {
    "dflash": (TARGET, tiny_dflash(TARGET, **SMALL)),
    "dspark": (TARGET, tiny_dspark(TARGET, **SMALL)),
    "dflash2": (TARGET, tiny_dflash2(TARGET, **SMALL, top_k=3)),
    "mtp": (HYBRID, tiny_mtp(HYBRID)),
    "eagle3": (TARGET, tiny_head(TARGET)),
    "assistant": (GEMMA, tiny_assistant(GEMMA)),
}
# Two of the six tokens, and with them those of the prompt: 5 is never drafted.
FEW = np.array([1, 3])
PAIRS |= {
    f"{name}, few tokens": (PAIRS[name][0], PAIRS[name][1].with_draft_vocab(FEW))
    for name in ("mtp", "dflash")
}


@lru_cache
def exact_distribution(name: str) -> dict[tuple[int, ...], float]:
    """Of the first tokens, by the target alone: all texts in one pass, no cache."""
    texts = list(itertools.product(range(6), repeat=LENGTH))
    tokens = mx.array([PROMPT + list(text) for text in texts])
    rows = PAIRS[name][0](tokens)[:, len(PROMPT) - 1 : -1]
    p = mx.softmax(rows / TEMP, axis=-1)
    chosen = mx.take_along_axis(p, mx.array(texts)[..., None], axis=-1)
    return dict(zip(texts, mx.prod(chosen, axis=(1, 2)).tolist(), strict=True))


def sampled(name: str, rule: str, num_runs: int, **shape) -> tuple[Counter, float]:
    """How often each text came, and how many drafts were kept in a run."""
    counts: Counter = Counter()
    kept = 0
    for seed in range(num_runs):
        steps = speculative_generate_step(
            mx.array(PROMPT),
            *PAIRS[name],
            max_tokens=LENGTH,
            sampler=Sampling(TEMP, seed=seed),
            acceptance=rule,
            **shape or {"num_draft_tokens": 2},
        )
        made = list(steps)
        counts[tuple(token for token, _, _ in made)] += 1
        kept += sum(from_draft for _, _, from_draft in made)
    return counts, kept / num_runs


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_runs", [150, 3000], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_the_first_tokens_have_the_targets_distribution(name, num_runs):
    counts, kept = sampled(name, "reject", num_runs)
    assert not is_far_off(exact_distribution(name), counts)
    assert kept > 0.1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name, tree", [("dflash", "2x2:4"), ("dspark", "2/1+1"), ("dflash2", "2x2:4")]
)
def test_trees_of_blocks_under_rejection(name, tree):
    counts, kept = sampled(name, "reject", 300, tree=tree)
    assert not is_far_off(exact_distribution(name), counts)
    assert kept > 0.1


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", ["coupled", "match"])
@pytest.mark.parametrize("name", PAIRS)
def test_the_other_rules(name, rule):
    counts, kept = sampled(name, rule, 600)
    assert not is_far_off(exact_distribution(name), counts)
    assert kept > 0.05
