"""mlx-lm's Metal kernels in plain operations, for machines without Metal."""

from types import ModuleType

import mlx.core as mx
from mlx_lm.models import bitlinear_layers


def ternary_product(self, x: mx.array, packed: mx.array) -> mx.array:
    """bitnet's product with packed ternary weights: byte row r holds rows r, r + n, r + 2n, ..."""
    rows = [((packed >> 2 * i) & 3).astype(x.dtype) - 1 for i in range(4)]
    scale = 1 / self.weight_scale if self.invert_weight_scales else self.weight_scale
    return (x @ mx.concatenate(rows).T) * scale


def qk_norm(qkvg, *, n_heads, n_kv_heads, head_dim, eps, query_scale):
    q, k, _ = mx.split(qkvg, [n_heads * head_dim, (n_heads + n_kv_heads) * head_dim], axis=-1)
    q = mx.fast.rms_norm(q.reshape(*q.shape[:-1], n_heads, head_dim), None, eps)
    k = mx.fast.rms_norm(k.reshape(*k.shape[:-1], n_kv_heads, head_dim), None, eps)
    return q * query_scale, k


def qk_norm_rope(qkvg, *, rope_base, offset, **norm_args):
    def rotated(x):
        x = x.swapaxes(1, 2)
        settings = {"traditional": True, "base": rope_base, "scale": 1.0, "offset": offset}
        return mx.fast.rope(x, x.shape[-1], **settings).swapaxes(1, 2)

    return [rotated(x) for x in qk_norm(qkvg, **norm_args)]


def expert_routing(logits, expert_bias, *, top_k, multiplier, score_eps, route_scale):
    scores = mx.sigmoid(logits * multiplier)
    indices = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, indices, axis=-1)
    return indices, weights / (weights.sum(axis=-1, keepdims=True) + score_eps) * route_scale


def norm_add_norm(branch, stream, *, alpha, beta, post_weight, post_eps, next_norm):
    scaled = branch if post_weight is None else branch * post_weight
    stream = alpha * stream + beta * mx.fast.rms_norm(scaled, None, post_eps)
    return stream, None if next_norm is None else next_norm(stream).astype(branch.dtype)


def post_expert_norm_combine(experts, weights, *, norm_weight, eps):
    return (mx.fast.rms_norm(experts * norm_weight, None, eps) * weights[..., None]).sum(axis=-2)


def rms_norm_sigmoid_gate(x, gate, *, eps):
    normed = mx.fast.rms_norm(x, None, eps).swapaxes(1, 2)
    return normed.reshape(gate.shape) * mx.sigmoid(gate)


MUSE_SPARK_KERNELS = [
    qk_norm,
    qk_norm_rope,
    expert_routing,
    norm_add_norm,
    post_expert_norm_combine,
    rms_norm_sigmoid_gate,
]
"""The arithmetic of muse_spark's Metal kernels, by their names, in plain operations."""


def replace_kernels(file: str, module: ModuleType) -> None:
    """Let the module of a model file run without Metal, if it is one that asks for it."""
    if mx.metal.is_available():
        return
    if file == "bitnet":
        bitlinear_layers.BitLinear.execute_matmul_kernel = ternary_product
    if file == "muse_spark":
        for stand_in in MUSE_SPARK_KERNELS:
            setattr(module, stand_in.__name__, stand_in)
