"""Drafters of multi-token-prediction layers: one that is run again, or one for each token ahead.

Several layers, as Step 3.5 and MiMo-V2-Flash have them: layer j predicts the token that is j + 2
behind the position whose state it starts from (DeepSeek-AI 2024, arXiv:2412.19437, equation 21).
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache, trim_prompt_cache

from ..target_model.stand_in import StandIn
from .base import BatchDrafter, Draft, Pick, PickChildren, row_at, start_early
from .feature_drafter import FeatureDrafter, last_features
from .target_parts import find_embedding, lm_head_of, sizes_of
from .tree import Tree, check_tree_width


class MTPHead(nn.Module):
    """Layers over (embedding of a token, state of the position before it)."""

    def __init__(
        self, layers: list[nn.Module], hidden_size: int, eps: float, arrays: bool = False
    ):
        """``layers`` are mlx-lm's; ``arrays``: whether they take no mask by its name.

        ``chooses`` says whether they attend to slots that an indexer chooses, ``state_first``
        whether the joining matrix takes the state before the embedding, ``state_normed`` whether
        states are those behind a norm, the target's and the head's own.
        """
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = layers
        self.norm = nn.RMSNorm(hidden_size, eps)
        self._attends = [_has_cache(layer) for layer in layers]
        self._arrays = arrays
        self.state_first = False
        self.state_normed = True
        self.chooses = any(isinstance(cache, CacheList) for cache in self.make_cache())

    def make_cache(self) -> list[Any]:
        """A cache for each layer that attends; two in one where it also chooses what it sees."""
        made: list[Any] = []
        for layer, attends in zip(self.layers, self._attends, strict=True):
            if attends:
                has_indexer = "indexer" in layer.get("self_attn", {})
                made.append(CacheList(KVCache(), KVCache()) if has_indexer else KVCache())
        return made

    def __call__(self, embeddings: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        """Advance m slots of B requests: embeddings and states (B, m, h) -> states (B, m, h).

        A state is the target's, or the head's own, which is fed back in its place.
        """
        x = self.join(embeddings, hidden)
        first = caches[0][0] if self.chooses else caches[0]
        mask = create_attention_mask(x, first, return_array=self._arrays)
        left = iter(caches)
        for layer, attends in zip(self.layers, self._attends, strict=True):
            x = layer(x, mask=mask, cache=next(left)) if attends else layer(x)
        hidden = self.norm(x) if self.state_normed else x
        return hidden

    def join(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        """Input of the layers: both through a norm each, side by side, then the matrix."""
        both = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        return self.fc(mx.concatenate(both[::-1] if self.state_first else both, axis=-1))


def _has_cache(layer: nn.Module) -> bool:
    """Whether a layer attends; of blocks with one part each, not all do."""
    return "self_attn" in layer or getattr(layer, "block_type", None) == "*"


class MTPSteps(nn.Module):
    """Layers of which each predicts one token further than the one before.

    Slot i of layer j joins the token at i + 1 with what the layer before passes on from slot
    i - 1, so that all caches have a slot for each token; the first j of layer j stand for
    nothing, and none but themselves sees them. Of the first layer it is the target's state.
    """

    def __init__(self, steps: list[MTPHead], windows: list[int | None], chained: bool):
        """``windows`` are how many slots each sees, None: all.

        ``chained``: whether a layer passes on what it made; otherwise all are given the target's
        states. ``state_normed``: whether the target's, and what is passed on, are behind a norm.
        """
        super().__init__()
        self.steps = steps
        self.chained = chained
        self.state_normed = False
        self._windows = windows

    @property
    def layers(self) -> list[nn.Module]:
        return [layer for step in self.steps for layer in step.layers]

    @property
    def norm(self) -> nn.Module:
        """The first layer's."""
        norm: nn.Module = self.steps[0].norm
        return norm

    chooses = True  # so no trees: which layer a slot is for depends on its depth

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in self.steps]

    def advance(
        self, index: int, embeddings: mx.array, hidden: mx.array, cache: KVCache
    ) -> tuple[mx.array, mx.array]:
        """Advance m slots of a layer: embeddings and hidden states (m, h).

        Returns what was made and what is passed on, (m, h) each.
        """
        step: MTPHead = self.steps[index]
        start = cache.offset
        num = len(hidden)
        rows = mx.arange(start, start + num)[:, None]
        slots = mx.arange(start + num)[None]
        mask = (slots <= rows) & ((slots >= index) | (slots == rows))
        window = self._windows[index]
        if window is not None:
            mask = mask & (slots > rows - window)
        x = step.join(embeddings, hidden)[None]
        made: mx.array = step.layers[0](x, mask=mask, cache=cache)[0]
        if not self.chained:
            return made, hidden
        return made, step.norm(made) if self.state_normed else made


