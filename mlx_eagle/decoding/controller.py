"""What is drafted next: always the same, or whatever is fastest (``auto``).

Plain numbers only. What a round brings comes from the rounds so far, what it costs from
``live_costs.py``: E tokens per round of k against t(k) seconds, beside one token per plain step.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .accepted import MEMORY, Accepted
from .costs import PLAIN, DraftShape, RoundCosts
from .live_costs import ONCE, LiveCosts

TRIAL_ROUNDS = 6  # before drafting is first turned off, and in every probe
TRIAL_LOSS = 1.5  # plain steps that a trial may lose; then it ends at once
PROBE_BUDGET = 0.01  # of the time of plain decoding, spent on probes while drafting is off
FEWEST_PLAIN, MOST_PLAIN = 64, 1024  # tokens between two probes
TOO_SLOW = 0.98  # what drafts must promise to go on: acceptance is never known exactly
PATIENCE = 1.5  # plain steps that drafts must have lost as well, since they were last level
ALMOST_ALWAYS = 0.9  # the highest acceptance that can be expected of any drafter
TIMED_PLAIN = 5  # plain steps in a row that are timed, where their cost is not known
TIMED = 1.5  # recent times from which on a cost counts as known
SURE = 1.3  # gain from which on it may stay unseen whether plain steps cost what is remembered
WORTH_TRYING = 1.03  # of the best gain, that a shape of unknown cost must promise
TRYING_LOSS, TRYING_SHARE = 1.0, 0.015  # plain steps, and per token, that trying shapes may lose


class Controller(Protocol):
    """Decides what is drafted."""

    drafting_off: bool
    """Whether decoding is plain for now, so that the drafter may fall behind."""

    events: "list[DraftingEvent]"

    def next_shape(self, num_tokens: int) -> DraftShape:
        """The next draft, after so many tokens; of size 0 for a plain step."""

    def record(self, shape: DraftShape, *num_accepted: int) -> None:
        """How much of a draft of that shape was accepted; in a batch, of one per request."""

    def record_time(self, shape: DraftShape, seconds: float) -> None:
        """What a round of that shape has taken, from the end of the one before to its own."""

    def update_costs(self, costs: LiveCosts) -> None:
        """Go on with other costs of the same shapes."""

    def leave_out(self, shape: DraftShape, error: RuntimeError) -> bool:
        """Whether the text can go on without ``shape``, which has failed."""

    def close(self) -> None:
        """The text has ended."""


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

    def record_time(self, shape: DraftShape, seconds: float) -> None:
        """Nothing depends on it."""

    def update_costs(self, costs: LiveCosts) -> None:
        """Nothing depends on them."""

    def leave_out(self, shape: DraftShape, error: RuntimeError) -> bool:
        return False

    def close(self) -> None:
        """Nothing was learned."""


OFF, PROBE, ON = "drafting off", "probe", "drafting on"


@dataclass(frozen=True)
class DraftingEvent:
    """Drafting was turned off, tried again or turned on again, after ``num_tokens`` tokens."""

    num_tokens: int
    what: str  # drafting off | probe | drafting on
    reason: str


def failure_note(shape: DraftShape, error: BaseException | None) -> str:
    """What is said of a shape that is not drafted, in one line."""
    reason = (str(error).strip().splitlines() or ["no reason given"])[0]
    return f"Note: rounds that draft {shape} fail on this device and are left out ({reason})."


Rounds = list[tuple[DraftShape, float]]
"""Rounds that were drafted, each with the tokens that it emitted."""


def lost(rounds: Rounds, costs: RoundCosts) -> float:
    """How many plain steps these rounds have lost against plain decoding, as is known now."""
    took = sum(costs.rounds.get(shape, costs.plain) for shape, _ in rounds)
    return took / costs.plain - sum(num_tokens for _, num_tokens in rounds)


@dataclass
class Trial:
    """A few rounds that are drafted whatever they bring, before what they showed counts.

    The first one begins with the generation; later ones are probes while drafting is off.
    """

    is_probe: bool
    rounds: Rounds = field(default_factory=list)

    def has_ended(self, costs: RoundCosts) -> bool:
        if len(self.rounds) < 2:  # the first one's time is not comparable: it follows plain steps
            return False
        return len(self.rounds) >= TRIAL_ROUNDS or lost(self.rounds, costs) > TRIAL_LOSS


@dataclass
class AdaptiveController:
    """The fastest shape by what was accepted lately; plain decoding where no draft is faster.

    While drafting is off, a few rounds are drafted now and then to see whether the text has
    changed; how often follows from what they cost. Costs that are not known, or were not timed
    lately, are timed on the way: of plain steps by a few in a row, of a draft shape where it
    might be the fastest, as long as that loses little. A batch has one controller: what its
    requests accept is pooled, a round is one round however many share it, and what is lost or
    gained is that of the mean request.
    """

    costs: LiveCosts
    drafting_off: bool = False
    events: list[DraftingEvent] = field(default_factory=list)
    is_hopeless: bool = False  # at these costs no draft can be faster, whatever is accepted
    _accepted: Accepted = field(init=False)
    _num_tokens: int = 0
    _trial: Trial | None = field(default_factory=lambda: Trial(is_probe=False))
    _plain_left: float = 0.0
    _behind: float = 0.0  # plain steps lost by rounds since they were last level
    _is_timing: bool = False  # off for a few steps, to see what they cost
    _next_timing: int = 0  # tokens before which they are not timed again
    _trying: DraftShape | None = None
    _tried: Rounds = field(default_factory=list)  # to see what they cost

    def __post_init__(self) -> None:
        costs = self.costs.current
        self._accepted = Accepted(costs.rounds, self.costs.acceptance)
        gains = {shape: self._gain(shape, [ALMOST_ALWAYS]) for shape in costs.rounds}
        if not gains:
            self._give_up()
            return
        shape = max(gains, key=gains.get)
        if gains[shape] < 1.0 and self._is_timed(shape):
            cost = costs.rounds[shape] / costs.plain
            self.is_hopeless = True
            self._turn_off(
                f"a round of {shape} drafts costs {cost:.2f} plain steps, so it would be slower "
                f"even with {ALMOST_ALWAYS:.0%} accepted",
                float("inf"),
            )

    @property
    def alphas(self) -> list[float]:
        """Acceptance by position, given that the position before was accepted."""
        return self._accepted.alphas

    def next_shape(self, num_tokens: int) -> DraftShape:
        """See ``Controller.next_shape``."""
        self._num_tokens = self.costs.num_tokens = num_tokens
        if self.drafting_off:
            self._plain_left -= 1
            if self._plain_left >= 0:
                return PLAIN
            self._turn_on()
        shape, gain = self._best()
        if num_tokens >= self._next_timing and not self._knows_plain(gain):
            return self._time_plain()
        if self._trial is None and gain < TOO_SLOW and self._behind > PATIENCE:
            self._turn_off(
                f"with {self.alphas[0]:.0%} of first drafts accepted, the best length ({shape}) "
                f"would give {gain:.2f}x",
                self._interval(shape, gain) - 1,
            )
            return PLAIN
        self._trying = self._worth_trying(gain)
        return self._trying or shape

    def record(self, shape: DraftShape, *num_accepted: int) -> None:
        """See ``Controller.record``."""
        self._accepted.fade(MEMORY)
        for kept in num_accepted:
            self._accepted.observe(shape, kept)
            if shape.tree is None:
                self.costs.count_first(kept > 0)
        done = shape, sum(num_accepted) / len(num_accepted) + 1
        self._behind = max(0.0, self._behind + lost([done], self.costs.current))
        if shape == self._trying:
            self._tried.append(done)
        if self._trial is None:
            return
        self._trial.rounds.append(done)
        if not self._trial.has_ended(self.costs.current):
            return
        _, gain = self._best()
        if self._trial.is_probe and gain >= 1.0:
            self._behind = 0.0
            self._note(ON, f"the probe promises {gain:.2f}x")
        self._trial = None

    def record_time(self, shape: DraftShape, seconds: float) -> None:
        """See ``Controller.record_time``."""
        self.costs.record(shape, seconds)

    def update_costs(self, costs: LiveCosts) -> None:
        """See ``Controller.update_costs``; drafts again where the new costs make that faster."""
        self.costs = costs
        shape, gain = self._best()
        if self.drafting_off and gain >= 1.0:
            self.drafting_off = self.is_hopeless = self._is_timing = False
            self._behind = 0.0
            self._note(ON, f"a round costs less now, drafts of {shape} promise {gain:.2f}x")

    def leave_out(self, shape: DraftShape, error: RuntimeError) -> bool:
        """See ``Controller.leave_out``: it can if that shape never was drafted here.

        It is then drafted no more, which is said once.
        """
        if self.costs.has_worked(shape):
            return False
        if self.costs.leave_out(shape):
            print(failure_note(shape, error), file=sys.stderr)
            if not self.costs.current.rounds:
                self._give_up()
        return True

    def _give_up(self) -> None:
        self.is_hopeless = True
        self._turn_off("no draft can be verified on this device", float("inf"))

    def close(self) -> None:
        """See ``Controller.close``."""
        self.costs.close()

    def _is_timed(self, shape: DraftShape) -> bool:
        return self.costs.num_times(shape) >= TIMED

    def _knows_plain(self, gain: float) -> bool:
        """Whether the cost of plain steps is known well enough for drafts that promise ``gain``.

        That what is remembered of them is off shows in no round that drafts; so they are timed
        once in every text, after its trial, where it matters.
        """
        return self._is_timed(PLAIN) and (
            self._trial is not None
            or gain >= SURE
            or not self.costs.is_corrected
            or self.costs.was_timed(PLAIN)
        )

    def _time_plain(self) -> DraftShape:
        """A few plain steps in a row, one behind the other as where drafting is off."""
        self.drafting_off = self._is_timing = True
        self._plain_left = TIMED_PLAIN - 1
        self._next_timing = self._num_tokens + TIMED_PLAIN + FEWEST_PLAIN
        return PLAIN

    def _turn_on(self) -> None:
        """Draft again: where plain steps were timed as before, else for a probe."""
        self.drafting_off = False
        if self._is_timing:
            self._is_timing = False
            return
        self._trial = Trial(is_probe=True)
        self._accepted.fade(0.3)  # what the probe finds shall outweigh what was known
        self._note(PROBE, "to see whether drafts are accepted now")

    def _worth_trying(self, best: float) -> DraftShape | None:
        """A shape of unknown cost that might be faster than ``best``, if trying it loses little.

        While nothing is known of any draft it is the shortest one.
        """
        best, costs, alphas = max(best, 1.0), self.costs.current, self.alphas
        if max(map(self.costs.num_times, costs.rounds)) < ONCE:
            return min(costs.rounds, key=lambda shape: (shape.tree is not None, shape.size))
        left = TRYING_LOSS + TRYING_SHARE * self._num_tokens - lost(self._tried, costs)
        promises = {}
        for shape, cost in costs.rounds.items():
            if self._is_timed(shape):
                continue
            num_tokens = self._accepted.expected(shape, alphas)
            promise = num_tokens * costs.plain / self.costs.least(shape)
            if promise > WORTH_TRYING * best and cost / costs.plain - num_tokens / best <= left:
                promises[shape] = promise
        return max(promises, key=promises.get) if promises else None

    def _best(self) -> tuple[DraftShape, float]:
        """The shape with the greatest gain, and the gain; plain decoding where there is none."""
        alphas = self.alphas
        gains = {shape: self._gain(shape, alphas) for shape in self.costs.current.rounds}
        shape = max(gains, key=gains.get, default=PLAIN)
        return shape, gains.get(shape, 0.0)

    def _gain(self, shape: DraftShape, alphas: Sequence[float]) -> float:
        """Speedup over plain decoding at these acceptance rates of chains."""
        return self.costs.current.speedup(shape, self._accepted.expected(shape, alphas))

    def _interval(self, shape: DraftShape, gain: float) -> float:
        """Plain tokens until the next probe, so that probes stay within their budget."""
        cost = self.costs.current.rounds[shape] / self.costs.current.plain
        # Of every round the part that brings nothing; and the start, when the pipeline drains
        # and the drafter catches up.
        lost = TRIAL_ROUNDS * cost * (1 - gain) + cost
        return min(MOST_PLAIN, max(FEWEST_PLAIN, lost / PROBE_BUDGET))

    def _turn_off(self, reason: str, num_plain: float) -> None:
        self.drafting_off, self._plain_left, self._behind = True, num_plain, math.inf
        self._note(OFF, reason)

    def _note(self, what: str, reason: str) -> None:
        self.events.append(DraftingEvent(self._num_tokens, what, reason))
