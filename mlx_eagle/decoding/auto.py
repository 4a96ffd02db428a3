"""Draft lengths: always the same, or the fastest of chains, trees and plain steps (``auto``).

A round that drafts shape s emits E(s) tokens in t(s) seconds, a plain step one in t(plain):

    gain(s) = E(s) t(plain) / t(s)

and the shape with the greatest gain is drafted, none where that stays below 1. E comes from the
share of drafts kept lately at each place, of trees also from all that they emitted. t is told by
the rounds. Before there are any it is a curve c(s) known of the chip, and what a round takes is

    log t(s) = log c(s) + f(s) + p + e

with the pace p of the machine, a random walk; what the curve is off, f, a Gaussian process, part
of which goes with log c (Rasmussen and Williams 2006, equations 4.19 and 2.11); and e, other work.
A Kalman filter finds f and p, so times of shapes lean on each other, and those of slow moments are
compared with those of fast ones. A shape is tried where its gain would be the greatest if f were
less, by a standard deviation or, while trying has lost little, by more, as long as that loses
little if f is one more. In doubt known shapes are tried, and plain steps timed, once more. A shape
is chosen before the round under way is read, and a round recorded once the next one is launched.
What a pair has taught stays in memory. What the requests of a batch accept is pooled.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from threading import Lock
from typing import NamedTuple

import numpy as np

from ..drafters.acceptance_stats import Acceptance, expected_tokens
from ..drafters.tree import CHAINS, LONG_CHAINS, PLAIN, DraftShape
from .pass_costs import KernelOptions, OptionTrial

PRIOR = 1 / 3  # share of first drafts accepted where no text has shown any: heads have .3 to .8
PAIR_MEMORY = 0.995  # of what texts accepted, a round later: half is forgotten in 138
# Standard deviations of logarithms of seconds:
SPREAD = 0.25  # of what a curve is off, before any time: 8 rows had .7 of it with OpenBLAS
STRETCH = 0.8  # of what all its logarithms are to be multiplied with, less 1
NOISE = 0.035  # of a time, at least
LEARN = 0.05  # of its variance, what the latest time tells
PACE, TEXT = 0.03, 0.2  # by which the pace changes in a round, and before a text
KNOWN = 0.2  # of a cost beside the one timed last, below which it counts as known
NEAR = 0.1  # rows squared; costs a row apart are correlated by (1 + 1 / NEAR)^-TAIL = .62,
TAIL = 0.2  # those of 8 rows apart by .27
APART = 3.0  # rows more between plain steps and drafts, which share little but the weights
DRIFT = 1e-4  # of SPREAD^2, added to the variance of a cost in a round: contexts grow
OUTLIER = 3.0  # standard deviations: a time further off counts as if that were as far as it is
TIMED_PLAIN = 4  # plain steps in a row to time: the first and the last are not comparable
AGAIN, LATER = 64, 512  # tokens before plain steps are timed again: unknown, in doubt; close
PROBE_ROUNDS = 6  # of a probe, before drafting is said to be on
TRIAL_LOSS = 1.5  # plain steps that drafts must have lost before drafting is turned off
TOO_SLOW = 0.98  # gain below which it is: acceptance is never known exactly
FORGET = 0.3  # of the evidence on acceptance is left when a probe begins
PROBE_BUDGET = 0.01  # of plain decoding's time, lost in probes, and in rounds until they begin
FEWEST, MOST = 64, 1024  # tokens between two probes
ALMOST_ALWAYS = 0.9  # the highest acceptance of any drafter on a text
DOUBT = 1.2  # standard deviations that a known cost must be off for its shape to be tried again
WORTH_TRYING = 1.03  # of the best gain, that a shape to be tried must promise
TRYING_LOSS, TRYING_SHARE = 1.0, 0.04  # plain steps, and per token, that trying shapes may lose

OFF, PROBE, ON = "drafting off", "probe", "drafting on"


@dataclass(frozen=True)
class DraftingEvent:
    """Drafting was turned off, tried again or turned on again, after ``num_tokens`` tokens."""

    num_tokens: int
    what: str  # drafting off | probe | drafting on
    reason: str


@dataclass
class FixedController:
    """Always the same. ``drafting_off``: decoding is plain, so the drafter may fall behind."""

    shape: DraftShape
    drafting_off: bool = False
    events: list[DraftingEvent] = field(default_factory=list)

    def next_shape(self, num_tokens: int) -> DraftShape:
        """What follows the round under way, before which ``num_tokens`` were emitted."""
        return self.shape

    def record(
        self, shape: DraftShape, kept: Sequence[int], seconds: float | None,
        ranks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """What each request kept, none of a plain step; the time; of a tree ``Round.ranks``."""

    def disable_shape(self, shape: DraftShape, error: RuntimeError) -> bool:
        """Whether the text can go on without ``shape``, which has failed."""
        return False

    def resize(self, num_requests: int) -> None:
        """So many requests share rounds from now on."""


class Estimate(NamedTuple):
    """Seconds of a round, and the standard deviation of their logarithm less the latest one's."""

    seconds: float
    error: float

    @property
    def is_known(self) -> bool:
        return self.error <= KNOWN

    def off(self, deviations: float) -> float:
        """The seconds where the logarithm is so many standard deviations off."""
        return self.seconds * math.exp(deviations * self.error)


