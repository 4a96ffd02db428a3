"""The matrices of a head that are stored apart and run as one."""

import mlx.core as mx

from .head import Eagle3Config

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def fuse_weights(weights: dict[str, mx.array], num_layers: int) -> dict[str, mx.array]:
    """Join the stored q, k, v and gate, up matrices, which saves three kernels per layer.

    Quantization runs along the input dimension, so joining rows of packed weights, scales
    and biases is exact.
    """
    weights = dict(weights)
    for layer in range(num_layers):
        for fused, parts in FUSED.items():
            for kind in ("weight", "scales", "biases", "bias"):
                names = [f"layers.{layer}.{part}.{kind}" for part in parts]
                if names[0] in weights:
                    joined = mx.concatenate([weights.pop(name) for name in names], axis=0)
                    weights[f"layers.{layer}.{fused}.{kind}"] = joined
    return weights


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
