"""Which model files of mlx-lm work with speculation: a tiny model of each, and what it does.

``python tests/architectures.py`` measures every architecture and rewrites ARCHITECTURES.md
beside this file; test_architectures.py holds the code to that table.

Knows what the config fields of mlx-lm's model files are called; knows nothing of checkpoints.
"""

import dataclasses
import importlib
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.models
from helpers import SCRIPTS, ScriptedDrafter, plain
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import bitlinear_layers
from mlx_lm.models.cache import make_prompt_cache
from test_tree import ScriptedTreeDrafter

import mlx_eagle
from mlx_eagle.loop import speculative_generate_step
from mlx_eagle.target import Target
from mlx_eagle.tree import TreeShape

TABLE = Path(__file__).with_name("ARCHITECTURES.md")
VOCAB = 96
PROMPT = [5, 17, 3, 88, 41, 2, 60]
SECOND_PROMPT = [7, 9, 11, 30]
WINDOW = 8  # of sliding and chunked attention: shorter than prompt and text together
TREE = "2x3:6"
COLUMNS = ("tap", "chain", "tree")
OUR_FILES = str(Path(mlx_eagle.__file__).parent)
MOST_PARAMETERS = 4_000_000

SLIDING, FULL = "sliding_attention", "full_attention"
ALTERNATING = [SLIDING, FULL] * 2

SIZES = {
    name: value
    for value, names in [
        # widths
        (64, "hidden_size d_model model_dim n_embd hidden_dim dim_model_base"),
        (96, "intermediate_size intermediate_size_mlp ffn_hidden_size"),
        (96, "ff_intermediate_size n_inner"),
        (192, "mlp_hidden_size"),
        (VOCAB, "vocab_size num_vocab embedding_size"),
        (4, "num_hidden_layers num_layers n_layers n_layer num_transformer_layers"),
        # attention
        (4, "num_attention_heads num_heads n_heads n_head"),
        (2, "num_key_value_heads num_kv_heads n_kv_heads"),
        (16, "head_dim kv_channels query_pre_attn_scalar"),
        (ALTERNATING, "layer_types"),
        (2, "sliding_window_pattern"),
        (WINDOW, "sliding_window window_size sliding_window_size"),
        (WINDOW, "attention_window_size attention_chunk_size"),
        (0.25, "attention_multiplier"),
        # multi-head latent attention and its indexer
        (32, "q_lora_rank"),
        (16, "kv_lora_rank v_head_dim index_head_dim"),
        (8, "qk_rope_head_dim qk_nope_head_dim index_topk"),
        (2, "index_n_heads"),
        # positions
        (2048, "max_position_embeddings n_positions n_ctx block_size model_max_length"),
        (10000, "rope_theta swa_rope_theta rotary_emb_base rope_local_base_freq"),
        (0.5, "partial_rotary_factor rotary_pct"),
        (8, "rotary_dim"),
        (None, "rope_scaling"),
        # norms
        (1e-5, "rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon"),
        # experts
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k"),
        (1, "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts"),
        (32, "moe_intermediate_size expert_ffn_hidden_size share_expert_dim"),
        (32, "shared_intermediate_size shared_expert_intermediate_size"),
        (32, "moe_shared_expert_intermediate_size"),
        (1, "first_k_dense_replace num_dense_layers moe_layer_freq decoder_sparse_step"),
        (1, "n_group topk_group zero_expert_num"),
        ([], "mlp_only_layers"),
        ("noaux_tc", "topk_method"),
        ("sigmoid", "scoring_func"),
        ("identity", "zero_expert_type"),
        # recurrent layers
        (2, "layer_group_size full_attention_interval"),
        (1, "group_norm_size n_groups mamba_n_groups"),
        (4, "linear_num_value_heads mamba_num_heads mamba_n_heads"),
        (2, "linear_num_key_heads mamba_expand conv_window"),
        (16, "linear_key_head_dim linear_value_head_dim mamba_head_dim mamba_d_head"),
        (16, "state_size ssm_state_size mamba_d_state"),
        (4, "linear_conv_kernel_dim conv_kernel conv1d_width mamba_d_conv"),
        (3, "conv_L_cache"),
        (8, "time_step_rank"),
        ([0.001, 100.0], "time_step_limit"),
        # switches, multipliers, and what else a config must say
        (True, "conv_bias use_conv_bias mamba_conv_bias linear_allow_neg_eigval"),
        (True, "use_qk_norm norm_topk_prob"),
        (False, "attention_bias mlp_bias use_bias use_qkv_bias mamba_proj_bias"),
        (False, "tie_word_embeddings"),
        (1.0, "routed_scaling_factor embedding_multiplier residual_multiplier"),
        (1.0, "logits_scaling scale_emb"),
        (1.4, "scale_depth"),
        ("silu", "hidden_act"),
    ]
    for name in names.split()
}
"""Tiny values by field name; a config takes those that its ModelArgs has."""

