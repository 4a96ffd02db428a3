"""Acceptance statistics: how often a drafted token was kept lately, by its place in the draft.

Plain numbers. ``auto`` chooses lengths by them, and ``CopyingDrafter`` between copies and drafts.
"""

from collections.abc import Sequence
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from operator import mul

from .tree import DraftShape

PRIOR_WEIGHT = 8.0  # rounds that what is believed before anything was seen is worth
MEMORY = 0.98  # what a round's evidence weighs one round later: half is forgotten in 34
NEXT_CHOICE = 0.25  # that a further child is right where those before are not: .52 is .65 with two
STEPS = 64  # between 0 and 1, to which chances are rounded, so that trees are looked up


class Acceptance:
    """The share of tokens kept at each place of a draft, given that those before it were kept.

    What is little known leans on the place before. Places may count from elsewhere than the
    start of a draft: those of a copy count how long a match it continues.
    """

    def __init__(self, first: float, num_places: int, rise: float = 0.0):
        """``first`` is what is believed of the first place before anything was seen.

        Each place is believed to be wrong more seldom than the one before, by ``rise`` (0 to 1).
        """
        self._first, self._rise = first, rise
        self._reached = [0.0] * num_places
        self._kept = [0.0] * num_places

    def fade(self, factor: float = MEMORY) -> None:
        """Let all that was seen so far weigh less."""
        self._reached = [factor * n for n in self._reached]
        self._kept = [factor * n for n in self._kept]

    def observe(
        self, start: int, num_drafted: int, num_kept: int, shares: Sequence[float] = ()
    ) -> None:
        """Of a draft that began at place ``start`` so many tokens were kept.

        ``shares``: what a kept token is worth, by place, where chance had more than one try.
        """
        for i in range(min(num_kept + 1, num_drafted)):
            place = min(start + i, len(self._reached) - 1)
            self._reached[place] += 1
            self._kept[place] += (shares[i] if shares else 1.0) * (i < num_kept)

    @property
    def places(self) -> list[float]:
        """By place, the chance of a token to be kept where those before it are."""
        places, before = [], self._first
        for kept, reached in zip(self._kept, self._reached, strict=True):
            before = (kept + PRIOR_WEIGHT * before) / (reached + PRIOR_WEIGHT)
            places.append(before)
            before += self._rise * (1 - before)
        return places

    def along(self, start: int, size: int) -> list[float]:
        """For each of ``size`` tokens from place ``start`` on, the chance that it is kept."""
        return list(accumulate(_run(self.places, size, start), mul))


def expected_tokens(alphas: list[float], size: int) -> float:
    """Tokens that a chain of ``size`` emits: 1 + a1 + a1 a2 + ...; the last alpha is repeated.

    [0.8, 0.5], 3 -> 1 + 0.8 + 0.4 + 0.2
    """
    return 1.0 + float(sum(accumulate(_run(alphas or [0.0], size), mul)))


def _run(places: Sequence[float], size: int, start: int = 0) -> list[float]:
    """The chances at ``size`` places from ``start`` on; the last one known is repeated."""
    return [places[min(start + i, len(places) - 1)] for i in range(size)]


class DraftAcceptance(Acceptance):
    """Acceptance in chains and trees of one text: what a draft of any form is expected to emit.

    ``trees`` is what trees have emitted, and what was expected of them, by shape: their ratio is
    of the drafter more than of the text, and so is kept from one to the next.
    """

    def __init__(
        self, first: float, num_places: int, trees: dict[DraftShape, tuple[float, float]]
    ):
        super().__init__(first, num_places)
        self._of_trees = trees

    def learn(self, shape: DraftShape, num_kept: Sequence[int]) -> float:
        """See a round; ``num_kept`` by request. Returns the share of first drafts of a chain."""
        shares = [1.0] * shape.size
        if shape.tree is not None:
            places = self.places
            reached = _reached(shape, places)
            emitted, expected = self._of_trees.get(shape, (0.0, 0.0))
            emitted = MEMORY * emitted + sum(num_kept) + len(num_kept)
            expected = MEMORY * expected + len(num_kept) * (1 + sum(reached))
            self._of_trees[shape] = emitted, expected
            levels = [now / before for before, now in pairwise((1.0, *reached))]
            shares[: len(levels)] = [a / b for a, b in zip(places, levels, strict=False)]
        self.fade()
        for kept in num_kept:
            self.observe(0, shape.size, kept, shares)
        return shares[0] * sum(kept > 0 for kept in num_kept) / len(num_kept)

    def expected(self, shape: DraftShape, places: list[float]) -> float:
        """Tokens that a round emits, the target's own included, at these ``places``."""
        if shape.tree is None:
            return expected_tokens(places, shape.size)
        emitted, expected = self._of_trees.get(shape, (0.0, 0.0))
        ratio = (emitted + PRIOR_WEIGHT) / (expected + PRIOR_WEIGHT)
        return (1 + sum(_reached(shape, places))) * ratio


def _reached(shape: DraftShape, places: Sequence[float]) -> tuple[float, ...]:
    """How likely a tree has the right token at each level: see ``_reached_at``."""
    run = _run(places, shape.size)
    return _reached_at(shape, tuple(max(1, round(STEPS * place)) / STEPS for place in run))


@cache
def _reached_at(shape: DraftShape, places: tuple[float, ...]) -> tuple[float, ...]:
    """By level, the sum of the chances of a tree's nodes there, the likeliest ``nodes`` of all.

    A node's chance is the product of those along its path. The first child at level i is right
    with ``places[i]``, and each further one with ``NEXT_CHOICE`` of what those before it leave,
    or with half the chance of the one before it where that is less.
    """
    assert shape.tree is not None
    reached, num_left = [0.0] * shape.size, shape.tree.nodes

    def children(chance: float, level: int) -> list[tuple[float, int]]:
        ranks, left = [places[level]], 1.0
        for _ in range(shape.width - 1):
            left -= ranks[-1]
            ranks.append(min(left * NEXT_CHOICE, ranks[-1] / 2))
        return [(-chance * rank, level) for rank in ranks]

    candidates = children(1.0, 0)
    heapify(candidates)
    while candidates and num_left:
        chance, level = heappop(candidates)
        reached[level] -= chance
        num_left -= 1
        if level + 1 < shape.size:
            for child in children(-chance, level + 1):
                heappush(candidates, child)
    return tuple(chance for chance in reached if chance > 0)
