"""The matrices of a head that are stored apart and run as one."""

import mlx.core as mx

from .config import Eagle3Config

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}

FIRST_STORED = {
    **{fused: parts[0] for fused, parts in FUSED.items()},
    "self_attn.k_b_proj": "self_attn.kv_b_proj",
    "self_attn.v_b_proj": "self_attn.kv_b_proj",
}
"""What a matrix as it runs is stored as, or begins with."""


def fuse_weights(
    weights: dict[str, mx.array], num_layers: int, config: Eagle3Config | None = None
) -> dict[str, mx.array]:
    """Join the stored q, k, v and gate, up matrices, which saves three kernels per layer.

    Of latent attention, which ``config`` must be given for, the matrix of keys and values is cut
    into one for each head's keys and one for its values. Quantization runs along the input
    dimension, so joining and cutting rows of packed weights, scales and biases is exact.
    """
    weights = dict(weights)
    if config is not None and config.latent is not None:
        for layer in range(num_layers):
            _cut_heads(weights, f"layers.{layer}.self_attn.", config.num_heads, config.latent)
    for layer in range(num_layers):
        for fused, parts in FUSED.items():
            for kind in ("weight", "scales", "biases", "bias"):
                names = [f"layers.{layer}.{part}.{kind}" for part in parts]
                if names[1] in weights:
                    # Where the values are the keys, there is no third.
                    rows = [weights.pop(name) for name in names if name in weights]
                    weights[f"layers.{layer}.{fused}.{kind}"] = mx.concatenate(rows, axis=0)
    return weights


def _cut_heads(
    weights: dict[str, mx.array], prefix: str, num_heads: int, latent: dict[str, int]
) -> None:
    """kv_b_proj (H (N + V), r) as k_b_proj (H, N, r) and v_b_proj (H, V, r)."""
    for kind in ("weight", "scales", "biases"):
        both = weights.pop(f"{prefix}kv_b_proj.{kind}", None)
        if both is not None:
            rows = both.reshape(num_heads, -1, both.shape[-1])
            keys, values = mx.split(rows, [latent["qk_nope_head_dim"]], axis=1)
            weights[f"{prefix}k_b_proj.{kind}"] = keys
            weights[f"{prefix}v_b_proj.{kind}"] = values


def split_weights(weights: dict[str, mx.array], config: Eagle3Config) -> dict[str, mx.array]:
    """Undo ``fuse_weights``: the matrices, not quantized, under their stored names."""
    c, weights = config, dict(weights)
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    ends = {"self_attn.qkv_proj": (q, q + kv), "mlp.gate_up_proj": (c.intermediate_size,)}
    for layer in range(c.num_layers):
        for fused, parts in FUSED.items():
            for kind in ("weight", "bias"):
                joined = weights.pop(f"layers.{layer}.{fused}.{kind}", None)
                if joined is not None:
                    pieces = mx.split(joined, list(ends[fused]), axis=0)
                    names = (f"layers.{layer}.{part}.{kind}" for part in parts)
                    weights.update(zip(names, pieces, strict=True))
    return weights
