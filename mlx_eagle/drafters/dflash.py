"""Drafts of a whole block from one forward pass: DFlash.

The head attends to keys and values made from the target's activations at all committed positions.
Behind them it is given the newest token and masked slots, all at once, and says what stands in
each. Keys and values of the block do not stay.

    slots of a layer's cache   0 .. P - 1            features of position i, at position i
    block                      P, P + 1 .. P + k     the newest token, then masks
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, trim_prompt_cache
from mlx_lm.models.rope_utils import initialize_rope

from ..target_model.masks_and_ropes import evaluate_ropes
from ..target_model.ragged import RaggedCache, RaggedCaches
from .base import Draft, Pick, PickChildren, row_at
from .block_config import BlockConfig, bare_name, config_from, known_tensors, readings
from .feature_drafter import FeatureDrafter
from .folder import check_tensors, read_module, read_weights, shapes_of
from .head import GATED, capped
from .head_cache import check_window
from .head_weights import draft_ids
from .kind import Kind, LoadOptions, Tensors
from .target_parts import activation_dtype, embedding_scale, find_embedding, lm_head_of, sizes_of
from .tree import Tree, check_tree_width

Caches = Sequence[KVCache | RaggedCache]
Sublayer = Callable[[mx.array], mx.array]


def seen_by(
    start: int | mx.array, num_rows: int, columns: mx.array, config: BlockConfig, layer: int
) -> mx.array:
    """Columns that the rows of a block see in a layer, (m, S) or (B, 1, m, S).

    The block begins at position ``start``, of several requests (B, 1, 1, 1). ``columns`` (S,) or
    (..., S) are positions; the context's end where the block begins.
    """
    is_causal = layer in config.causal_layers
    window = config.window(layer)
    rows = start + mx.arange(num_rows)[:, None]
    seen = columns <= (rows if is_causal else start + num_rows - 1)
    if window is None:
        return seen
    first = start - window if config.window_from == "anchor" else rows - window + 1
    return seen & (columns >= first)


class BlockAttention(nn.Module):
    """Attention of a block to the context and to itself, with queries and keys normed by head."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        c = config
        self.num_heads = c.num_heads
        self.num_kv_heads = c.num_kv_heads
        self.head_dim = c.head_dim
        self.scale = c.head_dim**-0.5
        h = c.hidden_size
        bias = c.attention_bias
        self.q_proj = nn.Linear(h, c.num_heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(h, c.num_kv_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(h, c.num_kv_heads * c.head_dim, bias=bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, h, bias=bias)
        self.q_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps)
        if c.has_sinks:
            self.attention_sink_bias = mx.zeros((c.num_heads,))
        self.rope = initialize_rope(
            c.head_dim,
            c.rope_theta,
            c.rope_traditional,
            c.rope_scaling,
            c.max_position_embeddings,
        )

    def __call__(
        self, x: mx.array, cache: KVCache | RaggedCache, mask: mx.array | None
    ) -> mx.array:
        """Attend from the block's rows (B, m, h); their keys and values are left in the cache."""
        q = self.queries(x, cache.offset)
        keys, values = cache.update_and_fetch(*self.keys_and_values(x, cache.offset))
        out = mx.fast.scaled_dot_product_attention(
            q,
            keys,
            values,
            scale=self.scale,
            mask=mask,
            sinks=self.attention_sink_bias if "attention_sink_bias" in self else None,
        )
        return self.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))

    def queries(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """Queries (B, H, m, D) of rows (B, m, h), the first at position ``offset``, () or (B,)."""
        q = self.q_norm(self._to_heads(self.q_proj(x), self.num_heads))
        turned: mx.array = self.rope(q, offset=offset)
        return turned

    def keys_and_values(self, x: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values (B, Hkv, m, D) of such rows."""
        k = self.k_norm(self._to_heads(self.k_proj(x), self.num_kv_heads))
        return self.rope(k, offset=offset), self._to_heads(self.v_proj(x), self.num_kv_heads)

    def _to_heads(self, x: mx.array, num_heads: int) -> mx.array:
        return x.reshape(*x.shape[:2], num_heads, self.head_dim).swapaxes(1, 2)


class BlockMLP(nn.Module):
    """Gated MLP."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        h = config.hidden_size
        size = config.intermediate_size
        self.gate_proj = nn.Linear(h, size, bias=False)
        self.up_proj = nn.Linear(h, size, bias=False)
        self.down_proj = nn.Linear(size, h, bias=False)
        self.activation = config.hidden_act

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(GATED[self.activation](self.gate_proj(x), self.up_proj(x)))


class BlockLayer(nn.Module):
    """Layer of a DFlash head. The context does not go through ``input_layernorm``.

    It takes rows (B, m, h), and a function from their normed form to what attention adds.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = BlockMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, x: mx.array, attend: Sublayer) -> mx.array:
        x = x + attend(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashHead(nn.Module):
    """Weights of a DFlash head, and its passes over the context and over a block behind it."""

    never_quantized: tuple[str, ...] = ()
    """Endings of the paths of matrices that are never quantized."""
    for_float16 = mx.float16
    """The dtype that the head computes in for a target in float16."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = c = config
        self.fc = nn.Linear(len(c.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = [self.make_layer() for _ in range(c.num_layers)]
        self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.embed_source == "file":
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        if c.lm_head_source == "file":
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)

    def make_layer(self) -> nn.Module:
        return BlockLayer(self.config)

    @property
    def dtype(self) -> mx.Dtype:
        return self.norm.weight.dtype

    def absorb(self, features: mx.array, caches: Caches) -> None:
        """Append features (B, m, F) to the context."""
        context = self.hidden_norm(self.fc(features.astype(self.dtype)))
        for layer, cache in zip(self.layers, caches, strict=True):
            cache.update_and_fetch(*layer.self_attn.keys_and_values(context, cache.offset))

    def __call__(self, x: mx.array, caches: Caches) -> mx.array:
        """Hidden states (B, m, h) of a block's rows x (B, m, h), which stay in the caches."""
        base = caches[0].offset
        num_rows = x.shape[1]
        c = self.config
        if isinstance(base, int):
            start: int | mx.array = base
            end = base + num_rows
        else:
            start = base[:, None, None, None]
            end = caches[0].make_mask(num_rows).shape[-1]
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            sees_all = isinstance(base, int) and c.sees_all(i, end)
            mask = None if sees_all else seen_by(start, num_rows, mx.arange(end), c, i)
            x = layer(x, partial(layer.self_attn, cache=cache, mask=mask))
        hidden: mx.array = self.norm(x)
        return hidden


class DFlashDrafter(FeatureDrafter):
    """A ``Drafter`` with a DFlash head: one head forward for a draft of any length."""

    head: DFlashHead
    knows_first = False  # the block has to run

    def __init__(
        self,
        head: DFlashHead,
        embed: Callable[[mx.array], mx.array],
        project: Callable[[mx.array], mx.array],
        to_target: mx.array | None = None,
    ):
        """``embed`` maps tokens to the target's embeddings, ``project`` hidden states to logits.

        ``to_target`` (Vd,) maps draft ids to target ids; None if they are the same.
        """
        self._embed = embed
        self._project = project
        self.to_target = to_target
        c = head.config
        super().__init__(head, c.taps, len(head.layers), len(c.taps) * c.hidden_size)
        self._mask = embed(mx.array([c.mask_token_id]))
        mx.eval(self._mask)

    @property
    def longest_draft(self) -> int:
        return self.head.config.longest_draft

    def with_draft_window(self, size: int | None) -> "DFlashDrafter":
        """The same weights, attending to only the newest ``size`` tokens; None: unchanged.

        The caches keep everything: heads trained on short texts draft worse if they see more.
        """
        if size is None:
            return self
        check_window(size, None)
        head = copy(self.head)
        c = self.head.config
        own = c.windows or (0,) * c.num_layers
        windows = tuple(min(window or size, size) for window in own)
        window_from = c.window_from if any(own) else "anchor"
        head.config = replace(c, windows=windows, window_from=window_from)
        drafter = self.begin()
        drafter.head = head
        return drafter

    def _absorb(self, tokens: mx.array, features: mx.array, last: mx.array | None) -> mx.array:
        """The seed is the newest token (1,), or its embedding (1, h)."""
        self.head.absorb(features[None], self.cache[:-1])
        return row_at(tokens if tokens.ndim == 2 else tokens.astype(mx.int32), last)

    def absorb_rows(self, tokens: mx.array, features: mx.array, caches: RaggedCaches) -> mx.array:
        self.head.absorb(features, caches.open())
        return tokens

    def context(self, caches: Sequence[Any]) -> list[mx.array]:
        return [array for cache in caches for array in (cache.keys, cache.values)]

    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens, or fewer if a block has fewer."""
        hidden = self._hidden(size)
        tokens = mx.concatenate(self.read(hidden, self._seed, pick))
        before = mx.concatenate([self._seed, tokens[:-1]])
        logits = self.confidence_logits(hidden[0], before)
        return Draft(tokens, confidence=None if logits is None else mx.sigmoid(logits))

    def draft_rows(self, size: int, caches: RaggedCaches, pick: Pick) -> list[mx.array]:
        hidden = self._hidden_after(self._embed(self._seed[:, None]), size, caches.open())
        return self.read(hidden, self._seed, pick)

    def _hidden(self, size: int) -> mx.array:
        """``_hidden_after`` the newest token; what it adds to the caches is dropped."""
        caches = self.cache[:-1]
        num_before = caches[0].offset
        hidden = self._hidden_after(self._embedded(self._seed)[None], size, caches)
        trim_prompt_cache(caches, caches[0].offset - num_before)
        return hidden

    supports_trees = True

    @property
    def num_choices(self) -> int:
        """Number of tokens that a slot chooses from."""
        return self.num_drafted or self.head.config.draft_vocab_size

    def check_tree(self, shape: Tree) -> None:
        check_tree_width(shape, self.num_choices)
        if shape.depth > self.longest_draft:
            raise ValueError(
                f"the tree has {shape.depth} levels, but the head drafts blocks of "
                f"{self.longest_draft} tokens: give a tree of fewer levels."
            )

    def propose_tree(self, shape: Tree, pick: PickChildren) -> Draft:
        """A tree from one forward: nodes of a level share a slot, and differ in the path before.

        The children of a node are chosen from the slot's logits after it: see ``after``.
        """
        slots = self.slots(self._hidden(shape.depth))
        level = 0
        left = self.start(1)

        def after(before: mx.array, carried: mx.array) -> mx.array:
            nonlocal level, left
            num = before.shape[0]
            slot = [mx.broadcast_to(array[:, level], (num, *array.shape[2:])) for array in slots]
            logits, left = self.after(before, carried, *slot)
            level += 1
            return logits

        first = after(self._seed, left)

        def step(picked: mx.array, rows: mx.array) -> mx.array:
            return after(self.to_ids(picked), left[rows])

        return self._grown(shape, first, step, pick)

    def confidence_logits(self, hidden: mx.array, before: mx.array) -> mx.array | None:
        """Logits (...) of confidence in slots of states (..., h) after tokens (...), if any."""
        return None

    def _hidden_after(self, anchors: mx.array, size: int, caches: Caches) -> mx.array:
        """Hidden states (B, k, h) of a block's slots that draft ``size`` tokens, or all it has.

        ``anchors`` (B, 1, h) are the embeddings of the newest tokens.
        """
        self.num_forwards += 1
        first = self.head.config.first_slot
        num_masks = min(size, self.longest_draft) + first - 1
        shape = (anchors.shape[0], num_masks, anchors.shape[2])
        block = mx.concatenate([anchors, mx.broadcast_to(self._mask, shape)], axis=1)
        return self.head(block, caches)[:, first:]

    def read(self, hidden: mx.array, anchors: mx.array, pick: Pick) -> list[mx.array]:
        """Drafted tokens (B,), slot by slot, from the hidden states (B, k, h) of their slots.

        ``pick`` chooses among logits (B, Vd); ``anchors`` (B,) are the tokens before.
        """
        slots = self.slots(hidden)
        before = anchors
        carried = self.start(hidden.shape[0])
        tokens = []
        for slot in range(hidden.shape[1]):
            logits, carried = self.after(before, carried, *(array[:, slot] for array in slots))
            before = self.choose(logits, pick)
            tokens.append(before)
        return tokens

    def slots(self, hidden: mx.array) -> list[mx.array]:
        """Arrays (B, k, ...) that ``after`` needs of each slot, from hidden states (B, k, h)."""
        return [self.logits(hidden)]

    def start(self, num_requests: int) -> mx.array:
        """State (B, r) that ``after`` carries from slot to slot, before the first."""
        return mx.zeros((num_requests, 0))

    def after(
        self, before: mx.array, carried: mx.array, *slot: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Logits (m, Vd) of a slot after tokens (m,), and what is carried to the next slot.

        ``slot`` is the slot's part of ``slots``, (m, ...) each. DFlash ignores the tokens.
        """
        return slot[0], carried

    def logits(self, hidden: mx.array) -> mx.array:
        return capped(self.project(self._project, hidden), self.head.config.logit_softcap)


def is_block_head(names: Collection[str], having: str = "") -> bool:
    """Whether there is a norm after the fusion matrix, which only drafters of blocks have.

    There must also be a tensor whose name begins with ``having``.
    """
    bare = {bare_name(name) for name in names}
    needed = {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"}
    return needed <= bare and any(name.startswith(having) for name in bare)


Classes = tuple[type[BlockConfig], type[DFlashHead], type[DFlashDrafter]]


def block_kind(
    title: str,
    classes: Classes,
    config_from: Callable[[Tensors, Mapping[str, Any]], BlockConfig],
    having: str = "",
    tensors_of: Callable[[Tensors], Tensors] = known_tensors,
) -> Kind:
    """The row in the table of kinds for heads with these classes of config, head and drafter.

    ``having`` is as in ``is_block_head``. ``tensors_of`` gives the published tensors the names of
    our modules, and ``config_from`` makes our config from them and the published one.
    """
    make_config, make_head, _ = classes

    def convert(tensors: Tensors, config: Mapping[str, Any]) -> tuple[dict[str, Any], Tensors]:
        found = tensors_of(tensors)
        made = config_from(found, config)
        check_tensors(shapes_of(make_head(made)), found)
        return made.to_dict(), found

    return Kind(
        title,
        partial(load, classes),
        lambda names, _: is_block_head(names, having),
        convert,
        readings=readings,
        never_quantized=tuple(f"{path}.weight" for path in make_head.never_quantized),
        made_for=make_config.made_for,
    )


def load(
    classes: Classes,
    folder: Path,
    values: dict[str, Any],
    model: nn.Module,
    options: LoadOptions,
) -> DFlashDrafter:
    """The drafter of a converted folder; see ``Kind.load``."""
    make_config, make_head, make_drafter = classes
    config = make_config.from_dict(values, folder / "config.json")
    sizes = sizes_of(model)
    config.check_fit(sizes)
    weights = read_weights(folder)
    offsets = weights.pop("d2t", None)
    to_target = draft_ids(offsets, config.draft_vocab_size, config.has_d2t, sizes.vocab_size)
    embedding, _ = find_embedding(model)
    dtype = activation_dtype(embedding)
    dtype = make_head.for_float16 if dtype == mx.float16 else dtype
    stored = values.get("quantization")
    make = partial(make_head, config)
    head = read_module(make, weights, stored, options, dtype, make_head.never_quantized)
    table = head.embed_tokens if config.embed_source == "file" else embedding
    scale = config.embed_scale * (embedding_scale(model) if config.scales_as_target else 1.0)
    project = head.lm_head if config.lm_head_source == "file" else lm_head_of(model, embedding)
    evaluate_ropes(model)
    embed = table if scale == 1.0 else lambda t: scale * table(t)
    return make_drafter(head, embed, project, to_target)


KIND = block_kind("a DFlash head", (BlockConfig, DFlashHead, DFlashDrafter), config_from)
