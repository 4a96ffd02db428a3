"""Draft lengths: a fixed one, or the fastest of chains, trees and plain steps (``auto``).

A round that drafts shape s emits E(s) tokens in t(s) seconds, a plain step one token in t(plain):

    gain(s) = E(s) t(plain) / t(s)

The shape with the greatest gain is drafted, or none if all gains are below 1. E comes from the
share of drafts kept lately at each place; for trees also from the tokens they have emitted. t is
estimated from the rounds so far (``round_costs.py``). A shape is tried if its gain would be the
greatest with a cost one standard deviation lower (or more, while trying has lost little), and if
little is lost with a cost one deviation higher. Early in a text no tree is tried that is believed
to cost more than drafts emit. In doubt known shapes are tried, and plain steps timed, once more.
Times of a busy machine say little, so t(s) / t(plain) is never taken to be less than 1.05, and
plain steps are timed again whenever 12 rounds have emitted less than 1.2 tokens each. Two tables
at the end of this file are the policy: ``WHILE_OFF`` and ``WHILE_DRAFTING``. A shape is chosen
before the current round is read, and a round is recorded after the next one is launched. The
requests of a batch share one estimate of acceptance.

Copies of the text (``drafters/copies.py``) are further shapes, with their own costs. The length of
the match before a copy predicts how many of its tokens are right, and every round shows whether
they were; so no copy is tried to find that out. The match is known only when the round is read, so
a shape is chosen ahead for each class of matches: the copy with the greatest gain, if it is above
the draft's. Acceptance of copies and of drafts is counted separately.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter

from ..drafters.acceptance_stats import Acceptance, CopyAcceptance, CopySeen, expected_tokens
from ..drafters.seen_text import TextMatch
from ..drafters.tree import (
    CHAINS,
    COPIES,
    LEAST_MATCHES,
    MOST_COPIED,
    PLAIN,
    DraftPlan,
    DraftShape,
)
from ..target_model.kernels import OptionTrial
from .round_costs import Estimate, RoundCosts
from .stats import OFF, ON, PROBE, DraftingEvent

PAIR_MEMORY = 0.995  # weight kept per round by what texts accepted: half is forgotten in 138
TIMED_PLAIN = 4  # plain steps in a row to time: the first and the last are not comparable
AGAIN = 64  # tokens before plain steps are timed again whose cost is unknown or in doubt
LATER = 512  # the same if the best draft gains little
EARLY = 150  # tokens of a text, before which no tree is tried that seems too expensive
LITTLE = 1.2  # tokens a round, below which plain steps are timed again
LITTLE_ROUNDS = 12  # after this many: they lose less than the timing can save
PROBE_ROUNDS = 6  # in a probe, before drafting is declared to be on
TRIAL_LOSS = 1.5  # plain steps that drafts have to lose before drafting is turned off
LEAST_COST = 1.05  # plain steps: a draft adds rows and head passes, whatever was measured
TOO_SLOW = 0.98  # gain below which drafts are: acceptance is never known exactly
FORGET = 0.3  # share of the evidence on acceptance that is left when a probe begins
PROBE_BUDGET = 0.01  # share of plain decoding's time that probes and rounds before may lose
FEWEST = 64  # tokens between two probes, at least
MOST = 1024  # tokens between two probes, at most
ALMOST_ALWAYS = 0.9  # the highest acceptance of any drafter on a text
DOUBT = 1.2  # standard deviations by which a known cost may be off when a shape is tried again
WORTH_TRYING = 1.03  # times the best gain: what a shape must promise to be tried
LAST_HOPE = 1.2  # gain that an untried shape must promise before drafting is turned off
TRYING_LOSS = 1.0  # plain steps that trying shapes may lose
TRYING_SHARE = 0.04  # plain steps more for each token

MOST_SHARED_ROWS = 32  # of a pass of a batch with copies longer than 7 tokens

FIXED_PRIOR = 0.5  # assumed share of drafts accepted before any was, to compare with copies


@dataclass
class FixedController:
    """Always the same shape, or a copy of up to ``copy_size`` tokens if it promises more.

    ``drafting_off``: decoding is plain, so the drafter may fall behind.
    """

    shape: DraftShape
    drafting_off: bool = False
    events: list[DraftingEvent] = field(default_factory=list)
    copy_size: int = 0
    _copied: CopyAcceptance = field(default_factory=CopyAcceptance, repr=False)
    _drafted: Acceptance = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._drafted = Acceptance(FIXED_PRIOR, max(1, self.shape.size))

    def next_plan(self, num_tokens: int, matches: Sequence[TextMatch] = ()) -> DraftPlan:
        """See ``Controller``."""
        if self.copy_size == 0:
            return DraftPlan(self.shape)
        promised = 1 + sum(self._drafted.along(self.shape.size))
        return _copies_or(self._copied, self.copy_size, self.shape, promised)

    def record(
        self, shape: DraftShape, kept: Sequence[int], seconds: float | None,
        ranks: Sequence[int] = (), copies: Sequence[CopySeen] = (),
    ) -> None:  # fmt: skip
        """See ``Controller``."""
        if self.copy_size == 0:
            return
        self._copied.learn(copies)
        if kept and shape.size > 0:
            self._drafted.fade()
            for num_kept in kept:
                self._drafted.observe(shape.size, num_kept)

    def disable_shape(self, shape: DraftShape, error: RuntimeError) -> bool:
        """See ``Controller``."""
        return False

    def resize(self, num_requests: int) -> None:
        """See ``Controller``."""


def fixed_controller(size: int, has_drafts: bool, copies: bool) -> FixedController:
    """Make the controller of chains of ``size`` tokens, drafted or copied."""
    shape = DraftShape(size if has_drafts else 0)
    return FixedController(shape, copy_size=min(size, MOST_COPIED) if copies else 0)


class AdaptiveController:
    """The fastest shape, given what was accepted lately; plain decoding if no draft is faster.

    While drafting is off, a few rounds are drafted now and then to see whether the text has
    changed: the more the last ones lost, the later.
    """

    def __init__(
        self,
        costs: RoundCosts,
        shapes: Sequence[DraftShape] = CHAINS,
        num_requests: int = 1,
        can_draw: Callable[[], bool] = lambda: True,
        trial: OptionTrial | None = None,
        copies: bool = False,
    ):
        """``can_draw``: whether the trees in ``shapes`` can be drafted, asked before the first.

        ``copies``: whether copies of the text are among the shapes to choose from.
        """
        self.drafting_off = self.never_pays = False  # the latter: even if all is accepted
        self.events: list[DraftingEvent] = []
        self._costs = costs
        self._num_requests = num_requests
        self._resized = num_requests
        costs.begin()
        self._shapes = [shape for shape in shapes if shape not in costs.failed]
        self._copies = [shape for shape in COPIES if copies and shape not in costs.failed]
        self._copied = CopyAcceptance(costs.copies)
        self._has_answers = False  # whether the text has matched another answer
        self._priced: list[DraftShape] = []  # by the latest plans, to be cut by confidence
        self._tried_copies: dict[DraftShape, float] = {}  # with the gain they compete with
        self._can_draw = can_draw
        self._is_asked = False
        self._trial = trial
        self._accepted = Acceptance(costs.acceptance, max((s.size for s in shapes), default=1))
        self._best_draft = PLAIN, 0.0  # with its gain
        self._latest = PLAIN  # the latest choice, perhaps not recorded yet
        self._is_timing = False  # drafting is off for a few steps, to time them
        self._num_tokens = 0
        self._emitted: list[float] = []  # tokens of the latest rounds since plain steps were timed
        self._probe_left = 0
        self._plain_left = 0.0  # plain steps to take before drafting again
        self._tries: dict[DraftShape, tuple[int, float]] = {}  # number, worth in plain steps
        self._rounds: list[tuple[DraftShape, float]] = []  # and worth, since drafts broke even
        self._known: dict[DraftShape, Estimate] = {}  # computed on demand after each record
        # The token after which plain steps were timed: early, unless earlier texts timed them.
        self._plain_timed = AGAIN * (self._estimates[PLAIN].is_known) - LATER
        if shapes:
            self._give_up()
        else:
            self.drafting_off = True
            self._plain_left = math.inf

    def next_plan(self, num_tokens: int, matches: Sequence[TextMatch] = ()) -> DraftPlan:
        """See ``Controller``."""
        shape = self._next_shape(num_tokens)
        prices = self._prices(shape)
        self._priced = [*self._priced[-1:], shape if prices else PLAIN]
        if not self._copies or self._is_timing:
            return DraftPlan(shape, prices=prices)
        self._tried_copies = {}
        if self._num_requests > 1:
            return self._shared_plan(shape, matches)
        gain = max(1.0, self._accepted.expected_tokens(shape) / self._cost(shape))
        own = tuple(self._or_copy(shape, gain, least) for least in LEAST_MATCHES)
        if not self._has_answers:  # the first match in an answer is only watched
            return DraftPlan(shape, own, prices=prices)
        others = tuple(self._or_copy(shape, gain, least, True) for least in LEAST_MATCHES)
        return DraftPlan(shape, own, others, prices)

    def _prices(self, shape: DraftShape) -> dict[int, float]:
        """Prices of chains up to ``shape``, as in ``DraftPlan``; {} unless it is the best one."""
        if self._num_requests > 1 or shape.size < 2 or shape.tree is not None:
            return {}
        best, gain = self._best_draft
        if shape != best:  # a try must have its full length
            return {}
        shorter = (s for s in self._shapes if s.tree is None and s.size <= shape.size)
        return {s.size: max(1.0, gain) * self._cost(s) for s in shorter}

    def _or_copy(
        self, shape: DraftShape, gain: float, match_length: int, is_answer: bool = False
    ) -> DraftShape:
        """Choose a copy after a match of that length if it gains more than the draft."""
        sums = _copied_tokens(self._copied, match_length, is_answer)
        expected = {copy: sums[copy.copy] for copy in self._copies}
        shape, gain = max((shape, gain), self._best(expected), key=itemgetter(1))
        tried = self._worth_trying(shape, gain, expected)
        if tried is None:
            return shape
        self._tried_copies[tried] = gain
        return tried

    def _shared_plan(self, shape: DraftShape, matches: Sequence[TextMatch]) -> DraftPlan:
        """Choose one length for a batch; each request drafts it, or copies if that promises more.

        ``matches`` are from before the current round; most of them continue.
        """
        num = self._num_requests
        sums = [_copied_tokens(self._copied, each.length, each.is_answer) for each in matches]
        fitting = [s for s in self._copies if s.copy <= 7 or num * s.num_rows <= MOST_SHARED_ROWS]
        expected = {}
        for candidate in fitting if shape.is_plain else [*self._shapes, *fitting]:
            drafted = self._accepted.expected_tokens(candidate) if candidate.size else 1.0
            emitted = [max(drafted, tokens[candidate.num_levels]) for tokens in sums]
            expected[candidate] = (sum(emitted) + (num - len(sums)) * drafted) / num
        gain = max(1.0, expected.get(shape, 1.0) / self._cost(shape))
        shape, gain = max((shape, gain), self._best(expected), key=itemgetter(1))
        shape = self._worth_trying(shape, gain, expected) or shape
        draft = PLAIN if shape.copy else shape
        drafted = 1.0 if shape.copy else self._accepted.expected_tokens(shape)
        return _copies_or(self._copied, shape.num_levels, draft, drafted)

    def _next_shape(self, num_tokens: int) -> DraftShape:
        """Do what the first matching row of the policy says."""
        self._num_tokens = num_tokens
        if self.drafting_off:
            best = PLAIN, 0.0
            rows = WHILE_OFF
        else:
            best = self._best(self._drafted)
            self._best_draft = best
            rows = WHILE_DRAFTING
        act = next(act for holds, act in rows if holds(self, *best))
        return act(self, *best)

    def record(
        self, shape: DraftShape, kept: Sequence[int], seconds: float | None,
        ranks: Sequence[int] = (), copies: Sequence[CopySeen] = (),
    ) -> None:  # fmt: skip
        """See ``Controller``."""
        self._copied.learn(copies)
        self._costs.copies.learn(copies)
        self._has_answers = self._has_answers or any(seen.is_answer for seen in copies)
        if shape != PLAIN and shape not in (*self._shapes, *self._copies):
            return  # cut to the end of the text
        if kept:
            self._emitted = [*self._emitted[-LITTLE_ROUNDS + 1 :], sum(kept) / len(kept) + 1]
        if kept and shape in self._tried_copies:
            self._count_try(shape, (sum(kept) / len(kept) + 1) / self._tried_copies[shape])
        elif kept and not shape.copy:
            self._learn(shape, kept, ranks)
        self._costs.record(self._num_requests, shape, seconds)
        is_drafted = shape.size > 0
        if self._trial is not None and is_drafted:
            self._trial.record(shape, seconds)
            if self._trial.has_ended:
                self._costs.options = self._trial.best
                self._trial = None
        is_other = self._num_requests != self._resized
        self._num_requests = self._resized
        self._known = {}
        reason = ""
        self._probe_left -= is_drafted
        if is_other and self.drafting_off and not self._is_timing:
            reason = "a round costs less now, drafts of {} promise {:.2f}x"
        elif is_drafted and self._probe_left == 0:
            reason = "the probe promises {1:.2f}x"
        if reason and (best := self._best(self._drafted))[1] >= 1.0:
            self.drafting_off = False
            self.never_pays = False
            self._rounds = []
            self._note(ON, reason.format(*best))

    def disable_shape(self, shape: DraftShape, error: RuntimeError) -> bool:
        """It can if that shape never ran here; it is then left out, with a note the first time."""
        if self._costs.has_run(shape):
            return False
        if shape not in self._costs.failed:
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            what = f"rounds that draft {shape} fail on this device and are left out ({reason})."
            print(f"Note: {what}", file=sys.stderr)
        self._costs.failed |= {shape}
        self._copies = [other for other in self._copies if other != shape]
        if shape in self._shapes:
            self._shapes.remove(shape)
            self._give_up()
        return True

    def resize(self, num_requests: int) -> None:
        """See ``Controller``; takes effect once the round in flight is recorded."""
        self._resized = num_requests

    def _learn(self, shape: DraftShape, kept: Sequence[int], ranks: Sequence[int]) -> None:
        """Learn what was accepted and lost; of a try, only what it costs beyond the estimate."""
        num_tokens = sum(kept) / len(kept) + 1
        best, gain = self._best(self._drafted)
        planned = self._priced[0] if self._priced else PLAIN
        is_cut = shape.tree is None and shape.size < planned.size
        if shape != best and not is_cut:
            self._count_try(shape, num_tokens / max(gain, 1.0))
        self._accepted.learn(shape, kept, ranks)
        self._costs.acceptance.learn(shape, kept, ranks, PAIR_MEMORY)
        counted = num_tokens if is_cut or best in (shape, PLAIN) else self._cost(shape)
        self._rounds.append((shape, counted))
        if self._lost() <= 0:
            self._rounds.clear()

    def _count_try(self, shape: DraftShape, worth: float) -> None:
        """Count a round as a try that was ``worth`` a number of plain steps."""
        tries, before = self._tries.get(shape, (0, 0.0))
        self._tries[shape] = tries + 1, before + worth

    @property
    def _drafted(self) -> dict[DraftShape, float]:
        """Tokens that each draft is expected to emit."""
        return {shape: self._accepted.expected_tokens(shape) for shape in self._shapes}

    @property
    def _estimates(self) -> dict[DraftShape, Estimate]:
        if not self._known:
            shapes = [*self._shapes, *self._copies]
            self._known = self._costs.estimates(shapes, self._num_requests)
        return self._known

    def _lost(self) -> float:
        """Plain steps that drafts have lost since they broke even, by the current estimates."""
        return sum(self._cost(s) - num for s, num in self._rounds if s in self._estimates)

    def _cost(self, shape: DraftShape) -> float:
        """Cost of a round of ``shape``, in plain steps."""
        cost = self._estimates[shape].seconds / self._estimates[PLAIN].seconds
        return cost if shape.is_plain else max(LEAST_COST, cost)

    def _best(self, expected: Mapping[DraftShape, float]) -> tuple[DraftShape, float]:
        """The timed shape with the greatest gain, and the gain; (PLAIN, 0) if none was timed.

        ``expected`` are the tokens that a round of each shape emits.
        """
        timed = [s for s in expected if self._estimates[s].is_known or self._costs.has_run(s)]
        gains = {s: expected[s] / self._cost(s) for s in timed}
        return max(gains.items(), key=itemgetter(1), default=(PLAIN, 0.0))

    def _worth_trying(
        self, best: DraftShape, gain: float, expected: Mapping[DraftShape, float]
    ) -> DraftShape | None:
        """A shape that may be faster than ``best`` with its ``gain``, if a try loses little."""
        tries = ((s, *tried) for s, tried in self._tries.items() if s in self._estimates)
        lost = sum(num_tries * self._cost(s) - worth for s, num_tries, worth in tries)
        left = TRYING_LOSS + TRYING_SHARE * self._num_tokens - lost
        plain = self._estimates[PLAIN].seconds
        is_early = self._num_tokens < EARLY or self._probe_left > 0
        promises = {}
        for shape, num_tokens in expected.items():
            known = self._estimates[shape]
            if shape in (best, self._latest):
                continue
            if is_early and shape.tree is not None and self._cost(shape) > expected.get(best, 1.0):
                continue
            least = known.off(-(DOUBT if known.is_known else left / TRYING_LOSS)) / plain
            promise = num_tokens / max(LEAST_COST, least)
            most = known.off(1.0) / plain
            if most - num_tokens / gain <= left and promise > WORTH_TRYING * gain:
                promises[shape] = promise
        return max(promises, key=promises.__getitem__, default=None)

    # Conditions of the policy, on the best draft and its gain:

    def _always(self, shape: DraftShape, gain: float) -> bool:
        return True

    def _has_waited(self, shape: DraftShape, gain: float) -> bool:
        """Whether drafting has been off for as long as intended."""
        return self._plain_left < 1

    def _knows_no_cost(self, shape: DraftShape, gain: float) -> bool:
        """Whether no draft has been timed yet."""
        return shape == PLAIN and bool(self._shapes)

    def _has_lost(self, shape: DraftShape, gain: float) -> bool:
        """Whether drafts are too slow now, and have been for some time."""
        return gain < TOO_SLOW and self._lost() > TRIAL_LOSS

    def _emits_little(self, shape: DraftShape, gain: float) -> bool:
        """Whether rounds emit so little that plain steps must be timed in any case.

        If the pace of a machine changes with every round, the estimates may be far off.
        """
        if len(self._emitted) < LITTLE_ROUNDS:
            return False
        return sum(self._emitted) < LITTLE * LITTLE_ROUNDS

    def _has_hope(self, shape: DraftShape, gain: float) -> bool:
        """Whether drafts have lost, but a shape that was never tried may gain."""
        return self._has_lost(shape, gain) and self._last_hope() is not None

    def _last_hope(self) -> DraftShape | None:
        """An untried shape that gains if its cost is one deviation below the estimate."""
        plain = self._estimates[PLAIN].seconds
        promises = {}
        for shape, num_tokens in self._drafted.items():
            known = self._estimates[shape]
            if not known.is_known and shape != self._latest and shape not in self._tries:
                promises[shape] = num_tokens * plain / known.off(-1.0)
        shape = max(promises, key=promises.__getitem__, default=PLAIN)
        return shape if promises.get(shape, 0.0) > LAST_HOPE else None

    def _has_to_time_plain(self, shape: DraftShape, gain: float) -> bool:
        """Whether to time plain steps: their cost is unknown, in doubt, or old and close."""
        age = self._num_tokens - self._plain_timed
        known = self._estimates
        doubt = math.exp(max(known[PLAIN].error, known[shape].error))
        is_lost = gain < TOO_SLOW <= gain * doubt and self._lost() > TRIAL_LOSS
        if is_lost or not known[PLAIN].is_known:
            return age > AGAIN
        return age >= LATER and gain < doubt and not self._rounds

    # Actions of the policy; they return the shape to run:

    def _wait(self, shape: DraftShape, gain: float) -> DraftShape:
        """Take one of the plain steps that are left."""
        self._plain_left -= 1
        return PLAIN

    def _turn_on(self, shape: DraftShape, gain: float) -> DraftShape:
        """Draft again: as before if plain steps were only timed, else as a probe."""
        self.drafting_off = False
        self._plain_timed = self._num_tokens
        if self._is_timing:
            self._is_timing = False
        else:
            self._rounds = []
            self._probe_left = PROBE_ROUNDS
            self._accepted.fade(FORGET)
            self._note(PROBE, "to see whether drafts are accepted now")
        return self._next_shape(self._num_tokens)

    def _time_plain(self, shape: DraftShape, gain: float) -> DraftShape:
        """Begin a few plain steps to time them."""
        self.drafting_off = True
        self._is_timing = True
        self._emitted = []
        self._plain_left = TIMED_PLAIN - 1
        self._plain_timed = self._num_tokens
        return PLAIN

    def _draft_fewest_rows(self, shape: DraftShape, gain: float) -> DraftShape:
        return min(self._shapes, key=lambda shape: (shape.num_rows, shape.size))

    def _try_last_hope(self, shape: DraftShape, gain: float) -> DraftShape:
        return self._unless_undrawable(self._last_hope() or shape)

    def _stop(self, shape: DraftShape, gain: float) -> DraftShape:
        """Turn drafting off until a probe costs little compared with the plain steps."""
        self._turn_off(
            f"with {self._accepted.places[0]:.0%} of first drafts accepted, the best length "
            f"({shape}) would give {gain:.2f}x",
            min(MOST, max(FEWEST, (self._lost() + self._cost(shape)) / PROBE_BUDGET)) - 1,
        )
        self._give_up()
        return PLAIN

    def _draft(self, shape: DraftShape, gain: float) -> DraftShape:
        """Draft the best shape, or try another."""
        tried = self._worth_trying(shape, max(gain, 1.0), self._drafted)
        return self._unless_undrawable(tried or shape)

    def _unless_undrawable(self, shape: DraftShape) -> DraftShape:
        """``shape``, unless it is a tree and trees cannot be drafted: then choose again."""
        self._latest = shape
        if shape.tree is not None and not self._is_asked:
            self._is_asked = True
            if not self._can_draw():
                self._shapes = [shape for shape in self._shapes if shape.tree is None]
                return self._next_shape(self._num_tokens)
        return shape

    def _give_up(self) -> None:
        """Stop drafting for good if no draft can run, or none can ever be faster."""
        known = self._estimates
        always = [ALMOST_ALWAYS]
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
        self.drafting_off = True
        self._plain_left = num_plain
        self._note(OFF, reason)

    def _note(self, what: str, reason: str) -> None:
        self.events.append(DraftingEvent(self._num_tokens, what, reason))


def _greatest(values: Mapping[DraftShape, float]) -> tuple[DraftShape, float]:
    """The shape with the greatest value, and the value; (PLAIN, 0) if there is none."""
    return max(values.items(), key=itemgetter(1), default=(PLAIN, 0.0))


def _copied_tokens(copied: CopyAcceptance, match_length: int, is_answer: bool) -> list[float]:
    """Expected tokens of copies of 0, 1, 2 ... tokens after a match of that length."""
    if match_length == 0:
        return [1.0] * (MOST_COPIED + 1)
    chances = copied.along(match_length, MOST_COPIED, is_answer)
    return list(accumulate(chances, initial=1.0))


def _copies_or(copied: CopyAcceptance, size: int, draft: DraftShape, drafted: float) -> DraftPlan:
    """Plan ``draft``, or a copy of ``size`` tokens after matches that promise ``drafted`` ones."""
    copy = PLAIN._replace(copy=size)

    def by_match(is_answer: bool) -> tuple[DraftShape, ...]:
        tokens = (_copied_tokens(copied, least, is_answer)[size] for least in LEAST_MATCHES)
        return tuple(copy if number >= drafted else draft for number in tokens)

    return DraftPlan(draft, by_match(False), by_match(True))


Holds = Callable[[AdaptiveController, DraftShape, float], bool]
Act = Callable[[AdaptiveController, DraftShape, float], DraftShape]

WHILE_OFF: tuple[tuple[Holds, Act], ...] = (
    (AdaptiveController._has_waited, AdaptiveController._turn_on),
    (AdaptiveController._always, AdaptiveController._wait),
)
"""The policy while drafting is off: the action of the first condition that holds."""

WHILE_DRAFTING: tuple[tuple[Holds, Act], ...] = (
    (AdaptiveController._emits_little, AdaptiveController._time_plain),
    (AdaptiveController._has_to_time_plain, AdaptiveController._time_plain),
    (AdaptiveController._knows_no_cost, AdaptiveController._draft_fewest_rows),
    (AdaptiveController._has_hope, AdaptiveController._try_last_hope),
    (AdaptiveController._has_lost, AdaptiveController._stop),
    (AdaptiveController._always, AdaptiveController._draft),
)
"""The policy while drafting is on."""
