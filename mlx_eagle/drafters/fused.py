"""The matrices of a head that are stored apart and run as one."""

import mlx.core as mx

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