class RoundCosts:
    """What rounds of a pair cost, for any number of requests: times, and a curve before them.

    ``curve`` gives what a round of a shape takes for so many requests, in plain steps of one.
    It is all there is where ``is_settled``: the processes that share a model must decide alike.
    """

    def __init__(self, curve: Callable[[DraftShape, int], float], is_settled: bool = False):
        self.acceptance = Acceptance(PRIOR, LONG_CHAINS[-1].size)  # what a new text expects
        self.failed: frozenset[DraftShape] = frozenset()
        self.options: KernelOptions | None = None  # None: others were not tried
        self._curve, self._is_settled, self._lock = curve, is_settled, Lock()
        self._run: set[DraftShape] = set()
        # The pace, of which nothing is known, then what the curve is off at each key: means,
        # covariances, and what these were before any time.
        self._mean, self._cov, self._prior = np.zeros(1), np.diag([100.0]), np.zeros((1, 1))
        self._places: dict[tuple[int, DraftShape], int] = {}
        self._points = np.zeros((0, 5))  # where each key stands: see ``_point``
        self._latest, self._noise = 0, NOISE**2  # place of the key timed last, variance of times

    def record(self, num_requests: int, shape: DraftShape, seconds: float | None) -> None:
        """A round, or a plain step, has ended; of some it is not known how long they took."""
        if self._is_settled:
            return
        with self._lock:
            at = self._place(num_requests, shape)
            is_less = self._cov.diagonal() < self._prior.diagonal()  # no less known than at first
            self._cov += DRIFT * self._prior * np.outer(is_less, is_less)
            self._cov[0, 0] += PACE**2
            if seconds is None:
                return
            self._run.add(shape)
            cost, shared = self._curve(shape, num_requests), self._cov[0] + self._cov[at]
            off = math.log(seconds / cost) - self._mean[0] - self._mean[at]
            variance = max(shared[0] + shared[at] + self._noise, (off / OUTLIER) ** 2)
            self._mean += shared * (off / variance)
            self._cov -= np.outer(shared, shared) / variance
            noise = self._noise * (1 + LEARN * (off * off / variance - 1))
            self._noise, self._latest = max(NOISE**2, noise), at

    def begin(self) -> None:
        """A text begins: the machine may have had other work."""
        with self._lock:
            self._cov[0, 0] += TEXT**2

    def has_run(self, shape: DraftShape) -> bool:
        """Whether a round of that shape was ever timed."""
        return shape in self._run

    def estimates(self, shapes: Sequence[DraftShape], num: int) -> dict[DraftShape, Estimate]:
        """Of ``shapes`` and plain steps for ``num`` requests, all at one pace."""
        keys = PLAIN, *shapes
        seconds, errors = np.array([self._curve(s, num) for s in keys]), np.zeros(len(keys))
        with self._lock:
            if not self._is_settled:
                at, last = [self._place(num, shape) for shape in keys], self._latest
                seconds *= np.exp(self._mean[0] + self._mean[at])
                variance = self._cov.diagonal()[at]
                if last:
                    variance += self._cov[last, last] - 2 * self._cov[last, at]
                errors = np.sqrt(np.maximum(0.0, variance))
        return dict(zip(keys, map(Estimate, seconds.tolist(), errors.tolist()), strict=True))

    def _place(self, num: int, shape: DraftShape) -> int:
        """Where the numbers of a key stand; a new one begins with what the others tell of it."""
        key = num, shape
        if key not in self._places:
            self._points = np.vstack([self._points, self._point(num, shape)])
            apart = ((self._points - self._points[-1])[:, :-1] ** 2).sum(axis=1)
            stretched = STRETCH**2 * self._points[:, -1] * self._points[-1, -1]
            *others, own = SPREAD**2 * (1 + apart / NEAR) ** -TAIL + stretched
            alike, weights = np.array([0.0, *others]), np.zeros(len(others) + 1)
            weights[1:] = np.linalg.solve(self._prior[1:, 1:], alike[1:])
            shared = self._cov @ weights
            variance = own - weights @ alike + weights @ shared
            self._mean = np.append(self._mean, weights @ self._mean)
            self._cov = np.block([[self._cov, shared[:, None]], [shared, variance]])
            self._prior = np.block([[self._prior, alike[:, None]], [alike, own]])
            self._places[key] = len(self._places) + 1
        return self._places[key]

    def _point(self, num: int, shape: DraftShape) -> tuple[float, ...]:
        """Where a round stands among others, in rows, and the logarithm of its curve."""
        stretch = math.log(self._curve(shape, num) / self._curve(PLAIN, num))
        is_draft, is_tree = shape != PLAIN, shape.width > 1
        return shape.num_rows, APART * is_draft, is_tree, math.log2(num), stretch


