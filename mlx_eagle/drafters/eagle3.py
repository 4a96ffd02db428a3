"""Drafts from an EAGLE head: chains, trees, and drafts of one pass.

EAGLE-3: Li et al. 2025, arXiv:2503.01840. This module decides which hidden state, token and
position the head gets. P-EAGLE (arXiv:2602.01469): after the slots of the pairs that it absorbs,
the head gets masked slots, without token and features, which stand for the tokens that follow.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from itertools import count
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, trim_prompt_cache

from ..target_model.masks_and_ropes import BY_LENGTH, exact_masks, find_ropes, slot_positions
from ..target_model.ragged import RaggedCaches
from ..target_model.rollback import Checkpoint
from .base import BatchDrafter, Draft, Pick, PickChildren, index_of, row_at
from .feature_drafter import FeatureDrafter
from .head import Eagle3Head
from .head_cache import SINKS, DraftOverlay, as_plain_caches, check_window
from .head_weights import attach_head
from .kind import LoadOptions
from .tree import Tree, check_tree_width

FIRST_SIZE = 7
"""Tokens of the first draft if neither the caller nor the head gives a number."""
TENSORS = (
    ".fc.weight", ".fc.weight_packed", ".eagle_linear.weight", ".fusion_layer.weight",
    ".hidden_norm.weight", ".d2t", ".mask_hidden", ".eh_proj.weight",
)  # fmt: skip
"""Last parts of names that only heads have: a fusion matrix, a second norm, a draft vocabulary."""


class EagleDrafter(FeatureDrafter):
    """Base of drafters with an EAGLE head: vocabulary, limits, choice of tokens.

    One may be used in any thread, and ``begin`` may run in several threads at the same time.
    """

    head: Eagle3Head

    draft_window: int | None = None
    """Number of the newest slots that the head's caches keep beside the first few; None: all."""
    lagging = False  # whether its cache is the lagging one of ``Eagle3Drafter``

    def __init__(
        self,
        head: Eagle3Head,
        embed: Callable[[mx.array], mx.array],
        taps: tuple[int, ...],
        to_target: mx.array | None = None,
    ):
        """``embed`` maps tokens (m,) to (m, h); ``to_target`` (Vd,) draft ids to target ids."""
        self._embed = embed
        self.to_target = to_target
        self.num_parallel_heads = head.config.num_parallel_heads
        width = head.config.num_aux * head.config.target_hidden_size
        super().__init__(head, taps, len(head.layers), width)

    def with_draft_window(self, size: int | None) -> Self:
        if size == self.draft_window:
            return self
        check_window(size, self.head.config.sliding_window)
        drafter = copy(self)
        drafter.draft_window = size
        return drafter.begin()

    @property
    def cost_key(self) -> str:
        window = "" if self.draft_window is None else f" window {self.draft_window}"
        return super().cost_key + window + (" lagging" if self.lagging else "")

    @property
    def dtype(self) -> mx.Dtype:
        return self.head.dtype

    def make_cache(self) -> list[Any]:
        if self.draft_window is None:
            return super().make_cache()
        size = SINKS + self.draft_window
        return [*(RotatingKVCache(size, keep=SINKS) for _ in self.head.layers), KVCache()]

    def _start(self, cache: list[Any]) -> None:
        super()._start(cache)
        self._warned = False

    def batch_drafter(self) -> BatchDrafter | None:
        by_length = any(isinstance(rope, BY_LENGTH) for rope in find_ropes(self.head))
        return None if by_length or self.draft_window is not None else super().batch_drafter()

    def hidden_of(self, features: mx.array) -> mx.array:
        return self.head.fuse(features)

    def logits(self, hidden: mx.array) -> mx.array:
        return self.head.logits(hidden, self.project)

    def parallel_logits(self, hidden: mx.array, index: int) -> mx.array:
        return self.head.parallel_logits(hidden, index, self.project)

    def _count(self, num_slots: int) -> None:
        """Count a forward pass over new slots; warn once past the head's positions."""
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
    """A ``Drafter`` with an EAGLE-3 head.

    Slots of its cache that were made from true features stay; ``propose`` adds slots made from
    the head's own output, and drops them before it returns (arXiv:2503.01840, section 3.2).

    The draft cache "exact" absorbs every accepted token with its true features. "lagging", the
    mode of the first MLX prototype, absorbs only the newest pair of a round, at its true
    position, into a cache that falls behind: a shorter accept pass for fewer accepted tokens.
    The text is the target's own either way.
    """

    _uses_overlay = False

    def with_draft_cache(self, draft_cache: str) -> "Eagle3Drafter":
        if draft_cache not in ("exact", "lagging"):
            raise ValueError(f"draft_cache is {draft_cache!r}: give 'exact' or 'lagging'.")
        made = copy(self)
        made.lagging = draft_cache == "lagging"
        return made.begin()

    def _start(self, cache: list[Any]) -> None:
        super()._start(cache)
        self._num_pairs: int = cache[0].offset  # absorbed so far, where the cache lags behind
        self._last: mx.array | None = None

    def _absorb(self, tokens: mx.array, features: mx.array, last: mx.array | None) -> mx.array:
        """Absorb pairs, see ``Drafter``; returns the hidden state (1, h) to draft from."""
        if self.lagging:
            return self._absorb_lagging(tokens, features, last)
        return row_at(self._forward(tokens, self.head.fuse(features)), last)

    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens: see ``chain``."""
        positions = count(self._position() if self.lagging else self.cache[0].offset)
        with self._drafting() as caches:

            def step(tokens: mx.array, hidden: mx.array) -> mx.array:
                return self._forward(tokens, hidden, next(positions), cache=caches)

            tokens = self.chain(size, pick, step)
        return Draft(mx.concatenate(tokens))

    def propose_tree(self, shape: Tree, pick: PickChildren) -> Draft:
        """A tree: dynamic (EAGLE-2, arXiv:2406.16858, section 4) or static (EAGLE-1).

        One head forward for each level but the first, over the nodes that are continued; each
        sees the committed slots and its own ancestors.
        """
        levels = count(self.cache[0].offset)
        with self._drafting() as caches:
            num_before = caches[0].offset

            def forward(tokens: mx.array, hidden: mx.array, visible: mx.array) -> mx.array:
                num = tokens.shape[0]
                mask = mx.concatenate([mx.ones((num, num_before), mx.bool_), visible], axis=1)
                positions = mx.full((num,), next(levels), mx.int32)
                return self._forward(tokens, hidden, positions, mask, caches)

            return self.branched(shape, pick, forward)

    def batch_drafter(self) -> BatchDrafter | None:
        return None if self.lagging else super().batch_drafter()

    @property
    def supports_overlay(self) -> bool:
        """True unless attention is latent, whose slots always go into the caches."""
        return self.head.config.latent is None

    def use_overlay(self, is_used: bool) -> None:
        self._uses_overlay = is_used and self.supports_overlay

    @contextmanager
    def _drafting(self) -> Iterator[list[Any]]:
        """Caches for drafted slots: the head's own, from which they are dropped, or overlays."""
        own = self.cache[:-1]
        num_before = own[0].offset
        caches = own if self.draft_window is None else as_plain_caches(own)
        if self._uses_overlay:
            layers = zip(caches, self.head.layers, strict=True)
            caches = [DraftOverlay(cache, layer.window) for cache, layer in layers]
        yield caches
        trim_prompt_cache(own, own[0].offset - num_before)

    @property
    def supports_trees(self) -> bool:
        return not self.lagging and self.head.config.sliding_window is None

    def check_tree(self, shape: Tree) -> None:
        if not self.supports_trees:
            what = "a lagging draft cache" if self.lagging else "a sliding window"
            raise ValueError(
                f"tree drafts do not support {what}: leave the tree out and draft chains."
            )
        check_tree_width(shape, self.num_drafted or self.head.config.draft_vocab_size)

    def _absorb_lagging(
        self, tokens: mx.array, features: mx.array, last: mx.array | None
    ) -> mx.array:
        """Absorb all pairs of a prefill, but only the pair at ``last`` of a round."""
        base = self._position()
        if last is None:
            positions = mx.arange(base, base + tokens.shape[0])
            self._num_pairs += tokens.shape[0]
        else:
            row = last.reshape(1)
            positions = base + last.reshape(1)
            tokens = tokens[row]
            features = features[row]
            self._last = last
        return self._forward(tokens, self.head.fuse(features), positions)[-1:]

    def _position(self) -> int:
        """Number of pairs absorbed or skipped so far; reads the last round's count."""
        if self._last is not None:
            self._num_pairs += index_of(self._last) + 1
            self._last = None
        return self._num_pairs

    def _forward(
        self,
        tokens: mx.array,
        hidden: mx.array,
        positions: int | mx.array | None = None,
        mask: mx.array | None = None,
        cache: list[Any] | None = None,
    ) -> mx.array:
        """One head forward over tokens (m,) and hidden states (m, h) -> (m, h).

        ``cache``: caches that the layers append to instead of their own.
        """
        self._count(tokens.shape[0])
        cache = self.cache[:-1] if cache is None else cache
        with exact_masks(cache, tokens.shape[0]):
            return self.head(self._embedded(tokens), hidden, cache, positions, mask)


