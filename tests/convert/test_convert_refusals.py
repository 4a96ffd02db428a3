"""What is refused by name, and what contradicts itself: a sentence, and nothing written."""

import numpy as np
import pytest
from checkpoints import (
    CONFIG,
    FLAT,
    Tensors,
    config_of,
    eagle1_tensors,
    eagle3_tensors,
    ones,
    refused,
    speculators,
    without,
    write_bin,
    write_config,
    write_safetensors,
)

from mlx_eagle.convert import convert

PLAIN = eagle3_tensors()
EAGLE1 = eagle1_tensors()
MASKED = PLAIN | {"mask_hidden": ones(1, 1, 192)}

# What is refused


def dflash() -> Tensors:
    return PLAIN | {"layers.0.fc.weight": ones(64, 64)}


REFUSED = {
    "P-EAGLE without a token": (MASKED, CONFIG, "names no mask_token_id"),
    "P-EAGLE by its type": (PLAIN, speculators(speculators_model_type="peagle"), "P-EAGLE"),
    "P-EAGLE by a token": (PLAIN, CONFIG | {"ptd_token_id": 3}, "lacks mask_hidden"),
    "P-EAGLE by its name": (PLAIN, CONFIG | {"architectures": ["PEagleDraftModel"]}, "P-EAGLE"),
    "P-EAGLE with a token of no vocabulary": (
        MASKED,
        CONFIG | {"ptd_token_id": 128},
        "masks with token 128, and its vocabulary has 128; give the one it was trained with",
    ),
    "a mask of another width": (
        PLAIN | {"mask_hidden": ones(1, 1, 128)},
        CONFIG | {"ptd_token_id": 3},
        "mask_hidden of 128, expected 192",
    ),
    "DFlash": (dflash(), CONFIG | {"architectures": ["DFlashDraftModel"]}, "DFlash"),
    "DFlash by its blocks": (PLAIN, CONFIG | {"block_size": 8, "mask_token_id": 3}, "DFlash"),
    "EAGLE-4 by its name": (PLAIN, CONFIG | {"architectures": ["LlamaEagle4Model"]}, "licence"),
    "EAGLE-4 by its type": (PLAIN, speculators(speculators_model_type="eagle4"), "licence"),
    "DSpark": (PLAIN, CONFIG | {"markov_rank": 8}, "DSpark"),
    "half of latent attention": (
        PLAIN | {"layers.0.self_attn.kv_a_proj_with_mqa.weight": ones(24, 128)},
        CONFIG,
        "lacks layers.0.self_attn.kv_a_layernorm.weight",
    ),
    "parallel heads of another kind": (
        PLAIN | {"parallel_draft_heads.0.weight": ones(8, 64)},
        CONFIG,
        "parallel_draft_heads.0.weight",
    ),
    "no parallel heads": (
        PLAIN,
        CONFIG | {"eagle_config": {"parallel_draft_step": 3}},
        "parallel_draft_step 3, and the checkpoint has 0",
    ),
    "rows too many": (
        PLAIN | {"fc.weight": ones(65, 192)},
        CONFIG,
        "fc.weight of 65 x 192",
    ),
    "MTP": (PLAIN | {"enorm.weight": ones(64), "hnorm.weight": ones(64)}, CONFIG, "MTP"),
    "MTP by eh_proj": (PLAIN | {"eh_proj.weight": ones(64, 128)}, CONFIG, "MTP"),
    "MTP by a flag": (PLAIN, CONFIG | {"eagle_config": {"use_mtp_layernorm": True}}, "MTP"),
    "half a layer of Gemma-4": (
        eagle3_tensors(num_aux=5, draft=128)
        | {"layers.0.pre_feedforward_layernorm.weight": ones(64)},
        FLAT | {"target_layer_ids": [5, 17, 29, 41, 46], "draft_vocab_size": 128},
        "lacks layers.0.post_feedforward_layernorm.weight",
    ),
    "experts": (
        without(PLAIN, "layers.0.mlp.gate_proj.weight")
        | {"layers.0.mlp.experts.0.gate_proj.weight": ones(96, 64)},
        CONFIG | {"architectures": ["Qwen3MoEForCausalLMEagle3"], "num_experts": 8},
        "a draft head with experts or gated attention, which is not read; use a dense",
    ),
    "GPTQ": (PLAIN | {"fc.qweight": ones(4, 4), "fc.scales": ones(4, 4)}, CONFIG, "GPTQ"),
    "MLX's own": (PLAIN | {"fc.scales": ones(64, 3), "fc.biases": ones(64, 3)}, CONFIG, "MLX"),
    "packed without a scale": (
        without(PLAIN, "fc.weight") | {"fc.weight_packed": np.ones((64, 24), np.int32)},
        CONFIG,
        "quantized (weight_packed (I32)) and lacks its weight_scale",
    ),
    "scales of floats": (PLAIN | {"fc.weight_scale": ones(64)}, CONFIG, "weight (F32)"),
    "too few scales": (
        PLAIN | {"fc.weight": np.ones((64, 192), np.int8), "fc.weight_scale": ones(64, 5)},
        CONFIG,
        "fc.weight is 64 x 192 with scales of 64 x 5",
    ),
    "words of no bits": (
        without(PLAIN, "fc.weight")
        | {
            "fc.weight_packed": np.ones((64, 23), np.int32),
            "fc.weight_shape": np.array([64, 192]),
            "fc.weight_scale": ones(64, 6),
        },
        CONFIG,
        "64 x 192 (weight_shape), and is packed in 64 rows of 23 words",
    ),
    "a shape that is none": (
        without(PLAIN, "fc.weight")
        | {
            "fc.weight_packed": np.ones((64, 24), np.int32),
            "fc.weight_shape": np.array([32, 192]),
            "fc.weight_scale": ones(64, 6),
        },
        CONFIG,
        "said to be 32 x 192 (weight_shape)",
    ),
    "a shape that fills the words, but no head": (
        without(PLAIN, "layers.0.self_attn.q_proj.weight")
        | {
            "layers.0.self_attn.q_proj.weight_packed": np.ones((64, 16), np.int32),
            "layers.0.self_attn.q_proj.weight_shape": np.array([64, 126]),
            "layers.0.self_attn.q_proj.weight_scale": ones(64, 4),
        },
        CONFIG,
        "q_proj.weight is said to be 64 x 126 (by its weight_shape), in a head of width 64",
    ),
    "a plain model": (
        {n: v[:, :64] if ".q_proj" in n else v for n, v in without(PLAIN, "fc.weight").items()},
        CONFIG,
        "",
    ),
    "nothing known": ({"blocks.0.weight": ones(4, 4)}, CONFIG, "no EAGLE head"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_refused(tmp_path, out, capsys, case, form):
    tensors, config, words = REFUSED[case]
    folder = tmp_path / "source"
    if form == "safetensors":
        write_safetensors(folder, config, tensors)
    else:
        write_config(folder, config)
        write_bin(folder / "pytorch_model.bin", tensors)
    assert words in refused(capsys, folder, out)


@pytest.mark.parametrize("config", [{"architectures": ["Eagle4Model"]}, {"model_type": "eagle_4"}])
def test_weights_of_eagle_4_are_not_opened(tmp_path, out, capsys, config):
    """A file of weights that is no file of weights: whoever looks into it fails in other words."""
    folder = tmp_path / "source"
    write_config(folder, CONFIG | config)
    (folder / "model.safetensors").write_bytes(b"not to be read")
    assert "forbids competing use" in refused(capsys, folder, out)


def test_a_converted_head_is_not_converted_again(tmp_path, capsys):
    folder = write_safetensors(tmp_path / "source", CONFIG, PLAIN)
    convert(str(folder), str(tmp_path / "once"))
    assert "already converted" in refused(capsys, tmp_path / "once", tmp_path / "x" / "twice")


# Contradictions


def changed(name: str, value: np.ndarray) -> Tensors:
    return PLAIN | {name: value}


SHAPES = {
    "hidden size": (PLAIN, {"hidden_size": 32}, "hidden_size 32"),
    "fc rows": (
        changed("fc.weight", ones(32, 192)),
        {},
        "fc.weight of 32 x 192",
    ),
    "fc columns": (changed("fc.weight", ones(64, 200)), {}, "no whole number"),
    "two features": (changed("fc.weight", ones(64, 128)), {}, "--aux-layers"),
    "heads": (PLAIN, {"num_attention_heads": 8, "head_dim": 16}, "expected 64 x 128"),
    "key heads": (PLAIN, {"num_key_value_heads": 4}, "k_proj.weight of 32 x 128"),
    "output": (changed("layers.0.self_attn.o_proj.weight", ones(64, 32)), {}, "o_proj"),
    "lm_head": (changed("lm_head.weight", ones(40, 64)), {}, "40 rows"),
    "draft vocabulary": (PLAIN, {"draft_vocab_size": 40}, "draft_vocab_size 40"),
    "number of taps": (
        PLAIN,
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5]}},
        "fc fuses 3",
    ),
    "order of taps": (
        PLAIN,
        {"eagle_aux_hidden_state_layer_ids": [16, 2, 29]},
        "not ascending",
    ),
    "target id": (changed("d2t", PLAIN["d2t"] + 90), {}, "disagree"),
    "no map": (without(PLAIN, "d2t", "t2d"), {}, "no d2t"),
    "no own tables": (eagle3_tensors(target_size=32), {"target_hidden_size": 32}, "embed_tokens"),
    "activation": (PLAIN, {"hidden_act": "relu"}, "relu"),
    "rope": (PLAIN, {"rope_scaling": {"rope_type": "spiral", "factor": 2}}, "spiral"),
    "factor": (PLAIN, {"rope_scaling": {"type": "linear"}}, "without a factor"),
    "a layer of qwen3 without its norms": (
        PLAIN,
        speculators({"model_type": "qwen3"}),
        "lacks layers.0.self_attn.k_norm.weight",
    ),
    "a layer without its biases": (
        PLAIN,
        speculators({"attention_bias": True}),
        "lacks layers.0.self_attn.k_proj.bias",
    ),
    "a trained embedding that is missing": (
        PLAIN,
        speculators(embed_requires_grad=True),
        "embed_requires_grad",
    ),
    "flag without its tensor": (PLAIN, {"norm_before_fc": True}, "lacks input_norm.weight"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_contradictions(tmp_path, out, capsys, case):
    tensors, config, words = SHAPES[case]
    folder = write_safetensors(tmp_path / "source", CONFIG | config, tensors)
    assert words in refused(capsys, folder, out)


def test_d2t_alone_is_checked(tmp_path, out, capsys):
    bare = without(PLAIN, "t2d")
    for number, shift in enumerate((90, -90)):
        tensors = bare | {"d2t": PLAIN["d2t"] + shift}
        folder = write_safetensors(tmp_path / f"source{number}", CONFIG, tensors)
        assert "d2t" in refused(capsys, folder, out)


def test_an_empty_map_is_said_aloud(tmp_path, capsys):
    tensors = without(PLAIN, "t2d") | {"d2t": np.zeros(48, np.int64)}
    folder = write_safetensors(tmp_path / "source", CONFIG, tensors)
    convert(str(folder), str(tmp_path / "out"))
    assert "d2t is all zeros" in capsys.readouterr().out
    assert config_of(tmp_path / "out")["has_d2t"]
