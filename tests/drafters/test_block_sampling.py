"""Texts sampled with drafters of blocks: distributed as the target's, under rejection.

Each token's q is that which it was drawn from: independent of the others for DFlash, given the
token before for DSpark and DFlash2, and 0 outside the candidates.
"""

import itertools
from collections import Counter

import mlx.core as mx
import pytest
from block_twin import tiny_dflash, tiny_dflash2, tiny_dspark
from chi_square import is_far_off
from grids import thorough
from helpers import tiny_llama

from mlx_eagle.decoding.loop import speculative_generate_step
from mlx_eagle.decoding.sampling import Sampling

LENGTH, TEMP = 3, 1.4
SIZES = {"head_dim": 8, "intermediate_size": 32}
TARGET = tiny_llama(seed=12, vocab_size=6, num_hidden_layers=3, hidden_size=32, **SIZES)
PROMPT = [1, 4, 0, 2]
SMALL = {"head_dim": 8, "intermediate_size": 32, "mask_token_id": 3, "block_size": 4}
DRAFTERS = {
    "dflash": tiny_dflash(TARGET, **SMALL),
    "dspark": tiny_dspark(TARGET, **SMALL),
    "dflash2": tiny_dflash2(TARGET, **SMALL, top_k=3),
}


def exact_distribution() -> dict[tuple[int, ...], float]:
    """Of the first tokens, by the target alone: all texts in one pass, no cache."""
    texts = list(itertools.product(range(6), repeat=LENGTH))
    rows = TARGET(mx.array([PROMPT + list(text) for text in texts]))[:, len(PROMPT) - 1 : -1]
    p = mx.softmax(rows / TEMP, axis=-1)
    chosen = mx.take_along_axis(p, mx.array(texts)[..., None], axis=-1)
    return dict(zip(texts, mx.prod(chosen, axis=(1, 2)).tolist(), strict=True))


@pytest.mark.parametrize(
    "num_runs", [150, pytest.param(3000, marks=pytest.mark.exhaustive)], ids=str
)
@pytest.mark.parametrize("name", thorough(DRAFTERS, "dspark"))
def test_the_first_tokens_have_the_targets_distribution(name, num_runs):
    counts: Counter = Counter()
    kept = 0
    for seed in range(num_runs):
        steps = speculative_generate_step(
            mx.array(PROMPT),
            TARGET,
            DRAFTERS[name],
            max_tokens=LENGTH,
            sampler=Sampling(TEMP, seed=seed),
            acceptance="reject",
            num_draft_tokens=2,
        )
        made = list(steps)
        counts[tuple(token for token, _, _ in made)] += 1
        kept += sum(from_draft for _, _, from_draft in made)
    assert not is_far_off(exact_distribution(), counts)
    assert kept / num_runs > 0.1