RECURRENT_THEN_FULL = ["linear_attention", "full_attention"] * 2
KIMI_DELTA = {
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
ROPE_PARAMETERS = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA4_ROPE = {
    **ROPE_PARAMETERS,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": WINDOW,
}
ROPE_BY_LAYER_TYPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "default", "rope_theta": 500000.0},
}

GEMMA4_LARGE = {
    # As published, but for sizes: five sliding layers to a full one, keys that are also the
    # values, neither shared layers nor inputs per layer.
    "num_hidden_layers": 6,
    "layer_types": [SLIDING] * 5 + [FULL],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "tie_word_embeddings": True,
}

OVERRIDES = {
    # Where the common values do not fit a file, or would leave its machinery unused. None
    # is passed on.
    "afm7": {"num_kv_reuse_layers": 2},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "num_hidden_layers": 4},
    "bailing_moe_linear": {"num_key_value_heads": 4},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {
        "topk_method": "greedy",
        "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v41": {
        "head_dim": 32,
        "index_head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "scoring_func": "sqrtsoftplus",
        "rms_norm_eps": 1e-20,
        "compress_ratios": [0, 2, 2, 2],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
        "index_topk": 4,
        "hc_mult": 2,
    },
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma4 (26B-A4B)": {
        **GEMMA4_LARGE,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "num_global_key_value_heads": 2,
    },
    "gemma4 (31B)": GEMMA4_LARGE,
    "gear": {"layer_types": ["conv_mixer", SLIDING, "conv_mixer", FULL]},
    "gemma3n": {
        "layer_types": ALTERNATING + [SLIDING, FULL],
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.5, 0.5, 0, 0, 0, 0],
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 3,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "layer_types": ALTERNATING + [SLIDING, FULL],
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    },
    "glm_moe_dsa": {"rope_parameters": ROPE_PARAMETERS},
    "gpt_oss (20b)": {
        # As published, but for sizes.
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gptj": {"rotary_dim": 8},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 2.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": {
        "linear_attn_config": KIMI_DELTA,
        "attn_res_block_size": 2,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
    },
    "kimi_linear": {"linear_attn_config": KIMI_DELTA},
    "lfm2": {
        "layer_types": None,
        "full_attn_idxs": [1, 3],
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {"layer_types": None, "full_attn_idxs": [1, 3], "use_expert_bias": True},
    "llama": {"layer_types": None},
    "llama (sliding window)": {"layer_types": ALTERNATING},
    "longcat_flash": {
        "attention_method": "MLA",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 2,
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "llama4": {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    "mamba": {"intermediate_size": 128},
    "mellum": {"rope_parameters": ROPE_BY_LAYER_TYPE},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minicpm3": {"rope_scaling": {"type": "longrope"}},
    "minimax_m3_vl": {
        "dense_intermediate_size": 96,
        "moe_layer_freq": [0, 1, 1, 1],
        "layer_types": ["full_attention", "sparse", "sparse", "full_attention"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral3": {"rope_parameters": LLAMA4_ROPE},
    "mistral4": {"rope_parameters": LLAMA4_ROPE},
    "muse_glimmer": {"output_multiplier": 1.0},
    "muse_spark": {
        "post_norm_eps": 1e-8,
        "rope_parameters": ROPE_PARAMETERS,
        "layer_rope_theta": [10000.0, 0.0, 10000.0, 0.0],
        "final_logit_softcapping": 20.0,
        "output_multiplier": 1.0,
        "moe_hidden_size": 32,
        "num_shared_experts": 0,
    },
    "nanbeige (two loops)": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": {
        "layer_types": None,
        "hybrid_override_pattern": list("M*EM-*"),
        "intermediate_size": 96,
    },
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
        ]
    },
    "olmo_hybrid": {"layer_types": RECURRENT_THEN_FULL},
    "openelm": {
        "num_query_heads": [4, 4, 4, 4],
        "num_kv_heads": [2, 2, 2, 2],
        "ffn_dim_divisor": 8,
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "hidden_size": 32,
        "vocab_size": 100352,  # it writes to the logits of tokens up to there, unchecked
    },
    "plamo": {"n_shared_head": 2},
    "prism_hadamard_qwen35": {"num_experts": 0, "intermediate_size": 512},
    "qwen3_5": {"num_experts": 0},
    "qwen3_5_moe": {"num_experts": 4},
    "recurrent_gemma": {
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "smollm3": {"layer_types": None},
    "spark2_5": {"hidden_act": "gelu", "rope_parameters": ROPE_BY_LAYER_TYPE},
    "step3p5": {"num_attention_groups": 2},
}

TOP_LEVEL = {
    # Fields of the outer config, where text_config is not all.
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": f"model.layers.{i}.mlp.down_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 512,
            }
            for i in range(4)
        ],
    },
}

