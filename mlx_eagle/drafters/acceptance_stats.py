"""Acceptance statistics: how often a drafted token was kept lately, by its place in the draft.

Plain numbers. ``auto`` chooses lengths by them, and ``CopyingDrafter`` between copies and drafts.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from .tree import DraftShape

PRIOR_WEIGHT = 8.0  # rounds that what is believed before anything was seen is worth
MEMORY = 0.98  # what a round's evidence weighs one round later: half is forgotten in 34


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

    def observe(self, start: int, num_drafted: int, num_kept: int, share: float = 1.0) -> None:
        """Of a draft that began at place ``start`` so many tokens were kept.

        ``share``: what one kept token is worth, where chance had more than one try.
        """
        for i in range(min(num_kept + 1, num_drafted)):
            place = min(start + i, len(self._reached) - 1)
            self._reached[place] += 1
            self._kept[place] += share * (i < num_kept)

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
        places = self.places
        run = [places[min(start + i, len(places) - 1)] for i in range(size)]
        return list(accumulate(run, mul))


def expected_tokens(alphas: list[float], size: int) -> float:
    """Tokens that a chain of ``size`` emits: 1 + a1 + a1 a2 + ...; the last alpha is repeated.

    [0.8, 0.5], 3 -> 1 + 0.8 + 0.4 + 0.2
    """
    run = [alphas[min(i, len(alphas) - 1)] if alphas else 0.0 for i in range(size)]
    return 1.0 + float(sum(accumulate(run, mul)))


class DraftAcceptance(Acceptance):
    """Acceptance in chains and trees of one text: what a draft of any form is expected to emit.

    A tree of w children per node has its token right more often than a chain, whose chances
    follow from that; what trees have emitted beyond or below what is expected is kept by tree.
    """

    def __init__(self, first: float, num_places: int):
        super().__init__(first, num_places)
        self._of_trees: dict[DraftShape, tuple[float, float]] = {}  # tokens: emitted, and expected

    def learn(self, shape: DraftShape, num_kept: Sequence[int]) -> float:
        """See a round; ``num_kept`` by request. Returns the share of first drafts of a chain."""
        places = self.places
        share = places[0] / _of_some(places[0], shape.width)  # that the first child was right
        if shape.tree is not None:
            emitted, expected = self._of_trees.get(shape, (0.0, 0.0))
            emitted = MEMORY * emitted + sum(num_kept) + len(num_kept)
            expected = MEMORY * expected + len(num_kept) * _likely(shape, places)
            self._of_trees[shape] = emitted, expected
        self.fade()
        for kept in num_kept:
            self.observe(0, shape.size, kept, share)
        return share * sum(kept > 0 for kept in num_kept) / len(num_kept)

    def expected(self, shape: DraftShape, places: list[float]) -> float:
        """Tokens that a round emits, the target's own included, at these ``places``."""
        emitted, expected = self._of_trees.get(shape, (0.0, 0.0))
        return _likely(shape, places) * (emitted + PRIOR_WEIGHT) / (expected + PRIOR_WEIGHT)


def _likely(shape: DraftShape, places: list[float]) -> float:
    return expected_tokens([_of_some(chance, shape.width) for chance in places], shape.size)


def _of_some(chance: float, width: int) -> float:
    """How likely one of ``width`` children is right, where the likeliest is so with ``chance``.

    Each further one counts as a quarter of a try: .77, 3 -> .89 as EAGLE-3 heads have it.
    """
    return float(1 - (1 - chance) ** (1 + (width - 1) / 4))
