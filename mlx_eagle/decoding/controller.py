"""What is drafted next: always the same, or whatever is fastest (``auto``).

Plain numbers only. What a round costs comes from ``calibrate.py``, what it brings from the
rounds so far: E tokens per round of k against t(k) seconds, beside one token per plain step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

PRIOR, PRIOR_WEIGHT = 1 / 3, 8.0  # acceptance before anything was seen, and its weight in rounds
MEMORY = 0.98  # what a round's evidence weighs, one round later
TRIAL_ROUNDS = 6  # before drafting is first turned off, and in every probe
TRIAL_LOSS = 1.5  # plain steps that a trial may lose; then it ends at once
PROBE_BUDGET = 0.01  # of the time of plain decoding, spent on probes while drafting is off
FEWEST_PLAIN, MOST_PLAIN = 64, 1024  # tokens between two probes
ALMOST_ALWAYS = 0.9  # the highest acceptance that can be expected of any drafter


def expected_tokens(alphas: Sequence[float], size: int) -> float:
    """E of a chain of ``size`` drafts: 1 + a1 + a1 a2 + ...; the last alpha is repeated.

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
class Ways:
    """How a round is computed where two ways lead to the same numbers: what is done, if true.

    ``splits_attention``: see ``target.attention_parts``; ``keeps_tail``: ``drafters.tail``.
    """

    splits_attention: bool = False
    keeps_tail: bool = False


@dataclass(frozen=True)
class RoundCosts:
    """Seconds: a step of pipelined plain decoding, and a round of each draft shape.

    ``failed`` are shapes that were asked for and cannot be run here. ``ways`` is how rounds were
    computed.
    """

    plain: float
    rounds: Mapping[DraftShape, float]
    failed: tuple[DraftShape, ...] = ()
    ways: Ways = Ways()

    @property
    def longest(self) -> int:
        return max((shape.size for shape in self.rounds if shape.tree is None), default=0)

    def speedup(self, shape: DraftShape, num_tokens: float) -> float:
        """Over plain decoding, where a round of ``shape`` emits so many tokens."""
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
    """What rounds cost for one request and for ``batch_size`` of them in shared passes.

    Fewer shapes may be known of those. Costs of batches between the two, and of lengths between
    two that were measured, lie on a line.
    """

    alone: RoundCosts
    together: RoundCosts
    batch_size: int

    def of(self, batch_size: int) -> RoundCosts:
        """The costs of a round for so many requests, at most ``batch_size``, per round of all."""
        measured = {shape.size: seconds for shape, seconds in self.together.rounds.items()}

        def cost(alone: float, together: float) -> float:
            return on_line({1: alone, self.batch_size: together}, batch_size)

        known = [k for k in range(min(measured, default=1), self.together.longest + 1)]
        rounds = {
            shape: cost(self.alone.rounds[shape], on_line(measured, shape.size))
            for shape in map(DraftShape, known)
            if shape in self.alone.rounds
        }
        return RoundCosts(cost(self.alone.plain, self.together.plain), rounds)


class Controller(Protocol):
    """Decides what is drafted."""

    drafting_off: bool
    """Whether decoding is plain for now, so that the drafter may fall behind."""

    events: "list[DraftingEvent]"

    def next_shape(self, num_tokens: int) -> DraftShape:
        """The next draft, after so many tokens; of size 0 for a plain step."""

    def record(self, shape: DraftShape, *num_accepted: int) -> None:
        """How much of a draft of that shape was accepted; in a batch, of one per request."""

    def update_costs(self, costs: RoundCosts) -> None:
        """Go on with other costs of the same shapes."""


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
        """Nothing depends on them."""


OFF, PROBE, ON = "drafting off", "probe", "drafting on"


@dataclass(frozen=True)
class DraftingEvent:
    """Drafting was turned off, tried again or turned on again, after ``num_tokens`` tokens."""

    num_tokens: int
    what: str  # drafting off | probe | drafting on
    reason: str


@dataclass
class Trial:
    """A few rounds that are drafted whatever they bring, before what they showed counts.

    The first one begins with the generation; later ones are probes while drafting is off.
    """

    is_probe: bool
    rounds_left: int = TRIAL_ROUNDS
    lost: float = 0.0  # plain steps, against plain decoding

    @property
    def has_ended(self) -> bool:
        return self.rounds_left <= 0 or self.lost > TRIAL_LOSS

    def record(self, cost: float, num_tokens: float) -> None:
        """Count a round that took as long as ``cost`` plain steps and emitted so many tokens."""
        self.rounds_left -= 1
        self.lost += cost - num_tokens


