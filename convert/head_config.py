"""The layers of an EAGLE head: what shapes and config keys tell of them, and their tensors.

Truth order: tensor shapes, then EAGLE's own keys, then generic ones (a config is often a
copy of the target's).
"""

import math
from collections.abc import Mapping
from typing import Any

from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.folder import rows_of
from mlx_eagle.drafters.head import GATED
from mlx_eagle.drafters.head_weights import stored_shapes

from ..drafters.kind import Tensor
from ..system.fields import shown
from .families import Family, hidden_size, some_of
from .rope import rope_scaling

# transformers' class defaults, for configs that were saved as the difference to them.
CLASS_DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "sliding_window": 4096},
}
DEFAULT_HEADS = 32
PREFIX = "layers.0.self_attn."
ENTRANCES = ("k_proj", "kv_a_proj_with_mqa", "q_proj", "q_a_proj")
"""Matrices that take what a layer attends from."""


def merge_settings(config: Mapping[str, Any], family: Family, num_layers: int) -> dict[str, Any]:
    """All config keys in one dictionary, the more telling ones last; nulls are dropped.

    ``num_layers`` are those of the checkpoint: layer_types of another number are the target's,
    whose config this one was copied from.
    """
    nested = config.get("transformer_layer_config") or {}
    # speculators builds a Qwen3Config where no model_type is written.
    kind = nested.get("model_type", "qwen3") if nested else "llama"
    sections = (
        CLASS_DEFAULTS.get(kind, CLASS_DEFAULTS["llama"]),
        family.defaults,
        nested,
        config,
        config.get("eagle_config") or {},
    )
    settings = {k: v for section in sections for k, v in section.items() if v is not None}
    if family.is_gemma:
        rope = settings.get("rope_parameters") or {}
        settings["rope_parameters"] = rope.get("full_attention", rope)
        if settings.get("attention_k_eq_v"):
            settings["num_key_value_heads"] = settings.get("num_global_key_value_heads")
    if family.describes_layers:
        return settings | {"qk_norm": nested.get("model_type") == "qwen3"}
    copied = ["qk_norm", "attention_bias", "mlp_bias"]
    if len(settings.get("layer_types", ())) != num_layers:
        copied.append("layer_types")
    return {key: value for key, value in settings.items() if key not in copied}


def input_width(tensors: Mapping[str, Tensor], index: int) -> int | None:
    """How wide that is for a layer; None where it has no attention known here."""
    for name in ENTRANCES:
        matrix = tensors.get(f"layers.{index}.self_attn.{name}.weight")
        if matrix is not None:
            return matrix.shape[-1]
    return None


