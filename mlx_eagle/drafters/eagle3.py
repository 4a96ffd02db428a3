"""Chain and tree drafts from an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840).

Knows how the head is fed (which state, which token, which position); knows neither the
target nor what becomes of a draft.
"""

import warnings
from collections.abc import Callable
from copy import copy

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from .base import Draft, NoModel, Pick, check_width
from .head import Eagle3Head
from .held import held, hold
from .tree import Tree


class Eagle3Drafter(NoModel):
    """A ``Drafter`` around an EAGLE-3 head.

    Slot t of the head's cache is (embedding of the token at t + 1, features of position t).
    Slots fed from true features stay; those that ``propose`` adds, fed with the head's own
    output, are dropped before it returns (arXiv:2503.01840, section 3.2).

    ``cache`` is one KVCache a layer, and one more that holds no keys: between requests it
    carries the features of the last position (see ``held``).

    ``draft_cache`` "exact" absorbs every accepted token with its true features. "lagging", the
    mode of the first MLX prototype, absorbs only the newest pair of a round, at its true
    position, into a cache that falls behind: a shorter accept pass for fewer accepted tokens.
    The text is the target's own either way.
    """

    def __init__(
        self,
        head: Eagle3Head,
        embed: Callable[[mx.array], mx.array],
        taps: tuple[int, ...],
        to_target: mx.array | None = None,
        draft_cache: str = "exact",
    ):
        """``embed`` maps tokens (m,) to (m, h); ``to_target`` (Vd,) draft ids to target ids."""
        if draft_cache not in ("exact", "lagging"):
            raise ValueError(f"draft_cache is {draft_cache!r}: give 'exact' or 'lagging'.")
        self.lagging = draft_cache == "lagging"
        self.head = head
        self.taps = taps
        self.num_forwards = 0
        self._embed = embed
        self._to_target = to_target
        self._seed: mx.array | None = None
        self._warned = False
        self._num_pairs = 0  # absorbed so far, where the cache lags behind
        self._last: mx.array | None = None
        self.cache = self.make_cache()

    def with_draft_cache(self, draft_cache: str) -> "Eagle3Drafter":
        """The same weights with the other way of absorbing a round: "exact" or "lagging"."""
        return Eagle3Drafter(self.head, self._embed, self.taps, self._to_target, draft_cache)

    def begin(self, cache: list | None = None) -> "Eagle3Drafter":
        """See ``Drafter.begin``."""
        drafter = copy(self)
        drafter.cache = self.make_cache() if cache is None else cache
        drafter.num_forwards = 0
        drafter._seed = None
        drafter._warned = False
        drafter._num_pairs = drafter.cache[0].offset
        drafter._last = None
        return drafter

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in range(len(self.head.layers) + 1)]

    def extend(
        self, tokens: mx.array, features: mx.array | None, last: mx.array | None = None
    ) -> None:
        """See ``Drafter.extend``; tokens (m,), features (m, F)."""
        width = self.head.config.num_aux * self.head.config.target_hidden_size
        if features is None:
            features = held(self.cache[-1])
        if features is None:
            if self.cache[0].offset == 0:
                return  # the first token of a text, or of a cache that has no head part
            # One slot with an empty state is cheaper than a position that no slot stands for.
            features = mx.zeros((1, width), self.head.dtype)
        check_width(features, width)
        if self.lagging:
            self._extend_lagging(tokens, features, last)
            return
        states = self._forward(tokens, self.head.fuse(features))
        self._seed = states[-1:] if last is None else states[last.reshape(1)]

    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens: one head forward for each but the first."""
        states, base = self._seed, self._position() if self.lagging else None
        tokens = [self._next(states, pick)]
        for i in range(size - 1):
            positions = None if base is None else mx.array([base + i])
            states = self._forward(tokens[-1], states, positions)
            tokens.append(self._next(states, pick))
        for layer in self.cache[:-1]:
            layer.trim(size - 1)
        return Draft(mx.concatenate(tokens))

    def modules(self) -> list[nn.Module]:
        return [self.head]

    def propose_tree(self, shape: Tree) -> Draft:
        """A tree: dynamic (EAGLE-2, arXiv:2406.16858, section 4) or static (EAGLE-1).

        One head forward a level but the first, over the nodes that are continued; each sees
        the committed slots and its own ancestors.
        """
        base, level = self.cache[0].offset, 0
        states, visible = self._seed, mx.zeros((1, 0), mx.bool_)

        def step(picked: mx.array, rows: mx.array) -> mx.array:
            nonlocal states, visible, level
            num = picked.shape[0]
            visible = mx.concatenate([visible[rows], mx.eye(num, dtype=mx.bool_)], axis=1)
            mask = mx.concatenate([mx.ones((num, base), mx.bool_), visible], axis=1)
            positions = mx.full((num,), base + level, mx.int32)
            states = self._forward(self._to_ids(picked), states[rows], positions, mask)
            level += 1
            return self._log_probabilities(states)

        picked, parents = shape.grow(self._log_probabilities(self._seed), step)
        for layer in self.cache[:-1]:
            layer.trim(visible.shape[1])
        return Draft(self._to_ids(picked), parents, shape.depth)

    def check_tree(self, shape: Tree) -> None:
        """See ``TreeDrafter.check_tree``."""
        config = self.head.config
        if self.lagging or config.sliding_window is not None:
            what = "a lagging draft cache" if self.lagging else "a sliding window"
            raise ValueError(
                f"tree drafts do not support {what}: leave the tree out and draft chains."
            )
        if shape.width > config.draft_vocab_size:
            raise ValueError(
                f"the tree gives a node {shape.width} children, but the head drafts only "
                f"{config.draft_vocab_size} different tokens: give a narrower tree."
            )

    def _extend_lagging(self, tokens: mx.array, features: mx.array, last: mx.array | None) -> None:
        """Absorb prefill whole, but of a round only the pair at ``last``."""
        base = self._position()
        if last is None:
            positions = mx.arange(base, base + tokens.shape[0])
            self._num_pairs += tokens.shape[0]
        else:
            row, positions = last.reshape(1), base + last.reshape(1)
            tokens, features = tokens[row], features[row]
            self._last = last
        self._seed = self._forward(tokens, self.head.fuse(features), positions)[-1:]

    def _position(self) -> int:
        """Pairs of the text so far, in the cache or not; the last round's count is read by now."""
        if self._last is not None:
            self._num_pairs += self._last.item() + 1
            self._last = None
        return self._num_pairs

    def hold(self, features: mx.array) -> None:
        """See ``Drafter.hold``; features (1, F)."""
        hold(self.cache[-1], features)

    def pending(self) -> list[mx.array]:
        return [] if self._seed is None else [self._seed]

    def _forward(
        self,
        tokens: mx.array,
        states: mx.array,
        positions: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> mx.array:
        """One head forward over tokens (m,) and states (m, h) -> (m, h)."""
        self.num_forwards += 1
        self._warn_once_past(self.head.config.max_position_embeddings, tokens.shape[0])
        return self.head(self._embed(tokens), states, self.cache[:-1], positions, mask)

    def _next(self, states: mx.array, pick: Pick) -> mx.array:
        """The head's choice after states (1, h), as a target id (1,) int32."""
        return self._to_ids(pick(self.head.logits(states), self._to_target))

    def _to_ids(self, index: mx.array) -> mx.array:
        """Draft-vocabulary indices (m,) as target ids (m,) int32."""
        return (index if self._to_target is None else self._to_target[index]).astype(mx.int32)

    def _log_probabilities(self, states: mx.array) -> mx.array:
        """log q over the draft vocabulary in float32, (m, h) -> (m, Vd)."""
        logits = self.head.logits(states).astype(mx.float32)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def _warn_once_past(self, limit: int, num_new: int) -> None:
        if not self._warned and self.cache[0].offset + num_new > limit:
            self._warned = True
            warnings.warn(
                f"the text has passed the {limit} tokens this draft head was trained for: "
                "output stays exact, but fewer drafts may be accepted from here on.",
                stacklevel=2,
            )
