"""A simulator of texts: machines that take true costs, drafts that are accepted at random."""

import math
import random
from collections.abc import Callable

from costs import FLAT, LINEAR, Curve, curve

from mlx_eagle.drafters.tree import CHAINS, PLAIN, DraftShape

NOISE = 1.026  # the mean of what is added to a time


def by_rows(points: dict[int, float], step: float, overhead: float) -> Curve:
    """By the rows of a pass, on lines between ``points``, and the levels drafted."""

    def cost(shape: DraftShape, num_requests: int) -> float:
        rows = shape.num_rows * num_requests
        low = max(at for at in points if at <= rows)
        high = min((at for at in points if at >= rows), default=low)
        share = (rows - low) / (high - low) if high > low else 0.0
        verify = points[low] + share * (points[high] - points[low])
        return verify + (step * shape.size + overhead if shape != PLAIN else 0.0)

    return cost


# c(2)..c(8) of a float32 pass with OpenBLAS 0.3.34 on an EPYC: 4 and 8 rows are the cheap ones.
BLAS = {1: 1.0, 2: 1.10, 3: 1.16, 4: 1.15, 5: 1.32, 6: 1.48, 7: 1.37, 8: 1.18, 12: 1.6, 16: 1.56}
# The same of a Xeon with AVX-512: 8 rows are no bargain there, and more were not timed.
XEON = {1: 1.0, 2: 1.095, 3: 1.152, 4: 1.196, 5: 1.351, 6: 1.448, 7: 1.426, 8: 1.40, 16: 2.0}
TILES = {1: 1.0, 2: 1.5, 7: 1.66, 8: 1.25, 9: 1.6, 16: 1.3, 17: 2.0, 32: 2.2}
MACHINES = {
    "flat": FLAT,
    "gentle": curve(lambda k: 1.25 + 0.08 * k),
    "knee": curve(lambda k: 1.15 + 0.05 * k + (0.7 if k > 3 else 0.0)),  # room for four rows
    "linear": LINEAR,
    "BLAS": by_rows(BLAS | {32: 2.6, 512: 42.0}, 0.012, 0.12),
    "AVX-512": by_rows(XEON | {32: 3.3, 512: 50.0}, 0.03, 0.045),
    "tiles of 8": by_rows(TILES | {512: 40.0}, 0.03, 0.1),
}
# What is thought before any round: packed weights read row by row, or once for five rows.
GUESSES = {
    "row by row": curve(lambda k: 1.1 + 1.05 * k),
    "five rows": curve(lambda k: 1.1 + 0.07 * k + (k > 4)),
}


def chance(shape: DraftShape, alpha: float) -> float:
    """That a level of ``shape`` has the right token, where that of a chain has it with ``alpha``.

    Another form than what the controller expects of trees, fitted to what those of the demo head
    emitted: 1.94, 2.25, 2.6 and 2.9 tokens with 3, 7, 15 and 31 nodes where ``alpha`` is .52.
    """
    if shape.tree is None or alpha == 0:
        return alpha
    per_level = shape.tree.nodes / shape.size
    return alpha + (1 - alpha) * (1 - 0.85 ** (per_level - 1))


def draw_ranks(dice: random.Random, size: int, first: float, likely: float) -> list[int]:
    """Which child is kept at each level that is reached; -1 where none is.

    The first one with the chance ``first``, any with ``likely``.
    """
    found: list[int] = []
    while len(found) < size and -1 not in found:
        draw = dice.random()
        found.append(0 if draw < first else 1 if draw < likely else -1)
    return found


def best(cost: Curve, alpha: float, shapes=CHAINS) -> float:
    """Seconds a token of the best choice by somebody who is told everything."""

    def per_token(shape: DraftShape) -> float:
        p = chance(shape, alpha)
        return cost(shape, 1) / sum(p**i for i in range(shape.size + 1))

    return NOISE * min(1.0, *map(per_token, shapes))


class Machine:
    """Takes true costs for what a controller decides, in the order of the loop.

    ``waves``: how far its pace swings, with a period of 60 plain steps.
    """

    def __init__(
        self,
        cost: Curve,
        alpha: Callable[[int], float],
        seed: int,
        waves: float = 0.0,
        num_requests: int = 1,
    ):
        self.cost, self.alpha, self.waves = cost, alpha, waves
        self.dice, self.num_requests = random.Random(seed), num_requests
        self.seconds, self.num_tokens = 0.0, 0.0
        self.shapes: list[DraftShape] = []

    def took(self, shape: DraftShape) -> float:
        """Other work can only add to a time; now and then a lot."""
        noise = 1 + abs(self.dice.gauss(0, 0.02)) + (0.5 if self.dice.random() < 0.02 else 0.0)
        pace = 1 + self.waves * math.sin(2 * math.pi * self.seconds / 60)
        return self.cost(shape, self.num_requests) * noise * pace

    def ranks(self, shape: DraftShape) -> list[int]:
        """See ``draw_ranks``, at the place where the text is."""
        alpha = self.alpha(int(self.num_tokens))
        return draw_ranks(self.dice, shape.size, alpha, chance(shape, alpha))

    def write(self, controller, num_tokens: int) -> float:
        """Seconds per token of a text of so many."""
        start, begun, before, was_ahead = self.seconds, self.num_tokens, None, False
        shape = controller.next_plan(0).shape
        while self.num_tokens - begun < num_tokens:
            is_ahead = controller.drafting_off and shape == PLAIN
            # Chosen before the round is read; a plain step that runs ahead is committed already.
            following = controller.next_plan(int(self.num_tokens - begun) + is_ahead).shape
            took, ranks = self.took(shape), [self.ranks(shape) for _ in range(self.num_requests)]
            kept = [sum(rank >= 0 for rank in each) for each in ranks]
            self.shapes.append(shape)
            self.seconds += took
            self.num_tokens += 1 + sum(kept) / len(kept)
            is_alike = before is not None and (before == PLAIN) == (shape == PLAIN)
            is_amid = was_ahead and is_ahead and following == PLAIN
            is_comparable = is_alike and (shape != PLAIN or is_amid)
            accepted = () if shape == PLAIN else kept
            controller.record(shape, accepted, took if is_comparable else None, ranks[0])
            before, shape, was_ahead = shape, following, is_ahead
        return (self.seconds - start) / (self.num_tokens - begun)


class BusyMachine(Machine):
    """A machine that does other work: times are off by ``noise``, the pace by ``drift`` a round.

    Both are standard deviations of logarithms. ``work`` is what the text takes without them.
    """

    MOST_PACE = 0.7  # of its logarithm: half or twice the speed

    def __init__(self, cost: Curve, alpha: float, seed: int, noise: float, drift: float):
        super().__init__(cost, lambda num_tokens: alpha, seed)
        self.noise, self.drift = noise, drift
        self.pace = self.work = 0.0

    def took(self, shape: DraftShape) -> float:
        cost = self.cost(shape, 1)
        self.work += cost
        pace = self.pace + self.dice.gauss(0, self.drift)
        self.pace = max(-self.MOST_PACE, min(self.MOST_PACE, pace))
        return cost * math.exp(self.dice.gauss(0, self.noise) + self.pace)
