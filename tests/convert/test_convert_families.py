"""Every checkpoint family in its own layout: what it is taken for, and what it becomes."""

import numpy as np
import pytest
from checkpoints import (
    CONFIG,
    FLAT,
    Tensors,
    as_midlayer,
    assert_same,
    config_of,
    eagle1_tensors,
    eagle3_tensors,
    ones,
    renamed,
    speculators,
    weights_of,
    without,
    write_safetensors,
)

from mlx_eagle.convert import convert
from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.head import Eagle3Head
from mlx_eagle.drafters.head_weights import fuse_weights


def full_vocabulary(**sizes: int) -> Tensors:
    return eagle3_tensors(draft=128, **sizes)


PLAIN = eagle3_tensors()
TWO = eagle3_tensors(num_layers=2)
FIVE = full_vocabulary(num_aux=5) | {"embed_tokens.weight": ones(128, 64)}
QK_NORM = {f"layers.0.self_attn.{part}_norm.weight": ones(16) for part in "qk"}
FC_NORM = {f"fc_norm.{i}.weight": ones(64) for i in range(3)}
OLD_FC_NORM = [(f"fc_norm.{i}", f"aux_norm_{n}") for i, n in enumerate(("low", "mid", "high"))]
BIAS = {
    "layers.0.self_attn.q_proj.bias": ones(64),
    "layers.0.self_attn.k_proj.bias": ones(32),
    "layers.0.self_attn.v_proj.bias": ones(32),
}
OUT_BIAS = {"layers.0.self_attn.o_proj.bias": ones(64)}
MLP_BIAS = {
    "layers.0.mlp.gate_proj.bias": ones(96),
    "layers.0.mlp.up_proj.bias": ones(96),
    "layers.0.mlp.down_proj.bias": ones(64),
}
EAGLE1 = eagle1_tensors()
NORMS = {name: ones(64) for name in ("embedding_norm.weight", "norm.weight")}
OUTPUTS = [ones(48, 64) / 8 for _ in range(2)]
WHOLE = [ones(128, 64) / 8 for _ in range(2)]
MEDUSA = {
    f"parallel_draft_heads.{i}.medusa_layers.{j}.linear.{kind}": ones(*shape) / 8
    for i in range(2)
    for j in range(2)
    for kind, shape in (("weight", (64, 64)), ("bias", (64,)))
}
PARALLEL = {
    name.replace("parallel_draft_heads", "parallel_heads")
    .replace("medusa_layers", "layers")
    .replace("linear.", ""): value
    for name, value in MEDUSA.items()
}
NORM_FLAGS = ("use_last_layernorm", "use_input_layernorm_in_first_layer")

