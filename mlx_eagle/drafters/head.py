"""The EAGLE draft head: its weights and one forward pass.

EAGLE-3: Li et al. 2025, arXiv:2503.01840, section 3; EAGLE-1 and 2: Li et al. 2024,
arXiv:2401.15077 and 2406.16858; P-EAGLE: arXiv:2602.01469. Which tokens to draft is decided in
``eagle3.py``.

Attention is over the head's own cache: of one request, m rows, which it appends; or of B requests
on ragged caches (``target_model/ragged.py``), B times m rows in the same shapes with B in front.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.rope_utils import initialize_rope

from ..target_model.masks_and_ropes import BY_LENGTH
from .config import Eagle3Config
from .head_cache import DraftOverlay


def _gated(activation: Callable[[mx.array], mx.array]) -> Callable[[mx.array, mx.array], mx.array]:
    """activation(gate) * up, in one kernel."""
    return mx.compile(lambda gate, up: activation(gate) * up, shapeless=True)


GATED = {
    "silu": _gated(nn.silu),
    "gelu": _gated(nn.gelu),
    "gelu_pytorch_tanh": _gated(nn.gelu_approx),
}
"""The activations of gated MLPs, by the names that checkpoints give them."""


Projection = Callable[[Callable[[mx.array], mx.array], mx.array], mx.array]
"""Multiplies (..., h) with an output matrix, or with rows of it, given what does so with all."""


def with_all_rows(output: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """The ``Projection`` of a whole vocabulary."""
    return output(x)


def capped(logits: mx.array, cap: float | None) -> mx.array:
    """Logits kept within ``cap``, as Gemma's are."""
    return logits if cap is None else mx.tanh(logits / cap) * cap


