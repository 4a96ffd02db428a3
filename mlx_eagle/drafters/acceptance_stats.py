"""Acceptance statistics: how often a drafted token was kept lately, by its place in the draft.

Plain numbers. ``auto`` chooses lengths by them, and ``CopyingDrafter`` between copies and drafts.
"""

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul

from .tree import DraftShape

PRIOR_WEIGHT = 8.0  # rounds that what is believed before anything was seen is worth
# Rounds that what others tell is worth: the first place's chance differs by .10 from text to text.
OTHERS_WEIGHT = 16.0
MEMORY = 0.98  # what a round's evidence weighs one round later: half is forgotten in 34
FURTHER = 0.5  # of the chance of a first child, that a further one is right where those are not
TREES_WEIGHT = 100.0  # tokens that what is believed of trees is worth, see ``_tree_share``
STEPS = 64  # between 0 and 1, to which chances are rounded, so that trees are looked up


class Acceptance:
    """The share of tokens kept at each place of a draft, given that those before it were kept.

    What is little known leans on what is believed. Places may count from elsewhere than the
    start of a draft: those of a copy count how long a match it continues.
    """

    def __init__(self, believed: "float | Acceptance", num_places: int, rise: float = 0.0):
        """``believed``, before anything was seen: of the first place, or what others tell of all.

        Where it is the first one's, the others lean on the place before, and each is believed to
        be wrong more seldom than that by ``rise`` (0 to 1).
        """
        self._believed, self._rise = believed, rise
        self._reached = [0.0] * num_places
        self._kept = [0.0] * num_places
        self._emitted = self._foretold = 0.0  # tokens of trees
        self._places: list[float] = []  # until more is seen, and likewise:
        self._expected: dict[DraftShape, float] = {}

    def fade(self, factor: float = MEMORY) -> None:
        """Let all that was seen so far weigh less."""
        self._reached = [factor * n for n in self._reached]
        self._kept = [factor * n for n in self._kept]
        self._emitted, self._foretold = factor * self._emitted, factor * self._foretold
        self._places, self._expected = [], {}

    def observe(self, start: int, num_drafted: int, num_kept: int) -> None:
        """Of a draft that began at place ``start`` so many tokens were kept."""
        for i in range(min(num_kept + 1, num_drafted)):
            self._see(start + i, i < num_kept)

    def learn(
        self,
        shape: DraftShape,
        num_kept: Sequence[int],
        ranks: Sequence[int],
        memory: float = MEMORY,
    ) -> None:
        """See a round: what each request kept of a chain, or ``ranks`` of a tree.

        Places are about the likeliest children, which chains are made of; so a tree, where of
        each level ``ranks`` says which child was kept, 0 the likeliest, tells as much. What was
        seen before weighs ``memory`` of what it did.
        """
        foretold = 0.0 if shape.tree is None else expected_tokens(self.places, shape)
        self.fade(memory)
        if shape.tree is None:
            for kept in num_kept:
                self.observe(0, shape.size, kept)
            return
        self._foretold += foretold
        self._emitted += 1 + sum(rank >= 0 for rank in ranks)
        for level, rank in enumerate(ranks):
            self._see(level, rank == 0)

    def _see(self, place: int, is_kept: bool) -> None:
        place = min(place, len(self._reached) - 1)
        self._reached[place] += 1
        self._kept[place] += is_kept
        self._places, self._expected = [], {}

    @property
    def places(self) -> list[float]:
        """By place, the chance of a token to be kept where those before it are."""
        self._places = self._places or self._chances()
        return self._places

    def expected_tokens(self, shape: DraftShape) -> float:
        """Tokens that a draft of ``shape`` emits at these chances; of trees as they did lately."""
        if shape not in self._expected:
            share = 1.0 if shape.tree is None else self._tree_share
            self._expected[shape] = share * expected_tokens(self.places, shape)
        return self._expected[shape]

    @property
    def _tree_share(self) -> float:
        """The tokens that trees emitted, of those that the chances by place foretold.

        Where much is accepted that is 1.06, as likely tokens are drafted further, and else .97.
        A round tells of it with a spread of .45, and texts differ by .07: so 41 rounds, or
        100 tokens, tell as much as what the others did.
        """
        given = self._believed
        before = given._tree_share if isinstance(given, Acceptance) else 1.0
        more = self._emitted - before * self._foretold
        return before + more / (self._foretold + TREES_WEIGHT)

    def _chances(self) -> list[float]:
        places: list[float] = []
        given = self._believed
        if isinstance(given, Acceptance):
            others, before, weight = given.places, 0.0, OTHERS_WEIGHT
        else:
            others, before, weight = [], given, PRIOR_WEIGHT
        for i, (kept, reached) in enumerate(zip(self._kept, self._reached, strict=True)):
            if others:
                before = others[i]
            places.append((kept + weight * before) / (reached + weight))
            before = places[-1] + self._rise * (1 - places[-1])
        return places

    def along(self, start: int, size: int) -> list[float]:
        """For each of ``size`` tokens from place ``start`` on, the chance that it is kept."""
        return list(accumulate(_run(self.places, size, start), mul))


def expected_tokens(places: list[float], shape: DraftShape) -> float:
    """Tokens that a draft emits, the target's own included, at these chances by place.

    Of a chain that is 1 + a1 + a1 a2 + ..., where the last chance is repeated:
    [0.8, 0.5], 3 -> 1 + 0.8 + 0.4 + 0.2
    """
    run = _run(places or [0.0], shape.size)
    if shape.tree is None:
        return 1.0 + float(sum(accumulate(run, mul)))
    return _tokens_of_tree(shape, tuple(max(1, round(STEPS * place)) / STEPS for place in run))


def _run(places: list[float], size: int, start: int = 0) -> list[float]:
    """The chances at ``size`` places from ``start`` on; the last one known is repeated."""
    known = places[start : start + size]
    return known + places[-1:] * (size - len(known))


@lru_cache(1024)
def _tokens_of_tree(shape: DraftShape, places: tuple[float, ...]) -> float:
    """1 and the chances of the tree's nodes, which are the likeliest ``nodes`` of all.

    A node's chance is the product of those along its path. The first child at level i is right
    with ``places[i]``, and each further one with ``FURTHER`` of that, where those before are not.
    """
    assert shape.tree is not None
    found, candidates = 1.0, [(-places[0], 1, 1, 1 - places[0])]
    for _ in range(shape.tree.nodes):
        # A child is less likely than its parent and the siblings before it: they come one by one.
        chance, level, rank, rest = heappop(candidates)
        found -= chance
        if rank < shape.width:
            further = FURTHER * places[level - 1]
            heappush(candidates, (-rest * further, level, rank + 1, rest * (1 - further)))
        if level < shape.size:
            first = places[level]
            heappush(candidates, (chance * first, level + 1, 1, -chance * (1 - first)))
    return found
