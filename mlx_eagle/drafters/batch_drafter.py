"""Drafters for several requests: in shared passes of a head, or one by one.

Both do what a ``Drafter`` does, for B requests that come and go: an EAGLE head for all in one
forward of (B, 1) per drafted token and one of (B, R) to absorb what was verified, any other
drafter request by request.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..target_model.cache_view import CacheView
from ..target_model.ragged import RaggedCaches
from ..target_model.rollback import Checkpoint
from .base import BatchDrafter, Drafter, Picks, check_width, empty_draft, start_early
from .feature_drafter import FeatureDrafter
from .output_rows import MOST_OF_A_PROMPT


def make_batch_drafter(drafter: Drafter) -> BatchDrafter:
    """The fastest batch drafter that ``drafter`` allows."""
    shared = drafter.batch_drafter()
    return SequentialDrafter() if shared is None else shared


class HeadBatchDrafter:
    """A head that drafts for B requests in shared passes, on ragged caches.

    Each request gets the drafts that its own drafter would give it with exact caches.
    """

    def __init__(self, drafter: FeatureDrafter):
        """``drafter`` defines the inputs and outputs of its head."""
        self._num_forwards = 0
        self._joined: list[int] = []  # how many there were before each request
        self._own = drafter
        self._seen: list[tuple[int, ...]] = []  # tokens that each request's text adds
        self._caches = RaggedCaches()
        # What drafts start from: hidden states (B, h), and the logits (B, Vd) after them.
        self._start: list[mx.array] = []

    def num_forwards(self, index: int) -> int:
        return self._num_forwards - self._joined[index]

    def join(self, drafter: Drafter) -> None:
        own = self._start_of(drafter)
        is_alike = self._widen(getattr(drafter, "seen", ()))
        if own and self._start:
            both = zip(self._start, own, strict=True)
            own = [mx.concatenate(list(pair)) for pair in (both if is_alike else [next(both)])]
        if own:
            self._start = own if is_alike else self._start_at(own[0])
        self._caches.join(drafter.cache[:-1])
        self._joined.append(self._num_forwards)

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
        rows = mx.array(index, mx.int32)
        self._start = [array[rows] for array in self._start] if index else []
        self._caches.keep(index)
        self._joined = [self._joined[b] for b in index]

    def extract(self, index: int) -> Drafter:
        drafter = self._own.begin([*self._caches.extract(index), KVCache()])
        drafter.seen = self._seen[index]  # in its next batch, those of others are left out
        if self._start:
            drafter.start_from(*(array[mx.array([index])] for array in self._start))
        return drafter

    def _start_of(self, drafter: Drafter) -> list[mx.array]:
        """Arrays that a request's drafts start from, (1, ...) each; [] before its first token."""
        return drafter.pending()

    def see_target(self, caches: RaggedCaches) -> None:
        """Ignore the target's caches: a head does not read them."""

    def propose(
        self, size: int, picks: Picks, is_asked: Sequence[bool]
    ) -> tuple[mx.array, list[int]]:
        """Draft for all: a head forward for each token but the first.

        ModelOpt's parallel heads, if there are any, draft the last tokens without a forward.
        """
        assert self._start, "every request has absorbed its first token"
        batch = len(self._caches.rows.lengths)
        num_steps = max(1, size - self._own.num_parallel_heads)
        hidden, logits = self._start
        tokens = [self._own.choose(logits, picks.pick)]
        before = self._caches.rows.lengths
        try:
            for _ in range(num_steps - 1):
                start_early(tokens[-1], size)
                hidden = self._forward(tokens[-1][:, None], hidden[:, None])[:, 0]
                self._caches.advance([1] * batch)
                tokens.append(self._own.choose(self._own.logits(hidden), picks.pick))
        finally:
            self._caches.rows.set(before)
        for i in range(size - num_steps):
            tokens.append(self._own.choose(self._own.parallel_logits(hidden, i), picks.pick))
        return mx.stack(tokens, axis=1), [size] * batch

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
        rows = self._absorb(tokens, features)
        if last is None:
            starts = rows[:, -1]
        else:
            index = last.reshape(-1, *[1] * (rows.ndim - 1))
            starts = mx.take_along_axis(rows, index, axis=1)[:, 0]
        self._start = self._start_at(starts)

    def _absorb(self, tokens: mx.array, features: mx.array) -> mx.array:
        """Give the head tokens (B, m), features (B, m, F): rows (B, m, ...) to start from."""
        return self._forward(tokens, self._own.hidden_of(features))

    def _start_at(self, starts: mx.array) -> list[mx.array]:
        """Arrays that drafts start from, given each request's row, (B, ...)."""
        return [starts, self._own.logits(starts)]

    def advance(self, kept: list[int]) -> None:
        self._caches.advance(kept)

    def pending(self) -> list[mx.array]:
        """Hidden states and the first tokens' logits."""
        return list(self._start)

    def _forward(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Run the head after the kept slots: tokens (B, m), hidden (B, m, h) -> (B, m, h)."""
        self._num_forwards += 1
        return self._own.forward(self._own._embed(tokens), hidden, self._caches.open())


class SequentialDrafter:
    """Drafters of any kind, each for its own request."""

    def __init__(self) -> None:
        self._drafters: list[Drafter] = []
        self._joined: list[int] = []  # forwards of each before
        self._cuts: list[tuple[Checkpoint, int]] = []
        self._views: Callable[[int], CacheView] | None = None

    def num_forwards(self, index: int) -> int:
        return self._drafters[index].num_forwards - self._joined[index]

    def join(self, drafter: Drafter) -> None:
        self._drafters.append(drafter)
        self._joined.append(drafter.num_forwards)

    def keep(self, index: list[int]) -> None:
        self._drafters = [self._drafters[b] for b in index]
        self._joined = [self._joined[b] for b in index]
        self._cuts = [self._cuts[b] for b in index if self._cuts]

    def extract(self, index: int) -> Drafter:
        return self._drafters[index]

    def see_target(self, caches: RaggedCaches) -> None:
        self._views = caches.view

    def propose(
        self, size: int, picks: Picks, is_asked: Sequence[bool]
    ) -> tuple[mx.array, list[int]]:
        """Draft request by request; shorter drafts are padded."""
        drafts = []
        for b, drafter in enumerate(self._drafters):
            if not is_asked[b]:
                drafts.append(empty_draft().tokens)
                continue
            if self._views is not None:
                drafter.see_target(self._views(b))
            drafts.append(drafter.propose(size, picks.of_request(b)).tokens)
        self._views = None
        lengths = [len(tokens) for tokens in drafts]
        rows = [mx.pad(tokens, (0, max(lengths) - len(tokens))) for tokens in drafts]
        return mx.stack(rows), lengths

    def extend(
        self,
        tokens: mx.array,
        features: mx.array | None,
        last: mx.array | None = None,
        num_rows: Sequence[int] | None = None,
    ) -> None:
        self._cuts = []
        for b, drafter in enumerate(self._drafters):
            num = tokens.shape[1] if num_rows is None else num_rows[b]
            self._cuts.append((Checkpoint(drafter.cache), num))
            seen = None if features is None else features[b, :num]
            drafter.extend(tokens[b, :num], seen, last=None if last is None else last[b])

    def advance(self, kept: list[int]) -> None:
        for (checkpoint, num_rows), num_kept in zip(self._cuts, kept, strict=True):
            if num_kept < num_rows:
                checkpoint.rollback(num_kept)
        self._cuts = []

    def pending(self) -> list[mx.array]:
        return [array for drafter in self._drafters for array in drafter.pending()]