class Attention(nn.Module):
    """Base of both kinds of attention: positions of rows, and lengths of their queries."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        c = config
        self.scale = c.head_dim**-0.5 if c.softmax_scale is None else c.softmax_scale
        self.position_scale = c.position_scale
        self.rope: Any = initialize_rope(
            c.rope.get("dims") or c.head_dim,
            c.rope["theta"],
            bool(c.rope.get("traditional")),
            c.rope.get("scaling"),
            c.max_position_embeddings,
        )

    def _rotate(self, x: mx.array, positions: int | mx.array) -> mx.array:
        """Rope on (B, H, m, D): row i at ``positions + i``, or for B = 1 at ``positions[i]``.

        With B requests, row i of request b is at ``positions[b] + i``.
        """
        if isinstance(positions, mx.array) and isinstance(self.rope, BY_LENGTH):
            # Its base is computed in Python: positions from the device are waited for.
            waited: Any = positions.tolist()
            rows = zip(mx.split(x, x.shape[2], axis=2), waited, strict=True)
            return mx.concatenate([self.rope(row, offset=start) for row, start in rows], axis=2)
        if isinstance(positions, int) or positions.shape[0] == x.shape[0]:
            rotated: mx.array = self.rope(x, offset=positions)
            return rotated
        # One batch entry per row: mx.fast.rope takes one offset for each.
        rotated = self.rope(x.transpose(2, 1, 0, 3), offset=positions)
        return rotated.transpose(2, 1, 0, 3)

    def _scaled(self, queries: mx.array, positions: int | mx.array) -> mx.array:
        """Queries (B, H, m, D), longer at far positions where the head was trained so.

        The factor is 1 + beta ln(1 + floor(position / original length)), as in Llama 4.
        """
        if self.position_scale is None:
            return queries
        if isinstance(positions, int):
            positions = mx.arange(positions, positions + queries.shape[2])
        elif positions.shape[0] == queries.shape[0]:
            rows = mx.arange(queries.shape[2])
            positions = positions[:, None, None] + rows  # (B, 1, m)
        beta = self.position_scale["beta"]
        original = self.position_scale["original_max_position_embeddings"]
        factors = 1 + beta * mx.log(1 + mx.floor(positions / original))
        scaled: mx.array = queries * factors[..., None].astype(queries.dtype)
        return scaled


class DraftAttention(Attention):
    """Grouped-query attention; q, k and v are one matrix."""

    def __init__(self, config: Eagle3Config, input_size: int):
        super().__init__(config)
        c = config
        self.num_heads = c.num_heads
        self.num_kv_heads = c.num_kv_heads
        self.head_dim = c.head_dim
        num_projected = c.num_kv_heads * (1 if c.values == "keys" else 2)
        self.has_values = c.values == "projected"
        self.value_norm_eps = c.rms_norm_eps if c.value_norm else None
        rows = (c.num_heads + num_projected) * c.head_dim
        self.qkv_proj = nn.Linear(input_size, rows, bias=c.attention_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.attention_out_bias)
        if c.qk_norm:
            self.q_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
            self.k_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)

    def __call__(
        self,
        x: mx.array,
        cache: KVCache | DraftOverlay,
        positions: int | mx.array,
        mask: mx.array | str | None,
    ) -> mx.array:
        """Attend from rows (m, I) -> (m, h), or (B, m, I) -> (B, m, h)."""
        q, k, v = self.project(x, positions)
        if isinstance(cache, DraftOverlay):
            assert not isinstance(mask, str), "a draft is not causal by a name"
            out = cache.attend(q, k, v, self.scale, mask)
            return self.o_proj(self._from_heads(out, x.shape))
        keys, values = cache.update_and_fetch(k, v)
        attend: Any = scaled_dot_product_attention  # which takes the name of a mask as well
        out = attend(q, keys, values, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(self._from_heads(out, x.shape))

    def project(
        self, x: mx.array, positions: int | mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Queries (B, H, m, D), keys and values (B, Hkv, m, D) of rows; see ``_rotate``."""
        qk, v = self._heads(x)
        if "q_norm" in self:
            q, k = mx.split(qk, [self.num_heads], axis=1)
            qk = mx.concatenate([self.q_norm(q), self.k_norm(k)], axis=1)
        q, k = mx.split(self._rotate(qk, positions), [self.num_heads], axis=1)
        return self._scaled(q, positions), k, v

    def _heads(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Queries and keys (B, H + Hkv, m, D), before any norm, and values (B, Hkv, m, D)."""
        heads = self._to_heads(self.qkv_proj(x))
        if self.has_values:
            qk, v = mx.split(heads, [self.num_heads + self.num_kv_heads], axis=1)
        else:
            qk = heads
            v = heads[:, self.num_heads :]
        if self.value_norm_eps is not None:
            v = mx.fast.rms_norm(v, None, self.value_norm_eps)
        return qk, v

    # One row, as in every draft step, is in both orders at once: that saves two operations.

    def _to_heads(self, x: mx.array) -> mx.array:
        """(m, H D) or (B, m, H D) -> (B, H, m, D)."""
        batch, rows = (1, *x.shape)[-3:-1]
        if rows == 1:
            return x.reshape(batch, -1, 1, self.head_dim)
        return x.reshape(batch, rows, -1, self.head_dim).transpose(0, 2, 1, 3)

    def _from_heads(self, x: mx.array, shape: tuple[int, ...]) -> mx.array:
        """(B, H, m, D) -> (m, H D) or (B, m, H D): the rows of ``shape``."""
        return (x if x.shape[2] == 1 else x.transpose(0, 2, 1, 3)).reshape(*shape[:-1], -1)


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

    The cache holds what keys and values are made of: as keys the latent, one row of width r for
    all heads, as values the rotated key that they share. Queries are taken to the latent, so
    that keys and values are never made.
    """

    def __init__(self, config: Eagle3Config, input_size: int):
        super().__init__(config)
        c = config
        assert c.latent is not None
        query_rank = c.latent.get("q_lora_rank")
        self.rank = c.latent["kv_lora_rank"]
        self.num_heads = c.num_heads
        self.nope = c.latent["qk_nope_head_dim"]
        rope = c.latent["qk_rope_head_dim"]
        width = c.latent["v_head_dim"]
        if query_rank:
            self.q_a_proj = nn.Linear(input_size, query_rank, bias=c.attention_bias)
            self.q_a_layernorm = nn.RMSNorm(query_rank, eps=c.rms_norm_eps)
            self.q_b_proj = nn.Linear(query_rank, c.num_heads * c.head_dim, bias=False)
        else:
            self.q_proj = nn.Linear(input_size, c.num_heads * c.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, self.rank + rope, bias=c.attention_bias)
        self.kv_a_layernorm = nn.RMSNorm(self.rank, eps=c.rms_norm_eps)
        self.k_b_proj = MultiLinear(self.rank, self.nope, c.num_heads)
        self.v_b_proj = MultiLinear(self.rank, width, c.num_heads)
        self.o_proj = nn.Linear(c.num_heads * width, c.hidden_size, bias=c.attention_out_bias)

    def __call__(
        self,
        x: mx.array,
        cache: KVCache,
        positions: int | mx.array,
        mask: mx.array | str | None,
    ) -> mx.array:
        """Attend from rows (m, I) -> (m, h), or (B, m, I) -> (B, m, h)."""
        *shape, rows, _ = x.shape
        if "q_proj" in self:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(*(shape or [1]), rows, self.num_heads, -1).transpose(0, 2, 1, 3)
        q, q_rope = mx.split(self._scaled(q, positions), [self.nope], axis=-1)
        made = self.kv_a_proj_with_mqa(x)[..., None, :, :]
        latent, k_rope = mx.split(made if shape else made[None], [self.rank], axis=-1)
        latent, k_rope = cache.update_and_fetch(
            self.kv_a_layernorm(latent), self._rotate(k_rope, positions)
        )
        scores = (self._rotate(q_rope, positions) * self.scale) @ k_rope.swapaxes(-1, -2)
        if mask is not None:
            lowest = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
            is_causal = isinstance(mask, str)
            before = latent.shape[2] - rows
            visible: Any = create_causal_mask(rows, before) if is_causal else mask
            scores = mx.where(visible, scores, lowest)
        out = scaled_dot_product_attention(
            self.k_b_proj(q, transpose=False),
            latent,
            latent,
            cache=cache,
            scale=self.scale,
            mask=scores,
        )
        out = self.v_b_proj(out)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(*shape, rows, -1))