WRAPPED = {
    # Files whose text_config is another file's config.
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "prism_hadamard_qwen35": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}

SEEDS = {"apertus": 4, "gptj": 1, "phi": 2, "plamo3": 1, "starcoder2": 3, "talkie": 4}
"""Where the seed 0 gives a text without life."""


NOTES = {
    # What a reader should know, whatever the measurement says.
    "bitnet": "measured with its Metal kernel's product done in plain operations",
    "deepseek_v41": "several residual streams side by side (hyper-connections)",
    "gemma3n": "several residual streams side by side (AltUp)",
    "iquestloopcoder": "it runs the parts of its layers, twice, and never a layer",
    "kimi_k3": "a tap is the running sum of a block of layers, not the whole residual stream",
    "muse_spark": "measured with its Metal kernels done in plain operations",
    "nanbeige (two loops)": "it runs its layers twice; a tap shows the second time",
    "olmo": "it adds a mask that is the word causal; measured without the ai2-olmo package, which "
    "mlx-lm asks for and does not use",
    "phi3small": "its block-sparse layers add a mask of truth values, so that rows see later rows",
    "plamo3": "several rows see a window one longer than one row does",
    "talkie": "its layers take the embeddings first and the residual stream second",
}


def _ternary_product(self, x: mx.array, packed: mx.array) -> mx.array:
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


def model_file(name: str) -> str:
    """The model file of an architecture: a variant is called "file (what is special)"."""
    return name.split(" ")[0]


@lru_cache
def load(file: str) -> ModuleType:
    """The module of a model file."""
    # olmo.py leaves the interpreter without this package, but uses nothing of it.
    sys.modules.setdefault("hf_olmo", ModuleType("hf_olmo"))
    module = importlib.import_module(f"mlx_lm.models.{file}")
    if not mx.metal.is_available():
        if file == "bitnet":
            bitlinear_layers.BitLinear.execute_matmul_kernel = _ternary_product
        if file == "muse_spark":
            for stand_in in MUSE_SPARK_KERNELS:
                setattr(module, stand_in.__name__, stand_in)
    return module


