"""Chain and tree drafts from an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840).

How the head is fed: which state, which token, which position.
"""

import warnings
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..target.ropes import BY_LENGTH, evaluate_ropes, find_ropes
from ..target.tree_rows import each_itself
from .base import Draft, Pick, PickChildren, start_early
from .batch_drafter import HeadBatchDrafter
from .feature_drafter import FeatureDrafter
from .head import Eagle3Head
from .head_cache import DraftOverlay, as_plain_caches, check_window, make_window, seen_by_rows
from .tree import StaticTree, Tree


class EagleDrafter(FeatureDrafter):
    """What drafters around an EAGLE head have in common: its tokens, its limits, its choice.

    Once made, one may be used in any thread, and ``begin`` it in several at the same time.
    """

    def __init__(
        self,
        head: Eagle3Head,
        embed: Callable[[mx.array], mx.array],
        taps: tuple[int, ...],
        to_target: mx.array | None = None,
        draft_window: int | None = None,
    ):
        """``embed`` maps tokens (m,) to (m, h); ``to_target`` (Vd,) draft ids to target ids.

        ``draft_window`` is how many of the newest slots the head's caches keep, beside the first
        few (see ``window.py``); None keeps all. Raises ValueError where the head cannot have one.
        """
        check_window(draft_window, head.config.sliding_window)
        self.draft_window = draft_window
        self._embed = embed
        self._to_target = to_target
        super().__init__(head, taps, len(head.layers))
        # Arrays that are no parameters: nobody else computes them before another thread asks.
        evaluate_ropes(head)
        mx.eval(to_target)

    @property
    def cost_key(self) -> str:
        window = "" if self.draft_window is None else f" window {self.draft_window}"
        return super().cost_key + window

    @property
    def width(self) -> int:
        """The taps side by side."""
        return self.head.config.num_aux * self.head.config.target_hidden_size

    @property
    def dtype(self) -> mx.Dtype:
        return self.head.dtype

    def make_cache(self) -> list:
        if self.draft_window is None:
            return super().make_cache()
        return [*(make_window(self.draft_window) for _ in self.head.layers), KVCache()]

    def _start(self, cache: list) -> None:
        super()._start(cache)
        self._warned = False

    def _logits(self, states: mx.array) -> mx.array:
        """States (m, h)."""
        return self.head.logits(states)

    def _choose(self, logits: mx.array, pick: Pick) -> mx.array:
        """The choice among logits (1, Vd), as a target id (1,) int32."""
        return self._to_ids(pick(logits, self._to_target))

    def _to_ids(self, index: mx.array) -> mx.array:
        """Draft-vocabulary indices (m,) as target ids (m,) int32."""
        return (index if self._to_target is None else self._to_target[index]).astype(mx.int32)

    def _count(self, num_slots: int) -> None:
        """Count a forward over that many new slots; warn once where they lead too far."""
        self.num_forwards += 1
        limit = self.head.config.max_position_embeddings
        if not self._warned and self.cache[0].offset + num_slots > limit:
            self._warned = True
            warnings.warn(
                f"the text has passed the {limit} tokens this draft head was trained for: "
                "output stays exact, but fewer drafts may be accepted from here on.",
                stacklevel=2,
            )