Mask = mx.array | Callable[[int | None], mx.array | None] | str | None
"""Slots that a row sees, (m, n): the same for all layers, or by the width of a window."""


class DraftMLP(nn.Module):
    """Gated MLP; gate and up are one matrix."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        size = config.hidden_size
        width = config.intermediate_size
        self.gate_up_proj = nn.Linear(size, 2 * width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, size, bias=config.mlp_bias)
        self.activation = config.hidden_act  # by name: a compiled function cannot be copied

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(GATED[self.activation](gate, up))


class DraftLayer(nn.Module):
    """A llama layer; where ``sees_embedding``, it attends from concat(embedding, state)."""

    def __init__(self, config: Eagle3Config, index: int):
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        sees = {"first": index == 0, "every": True, "none": False}[config.layer_input]
        self.sees_embedding = sees
        self.norm_before_residual = config.norm_before_residual and sees
        self.window = None if index in config.full_attention_layers else config.sliding_window
        if sees and config.embedding_norm:
            self.input_layernorm = nn.RMSNorm(size, eps=eps)
        if index > 0 or config.state_norm:
            self.hidden_norm = nn.RMSNorm(size, eps=eps)
        attention_class = DraftAttention if config.latent is None else LatentAttention
        self.self_attn: Any = attention_class(config, 2 * size if sees else size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        if config.branch_norms:
            self.pre_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
            self.post_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = DraftMLP(config)
        if config.layer_scalar:
            self.layer_scalar = mx.ones((1,))

    def __call__(
        self,
        embeddings: mx.array,
        hidden: mx.array,
        cache: KVCache | DraftOverlay,
        positions: int | mx.array,
        mask: Mask,
    ) -> mx.array:
        """Advance m rows, embeddings and hidden states (..., m, h) -> (..., m, h)."""
        if mask is None:
            mask = cache.make_mask(hidden.shape[-2], return_array=False, window_size=self.window)
        elif callable(mask):
            mask = mask(self.window)
        x, residual = self.enter(embeddings, hidden)
        return self.leave(residual, self.self_attn(x, cache, positions, mask))

    def enter(self, embeddings: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """Input of attention, (..., 2h) or (..., h), and the residual (..., h) beside it."""
        normed = self.hidden_norm(hidden) if "hidden_norm" in self else hidden
        x = normed
        if self.sees_embedding:
            if "input_layernorm" in self:
                embeddings = self.input_layernorm(embeddings)
            x = mx.concatenate([embeddings, normed], axis=-1)
        return x, normed if self.norm_before_residual else hidden

    def leave(self, residual: mx.array, attended: mx.array) -> mx.array:
        """The layer's output from what attention gives; all (..., h)."""
        if "pre_feedforward_layernorm" in self:
            hidden = residual + self.post_attention_layernorm(attended)
            added = self.mlp(self.pre_feedforward_layernorm(hidden))
            hidden = hidden + self.post_feedforward_layernorm(added)
        else:
            hidden = residual + attended
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        scaled: mx.array = hidden * self.layer_scalar if "layer_scalar" in self else hidden
        return scaled


