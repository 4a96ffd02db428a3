"""Base of drafters that take the target's features, for one request or for several at once."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from ..target_model.masks_and_ropes import evaluate_ropes
from ..target_model.ragged import RaggedCaches
from ..target_model.tree_rows import each_itself
from .base import BatchDrafter, Draft, Drafter, Pick, PickChildren, Picks, check_width, start_early
from .output_rows import MOST_OF_A_PROMPT, OutputRows, Project, indices_in, newest_others
from .tree import StaticTree, Step, Tree

HeadStep = Callable[[mx.array, mx.array], mx.array]
"""A head's forward over a slot of B requests: tokens (B,), hidden states (B, h) -> (B, h)."""
LevelStep = Callable[[mx.array, mx.array, mx.array], mx.array]
"""The same over a level of a tree, (m,) and (m, h); its nodes see slots of the draft, (m, n)."""


class FeatureDrafter(Drafter):
    """A ``Drafter`` around a head that continues the target's activations.

    Slot t of the head's caches is (embedding of the token at t + 1, features of position t).
    ``cache`` has one KVCache more, which holds no keys: between requests it carries the
    features of the last position, whose token's successor is not known yet.
    """

    def __init__(self, head: nn.Module, taps: tuple[int, ...], num_layers: int, width: int):
        """``num_layers`` is the number of caches that the head's layers need.

        ``width`` is F, the width of the features (m, F) that it is fed.
        """
        self.head = head
        self.taps = taps
        self.width = width
        self._num_layers = num_layers
        self._start(self.make_cache())
        # Arrays that are no parameters: nothing else computes them before another thread asks.
        evaluate_ropes(head)
        mx.eval(self.to_target, head.parameters())

    _embed: Callable[[mx.array], mx.array]
    """Maps tokens (m,) to (m, h)."""

    to_target: mx.array | None = None
    """Target id of every draft id, (Vd,); None if they are the same."""

    rows: OutputRows | None = None
    """Rows of the output matrices to draft from; None: all."""

    knows_first = True
    """Whether the seed of a draft tells the logits of its first token."""

    num_parallel_heads = 0
    """Number of additional tokens that ``parallel_logits`` predicts."""

    seen: tuple[int, ...] = ()
    """Tokens of the request's text that can be drafted besides the wanted ones."""

    _wanted: np.ndarray | None = None
    _own_ids: mx.array | None = None  # ``to_target`` with all rows

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype that the head computes in."""
        dtype: mx.Dtype = self.head.norm.weight.dtype
        return dtype

    @abstractmethod
    def _absorb(self, tokens: mx.array, features: mx.array, last: mx.array | None) -> mx.array:
        """Give the head tokens (m,) with features (m, F); return what a draft starts from.

        Embeddings (m, h) may replace the tokens: see ``_embedded``.
        """

    @property
    def cost_key(self) -> str:
        size = "" if self._wanted is None else f" of {len(self._wanted)} tokens"
        return super().cost_key + size

    @property
    def num_drafted(self) -> int | None:
        """Number of tokens that can be drafted; None: the target's vocabulary."""
        return None if self.to_target is None else int(self.to_target.size)

    def with_draft_vocab(self, ids: np.ndarray) -> Self:
        """See ``Drafter``; a head with its own vocabulary keeps the tokens that it has."""
        drafter = self.begin()
        if self._wanted is None:
            drafter._own_ids = self.to_target
        drafter._wanted = ids
        drafter._draft_from(())
        if not len(drafter.rows or ()):
            raise ValueError(
                "the drafter can draft none of the ids of --draft-vocab: give others."
            )
        return drafter

    def see_text(self, tokens: Callable[[], np.ndarray]) -> None:
        if self._wanted is None:
            return
        seen = newest_others(tokens(), self._wanted, MOST_OF_A_PROMPT)
        self._draft_from(tuple(seen[seen >= 0].tolist()))

    def _draft_from(self, seen: tuple[int, ...]) -> None:
        """Draft the wanted tokens and ``seen`` ones, if the head knows them."""
        assert self._wanted is not None
        self.seen = seen
        ids = np.concatenate([self._wanted, np.array(seen, np.int64)])
        index = ids if self._own_ids is None else indices_in(ids, np.array(self._own_ids))
        self.rows = OutputRows(index)
        own = self.rows.index
        self.to_target = own if self._own_ids is None else self._own_ids[own]
        mx.eval(self.to_target)

    def project(self, output: Project, x: mx.array) -> mx.array:
        """Logits (..., Vd) from x (..., h), with the rows of ``output`` to draft from."""
        return output(x) if self.rows is None else self.rows.project(output, x)

    logits: Callable[[mx.array], mx.array]
    """Logits (m, Vd) after hidden states (m, h)."""

    def forward(self, embeddings: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        """One pass of the head over m slots of B requests: (B, m, h), (B, m, h) -> (B, m, h)."""
        made: mx.array = self.head(embeddings, hidden, caches)
        return made

    def hidden_of(self, features: mx.array) -> mx.array:
        """The head's input for features (..., F): hidden (..., h), or the features themselves."""
        return features

    parallel_logits: Callable[[mx.array, int], mx.array]
    """Logits (m, Vd) of the token that is so many + 1 after the one that ``logits`` predicts."""

    def chain(self, size: int, pick: Pick, forward: HeadStep) -> list[mx.array]:
        """Draft ``size`` tokens (B,), one forward of the head for each but the first.

        ModelOpt's parallel heads, if there are any, draft the last tokens without a forward.
        """
        num_steps = max(1, size - self.num_parallel_heads)
        hidden = self._seed
        tokens = [self.choose(self._first, pick)]
        for _ in range(num_steps - 1):
            start_early(tokens[-1], size)
            hidden = forward(tokens[-1], hidden)
            tokens.append(self.choose(self.logits(hidden), pick))
        for i in range(size - num_steps):
            tokens.append(self.choose(self.parallel_logits(hidden, i), pick))
        return tokens

    # For ``HeadBatchDrafter``: one that stands for B requests, whose caches are ragged.

    def absorb_rows(self, tokens: mx.array, features: mx.array, caches: RaggedCaches) -> mx.array:
        """Absorb tokens (B, m) with features (B, m, F): rows (B, m, ...), to start from one."""
        self.num_forwards += 1
        return self.forward(self._embed(tokens), self.hidden_of(features), caches.open())

    def draft_rows(self, size: int, caches: RaggedCaches, pick: Pick) -> list[mx.array]:
        """Draft at most ``size`` tokens (B,); the slots that this adds are for the caller to drop.

        ``pick`` chooses among logits (B, Vd).
        """

        def step(tokens: mx.array, hidden: mx.array) -> mx.array:
            self.num_forwards += 1
            made = self.forward(self._embed(tokens[:, None]), hidden[:, None], caches.open())
            caches.advance([1] * made.shape[0])
            return made[:, 0]

        return self.chain(size, pick, step)

    def batch_drafter(self) -> BatchDrafter | None:
        return HeadBatchDrafter(self)

    def context(self, caches: Sequence[Any]) -> list[mx.array]:
        """Arrays of these caches that no start of a draft is computed from."""
        return []

    @abstractmethod
    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens."""

    def begin(self, cache: list[Any] | None = None) -> Self:
        drafter = copy(self)
        drafter._start(self.make_cache() if cache is None else cache)
        return drafter

    def _start(self, cache: list[Any]) -> None:
        """Forget the current request; ``cache`` belongs to the next one."""
        self.cache = cache
        self.num_forwards = 0
        self._seed = mx.zeros((0,))  # what a draft starts from, mostly a hidden state
        self._first = mx.zeros((0,))  # the logits after it: of the first draft token

    def start_from(self, seed: mx.array, first: mx.array | None = None) -> None:
        """Draft from ``seed`` from now on, and the logits of the ``first`` token after it."""
        self._seed = seed
        if first is None:
            first = self.logits(seed) if self.knows_first else mx.zeros((0,))
        self._first = first

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in range(self._num_layers + 1)]

    def extend(
        self, tokens: mx.array, features: mx.array | None, last: mx.array | None = None
    ) -> None:
        """Absorb tokens (m,) or embeddings (m, h), with features (m, F)."""
        if features is None:
            features = last_features(self.cache[-1])
            features = None if features is None else features[:, : self.width]
        if features is None:
            if self.cache[0].size() == 0:
                return  # the first token of a request, or of a cache without the head's part
            # One slot with an empty state is cheaper than a position that no slot stands for.
            features = mx.zeros((1, self.width), self.dtype)
        check_width(features, self.width)
        self.start_from(self._absorb(tokens, features, last))

    def check_embeddings(self, embeddings: mx.array) -> None:
        own = self._embed(mx.zeros((1,), mx.int32)).shape[-1]
        found = embeddings.shape[-1]
        if own != found:
            raise ValueError(
                f"the draft head's token embeddings are {own} wide, but the input_embeddings "
                f"{found}: use a head that shares the target's, or no draft model."
            )

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings (..., h) of tokens, as the head takes them."""
        return self._embed(tokens)

    def _embedded(self, tokens: mx.array) -> mx.array:
        """Embeddings (m, h) of tokens (m,); embeddings given instead are returned."""
        return tokens if tokens.ndim == 2 else self._embed(tokens)

    def choose(self, logits: mx.array, pick: Pick) -> mx.array:
        """The tokens picked from logits (m, Vd), as target ids (m,) int32."""
        return self.to_ids(pick(logits, self.to_target))

    def _grown(self, shape: Tree, first: mx.array, step: Step, pick: PickChildren) -> Draft:
        """A tree that grows by ``step`` from the logits (1, Vd) of the first token."""
        grown = shape.grow(first, step, lambda row, num: pick(row, self.to_target, num))
        static = shape.parents if isinstance(shape, StaticTree) else None
        return Draft(self.to_ids(grown.ids), grown.parents, shape.depth, static, grown.draw_index)

    def branched(self, shape: Tree, pick: PickChildren, forward: LevelStep) -> Draft:
        """A tree, one forward of the head for each level but the first."""
        hidden = self._seed
        visible = mx.zeros((1, 0), mx.bool_)

        def step(picked: mx.array, rows: mx.array) -> mx.array:
            nonlocal hidden, visible
            visible = mx.concatenate([visible[rows], each_itself(picked.shape[0])], axis=1)
            hidden = forward(self.to_ids(picked), hidden[rows], visible)
            return self.logits(hidden)

        return self._grown(shape, self._first, step, pick)

    def to_ids(self, index: mx.array) -> mx.array:
        """Target ids (m,) int32 of draft-vocabulary indices (m,)."""
        return (index if self.to_target is None else self.to_target[index]).astype(mx.int32)

    def save_last_features(self, features: mx.array) -> None:
        """Save features (1, F) until the next ones are saved."""
        cache = self.cache[-1]
        kept = features[None, None]
        cache.keys = kept
        cache.values = kept[..., :1]
        cache.offset = 1

    @property
    def started(self) -> list[mx.array]:
        """Seed of a draft, and its first token's logits; [] before a request's first token."""
        return [array for array in (self._seed, self._first) if array.size]

    def pending(self) -> list[mx.array]:
        """``started`` and ``context``.

        So the largest matrix product of a draft's first step runs while the host reads the
        previous round and decides what comes next.
        """
        found = self.started
        return found + self.context(self.cache[:-1]) if found else []

    def modules(self) -> list[nn.Module]:
        return [self.head]


def last_features(cache: KVCache) -> mx.array | None:
    """The saved features (1, F); None if there are none, or trimming has made them stale."""
    kept: Any = cache.keys
    return kept[0, 0] if cache.offset else None


class HeadBatchDrafter(BatchDrafter):
    """A head that drafts for B requests in shared passes, on ragged caches.

    An EAGLE head drafts for all in one forward of (B, 1) per drafted token, and absorbs what was
    verified in one of (B, R). Each request gets the drafts that its own drafter would give it.
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
            self._own = copy(own)
            self._own._draft_from(every)
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
