"""Drafts for several requests in shared passes of a head.

An EAGLE head drafts for all B requests in one forward of (B, 1) per drafted token, and absorbs
what was verified in one of (B, R).
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..target_model.ragged import RaggedCaches
from .base import BatchDrafter, Drafter, Picks, check_width
from .feature_drafter import FeatureDrafter
from .output_rows import MOST_OF_A_PROMPT


class HeadBatchDrafter(BatchDrafter):
    """A head that drafts for B requests in shared passes, on ragged caches.

    Each request gets the drafts that its own drafter would give it with exact caches.
    """

    def __init__(self, drafter: FeatureDrafter):
        """``drafter`` is any request's; one of its own stands for all of them."""
        self._joined: list[int] = []  # forwards before each request
        self._own = drafter.begin()
        self._seen: list[tuple[int, ...]] = []  # tokens that each request's text adds
        self._caches = RaggedCaches()

    def num_forwards(self, index: int) -> int:
        return self._own.num_forwards - self._joined[index]

    def join(self, drafter: Drafter) -> None:
        assert isinstance(drafter, FeatureDrafter)
        own = [array[:1] for array in drafter.started]
        is_alike = self._widen(drafter.seen)
        if own and self._own.started:
            both = zip(self._own.started, own, strict=True)
            own = [mx.concatenate(list(pair)) for pair in (both if is_alike else [next(both)])]
        if own:
            self._own.start_from(*(own if is_alike else own[:1]))
        self._caches.join(drafter.cache[:-1])
        self._joined.append(self._own.num_forwards)

    def _widen(self, seen: tuple[int, ...]) -> bool:
        """Also draft the tokens of a request's text; False if that changes the vocabulary."""
        self._seen.append(seen)
        own = self._own
        if own.rows is None:
            return True
        newest_first = (token for each in reversed(self._seen) for token in each)
        every = tuple(sorted(list(dict.fromkeys(newest_first))[:MOST_OF_A_PROMPT]))
        if every != own.seen:
            self._own = own.with_seen(every)
        return every == seen and every == own.seen

    def keep(self, index: list[int]) -> None:
        self._seen = [self._seen[b] for b in index]
        if not index:
            self._own = self._own.begin()
        elif self._own.started:
            rows = mx.array(index, mx.int32)
            self._own.start_from(*(array[rows] for array in self._own.started))
        self._caches.keep(index)
        self._joined = [self._joined[b] for b in index]

    def extract(self, index: int) -> Drafter:
        drafter = self._own.begin([*self._caches.extract(index), KVCache()])
        drafter.seen = self._seen[index]  # in its next batch, those of others are left out
        if self._own.started:
            drafter.start_from(*(array[mx.array([index])] for array in self._own.started))
        return drafter

    def see_target(self, caches: Any) -> None:
        self._own.see_target(caches)

    def propose(
        self, size: int, picks: Picks, is_asked: Sequence[bool]
    ) -> tuple[mx.array, list[int]]:
        """Draft for all; every request has absorbed its first token."""
        before = self._caches.rows.lengths
        try:
            tokens = self._own.draft_rows(size, self._caches, picks.pick)
        finally:
            self._caches.rows.set(before)
        return mx.stack(tokens, axis=1), [len(tokens)] * len(before)

    def extend(
        self,
        tokens: mx.array,
        features: mx.array | None,
        last: mx.array | None = None,
        num_rows: Sequence[int] | None = None,
    ) -> None:
        """Absorb all rows; ``advance`` then says how many count."""
        assert features is not None
        check_width(features, self._own.width)
        rows = self._own.absorb_rows(tokens, features, self._caches)
        if last is None:
            starts = rows[:, -1]
        else:
            index = last.reshape(-1, *[1] * (rows.ndim - 1))
            starts = mx.take_along_axis(rows, index, axis=1)[:, 0]
        self._own.start_from(starts)

    def advance(self, kept: list[int]) -> None:
        self._caches.advance(kept)

    def pending(self) -> list[mx.array]:
        found = self._own.started
        return found + self._own.context(self._caches.layers) if found else []
