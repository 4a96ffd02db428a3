"""Names that llama.cpp gives to drafters in GGUF files, and what undoes its converter's changes.

A row per architecture (``general.architecture``). Heads get the names of published safetensors,
MTP layers those of a folder of such layers. From ggml-org/llama.cpp: gguf-py/gguf/constants.py,
conversion/qwen.py (DFlash2: pull request 27342), conversion/glm.py at 051139f5,
conversion/deepseek.py at 01a723dc, and src/models/dflash.cpp at 01b78a15.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_eagle.drafters.block_config import MUSE, MUSE_TYPE
from mlx_eagle.drafters.kind import Tensor
from mlx_eagle.system.fields import INT_LIST, LIST, is_whole, shown

from .stored import LazyTensor, Refused, Stored

Names = Mapping[str, str]


def _with(prefix: str, *tables: Names) -> dict[str, str]:
    return {old: prefix + new for table in tables for old, new in table.items()}


ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
MLP = {
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{part}_exps": f"mlp.switch_mlp.{part}_proj" for part in ("gate", "up", "down")},
}
SHARED = {f"ffn_{part}_shexp": f"{part}_proj" for part in ("gate", "up", "down")}
CONVOLUTIONS = {
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
    "attn_sinks.weight": "self_attn.attention_sink_bias",
}
TABLES = {"fc": "fc", "token_embd": "embed_tokens", "output": "lm_head", "output_norm": "norm"}
BLOCK_TABLES = {
    "enc.output_norm": "hidden_norm",
    "selector_predecessor": "candidate_selector.predecessor_codebook",
    "selector_successor": "candidate_selector.successor_codebook",
    "selector_hidden": "candidate_selector.hidden_projection",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
}
ONE_ROW = ("confidence_head.proj.weight", "mlp.shared_expert_gate.weight")
"""Matrices of one row, which llama.cpp's quantizer writes as vectors."""

COMMON_KEYS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
EAGLE_KEYS = {
    **COMMON_KEYS,
    **{k: k for k in ("norm_before_fc", "norm_before_residual", "target_hidden_size")},
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "block_count": "num_hidden_layers",
    "rope.dimension_count": "rotary_dim",
    "target_layers": "eagle_aux_hidden_state_layer_ids",
}
BLOCK_KEYS = {
    **COMMON_KEYS,
    **{k: k for k in ("block_size", "final_logit_softcapping", "sample_from_anchor")},
    "attention.causal": "is_causal",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "layer_types",
    "attention.value_scale": "attention_value_scale",
    "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier",
    "selector_top_k": "selector_top_k",
    "target_layers": "target_layer_ids",
    "tokenizer.ggml.mask_token_id": "mask_token_id",
}
MODEL_KEYS = {key: key for key in ("block_count", "nextn_predict_layers")}


def block_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a head of blocks as it is published, from what the file says.

    Layers are counted by their input, not output, and the pattern is one of flags. A scale of the
    embeddings that is the one of Gemma is the target's own. Muse's assistant says nothing of
    causality (conversion/muse_glimmer.py), and masks with a token of its own.
    """
    for key in ("block_size", "target_layer_ids", "mask_token_id"):
        if key not in config:
            raise Refused(f"it says no {key}: convert the head again with a newer llama.cpp")
    for key, kind in (("target_layer_ids", INT_LIST), ("layer_types", LIST)):
        if key in config and not kind.holds(config[key]):
            raise Refused(f"its {key} is {shown(config[key])}, expected {kind.words}")
    if config.get("attention_value_scale", 1) != 1:
        raise Refused("it scales values (attention.value_scale), and no head here does")
    made = config | {"target_layer_ids": [i - 1 for i in config["target_layer_ids"]]}
    if "layer_types" in config:
        kinds = ("full_attention", "sliding_attention")
        made["layer_types"] = [kinds[bool(slides)] for slides in config["layer_types"]]
    scale = made.pop("input_embedding_scale", None)
    if scale is not None and scale != _as_float32(config.get("hidden_size")):
        made["input_embedding_scale"] = scale
    if config["mask_token_id"] == MUSE["mask_token_id"] and "is_causal" not in config:
        made["model_type"] = MUSE_TYPE
    # The scaling of its rope is the drafter's own, for llama.cpp applies it.
    return made | {"dflash_config": {"projector_type": "dspark"}}


def _as_float32(hidden_size: Any) -> float | None:
    is_size = is_whole(hidden_size) and hidden_size >= 0
    return float(str(np.float32(hidden_size**0.5))) if is_size else None


@dataclass(frozen=True)
class Layout:
    """Files of one architecture: what stands here for their metadata keys and tensors.

    In names of ``blocks``, parts of blk.N, {} is the number of the block; in a model's file, whose
    MTP layers alone are read, counted from the first of these. ``config`` makes the published
    config. Of norms that are ``plus_one`` one is taken off.
    """

    keys: Names
    blocks: Names
    tables: Names = field(default_factory=dict)
    config: Callable[[dict[str, Any]], dict[str, Any]] = dict
    is_model: bool = False
    plus_one: bool = False

    def first_block(self, architecture: str, config: Mapping[str, Any]) -> int:
        """The number of the first block that is read; Refused where a model has no MTP layer."""
        if not self.is_model:
            return 0
        total = config.get("block_count")
        own = config.get("nextn_predict_layers")
        if not is_whole(total) or not is_whole(own) or not 0 < own <= total:
            raise Refused(
                f"it holds a model of the architecture {architecture} without MTP layers "
                f"({architecture}.nextn_predict_layers): take a file that has them"
            )
        if own > 1:
            raise Refused(f"it holds {own} MTP layers, and files of one are read")
        return total - own

    def new_name(self, name: str, first_block: int) -> str | None:
        """The published name of a tensor; None: it is not read; its own where a head has none."""
        block = re.fullmatch(r"blk\.(\d{1,4})\.(.+)", name)
        if self.is_model and (block is None or int(block[1]) < first_block):
            return None
        names = self.tables if block is None else self.blocks
        part = name if block is None else block[2]
        number = 0 if block is None else int(block[1]) - first_block
        stem = part if part in names else part.rpartition(".")[0]
        if stem in names:
            return names[stem].format(number) + part[len(stem) :]
        return None if self.is_model else name

    def undone(self, tensors: Mapping[str, Stored]) -> dict[str, Tensor]:
        """The tensors, by published names, as they were before llama.cpp's converter."""
        found: dict[str, Tensor] = dict(tensors)
        for name, tensor in tensors.items():
            if name.endswith(ONE_ROW) and len(tensor.shape) == 1:
                found[name] = replace(tensor, shape=(1, *tensor.shape))
            elif self.plus_one and "norm" in name:
                found[name] = LazyTensor(tensor, lambda t: t.astype(mx.float32) - 1, tensor.shape)
            elif name == "d2t":  # absolute ids -> what each differs by from its own number
                found[name] = LazyTensor(tensor, lambda t: t - mx.arange(len(t)), tensor.shape)
            elif name.endswith("self_attn.k_b_proj.weight"):
                values = name.replace("k_b_proj", "v_b_proj")
                if values in tensors:
                    joined = _joined(found.pop(name), found.pop(values))
                    found[name.replace("k_b_proj", "kv_b_proj")] = joined
        return found