# name, tensors in their own layout, config, the tensors expected (None: the same ones), fields
CASES = {
    "original": (as_midlayer(PLAIN), FLAT, PLAIN, {"family": "eagle3"}),
    "specforge": (
        as_midlayer(PLAIN),
        CONFIG | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}},
        PLAIN,
        {"family": "specforge", "aux_boundary_ids": [2, 16, 29], "aux_ids_source": "nested+1"},
    ),
    "specforge, older names of fc_norm": (
        as_midlayer(PLAIN) | renamed(FC_NORM, *OLD_FC_NORM),
        CONFIG | {"use_aux_norm": True},
        PLAIN | FC_NORM,
        {"pre_fc_norm": "per_feature", "norm_output": False},
    ),
    "specforge, whole vocabulary with idle maps": (
        as_midlayer(full_vocabulary())
        | {"d2t": np.zeros(128, np.int64), "t2d": np.ones(128, bool)},
        CONFIG | {"draft_vocab_size": None},
        full_vocabulary(),
        {"draft_vocab_size": 128, "has_d2t": False, "lm_head_source": "file"},
    ),
    "EAGLE-3.1": (
        PLAIN | FC_NORM,
        CONFIG | {"fc_norm": True, "norm_output": True},
        None,
        {"pre_fc_norm": "per_feature", "norm_output": True},
    ),
    "speculators": (
        without(PLAIN, "lm_head.weight") | {"verifier_norm.weight": ones(64)},
        speculators(eagle_aux_hidden_state_layer_ids=[2, 16, 32]),
        without(PLAIN, "lm_head.weight"),
        {
            "family": "speculators",
            "norm_before_residual": True,
            "aux_boundary_ids": [2, 16, 32],
            "aux_ids_source": "top-level",
            "lm_head_source": "target_rows",
            "embed_source": "target",
            "speculative_tokens_hint": 5,
            "rope": {"type": "default", "theta": 10000.0, "dims": 16, "scaling": None},
        },
    ),
    "speculators, all norms": (
        PLAIN | {"input_norm.weight": ones(192)},
        speculators(norm_before_fc=True, norm_output=True),
        None,
        {"pre_fc_norm": "concat", "norm_output": True},
    ),
    "speculators, qwen3 layer, biases, windows": (
        PLAIN | QK_NORM | BIAS | OUT_BIAS | MLP_BIAS,
        speculators(
            {
                "model_type": "qwen3",
                "layer_types": ["sliding_attention"],
                "sliding_window": 4,
                "use_sliding_window": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            }
        ),
        None,
        {
            "qk_norm": True,
            "attention_bias": True,
            "attention_out_bias": True,
            "mlp_bias": True,
            "sliding_window": 4,
            "full_attention_layers": [],
        },
    ),
    "speculators, two layers of two kinds": (
        renamed(TWO, ("layers.1.hidden_norm", "layers.1.input_layernorm")),
        speculators(
            {
                "num_hidden_layers": 2,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            }
        ),
        TWO,
        {
            "num_layers": 2,
            "sliding_window": 8,
            "full_attention_layers": [1],
            "layer_input": "first",
        },
    ),
    "speculators, as a difference to class defaults": (
        PLAIN,
        {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {
                "model_type": "llama",
                "hidden_size": 64,
                "vocab_size": 128,
                "head_dim": 16,
                "num_hidden_layers": 1,
            },
            "norm_before_residual": False,
        },
        None,
        {"num_heads": 4, "num_kv_heads": 2, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
    ),
    "ModelOpt": (
        without(PLAIN, "t2d"),
        CONFIG | {"eagle_config": {"use_last_layernorm": True, "next_layer_regular": True}},
        without(PLAIN, "t2d"),
        {"family": "modelopt", "final_norm": True},
    ),
    "ModelOpt, Megatron names, two layers": (
        renamed(TWO, ("layers.", "midlayer.")),
        CONFIG | {"architectures": ["LlamaForCausalLMEagle3Deep"]},
        TWO,
        {"num_layers": 2},
    ),
    "ModelOpt, Megatron's name for the first norm": (
        renamed(PLAIN, ("layers.0.input_layernorm.", "enorm."), ("layers.0.", "midlayer.")),
        CONFIG,
        PLAIN,
        {},
    ),
    "ModelOpt, whole lm_head": (
        PLAIN | {"lm_head.weight": full_vocabulary()["lm_head.weight"]},
        CONFIG,
        PLAIN
        | {"lm_head.weight": full_vocabulary()["lm_head.weight"][PLAIN["d2t"] + np.arange(48)]},
        {"draft_vocab_size": 48},
    ),
    "ModelOpt, no lm_head": (
        without(PLAIN, "lm_head.weight", "d2t", "t2d"),
        CONFIG | {"draft_vocab_size": None},
        None,
        {"lm_head_source": "target", "draft_vocab_size": 128, "has_d2t": False},
    ),
    "ModelOpt, the target's final state": (
        without(PLAIN, "fc.weight", "t2d"),
        CONFIG | {"eagle_config": {"use_aux_hidden_state": False}},
        without(PLAIN, "fc.weight", "t2d"),
        {"uses_aux": False, "fc_input": "none", "num_aux": 1, "target_hidden_size": 64},
    ),
    "ModelOpt, no final and no embedding norm": (
        without(PLAIN, "norm.weight", "layers.0.input_layernorm.weight"),
        CONFIG | {"eagle_config": dict.fromkeys(NORM_FLAGS, False)},
        None,
        {"final_norm": False, "embedding_norm": False},
    ),
    "AngelSlim": (
        as_midlayer(PLAIN),
        CONFIG
        | {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        },
        PLAIN,
        {"family": "angelslim", "lm_head_source": "file"},
    ),
    "DeepSpec": (
        FIVE | QK_NORM,
        {
            **FLAT,
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            "draft_vocab_size": None,
            "head_dim": 16,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "num_target_layers": 36,
            "ttt_length": 7,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        None,
        {
            "family": "deepspec",
            "num_aux": 5,
            "aux_boundary_ids": [2, 10, 18, 26, 34],
            "aux_ids_source": "target_layer_ids+1",
            "has_d2t": False,
            "embed_source": "file",
            "qk_norm": True,
        },
    ),
    "NeMo": (
        {
            name if name in ("lm_head.weight", "d2t", "t2d") else f"model.{name}": value
            for name, value in PLAIN.items()
        },
        CONFIG
        | {
            "architectures": ["LlamaEagle3DraftModel"],
            "num_hidden_layers": 42,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": None,
            "rope_theta": 1e6,
        },
        PLAIN,
        {"family": "nemo", "hidden_act": "gelu_pytorch_tanh", "num_layers": 1},
    ),
    "EAGLE-1": (
        EAGLE1 | {"embed_tokens.weight": ones(128, 64)},
        FLAT | {"draft_vocab_size": None, "rope_theta": 5e5},
        EAGLE1,
        {
            "family": "eagle-1",
            "uses_aux": False,
            "fc_input": "embedding_and_state",
            "layer_input": "none",
            "fc_bias": True,
            "state_norm": False,
            "final_norm": False,
            "embed_source": "target",
            "lm_head_source": "target",
        },
    ),
    "EAGLE-2 without a bias, with biases of Qwen2": (
        without(EAGLE1, "fc.bias") | BIAS,
        FLAT | {"draft_vocab_size": None, "bias": False, "qkv_bias": True},
        None,
        {"family": "eagle-1", "fc_bias": False, "attention_bias": True},
    ),
    "EAGLE-1 of speculators, with norms": (
        renamed(EAGLE1, ("fc.", "fusion_layer."), ("layers.0.", "transformer."))
        | {
            "transformer.input_layernorm.weight": ones(64),
            "post_embedding_layernorm.weight": NORMS["embedding_norm.weight"],
            "pre_lm_head_layernorm.weight": NORMS["norm.weight"],
        },
        speculators(speculators_model_type="eagle", fusion_bias=True, layernorms=True)
        | {"draft_vocab_size": None},
        None,
        {
            "family": "eagle-1",
            "fusion_norm": True,
            "state_norm": True,
            "final_norm": True,
            "norm_output": False,
            "fc_bias": True,
        },
    ),
    "AngelSlim, rows that tell when to stop thinking": (
        as_midlayer(PLAIN | {"fc.weight": np.concatenate([PLAIN["fc.weight"], ones(3, 192)])}),
        CONFIG
        | {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "early_stop_method": "confidence_progress_remain",
        },
        PLAIN,
        {"family": "angelslim", "hidden_size": 64},
    ),
    "AngelSlim, such rows without a word in the config": (
        as_midlayer(PLAIN | {"fc.weight": np.concatenate([PLAIN["fc.weight"], ones(3, 192)])}),
        CONFIG | {"architectures": ["Eagle3LlamaForCausalLM"]},
        PLAIN,
        {"family": "angelslim", "hidden_size": 64},
    ),
    "a window in a flat config, with an entry for the one draft layer": (
        as_midlayer(PLAIN),
        CONFIG | {"layer_types": ["sliding_attention"], "sliding_window": 512},
        PLAIN,
        {"sliding_window": 512, "full_attention_layers": []},
    ),
    "layer types of a target that the config was copied from": (
        as_midlayer(PLAIN),
        CONFIG | {"layer_types": ["sliding_attention"] * 32, "sliding_window": 512},
        PLAIN,
        {"sliding_window": None},
    ),
    "a window that is turned off": (
        as_midlayer(PLAIN),
        CONFIG
        | {
            "layer_types": ["sliding_attention"],
            "sliding_window": 512,
            "use_sliding_window": False,
        },
        PLAIN,
        {"sliding_window": None},
    ),
    "ModelOpt, parallel heads with one output matrix": (
        without(PLAIN, "t2d") | MEDUSA | {"parallel_draft_heads.lm_head.weight": OUTPUTS[0]},
        CONFIG | {"eagle_config": {"parallel_draft_step": 3, "use_last_layernorm": True}},
        without(PLAIN, "t2d") | PARALLEL | {"parallel_outputs.0.weight": OUTPUTS[0]},
        {
            "family": "modelopt",
            "num_parallel_heads": 2,
            "parallel_head_layers": 2,
            "parallel_head_bias": True,
            "parallel_outputs": 1,
        },
    ),
    "ModelOpt, parallel heads with whole matrices each": (
        without(PLAIN, "t2d")
        | MEDUSA
        | {f"parallel_draft_heads.{i}.lm_head.weight": WHOLE[i] for i in range(2)},
        CONFIG | {"eagle_config": {"parallel_draft_step": 3, "use_last_layernorm": True}},
        without(PLAIN, "t2d")
        | PARALLEL
        | {
            f"parallel_outputs.{i}.weight": WHOLE[i][PLAIN["d2t"] + np.arange(48)]
            for i in range(2)
        },
        {"num_parallel_heads": 2, "parallel_outputs": 2},
    ),
    "wider than its target": (
        as_midlayer(eagle3_tensors(target_size=32)) | {"embed_tokens.weight": ones(128, 64)},
        CONFIG | {"target_hidden_size": 32},
        None,
        {"hidden_size": 64, "target_hidden_size": 32, "num_aux": 3},
    ),
    "heads wider than the state": (
        eagle3_tensors(dim=32),
        CONFIG | {"head_dim": 32},
        None,
        {"head_dim": 32},
    ),
    "no t2d": (without(PLAIN, "t2d"), CONFIG, None, {}),
    "no d2t": (without(PLAIN, "d2t"), CONFIG, PLAIN, {"has_d2t": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_family(tmp_path, capsys, case):
    native, config, expected, fields = CASES[case]
    folder, out = write_safetensors(tmp_path / "source", config, native), tmp_path / "out"
    convert(str(folder), str(out), quantize=False)
    if case == "wider than its target":
        expected = renamed(native, ("midlayer.", "layers.0."))
    if case == "EAGLE-1 of speculators, with norms":
        extra = {"layers.0.hidden_norm.weight": native["transformer.input_layernorm.weight"]}
        expected = EAGLE1 | NORMS | extra
    assert_same(weights_of(out), native if expected is None else expected)
    written = config_of(out)
    assert {key: written[key] for key in fields} == fields
    capsys.readouterr()


@pytest.mark.parametrize("case", CASES)
def test_the_runtime_loads_it(tmp_path, case):
    """Every weight has its place in the head, and every place its weight."""
    native, config, _, _ = CASES[case]
    folder, out = write_safetensors(tmp_path / "source", config, native), tmp_path / "out"
    convert(str(folder), str(out), quantize=False)
    written, weights = config_of(out), weights_of(out)
    head = Eagle3Head(Eagle3Config.from_dict(written))
    weights.pop("d2t", None)
    strict = written["lm_head_source"] != "target_rows"  # rows that only a target has
    head.load_weights(list(fuse_weights(weights, written["num_layers"]).items()), strict=strict)
