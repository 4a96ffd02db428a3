"""Random heads of every variant, and what runs a head in MLX."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from golden import frozen
from golden.frozen import Frozen
from mlx_lm.models.cache import KVCache
from tolerances import tolerance

from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.head import Eagle3Head
from mlx_eagle.drafters.head_weights import fuse_weights

TOLERANCE = tolerance()
NUM_SLOTS = 11
NUM_STEPS = 4

SIZES = {
    "hidden_size": 64,
    "target_hidden_size": 64,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
    "draft_vocab_size": 48,
}
BIASES = {"fc_bias": True, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True}
EAGLE1 = {
    "target_hidden_size": 64,
    "num_aux": 1,
    "uses_aux": False,
    "fc_input": "embedding_and_state",
    "fc_bias": True,
    "layer_input": "none",
    "state_norm": False,
    "final_norm": False,
    "draft_vocab_size": 128,
    "has_d2t": False,
}
VARIANTS = {
    "default": {},
    "norm before residual": {"norm_before_residual": True},
    "concat norm": {"pre_fc_norm": "concat"},
    "per-feature norm": {"pre_fc_norm": "per_feature"},
    "norm output": {"norm_output": True},
    "eagle 3.1": {"pre_fc_norm": "per_feature", "norm_output": True},
    "all norms": {"norm_before_residual": True, "pre_fc_norm": "concat", "norm_output": True},
    "qk norm": {"qk_norm": True, **frozen.rope(1e6)},
    "biases": BIASES,
    "qkv bias only": {"attention_bias": True},
    "two layers": {"num_layers": 2, "norm_before_residual": True},
    "three layers, every": {"num_layers": 3, "layer_input": "every", "norm_before_residual": True},
    "window": {"sliding_window": 4},
    "mixed windows": {"num_layers": 3, "sliding_window": 3, "full_attention_layers": (1,)},
    "wide heads": {"head_dim": 32},
    "narrow heads": {"head_dim": 8},
    "all key heads": {"num_kv_heads": 4},
    "other target width": {"target_hidden_size": 96},
    "five features": {"num_aux": 5, "qk_norm": True, "draft_vocab_size": 128, "has_d2t": False},
    "large epsilon": {"rms_norm_eps": 0.3, "pre_fc_norm": "concat", "qk_norm": True},
    "large epsilon by feature": {"rms_norm_eps": 0.3, "pre_fc_norm": "per_feature"},
    "gelu": {"hidden_act": "gelu"},
    "gelu tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "final state": {"num_aux": 1, "uses_aux": False, "fc_input": "none"},
    "eagle 1": EAGLE1,
    "eagle 1, two layers": {**EAGLE1, "num_layers": 2, "final_norm": True},
    "raw embedding": {"embedding_norm": False},
    "linear rope": frozen.rope(1e4, type="linear", factor=4.0),
    "partial rope": frozen.rope(1e4, dims=8),
    "llama3 rope": frozen.LLAMA3_ROPE,
    "yarn rope": frozen.rope(1e4, type="yarn", factor=8.0, original_max_position_embeddings=32),
    "partial yarn rope": frozen.rope(
        1e4, dims=8, type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7
    ),
    "explicit rope": frozen.rope(
        1e4,
        type="longrope",
        original_max_position_embeddings=64.0,
        short_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0],
        long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0],
    ),
}


def random_weights(config: Eagle3Config, seed: int = 0) -> dict[str, np.ndarray]:
    """What the config needs under canonical, unfused names; norms away from 1."""
    c, rng = config, np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}

    def linear(name: str, rows: int, columns: int, has_bias: bool = False) -> None:
        weights[f"{name}.weight"] = rng.standard_normal((rows, columns)) / np.sqrt(columns)
        if has_bias:
            weights[f"{name}.bias"] = 0.3 * rng.standard_normal(rows)

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = 1 + 0.3 * rng.standard_normal(size)

    h, width = c.hidden_size, c.num_aux * c.target_hidden_size
    if c.fc_input != "none":
        linear("fc", h, width if c.fc_input == "features" else 2 * h, c.fc_bias)
    if c.pre_fc_norm == "concat":
        norm("input_norm", width)
    if c.pre_fc_norm == "per_feature":
        for j in range(c.num_aux):
            norm(f"fc_norm.{j}", c.target_hidden_size)
    for i in range(c.num_layers):
        prefix = f"layers.{i}"
        sees = c.layer_input == "every" or (c.layer_input == "first" and i == 0)
        size = 2 * h if sees else h
        if sees and c.embedding_norm:
            norm(f"{prefix}.input_layernorm", h)
        if i > 0 or c.state_norm:
            norm(f"{prefix}.hidden_norm", h)
        norm(f"{prefix}.post_attention_layernorm", h)
        for part, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
            linear(f"{prefix}.self_attn.{part}_proj", heads * c.head_dim, size, c.attention_bias)
        linear(f"{prefix}.self_attn.o_proj", h, c.num_heads * c.head_dim, c.attention_out_bias)
        if c.qk_norm:
            norm(f"{prefix}.self_attn.q_norm", c.head_dim)
            norm(f"{prefix}.self_attn.k_norm", c.head_dim)
        linear(f"{prefix}.mlp.gate_proj", c.intermediate_size, h, c.mlp_bias)
        linear(f"{prefix}.mlp.up_proj", c.intermediate_size, h, c.mlp_bias)
        linear(f"{prefix}.mlp.down_proj", h, c.intermediate_size, c.mlp_bias)
    if c.final_norm:
        norm("norm", h)
    linear("lm_head", c.draft_vocab_size, h)
    return {name: value.astype(np.float32) for name, value in weights.items()}


def random_head(variant: str) -> Frozen:
    """Like a frozen head, but random, and with no logits known."""
    config = Eagle3Config(**{**SIZES, **VARIANTS[variant]})
    rng = np.random.default_rng(1)
    width = config.num_aux * config.target_hidden_size
    return Frozen(
        config=config,
        weights=random_weights(config),
        embed=rng.standard_normal((config.vocab_size, config.hidden_size)).astype(np.float32),
        d2t=None,
        tokens=rng.integers(0, config.vocab_size, NUM_SLOTS).tolist(),
        features=2 * rng.standard_normal((NUM_SLOTS, width)).astype(np.float32),
        logits=np.zeros((1 + NUM_STEPS, NUM_SLOTS, config.draft_vocab_size)),
    )


class Runner:
    """An MLX head with a cache of its own."""

    def __init__(self, example: Frozen, weights: dict[str, mx.array] | None = None):
        config = example.config
        self.embed = mx.array(example.embed)
        self.head = Eagle3Head(config)
        if weights is None:
            weights = {name: mx.array(value) for name, value in example.weights.items()}
        else:
            packed = fuse_weights(weights, config.num_layers, config)
            nn.quantize(self.head, 32, 4, class_predicate=lambda p, _: f"{p}.scales" in packed)
        if config.embed_source == "file":
            weights["embed_tokens.weight"] = self.embed
        self.head.load_weights(list(fuse_weights(weights, config.num_layers, config).items()))
        self.cache = [KVCache() for _ in range(config.num_layers)]

    def extend(self, tokens, features, positions=None, mask=None) -> mx.array:
        """States (m, h) after tokens (m,) and features (m, F)."""
        return self.step(tokens, self.head.fuse(mx.array(features)), positions, mask)

    def step(self, tokens, states, positions=None, mask=None) -> mx.array:
        embeddings = self.embed[mx.array(tokens)]
        return self.head(embeddings, states, self.cache, positions, mask)

    def logits(self, states: mx.array) -> np.ndarray:
        """(m, h) -> (m, Vd)."""
        return np.array(self.head.logits(states))

    def draft(self, example: Frozen, slot: int, visible: mx.array | None = None) -> np.ndarray:
        """Logits (1 + steps, Vd): of the prefix up to that slot, then of each forced step.

        Of a parallel head no token is forced.

        ``visible`` (slots, slots) says which slot sees which, where not the default.
        """

        def mask(start: int, stop: int) -> mx.array | None:
            return None if visible is None else visible[start:stop, :stop]

        size = slot + 1
        tokens, features = example.tokens[:size], example.features[:size]
        states = self.extend(tokens, features, mask=mask(0, size))[-1:]
        rows = [self.logits(states)]
        if example.is_parallel:  # a masked slot for each step, in one forward
            num, token = len(example.logits) - 1, example.config.mask_token_id
            rows.append(self.logits(self.step([token] * num, self.head.masked(num))))
        for i, token in enumerate([] if example.is_parallel else example.chain(slot), size):
            states = self.step([token], states, mask=mask(i, i + 1))
            rows.append(self.logits(states))
        for cache in self.cache:
            cache.trim(cache.offset)
        return np.concatenate(rows)
