"""Drafters in GGUF files, by the steps and names of llama.cpp's converter (conversion/*.py).

Names that the package ``gguf`` maps are its own; of heads of blocks, which its newest release does
not know yet, the others are those of src/models/dflash.cpp.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Tensors = Mapping[str, np.ndarray]
SUFFIXES = (".weight", ".bias")
OF_BLOCKS = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}
OF_LAYERS = {
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
}


@cache
def names_of(architecture: str) -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], 6)


def mapped(architecture: str, name: str) -> str:
    """The name that the package has for a tensor of transformers: model.norm -> output_norm."""
    found = names_of(architecture).get_name(name, SUFFIXES)
    assert found is not None, name
    return found


def block_name(name: str) -> str:
    """layers.1.self_attn.q_proj.weight -> blk.1.attn_q.weight"""
    layer = re.match(r"layers\.(\d+)\.(.+)", name)
    if layer is not None and layer[2] in OF_LAYERS:
        return f"blk.{layer[1]}.{OF_LAYERS[layer[2]]}"
    if name in OF_BLOCKS:
        return OF_BLOCKS[name]
    return mapped("QWEN3", name if name.startswith("lm_head") else f"model.{name}")


def write_file(
    path: Path, architecture: str, values: Mapping[str, Any], tensors: Tensors, kind: str = "F32"
) -> Path:
    """A file of these tensors, matrices as ``kind``, with these values under its architecture."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        key = key if "." in key and key.startswith("tokenizer") else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, value in tensors.items():
        if value.dtype == np.int64 or value.ndim == 1 or kind == "F32":
            writer.add_tensor(name, value)
        else:
            form = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(value, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def block_values(config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Metadata of a head of blocks, from its published config."""
    inside = config.get("dflash_config") or config
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.tokens": [f"<{i}>" for i in range(config["vocab_size"])],
        "tokenizer.ggml.mask_token_id": inside["mask_token_id"],
        "block_size": config["block_size"],
        "target_layers": [i + 1 for i in inside["target_layer_ids"]],
    }
    scales = {"output_multiplier": "logit_scale", "final_logit_softcapping": ""}
    for old, new in (scales | {"input_embedding_scale": "embedding_scale"}).items():
        if old in inside:
            values[new or old] = inside[old]
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        if key in inside:
            values[key] = inside[key]
    if config.get("use_sliding_window"):
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        values["attention.sliding_window"] = config["sliding_window"]
        values["attention.sliding_window_pattern"] = slides
    if "is_causal" in config:
        values["attention.causal"] = config["is_causal"]
    return values | more


def write_blocks(
    path: Path, tensors: Tensors, config: Mapping[str, Any], kind: str = "F32", **more: Any
) -> Path:
    """A head of blocks as DFlashModel and DSparkModel write it; ``more`` is metadata."""
    named = {block_name(name): value for name, value in tensors.items() if name != "d2t"}
    if "d2t" in tensors:
        named["d2t"] = tensors["d2t"] + np.arange(len(tensors["d2t"]))
    return write_file(path, "dflash", block_values(config, **more), named, kind)


OF_QWEN = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
ARCHITECTURES = {
    ("qwen3_next", True): "QWEN3NEXT",
    ("qwen3_5", False): "QWEN35",
    ("qwen3_5", True): "QWEN35MOE",
    ("glm4_moe", True): "GLM4_MOE",
    ("glm4_moe_lite", True): "DEEPSEEK2",
    ("glm_moe_dsa", True): "GLM_DSA",
}
"""Architectures by the model's type and whether its layer has experts."""
NEXTN = ("eh_proj", "enorm", "hnorm", "shared_head", "embed_tokens")


def merged(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of a layer in one tensor each."""
    found: dict[str, Any] = {}
    for name, value in tensors.items():
        one = re.match(r"(.*\.experts\.)(\d+)\.(.*)", name)
        if one is None:
            found[name] = value
        else:
            found.setdefault(one[1] + one[3], []).append(value)
    return {n: np.stack(v) if isinstance(v, list) else v for n, v in found.items()}


def mtp_tensors(
    architecture: str, tensors: Tensors, config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The MTP layer of a model as the converter of its family writes it."""
    num_layers = config["num_hidden_layers"]
    is_qwen = architecture.startswith("QWEN")
    found = {}
    for name, value in merged(dict(tensors)).items():
        if is_qwen:
            one = re.match(r"mtp\.(?:layers\.0\.)?((\w+).*)", name)
            part = one[1] if ".layers." in name else one[1].replace(one[2], OF_QWEN[one[2]], 1)
            name = f"model.layers.{num_layers}.{part}"
            value = value + 1 if name.endswith("norm.weight") else value
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        parts = {name: value}
        if name.endswith("kv_b_proj.weight"):
            nope = config["qk_nope_head_dim"]
            rows = value.reshape(-1, nope + config["v_head_dim"], value.shape[-1])
            keys = np.ascontiguousarray(rows[:, :nope].swapaxes(1, 2))
            values = np.ascontiguousarray(rows[:, nope:])
            parts = {name.replace("kv_b", "k_b"): keys, name.replace("kv_b", "v_b"): values}
        for own, array in parts.items():
            is_nextn = own.split(".")[3] in NEXTN
            found[mapped("GLM4_MOE" if is_nextn else architecture, own)] = array
    return found


def write_mtp(path: Path, model_type: str, tensors: Tensors, config: Mapping[str, Any]) -> Path:
    """A model's file with its MTP layer, and of the model itself a few tensors."""
    has_experts = any(".experts." in name for name in tensors)
    architecture = ARCHITECTURES[model_type, has_experts]
    ours = {name: np.zeros(4, np.float32) for name in ("blk.0.attn_norm.weight", "output.weight")}
    named = ours | mtp_tensors(architecture, tensors, config)
    values = {"block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1}
    kind = gguf.MODEL_ARCH[architecture]
    return write_file(path, gguf.MODEL_ARCH_NAMES[kind], values, named)
