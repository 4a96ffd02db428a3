"""Weights of an EAGLE head: from the stored matrices to a head attached to its target."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..target_model.masks_and_ropes import evaluate_ropes
from .base import index_of
from .config import Eagle3Config
from .folder import building, read_module, read_weights
from .head import Eagle3Head
from .kind import LoadOptions
from .target_parts import activation_dtype, find_embedding, lm_head_of, rows_of_lm_head, sizes_of

INTEGERS = (mx.int8, mx.int16, mx.int32, mx.int64)

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}

FIRST_STORED = {
    **{fused: parts[0] for fused, parts in FUSED.items()},
    "self_attn.k_b_proj": "self_attn.kv_b_proj",
    "self_attn.v_b_proj": "self_attn.kv_b_proj",
}
"""Stored names of matrices that run joined or cut: of the first part."""


def fuse_weights(
    weights: dict[str, mx.array], num_layers: int, config: Eagle3Config | None = None
) -> dict[str, mx.array]:
    """Join the stored q, k, v and gate, up matrices, which saves three kernels per layer.

    With latent attention, which needs ``config``, the matrix of keys and values is cut
    into one for each head's keys and one for its values. Quantization runs along the input
    dimension, so joining and cutting rows of packed weights, scales and biases is exact.
    """
    weights = dict(weights)
    if config is not None and config.latent is not None:
        for name in [name for name in weights if ".kv_b_proj." in name]:
            both = weights.pop(name)  # (H (N + V), r), to be (H, N, r) and (H, V, r)
            by_head = both.reshape(config.num_heads, -1, both.shape[-1])
            keys, values = mx.split(by_head, [config.latent["qk_nope_head_dim"]], axis=1)
            weights[name.replace("kv_b", "k_b")] = keys
            weights[name.replace("kv_b", "v_b")] = values
    for layer in range(num_layers):
        for fused, parts in FUSED.items():
            for suffix in ("weight", "scales", "biases", "bias"):
                names = [f"layers.{layer}.{part}.{suffix}" for part in parts]
                if names[1] in weights:
                    # Where the values are the keys, there is no third.
                    rows = [weights.pop(name) for name in names if name in weights]
                    weights[f"layers.{layer}.{fused}.{suffix}"] = mx.concatenate(rows, axis=0)
    return weights


def split_weights(weights: dict[str, mx.array], config: Eagle3Config) -> dict[str, mx.array]:
    """Undo ``fuse_weights``: the matrices, not quantized, under their stored names.

    Where the values are the keys, those of the values have no rows.
    """
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    ends = {"self_attn.qkv_proj": [q, q + kv], "mlp.gate_up_proj": [config.intermediate_size]}
    stored: dict[str, mx.array] = {}
    for name, array in weights.items():
        path, _, suffix = name.rpartition(".")
        if fused := next((each for each in FUSED if path.endswith(each)), None):
            names = [f"{path.removesuffix(fused)}{part}.{suffix}" for part in FUSED[fused]]
            stored |= zip(names, mx.split(array, ends[fused], axis=0), strict=True)
        elif path.endswith("k_b_proj"):
            heads = mx.concatenate([array, weights[name.replace("k_b", "v_b")]], axis=1)
            stored[name.replace("k_b", "kv_b")] = heads.reshape(-1, heads.shape[-1])
        elif not path.endswith("v_b_proj"):
            stored[name] = array
    return stored


def stored_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that a head of that config is stored as; none is computed.

    Raises ValueError where there is no such head.
    """
    with building():
        head = Eagle3Head(config)
    arrays: Any = tree_flatten(head.parameters())
    stored = split_weights(dict(arrays), config)
    if config.lm_head_source != "file":
        stored.pop("lm_head.weight", None)
    return {name: array.shape for name, array in stored.items() if array.size}


def build_head(
    config: Eagle3Config,
    weights: dict[str, mx.array],
    quantization: dict[str, Any] | None,
    options: LoadOptions,
    dtype: mx.Dtype,
) -> Eagle3Head:
    """The head with its weights in place; raise ValueError naming what is missing."""
    with building():
        weights = fuse_weights(weights, config.num_layers, config)
    make = partial(Eagle3Head, config)
    return read_module(make, weights, quantization, options, dtype, stored_name=_stored_name)


def _stored_name(path: str) -> str:
    """The stored name of the matrix that runs at ``path``, or of its first part."""
    return re.sub(r"(self_attn|mlp)\.\w+$", lambda m: FIRST_STORED.get(m[0], m[0]), path)


@dataclass(frozen=True)
class AttachedHead:
    """A head and what it takes from its target.

    ``embed`` maps tokens (...,) to (..., h); ``to_target`` (Vd,) draft ids to target ids, None
    where they are the same.
    """

    head: Eagle3Head
    embed: Callable[[mx.array], mx.array]
    taps: tuple[int, ...]
    to_target: mx.array | None

    @property
    def ids(self) -> mx.array:
        """The target ids of all that can be drafted, (Vd,) int32."""
        if self.to_target is not None:
            return self.to_target
        return mx.arange(self.head.config.draft_vocab_size, dtype=mx.int32)


def attach_head(
    folder: Path, values: dict[str, Any], model: nn.Module, options: LoadOptions
) -> AttachedHead:
    """The head in ``folder``, whose ``config.json`` holds ``values``, attached to ``model``."""
    config = Eagle3Config.from_dict(values, folder / "config.json")
    weights = read_weights(folder)
    embedding, _ = find_embedding(model)
    sizes = sizes_of(model)
    offsets = weights.pop("d2t", None)
    to_target = draft_ids(offsets, config.draft_vocab_size, config.has_d2t, sizes.vocab_size)
    config.check_fit(sizes)
    if config.lm_head_source == "target_rows" and to_target is not None:
        weights.update(rows_of_lm_head(model, embedding, to_target))
    dtype = activation_dtype(embedding)
    head = build_head(config, weights, values.get("quantization"), options, dtype)
    embed = head.embed_tokens if config.embed_source == "file" else embedding
    if config.lm_head_source == "target":
        head.share_lm_head(lm_head_of(model, embedding))
    mx.eval(head.parameters())
    evaluate_ropes(model)  # for threads other than this one; mlx-lm leaves them to the first pass
    return AttachedHead(head, embed, config.taps(sizes.num_layers), to_target)


def draft_ids(
    offsets: mx.array | None, num_drafted: int, has_d2t: bool, vocab_size: int
) -> mx.array | None:
    """Target id of every draft id, (Vd,) int32, from the stored offsets; None for identity."""
    if offsets is None:
        if has_d2t:
            raise ValueError(
                f"the head drafts {num_drafted} of {vocab_size} tokens but its d2t table is "
                "missing: convert it again."
            )
        return None
    if offsets.dtype not in INTEGERS or offsets.shape != (num_drafted,):
        raise ValueError(
            f"the head's d2t table is {tuple(offsets.shape)} of {offsets.dtype}, expected "
            f"{num_drafted} whole numbers: convert the head again."
        )
    ids = offsets.astype(mx.int64) + mx.arange(offsets.shape[0], dtype=mx.int64)
    low = index_of(ids.min())
    high = index_of(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"the head's d2t table reaches token {high if low >= 0 else low}, but the target "
            f"has {vocab_size} tokens: this head was made for another target."
        )
    return ids.astype(mx.int32)