def _heads(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Heads, key heads, width of a head, and the sizes of latent attention where it is that."""
    if f"{PREFIX}kv_a_proj_with_mqa.weight" in tensors:
        return _latent_heads(tensors, settings)
    rows = {part: rows_of(tensors, f"{PREFIX}{part}_proj.weight") for part in "qk"}
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
        return rows_of(tensors, f"{PREFIX}{name}.weight")

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


def _softmax_scale(latent: Mapping[str, Any] | None, scaling: Mapping[str, Any]) -> float | None:
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


def _position_scale(
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


def _pre_fc_norm(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> str:
    if "input_norm.weight" in tensors or settings.get("norm_before_fc"):
        return "concat"
    per_feature = settings.get("fc_norm") or settings.get("use_aux_norm")
    return "per_feature" if "fc_norm.0.weight" in tensors or per_feature else "none"


def _activation(settings: Mapping[str, Any]) -> str:
    name = settings.get("hidden_act") or settings.get("hidden_activation") or "silu"
    if name not in GATED:
        raise ValueError(f"the head's activation is {shown(name)}; {', '.join(GATED)} are known")
    return name


def _is_there(
    tensor: str, key: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> bool:
    """Whether layer 0 has that tensor, or its config asks for it, so that it must be there."""
    return f"layers.0.{tensor}" in tensors or bool(settings.get(key))


def attention_fields(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], family: Family, num_layers: int
) -> dict[str, Any]:
    """The fields about what each layer attends with, but for its rope."""
    h = hidden_size(tensors)
    wide = [input_width(tensors, i) == 2 * h for i in range(num_layers)]
    own_values = f"{PREFIX}v_proj.weight" in tensors
    has_bias = _is_there("self_attn.q_proj.bias", "attention_bias", tensors, settings)
    out = "self_attn.o_proj.bias"
    sizes = _heads(tensors, settings)
    scaling = rope_scaling(settings)
    return {
        **sizes,
        "layer_input": "every" if num_layers > 1 and all(wide) else "first",
        "qk_norm": _is_there("self_attn.q_norm.weight", "qk_norm", tensors, settings),
        "attention_bias": has_bias or f"{PREFIX}kv_a_proj_with_mqa.bias" in tensors,
        "attention_out_bias": _is_there(out, "attention_bias", tensors, settings),
        "values": "keys" if family.is_gemma and not own_values else "projected",
        "softmax_scale": _softmax_scale(sizes["latent"], scaling),
        "position_scale": _position_scale(settings, scaling),
        **_window(settings, num_layers),
    }


def layer_fields(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], family: Family, num_layers: int
) -> dict[str, Any]:
    """The fields about sizes, norms and biases around attention."""
    h = hidden_size(tensors)
    stated = settings.get("hidden_size")
    if stated is not None and stated != h:
        raise ValueError(
            f"config.json says hidden_size {stated}, and layers.0 puts out {h} channels"
        )
    optional = family.has_optional_norms
    final_norm = "norm.weight" in tensors
    return {
        "hidden_size": h,
        "num_layers": num_layers,
        "intermediate_size": rows_of(tensors, "layers.0.mlp.gate_proj.weight"),
        "max_position_embeddings": settings["max_position_embeddings"],
        "rms_norm_eps": settings["rms_norm_eps"],
        "hidden_act": _activation(settings),
        "pre_fc_norm": _pre_fc_norm(tensors, settings),
        "fc_bias": "fc.bias" in tensors,
        "mlp_bias": _is_there("mlp.gate_proj.bias", "mlp_bias", tensors, settings),
        "fusion_norm": "embedding_norm.weight" in tensors,
        "embedding_norm": settings.get("use_input_layernorm_in_first_layer", True),
        "state_norm": not optional or "layers.0.hidden_norm.weight" in tensors,
        "final_norm": final_norm if optional else settings.get("use_last_layernorm", True),
        "layer_scalar": "layers.0.layer_scalar" in tensors,
        "embed_scale": h**0.5 if family.is_gemma else 1.0,
        "logit_softcap": settings.get("final_logit_softcapping") if family.is_gemma else None,
        **_parallel_heads(tensors, settings),
    }


def _parallel_heads(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    """How many parallel heads of ModelOpt there are, of how many layers and output matrices."""
    places = [name.split(".") for name in tensors if name.startswith("parallel_heads.")]
    number = len({place[1] for place in places})
    wanted = settings.get("parallel_draft_step", 1) - 1
    if number != wanted and "parallel_draft_step" in settings:
        raise ValueError(
            f"config.json says parallel_draft_step {wanted + 1}, and the checkpoint has {number} "
            "parallel draft heads; it is incomplete"
        )
    return {
        "num_parallel_heads": number,
        "parallel_head_layers": max((int(place[3]) for place in places), default=0) + 1,
        "parallel_head_bias": any(place[-1] == "bias" for place in places),
        "parallel_outputs": max(1, sum(name.startswith("parallel_outputs.") for name in tensors)),
    }


def _window(settings: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The width of sliding attention, None without, and the layers that see everything."""
    kinds = (settings.get("layer_types") or [])[:num_layers]
    size = settings.get("sliding_window") if "sliding_attention" in kinds else None
    if settings.get("use_sliding_window") is False:
        size = None
    full = [i for i, kind in enumerate(kinds) if size and kind != "sliding_attention"]
    return {"sliding_window": size, "full_attention_layers": tuple(full)}


def check_shapes(tensors: Mapping[str, Tensor], config: Eagle3Config) -> None:
    """Every tensor there, none besides, each of its shape; else ValueError that names it."""
    expected = stored_shapes(config)
    for name, shape in expected.items():
        if name not in tensors:
            raise ValueError(f"the checkpoint lacks {name}; it is incomplete")
        if tensors[name].shape != shape:
            raise ValueError(
                f"{name} is {' x '.join(map(str, tensors[name].shape))}, expected "
                f"{' x '.join(map(str, shape))}; tensors and config disagree"
            )
    surplus = sorted(tensors.keys() - expected.keys())
    if surplus:
        raise ValueError(
            f"the checkpoint holds {some_of(surplus)}, which no known EAGLE head has; "
            "converting without would change what it computes"
        )
