"""PURE: what is drafted next: always the same, or what pays (``auto``).

Plain numbers only. What a round costs comes from ``calibrate.py``, what it brings from the
rounds so far: E tokens a round of k against t(k) seconds, beside one token a plain step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

PRIOR, PRIOR_WEIGHT = 1 / 3, 8.0  # acceptance before anything was seen, and its weight in rounds
MEMORY = 0.98  # what a round's evidence weighs, one round later
TRIAL_ROUNDS = 6  # before the first verdict, and in every probe
TRIAL_LOSS = 1.5  # plain steps that a trial may lose; then the verdict comes at once
PROBE_BUDGET = 0.01  # of the time of plain decoding, spent on probes while parked
FEWEST_PLAIN, MOST_PLAIN = 64, 1024  # tokens between two probes
ALMOST_ALWAYS = 0.9  # acceptance above which nobody would hope


def expected_tokens(alphas: Sequence[float], size: int) -> float:
    """E of a chain of ``size`` drafts: 1 + a1 + a1 a2 + ...; the last alpha goes on for ever.

    [0.8, 0.5], 3 -> 1 + 0.8 + 0.4 + 0.2
    """
    total, chance = 1.0, 1.0
    for i in range(size):
        chance *= alphas[min(i, len(alphas) - 1)] if alphas else 0.0
        total += chance
    return total


class TreeForm(Protocol):
    """What is asked of a tree here: its levels, and the most children a node has."""

    depth: int
    width: int


@dataclass(frozen=True)
class DraftShape:
    """What to draft next: a chain of ``size`` tokens, a tree of ``size`` levels, or nothing."""

    size: int
    tree: TreeForm | None = None

    def __str__(self) -> str:
        return str(self.size) if self.tree is None else str(self.tree)


@dataclass(frozen=True)
class RoundCosts:
    """Seconds: a step of pipelined plain decoding, and a round of each plan."""

    plain: float
    rounds: Mapping[DraftShape, float]

    @property
    def longest(self) -> int:
        return max(shape.size for shape in self.rounds if shape.tree is None)

    def speedup(self, shape: DraftShape, num_tokens: float) -> float:
        """Over plain decoding, where a round of ``plan`` brings so many tokens."""
        return num_tokens * self.plain / self.rounds[shape]


def on_line(points: Mapping[int, float], x: int) -> float:
    """The value at ``x``, on the line between its neighbours among ``points``.

    {1: 1.0, 3: 2.0}, 2 -> 1.5
    """
    low = max(at for at in points if at <= x)
    high = min(at for at in points if at >= x)
    share = (x - low) / (high - low) if high > low else 0.0
    return points[low] + share * (points[high] - points[low])


@dataclass(frozen=True)
class BatchCosts:
    """What rounds cost for one text and for ``batch_size`` together, which may know fewer plans.

    Fewer texts than that, and lengths between two that were measured, lie on a line.
    """

    alone: RoundCosts
    together: RoundCosts
    batch_size: int

    def of(self, batch_size: int) -> RoundCosts:
        """The costs for so many texts, at most ``batch_size``; a round brings each its tokens."""
        measured = {shape.size: seconds for shape, seconds in self.together.rounds.items()}

        def cost(alone: float, together: float) -> float:
            return on_line({1: alone, self.batch_size: together}, batch_size)

        rounds = {
            DraftShape(k): cost(self.alone.rounds[DraftShape(k)], on_line(measured, k))
            for k in range(1, self.together.longest + 1)
        }
        return RoundCosts(cost(self.alone.plain, self.together.plain), rounds)


class Controller(Protocol):
    """Decides what is drafted."""

    drafting_off: bool
    """Whether decoding is plain for now, so that the drafter can be left behind."""

    events: "list[DraftingEvent]"

    def next_shape(self, num_tokens: int) -> DraftShape:
        """The next draft, after so many tokens; of size 0 for a plain step."""

    def record(self, shape: DraftShape, *num_accepted: int) -> None:
        """What became of a draft of one token or more; in a batch, of one in every text."""

    def update_costs(self, costs: RoundCosts) -> None:
        """Go on at other costs of the same plans."""


@dataclass
class FixedController:
    """Always the same."""

    shape: DraftShape
    drafting_off: bool = False
    events: "list[DraftingEvent]" = field(default_factory=list)

    def next_shape(self, num_tokens: int) -> DraftShape:
        return self.shape

    def record(self, shape: DraftShape, *num_accepted: int) -> None:
        """Nothing depends on it."""

    def update_costs(self, costs: RoundCosts) -> None:
        """Nor on that."""


@dataclass(frozen=True)
class DraftingEvent:
    """Drafting was parked, probed or taken up again, after ``num_tokens`` tokens."""

    num_tokens: int
    what: str  # park | probe | wake
    reason: str


@dataclass
class AdaptiveController:
    """What pays best by what was accepted lately; plain decoding where nothing pays.

    Acceptance in chains is kept by position, given that the position before was accepted, and
    of trees as tokens a round. Both fade, so that they follow the text. While parked, a few
    rounds are drafted now and then to see whether the text has changed; how often follows from
    what they cost. In a batch all texts have one pace: what they accept is pooled, a round is one
    round however many share it, and what is lost or gained is that of the mean text.
    """

    costs: RoundCosts
    drafting_off: bool = False
    events: list[DraftingEvent] = field(default_factory=list)
    never_pays: bool = False  # parked for good
    _num_tokens: int = 0
    _accepted: list[float] = field(default_factory=list)
    _reached: list[float] = field(default_factory=list)
    _of_trees: dict[DraftShape, tuple[float, float]] = field(default_factory=dict)  # tokens, rounds
    _trial: int = TRIAL_ROUNDS
    _lost: float = 0.0
    _plain_left: float = 0.0

    def __post_init__(self) -> None:
        self._accepted = [0.0] * self.costs.longest
        self._reached = [0.0] * self.costs.longest
        self._of_trees = {shape: (0.0, 0.0) for shape in self.costs.rounds if shape.tree is not None}
        always = [ALMOST_ALWAYS]
        gains = {shape: self._gain(shape, always) for shape in self.costs.rounds}
        shape = max(gains, key=gains.get)
        if gains[shape] < 1.0:
            cost = self.costs.rounds[shape] / self.costs.plain
            self.never_pays = True
            self._turn_off(
                f"a round of {shape} drafts costs {cost:.2f} plain steps, so it would not pay "
                f"even with {ALMOST_ALWAYS:.0%} accepted",
                float("inf"),
            )

    @property
    def alphas(self) -> list[float]:
        """Acceptance by position, given that the position before was accepted.

        What is little known leans on the position before: with EAGLE-3 they differ little.
        """
        alphas, before = [], PRIOR
        for accepted, reached in zip(self._accepted, self._reached):
            before = (accepted + PRIOR_WEIGHT * before) / (reached + PRIOR_WEIGHT)
            alphas.append(before)
        return alphas

    def next_shape(self, num_tokens: int) -> DraftShape:
        """See ``Pace.next_plan``."""
        self._num_tokens = num_tokens
        shape, gain = self._best()
        if not self.drafting_off and self._trial <= 0 and gain < 1.0:
            self._turn_off(
                f"with {self.alphas[0]:.0%} of first drafts accepted, the best length ({shape}) "
                f"would give {gain:.2f}x",
                self._interval(shape, gain),
            )
        if not self.drafting_off:
            return shape
        self._plain_left -= 1
        if self._plain_left >= 0:
            return DraftShape(0)
        self.drafting_off, self._trial, self._lost = False, TRIAL_ROUNDS, 0.0
        self._fade(0.3)  # what the probe finds shall outweigh what was known
        self._note("probe", "to see whether drafts are accepted now")
        return shape

    def record(self, shape: DraftShape, *num_accepted: int) -> None:
        """See ``Pace.record``."""
        self._fade(MEMORY)
        for kept in num_accepted:
            self._observe(shape, kept)
        cost = self.costs.rounds.get(shape, self.costs.plain)  # unknown: a tree cut at the end
        self._lost += cost / self.costs.plain - (sum(num_accepted) / len(num_accepted) + 1)
        self._trial = 0 if self._lost > TRIAL_LOSS and self._trial > 0 else self._trial - 1
        if self._trial == 0 and self.events:
            _, gain = self._best()
            if gain >= 1.0:
                self._note("wake", f"the probe promises {gain:.2f}x")

    def update_costs(self, costs: RoundCosts) -> None:
        """See ``Pace.recost``; wakes at once where what was known would pay now."""
        self.costs = costs
        shape, gain = self._best()
        if self.drafting_off and gain >= 1.0:
            self.drafting_off = self.never_pays = False
            self._note("wake", f"a round costs less now, drafts of {shape} promise {gain:.2f}x")

    def _observe(self, shape: DraftShape, num_accepted: int) -> None:
        if shape.tree is None:
            for i in range(min(num_accepted + 1, shape.size)):
                self._reached[i] += 1
                self._accepted[i] += i < num_accepted
        elif shape in self._of_trees:
            tokens, rounds = self._of_trees[shape]
            self._of_trees[shape] = tokens + num_accepted + 1, rounds + 1

    def _best(self) -> tuple[DraftShape, float]:
        """The plan with the greatest gain, and the gain."""
        alphas = self.alphas
        gains = {shape: self._gain(shape, alphas) for shape in self.costs.rounds}
        shape = max(gains, key=gains.get)
        return shape, gains[shape]

    def _gain(self, shape: DraftShape, alphas: Sequence[float]) -> float:
        """Speedup over plain decoding at these acceptance rates of chains."""
        expected = expected_tokens(alphas, shape.size)
        if shape.tree is not None:
            # Before a shape was tried: some child of w is right more often than the first one.
            power = 1 + (shape.tree.width - 1) / 4
            expected = expected_tokens([1 - (1 - a) ** power for a in alphas], shape.size)
            tokens, rounds = self._of_trees[shape]
            expected = (tokens + PRIOR_WEIGHT * expected) / (rounds + PRIOR_WEIGHT)
        return self.costs.speedup(shape, expected)

    def _fade(self, factor: float) -> None:
        self._accepted = [factor * n for n in self._accepted]
        self._reached = [factor * n for n in self._reached]
        self._of_trees = {
            shape: (factor * tokens, factor * rounds)
            for shape, (tokens, rounds) in self._of_trees.items()
        }

    def _interval(self, shape: DraftShape, gain: float) -> float:
        """Plain tokens until the next probe, so that probes stay within their budget."""
        cost = self.costs.rounds[shape] / self.costs.plain
        # Of every round the part that brings nothing; and waking, when the pipeline drains and
        # the drafter catches up.
        lost = TRIAL_ROUNDS * cost * (1 - gain) + cost
        return min(MOST_PLAIN, max(FEWEST_PLAIN, lost / PROBE_BUDGET))

    def _turn_off(self, reason: str, num_plain: float) -> None:
        self.drafting_off, self._plain_left = True, num_plain
        self._note("park", reason)

    def _note(self, what: str, reason: str) -> None:
        self.events.append(DraftingEvent(self._num_tokens, what, reason))
