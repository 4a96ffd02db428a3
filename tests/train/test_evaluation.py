"""Evaluation: rounds along a known text are those of a decoder that is played step by step."""

import numpy as np
import pytest

from mlx_eagle.train.evaluation import rounds_of


def played(hits: np.ndarray, num_drafts: int) -> int:
    """Decode a text round by round: draft, compare with the text, keep, add the target's token."""
    left = list(range(hits.shape[1]))
    rounds = 0
    while left:
        rounds += 1
        drafts = [bool(hits[depth, left[0]]) for depth in range(num_drafts)]
        right = drafts.index(False) if False in drafts else num_drafts
        left = left[right + 1 :]
    return rounds


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.95, 1.0])
def test_rounds_are_those_of_decoding(share):
    rng = np.random.default_rng(7)
    for num_slots in (0, 1, 2, 9, 40):
        hits = rng.random((5, num_slots)) < share
        for num_drafts in range(1, 6):
            assert rounds_of(hits, num_drafts) == played(hits, num_drafts)
