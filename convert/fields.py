"""The fields of a head's config, each from the shapes and config keys that tell it.

Truth order: tensor shapes, then EAGLE's own keys, then generic ones (a config is often a
copy of the target's).
"""

import re
from collections.abc import Mapping
from typing import Any

from mlx_eagle.drafters.head import GATED
from mlx_eagle.system.json_schema import shown

from .attention import heads, input_width
from .families import Family, hidden_size
from .shapes import need
from .stored import Tensor

# transformers' class defaults, for configs that were saved as the difference to them.
CLASS_DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "sliding_window": 4096},
}
P_EAGLE = re.compile(r"P-?[Ee]agle")


def merge_settings(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """All config keys in one dictionary, the more telling ones last; nulls are dropped."""
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
    if not family.describes_layers:
        return settings
    return settings | {"qk_norm": nested.get("model_type") == "qwen3"}


def _layer_input(tensors: Mapping[str, Tensor], num_layers: int, h: int) -> str:
    wide = [input_width(tensors, i) == 2 * h for i in range(num_layers)]
    return "every" if num_layers > 1 and all(wide) else "first"


def _pre_fc_norm(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> str:
    if "input_norm.weight" in tensors or settings.get("norm_before_fc"):
        return "concat"
    per_feature = settings.get("fc_norm") or settings.get("use_aux_norm")
    return "per_feature" if "fc_norm.0.weight" in tensors or per_feature else "none"


def activation(settings: Mapping[str, Any]) -> str:
    name = settings.get("hidden_act") or settings.get("hidden_activation") or "silu"
    if name not in GATED:
        raise ValueError(f"the head's activation is {shown(name)}; {', '.join(GATED)} are known")
    return name


def from_shapes(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], family: Family, num_layers: int
) -> dict[str, Any]:
    """The fields that the tensors alone tell, or nearly."""
    h = hidden_size(tensors)
    stated = settings.get("hidden_size")
    if stated is not None and stated != h:
        raise ValueError(
            f"config.json says hidden_size {stated}, and layers.0 puts out {h} channels"
        )
    first = "layers.0."

    def has(tensor: str, key: str) -> bool:
        return first + tensor in tensors or bool(family.describes_layers and settings.get(key))

    return {
        "hidden_size": h,
        "num_layers": num_layers,
        **heads(tensors, settings),
        "intermediate_size": need(tensors, f"{first}mlp.gate_proj.weight").rows,
        "pre_fc_norm": _pre_fc_norm(tensors, settings),
        "fc_input": "features",
        "fc_bias": "fc.bias" in tensors,
        "qk_norm": has("self_attn.q_norm.weight", "qk_norm"),
        "attention_bias": has("self_attn.q_proj.bias", "attention_bias")
        or first + "self_attn.kv_a_proj_with_mqa.bias" in tensors,
        "attention_out_bias": has("self_attn.o_proj.bias", "attention_bias"),
        "mlp_bias": has("mlp.gate_proj.bias", "mlp_bias"),
        "layer_input": _layer_input(tensors, num_layers, h),
        "uses_aux": True,
        "fusion_norm": "embedding_norm.weight" in tensors,
        "embedding_norm": settings.get("use_input_layernorm_in_first_layer", True),
        "state_norm": not family.has_optional_norms or f"{first}hidden_norm.weight" in tensors,
        "final_norm": "norm.weight" in tensors
        if family.has_optional_norms
        else settings.get("use_last_layernorm", True),
        "values": "keys"
        if family.is_gemma and first + "self_attn.v_proj.weight" not in tensors
        else "projected",
        "layer_scalar": first + "layer_scalar" in tensors,
        "embed_scale": h**0.5 if family.is_gemma else 1.0,
        "logit_softcap": settings.get("final_logit_softcapping") if family.is_gemma else None,
        **parallel_heads(tensors, settings),
        **family.fixed,
    }


def parallel_heads(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
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


def mask_token(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], override: int | None
) -> int | None:
    """What a P-EAGLE head is given in place of a token; None for a head that is none."""
    keys = ("mask_token_id", "pard_token", "ptd_token_id")
    token = next((settings[key] for key in keys if key in settings), None)
    token = token if override is None else override
    says_so = (
        settings.get("speculators_model_type") == "peagle"
        or settings.get("parallel_drafting")
        or "pard_token" in settings
        or "ptd_token_id" in settings
        or any(P_EAGLE.match(name) for name in settings.get("architectures", ()))
    )
    if "mask_hidden" not in tensors:
        if says_so:
            raise ValueError(
                "the head drafts in parallel (P-EAGLE), says its config, and the checkpoint lacks "
                "mask_hidden; it is incomplete"
            )
        return None
    if token is None:
        raise ValueError(
            "the head drafts in parallel (P-EAGLE), and its config names no mask_token_id (nor "
            "ptd_token_id or pard_token); give the one it was trained with as --mask-token-id"
        )
    return token


def window(settings: Mapping[str, Any], family: Family, num_layers: int) -> dict[str, Any]:
    """The width of sliding attention, None without, and the layers that see everything."""
    kinds = (settings.get("layer_types") or [])[:num_layers]
    size = settings.get("sliding_window") if "sliding_attention" in kinds else None
    if not family.describes_layers or settings.get("use_sliding_window") is False:
        size = None
    full = [i for i, kind in enumerate(kinds) if size and kind != "sliding_attention"]
    return {"sliding_window": size, "full_attention_layers": tuple(full)}


def norm_before_residual(
    settings: Mapping[str, Any], family: Family, override: bool | None, notes: list[str]
) -> bool:
    if override is not None:
        return override
    if family.doubts_residual and "norm_before_residual" not in settings:
        notes.append(
            "the config does not say norm_before_residual; taken as false, the class default; "
            "if acceptance is low try --norm-before-residual"
        )
    return bool(settings.get("norm_before_residual", False))


def norm_output(
    settings: Mapping[str, Any],
    family: Family,
    pre_fc: str,
    override: bool | None,
    notes: list[str],
) -> bool:
    if override is not None:
        return override
    value = settings.get("norm_output", settings.get("return_hidden_post_norm", False))
    if value and pre_fc == "none" and family.doubts_norm_output:
        notes.append(
            "norm_output is set without fc_norm; SpecForge before September 2026 meant plain "
            "EAGLE-3 by that; if acceptance is low try --no-norm-output"
        )
    return bool(value)