def model_files() -> list[str]:
    """The model files of the installed mlx-lm."""
    names = sorted(info.name for info in pkgutil.iter_modules(mlx_lm.models.__path__))
    return [n for n in names if hasattr(load(n), "ModelArgs") and hasattr(load(n), "Model")]


def tiny_config(name: str) -> dict:
    """A config for an architecture, as its ModelArgs.from_dict takes it."""
    file = model_file(name)
    module = load(file)
    overrides = {**OVERRIDES.get(file, {}), **OVERRIDES.get(name, {})}
    nested = [n for n in ("TextConfig", "TextArgs", "TextModelArgs") if hasattr(module, n)]
    outer = {"model_type": file, "vocab_size": VOCAB, **TOP_LEVEL.get(file, {})}
    if file in WRAPPED:
        text = tiny_config(WRAPPED[file])
        return {**outer, "text_config": {**text.get("text_config", text), **overrides}}
    args_class = getattr(module, nested[0] if nested else "ModelArgs")
    fields = {field.name for field in dataclasses.fields(args_class)}
    text = {key: value for key, value in SIZES.items() if key in fields}
    text = {**text, "model_type": file, **overrides}
    return {**outer, "text_config": text} if nested else text


ARCHITECTURES = {
    name: tiny_config(name)
    for name in sorted({*model_files(), *OVERRIDES})
    if model_file(name) in model_files()
}
"""Every architecture with a config, variants of a file included."""


def build(name: str) -> nn.Module:
    """A tiny model with lively random weights in float32."""
    module = load(model_file(name))
    seed = SEEDS.get(name, 0)
    mx.random.seed(seed)  # some decays start at random, and keep that
    model = module.Model(module.ModelArgs.from_dict(deepcopy(ARCHITECTURES[name])))
    size = sum(p.size for _, p in tree_flatten(model.parameters()))
    assert size < MOST_PARAMETERS, f"{name} has {size} parameters: a size was left to its default"
    model.eval()
    mx.random.seed(seed)
    model.update(tree_map_with_path(_lively, model.parameters()))
    mx.eval(model.parameters())
    return model


def _lively(path: str, parameter: mx.array) -> mx.array:
    """Random values for a parameter by its kind."""
    shape, noise = parameter.shape, mx.random.normal(parameter.shape)
    if parameter.dtype == mx.uint8:  # four ternary weights a byte
        return sum(mx.random.randint(0, 3, shape).astype(mx.uint8) << 2 * i for i in range(4))
    if parameter.dtype == mx.uint32:  # packed quantized weights
        return mx.random.randint(0, 2**16, shape).astype(mx.uint32) * (2**16 + 1)
    if not mx.issubdtype(parameter.dtype, mx.floating):
        return parameter
    if parameter.ndim < 2:  # norms, biases, decays, gains: around what the model starts with
        return parameter.astype(mx.float32) + 0.25 * noise
    if "embed" in path or "wte" in path:  # small, or tied embeddings repeat the last token
        return 0.05 * noise
    width = next((n for n in reversed(shape) if n > 1), 1)
    return 2.0 * width**-0.5 * noise


@dataclass(frozen=True)
class Result:
    """What works, and the reason for all that does not."""

    tap: bool
    chain: bool
    tree: bool
    reason: str


def check(
    name: str,
    what: Collection[str] = ("tap", "chain", "tree"),
    ks: Collection[int] = (1, 3, 5),
    scripts: Collection[str] = ("all", "none", "alternating", "every length"),
    num_tokens: int = 32,
) -> Result:
    """Measure one architecture; ``num_tokens`` of text for every script and draft length k.

    What is not in ``what`` counts as not working.
    """
    model = build(name)
    drafts = [_Drafts(f"k = {k}", ScriptedDrafter, {"num_draft_tokens": k}) for k in ks]
    tree = _Drafts(f"tree {TREE}", ScriptedTreeDrafter, {"tree": TreeShape.parse(TREE)})
    texts = lru_cache(lambda: _plain_texts(model, num_tokens))
    measures = {
        "tap": lambda: _check_tap(model),
        "chain": lambda: _check_text(model, texts(), drafts, scripts),
        "tree": lambda: _check_text(model, texts(), [tree], scripts),
    }
    reasons = {key: _reason(measures[key]) for key in what}
    works = [reasons.get(key, "not measured") == "" for key in measures]
    keys: dict[str, list[str]] = {}  # by reason
    for key, reason in reasons.items():
        keys.setdefault(reason, []).append(key)
    named = [f"{', '.join(of)}: {reason}" for reason, of in keys.items() if reason]
    return Result(*works, "; ".join(named))


