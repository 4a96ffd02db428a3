"""The fields of a head's config about attention: heads, latent sizes, scales.

Shapes stand in for keys that are missing.
"""

import math
from collections.abc import Mapping
from typing import Any

from .shapes import need
from .stored import Tensor

DEFAULT_HEADS = 32
PREFIX = "layers.0.self_attn."
ENTRANCES = ("k_proj", "kv_a_proj_with_mqa", "q_proj", "q_a_proj")
"""Matrices that take what a layer attends from."""


def input_width(tensors: Mapping[str, Tensor], index: int) -> int | None:
    """How wide that is for a layer; None where it has no attention known here."""
    for name in ENTRANCES:
        matrix = tensors.get(f"layers.{index}.self_attn.{name}.weight")
        if matrix is not None:
            return matrix.shape[-1]
    return None


def heads(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Heads, key heads, width of a head, and the sizes of latent attention where it is that."""
    if f"{PREFIX}kv_a_proj_with_mqa.weight" in tensors:
        return _latent_heads(tensors, settings)
    rows = {part: need(tensors, f"{PREFIX}{part}_proj.weight").rows for part in "qk"}
    norm = tensors.get(f"{PREFIX}q_norm.weight")
    head_dim = norm.rows if norm is not None else settings.get("head_dim")
    num_heads = settings.get("num_attention_heads")
    num_heads = num_heads or (rows["q"] // head_dim if head_dim else DEFAULT_HEADS)
    head_dim = head_dim or rows["q"] // num_heads
    if not head_dim:
        raise ValueError(f"q_proj has {rows['q']} rows for {num_heads} heads; fix the config")
    num_kv_heads = settings.get("num_key_value_heads", max(rows["k"] // head_dim, 1))
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(
            f"the head has {num_heads} heads of width {head_dim} and {num_kv_heads} key heads, "
            "expected an even width and a whole number of heads per key head; fix the config"
        )
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "latent": None,
    }


def _latent_heads(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of DeepSeek's attention; only the number of heads is the config's."""

    def rows(name: str) -> int:
        return need(tensors, f"{PREFIX}{name}.weight").rows

    rank = rows("kv_a_layernorm")
    rope = rows("kv_a_proj_with_mqa") - rank
    query_rank = rows("q_a_layernorm") if f"{PREFIX}q_a_proj.weight" in tensors else None
    num_heads = settings.get("num_attention_heads", DEFAULT_HEADS)
    head_dim = rows("q_proj" if query_rank is None else "q_b_proj") // num_heads
    sizes = {
        "q_lora_rank": query_rank,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": head_dim - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": rows("kv_b_proj") // num_heads - (head_dim - rope),
    }
    if min(size for size in sizes.values() if size is not None) < 1 or rope % 2:
        raise ValueError(
            f"the head's latent attention would have {num_heads} heads of "
            f"{sizes['qk_nope_head_dim']} and {rope} channels and values of "
            f"{sizes['v_head_dim']}; fix num_attention_heads in its config"
        )
    for name, size in sizes.items():
        if settings.get(name) not in (None, size):
            raise ValueError(
                f"config.json says {name} {settings[name]}, and the tensors have {size}"
            )
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "latent": sizes,
    }


def softmax_scale(latent: Mapping[str, Any] | None, scaling: Mapping[str, Any]) -> float | None:
    """What scores are multiplied by where it is not the usual: DeepSeek's share of yarn.

    ``scaling`` is the config's own entry. Mistral's heads do without (apply_scale).
    """
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    weight, factor = scaling.get("mscale_all_dim") or 0, scaling.get("factor") or 1
    if latent is None or kind not in ("yarn", "deepseek_yarn") or not weight or factor <= 1:
        return None
    if scaling.get("apply_yarn_scaling") is False:
        return None
    width = latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
    return float((0.1 * weight * math.log(factor) + 1) ** 2 / math.sqrt(width))


def position_scale(
    settings: Mapping[str, Any], scaling: Mapping[str, Any]
) -> dict[str, Any] | None:
    """How queries grow with their position, as Mistral's configs or transformers' say it."""
    entry = settings.get("llama_4_scaling") or {}
    beta = entry.get("beta", scaling.get("llama_4_scaling_beta"))
    original = entry.get("original_max_position_embeddings")
    original = original or scaling.get("original_max_position_embeddings")
    if not beta or not original:
        return None
    return {"beta": float(beta), "original_max_position_embeddings": float(original)}
