"""Drafts copied from the text itself: prompt lookup, without a model.

Saxena 2023 ("prompt lookup decoding"); Yang et al. 2023, arXiv:2304.04487.
"""

import mlx.core as mx
import mlx.nn as nn

from .base import Draft, NoModel, Pick, empty_draft


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


class LookupDrafter(NoModel):
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
        self.cache: list = []
        self._index = NgramIndex(max_ngram, min_ngram)
        self._unread: list[tuple[mx.array, mx.array | None]] = []

    def begin(self, cache: list | None = None) -> "LookupDrafter":
        """See ``Drafter.begin``; ``cache`` is not used."""
        return LookupDrafter(self.max_ngram, self.min_ngram)

    def make_cache(self) -> list:
        return []

    def extend(
        self, tokens: mx.array, features: mx.array | None, last: mx.array | None = None
    ) -> None:
        """See ``Drafter.extend``; tokens (m,)."""
        # Not read here, where the device may still be at work on them.
        self._unread.append((tokens, last))

    def propose(self, size: int, pick: Pick) -> Draft:
        """Copy ``size`` tokens, or none; ``pick`` is not called, for there are no logits."""
        self.read()
        _, copied = self.match(size)
        return Draft(mx.array(copied, dtype=mx.int32)) if copied else empty_draft()

    def read(self) -> list[int]:
        """Enter what was absorbed since the last time, and return it."""
        new: list[int] = []
        for tokens, last in self._unread:
            num_valid = tokens.shape[0] if last is None else last.item() + 1
            new += tokens.tolist()[:num_valid]
        self._unread.clear()
        for token in new:
            self._index.append(token)
        return new

    def match(self, size: int) -> tuple[int, list[int]]:
        """See ``NgramIndex.match``, of what was read."""
        return self._index.match(size)

    def modules(self) -> list[nn.Module]:
        return []

    def hold(self, features: mx.array) -> None:
        """Nothing to keep: there are no features."""

    def pending(self) -> list[mx.array]:
        return []