@dataclass
class AdaptiveController:
    """The fastest shape by what was accepted lately; plain decoding where no draft is faster.

    Acceptance in chains is kept by position, given that the position before was accepted, and
    of trees as tokens per round. Both fade, so that they follow the text. While drafting is off, a
    few rounds are drafted now and then to see whether the text has changed; how often follows
    from what they cost. A batch has one controller: what its requests accept is pooled, a round is
    one round however many share it, and what is lost or gained is that of the mean request.
    """

    costs: RoundCosts
    drafting_off: bool = False
    events: list[DraftingEvent] = field(default_factory=list)
    is_hopeless: bool = False  # at these costs no draft can be faster, whatever is accepted
    _num_tokens: int = 0
    _accepted: list[float] = field(default_factory=list)
    _reached: list[float] = field(default_factory=list)
    # Tokens emitted in so many rounds.
    _of_trees: dict[DraftShape, tuple[float, float]] = field(default_factory=dict)
    _trial: Trial | None = field(default_factory=lambda: Trial(is_probe=False))
    _plain_left: float = 0.0

    def __post_init__(self) -> None:
        self._accepted = [0.0] * self.costs.longest
        self._reached = [0.0] * self.costs.longest
        trees = [shape for shape in self.costs.rounds if shape.tree is not None]
        self._of_trees = {shape: (0.0, 0.0) for shape in trees}
        gains = {shape: self._gain(shape, [ALMOST_ALWAYS]) for shape in self.costs.rounds}
        if not gains:
            self.is_hopeless = True
            self._turn_off("no draft can be verified on this device", float("inf"))
            return
        shape = max(gains, key=gains.get)
        if gains[shape] < 1.0:
            cost = self.costs.rounds[shape] / self.costs.plain
            self.is_hopeless = True
            self._turn_off(
                f"a round of {shape} drafts costs {cost:.2f} plain steps, so it would be slower "
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
        """See ``Controller.next_shape``."""
        self._num_tokens = num_tokens
        shape, gain = self._best()
        if not self.drafting_off and self._trial is None and gain < 1.0:
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
        self.drafting_off, self._trial = False, Trial(is_probe=True)
        self._fade(0.3)  # what the probe finds shall outweigh what was known
        self._note(PROBE, "to see whether drafts are accepted now")
        return shape

    def record(self, shape: DraftShape, *num_accepted: int) -> None:
        """See ``Controller.record``."""
        self._fade(MEMORY)
        for kept in num_accepted:
            self._observe(shape, kept)
        if self._trial is None:
            return
        cost = self.costs.rounds.get(shape, self.costs.plain)  # unknown: a tree cut at the end
        mean_tokens = sum(num_accepted) / len(num_accepted) + 1
        self._trial.record(cost / self.costs.plain, mean_tokens)
        if not self._trial.has_ended:
            return
        _, gain = self._best()
        if self._trial.is_probe and gain >= 1.0:
            self._note(ON, f"the probe promises {gain:.2f}x")
        self._trial = None

    def update_costs(self, costs: RoundCosts) -> None:
        """See ``Controller.update_costs``; drafts again where the new costs make that faster."""
        self.costs = costs
        shape, gain = self._best()
        if self.drafting_off and gain >= 1.0:
            self.drafting_off = self.is_hopeless = False
            self._note(ON, f"a round costs less now, drafts of {shape} promise {gain:.2f}x")

    def _observe(self, shape: DraftShape, num_accepted: int) -> None:
        if shape.tree is None:
            for i in range(min(num_accepted + 1, shape.size)):
                self._reached[i] += 1
                self._accepted[i] += i < num_accepted
        elif shape in self._of_trees:
            tokens, rounds = self._of_trees[shape]
            self._of_trees[shape] = tokens + num_accepted + 1, rounds + 1

    def _best(self) -> tuple[DraftShape, float]:
        """The shape with the greatest gain, and the gain; plain decoding where there is none."""
        alphas = self.alphas
        gains = {shape: self._gain(shape, alphas) for shape in self.costs.rounds}
        if not gains:
            return DraftShape(0), 0.0
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
        # Of every round the part that brings nothing; and the start, when the pipeline drains
        # and the drafter catches up.
        lost = TRIAL_ROUNDS * cost * (1 - gain) + cost
        return min(MOST_PLAIN, max(FEWEST_PLAIN, lost / PROBE_BUDGET))

    def _turn_off(self, reason: str, num_plain: float) -> None:
        self.drafting_off, self._plain_left = True, num_plain
        self._note(OFF, reason)

    def _note(self, what: str, reason: str) -> None:
        self.events.append(DraftingEvent(self._num_tokens, what, reason))
