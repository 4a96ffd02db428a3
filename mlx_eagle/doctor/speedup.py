"""Speedup to expect of a head, computed from the table of machines; nothing is measured."""

from ..decoding.pass_costs import TargetWeights
from ..drafters.pairs import HEAD_SHARE
from ..system.device import LENGTHS, Machine

ACCEPTANCES = (0.5437, 0.8105)
"""Probabilities that a draft is accepted after those before it: tau is 2 and 3 at k = 3."""
DRAFT_STEP = HEAD_SHARE - 1
"""Plain steps that the head takes for one more token: it reads this share of the weights."""


def expected_speedup(machine: Machine, weights: TargetWeights) -> tuple[float, float]:
    """The lowest and the highest speedup for tau of 2 to 3, each with the best k of ``LENGTHS``.

    It is tau / (c(k + 1) + k d), without the host's part of a round; where that is below 1,
    ``auto`` turns drafting off, and it is 1.
    """
    costs = {k: weights.pass_cost(machine, k + 1) + k * DRAFT_STEP for k in LENGTHS}
    low, high = (
        max(1.0, *(sum(acceptance**i for i in range(k + 1)) / costs[k] for k in costs))
        for acceptance in ACCEPTANCES
    )
    return low, high


def speedup_words(machine: Machine, weights: TargetWeights) -> str:
    """ "1.4 to 1.9x"; "1.0x" where no draft pays."""
    low, high = (f"{speedup:.1f}" for speedup in expected_speedup(machine, weights))
    return f"{low}x" if low == high else f"{low} to {high}x"