class Eagle3Drafter(EagleDrafter):
    """A ``Drafter`` around an EAGLE-3 head.

    Slots of its cache that were fed true features stay; those that ``propose`` adds, fed the
    head's own output, are dropped before it returns (arXiv:2503.01840, section 3.2).

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
        draft_window: int | None = None,
    ):
        """``draft_window`` is that of ``EagleDrafter``.

        Raises ValueError for a ``draft_cache`` that is neither.
        """
        if draft_cache not in ("exact", "lagging"):
            raise ValueError(f"draft_cache is {draft_cache!r}: give 'exact' or 'lagging'.")
        self.lagging = draft_cache == "lagging"
        self._uses_overlay = False
        super().__init__(head, embed, taps, to_target, draft_window)

    def with_draft_cache(self, draft_cache: str) -> "Eagle3Drafter":
        return self._like(draft_cache, self.draft_window)

    def with_draft_window(self, size: int | None) -> "Eagle3Drafter":
        return self._like("lagging" if self.lagging else "exact", size)

    def _like(self, draft_cache: str, draft_window: int | None) -> "Eagle3Drafter":
        lagging = "lagging" if self.lagging else "exact"
        if (draft_cache, draft_window) == (lagging, self.draft_window):
            return self
        parts = self.head, self._embed, self.taps, self._to_target
        return Eagle3Drafter(*parts, draft_cache, draft_window)

    @property
    def cost_key(self) -> str:
        return super().cost_key + (" lagging" if self.lagging else "")

    def _start(self, cache: list) -> None:
        super()._start(cache)
        self._num_pairs = cache[0].offset  # absorbed so far, where the cache lags behind
        self._last: mx.array | None = None

    def _absorb(self, tokens: mx.array, features: mx.array, last: mx.array | None) -> mx.array:
        """The state is (1, h)."""
        if self.lagging:
            return self._absorb_lagging(tokens, features, last)
        states = self._forward(tokens, self.head.fuse(features))
        return states[-1:] if last is None else states[last.reshape(1)]

    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens: one head forward for each but the first.

        ModelOpt's parallel heads, where the head has some, say the last tokens without one.
        """
        states = self._seed
        base = self._position() if self.lagging else self.cache[0].offset
        num_steps = max(1, size - self.head.config.num_parallel_heads)
        tokens, drafting = [self._choose(self._first, pick)], self._begin_draft()
        for i in range(num_steps - 1):
            start_early(tokens[-1], size)
            states = self._forward(tokens[-1], states, base + i, cache=drafting)
            tokens.append(self._choose(self._logits(states), pick))
        for i in range(size - num_steps):
            tokens.append(self._choose(self.head.parallel_logits(states, i), pick))
        self._end_draft(num_steps - 1)
        return Draft(mx.concatenate(tokens))

    def propose_tree(self, shape: Tree, pick: PickChildren) -> Draft:
        """A tree: dynamic (EAGLE-2, arXiv:2406.16858, section 4) or static (EAGLE-1).

        One head forward for each level but the first, over the nodes that are continued; each
        sees the committed slots and its own ancestors.
        """
        base, level, drafting = self.cache[0].offset, 0, self._begin_draft()
        num_before = drafting[0].offset
        states, visible = self._seed, mx.zeros((1, 0), mx.bool_)

        def step(picked: mx.array, rows: mx.array) -> mx.array:
            nonlocal states, visible, level
            num = picked.shape[0]
            visible = mx.concatenate([visible[rows], each_itself(num)], axis=1)
            mask = mx.concatenate([mx.ones((num, num_before), mx.bool_), visible], axis=1)
            positions = mx.full((num,), base + level, mx.int32)
            states = self._forward(self._to_ids(picked), states[rows], positions, mask, drafting)
            level += 1
            return self._logits(states)

        def branch(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
            return pick(logits, self._to_target, count)

        grown = shape.grow(self._first, step, branch)
        self._end_draft(visible.shape[1])
        form = shape.parents if isinstance(shape, StaticTree) else None
        return Draft(self._to_ids(grown.ids), grown.parents, shape.depth, form, grown.draw_index)

    def batch_drafter(self) -> HeadBatchDrafter | None:
        by_length = any(isinstance(rope, BY_LENGTH) for rope in find_ropes(self.head))
        if self.lagging or by_length or self.draft_window is not None:
            return None
        return HeadBatchDrafter(self.head, self._embed, self._to_target, self.begin)

    @property
    def supports_overlay(self) -> bool:
        """Not with latent attention, whose slots always go into the caches."""
        return self.head.config.latent is None

    def use_overlay(self, is_used: bool) -> None:
        self._uses_overlay = is_used and self.supports_overlay

    def _begin_draft(self) -> list:
        """Where drafted slots go: into the head's caches, or beside them."""
        caches = self.cache[:-1]
        if self.draft_window is not None:
            caches = as_plain_caches(caches)
        if not self._uses_overlay:
            return caches
        layers = zip(caches, self.head.layers, strict=True)
        return [DraftOverlay(cache, layer.window) for cache, layer in layers]

    def _end_draft(self, num_slots: int) -> None:
        """Drop the drafted slots."""
        if not self._uses_overlay and self.draft_window is None:
            for cache in self.cache[:-1]:
                cache.trim(num_slots)

    @property
    def supports_trees(self) -> bool:
        return not self.lagging and self.head.config.sliding_window is None

    def check_tree(self, shape: Tree) -> None:
        config = self.head.config
        if not self.supports_trees:
            what = "a lagging draft cache" if self.lagging else "a sliding window"
            raise ValueError(
                f"tree drafts do not support {what}: leave the tree out and draft chains."
            )
        if shape.width > config.draft_vocab_size:
            raise ValueError(
                f"the tree gives a node {shape.width} children, but the head drafts only "
                f"{config.draft_vocab_size} different tokens: give a narrower tree."
            )

    def _absorb_lagging(
        self, tokens: mx.array, features: mx.array, last: mx.array | None
    ) -> mx.array:
        """Absorb prefill whole, but of a round only the pair at ``last``."""
        base = self._position()
        if last is None:
            positions = mx.arange(base, base + tokens.shape[0])
            self._num_pairs += tokens.shape[0]
        else:
            row, positions = last.reshape(1), base + last.reshape(1)
            tokens, features = tokens[row], features[row]
            self._last = last
        return self._forward(tokens, self.head.fuse(features), positions)[-1:]

    def _position(self) -> int:
        """Pairs absorbed or passed over so far; the last round's count is known by now."""
        if self._last is not None:
            self._num_pairs += self._last.item() + 1
            self._last = None
        return self._num_pairs

    def _forward(
        self,
        tokens: mx.array,
        states: mx.array,
        positions: int | mx.array | None = None,
        mask: mx.array | None = None,
        cache: list | None = None,
    ) -> mx.array:
        """One head forward over tokens (m,) and states (m, h) -> (m, h).

        ``cache``: what the layers append to, in place of their own.
        """
        self._count(tokens.shape[0])
        if cache is None:
            cache = self.cache[:-1]
            if self.draft_window is not None:
                mask = seen_by_rows(cache[0], tokens.shape[0])
        return self.head(self._embedded(tokens), states, cache, positions, mask)
