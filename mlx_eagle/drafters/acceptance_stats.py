"""Acceptance statistics: how often a drafted or copied token was kept lately, by its place.

They are plain numbers, from which controllers choose lengths, and copies or drafts.
"""

from bisect import bisect
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from .tree import DraftShape

PRIOR_WEIGHT = 8.0  # rounds that what is believed before anything was seen is worth
# Rounds that what others tell is worth: the first place's chance differs by .10 from text to text.
OTHERS_WEIGHT = 16.0
MEMORY = 0.98  # what a round's evidence weighs one round later: half is forgotten in 34
FURTHER = 0.5  # of the chance of a first child, that a further one is right where those are not
TREES_WEIGHT = 100.0  # tokens that what is believed of trees is worth, see ``_tree_share``
STEPS = 64  # between 0 and 1, to which chances are rounded, so that trees are looked up


class Acceptance:
    """The share of tokens kept at each place of a draft, given that all before it were kept.

    A place that was rarely reached is estimated mostly from the prior.
    """

    def __init__(self, believed: "float | Sequence[float] | Acceptance", num_places: int):
        """``believed`` is the prior: chances by place, or the acceptance of other texts.

        If it has only the first place, each other place starts from the place before it.
        """
        self._believed = believed
        self._reached = [0.0] * num_places
        self._kept = [0.0] * num_places
        self._emitted = self._foretold = 0.0  # tokens of trees
        self._places: list[float] = []  # until more is seen, and likewise:
        self._expected: dict[DraftShape, float] = {}

    def fade(self, factor: float = MEMORY) -> None:
        """Reduce the weight of everything seen so far."""
        self._reached = [factor * n for n in self._reached]
        self._kept = [factor * n for n in self._kept]
        self._emitted = factor * self._emitted
        self._foretold = factor * self._foretold
        self._places = []
        self._expected = {}

    def observe(self, num_drafted: int, num_kept: int) -> None:
        """Record a draft whose first ``num_kept`` tokens were kept."""
        for place in range(min(num_kept + 1, num_drafted)):
            self.see(place, place < num_kept)

    def learn(
        self,
        shape: DraftShape,
        num_kept: Sequence[int],
        ranks: Sequence[int],
        memory: float = MEMORY,
    ) -> None:
        """Record a round: tokens that each request kept of a chain, or ``ranks`` of a tree.

        ``ranks`` says which child was kept at each level of a tree, 0 the likeliest. Places are
        about the likeliest children, which chains are made of, so a tree tells as much. The
        weight of everything seen before is multiplied by ``memory``.
        """
        foretold = 0.0 if shape.tree is None else expected_tokens(self.places, shape)
        self.fade(memory)
        if shape.tree is None:
            for kept in num_kept:
                self.observe(shape.size, kept)
            return
        self._foretold += foretold
        self._emitted += 1 + sum(rank >= 0 for rank in ranks)
        for level, rank in enumerate(ranks):
            self.see(level, rank == 0)

    def see(self, place: int, is_kept: bool) -> None:
        """Record whether the token at a place was kept; all tokens before it were."""
        place = min(place, len(self._reached) - 1)
        self._reached[place] += 1
        self._kept[place] += is_kept
        self._places = []
        self._expected = {}

    @property
    def places(self) -> list[float]:
        """The chance, by place, that a token is kept if all before it are."""
        self._places = self._places or self._chances()
        return self._places

    def expected_tokens(self, shape: DraftShape) -> float:
        """Expected tokens of a draft of ``shape``; for trees, scaled by what they emitted."""
        if shape not in self._expected:
            share = 1.0 if shape.tree is None else self._tree_share
            self._expected[shape] = share * expected_tokens(self.places, shape)
        return self._expected[shape]

    @property
    def _tree_share(self) -> float:
        """Tokens that trees emitted, as a share of the number predicted from the chances by place.

        It is 1.06 if much is accepted, as likely tokens are drafted further, and else .97.
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
        weight = OTHERS_WEIGHT if isinstance(given, Acceptance) else PRIOR_WEIGHT
        others = given.places if isinstance(given, Acceptance) else given
        for i, (kept, reached) in enumerate(zip(self._kept, self._reached, strict=True)):
            if isinstance(others, Sequence):
                before = others[i]
            else:
                before = places[-1] if places else others
            places.append((kept + weight * before) / (reached + weight))
        return places

    def along(self, size: int) -> list[float]:
        """The chance of each of the first ``size`` tokens to be kept."""
        return list(accumulate(_run(self.places, size), mul))


class CopySeen(NamedTuple):
    """Record of how far a copy after a match of ``match_length`` tokens was right.

    ``num_seen`` tokens of the copy were compared with the text, up to the first wrong one, and
    the first ``num_right`` of them were right. ``is_answer``: copied from another answer.
    """

    match_length: int
    num_seen: int
    num_right: int
    is_answer: bool = False


COPY_PLACES = (1, 2, 3, 4, 5, 6, 8, 11, 15, 21, 29, 41)
"""Tokens that a copied token continues, its match and the copy before it: the least of a class."""
WRONG_BY_TOKEN = 0.75  # chance of a copy to be wrong, believed, that each token more leaves of it
MOST_BELIEVED = 16  # tokens, beyond which no more is believed
ANSWERS_SHARE = 0.5  # of that belief, for copies from other answers
COPY_MEMORY = 0.99  # what a round's evidence on copies weighs one round later


class CopyAcceptance:
    """The share of copied tokens that were right lately, by the length of text they continue.

    Every round shows it, since even copies that were not verified can be compared with the text.
    Copies from other answers are counted separately.
    """

    def __init__(self, others: "CopyAcceptance | None" = None):
        """``others`` are the shares of other texts, which are the prior."""
        believed = [1 - WRONG_BY_TOKEN ** min(place, MOST_BELIEVED) for place in COPY_PLACES]
        halved = [ANSWERS_SHARE * chance for chance in believed]
        given = [believed, halved] if others is None else others._shares
        num = len(COPY_PLACES)
        self._shares: list[Acceptance] = [Acceptance(prior, num) for prior in given]

    def learn(self, copies: Sequence[CopySeen]) -> None:
        """Record how far the copies of a round were right, verified or not."""
        for seen in copies:
            if seen.num_seen == 0:
                continue
            counts = self._shares[seen.is_answer]
            counts.fade(COPY_MEMORY)
            for i in range(seen.num_seen):
                counts.see(_copy_class(seen.match_length + i), i < seen.num_right)

    def along(self, match_length: int, size: int, is_answer: bool = False) -> list[float]:
        """The chance of each of ``size`` tokens after a match to be kept."""
        places = self._shares[is_answer].places
        chances = (places[_copy_class(match_length + i)] for i in range(size))
        return list(accumulate(chances, mul))


def _copy_class(place: int) -> int:
    return bisect(COPY_PLACES, place) - 1


def expected_tokens(places: list[float], shape: DraftShape) -> float:
    """Expected tokens of a draft, the target's own included, given the chances by place.

    For a chain it is 1 + a1 + a1 a2 + ..., where the last chance is repeated:
    [0.8, 0.5], 3 -> 1 + 0.8 + 0.4 + 0.2
    """
    run = _run(places or [0.0], shape.size)
    if shape.tree is None:
        return 1.0 + float(sum(accumulate(run, mul)))
    return _tokens_of_tree(shape, tuple(max(1, round(STEPS * place)) / STEPS for place in run))


def _run(places: list[float], size: int) -> list[float]:
    """The chances at the first ``size`` places; the last known one is repeated."""
    known = places[:size]
    return known + places[-1:] * (size - len(known))


@lru_cache(1024)
def _tokens_of_tree(shape: DraftShape, places: tuple[float, ...]) -> float:
    """1 and the chances of the tree's nodes, which are the likeliest ``nodes`` of all.

    A node's chance is the product of the chances along its path. The first child at level i is
    right with ``places[i]``, each further one with ``FURTHER`` times that if none before it is.
    """
    assert shape.tree is not None
    found = 1.0
    candidates = [(-places[0], 1, 1, 1 - places[0])]
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
