"""Costs that correct themselves: a simulator of texts whose costs nobody told the truth about."""

import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from costs import FLAT, LINEAR, ScriptedController
from grids import thorough

from mlx_eagle.decoding import pipeline
from mlx_eagle.decoding.accepted import expected_tokens
from mlx_eagle.decoding.controller import AdaptiveController
from mlx_eagle.decoding.costs import PLAIN, BatchCosts, DraftShape, RoundCosts
from mlx_eagle.decoding.live_costs import LiveBatchCosts, LiveCosts
from mlx_eagle.drafters.tree import parse_tree

GENTLE = RoundCosts(1.0, {DraftShape(k): 1.25 + 0.08 * k for k in range(1, 8)})
KNEE = RoundCosts(  # as where a kernel has room for four rows
    1.0, {DraftShape(k): 1.15 + 0.05 * k + (0.7 if k > 3 else 0.0) for k in range(1, 8)}
)
MACHINES = {"flat": FLAT, "gentle": GENTLE, "knee": KNEE, "linear": LINEAR}
ALPHAS = [0.0, 0.2, 0.4, 0.6, 0.8, 0.9]
NUM_TOKENS, SETTLED = 1000, 200


def scaled(costs: RoundCosts, plain: float, draft: Callable[[int], float]) -> RoundCosts:
    rounds = {shape: cost * draft(shape.size) for shape, cost in costs.rounds.items()}
    return RoundCosts(costs.plain * plain, rounds)


def one_by_one(dice: random.Random) -> Callable[[int], float]:
    """Each cost wrong by a factor of its own."""
    factors = [dice.uniform(0.6, 2.0) for _ in range(8)]
    return lambda size: factors[size]


WRONG = {
    "right": lambda costs: costs,
    "rounds 1.6x": lambda costs: scaled(costs, 1.0, lambda k: 1.6),
    "rounds 2x": lambda costs: scaled(costs, 1.0, lambda k: 2.0),
    "rounds 0.6x": lambda costs: scaled(costs, 1.0, lambda k: 0.6),
    "plain 2x": lambda costs: scaled(costs, 2.0, lambda k: 1.0),
    "plain 0.6x": lambda costs: scaled(costs, 0.6, lambda k: 1.0),
    "all 1000x": lambda costs: scaled(costs, 1000.0, lambda k: 1000.0),
    "each by itself": lambda costs: scaled(costs, 1.0, one_by_one(random.Random(1))),
    "each otherwise": lambda costs: scaled(costs, 1.0, one_by_one(random.Random(2))),
}

# What a first text begins with: plain steps of 1000 s, and costs as where packed weights are read
# row by row, or where they are read once for five rows.
FIRST = [
    RoundCosts(1e3, {DraftShape(k): 1e3 * (1.1 + 1.05 * k) for k in range(1, 8)}),
    RoundCosts(1e3, {DraftShape(k): 1e3 * (1.1 + 0.07 * k + (k > 4)) for k in range(1, 8)}),
]
WRONG |= {f"guess {i}": lambda costs, i=i: FIRST[i].as_guess() for i in range(len(FIRST))}


class Machine:
    """Takes true costs for what a controller decides; counts seconds and tokens."""

    def __init__(
        self, costs: Callable[[int], RoundCosts], alpha: Callable[[int], float], seed: int
    ):
        self.costs, self.alpha, self.dice = costs, alpha, random.Random(seed)
        self.seconds, self.num_tokens = 0.0, 0

    def noise(self) -> float:
        """Other work can only add to a time; now and then a lot."""
        return 1 + abs(self.dice.gauss(0, 0.02)) + (0.5 if self.dice.random() < 0.02 else 0.0)

    def write(self, controller, num_tokens: int) -> float:
        """Seconds per token up to ``num_tokens``, from where the text stands."""
        before = PLAIN if self.num_tokens else None
        start, plain_time = (self.seconds, self.num_tokens), None
        while self.num_tokens < num_tokens:
            was_off, shape = controller.drafting_off, controller.next_shape(self.num_tokens)
            # As the pipeline does: a plain step is read after the next one was launched.
            if plain_time is not None and shape == PLAIN and controller.drafting_off:
                controller.record_time(PLAIN, plain_time)
            plain_time = None
            costs, kept = self.costs(self.num_tokens), 0
            cost = costs.plain if shape == PLAIN else costs.rounds[shape]
            took = cost * self.noise()
            self.seconds += took
            while kept < shape.size and self.dice.random() < self.alpha(self.num_tokens):
                kept += 1
            self.num_tokens += kept + 1
            if shape != PLAIN:
                controller.record(shape, kept)
            # Only what follows its like is comparable.
            if before is not None and (before == PLAIN) == (shape == PLAIN):
                if shape != PLAIN:
                    controller.record_time(shape, took)
                elif was_off:
                    plain_time = took
            before = shape
        return (self.seconds - start[0]) / (self.num_tokens - start[1])


