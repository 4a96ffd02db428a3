"""Base of drafters that take the target's features: caches and state of a request."""

from abc import abstractmethod
from collections.abc import Callable
from copy import copy
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from .base import Draft, Drafter, Pick, PickChildren, check_width
from .output_rows import MOST_OF_A_PROMPT, OutputRows, Project, indices_in, newest_others
from .tree import StaticTree, Step, Tree


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

    _embed: Callable[[mx.array], mx.array]
    """Maps tokens (m,) to (m, h)."""

    to_target: mx.array | None = None
    """Target id of every draft id, (Vd,); None if they are the same."""

    rows: OutputRows | None = None
    """Rows of the output matrices to draft from; None: all."""

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

    def with_seen(self, seen: tuple[int, ...]) -> Self:
        """The same drafter, which can also draft these tokens."""
        drafter = copy(self)
        drafter._draft_from(seen)
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

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits (m, Vd) after hidden states (m, h)."""
        logits: mx.array = self.head.logits(hidden)
        return logits

    # Of heads that draft step by step, for ``HeadBatchDrafter``.

    def forward(self, embeddings: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        """One pass of the head over m slots of B requests: (B, m, h), (B, m, h) -> (B, m, h)."""
        made: mx.array = self.head(embeddings, hidden, caches)
        return made

    def hidden_of(self, features: mx.array) -> mx.array:
        """The head's input for features (..., F): hidden (..., h), or the features themselves."""
        return features

    @property
    def num_parallel_heads(self) -> int:
        """Number of additional tokens that ``parallel_logits`` predicts."""
        return 0

    def parallel_logits(self, hidden: mx.array, index: int) -> mx.array:
        """Logits (m, Vd) of the token ``index`` + 1 after the one that ``logits`` predicts."""
        raise NotImplementedError

    def _first_logits(self, seed: mx.array) -> mx.array:
        """Logits of the first draft token, (0,) if they are not known before the draft."""
        return self.logits(seed)

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
        """Start from the ``pending`` arrays of another drafter, which has filled ``cache``."""
        self._seed = seed
        self._first = mx.zeros((0,)) if first is None else first

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
        self._seed = self._absorb(tokens, features, last)
        self._first = self._first_logits(self._seed)

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

    def pending(self) -> list[mx.array]:
        """The start of a draft, and the first token's logits.

        So the largest matrix product of a draft's first step runs while the host reads the
        previous round and decides what comes next.
        """
        return [array for array in (self._seed, self._first) if array.size]

    def modules(self) -> list[nn.Module]:
        return [self.head]


def last_features(cache: KVCache) -> mx.array | None:
    """The saved features (1, F); None if there are none, or trimming has made them stale."""
    kept: Any = cache.keys
    return kept[0, 0] if cache.offset else None
