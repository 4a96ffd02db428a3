"""Attention of a draft layer over the head's own cache: grouped-query or latent.

Both take the slots of one request, m rows, and append them to the cache; or those of B requests
on ragged caches (see ``target/ragged.py``), B times m rows in the same shapes with B in front.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.rope_utils import initialize_rope

from ..target.ropes import BY_LENGTH
from .config import Eagle3Config
from .head_cache import Tail


class Attention(nn.Module):
    """What both kinds have in common: where rows stand, and how long their queries are."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        c = config
        self.scale = c.head_dim**-0.5 if c.softmax_scale is None else c.softmax_scale
        self.position_scale = c.position_scale
        self.rope = initialize_rope(
            c.rope.get("dims") or c.head_dim,
            c.rope["theta"],
            bool(c.rope.get("traditional")),
            c.rope.get("scaling"),
            c.max_position_embeddings,
        )

    def _rotate(self, x: mx.array, positions: int | mx.array) -> mx.array:
        """Rope on (B, H, m, D): row i at ``positions + i``, or for B = 1 at ``positions[i]``.

        Of B requests row i of request b is at ``positions[b] + i``.
        """
        if isinstance(positions, int):
            return self.rope(x, offset=positions)
        if isinstance(self.rope, BY_LENGTH):
            # Its base is computed in Python: positions from the device are waited for.
            rows = zip(mx.split(x, x.shape[2], axis=2), positions.tolist())
            return mx.concatenate([self.rope(row, offset=place) for row, place in rows], axis=2)
        if positions.shape[0] == x.shape[0]:
            return self.rope(x, offset=positions)
        # One batch entry per row: mx.fast.rope takes one offset for each.
        rotated = self.rope(x.transpose(2, 1, 0, 3), offset=positions)
        return rotated.transpose(2, 1, 0, 3)

    def _scaled(self, queries: mx.array, positions: int | mx.array) -> mx.array:
        """Queries (B, H, m, D), longer at far positions where the head was trained so.

        By 1 + beta ln(1 + floor(position / original length)), as in Llama 4.
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
        return queries * factors[..., None].astype(queries.dtype)


class DraftAttention(Attention):
    """Grouped-query attention; q, k and v are one matrix."""

    def __init__(self, config: Eagle3Config, input_size: int):
        super().__init__(config)
        c = config
        self.num_heads, self.num_kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
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
        cache: KVCache | Tail,
        positions: int | mx.array,
        mask: mx.array | str | None,
    ) -> mx.array:
        """Attend from rows (m, I) -> (m, h), or (B, m, I) -> (B, m, h)."""
        qk, v = self._heads(x)
        if "q_norm" in self:
            q, k = mx.split(qk, [self.num_heads], axis=1)
            qk = mx.concatenate([self.q_norm(q), self.k_norm(k)], axis=1)
        q, k = mx.split(self._rotate(qk, positions), [self.num_heads], axis=1)
        q = self._scaled(q, positions)
        if isinstance(cache, Tail):
            out = cache.attend(q, k, v, self.scale, mask)
            return self.o_proj(self._from_heads(out, x.shape))
        keys, values = cache.update_and_fetch(k, v)
        out = scaled_dot_product_attention(
            q, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        return self.o_proj(self._from_heads(out, x.shape))

    def _heads(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Queries and keys (B, H + Hkv, m, D), before any norm, and values (B, Hkv, m, D)."""
        heads = self._to_heads(self.qkv_proj(x))
        if self.has_values:
            qk, v = mx.split(heads, [self.num_heads + self.num_kv_heads], axis=1)
        else:
            qk, v = heads, heads[:, self.num_heads :]
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
        query_rank, self.rank = c.latent.get("q_lora_rank"), c.latent["kv_lora_rank"]
        self.num_heads, self.nope = c.num_heads, c.latent["qk_nope_head_dim"]
        rope, width = c.latent["qk_rope_head_dim"], c.latent["v_head_dim"]
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
            visible = _causal(rows, latent.shape[2]) if isinstance(mask, str) else mask
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


def _causal(rows: int, length: int) -> mx.array:
    """Which of ``length`` slots each of the last ``rows`` sees, (rows, length)."""
    slots = mx.arange(length)
    return slots[None] <= slots[length - rows :, None]