def oracle(costs: RoundCosts, alpha: float) -> float:
    """Seconds per token of the best choice by somebody who is told everything."""
    best = min(cost / expected_tokens([alpha], s.size) for s, cost in costs.rounds.items())
    return min(best, costs.plain) * 1.026  # the mean of the noise


def settled(costs: RoundCosts, known: RoundCosts, alpha: float, seed: int) -> tuple[float, float]:
    """The oracle's speed over ours once settled, and ours over plain from the beginning."""
    machine = Machine(lambda n: costs, lambda n: alpha, seed)
    controller = AdaptiveController(LiveCosts(known, 0.5))
    machine.write(controller, 100)
    early = costs.plain * 1.026 * machine.num_tokens / machine.seconds
    machine.write(controller, SETTLED)
    return oracle(costs, alpha) / machine.write(controller, NUM_TOKENS), early


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


@pytest.mark.parametrize("wrong", thorough(WRONG, "guess 0"))
@pytest.mark.parametrize("alpha", thorough(ALPHAS, 0.0, 0.6))
@pytest.mark.parametrize("name", thorough(MACHINES, "flat"))
def test_close_to_the_oracle_whatever_was_known(name, alpha, wrong):
    costs = MACHINES[name]
    results = [settled(costs, WRONG[wrong](costs), alpha, seed) for seed in range(8)]
    assert mean(share for share, _ in results) > 0.95
    assert mean(early for _, early in results) > 0.95


@pytest.mark.exhaustive
@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8])
def test_costs_that_change_as_the_context_grows(alpha):
    """Attention over the context makes long drafts dearer; what was known is of its beginning."""

    def costs(num_tokens: int) -> RoundCosts:
        grown = num_tokens / 1000
        return scaled(FLAT, 1 + 0.3 * grown, lambda k: 1 + grown * (0.25 + 0.05 * k))

    shares = []
    for seed in range(24):  # they lie between 0.90 and 1.0
        machine = Machine(costs, lambda n: alpha, seed)
        controller = AdaptiveController(LiveCosts(FLAT, 0.5))
        machine.write(controller, SETTLED)
        best = mean(oracle(costs(n), alpha) for n in range(SETTLED, 3000, 10))
        shares.append(best / machine.write(controller, 3000))
    assert mean(shares) > 0.95


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrong", ["right", "rounds 2x", "plain 2x"])
def test_acceptance_that_changes_in_mid_text(wrong):
    """Never much slower than plain, and faster over the whole than without the second half."""

    def alpha(num_tokens: int) -> float:
        return 0.05 if num_tokens < 400 else 0.85

    speedups = []
    for seed in range(8):
        machine = Machine(lambda n: FLAT, alpha, seed)
        controller = AdaptiveController(LiveCosts(WRONG[wrong](FLAT), 0.5))
        assert machine.write(controller, 400) < 1.026 / 0.95
        speedups.append(1.026 / machine.write(controller, 2400))
    assert mean(speedups) > 1.6  # of 2.4 that are to be had: it has to find out


@pytest.mark.parametrize(("factor", "alpha"), [(1.5, 0.05), (0.7, 0.6)])
def test_plain_steps_are_timed_though_they_are_remembered(factor, alpha):
    """No drafted round shows that they are remembered wrongly: all take what they are said to."""
    known = scaled(GENTLE, factor, lambda k: 1.0)
    shares = []
    for seed in range(24):  # one that turns drafting off at once has 0.68
        machine = Machine(lambda n: GENTLE, lambda n: alpha, seed)
        seconds = machine.write(AdaptiveController(LiveCosts(known, 2.0)), 400)
        shares.append(oracle(GENTLE, alpha) / seconds)
    assert mean(shares) > 0.94


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_a_machine_that_changes_its_pace_changes_no_comparison(factor):
    """What is timed in a slow moment is compared with what was timed in a fast one."""
    costs, shape = LiveCosts(GENTLE, 2.0), DraftShape(2)
    before = GENTLE.rounds[shape]
    for number in range(30):
        pace = 1.0 if number < 10 else factor
        if number < 5:
            costs.record(PLAIN, GENTLE.plain)
        else:
            costs.record(shape, pace * before)
        costs.num_tokens += 2
    now = costs.current
    assert now.rounds[shape] == pytest.approx(factor * before, rel=0.05)
    assert now.plain == pytest.approx(factor * GENTLE.plain, rel=0.08)


