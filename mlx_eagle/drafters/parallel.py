"""Drafts of one forward pass from a P-EAGLE head (arXiv:2602.01469).

Behind the slots of the pairs it absorbs, the head is given masked ones, which know neither token
nor features and stand for the tokens that follow.
"""

from collections.abc import Callable

import mlx.core as mx

from .base import Draft, Pick
from .eagle3 import EagleDrafter
from .head import Eagle3Head
from .head_cache import SINKS, as_plain_caches, columns_after, drop_last, seen_by_rows, slots_of

FIRST_SIZE = 7
"""Tokens drafted first, before anybody has said how many, by a head that does not say it."""


class ParallelDrafter(EagleDrafter):
    """A ``Drafter`` around a P-EAGLE head: one head forward per round, whatever is drafted.

    The masked slots of a draft run with the pairs of the round before, as many as the last
    draft was long. Where more are wanted, and after a prompt, they run alone. They never stay in
    the cache: slot t of it is the pair t, as of any head.

        rows      pairs 0 .. m - 1       masked 1 .. k - 1
        pair i    sees pairs up to i
        masked j  sees pairs up to last  and masked up to j, at position last + j
    """

    def __init__(
        self,
        head: Eagle3Head,
        embed: Callable[[mx.array], mx.array],
        taps: tuple[int, ...],
        to_target: mx.array | None = None,
        draft_window: int | None = None,
    ):
        super().__init__(head, embed, taps, to_target, draft_window)
        # What a masked slot takes for token and features is the same for all of them.
        self._mask_embedding = embed(mx.array([head.config.mask_token_id]))
        self._mask_state = head.masked(1)
        mx.eval(self._mask_embedding, self._mask_state)

    def with_draft_cache(self, draft_cache: str) -> "ParallelDrafter":
        if draft_cache != "exact":
            raise ValueError(
                f"draft_cache is {draft_cache!r}, and the masked slots of a P-EAGLE head need "
                "every pair before them: leave it out."
            )
        return self

    def with_draft_window(self, size: int | None) -> "ParallelDrafter":
        if size == self.draft_window:
            return self
        return ParallelDrafter(self.head, self._embed, self.taps, self._to_target, size)

    def _start(self, cache: list) -> None:
        super()._start(cache)
        self._size = self.head.config.speculative_tokens_hint or FIRST_SIZE

    def _absorb(self, tokens: mx.array, features: mx.array, last: mx.array | None) -> mx.array:
        """The states are (k, h), of all tokens of a draft."""
        embeddings, states = self._embedded(tokens), self.head.fuse(features)
        if last is None:  # a prompt, which may be long: in the order that needs no mask
            self._count(tokens.shape[0])
            mask = None
            if self.draft_window is not None:
                mask = seen_by_rows(self.cache[0], tokens.shape[0])
            return self.head(embeddings, states, self.cache[:-1], mask=mask)[-1:]
        return self._forward(embeddings, states, last, self._size - 1)

    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens, from the states of the last pair and the masked slots."""
        logits, self._size = self._first, size
        if size > logits.shape[0]:
            none = self._mask_embedding[:0], self._mask_state[:0]
            masked = self._forward(*none, mx.array(-1), size - 1)
            logits = mx.concatenate([logits[:1], self._logits(masked)], axis=0)
        rows = mx.split(logits[:size], size, axis=0)
        return Draft(mx.concatenate([self._choose(row, pick) for row in rows]))

    def _forward(
        self, embeddings: mx.array, states: mx.array, last: mx.array, num_masked: int
    ) -> mx.array:
        """The last pair's state and those of masked slots, after one head forward.

        Of the m pairs, embeddings and states (m, h), the first ``last`` + 1 count. Without a
        pair (-1) there is no state for it: (num_masked, h), else (1 + num_masked, h).
        """
        num_pairs, base = embeddings.shape[0], self.cache[0].offset
        num_rows, end = num_pairs + num_masked, base + num_pairs
        self._count(num_rows)
        embeddings = mx.concatenate([embeddings, *[self._mask_embedding] * num_masked], axis=0)
        states = mx.concatenate([states, *[self._mask_state] * num_masked], axis=0)
        ahead = base + last + 1 + mx.arange(num_masked)
        positions = mx.concatenate([mx.arange(base, end), ahead])
        caches, num_columns = self._caches_for(num_pairs, num_masked)
        slots = slots_of(num_columns, base + num_rows)
        is_masked, rows = slots >= end, slots[-num_rows:, None]

        def visible(window: int | None) -> mx.array | None:
            if self.draft_window is not None and num_rows == num_pairs == 1:
                return None  # it finds its window, and nothing else
            seen = (slots <= rows) & ((slots <= base + last) | is_masked | (rows < end))
            window = self.draft_window or window
            if window is None:
                return seen
            # As in training, a draft sees all of itself, from the last pair on.
            near = (slots > positions[:, None] - window) | (slots >= base + last)
            return seen & (near if self.draft_window is None else near | (slots < SINKS))

        states = self.head(embeddings, states, caches, positions, visible)
        self._drop_masked(num_pairs, num_masked)
        if num_pairs == 0:
            return states
        own = states[last.reshape(1)]
        return mx.concatenate([own, states[num_pairs:]], axis=0)

    def _caches_for(self, num_pairs: int, num_masked: int) -> tuple[list, int]:
        """Where the rows of a pass go, and how many columns there are then."""
        caches, num_rows = self.cache[:-1], num_pairs + num_masked
        if self.draft_window is None:
            return caches, caches[0].offset + num_rows
        if num_pairs > 0:
            return caches, columns_after(caches[0], num_rows)
        copies = as_plain_caches(caches)
        return copies, copies[0].offset + num_rows

    def _drop_masked(self, num_pairs: int, num_masked: int) -> None:
        """Take the masked slots back from the head's caches, where they have gone there."""
        for cache in self.cache[:-1]:
            if self.draft_window is None:
                cache.trim(num_masked)
            elif num_pairs > 0:
                drop_last(cache, num_masked)