@dataclass(frozen=True)
class _Drafts:
    """A kind of draft: what it is called, who makes it, and the loop's arguments for it."""

    name: str
    drafter_class: type[ScriptedDrafter]
    options: dict


def _reason(measure: Callable[[], str]) -> str:
    """What ``measure`` says, or the exception it met."""
    try:
        return measure()
    except Exception as error:  # any: the walk goes on, and the table says what happened
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        if isinstance(error, ValueError) and last.filename.startswith(OUR_FILES):
            return "refused, " + re.split("[:;] ", re.sub(r" \(.*?\)", "", text))[0]
        return f"{type(error).__name__} in {last.name} of {Path(last.filename).name}: {text}"


def _check_tap(model: nn.Module) -> str:
    """The reason why taps do not show what enters each layer; "" where they do."""
    num_layers = len(model.layers)
    taps = tuple(range(num_layers + 1))
    target = Target(model, taps)
    tokens = mx.array(PROMPT)
    expected = model(tokens[None], cache=make_prompt_cache(model))[0]
    logits, features = target(tokens, make_prompt_cache(model))
    if not mx.array_equal(logits, expected):
        return "the logits change when tapped"
    if features.ndim != 2 or features.shape[0] != len(PROMPT) or features.shape[1] % len(taps):
        return f"features of shape {features.shape} for {len(PROMPT)} rows: not one vector a row"
    streams = mx.split(features, len(taps), axis=-1)
    same = [i for i in range(num_layers) if mx.array_equal(streams[i], streams[i + 1])]
    if same:
        return f"taps {same[0]} and {same[0] + 1} are equal: the first argument is no stream"
    # Another first token: the last row of the embeddings stays, and of all else changes.
    _, other = target(mx.array([1, *PROMPT[1:]]), make_prompt_cache(model))
    others = mx.split(other, len(taps), axis=-1)
    if not mx.array_equal(streams[0][-1], others[0][-1]):
        return "tap 0 depends on earlier tokens: it is not the embedding"
    if mx.array_equal(streams[0][0], others[0][0]):
        return "tap 0 does not depend on its token"
    if mx.array_equal(streams[-1][-1], others[-1][-1]):
        return "the last tap does not depend on earlier tokens"
    return ""