class MTPDrafter(FeatureDrafter):
    """A ``Drafter`` around MTP layers; embedding and output projection are the target's.

    Slot t joins the token at t + 1 with the target's state at t, after its final norm unless
    ``take_hidden`` says otherwise. Drafted slots take the head's own state, and are dropped again.
    """

    head: Any
    """An ``MTPHead``."""

    def __init__(self, head: nn.Module, target: nn.Module):
        """Raises ValueError where the head is not as wide as the target."""
        embedding, _ = find_embedding(target)
        sizes_of(target).check_width("MTP layer", head.norm.weight.size)
        self._embed = embedding
        self._project: Callable[[mx.array], mx.array] = lm_head_of(target, embedding)
        self._num_target_layers = len(target.layers)
        taps = (self._num_target_layers + 1,)
        width = int(head.norm.weight.size)
        super().__init__(head, taps, len(head.make_cache()), width)
        self.take_hidden(head.state_normed)

    def take_hidden(self, is_normed: bool) -> None:
        """Draft from states behind the last norm, the target's and the head's, or before it."""
        self.head.state_normed = is_normed
        self.taps = (self._num_target_layers + int(is_normed),)

    def make_cache(self) -> list[Any]:
        return [*self.head.make_cache(), KVCache()]

    def _start(self, cache: list[Any]) -> None:
        super()._start(cache)
        self.__dict__.pop("_stand_in", None)

    @cached_property
    def _stand_in(self) -> StandIn:
        """The head's stand-in of this request."""
        return StandIn(self.head)

    def forward(self, embeddings: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        with self._stand_in.absorbed.absorbing():
            made: mx.array = self._stand_in.model(embeddings, hidden, caches)
        return made

    def logits(self, hidden: mx.array) -> mx.array:
        normed = hidden if self.head.state_normed else self.head.norm(hidden)
        return self.project(self._project, normed)

    def _absorb(self, tokens: mx.array, features: mx.array, last: mx.array | None) -> mx.array:
        """The state is (1, h)."""
        return row_at(self._forward(tokens, features), last)

    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens: see ``chain``."""
        tokens = self.chain(size, pick, self._forward)
        trim_prompt_cache(self.cache[:-1], size - 1)
        return Draft(mx.concatenate(tokens))

    @property
    def supports_trees(self) -> bool:
        return not self.head.chooses

    def check_tree(self, shape: Tree) -> None:
        if not self.supports_trees:
            raise ValueError("these MTP layers draft chains only: leave the tree out.")
        if self.num_drafted is not None:
            check_tree_width(shape, self.num_drafted)

    def propose_tree(self, shape: Tree, pick: PickChildren) -> Draft:
        """A tree: one forward for each level but the first, over all nodes so far.

        Each node's slot stands at its depth, and sees the committed slots and its ancestors.
        """
        caches = self.cache[:-1]
        all_tokens: list[mx.array] = []
        all_hidden: list[mx.array] = []
        mask = mx.zeros((0, 0), mx.bool_)

        def forward(tokens: mx.array, hidden: mx.array, visible: mx.array) -> mx.array:
            nonlocal mask
            before = mask.shape[0]
            mask = mx.pad(mask, [(0, 0), (0, tokens.shape[0])])
            mask = mx.concatenate([mask, visible], axis=0)
            all_tokens.append(tokens)
            all_hidden.append(hidden)
            trim_prompt_cache(caches, before)
            with self._stand_in.tree_attention(caches, mask):
                made = self._forward(mx.concatenate(all_tokens), mx.concatenate(all_hidden))
            return made[before:]

        draft = self.branched(shape, pick, forward)
        trim_prompt_cache(caches, mask.shape[0])
        return draft

    def _forward(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """One forward over tokens (m,) and hidden states (m, h) -> (m, h)."""
        self.num_forwards += 1
        return self.forward(self._embedded(tokens)[None], hidden[None], self.cache[:-1])[0]


class SteppedMTPDrafter(MTPDrafter):
    """A ``Drafter`` around layers of which each drafts one token.

    What starts a draft is what the first layer made in the last slot, and below that what each
    layer but the last passes on from there: (n, h) for n layers. Between requests the cache of
    the last position's features holds what was passed on there as well, side by side.
    """

    def _start(self, cache: list[Any]) -> None:
        super()._start(cache)
        # Of the latest two calls of extend: slots before it, and what was passed on from the last
        # of these and from its own ones, (n - 1, m, h). A round in flight may be dropped whole.
        self._passed: list[tuple[int, mx.array]] = []

    def save_last_features(self, features: mx.array) -> None:
        """Save features (1, h), and what the layers pass on from the last slot that is left."""
        passed = mx.zeros((len(self.head.steps) - 1, features.shape[1]), features.dtype)
        for start, rows in self._passed:
            slot = self.cache[0].offset - start
            if 0 <= slot < rows.shape[1]:
                passed = rows[:, slot]
        super().save_last_features(mx.concatenate([features, passed]).reshape(1, -1))

    def _passed_before(self, width: int) -> mx.array:
        """States (n - 1, h) that each layer but the last passed on from the last slot."""
        if self._seed.size:
            return self._seed[1:]
        saved = last_features(self.cache[-1])
        if saved is None or saved.shape[1] != len(self.head.steps) * width:
            return mx.zeros((len(self.head.steps) - 1, width))
        return saved.reshape(-1, width)[1:]

    @property
    def longest_draft(self) -> int:
        return len(self.head.steps)

    def batch_drafter(self) -> BatchDrafter | None:
        return None

    def logits(self, hidden: mx.array) -> mx.array:
        return self._logits_of(0, hidden)

    def _logits_of(self, index: int, made: mx.array) -> mx.array:
        step = self.head.steps[index]
        output = step.lm_head if "lm_head" in step else self._project
        return self.project(output, step.norm(made))

    def _first_logits(self, seed: mx.array) -> mx.array:
        return self.logits(seed[:1])

    def _advance(
        self, index: int, tokens: mx.array, hidden: mx.array
    ) -> tuple[mx.array, mx.array]:
        self.num_forwards += 1
        head: MTPSteps = self.head
        return head.advance(index, self._embedded(tokens), hidden, self.cache[index])

    def _absorb(self, tokens: mx.array, features: mx.array, last: mx.array | None) -> mx.array:
        num = len(self.head.steps)
        before = self._passed_before(features.shape[1])
        num_before = self.cache[0].offset
        hidden = features
        seed = []
        passed_on = []
        for index in range(num):
            made, passed = self._advance(index, tokens, hidden)
            if index == 0:
                seed.append(row_at(made, last))
            if index < num - 1:
                seed.append(row_at(passed, last))
                rows = mx.concatenate([before[index : index + 1].astype(passed.dtype), passed])
                passed_on.append(rows)
                hidden = rows[:-1]
        made_last = mx.concatenate(seed)
        if last is None:  # all of it stays
            latest = num_before + len(tokens), made_last[1:, None]
        else:
            latest = num_before, mx.stack(passed_on)
        self._passed = [*self._passed[-1:], latest]
        return made_last

    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens, or as many as there are layers.

        Layer j advances j slots, whose tokens were drafted by those before.
        """
        size = min(size, self.longest_draft)
        tokens = [self.choose(self._first, pick)]
        passed = self._seed[:0]
        for index in range(1, size):
            start_early(tokens[-1], size)
            hidden = mx.concatenate([self._seed[index : index + 1], passed])
            made, passed = self._advance(index, mx.concatenate(tokens), hidden)
            tokens.append(self.choose(self._logits_of(index, made[-1:]), pick))
            self.cache[index].trim(index)
        return Draft(mx.concatenate(tokens))
