"""Chain drafts from an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840).

Knows how the head is fed (which state, which token, which position); knows neither the
target nor what becomes of a draft.
"""

from collections.abc import Callable
from copy import copy

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .drafter import Draft
from .head import Eagle3Head


class Eagle3Drafter:
    """A ``Drafter`` around an EAGLE-3 head.

    Slot t of the head's cache is (embedding of the token at t + 1, features of position t).
    Slots fed from true features stay; those that ``propose`` adds, fed with the head's own
    output, are dropped before it returns (arXiv:2503.01840, section 3.2).
    """

    def __init__(
        self,
        head: Eagle3Head,
        embed: Callable[[mx.array], mx.array],
        taps: tuple[int, ...],
        to_target: mx.array | None = None,
    ):
        """``embed`` maps tokens (m,) to (m, h); ``to_target`` (Vd,) draft ids to target ids."""
        self.head = head
        self.taps = taps
        self.num_forwards = 0
        self._embed = embed
        self._to_target = to_target
        self._seed: mx.array | None = None
        self.cache = self.make_cache()

    def begin(self, cache: list | None = None) -> "Eagle3Drafter":
        """A drafter for one text: the same weights, a cache of its own (or ``cache``)."""
        drafter = copy(self)
        drafter.cache = self.make_cache() if cache is None else cache
        drafter.num_forwards = 0
        drafter._seed = None
        return drafter

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self.head.layers]

    def extend(
        self, tokens: mx.array, features: mx.array | None, last: mx.array | None = None
    ) -> None:
        """See ``Drafter.extend``; tokens (m,), features (m, F)."""
        if features is None:
            return
        states = self._forward(tokens[None], self.head.fuse(features[None]))
        if last is None:
            self._seed = states[:, -1:]
        else:
            self._seed = mx.take(states, last.reshape(1), axis=1)

    def propose(self, size: int) -> Draft:
        """A greedy chain of ``size`` tokens: one head forward for each but the first."""
        states = self._seed
        tokens = [self._pick(states)]
        for _ in range(size - 1):
            states = self._forward(tokens[-1], states)
            tokens.append(self._pick(states))
        for layer in self.cache:
            layer.trim(size - 1)
        return Draft(mx.concatenate(tokens, axis=1)[0])

    def pending(self) -> list[mx.array]:
        """What the next ``propose`` starts from, to be computed ahead."""
        return [] if self._seed is None else [self._seed]

    def _forward(self, tokens: mx.array, states: mx.array) -> mx.array:
        """One head forward over tokens (1, m) and states (1, m, h) -> (1, m, h)."""
        self.num_forwards += 1
        return self.head(self._embed(tokens), states, self.cache)

    def _pick(self, states: mx.array) -> mx.array:
        """The head's most likely tokens, as target ids: (1, m, h) -> (1, m)."""
        ids = mx.argmax(self.head.logits(states), axis=-1).astype(mx.int32)
        return ids if self._to_target is None else self._to_target[ids]
