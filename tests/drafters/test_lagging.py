"""The lagging draft cache: the same text, one slot a round, and true positions."""

from typing import ClassVar

import mlx.core as mx
import pytest
from helpers import PROMPT, plain, speculative, tiny_head, tiny_llama

from mlx_eagle.drafters.eagle3 import Eagle3Drafter
from mlx_eagle.drafters.tree import TreeShape

MODEL = tiny_llama()


class Spy(Eagle3Drafter):
    """Records the positions and rows of every head forward."""

    calls: ClassVar[list] = []

    def _forward(self, tokens, states, positions=None, mask=None):
        self.calls.append((tokens.shape[0], None if positions is None else positions.tolist()))
        return super()._forward(tokens, states, positions, mask)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_text_is_the_targets_own(k):
    drafter = tiny_head(MODEL).with_draft_cache("lagging")
    tokens, stats = speculative(MODEL, drafter, PROMPT, 30, num_draft_tokens=k)
    assert tokens == plain(MODEL, PROMPT, 30)
    assert stats.num_head_forwards == stats.num_drafted


def test_one_row_a_round_at_its_true_position():
    exact = tiny_head(MODEL)
    spy = Spy(exact.head, exact._embed, exact.taps, exact.to_target).with_draft_cache("lagging")
    Spy.calls = []
    _, _stats = speculative(MODEL, spy, PROMPT, 20, num_draft_tokens=1)
    prefill, root, first, *rounds = Spy.calls
    n = len(PROMPT)
    assert prefill == (n - 2, list(range(n - 2)))
    assert root == (1, [n - 2])
    assert all(rows == 1 for rows, _ in [first, *rounds])
    # k = 1 has accept passes only: one a round, at the position of the newest pair.
    positions = [p for _, (p,) in [first, *rounds]]
    assert positions[0] == n - 1
    assert positions == sorted(set(positions))
    assert positions[-1] <= n - 1 + 20


def test_without_accepted_drafts_both_caches_agree():
    """Where nothing is accepted nothing lags, so both modes draft the same."""
    exact = tiny_head(MODEL)
    drafts = []
    for mode in ("exact", "lagging"):
        drafter = exact.with_draft_cache(mode).begin()
        features = mx.random.normal((6, 3 * 64), key=mx.random.key(1))
        drafter.extend(mx.array([1, 2, 3]), features[:3])
        for i in range(3):
            drafter.extend(mx.array([7 + i]), features[3 + i : 4 + i], last=mx.array(0))

        def pick(logits, ids):
            return mx.argmax(logits, axis=-1)

        drafts.append(drafter.propose(4, pick).tokens.tolist())
    assert drafts[0] == drafts[1]


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="give 'exact' or 'lagging'"):
        tiny_head(MODEL).with_draft_cache("late")
    with pytest.raises(ValueError, match="do not support a lagging draft cache"):
        drafter = tiny_head(MODEL).with_draft_cache("lagging")
        speculative(MODEL, drafter, PROMPT, 5, tree=TreeShape.parse("2x2:4"))
