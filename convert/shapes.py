"""The tensors that a resolved config calls for, and their shapes.

In the table: h draft width, F width of what fc takes, H, K, D heads, key
heads and head width, I MLP width, V and Vd the vocabularies; of latent attention r and rq the
ranks, N, R, V the widths of a head's two parts and of its values.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from .stored import Tensor

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


def _layer(config: Mapping[str, Any], index: int) -> Iterator[Row]:
    c = config
    sees_embedding = c["layer_input"] == "every" or (c["layer_input"] == "first" and index == 0)
    yield from LAYER
    yield from _attention(c)
    if sees_embedding and c["embedding_norm"]:
        yield "input_layernorm.weight", "h"
    if index > 0 or c["state_norm"]:
        yield "hidden_norm.weight", "h"
    for flag, rows in (
        ("qk_norm", QK_NORM),
        ("attention_out_bias", ATTENTION_OUT_BIAS),
        ("mlp_bias", MLP_BIAS),
        ("branch_norms", BRANCH_NORMS),
        ("layer_scalar", LAYER_SCALAR),
    ):
        if c.get(flag):
            yield from rows


def _attention(config: Mapping[str, Any]) -> Iterator[Row]:
    c, has_bias = config, config["attention_bias"]
    if c["latent"] is None:
        yield from GROUPED
        yield from ATTENTION_BIAS if has_bias else ()
        if c["values"] == "projected":
            yield from VALUES
            yield from VALUE_BIAS if has_bias else ()
        return
    yield from LATENT
    yield from LATENT_BIAS if has_bias else ()
    if c["latent"]["q_lora_rank"] is None:
        yield from WHOLE_QUERY
    else:
        yield from LATENT_QUERY
        yield from LATENT_QUERY_BIAS if has_bias else ()


def _parallel(config: Mapping[str, Any]) -> Iterator[Row]:
    """What the parallel heads are made of."""
    for i in range(config["num_parallel_heads"]):
        for j in range(config["parallel_head_layers"]):
            yield f"parallel_heads.{i}.layers.{j}.weight", "h", "h"
            if config["parallel_head_bias"]:
                yield f"parallel_heads.{i}.layers.{j}.bias", "h"
    if config["num_parallel_heads"]:
        for i in range(config["parallel_outputs"]):
            yield f"parallel_outputs.{i}.weight", "Vd", "h"


def _latent_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Symbols of latent attention with what they stand for."""
    sizes, num_heads = config["latent"], config["num_heads"]
    if sizes is None:
        return {}
    return {
        "r": sizes["kv_lora_rank"],
        "rR": sizes["kv_lora_rank"] + sizes["qk_rope_head_dim"],
        "rq": sizes["q_lora_rank"],
        "HNV": num_heads * (sizes["qk_nope_head_dim"] + sizes["v_head_dim"]),
        "HV": num_heads * sizes["v_head_dim"],
    }


def _rows(config: Mapping[str, Any]) -> Iterator[tuple[Row, dict[str, int]]]:
    """Every tensor as (name, size...) with the sizes its symbols stand for."""
    c = config
    h, dim = c["hidden_size"], c["head_dim"]
    features = c["num_aux"] * c["target_hidden_size"]
    sizes = {
        "h": h,
        "F": 2 * h if c["fc_input"] == "embedding_and_state" else features,
        "h_t": c["target_hidden_size"],
        "HD": c["num_heads"] * dim,
        "KD": c["num_kv_heads"] * dim,
        "D": dim,
        "I": c["intermediate_size"],
        "V": c["vocab_size"],
        "Vd": c["draft_vocab_size"],
        "one": 1,
        **_latent_sizes(c),
    }
    if c["fc_input"] != "none":
        yield ("fc.weight", "h", "F"), sizes
    if c["fc_bias"]:
        yield ("fc.bias", "h"), sizes
    if c["fusion_norm"]:
        yield ("embedding_norm.weight", "h"), sizes
    for row in _parallel(c):
        yield row, sizes
    if c["pre_fc_norm"] == "concat":
        yield ("input_norm.weight", "F"), sizes
    if c["pre_fc_norm"] == "per_feature":
        for i in range(c["num_aux"]):
            yield (f"fc_norm.{i}.weight", "h_t"), sizes
    if c["mask_token_id"] is not None:
        yield ("mask_hidden", "F"), sizes
    for i in range(c["num_layers"]):
        wide = c["layer_input"] == "every" or (c["layer_input"] == "first" and i == 0)
        sizes = {**sizes, "in": 2 * h if wide else h}
        for name, *symbols in _layer(c, i):
            yield (f"layers.{i}.{name}", *symbols), sizes
    if c["final_norm"]:
        yield ("norm.weight", "h"), sizes
    if c["lm_head_source"] == "file":
        yield ("lm_head.weight", "Vd", "h"), sizes
    if c["embed_source"] == "file":
        yield ("embed_tokens.weight", "V", "h"), sizes


def need(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """That tensor; ValueError where it is missing."""
    if name not in tensors:
        raise ValueError(f"the checkpoint lacks {name}; it is incomplete")
    return tensors[name]


def check_shapes(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
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
            f"the checkpoint holds {', '.join(surplus[:4])}, which no known EAGLE head has; "
            "converting without would change what it computes"
        )
