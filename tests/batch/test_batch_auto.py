"""``auto`` for several requests: a simulator of short texts on a machine that goes in waves.

What rounds cost is measured there as it is here, by times that are off by a tenth now and then.
"""

import math
import random
from collections.abc import Callable

import pytest
from grids import thorough

from mlx_eagle.decoding.controller import AdaptiveController, FixedController
from mlx_eagle.decoding.costs import PLAIN, BatchCosts, DraftShape, RoundCosts, typical
from mlx_eagle.decoding.live_costs import LiveBatchCosts

NUM_TOKENS = 63  # of each request, after its first one
MEASURED = (1, 3, 7)
DRAINED = 0.1  # plain steps that it costs to turn drafting on or off


def costs_of(plain: float, *rounds: float) -> RoundCosts:
    """Rounds of k = 1, 2, ... in plain steps."""
    return RoundCosts(plain, {DraftShape(k): plain * c for k, c in enumerate(rounds, 1)})


ALONE = costs_of(0.85, 1.3, 1.45, 1.52, 1.7, 1.85, 2.0, 2.1)
MACHINES = {  # requests, first drafts accepted, costs: near what the demo pair has
    "2, gentle": (2, 0.45, costs_of(1.0, 1.24, 1.38, 1.42, 1.62, 1.8, 2.0, 2.1)),
    "2, steep": (2, 0.45, costs_of(1.0, 1.32, 1.55, 1.62, 1.9, 2.0, 2.2, 2.3)),
    "4": (4, 0.42, costs_of(1.0, 1.22, 1.48, 1.72, 1.9, 2.1, 2.35, 2.5)),
    "4, hopeless text": (4, 0.05, costs_of(1.0, 1.22, 1.48, 1.72, 1.9, 2.1, 2.35, 2.5)),
}


class Waves:
    """What a time is multiplied with: slow waves, a little noise, and now and then a lot."""

    SWING, HOLD = 0.035, 0.9

    def __init__(self, dice: random.Random):
        self.dice, self.level = dice, 0.0

    def __call__(self) -> float:
        self.level = self.HOLD * self.level + self.dice.gauss(0, self.SWING)
        noise = 1 + abs(self.dice.gauss(0, 0.03)) + (0.4 if self.dice.random() < 0.03 else 0)
        return math.exp(self.level) * noise


def measured(costs: RoundCosts, noise: Callable[[], float]) -> RoundCosts:
    """As ``batch.costs`` measures: lengths in turn, two or four of each at a time."""
    shapes = [PLAIN, *map(DraftShape, MEASURED)]
    times: dict[DraftShape, list[float]] = {shape: [] for shape in shapes}
    for shape in shapes * 3:
        cost, num = (costs.rounds[shape], 2) if shape.size else (costs.plain, 4)
        times[shape] += [cost * noise() for _ in range(num)]
    plain, *rounds = map(typical, times.values())
    return RoundCosts(plain, dict(zip(shapes[1:], rounds, strict=True)))


class Simulated:
    """A batch of requests whose drafts are accepted at random; counts seconds."""

    def __init__(self, known: BatchCosts, alpha: float, noise: Waves, dice: random.Random):
        self.known, self.alpha, self.noise, self.dice = known, alpha, noise, dice
        self.left = [NUM_TOKENS] * known.batch_size
        self.seconds = self.num_tokens = 0.0
        self.before: DraftShape | None = None
        self.plain_time: float | None = None

    def write(self, controller, costs: LiveBatchCosts | None = None) -> float:
        """All requests to their ends; the seconds that took."""
        while self.left:
            was_off, shape = controller.drafting_off, controller.next_shape(int(self.num_tokens))
            if self.plain_time is not None and shape == PLAIN and controller.drafting_off:
                controller.record_time(PLAIN, self.plain_time)
            self.plain_time = None
            shape = DraftShape(min(shape.size, max(self.left) - 1))
            took = self.take(shape)
            if self.before is not None and (self.before == PLAIN) == (shape == PLAIN):
                if shape != PLAIN:
                    controller.record_time(shape, took)
                elif was_off:
                    self.plain_time = took
            self.before = shape
            kept = [(self.kept(min(shape.size, n - 1)), n) for n in self.left]
            if shape != PLAIN:
                controller.record(shape, *(k for k, n in kept if n > shape.size))
            self.num_tokens += sum(k + 1 for k, _ in kept) / len(kept)
            num_before, self.left = len(self.left), [n - k - 1 for k, n in kept if n > k + 1]
            if costs is not None and 0 < len(self.left) < num_before:
                controller.update_costs(costs.of(len(self.left)))
        controller.close()
        return self.seconds

    def take(self, shape: DraftShape) -> float:
        """Run a round: its seconds, which are counted."""
        costs = self.known.of(len(self.left))
        took = self.noise() * (costs.rounds[shape] if shape.size else costs.plain)
        has_changed = self.before is not None and (self.before == PLAIN) != (shape == PLAIN)
        self.seconds += took + (DRAINED * costs.plain if has_changed else 0.0)
        return took

    def kept(self, size: int) -> int:
        """Of so many drafts; later ones are less often right."""
        num = 0
        while num < size and self.dice.random() < self.alpha * (0.65 if num else 1.0):
            num += 1
        return num


def seconds_of_auto(num: int, alpha: float, costs: RoundCosts, seed: int) -> list[float]:
    """Three batches, one after the other, from costs measured before the first one."""
    noise, dice = Waves(random.Random(1000 + seed)), random.Random(seed)
    true = BatchCosts(ALONE, costs, num)
    kept, seconds = [measured(costs, noise)], []
    for _ in range(3):
        live = LiveBatchCosts(BatchCosts(ALONE, kept[-1], num), 2.0, kept.append)
        batch = Simulated(true, alpha, noise, dice)
        seconds.append(batch.write(AdaptiveController(live.of(num)), live))
    return seconds


def seconds_of_length(num: int, alpha: float, costs: RoundCosts, seed: int, size: int) -> float:
    noise, dice = Waves(random.Random(1000 + seed)), random.Random(seed)
    batch = Simulated(BatchCosts(ALONE, costs, num), alpha, noise, dice)
    return batch.write(FixedController(DraftShape(size)))


@pytest.mark.parametrize("name", thorough(MACHINES, "2, steep"))
def test_short_texts_are_near_the_best_fixed_length(name):
    """Of plain decoding and k = 1, 2, 3, whose speeds nobody knows beforehand."""
    seeds = range(24)
    best = min(
        sum(seconds_of_length(*MACHINES[name], seed, size) for seed in seeds) for size in range(4)
    )
    totals = [
        sum(batch)
        for batch in zip(*(seconds_of_auto(*MACHINES[name], s) for s in seeds), strict=True)
    ]
    shares = [best / total for total in totals]
    assert min(shares) > 0.955 and sum(shares) / 3 > 0.965, shares