def test_one_time_that_something_came_between_says_little_of_the_pace():
    costs, shape = LiveCosts(GENTLE, 2.0), DraftShape(2)
    for seconds in (1.0, 1.0, 1.0, 30.0):
        costs.record(shape, seconds * GENTLE.rounds[shape])
    assert costs.current.plain == pytest.approx(GENTLE.plain, rel=0.2)
    for _ in range(5):
        costs.record(shape, GENTLE.rounds[shape])
    assert costs.current.plain == pytest.approx(GENTLE.plain, rel=0.02)


def test_what_is_settled_stays_as_it_is():
    """For processes that share a model, and must all decide alike."""
    costs = LiveCosts(FLAT)
    for shape in (PLAIN, *FLAT.rounds):
        costs.record(shape, 100.0)
    assert costs.current == FLAT and costs.num_times(PLAIN) == float("inf")


def test_what_was_learned_is_kept_once_it_can_be_compared():
    kept: list[RoundCosts] = []
    costs = LiveCosts(FLAT, 0.5, kept.append)
    costs.record(DraftShape(1), 2 * FLAT.rounds[DraftShape(1)])
    costs.close()
    assert kept == []
    costs.record(PLAIN, 2 * FLAT.plain)
    costs.close()
    assert kept[0].plain == pytest.approx(2 * FLAT.plain, rel=0.02)
    for shape, seconds in FLAT.rounds.items():  # those that were not timed, by those that were
        assert kept[0].rounds[shape] == pytest.approx(2 * seconds, rel=0.05)


@pytest.mark.parametrize("alpha", thorough([0.2, 0.35, 0.5], 0.35))
def test_lengths_that_are_not_drafted_keep_their_costs_from_text_to_text(alpha):
    """Other work makes some rounds longer: that is the pace, and no length's own."""
    known = GENTLE
    for seed in range(24):
        kept: list[RoundCosts] = []
        controller = AdaptiveController(LiveCosts(known, 2.0, kept.append))
        Machine(lambda n: GENTLE, lambda n: alpha, seed).write(controller, 128)
        controller.close()
        known = (kept or [known])[0]
    off = [known.rounds[s] / known.plain / cost for s, cost in GENTLE.rounds.items()]
    assert statistics.median(off) == pytest.approx(1.0, rel=0.25)


def test_a_text_expects_what_the_texts_before_accepted():
    kept: list[RoundCosts] = []
    tree = DraftShape(2, parse_tree("2x2:4"))
    known = replace(FLAT, rounds={**FLAT.rounds, tree: 1.5})
    controller = AdaptiveController(LiveCosts(known, 2.0, kept.append))
    assert controller.alphas[0] == pytest.approx(1 / 3)
    for i in range(50):
        controller.record(DraftShape(3), 3 if i % 10 else 0, 1 if i % 10 > 2 else 0)
        controller.record(tree, 0)  # of a tree no draft is the first
    for shape in (PLAIN, DraftShape(3)):
        controller.record_time(shape, 1.0)
    controller.close()
    # 45 and 35 of 50 first drafts, and a hundred of which a third was accepted.
    assert kept[0].acceptance == pytest.approx((45 + 35 + 100 / 3) / 200)
    follower = AdaptiveController(LiveCosts(kept[0], 2.0, kept.append))
    assert follower.alphas[0] == pytest.approx(kept[0].acceptance)
    assert kept[0].as_guess().acceptance == kept[0].acceptance, "whatever became of its costs"


