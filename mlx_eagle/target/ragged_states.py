"""The recurrent states of several texts in one, for passes of one row per text.

A state says nothing of the rows that made it, so rows cannot be taken back one by one: a pass is
kept for all texts or for none. That is enough for plain steps, not for drafts.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList


class RaggedStates:
    """One layer's states of B texts, each an array (B, ...), or None where nothing is kept."""

    def __init__(self, size: int):
        self._kept: list[mx.array | None] = [None] * size
        self._pass = ArraysCache(size)

    def begin(self) -> ArraysCache:
        """What the model is given for a pass; what it writes is not kept yet."""
        self._pass = ArraysCache(len(self._kept))
        self._pass.cache = list(self._kept)
        return self._pass

    def advance(self) -> None:
        """Keep what the pass has written."""
        self._kept = list(self._pass.cache)

    def join(self, cache: ArraysCache, num_others: int) -> None:
        """Take in the states of a text, which stay as they are, behind ``num_others``."""
        self._kept = [
            _joined(mine, theirs, num_others) for mine, theirs in zip(self._kept, cache.cache)
        ]
        self._pass = ArraysCache(len(self._kept))

    def keep(self, index: mx.array) -> None:
        """Drop all texts but these, from a pass that is under way as well."""
        self._kept = [None if array is None else array[index] for array in self._kept]
        self._pass.cache = [None if array is None else array[index] for array in self._pass.cache]

    def extract(self, index: int) -> ArraysCache:
        """One text's states."""
        cache = ArraysCache(len(self._kept))
        cache.cache = [None if a is None else a[index : index + 1] for a in self._kept]
        return cache


def _joined(mine: mx.array | None, theirs: mx.array | None, num_others: int) -> mx.array | None:
    """States (B, ...) with those of one text more; zeros stand for what is not there yet."""
    like = theirs if mine is None else mine
    if like is None:
        return None
    if mine is None:
        mine = mx.zeros((num_others, *like.shape[1:]), like.dtype)
    if theirs is None:
        theirs = mx.zeros((1, *like.shape[1:]), like.dtype)
    return mx.concatenate([mine, theirs])


class RaggedList:
    """A layer that keeps several caches, in the place of mlx-lm's ``CacheList``."""

    def __init__(self, cache: CacheList, make: Callable[[Any], Any]):
        self._parts = [make(part) for part in cache.caches]

    def begin(self) -> CacheList:
        """See ``RaggedStates.begin``."""
        return CacheList(*[part.begin() for part in self._parts])

    def advance(self) -> None:
        """See ``RaggedStates.advance``."""
        for part in self._parts:
            part.advance()

    def join(self, cache: CacheList, num_others: int) -> None:
        """See ``RaggedStates.join``."""
        for part, own in zip(self._parts, cache.caches, strict=True):
            part.join(own, num_others)

    def keep(self, index: mx.array) -> None:
        """See ``RaggedStates.keep``."""
        for part in self._parts:
            part.keep(index)

    def extract(self, index: int) -> CacheList:
        """See ``RaggedStates.extract``."""
        return CacheList(*[part.extract(index) for part in self._parts])
