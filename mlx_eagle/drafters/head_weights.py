"""Weights of an EAGLE head: from the stored matrices to those it runs with, packed or not."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..system.json_schema import check
from .config import PACKING, Eagle3Config
from .head import Eagle3Head

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


FLOATS = (mx.float16, mx.bfloat16, mx.float32)


def build_head(config: Eagle3Config, weights: dict, quantization: dict | None) -> Eagle3Head:
    """The head with its weights in place; raise ValueError naming what is missing."""
    _check_layers(config, weights)
    try:
        weights = fuse_weights(weights, config.num_layers, config)
        head = Eagle3Head(config)
        if quantization:
            _quantize_as_stored(head, weights, quantization)
    except (ArithmeticError, KeyError, TypeError, ValueError) as err:
        raise ValueError(
            f"no head can be built as its config.json says ({err}): convert the head again."
        ) from err
    expected = {name: array.shape for name, array in tree_flatten(head.parameters())}
    missing = sorted(expected.keys() - weights.keys())
    extra = sorted(weights.keys() - expected.keys())
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"has an unknown {extra[0]}"
        raise ValueError(f"the head's model.safetensors {what}: convert the head again.")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise ValueError(
                f"the head's {name} is {tuple(weights[name].shape)}, its config.json says "
                f"{tuple(shape)}: convert the head again."
            )
        is_packed = name.endswith(".weight") and name.replace(".weight", ".scales") in weights
        if weights[name].dtype != mx.uint32 if is_packed else weights[name].dtype not in FLOATS:
            raise ValueError(
                f"the head's {name} is stored as {weights[name].dtype}: convert the head again."
            )
    head.load_weights(list(weights.items()))
    return head


def _check_layers(config: Eagle3Config, weights: dict[str, mx.array]) -> None:
    """Raise ValueError unless the file has as many layers as the config says."""
    layers = {name.split(".")[1] for name in weights if name.startswith("layers.")}
    if len(layers) != config.num_layers:
        raise ValueError(
            f"the head's model.safetensors has {len(layers)} layers, its config.json says "
            f"{config.num_layers}: convert the head again."
        )


def _quantize_as_stored(head: Eagle3Head, weights: dict, quantization: dict) -> None:
    """Make a module quantized where the file has scales for it, as its config entry says."""
    default = {k: quantization[k] for k in PACKING}
    for path, entry in quantization.items():
        if path not in PACKING and entry is not False:
            check({path: entry}, {path: PACKING}, "quantization")

    def params(path: str, module: nn.Module) -> bool | dict:
        if f"{path}.scales" not in weights:
            return False
        layer = path.partition("self_attn." if "self_attn." in path else "mlp.")[0]
        name = path.removeprefix(layer)
        stored = layer + FIRST_STORED.get(name, name)
        return quantization.get(stored, default)

    nn.quantize(head, class_predicate=params)


def bits_of(quantization: Mapping[str, Any]) -> str:
    """The bits of a ``quantization`` entry for people.

    {"group_size": 64, "bits": 5, "lm_head": {"group_size": 64, "bits": 6}} -> "5 to 6 bits"
    """
    own = [entry["bits"] for entry in quantization.values() if isinstance(entry, dict)]
    least, most = min([quantization["bits"], *own]), max([quantization["bits"], *own])
    return f"{least} bits" if least == most else f"{least} to {most} bits"


def quantize_now(head: Eagle3Head, stored: dict | None, bits: int, group_size: int) -> None:
    """Quantize a head that is not; ``stored`` is its ``quantization`` entry, None without.

    Raises ValueError where it has one, or for bits that MLX does not have.
    """
    if stored:
        raise ValueError(
            f"the head is already quantized to {bits_of(stored)}: load it as it is, or "
            "convert it again with another --q-bits."
        )
    if bits not in (2, 3, 4, 5, 6, 8):
        raise ValueError(f"cannot quantize to {bits} bits: give 2, 3, 4, 5, 6 or 8.")

    def fits(_: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0

    nn.quantize(head, group_size=group_size, bits=bits, class_predicate=fits)
