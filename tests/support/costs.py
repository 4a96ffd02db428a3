"""What test files share about the draft length: costs of rounds, a controller by script."""

from collections.abc import Callable

from mlx_eagle.decoding.round_costs import Estimate, RoundCosts
from mlx_eagle.drafters.tree import PLAIN, DraftPlan, DraftShape

Curve = Callable[[DraftShape, int], float]


def curve(of_draft: Callable[[int], float], per_request: float = 1.0) -> Curve:
    """Plain steps by drafted tokens, of several requests so many times as much."""

    def cost(shape: DraftShape, num_requests: int) -> float:
        one = 1.0 if shape == PLAIN else of_draft(shape.num_rows - 1)
        return one * (1 + per_request * (num_requests - 1))

    return cost


FLAT = curve(lambda k: 1.1 + 0.13 * k)
LINEAR = curve(lambda k: 1.0 + 1.04 * k)


class SettledCosts(RoundCosts):
    """RoundCosts that are known, and that no round corrects."""

    def record(self, num_requests, shape, seconds):
        """Nothing is learnt."""

    def estimates(self, shapes, num):
        return {shape: Estimate(self._curve(shape, num), 0.0) for shape in (PLAIN, *shapes)}


class ScriptedController:
    """Sizes by a script; drafting is off in its zeros."""

    never_pays = False

    def __init__(self, sizes):
        self.sizes, self.drafting_off, self.events, self.i = sizes, False, [], 0
        self.recorded = []

    def next_plan(self, num_tokens, matches=()):
        size = self.sizes[self.i % len(self.sizes)]
        self.i += 1
        self.drafting_off = size == 0
        return DraftPlan(DraftShape(size))

    def record(self, shape, num_accepted, seconds, ranks=(), copies=()):
        self.recorded.append((shape, num_accepted, seconds))

    def resize(self, num_requests):
        pass
