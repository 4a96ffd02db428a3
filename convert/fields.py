"""The layers of an EAGLE head: what shapes and config keys tell of them, and their tensors.

Truth order: tensor shapes, then EAGLE's own keys, then generic ones (a config is often a
copy of the target's).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.head import GATED
from mlx_eagle.system.json_schema import shown

from .families import Family, hidden_size, some_of
from .rope import rope_scaling
from .stored import Tensor

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
    if not family.describes_layers:
        if len(settings.get("layer_types", ())) != num_layers:
            settings.pop("layer_types", None)
        return settings
    return settings | {"qk_norm": nested.get("model_type") == "qwen3"}


def need(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """That tensor; ValueError where it is missing."""
    if name not in tensors:
        raise ValueError(f"the checkpoint lacks {name}; it is incomplete")
    return tensors[name]


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
    tensor: str,
    key: str,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    family: Family,
) -> bool:
    """Whether layer 0 has that tensor, or its config asks for it, so that it must be there."""
    asked = family.describes_layers and settings.get(key)
    return f"layers.0.{tensor}" in tensors or bool(asked)


def attention_fields(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], family: Family, num_layers: int
) -> dict[str, Any]:
    """The fields about what each layer attends with, but for its rope."""
    h = hidden_size(tensors)
    wide = [input_width(tensors, i) == 2 * h for i in range(num_layers)]
    own_values = f"{PREFIX}v_proj.weight" in tensors
    has_bias = _is_there("self_attn.q_proj.bias", "attention_bias", tensors, settings, family)
    out = "self_attn.o_proj.bias"
    sizes = _heads(tensors, settings)
    scaling = rope_scaling(settings)
    return {
        **sizes,
        "layer_input": "every" if num_layers > 1 and all(wide) else "first",
        "qk_norm": _is_there("self_attn.q_norm.weight", "qk_norm", tensors, settings, family),
        "attention_bias": has_bias or f"{PREFIX}kv_a_proj_with_mqa.bias" in tensors,
        "attention_out_bias": _is_there(out, "attention_bias", tensors, settings, family),
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
        "intermediate_size": need(tensors, "layers.0.mlp.gate_proj.weight").rows,
        "max_position_embeddings": settings["max_position_embeddings"],
        "rms_norm_eps": settings["rms_norm_eps"],
        "hidden_act": _activation(settings),
        "pre_fc_norm": _pre_fc_norm(tensors, settings),
        "fc_bias": "fc.bias" in tensors,
        "mlp_bias": _is_there("mlp.gate_proj.bias", "mlp_bias", tensors, settings, family),
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


# The tensors that a resolved config calls for. Symbols of their sizes: h draft width, F width
# of what fc takes, H, K, D heads, key heads and head width, I MLP width, V and Vd the
# vocabularies; of latent attention r and rq the ranks, N, R, V the widths of a head's two parts
# and of its values.
GROUPED = (
    ("self_attn.q_proj.weight", "HD", "in"),
    ("self_attn.k_proj.weight", "KD", "in"),
    ("self_attn.o_proj.weight", "h", "HD"),
)
VALUES = (("self_attn.v_proj.weight", "KD", "in"),)
LATENT = (
    ("self_attn.kv_a_proj_with_mqa.weight", "rR", "in"),
    ("self_attn.kv_a_layernorm.weight", "r"),
    ("self_attn.kv_b_proj.weight", "HNV", "r"),
    ("self_attn.o_proj.weight", "h", "HV"),
)
WHOLE_QUERY = (("self_attn.q_proj.weight", "HD", "in"),)
LATENT_QUERY = (
    ("self_attn.q_a_proj.weight", "rq", "in"),
    ("self_attn.q_a_layernorm.weight", "rq"),
    ("self_attn.q_b_proj.weight", "HD", "rq"),
)
LAYER = (
    ("post_attention_layernorm.weight", "h"),
    ("mlp.gate_proj.weight", "I", "h"),
    ("mlp.up_proj.weight", "I", "h"),
    ("mlp.down_proj.weight", "h", "I"),
)
QK_NORM = (("self_attn.q_norm.weight", "D"), ("self_attn.k_norm.weight", "D"))
ATTENTION_BIAS = (
    ("self_attn.q_proj.bias", "HD"),
    ("self_attn.k_proj.bias", "KD"),
)
VALUE_BIAS = (("self_attn.v_proj.bias", "KD"),)
BRANCH_NORMS = (
    ("pre_feedforward_layernorm.weight", "h"),
    ("post_feedforward_layernorm.weight", "h"),
)
LAYER_SCALAR = (("layer_scalar", "one"),)
LATENT_BIAS = (("self_attn.kv_a_proj_with_mqa.bias", "rR"),)
LATENT_QUERY_BIAS = (("self_attn.q_a_proj.bias", "rq"),)
ATTENTION_OUT_BIAS = (("self_attn.o_proj.bias", "h"),)
MLP_BIAS = (("mlp.gate_proj.bias", "I"), ("mlp.up_proj.bias", "I"), ("mlp.down_proj.bias", "h"))
WORDS = {
    "h": "hidden_size",
    "HD": "num_heads * head_dim",
    "KD": "num_kv_heads * head_dim",
    "D": "head_dim",
    "I": "intermediate_size",
    "F": "what fc takes",
    "h_t": "target_hidden_size",
    "V": "vocab_size",
    "Vd": "draft_vocab_size",
    "one": "one",
    "in": "what the layer attends from",
    "r": "kv_lora_rank",
    "rR": "kv_lora_rank + qk_rope_head_dim",
    "rq": "q_lora_rank",
    "HNV": "num_heads * (qk_nope_head_dim + v_head_dim)",
    "HV": "num_heads * v_head_dim",
}
Row = tuple[str, ...]


def _layer(config: Eagle3Config, index: int) -> Iterator[Row]:
    c = config
    sees_embedding = c.layer_input == "every" or (c.layer_input == "first" and index == 0)
    yield from LAYER
    yield from _attention(c)
    if sees_embedding and c.embedding_norm:
        yield "input_layernorm.weight", "h"
    if index > 0 or c.state_norm:
        yield "hidden_norm.weight", "h"
    for flag, rows in (
        ("qk_norm", QK_NORM),
        ("attention_out_bias", ATTENTION_OUT_BIAS),
        ("mlp_bias", MLP_BIAS),
        ("branch_norms", BRANCH_NORMS),
        ("layer_scalar", LAYER_SCALAR),
    ):
        if getattr(c, flag):
            yield from rows


def _attention(config: Eagle3Config) -> Iterator[Row]:
    c, has_bias = config, config.attention_bias
    if c.latent is None:
        yield from GROUPED
        yield from ATTENTION_BIAS if has_bias else ()
        if c.values == "projected":
            yield from VALUES
            yield from VALUE_BIAS if has_bias else ()
        return
    yield from LATENT
    yield from LATENT_BIAS if has_bias else ()
    if c.latent["q_lora_rank"] is None:
        yield from WHOLE_QUERY
    else:
        yield from LATENT_QUERY
        yield from LATENT_QUERY_BIAS if has_bias else ()


def _parallel(config: Eagle3Config) -> Iterator[Row]:
    """What the parallel heads are made of."""
    for i in range(config.num_parallel_heads):
        for j in range(config.parallel_head_layers):
            yield f"parallel_heads.{i}.layers.{j}.weight", "h", "h"
            if config.parallel_head_bias:
                yield f"parallel_heads.{i}.layers.{j}.bias", "h"
    if config.num_parallel_heads:
        for i in range(config.parallel_outputs):
            yield f"parallel_outputs.{i}.weight", "Vd", "h"


def _latent_sizes(config: Eagle3Config) -> dict[str, int]:
    """Symbols of latent attention with what they stand for."""
    sizes, num_heads = config.latent, config.num_heads
    if sizes is None:
        return {}
    return {
        "r": sizes["kv_lora_rank"],
        "rR": sizes["kv_lora_rank"] + sizes["qk_rope_head_dim"],
        "rq": sizes["q_lora_rank"],
        "HNV": num_heads * (sizes["qk_nope_head_dim"] + sizes["v_head_dim"]),
        "HV": num_heads * sizes["v_head_dim"],
    }


def _rows(config: Eagle3Config) -> Iterator[tuple[Row, dict[str, int]]]:
    """Every tensor as (name, size...) with the sizes its symbols stand for."""
    c = config
    h, dim = c.hidden_size, c.head_dim
    features = c.num_aux * c.target_hidden_size
    sizes = {
        "h": h,
        "F": 2 * h if c.fc_input == "embedding_and_state" else features,
        "h_t": c.target_hidden_size,
        "HD": c.num_heads * dim,
        "KD": c.num_kv_heads * dim,
        "D": dim,
        "I": c.intermediate_size,
        "V": c.vocab_size,
        "Vd": c.draft_vocab_size,
        "one": 1,
        **_latent_sizes(c),
    }
    if c.fc_input != "none":
        yield ("fc.weight", "h", "F"), sizes
    if c.fc_bias:
        yield ("fc.bias", "h"), sizes
    if c.fusion_norm:
        yield ("embedding_norm.weight", "h"), sizes
    for row in _parallel(c):
        yield row, sizes
    if c.pre_fc_norm == "concat":
        yield ("input_norm.weight", "F"), sizes
    if c.pre_fc_norm == "per_feature":
        for i in range(c.num_aux):
            yield (f"fc_norm.{i}.weight", "h_t"), sizes
    if c.mask_token_id is not None:
        yield ("mask_hidden", "F"), sizes
    for i in range(c.num_layers):
        wide = c.layer_input == "every" or (c.layer_input == "first" and i == 0)
        sizes = {**sizes, "in": 2 * h if wide else h}
        for name, *symbols in _layer(c, i):
            yield (f"layers.{i}.{name}", *symbols), sizes
    if c.final_norm:
        yield ("norm.weight", "h"), sizes
    if c.lm_head_source == "file":
        yield ("lm_head.weight", "Vd", "h"), sizes
    if c.embed_source == "file":
        yield ("embed_tokens.weight", "V", "h"), sizes


def check_shapes(tensors: Mapping[str, Tensor], config: Eagle3Config) -> None:
    """Every tensor there, none besides, each of its shape; else ValueError that names it."""
    expected = set()
    for (name, *symbols), sizes in _rows(config):
        expected.add(name)
        tensor = need(tensors, name)
        shape = tuple(sizes[symbol] for symbol in symbols)
        if tensor.shape != shape:
            words = " x ".join(WORDS[symbol] for symbol in symbols)
            raise ValueError(
                f"{name} is {' x '.join(map(str, tensor.shape))}, expected "
                f"{' x '.join(map(str, shape))} ({words}); tensors and config disagree"
            )
    surplus = sorted(set(tensors) - expected)
    if surplus:
        raise ValueError(
            f"the checkpoint holds {some_of(surplus)}, which no known EAGLE head has; "
            "converting without would change what it computes"
        )
