"""The EAGLE draft head: its configuration, its weights and one forward pass.

EAGLE-3: Li et al. 2025, arXiv:2503.01840, section 3; EAGLE-1 and 2: Li et al. 2024,
arXiv:2401.15077 and 2406.16858. Which tokens to draft is decided in ``eagle3.py``.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.rope_utils import initialize_rope

from ..system.documents import check
from ..target.ropes import BY_LENGTH
from .activations import GATED
from .kinds import HEAD, REQUIRED
from .numbering import default_ids, read_nested
from .tail import Tail

LARGEST_WIDTH = 2**24


@dataclass(frozen=True)
class Eagle3Config:
    """What a converted head's ``config.json`` says, every field resolved.

    ``aux_boundary_ids`` are taps: id b is the residual stream entering target layer b, and
    b = N (the target's layer count) is what enters its final norm. They are None where the
    checkpoint names none, and then mean {2, N//2, N-3} of the target it is attached to.
    ``aux_nested_ids`` are ids as the checkpoint wrote them, where the target's depth has yet to
    tell what they mean (see ``numbering.py``); ``aux_boundary_ids`` is then the likelier reading.

    Where ``uses_aux`` is false the one feature is the target's state after its final norm.
    ``fc_input`` says what the fusion matrix takes: the features, once per pair (EAGLE-3);
    embedding and state, at every step (EAGLE-1); or that there is none.

    ``rope`` holds ``type``, ``theta``, ``dims`` (rotated channels) and, under ``scaling``,
    the dictionary mlx-lm's ``initialize_rope`` takes (None for plain rope).
    """

    hidden_size: int
    target_hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    num_aux: int = 3
    aux_boundary_ids: tuple[int, ...] | None = None
    aux_ids_source: str = "default"
    aux_nested_ids: tuple[int, ...] | None = None
    pre_fc_norm: str = "none"  # none | concat | per_feature
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    layer_input: str = "first"  # layers that see the embedding beside the state: first|every|none
    fc_input: str = "features"  # features | embedding_and_state | none
    uses_aux: bool = True
    embedding_norm: bool = True  # the embedding is normed before attention
    state_norm: bool = True  # layer 0 norms its state before attention
    final_norm: bool = True
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()  # those a sliding window does not bind
    rope: dict[str, Any] = field(default_factory=lambda: {"type": "default", "theta": 10000.0})
    embed_source: str = "target"  # file | target
    lm_head_source: str = "file"  # file | target | target_rows
    has_d2t: bool = True
    model_type: str = "eagle3"
    family: str = "unknown"
    speculative_tokens_hint: int | None = None

    @classmethod
    def from_dict(
        cls, values: dict[str, Any], where: str | Path = "config.json"
    ) -> "Eagle3Config":
        """Read the known fields of a ``config.json``, which ``where`` names in messages.

        Raises ValueError for a field that is missing, of a wrong kind, or contradicts another.
        """
        check(values, HEAD, where)
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        nullable = {f.name for f in fields(cls) if f.default is None}
        for name in REQUIRED:
            known.setdefault(name, None)
        for name, value in known.items():
            if value is None and name not in nullable:
                raise ValueError(f"{where} has no {name}: convert the head again.")
            if isinstance(value, list):
                known[name] = tuple(value)
        config = cls(**known)
        config._check_sizes(where)
        return config

    def _check_sizes(self, where: str | Path) -> None:
        """Raise ValueError for sizes that no matrix can have, or that do not divide."""
        if self.rope.get("theta") is None:
            raise ValueError(f"{where} has no rope.theta: convert the head again.")
        dims = self.rope.get("dims") or self.head_dim
        if self.num_heads % self.num_kv_heads or dims % 2 or dims > self.head_dim:
            raise ValueError(
                f"{where} gives {self.num_heads} heads of width {self.head_dim}, "
                f"{self.num_kv_heads} key heads and {dims} rotated channels, which do not go "
                "together: convert the head again."
            )
        widths = (
            self.num_aux * self.target_hidden_size,
            self.num_heads * self.head_dim,
            2 * self.hidden_size,
        )
        if max(widths) > LARGEST_WIDTH:
            raise ValueError(
                f"{where} asks for a matrix {max(widths)} wide, which no head has: convert the "
                "head again."
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def taps(self, num_target_layers: int) -> tuple[int, ...]:
        """The taps for a target of that many layers, low to high."""
        if not self.uses_aux:
            return (num_target_layers + 1,)
        if self.aux_nested_ids:
            return read_nested(self.aux_nested_ids, num_target_layers).ids
        if self.aux_boundary_ids is not None:
            return self.aux_boundary_ids
        return default_ids(num_target_layers)


class DraftAttention(nn.Module):
    """Attention over the head's own cache; q, k and v are one matrix."""

    def __init__(self, config: Eagle3Config, input_size: int):
        super().__init__()
        c = config
        self.num_heads, self.num_kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.scale = c.head_dim**-0.5
        rows = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.qkv_proj = nn.Linear(input_size, rows, bias=c.attention_bias)
        width = c.num_heads * c.head_dim
        self.o_proj = nn.Linear(width, c.hidden_size, bias=c.attention_out_bias)
        if c.qk_norm:
            self.q_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
            self.k_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.rope = initialize_rope(
            c.rope.get("dims") or c.head_dim,
            c.rope["theta"],
            False,
            c.rope.get("scaling"),
            c.max_position_embeddings,
        )

    def _rotate(self, x: mx.array, positions: int | mx.array) -> mx.array:
        """Rope on (1, H, m, D): row i at ``positions + i``, or at ``positions[i]``."""
        if isinstance(positions, int):
            return self.rope(x, offset=positions)
        if isinstance(self.rope, BY_LENGTH):
            # Its base is computed in Python: positions from the device are waited for.
            rows = zip(mx.split(x, x.shape[2], axis=2), positions.tolist())
            return mx.concatenate([self.rope(row, offset=place) for row, place in rows], axis=2)
        # One batch entry per row: mx.fast.rope takes one offset for each.
        rotated = self.rope(x.transpose(2, 1, 0, 3), offset=positions)
        return rotated.transpose(2, 1, 0, 3)

    def __call__(self, x, cache, positions, mask) -> mx.array:
        heads = self._to_heads(self.qkv_proj(x))
        qk, v = mx.split(heads, [self.num_heads + self.num_kv_heads], axis=1)
        if "q_norm" in self:
            q, k = mx.split(qk, [self.num_heads], axis=1)
            qk = mx.concatenate([self.q_norm(q), self.k_norm(k)], axis=1)
        q, k = mx.split(self._rotate(qk, positions), [self.num_heads], axis=1)
        if isinstance(cache, Tail):
            return self.o_proj(self._from_heads(cache.attend(q, k, v, self.scale, mask)))
        keys, values = cache.update_and_fetch(k, v)
        out = scaled_dot_product_attention(
            q, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        return self.o_proj(self._from_heads(out))

    # One row, as in every draft step, is in both orders at once: that saves two operations.

    def _to_heads(self, x: mx.array) -> mx.array:
        """(m, H D) -> (1, H, m, D)."""
        if len(x) == 1:
            return x.reshape(1, -1, 1, self.head_dim)
        return x.reshape(1, len(x), -1, self.head_dim).transpose(0, 2, 1, 3)

    def _from_heads(self, x: mx.array) -> mx.array:
        """(1, H, m, D) -> (m, H D)."""
        rows = x.shape[2]
        return (x if rows == 1 else x.transpose(0, 2, 1, 3)).reshape(rows, -1)


class DraftMLP(nn.Module):
    """Gated MLP; gate and up are one matrix."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        size, width = config.hidden_size, config.intermediate_size
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
        size, eps = config.hidden_size, config.rms_norm_eps
        sees = {"first": index == 0, "every": True, "none": False}[config.layer_input]
        self.sees_embedding = sees
        self.norm_before_residual = config.norm_before_residual and sees
        self.window = None if index in config.full_attention_layers else config.sliding_window
        if sees and config.embedding_norm:
            self.input_layernorm = nn.RMSNorm(size, eps=eps)
        if index > 0 or config.state_norm:
            self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.self_attn = DraftAttention(config, 2 * size if sees else size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = DraftMLP(config)

    def __call__(self, embeddings, states, cache, positions, mask) -> mx.array:
        if mask is None:
            mask = cache.make_mask(len(states), return_array=False, window_size=self.window)
        x, residual = self.enter(embeddings, states)
        return self.leave(residual, self.self_attn(x, cache, positions, mask))

    def enter(self, embeddings: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        """What attention takes, (..., 2h) or (..., h), and the residual (..., h) beside it."""
        normed = self.hidden_norm(states) if "hidden_norm" in self else states
        x = normed
        if self.sees_embedding:
            if "input_layernorm" in self:
                embeddings = self.input_layernorm(embeddings)
            x = mx.concatenate([embeddings, normed], axis=-1)
        return x, normed if self.norm_before_residual else states

    def leave(self, residual: mx.array, attended: mx.array) -> mx.array:
        """The layer's output from what attention gives; all (..., h)."""
        states = residual + attended
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3Head(nn.Module):
    """One draft layer or a few, a fusion of the target's features and a small vocabulary.

    EAGLE-1 heads are the case of a fusion that takes embedding and state, at every step.

    Shapes: m rows of one request, h = ``hidden_size``, F = ``num_aux`` times
    ``target_hidden_size``, Vd = ``draft_vocab_size``.
    """

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        c = config
        width = c.num_aux * c.target_hidden_size
        if c.fc_input != "none":
            fc_width = width if c.fc_input == "features" else 2 * c.hidden_size
            self.fc = nn.Linear(fc_width, c.hidden_size, bias=c.fc_bias)
        if c.pre_fc_norm == "concat":
            self.input_norm = nn.RMSNorm(width, eps=c.rms_norm_eps)
        elif c.pre_fc_norm == "per_feature":
            self.fc_norm = [
                nn.RMSNorm(c.target_hidden_size, eps=c.rms_norm_eps) for _ in range(c.num_aux)
            ]
        self.layers = [DraftLayer(c, i) for i in range(c.num_layers)]
        if c.final_norm:
            self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        if c.lm_head_source != "target":
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        if c.embed_source == "file":
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)

    def share_lm_head(self, project: Callable[[mx.array], mx.array]) -> None:
        """Use the target's output projection, (..., h) -> (..., V), where the head has none."""
        # Behind a lambda, so that a module does not become one of the head's parameters.
        self.lm_head = lambda x: project(x)

    @property
    def dtype(self) -> mx.Dtype:
        return self.layers[0].post_attention_layernorm.weight.dtype

    def fuse(self, features: mx.array) -> mx.array:
        """Features (m, F) of the target, low tap first -> states (m, h)."""
        # Cast after the norm, where there is one: a wider dtype may hold more than float16 can.
        if self.config.pre_fc_norm == "concat":
            features = self.input_norm(features)
        elif self.config.pre_fc_norm == "per_feature":
            parts = mx.split(features, self.config.num_aux, axis=-1)
            features = mx.concatenate([n(p) for n, p in zip(self.fc_norm, parts)], axis=-1)
        features = features.astype(self.dtype)
        return self.fc(features) if self.config.fc_input == "features" else features

    def __call__(
        self,
        embeddings: mx.array,
        states: mx.array,
        cache: list,
        positions: int | mx.array | None = None,
        mask: mx.array | str | None = None,
    ) -> mx.array:
        """Advance m slots: embeddings (m, h) of the tokens, states (m, h) -> (m, h).

        The result is what ``logits`` takes and what is fed back as the next slot's state.
        ``positions`` is the first row's position (default: the cache's length) or one for each;
        ``mask`` defaults to causal.
        """
        if positions is None:
            positions = cache[0].offset
        embeddings, states = self.enter(embeddings, states)
        for layer, layer_cache in zip(self.layers, cache):
            states = layer(embeddings, states, layer_cache, positions, mask)
        return self.leave(states)

    def enter(self, embeddings: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        """What the first layer takes of embeddings and states, both (..., h)."""
        embeddings = embeddings.astype(self.dtype)
        if self.config.fc_input == "embedding_and_state":
            states = self.fc(mx.concatenate([embeddings, states], axis=-1))
        return embeddings, states

    def leave(self, states: mx.array) -> mx.array:
        """What the next slot takes of the last layer's output; both (..., h)."""
        return self.norm(states) if self.config.norm_output else states

    def logits(self, states: mx.array) -> mx.array:
        """Logits over the draft vocabulary, (m, h) -> (m, Vd)."""
        normed = self.config.norm_output or not self.config.final_norm
        return self.lm_head(states if normed else self.norm(states))