def _plain_texts(model: nn.Module, num_tokens: int) -> tuple[list[int], list[int]]:
    """What mlx-lm alone says to the prompt, and then to a second one on the same cache."""
    cache = make_prompt_cache(model)
    expected = plain(model, PROMPT, num_tokens, prompt_cache=cache)
    assert len(set(expected)) > 5, f"a text without life tests nothing: {expected}"
    return expected, plain(model, SECOND_PROMPT, num_tokens // 2, prompt_cache=cache)


def _check_text(
    model: nn.Module,
    texts: tuple[list[int], list[int]],
    kinds: list[_Drafts],
    scripts: Collection[str],
) -> str:
    """The reason why drafts change the text or the caches behind it; "" where they do not."""
    expected, after = texts
    text = PROMPT + expected
    for drafts in kinds:
        for script in scripts:
            cache = make_prompt_cache(model)
            drafter = drafts.drafter_class(text, SCRIPTS[script], VOCAB)
            options = {**drafts.options, "prompt_cache": cache, "max_tokens": len(expected)}
            case = f'with {drafts.name} and script "{script}"'
            steps = speculative_generate_step(mx.array(PROMPT), model, drafter, **options)
            if not _says(expected, steps):
                return f"another text {case}{_rows_say(model, text)}"
            again = plain(model, SECOND_PROMPT, len(after), prompt_cache=cache)
            if again != after:
                return f"another text in the next request {case}{_rows_say(model, text)}"
    return ""


def _says(expected: list[int], steps: Iterator[tuple[int, mx.array, bool]]) -> bool:
    """Whether the loop yields this text; the scripted drafter stops it where it does not."""
    try:
        return [token for token, _, _ in steps] == expected
    except AssertionError:
        return False


def row_difference(model: nn.Module, text: list[int], num_rows: int = 4) -> tuple[float, float]:
    """mlx-lm alone: logits of blocks of rows against row by row, and the size of the logits."""

    def run(size: int) -> mx.array:
        cache = make_prompt_cache(model)
        blocks = [text[i : i + size] for i in range(0, len(text), size)]
        return mx.concatenate([model(mx.array([block]), cache=cache)[0] for block in blocks])

    one, several = run(1), run(num_rows)
    banned = mx.isinf(one)  # tokens that a model rules out
    difference = mx.where(banned, 0.0, mx.abs(one - several))
    return difference.max().item(), mx.where(banned, 0.0, mx.abs(one)).max().item()


def _rows_say(model: nn.Module, text: list[int]) -> str:
    """Whether it is mlx-lm that treats rows run together otherwise than rows run one by one."""
    difference, size = row_difference(model, text)
    if difference < 0.01 * size:
        return ""
    return (
        "; mlx-lm is not consistent with itself: logits of rows run together and one by one "
        f"differ by {difference:.2g} of {size:.2g}"
    )


def cache_types(name: str) -> str:
    """The cache classes of an architecture, members of a CacheList in brackets."""
    kinds: dict[str, None] = {}
    for cache in make_prompt_cache(build(name)):
        members = getattr(cache, "caches", ())
        inner = ", ".join(dict.fromkeys(type(member).__name__ for member in members))
        kinds[type(cache).__name__ + (f"[{inner}]" if members else "")] = None
    return ", ".join(kinds)


def write_table() -> None:
    """Measure every architecture and write the table."""
    results = {}
    for name in ARCHITECTURES:
        results[name] = check(name)
        print(f"{name}: {results[name]}", flush=True)
    counts = {key: sum(getattr(r, key) for r in results.values()) for key in COLUMNS}
    lines = [
        "# Which architectures work",
        "",
        "Written by `python tests/architectures.py`: tiny models with random weights in float32,",
        f"mlx-lm {mlx_lm.__version__}, mlx {mx.__version__}, {mx.default_device().type.name}. "
        f"{len(model_files())} model files of mlx-lm, {len(results)} architectures (a",
        "variant of a file is named in brackets):",
        "",
        f"* tap works for {counts['tap']}: the activations entering every layer can be had, and "
        "the logits stay bit-equal;",
        f"* chain works for {counts['chain']}: drafted text and the caches behind it are those of "
        "plain greedy decoding;",
        f"* tree works for {counts['tree']}: the same with draft trees.",
        "",
        "| architecture | caches | " + " | ".join(COLUMNS) + " | reason, or what to know |",
        "|---|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for name, result in results.items():
        works = ["yes" if getattr(result, key) else "no" for key in COLUMNS]
        remark = "; ".join(filter(None, [result.reason, NOTES.get(name, "")]))
        row = [name, cache_types(name), *works, remark.replace("|", "\\|")]
        lines.append("| " + " | ".join(row) + " |")
    TABLE.write_text("\n".join(lines) + "\n")


def recorded() -> dict[str, list[str]]:
    """What the table says works, for every architecture in it."""
    rows = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) > len(COLUMNS) and cells[2] in ("yes", "no"):
            rows[cells[0]] = [key for key, cell in zip(COLUMNS, cells[2:]) if cell == "yes"]
    return rows


if __name__ == "__main__":
    write_table()