class ParallelDrafter(EagleDrafter):
    """A ``Drafter`` with a P-EAGLE head: one head forward per round, for any draft length.

    The masked slots of a draft run with the pairs of the previous round, as many as the last
    draft had tokens. If more are needed, and after a prompt, they run by themselves. They never
    stay in the cache: its slot t is pair t, as with any head.

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
    ):
        super().__init__(head, embed, taps, to_target)
        # What a masked slot takes for token and features is the same for all of them.
        self._mask_embedding = embed(mx.array([head.config.mask_token_id]))
        self._mask_hidden = head.masked(1)
        mx.eval(self._mask_embedding, self._mask_hidden)

    def batch_drafter(self) -> BatchDrafter | None:
        is_windowed = any(layer.window is not None for layer in self.head.layers)
        return None if is_windowed else super().batch_drafter()

    def _start(self, cache: list[Any]) -> None:
        super()._start(cache)
        self._size = self.head.config.speculative_tokens_hint or FIRST_SIZE

    def _absorb(self, tokens: mx.array, features: mx.array, last: mx.array | None) -> mx.array:
        """Absorb pairs, see ``Drafter``; returns hidden states (k, h) for a whole draft."""
        embeddings = self._embedded(tokens)
        hidden = self.head.fuse(features)
        if last is None:  # a prompt, which may be long: in the order that needs no mask
            self._count(tokens.shape[0])
            with exact_masks(self.cache[:-1], tokens.shape[0]):
                return self.head(embeddings, hidden, self.cache[:-1])[-1:]
        return self._forward(embeddings, hidden, last, self._size - 1)

    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens, from the last pair and the masked slots."""
        logits = self._first
        self._size = size
        if size > logits.shape[0]:
            none = self._mask_embedding[:0], self._mask_hidden[:0]
            masked = self._forward(*none, mx.array(-1), size - 1)
            logits = mx.concatenate([logits[:1], self.logits(masked)], axis=0)
        rows = mx.split(logits[:size], size, axis=0)
        return Draft(mx.concatenate([self.choose(row, pick) for row in rows]))

    def _forward(
        self, embeddings: mx.array, hidden: mx.array, last: mx.array, num_masked: int
    ) -> mx.array:
        """Hidden states of the last pair and of masked slots, after one head forward.

        Of the m pairs, embeddings and hidden (m, h), the first ``last`` + 1 count. Without a
        pair (-1) the result is (num_masked, h), else (1 + num_masked, h).
        """
        num_pairs = embeddings.shape[0]
        base = self.cache[0].offset
        num_rows = num_pairs + num_masked
        end = base + num_pairs
        self._count(num_rows)
        embeddings = mx.concatenate([embeddings, *[self._mask_embedding] * num_masked], axis=0)
        hidden = mx.concatenate([hidden, *[self._mask_hidden] * num_masked], axis=0)
        ahead = base + last + 1 + mx.arange(num_masked)
        positions = mx.concatenate([mx.arange(base, end), ahead])
        caches = self.cache[:-1]
        num_before = base
        if self.draft_window is not None and num_pairs == 0:
            caches = as_plain_caches(caches)
            num_before = caches[0].offset
        elif self.draft_window is not None:
            num_before = min(base, caches[0].max_size - 1)
        slots = slot_positions(num_before + num_rows, base + num_rows, SINKS)
        is_masked = slots >= end
        rows = slots[-num_rows:, None]

        def visible(window: int | None) -> mx.array | None:
            if self.draft_window is not None and num_rows == num_pairs == 1:
                return None  # it finds its window, and nothing else
            seen: mx.array = (slots <= rows) & ((slots <= base + last) | is_masked | (rows < end))
            window = self.draft_window or window
            if window is None:
                return seen
            # As in training, a draft sees all of itself, from the last pair on.
            near: mx.array = (slots > positions[:, None] - window) | (slots >= base + last)
            return seen & (near if self.draft_window is None else near | (slots < SINKS))

        before = Checkpoint(caches, num_rows=num_rows)
        hidden = self.head(embeddings, hidden, caches, positions, visible)
        before.rollback(num_pairs)
        if num_pairs == 0:
            return hidden
        own = hidden[last.reshape(1)]
        return mx.concatenate([own, hidden[num_pairs:]], axis=0)

    def draft_rows(self, size: int, caches: RaggedCaches, pick: Pick) -> list[mx.array]:
        """Draft ``size`` tokens (B,) in one forward over masked slots after the absorbed pairs."""
        rows = [self._first]
        if size > 1:
            self.num_forwards += 1
            num_slots = self._first.shape[0], size - 1
            embeddings, hidden = (
                mx.broadcast_to(row, (*num_slots, row.shape[1]))
                for row in (self._mask_embedding, self._mask_hidden)
            )
            logits = self.logits(self.forward(embeddings, hidden, caches.open()))
            rows += [logits[:, slot] for slot in range(size - 1)]
        return [self.choose(row, pick) for row in rows]


def recognise(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Whether these are tensors of a published head, of a known family or not."""
    return any(f".{name}".endswith(TENSORS) for name in names)  # and not mlp.c_fc.weight


def load(
    folder: Path, config: dict[str, Any], model: nn.Module, options: LoadOptions
) -> EagleDrafter:
    """The drafter of a converted head; see ``Kind.load``."""
    attached = attach_head(folder, config, model, options)
    make = Eagle3Drafter if attached.head.config.mask_token_id is None else ParallelDrafter
    return make(attached.head, attached.embed, attached.taps, attached.to_target)
