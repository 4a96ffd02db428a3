"""Drafts copied from the text itself, alone or in turn with another drafter's.

Prompt lookup: Saxena 2023 ("prompt lookup decoding"); Yang et al. 2023, arXiv:2304.04487. Where
the end of the text stands earlier, what followed there is a draft that costs no forward. Which of
two drafts is taken, and how far, follows from what each had accepted lately. Whether a copy would
have been right is seen after every round, whoever drafted it, so none is drafted to see.
"""

from copy import copy
from itertools import accumulate
from operator import mul
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..target.cache_view import CacheView
from .acceptance_stats import Acceptance
from .base import Draft, Drafter, Pick, PickChildren, empty_draft, index_of
from .tree import Tree


class NgramIndex:
    """A growing text, and what followed the latest occurrence of each of its n-grams."""

    def __init__(self, max_ngram: int, min_ngram: int):
        self.text: list[int] = []
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        # A gram is entered when it is followed, so the end of the text is never in here.
        self._follower: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        position = len(self.text)
        for n in self._sizes:
            if n <= position:
                self._follower[tuple(self.text[position - n :])] = position
        self.text.append(token)

    def match(self, size: int) -> tuple[int, list[int]]:
        """``size`` tokens after an earlier occurrence of the text's end; [] if it has none.

        The longest end that occurs before, at its latest place; how long it is comes first. A
        copy that reaches the end of the text reads on in itself: a b c a b -> c a b c a b ...
        """
        for n in self._sizes:
            start = self._follower.get(tuple(self.text[-n:]))
            if start is not None:
                period = len(self.text) - start
                return n, [self.text[start + i % period] for i in range(size)]
        return 0, []


class LookupDrafter(Drafter):
    """A ``Drafter`` that proposes what followed the last n tokens where they occurred before.

    n goes from ``max_ngram`` down to ``min_ngram``; where nothing occurred, the draft is
    empty. ``begin`` starts a new request: with a prompt cache, the drafter sees the tokens of
    this request, not those that the cache holds of earlier ones.
    """

    taps: tuple[int, ...] = ()
    num_forwards = 0

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1):
        """Raises ValueError unless 1 <= ``min_ngram`` <= ``max_ngram``."""
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"lookup searches for {min_ngram} to {max_ngram} tokens: give a min_ngram of 1 "
                "or more and a max_ngram no smaller."
            )
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.cache: list[Any] = []
        self.index = NgramIndex(max_ngram, min_ngram)
        self._unread: list[tuple[mx.array, mx.array | None]] = []

    def begin(self, cache: list[Any] | None = None) -> "LookupDrafter":
        """See ``Drafter.begin``; ``cache`` is not used."""
        return LookupDrafter(self.max_ngram, self.min_ngram)

    def make_cache(self) -> list[Any]:
        return []

    def extend(
        self, tokens: mx.array, features: mx.array | None, last: mx.array | None = None
    ) -> None:
        """Tokens (m,)."""
        # Not read here, where the device may still be at work on them.
        self._unread.append((tokens, last))

    def propose(self, size: int, pick: Pick) -> Draft:
        """Copy ``size`` tokens, or none; ``pick`` is not called, for there are no logits."""
        self.read()
        _, copied = self.index.match(size)
        return Draft(mx.array(copied, dtype=mx.int32)) if copied else empty_draft()

    def read(self) -> list[int]:
        """Enter what was absorbed since the last time, and return it."""
        new: list[int] = []
        for tokens, last in self._unread:
            num_valid = tokens.shape[0] if last is None else index_of(last) + 1
            waited: Any = tokens.tolist()
            new += waited[:num_valid]
        self._unread.clear()
        for token in new:
            self.index.append(token)
        return new


LONGEST_MATCH = 8  # tokens: longer matches count as this long
LONGEST_DRAFT = 16  # tokens: those after it count as the last one
DRAFT_FIRST, COPY_FIRST = 0.5, 0.25  # chances of the first token, before anything was seen
COPY_RISE = 0.25  # and what each token more of a match takes off its chance to be wrong
CUT = 0.25  # of the chance that the last token asked for has in all rounds: less is left out