class AdaptiveController:
    """The fastest shape by what was accepted lately; plain decoding where no draft is faster.

    While drafting is off, a few rounds are drafted now and then to see whether the text has
    changed; how often follows from what the last ones lost.
    """

    def __init__(
        self,
        costs: RoundCosts,
        shapes: Sequence[DraftShape] = CHAINS,
        num_requests: int = 1,
        can_draw: Callable[[], bool] = lambda: True,
        trial: OptionTrial | None = None,
    ):
        """``can_draw``: whether the trees among ``shapes`` can be; asked before the first one."""
        self.drafting_off = self.never_pays = False  # the latter: whatever is accepted
        self.events: list[DraftingEvent] = []
        self._costs, self._num_requests, self._resized = costs, num_requests, num_requests
        costs.begin()
        self._shapes = [shape for shape in shapes if shape not in costs.failed]
        self._can_draw, self._is_asked, self._trial = can_draw, False, trial
        self._accepted = Acceptance(costs.acceptance, max((s.size for s in shapes), default=1))
        self._latest = PLAIN  # chosen; perhaps not recorded yet
        self._is_timing = False  # off for a few steps, to see what they cost
        self._num_tokens, self._probe_left = 0, 0
        self._plain_left = 0.0  # plain steps
        self._tries: dict[DraftShape, tuple[int, float]] = {}  # and plain steps they were worth
        self._rounds: list[tuple[DraftShape, float]] = []  # and worth, since drafts were level
        self._known: dict[DraftShape, Estimate] = {}  # made when asked for, after each record
        # The token after which plain steps were timed; after earlier texts, this one comes first.
        self._plain_timed = AGAIN * (self._estimates[PLAIN].is_known) - LATER
        self._give_up()

    def next_shape(self, num_tokens: int) -> DraftShape:
        self._num_tokens = num_tokens
        if self.drafting_off:
            self._plain_left -= 1
            if self._plain_left >= 0:
                return PLAIN
            self._turn_on()
        shape, gain = self._best()
        if self._has_to_time_plain(shape, gain):
            self.drafting_off = self._is_timing = True
            self._plain_left, self._plain_timed = TIMED_PLAIN - 1, num_tokens
            return PLAIN
        if shape == PLAIN and self._shapes:
            return min(self._shapes, key=lambda shape: (shape.num_rows, shape.size))
        if gain < TOO_SLOW and (lost := self._lost()) > TRIAL_LOSS:
            self._turn_off(
                f"with {self._accepted.places[0]:.0%} of first drafts accepted, the best length "
                f"({shape}) would give {gain:.2f}x",
                min(MOST, max(FEWEST, (lost + self._cost(shape)) / PROBE_BUDGET)) - 1,
            )
            self._give_up()
            return PLAIN
        self._latest = shape = self._worth_trying(shape, max(gain, 1.0)) or shape
        if shape.tree is not None and not self._is_asked:
            self._is_asked = True
            if not self._can_draw():
                self._shapes = [shape for shape in self._shapes if shape.tree is None]
                return self.next_shape(num_tokens)
        return shape

    def record(
        self, shape: DraftShape, kept: Sequence[int], seconds: float | None,
        ranks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        if shape != PLAIN and shape not in self._shapes:  # cut to what was left of the text
            return
        if kept:
            self._learn(shape, kept, ranks)
        self._costs.record(self._num_requests, shape, seconds)
        if self._trial is not None and shape != PLAIN:
            self._trial.record(shape, seconds)
            if self._trial.has_ended:
                self._costs.options, self._trial = self._trial.best, None
        is_other, self._num_requests = self._num_requests != self._resized, self._resized
        self._known, reason, self._probe_left = {}, "", self._probe_left - (shape != PLAIN)
        if is_other and self.drafting_off and not self._is_timing:
            reason = "a round costs less now, drafts of {} promise {:.2f}x"
        elif shape != PLAIN and self._probe_left == 0:
            reason = "the probe promises {1:.2f}x"
        if reason and (best := self._best())[1] >= 1.0:
            self.drafting_off, self.never_pays, self._rounds = False, False, []
            self._note(ON, reason.format(*best))

    def disable_shape(self, shape: DraftShape, error: RuntimeError) -> bool:
        """It can if that shape never ran here; it is drafted no more then, which is said once."""
        if self._costs.has_run(shape):
            return False
        if shape not in self._costs.failed:
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            what = f"rounds that draft {shape} fail on this device and are left out ({reason})."
            print(f"Note: {what}", file=sys.stderr)
        self._costs.failed |= {shape}
        self._shapes = [other for other in self._shapes if other != shape]
        self._give_up()
        return True

    def resize(self, num_requests: int) -> None:
        """See ``Controller.resize``: from the next record on, which is of the others' round."""
        self._resized = num_requests

    def _learn(self, shape: DraftShape, kept: Sequence[int], ranks: Sequence[int]) -> None:
        """See what was accepted and lost: of a try, only what it costs that was not foreseen."""
        num_tokens = sum(kept) / len(kept) + 1
        best, gain = self._best()
        if shape != best:
            tries, worth = self._tries.get(shape, (0, 0.0))
            self._tries[shape] = tries + 1, worth + num_tokens / max(gain, 1.0)
        self._accepted.learn(shape, kept, ranks)
        self._costs.acceptance.learn(shape, kept, ranks, PAIR_MEMORY)
        counted = num_tokens if best in (shape, PLAIN) else self._cost(shape)
        self._rounds.append((shape, counted))
        if self._lost() <= 0:
            self._rounds.clear()

    @property
    def _estimates(self) -> dict[DraftShape, Estimate]:
        self._known = self._known or self._costs.estimates(self._shapes, self._num_requests)
        return self._known

    def _lost(self) -> float:
        """Plain steps that drafts have lost since they were last level, as is known now."""
        return sum(self._cost(s) - num for s, num in self._rounds if s in self._estimates)

    def _cost(self, shape: DraftShape) -> float:
        """In plain steps."""
        return self._estimates[shape].seconds / self._estimates[PLAIN].seconds

    def _best(self) -> tuple[DraftShape, float]:
        """The timed shape with the greatest gain, and the gain; a plain step where none is."""
        timed = [s for s in self._shapes if self._estimates[s].is_known]
        gains = {s: self._accepted.expected_tokens(s) / self._cost(s) for s in timed}
        return max(gains.items(), key=itemgetter(1), default=(PLAIN, 0.0))

    def _worth_trying(self, best: DraftShape, gain: float) -> DraftShape | None:
        """A shape that might be faster than ``best`` with its ``gain``, if that loses little."""
        tries = ((s, *tried) for s, tried in self._tries.items() if s in self._estimates)
        lost = sum(num_tries * self._cost(s) - worth for s, num_tries, worth in tries)
        left = TRYING_LOSS + TRYING_SHARE * self._num_tokens - lost
        plain, promises = self._estimates[PLAIN].seconds, {}
        for shape in self._shapes:
            num_tokens, known = self._accepted.expected_tokens(shape), self._estimates[shape]
            if shape in (best, self._latest):
                continue
            least = known.off(-(DOUBT if known.is_known else left / TRYING_LOSS)) / plain
            promise, most = num_tokens / least, known.off(1.0) / plain
            if most - num_tokens / gain <= left and promise > WORTH_TRYING * gain:
                promises[shape] = promise
        return max(promises, key=promises.__getitem__, default=None)

    def _has_to_time_plain(self, shape: DraftShape, gain: float) -> bool:
        """Whether what plain steps cost has to be seen: unknown or in doubt, or old and close."""
        age, known = self._num_tokens - self._plain_timed, self._estimates
        doubt = math.exp(max(known[PLAIN].error, known[shape].error))
        is_lost = gain < TOO_SLOW <= gain * doubt and self._lost() > TRIAL_LOSS
        if is_lost or not known[PLAIN].is_known:
            return age > AGAIN
        return age >= LATER and gain < doubt and not self._rounds

    def _turn_on(self) -> None:
        """Draft again: where plain steps were timed as before, else for a probe."""
        self.drafting_off, self._plain_timed = False, self._num_tokens
        if self._is_timing:
            self._is_timing = False
            return
        self._rounds, self._probe_left = [], PROBE_ROUNDS
        self._accepted.fade(FORGET)
        self._note(PROBE, "to see whether drafts are accepted now")

    def _give_up(self) -> None:
        """Draft no more where no draft can be run, or none is faster whatever is accepted."""
        known, always = self._estimates, [ALMOST_ALWAYS]
        chances = {s: expected_tokens(always, s) / known[s].off(-1.0) for s in self._shapes}
        shape = max(chances, key=chances.__getitem__, default=PLAIN)
        reason = "no draft can be verified on this device"
        if shape != PLAIN:
            is_known = known[PLAIN].is_known and any(known[s].is_known for s in self._shapes)
            if not is_known or chances[shape] * known[PLAIN].seconds >= 1.0:
                return
            reason = f"a round of {shape} drafts costs {self._cost(shape):.2f} plain steps, so it "
            reason += f"would be slower even with {ALMOST_ALWAYS:.0%} accepted"
        self.never_pays = True
        self._turn_off(reason, math.inf)

    def _turn_off(self, reason: str, num_plain: float) -> None:
        self.drafting_off, self._plain_left = True, num_plain
        self._note(OFF, reason)

    def _note(self, what: str, reason: str) -> None:
        self.events.append(DraftingEvent(self._num_tokens, what, reason))


Controller = FixedController | AdaptiveController