class ParallelHead(nn.Module):
    """Parallel head of ModelOpt: a state x becomes x + silu(linear(x)), repeatedly."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        size = config.hidden_size
        bias = config.parallel_head_bias
        self.layers = [
            nn.Linear(size, size, bias=bias) for _ in range(config.parallel_head_layers)
        ]

    def __call__(self, hidden: mx.array) -> mx.array:
        for layer in self.layers:
            hidden = hidden + nn.silu(layer(hidden))
        return hidden


class Eagle3Head(nn.Module):
    """One draft layer or a few, a fusion of the target's features and a small vocabulary.

    EAGLE-1 heads are the case of a fusion that takes embedding and state, at every step.

    Shapes: m rows of one request, h = ``hidden_size``, F = ``num_aux`` times
    ``target_hidden_size``, Vd = ``draft_vocab_size``. On ragged caches (``ragged.py``)
    the rows are those of B requests, (B, m, h) in place of (m, h).
    """

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        c = config
        width = c.num_aux * c.target_hidden_size
        if c.fc_input != "none":
            fc_width = width if c.fc_input == "features" else 2 * c.hidden_size
            self.fc = nn.Linear(fc_width, c.hidden_size, bias=c.fc_bias)
        if c.fusion_norm:
            self.embedding_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        if c.pre_fc_norm == "concat":
            self.input_norm = nn.RMSNorm(width, eps=c.rms_norm_eps)
        elif c.pre_fc_norm == "per_feature":
            self.fc_norm = [
                nn.RMSNorm(c.target_hidden_size, eps=c.rms_norm_eps) for _ in range(c.num_aux)
            ]
        self.layers = [DraftLayer(c, i) for i in range(c.num_layers)]
        if c.final_norm:
            self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.lm_head: Any
        if c.lm_head_source != "target":
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        if c.embed_source == "file":
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        if c.mask_token_id is not None:
            self.mask_hidden = mx.zeros((width,))
        if c.num_parallel_heads:
            self.parallel_heads = [ParallelHead(c) for _ in range(c.num_parallel_heads)]
            self.parallel_outputs = [
                nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
                for _ in range(c.parallel_outputs)
            ]

    def share_lm_head(self, project: Callable[[mx.array], mx.array]) -> None:
        """Use the target's output projection, (..., h) -> (..., V), where the head has none."""
        # Not by itself, so that a module does not become one of the head's parameters.
        self.lm_head = partial(project)

    @property
    def dtype(self) -> mx.Dtype:
        return self.layers[0].post_attention_layernorm.weight.dtype

    def fuse(self, features: mx.array) -> mx.array:
        """Features (m, F) of the target, low tap first -> hidden states (m, h)."""
        # Cast after the norm, where there is one: a wider dtype may hold more than float16 can.
        if self.config.pre_fc_norm == "concat":
            features = self.input_norm(features)
        elif self.config.pre_fc_norm == "per_feature":
            by_tap = mx.split(features, self.config.num_aux, axis=-1)
            features = mx.concatenate(
                [n(p) for n, p in zip(self.fc_norm, by_tap, strict=True)], axis=-1
            )
        features = features.astype(self.dtype)
        return self.fc(features) if self.config.fc_input == "features" else features

    def masked(self, num_rows: int) -> mx.array:
        """The hidden states (num_rows, h) of slots that no features are known for (P-EAGLE)."""
        hidden = self.fuse(self.mask_hidden[None])
        return mx.broadcast_to(hidden, (num_rows, hidden.shape[1]))

    def __call__(
        self,
        embeddings: mx.array,
        hidden: mx.array,
        cache: list[Any],
        positions: int | mx.array | None = None,
        mask: Mask = None,
    ) -> mx.array:
        """Advance m slots: embeddings (m, h) of the tokens, hidden states (m, h) -> (m, h).

        The result is what ``logits`` takes and what is fed back as the next slot's state.
        ``positions`` is the first row's position (default: the cache's length, or the lengths
        (B,) of ragged ones) or one for each; ``mask`` defaults to causal.
        """
        if positions is None:
            positions = cache[0].offset
        embeddings, hidden = self.enter(embeddings, hidden)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            hidden = layer(embeddings, hidden, layer_cache, positions, mask)
        return self.leave(hidden)

    def enter(self, embeddings: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """Input of the first layer from embeddings and states, both (..., h)."""
        embeddings = embeddings.astype(self.dtype)
        if self.config.embed_scale != 1:
            embeddings = embeddings * self.config.embed_scale
        if "embedding_norm" in self:
            embeddings = self.embedding_norm(embeddings)
        if self.config.fc_input == "embedding_and_state":
            hidden = self.fc(mx.concatenate([embeddings, hidden], axis=-1))
        return embeddings, hidden

    def leave(self, hidden: mx.array) -> mx.array:
        """Input of the next slot from the last layer's output; both (..., h)."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits(self, hidden: mx.array, project: Projection = with_all_rows) -> mx.array:
        """Logits over the draft vocabulary, (m, h) -> (m, Vd).

        ``project`` multiplies with the output matrix, or some rows of it.
        """
        return capped(project(self.lm_head, self._normed(hidden)), self.config.logit_softcap)

    def parallel_logits(
        self, hidden: mx.array, index: int, project: Projection = with_all_rows
    ) -> mx.array:
        """Logits (m, Vd) of the token that comes ``index`` + 1 after the one of ``logits``."""
        output = self.parallel_outputs[index % len(self.parallel_outputs)]
        logits = project(output, self.parallel_heads[index](self._normed(hidden)))
        return capped(logits, self.config.logit_softcap)

    def _normed(self, hidden: mx.array) -> mx.array:
        is_normed = self.config.norm_output or not self.config.final_norm
        return hidden if is_normed else self.norm(hidden)