def test_only_what_is_comparable_is_timed(monkeypatch):
    now = iter([1.0, 3.0, 4.0, 5.0, 6.0, 6.5, 6.6, 7.6, 7.7, 8.7, 9.7])
    monkeypatch.setattr(pipeline.time, "perf_counter", lambda: next(now))
    clock, draft = pipeline.RoundClock(), DraftShape(2)
    assert clock.seconds(PLAIN, False) is None  # at 1: nothing came before
    assert clock.seconds(draft, False) is None  # at 3: it waited for a plain step
    assert clock.seconds(draft, False) == 1.0  # at 4
    assert clock.seconds(PLAIN, False) is None  # at 5
    assert clock.seconds(PLAIN, True) == 1.0  # at 6
    with clock.pausing():  # from 6.5 to 6.6
        pass
    assert clock.seconds(PLAIN, True) == pytest.approx(1.6)  # at 7.6
    with clock.pausing():  # from 7.7 to 8.7: the caller kept the device waiting
        pass
    assert clock.seconds(PLAIN, True) is None  # at 9.7


class Steps:
    """A runner of endless rounds, none of which takes any time."""

    num_tokens, is_running = 0, True

    def launch(self, shape: DraftShape) -> DraftShape:
        return shape

    def can_run_ahead(self, done: DraftShape) -> bool:
        return done == PLAIN

    def can_launch_before_read(self, shape: DraftShape) -> bool:
        return True

    def commit_plain(self, done: DraftShape) -> None:
        """It is nowhere."""

    def finish(self, done: DraftShape) -> None:
        """It is done."""

    def acceptance_of(self, done: DraftShape) -> tuple[DraftShape, tuple[int]] | None:
        return None if done == PLAIN else (done, (0,))

    def retire(self, done, upcoming, controller) -> DraftShape | None:
        return upcoming


def test_the_first_and_the_last_of_some_plain_steps_are_not_timed(monkeypatch):
    """By the time when the last but one is read, the device may be done with the last as well."""
    monkeypatch.setattr(pipeline.RoundClock, "MOST_PAUSE", float("inf"))

    controller, timed = ScriptedController([2, 2, 0, 0, 0, 0, 3, 3, 0, 3, 0, 0, 3]), []
    monkeypatch.setattr(
        controller, "record_time", lambda shape, seconds: timed.append((count, shape.size))
    )
    rounds = zip(range(13), pipeline.Pipeline(Steps(), controller), strict=False)
    for count, _ in rounds:  # noqa: B007
        pass
    assert timed == [(0, 2), (2, 0), (3, 0), (6, 3)]


def test_what_is_learned_of_a_whole_batch_is_kept():
    kept: list[RoundCosts] = []
    one, three = DraftShape(1), DraftShape(3)
    together = RoundCosts(2.0, {one: 2.4, three: 3.0})
    costs = LiveBatchCosts(BatchCosts(FLAT, together, 4), 0.5, kept.append)
    live = costs.of(4)
    for _ in range(8):
        live.record(PLAIN, 2.0)
        live.record(one, 4.8)
    live.count_first(True)
    live = costs.of(3)
    (learned,) = kept
    assert learned.acceptance == pytest.approx((1 + 100 / 3) / 101)
    known = BatchCosts(FLAT, learned, 4)
    assert known.of(4).acceptance == known.of(2).acceptance == learned.acceptance
    assert learned.plain == pytest.approx(2.0) and [*learned.rounds] == [one, three]
    # Half the way from 2.4 to 4.8; and more drafts are never cheaper.
    assert learned.rounds[one] == pytest.approx(3.39, rel=0.02)
    assert learned.rounds[three] == learned.rounds[one]
    live.record(one, 9.0)
    live.record(PLAIN, 9.0)
    live.count_first(True)
    live.close()  # of fewer requests nothing is kept
    assert len(kept) == 1


def test_what_is_learned_of_a_batch_goes_along_when_its_size_changes():
    large = scaled(FLAT, 3.0, lambda size: 3.0)
    costs = LiveBatchCosts(BatchCosts(FLAT, large, 3), num_known=0.5)
    three = costs.of(3)
    assert three.current == large and costs.of(5).current == large
    three, one = costs.of(3), DraftShape(1)
    for _ in range(8):  # rounds take twice what was known, plain steps what was known
        three.record(one, 2 * large.rounds[one])
        three.record(PLAIN, large.plain)
    two, known = costs.of(2).current, BatchCosts(FLAT, large, 3).of(2)
    assert two.plain == pytest.approx(known.plain, rel=0.1)
    assert two.rounds[one] == pytest.approx(2 * known.rounds[one], rel=0.1)
    firm = LiveBatchCosts(BatchCosts(FLAT, large, 3))
    firm.of(3).record(one, 100.0)
    assert firm.of(2).current.rounds[one] == pytest.approx(known.rounds[one])