class CopyingDrafter(Drafter):
    """A ``Drafter`` around another one that copies from the text in its stead.

    It does where no fewer tokens of a copy are expected to be kept. Either draft ends where its
    next token is much less likely to be kept than what is asked for has been lately, in rounds of
    both: so what ``auto`` asks for because copies are kept does not lengthen the other's drafts.
    The other drafter absorbs every round, whoever drafted it.
    """

    def __init__(self, drafter: Drafter):
        self.taps = drafter.taps
        self._start(drafter)

    def _start(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.cache = drafter.cache
        self._lookup = LookupDrafter(max_ngram=LONGEST_MATCH)
        self._copies = Acceptance(COPY_FIRST, LONGEST_MATCH, COPY_RISE)
        self._drafts = Acceptance(DRAFT_FIRST, LONGEST_DRAFT)
        self._rounds = Acceptance(DRAFT_FIRST, LONGEST_DRAFT)
        self._match: tuple[int, list[int]] = 0, []
        self._was_copied = False
        self._size = 0
        self._last: mx.array | None = None
        self._caches: CacheView | None = None

    @property
    def num_forwards(self) -> int:  # type: ignore[override]
        """The other drafter's."""
        return self.drafter.num_forwards

    def begin(self, cache: list[Any] | None = None) -> "CopyingDrafter":
        """As with ``LookupDrafter``, only this request is copied from."""
        begun = copy(self)
        begun._start(self.drafter.begin(cache))
        return begun

    def make_cache(self) -> list[Any]:
        return self.drafter.make_cache()

    def extend(
        self, tokens: mx.array, features: mx.array | None, last: mx.array | None = None
    ) -> None:
        """Tokens (m,), features (m, F)."""
        self.drafter.extend(tokens, features, last)
        self._lookup.extend(tokens, None, last)
        if last is not None:
            self._last = last

    def propose(self, size: int, pick: Pick) -> Draft:
        """At most ``size`` tokens of the other drafter, or copied."""
        copied = self._copy(size)
        if copied is not None:
            return copied
        self._show_target()
        draft = self.drafter.propose(self._worthwhile(self._drafts.along(0, size)), pick)
        self._size = len(draft)
        return draft

    def _copy(self, size: int) -> Draft | None:
        """A copy, unless so many tokens, or levels of a tree, of the other's promise more."""
        self._learn()
        length, tokens = self._match = self._lookup.index.match(size)
        chances = self._copies.along(length - 1, size)
        self._size = size
        self._was_copied = bool(tokens) and sum(chances) >= sum(self._drafts.along(0, size))
        if not self._was_copied:
            return None
        self._size = self._worthwhile(chances)
        return Draft(mx.array(tokens[: self._size], dtype=mx.int32))

    def _worthwhile(self, chances: list[float]) -> int:
        """How many tokens to draft, by the chance of each to be kept; at least one."""
        least = CUT * self._rounds.along(0, len(chances))[-1]
        return max(1, sum(chance >= least for chance in chances))

    def _learn(self) -> None:
        """See what has become of the last round, and would have of a copy; the host knows now."""
        new = self._lookup.read()
        length, tokens = self._match
        if tokens and new:
            num_right = sum(accumulate((a == b for a, b in zip(tokens, new, strict=False)), mul))
            self._copies.fade()
            self._copies.observe(length - 1, min(len(tokens), len(new)), num_right)
        if self._last is not None and self._size > 0:
            num_kept = index_of(self._last)
            self._rounds.fade()
            self._rounds.observe(0, self._size, num_kept)
            if not self._was_copied:
                self._drafts.fade()
                self._drafts.observe(0, self._size, num_kept)
        self._last, self._size = None, 0

    def modules(self) -> list[nn.Module]:
        return self.drafter.modules()

    def save_last_features(self, features: mx.array) -> None:
        self.drafter.save_last_features(features)

    def pending(self) -> list[mx.array]:
        return self.drafter.pending()

    @property
    def cost_key(self) -> str:
        return f"{super().cost_key} {self.drafter.cost_key}"

    def see_target(self, caches: CacheView) -> None:
        """The other drafter sees them when it drafts: until then it keeps nothing of them."""
        self._caches = caches

    @property
    def supports_trees(self) -> bool:
        return self.drafter.supports_trees

    def check_tree(self, shape: Tree) -> None:
        self.drafter.check_tree(shape)

    def propose_tree(self, shape: Tree, pick: PickChildren) -> Draft:
        """The other drafter's tree, or a copy, which is a chain."""
        copied = self._copy(shape.depth)
        if copied is not None:
            return copied
        self._show_target()
        return self.drafter.propose_tree(shape, pick)

    def _show_target(self) -> None:
        if self._caches is not None:
            self.drafter.see_target(self._caches)

    @property
    def supports_overlay(self) -> bool:
        return self.drafter.supports_overlay

    def use_overlay(self, is_used: bool) -> None:
        self.drafter.use_overlay(is_used)

    def with_draft_window(self, size: int | None) -> "CopyingDrafter":
        return self._around(self.drafter.with_draft_window(size))

    def with_draft_cache(self, draft_cache: str) -> "CopyingDrafter":
        return self._around(self.drafter.with_draft_cache(draft_cache))

    def _around(self, drafter: Drafter) -> "CopyingDrafter":
        return self if drafter is self.drafter else CopyingDrafter(drafter)