def _joined(keys: Tensor, values: Tensor) -> LazyTensor:
    """kv_b_proj of latent attention, (H (d + e), r), from its halves (H, r, d) and (H, e, r)."""
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != values.shape[::2]:
        raise Refused(f"attn_k_b is {shown(keys.shape)} and attn_v_b {shown(values.shape)}")
    heads, rank, width = keys.shape

    def both(own: mx.array) -> mx.array:
        return mx.concatenate([own.swapaxes(1, 2), values.read()], axis=1).reshape(-1, rank)

    return LazyTensor(keys, both, (heads * (width + values.shape[1]), rank))


QWEN = Layout(
    MODEL_KEYS,
    {
        "nextn.eh_proj": "fc",
        "nextn.enorm": "pre_fc_norm_embedding",
        "nextn.hnorm": "pre_fc_norm_hidden",
        "nextn.shared_head_norm": "norm",
        **_with("layers.{}.", ATTENTION, HEAD_NORMS, MLP, EXPERTS),
        **_with("layers.{}.mlp.shared_expert.", SHARED),
        "ffn_gate_inp_shexp": "layers.{}.mlp.shared_expert_gate",
    },
    is_model=True,
    plus_one=True,
)
DEEPSEEK = Layout(
    MODEL_KEYS,
    {
        **{f"nextn.{part}": f"model.{part}" for part in ("eh_proj", "enorm", "hnorm")},
        "nextn.shared_head_norm": "model.shared_head_norm",
        **_with("model.mtp_block.", ATTENTION, HEAD_NORMS, LATENT, MLP, EXPERTS),
        **_with("model.mtp_block.mlp.shared_experts.", SHARED),
    },
    is_model=True,
)
LAYOUTS = {
    "eagle3": Layout(
        EAGLE_KEYS,
        _with("layers.{}.", ATTENTION, {"attn_norm_2": "hidden_norm"}, MLP),
        TABLES | {"enc.output_norm": "input_norm"},
    ),
    "dflash": Layout(
        BLOCK_KEYS,
        _with("layers.{}.", ATTENTION, HEAD_NORMS, MLP, CONVOLUTIONS),
        TABLES | BLOCK_TABLES,
        config=block_config,
    ),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), QWEN),
    **dict.fromkeys(("glm4moe", "deepseek2", "glm-dsa"), DEEPSEEK),
}


def layout_of(architecture: Any) -> Layout:
    """The layout of an architecture; Refused, which names all that are read, for another."""
    if isinstance(architecture, str) and architecture in LAYOUTS:
        return LAYOUTS[architecture]
    models = ", ".join(name for name, layout in LAYOUTS.items() if layout.is_model)
    raise Refused(
        f"it holds a model of the architecture {shown(architecture)} (general.architecture); read "
        "are heads (eagle3; dflash, which are DFlash, DFlash2 and DSpark), and the MTP layers of "
        f"{models}"
    )
