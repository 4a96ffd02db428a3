"""What rounds cost while a text is written: what was known before, corrected by their own times.

Plain numbers only. Times come from the loop, one by one; old ones fade as the context grows.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from .accepted import PRIOR
from .costs import PLAIN, BatchCosts, DraftShape, RoundCosts, Ways, typical

NUM_KEPT = 8  # times of a shape
FADING = 512.0  # tokens after which a time counts 1 / e
NEIGHBOURS = 0.1  # how many times those of other shapes are worth
ONCE = 0.9  # recent times from which on a shape counts as timed at all
UNSEEN = 0.5  # a shape that was never timed may cost so much of what is said of it
EARLIER = 100.0  # rounds that the acceptance of all texts before is worth
KEPT_SHARE = 0.5  # of what one batch has taught, in the logarithm of a cost: more of it is chance
EXPECTED = 0.1  # of the logarithm of a cost: so far off is anything that was measured
SURPRISE = 0.1  # beyond that: so far off, what was known counts 1 / e
FOLLOWED = 0.4  # of what a time is off from others of its shape: a change of the machine's pace
MOST_OFF = 0.4  # of the logarithm of a time: beyond that, other work came between


@dataclass
class ShapeTimes:
    """The latest times of one shape, as they would be at the pace of what was known.

    Each comes with the number of tokens there were then.
    """

    times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))

    def add(self, num_tokens: int, seconds: float) -> None:
        self.times.append((num_tokens, seconds))

    def weight(self, num_tokens: int) -> float:
        """How many recent times these are worth."""
        return sum(math.exp((at - num_tokens) / FADING) for at, _ in self.times)

    @property
    def typical(self) -> float:
        return typical(seconds for _, seconds in self.times)


class LiveCosts:
    """Costs that follow the times of the rounds themselves.

    The pace of a machine comes and goes, and is the same for plain steps and rounds: what is timed
    now, and what was timed some rounds ago, is only comparable without it. The pace follows the
    times of a shape from one to the next. It begins with what the very first time is off: the
    machine is likelier to have changed since than what a shape costs on it.

    Of every shape there is a correction, the logarithm of its time over what was known before. A
    shape that was not timed lately takes that of its neighbours: what makes one length slower
    makes the next one slower too. ``num_known`` is how many times what was ``known`` is worth,
    infinite where it shall not be corrected, and what was guessed is worth nothing;
    ``num_tokens`` how long the text is. ``keep`` is given what was learned when the text has
    ended.
    """

    def __init__(
        self,
        known: RoundCosts,
        num_known: float = math.inf,
        keep: Callable[[RoundCosts], None] = lambda costs: None,
    ):
        self._known = known
        self._keep = keep
        self._num_known = num_known
        self._times = {shape: ShapeTimes() for shape in (PLAIN, *known.rounds)}
        self._current: RoundCosts | None = None
        self._trust = num_known
        self._has_failed = False  # something that was not known to
        self._pace: float | None = None  # logarithm of a time over what it would be as known
        self._first_accepted = self._first_drafted = 0
        self.num_tokens = 0

    @property
    def acceptance(self) -> float:
        """The share of first drafts that texts accept, this one so far among them."""
        before = PRIOR if self._known.acceptance is None else self._known.acceptance
        return (EARLIER * before + self._first_accepted) / (EARLIER + self._first_drafted)

    def count_first(self, is_accepted: bool) -> None:
        """The first draft of a chain was accepted, or not."""
        self._first_drafted += 1
        self._first_accepted += is_accepted

    @property
    def current(self) -> RoundCosts:
        """Seconds as they are believed to be now."""
        if self._current is None:
            fix, pace = self._corrections(), self._pace or 0.0
            rounds = {s: cost * math.exp(fix[s] + pace) for s, cost in self._known.rounds.items()}
            self._current = replace(
                self._known,
                plain=self._known.plain * math.exp(fix[PLAIN] + pace),
                rounds=self._in_order(rounds),
                guessed=self._known.guessed - {s for s in fix if self._times[s].times},
            )
        return self._current

    def record(self, shape: DraftShape, seconds: float) -> None:
        """A round of that shape, or a plain step (size 0), has taken so long."""
        times = self._times.get(shape)
        if times is None or not self.is_corrected:
            return
        if self._pace is None:
            is_guess = shape in self._known.guessed
            self._pace = 0.0 if is_guess else math.log(seconds / self._before(shape))
        elif times.times:
            off = math.log(seconds / times.typical) - self._pace
            self._pace += FOLLOWED * max(-MOST_OFF, min(off, MOST_OFF))
        times.add(self.num_tokens, seconds * math.exp(-self._pace))
        self._current = None

    @property
    def is_corrected(self) -> bool:
        """Whether what was known is corrected by what is timed."""
        return math.isfinite(self._num_known)

    def was_timed(self, shape: DraftShape) -> bool:
        """Whether a round of that shape was timed here."""
        return shape in self._times and bool(self._times[shape].times)

    def has_worked(self, shape: DraftShape) -> bool:
        """Whether a round of that shape was ever timed, here or in what was known."""
        times = self._times.get(shape)
        return times is not None and (shape not in self._known.guessed or bool(times.times))

    def leave_out(self, shape: DraftShape) -> bool:
        """Offer ``shape`` no more, which fails; False where it was not offered before."""
        if self._times.pop(shape, None) is None:
            return False
        self._known = replace(
            self._known,
            rounds={s: cost for s, cost in self._known.rounds.items() if s != shape},
            failed=(*self._known.failed, shape),
            guessed=self._known.guessed - {shape},
        )
        self._current, self._has_failed = None, True
        return True

    def close(self) -> None:
        """Keep what was learned, if plain steps and rounds were timed and can be compared.

        Or where there are no such rounds, because they fail.
        """
        timed = {shape == PLAIN for shape, times in self._times.items() if times.times}
        if len(timed) == 2 or (True in timed and self._has_failed):
            self._keep(replace(self.current, acceptance=self.acceptance))

    def num_times(self, shape: DraftShape) -> float:
        """How many recent times what is known of a shape is worth."""
        return self._times[shape].weight(self.num_tokens) + self._num_trusted(shape)

    def least(self, shape: DraftShape) -> float:
        """The least that a round of ``shape`` might take, as far as is known.

        No chain takes less than a shorter one.
        """
        least = self.current.rounds[shape] * UNSEEN ** (1 / (1 + 3 * self.num_times(shape)))
        if shape.tree is not None:
            return least
        timed = self._timed_chains(self.current.rounds)
        return max([least, *(cost for size, cost in timed.items() if size < shape.size)])

    def _in_order(self, rounds: dict[DraftShape, float]) -> dict[DraftShape, float]:
        """No chain that was not timed takes more than a longer one that was."""
        timed = self._timed_chains(rounds)

        def at_most(shape: DraftShape, cost: float) -> float:
            longer = (c for size, c in timed.items() if size > shape.size and shape.tree is None)
            return min([cost, *longer])

        return {shape: at_most(shape, cost) for shape, cost in rounds.items()}

    def _timed_chains(self, rounds: Mapping[DraftShape, float]) -> dict[int, float]:
        """The costs of chains that were timed lately, by their length."""
        return {
            shape.size: cost
            for shape, cost in rounds.items()
            if shape.tree is None and self._times[shape].weight(self.num_tokens) >= ONCE
        }

    def _num_trusted(self, shape: DraftShape) -> float:
        """How many times what was known of a shape before is still worth."""
        if shape in self._known.guessed:
            return 0.0
        return self._trust * math.exp(-self.num_tokens / FADING)

    def _corrections(self) -> dict[DraftShape, float]:
        own = {
            shape: math.log(times.typical / self._before(shape))
            for shape, times in self._times.items()
            if times.times
        }
        # Where what was known is off for one shape, it is not to be relied on for another.
        known = (abs(fix) for shape, fix in own.items() if shape not in self._known.guessed)
        surprise = max(known, default=0.0)
        self._trust = self._num_known * math.exp(-max(0.0, surprise - EXPECTED) / SURPRISE)
        common = self._common(own)
        return {shape: self._blend(shape, own, common) for shape in self._times}

    def _before(self, shape: DraftShape) -> float:
        return self._known.plain if shape == PLAIN else self._known.rounds[shape]

    def _blend(self, shape: DraftShape, own: dict[DraftShape, float], common: float) -> float:
        """Its own correction, as far as it is fresh; for the rest that of its neighbours."""
        weight, trusted = self._times[shape].weight(self.num_tokens), self._num_trusted(shape)
        if math.isinf(trusted):
            return 0.0
        others = 0.0 if shape == PLAIN and weight else NEIGHBOURS
        near = self._of_neighbours(shape, own) if others else 0.0
        # What was not timed is off by what is common to all, unless its neighbours know better.
        start = 0.0 if shape in own else common
        off = weight * own.get(shape, 0.0) + others * (near - start)
        return start + off / (weight + trusted + others)

    def _common(self, own: dict[DraftShape, float]) -> float:
        """The correction of most times, of rounds if any was timed: the lower median by weight."""
        drafts = {shape: fix for shape, fix in own.items() if shape != PLAIN} or own
        weights = {shape: self._times[shape].weight(self.num_tokens) for shape in drafts}
        below, half = 0.0, sum(weights.values()) / 2
        for shape in sorted(drafts, key=lambda shape: drafts[shape]):
            below += weights[shape]
            if below >= half:
                return drafts[shape]
        return 0.0

    def _of_neighbours(self, shape: DraftShape, own: dict[DraftShape, float]) -> float:
        """What the times of other shapes say of this one: the nearer and fresher, the more.

        Plain steps and rounds speak for each other only while nothing else does.
        """
        others = {s: c for s, c in own.items() if s != shape}
        drafts = {s: c for s, c in others.items() if s != PLAIN}
        if shape != PLAIN and drafts:
            others = drafts
        total = weights = 0.0
        for other, correction in others.items():
            is_alike = (other.tree is None) == (shape.tree is None)
            near = 1 / (1 + abs(other.size - shape.size)) if is_alike else 0.2
            weight = near * near * (self._times[other].weight(self.num_tokens) + 1e-6)
            total, weights = total + weight * correction, weights + weight
        return total / weights if weights else 0.0


class CostsBySize(Protocol):
    """Costs of rounds for any number of requests."""

    num_requests: int
    """Whose costs were asked for last."""

    def of(self, num_requests: int) -> LiveCosts:
        """The costs from now on, for so many requests."""


class LiveBatchCosts:
    """Costs of rounds for several requests that follow the times of the rounds themselves.

    Each number of requests has its own. Where the number changes, what was learned goes along:
    what is believed of the new one is off by as much as it was for the one before.
    """

    def __init__(
        self,
        known: BatchCosts,
        num_known: float = math.inf,
        keep: Callable[[RoundCosts], None] = lambda costs: None,
    ):
        """``num_known`` as in ``LiveCosts``; ``keep`` is given what a whole batch taught."""
        self._known = known
        self._num_known = num_known
        self._keep = keep
        self.num_requests = known.batch_size
        self._latest: tuple[RoundCosts, LiveCosts] | None = None

    @property
    def batch_size(self) -> int:
        """The most requests that anything is known of: more are taken to cost what they do."""
        return self._known.batch_size

    @property
    def ways(self) -> Ways:
        """How rounds are to be computed."""
        return self._known.alone.ways

    def of(self, num_requests: int) -> LiveCosts:
        """See ``CostsBySize.of``; what was learned so far is kept."""
        self.num_requests = num_requests
        known = self._known.of(min(num_requests, self.batch_size))
        believed = known
        if self._latest is not None:
            before, live = self._latest
            now = live.current
            rounds = {
                shape: cost * now.rounds[shape] / before.rounds[shape]
                for shape, cost in known.rounds.items()
                if shape in before.rounds
            }
            plain = known.plain * now.plain / before.plain
            believed = replace(known, plain=plain, rounds=known.rounds | rounds)
            live.close()
        is_whole = num_requests >= self.batch_size
        latest = LiveCosts(believed, self._num_known, self._keep_whole if is_whole else _forget)
        self._latest = known, latest
        return latest

    def _keep_whole(self, learned: RoundCosts) -> None:
        """Keep a share of what was learned of plain steps and of those known lengths that ran.

        The speed of some machines comes and goes in waves that are longer than a short batch.
        """
        assert self._latest is not None
        live, known = self._latest[1], self._known.together

        def kept(shape: DraftShape, before: float, now: float) -> float:
            return before * math.exp(KEPT_SHARE * math.log(now / before) * live.was_timed(shape))

        if not learned.rounds.keys() >= known.rounds.keys():
            return
        rounds: dict[DraftShape, float] = {}
        for shape, before in sorted(known.rounds.items(), key=lambda item: item[0].size):
            cost = kept(shape, before, learned.rounds[shape])
            rounds[shape] = max([cost, *rounds.values()])  # more drafts are never cheaper
        plain = kept(PLAIN, known.plain, learned.plain)
        self._keep(replace(known, plain=plain, rounds=rounds, acceptance=learned.acceptance))


def _forget(costs: RoundCosts) -> None:
    """Of fewer requests than there were at first nothing is kept: they lie on a line."""
