"""The EAGLE draft head: its weights and one forward pass.

EAGLE-3: Li et al. 2025, arXiv:2503.01840, section 3; EAGLE-1 and 2: Li et al. 2024,
arXiv:2401.15077 and 2406.16858; P-EAGLE: arXiv:2602.01469. Which tokens to draft is decided in
``eagle3.py`` and ``parallel.py``.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from .activations import GATED
from .attention import DraftAttention, LatentAttention
from .config import Eagle3Config
from .head_cache import Tail

Mask = mx.array | Callable[[int | None], mx.array | None] | str | None
"""Which slots a row sees, (m, n): the same for all layers, or by the width of a layer's window."""


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
        kind = DraftAttention if config.latent is None else LatentAttention
        self.self_attn = kind(config, 2 * size if sees else size)
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
        states: mx.array,
        cache: KVCache | Tail,
        positions: int | mx.array,
        mask: Mask,
    ) -> mx.array:
        """Advance m rows, embeddings and states (..., m, h) -> (..., m, h)."""
        if mask is None:
            mask = cache.make_mask(states.shape[-2], return_array=False, window_size=self.window)
        elif callable(mask):
            mask = mask(self.window)
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
        if "pre_feedforward_layernorm" in self:
            states = residual + self.post_attention_layernorm(attended)
            added = self.mlp(self.pre_feedforward_layernorm(states))
            states = states + self.post_feedforward_layernorm(added)
        else:
            states = residual + attended
            states = states + self.mlp(self.post_attention_layernorm(states))
        return states * self.layer_scalar if "layer_scalar" in self else states


class ParallelHead(nn.Module):
    """What one of ModelOpt's parallel heads makes of a state: x + silu(linear(x)), repeated."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        size, bias = config.hidden_size, config.parallel_head_bias
        self.layers = [
            nn.Linear(size, size, bias=bias) for _ in range(config.parallel_head_layers)
        ]

    def __call__(self, states: mx.array) -> mx.array:
        for layer in self.layers:
            states = states + nn.silu(layer(states))
        return states


class Eagle3Head(nn.Module):
    """One draft layer or a few, a fusion of the target's features and a small vocabulary.

    EAGLE-1 heads are the case of a fusion that takes embedding and state, at every step.

    Shapes: m rows of one request, h = ``hidden_size``, F = ``num_aux`` times
    ``target_hidden_size``, Vd = ``draft_vocab_size``. With ragged caches (``target/ragged.py``)
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

    def masked(self, num_rows: int) -> mx.array:
        """The states (num_rows, h) of slots that no features are known for (P-EAGLE)."""
        state = self.fuse(self.mask_hidden[None])
        return mx.broadcast_to(state, (num_rows, state.shape[1]))

    def __call__(
        self,
        embeddings: mx.array,
        states: mx.array,
        cache: list,
        positions: int | mx.array | None = None,
        mask: Mask = None,
    ) -> mx.array:
        """Advance m slots: embeddings (m, h) of the tokens, states (m, h) -> (m, h).

        The result is what ``logits`` takes and what is fed back as the next slot's state.
        ``positions`` is the first row's position (default: the cache's length, or the lengths
        (B,) of ragged ones) or one for each; ``mask`` defaults to causal.
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
        if self.config.embed_scale != 1:
            embeddings = embeddings * self.config.embed_scale
        if "embedding_norm" in self:
            embeddings = self.embedding_norm(embeddings)
        if self.config.fc_input == "embedding_and_state":
            states = self.fc(mx.concatenate([embeddings, states], axis=-1))
        return embeddings, states

    def leave(self, states: mx.array) -> mx.array:
        """What the next slot takes of the last layer's output; both (..., h)."""
        return self.norm(states) if self.config.norm_output else states

    def logits(self, states: mx.array) -> mx.array:
        """Logits over the draft vocabulary, (m, h) -> (m, Vd)."""
        return self._capped(self.lm_head(self._normed(states)))

    def parallel_logits(self, states: mx.array, index: int) -> mx.array:
        """Logits (m, Vd) of the token that comes ``index`` + 1 after the one of ``logits``."""
        output = self.parallel_outputs[index % len(self.parallel_outputs)]
        return self._capped(output(self.parallel_heads[index](self._normed(states))))

    def _normed(self, states: mx.array) -> mx.array:
        is_normed = self.config.norm_output or not self.config.final_norm
        return states if is_normed else self.norm(states)

    def _capped(self, logits: mx.array) -> mx.array:
        cap = self.config.logit_softcap
        return logits if cap is None else mx.tanh(logits / cap) * cap
