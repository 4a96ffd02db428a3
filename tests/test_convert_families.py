"""Every checkpoint family in its own layout: what it is taken for, and what it becomes."""

import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    CONFIG,
    Tensors,
    as_midlayer,
    eagle3_tensors,
    renamed,
    without,
    write_bin,
    write_config,
    write_gguf,
    write_safetensors,
    write_target,
)
from mlx_lm.models.rope_utils import initialize_rope
from test_convert import DEMO, assert_same, config_of, refused, weights_of

from mlx_eagle.convert import convert
from mlx_eagle.convert.__main__ import main
from mlx_eagle.convert.checkpoint import Checkpoint, open_checkpoint
from mlx_eagle.convert.gguf import BLOCKS
from mlx_eagle.convert.resolve import Resolved, resolve
from mlx_eagle.convert.stored import Stored
from mlx_eagle.convert.target import Target
from mlx_eagle.head import Eagle3Config, Eagle3Head, fuse_weights

RNG = np.random.default_rng(7)


def ones(*shape: int) -> np.ndarray:
    return (1 + 0.1 * RNG.standard_normal(shape)).astype(np.float32)


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
FLAT = {key: value for key, value in CONFIG.items() if key != "architectures"}
LAYER_CONFIG = {
    **{key: value for key, value in FLAT.items() if key != "draft_vocab_size"},
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
NORM_FLAGS = ("use_last_layernorm", "use_input_layernorm_in_first_layer")
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]},
    "transformer_layer_config": LAYER_CONFIG,
    "draft_vocab_size": 48,
    "norm_before_residual": True,
}


def speculators(layer: dict | None = None, **config: object) -> dict:
    return SPECULATORS | {"transformer_layer_config": LAYER_CONFIG | (layer or {})} | config


def eagle1_tensors() -> Tensors:
    tensors = eagle3_tensors(num_aux=2)
    narrow = {f"layers.0.self_attn.{p}_proj.weight" for p in "qkv"}
    dropped = ("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight")
    tensors = without(tensors, *dropped, "lm_head.weight", "d2t", "t2d")
    tensors = {n: v[:, :64].copy() if n in narrow else v for n, v in tensors.items()}
    return tensors | {"fc.bias": ones(64)}


EAGLE1 = eagle1_tensors()


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


# What is refused


def dflash() -> Tensors:
    return PLAIN | {"layers.0.fc.weight": ones(64, 64)}


REFUSED = {
    "P-EAGLE by its mask": (PLAIN | {"mask_hidden": ones(1, 1, 192)}, CONFIG, "P-EAGLE"),
    "P-EAGLE by its type": (PLAIN, speculators(speculators_model_type="peagle"), "P-EAGLE"),
    "P-EAGLE by a token": (PLAIN, CONFIG | {"ptd_token_id": 3}, "P-EAGLE"),
    "P-EAGLE by its name": (PLAIN, CONFIG | {"architectures": ["PEagleDraftModel"]}, "P-EAGLE"),
    "DFlash": (dflash(), CONFIG | {"architectures": ["DFlashDraftModel"]}, "DFlash"),
    "DFlash by its blocks": (PLAIN, CONFIG | {"block_size": 8, "mask_token_id": 3}, "DFlash"),
    "DSpark": (PLAIN, CONFIG | {"markov_rank": 8}, "DSpark"),
    "MLA": (PLAIN | {"layers.0.self_attn.kv_a_proj_with_mqa.weight": ones(8, 64)}, CONFIG, "MLA"),
    "MLA by its name": (PLAIN, CONFIG | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "MLA"),
    "Medusa heads": (PLAIN | {"parallel_draft_heads.0.weight": ones(8, 64)}, CONFIG, "Medusa"),
    "early stop": (
        PLAIN | {"fc.weight": ones(65, 192)},
        CONFIG | {"early_stop_method": "confidence"},
        "early-stop",
    ),
    "MTP": (PLAIN | {"enorm.weight": ones(64), "hnorm.weight": ones(64)}, CONFIG, "MTP"),
    "MTP by eh_proj": (PLAIN | {"eh_proj.weight": ones(64, 128)}, CONFIG, "MTP"),
    "MTP by a flag": (PLAIN, CONFIG | {"eagle_config": {"use_mtp_layernorm": True}}, "MTP"),
    "DeepSpec for Gemma-4": (
        FIVE | {"layers.0.layer_scalar": ones(1)},
        FLAT | {"target_layer_ids": [5, 17, 29, 41, 46]},
        "Gemma-4",
    ),
    "packed": (PLAIN | {"fc.weight_packed": ones(4, 4)}, CONFIG, "dequantize"),
    "scales": (PLAIN | {"fc.weight_scale": ones(64)}, CONFIG, "dequantize"),
    "a quantization entry": (PLAIN, CONFIG | {"quantization_config": {"bits": 4}}, "dequantize"),
    "a plain model": (
        {n: v[:, :64] if ".q_proj" in n else v for n, v in without(PLAIN, "fc.weight").items()},
        CONFIG,
        "",
    ),
    "speculators EAGLE-1 with norms": (
        EAGLE1 | {"embed_layernorm.weight": ones(64)},
        FLAT,
        "embedding norms",
    ),
    "nothing known": ({"blocks.0.weight": ones(4, 4)}, CONFIG, "no EAGLE head"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_refused(tmp_path, capsys, case, form):
    tensors, config, words = REFUSED[case]
    folder = tmp_path / "source"
    if form == "safetensors":
        write_safetensors(folder, config, tensors)
    else:
        write_config(folder, config)
        write_bin(folder / "pytorch_model.bin", tensors)
    assert words in refused(capsys, folder, tmp_path / "results" / "head")


def test_a_converted_head_is_not_converted_again(tmp_path, capsys):
    folder = write_safetensors(tmp_path / "source", CONFIG, PLAIN)
    convert(str(folder), str(tmp_path / "once"))
    assert "already converted" in refused(capsys, tmp_path / "once", tmp_path / "x" / "twice")


# Contradictions


def changed(name: str, value: np.ndarray) -> Tensors:
    return PLAIN | {name: value}


SHAPES = {
    "hidden size": (PLAIN, {"hidden_size": 32}, "hidden_size 32"),
    "fc rows": (changed("fc.weight", ones(32, 192)), {}, "fc.weight is 32 x 192"),
    "fc columns": (changed("fc.weight", ones(64, 200)), {}, "no whole number"),
    "two features": (changed("fc.weight", ones(64, 128)), {}, "--aux-layers"),
    "heads": (PLAIN, {"num_attention_heads": 8, "head_dim": 16}, "expected 128 x 128"),
    "key heads": (PLAIN, {"num_key_value_heads": 4}, "k_proj.weight is 32 x 128"),
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
        "lacks layers.0.self_attn.q_norm.weight",
    ),
    "a layer without its biases": (
        PLAIN,
        speculators({"attention_bias": True}),
        "lacks layers.0.self_attn.q_proj.bias",
    ),
    "a trained embedding that is missing": (
        PLAIN,
        speculators(embed_requires_grad=True),
        "embed_requires_grad",
    ),
    "flag without its tensor": (PLAIN, {"norm_before_fc": True}, "lacks input_norm.weight"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_contradictions(tmp_path, capsys, case):
    tensors, config, words = SHAPES[case]
    folder = write_safetensors(tmp_path / "source", CONFIG | config, tensors)
    assert words in refused(capsys, folder, tmp_path / "results" / "head")


def test_d2t_alone_is_checked(tmp_path, capsys):
    bare = without(PLAIN, "t2d")
    for number, shift in enumerate((90, -90)):
        tensors = bare | {"d2t": PLAIN["d2t"] + shift}
        folder = write_safetensors(tmp_path / f"source{number}", CONFIG, tensors)
        assert "d2t" in refused(capsys, folder, tmp_path / "results" / "head")


def test_an_empty_map_is_said_aloud(tmp_path, capsys):
    tensors = without(PLAIN, "t2d") | {"d2t": np.zeros(48, np.int64)}
    folder = write_safetensors(tmp_path / "source", CONFIG, tensors)
    convert(str(folder), str(tmp_path / "out"))
    assert "d2t is all zeros" in capsys.readouterr().out
    assert config_of(tmp_path / "out")["has_d2t"]


# Which layers are tapped

NESTED, TOP = "nested", "top"
TAPS = [
    # place, ids as written, depth of the target (None: unknown), boundary ids, source, doubts
    (NESTED, [1, 15, 28], 32, [2, 16, 29], "nested+1", False),
    (NESTED, [1, 15, 28], None, [2, 16, 29], "nested+1", False),
    (NESTED, [1, 17, 33], 36, [2, 18, 34], "nested+1", False),  # gpt-oss-120b, SpecForge
    (NESTED, [1, 11, 21], 24, [2, 12, 22], "nested+1", False),  # gpt-oss-20b, SpecForge
    (NESTED, [2, 30, 58], 61, [2, 30, 58], "nested-as-is", False),  # Kimi, AQ-MedAI
    (NESTED, [2, 30, 58], None, [2, 30, 58], "nested-as-is", False),
    (NESTED, [24, 30, 36], 36, [24, 30, 36], "nested-as-is", False),  # gpt-oss-120b v3
    (NESTED, [24, 30, 36], None, [25, 31, 37], "nested+1", True),
    (NESTED, [4, 20, 40], 45, [5, 21, 41], "nested+1", True),  # step-3.5-flash
    (TOP, [2, 30, 57], 60, [2, 30, 57], "top-level", False),  # Gemma-4-31B
    (TOP, [1, 23, 44], 48, [1, 23, 44], "top-level", True),  # Llama-4 Maverick, converted
    (TOP, [1, 23, 44], None, [1, 23, 44], "top-level", True),
    (TOP, [1, 46, 90], 94, [1, 46, 90], "top-level", True),
    (TOP, [0, 16, 32], 32, [0, 16, 32], "top-level", False),
]


def resolved(config: dict, num_layers: int | None, tensors: Tensors) -> Resolved:
    stored = {n: Stored("F32", t.shape, np.zeros(0, np.uint8)) for n, t in tensors.items()}
    for name in stored.keys() & {"d2t", "t2d"}:
        kind = "I64" if name == "d2t" else "BOOL"
        data = np.frombuffer(tensors[name].tobytes(), np.uint8)
        stored[name] = Stored(kind, tensors[name].shape, data)
    target = None
    if num_layers is not None:
        sizes = {"hidden_size": 64, "num_hidden_layers": num_layers, "vocab_size": 128}
        target = Target("target", Path("."), sizes)
    return resolve(Checkpoint("head", config, stored, ()), target)


@pytest.mark.parametrize("place, ids, depth, expected, source, doubts", TAPS)
def test_taps(place, ids, depth, expected, source, doubts):
    entry = {"eagle_aux_hidden_state_layer_ids": ids}
    if place == NESTED:
        found = resolved(CONFIG | {"eagle_config": entry}, depth, PLAIN)
    else:
        found = resolved(speculators(**entry), depth, PLAIN)
    assert list(found.config["aux_boundary_ids"]) == expected
    assert found.config["aux_ids_source"] == source
    assert bool(found.notes) == doubts


@pytest.mark.parametrize("depth", [24, 28, 32, 36, 40, 48, 60, 61, 62, 64, 80, 94])
def test_default_taps(depth):
    found = resolved(CONFIG, depth, PLAIN)
    assert found.config["aux_boundary_ids"] == (2, depth // 2, depth - 3)
    assert found.config["aux_ids_source"] == "default"


def test_taps_beyond_the_target(capsys):
    with pytest.raises(ValueError, match="beyond"):
        resolved(speculators(eagle_aux_hidden_state_layer_ids=[2, 16, 33]), 32, PLAIN)


# Overrides


def overridden(tmp_path: Path, *args: str) -> dict:
    """The config of a two-layer head with ids, converted with these arguments."""
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}
    config = CONFIG | {"eagle_config": ids, "norm_before_residual": True}
    folder, out = write_safetensors(tmp_path / "source", config, TWO), tmp_path / "out"
    main(["--hf-path", str(folder), "--mlx-path", str(out), *args])
    return config_of(out)


@pytest.mark.parametrize(
    "args, fields",
    [
        (("--aux-layers", "3,5,7"), {"aux_boundary_ids": [3, 5, 7], "aux_ids_source": "override"}),
        (("--aux-offset", "0"), {"aux_boundary_ids": [1, 15, 28], "aux_ids_source": "override"}),
        (("--aux-offset", "2"), {"aux_boundary_ids": [3, 17, 30]}),
        (("--norm-output",), {"norm_output": True}),
        (("--no-norm-before-residual",), {"norm_before_residual": False}),
        (("--num-layers", "1"), {"num_layers": 1}),
        (
            ("--rope-theta", "12345"),
            {"rope": {"type": "default", "theta": 12345.0, "dims": 16, "scaling": None}},
        ),
        ((), {"norm_output": False, "norm_before_residual": True, "num_layers": 2}),
    ],
)
def test_overrides(tmp_path, args, fields):
    written = overridden(tmp_path, *args)
    assert {key: written[key] for key in fields} == fields


@pytest.mark.parametrize(
    "args",
    [
        ("--aux-layers", "3,5"),
        ("--aux-layers", "3,5,7", "--aux-offset", "1"),
        ("--num-layers", "3"),
        ("--aux-offset", "-5"),
    ],
)
def test_bad_overrides(tmp_path, capsys, args):
    with pytest.raises(SystemExit) as exit:
        overridden(tmp_path, *args)
    assert exit.value.code == 2 and "--" in capsys.readouterr().err


# Rope

YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
ROPE = {
    "missing": ({}, 10000.0, 16, None),
    "theta": ({"rope_theta": 1e6}, 1e6, 16, None),
    "parameters": ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, 16, None),
    "by layer type": (
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6},
                "sliding_attention": {"rope_theta": 5e4, "rope_type": "default"},
            }
        },
        5e4,
        16,
        None,
    ),
    "linear": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        10000.0,
        16,
        {"type": "linear", "factor": 2.0},
    ),
    "llama3": (
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 4096,
            },
        },
        5e5,
        16,
        {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    "yarn": ({"rope_scaling": YARN | {"rope_type": "yarn"}}, 10000.0, 16, YARN | {"type": "yarn"}),
    "yarn from max_position_embeddings": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        10000.0,
        16,
        {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048},
    ),
    "mrope": ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, 10000.0, 16, None),
    "partial": ({"partial_rotary_factor": 0.5}, 10000.0, 8, None),
}


@pytest.mark.parametrize("case", ROPE)
def test_rope(case):
    config, theta, dims, scaling = ROPE[case]
    rope = resolved(CONFIG | config, None, PLAIN).config["rope"]
    assert (rope["theta"], rope["dims"], rope["scaling"]) == (theta, dims, scaling)
    initialize_rope(dims, theta, False, scaling, 2048)


def test_untruncated_yarn():
    """Against transformers' formula, spelled out, at some positions."""
    source = {"rope_type": "yarn", "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0, **YARN}
    rope = resolved(CONFIG | {"rope_scaling": source}, None, PLAIN).config["rope"]
    module = initialize_rope(16, rope["theta"], False, rope["scaling"], 2048)
    base = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    low, high = (16 * np.log(512 / (r * 2 * np.pi)) / (2 * np.log(10000.0)) for r in (32, 1))
    ramp = np.clip((np.arange(8) - max(low, 0)) / (min(high, 15) - max(low, 0)), 0, 1)
    inverse = base / 4 * ramp + base * (1 - ramp)
    x = np.random.default_rng(0).standard_normal(16)
    angle = 5 * inverse
    left, right = x[:8], x[8:]
    cos, sin = np.cos(angle), np.sin(angle)
    expected = np.concatenate([left * cos - right * sin, right * cos + left * sin])
    expected *= 0.1 * np.log(4) + 1
    ours = module(mx.array(x, dtype=mx.float32).reshape(1, 1, 1, 16), offset=5)
    assert np.abs(np.array(ours).ravel() - expected).max() < 1e-5


# llama.cpp

@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf(tmp_path, kind):
    tensors = PLAIN | {"input_norm.weight": ones(192)}
    path = write_gguf(tmp_path / "head.gguf", tensors, CONFIG, kind)
    convert(str(path), str(tmp_path / "out"), quantize=False, dtype="float32")
    form = gguf.GGMLQuantizationType[kind]
    expected = {
        name: gguf.quants.dequantize(gguf.quants.quantize(value, form), form)
        if value.ndim == 2
        else value
        for name, value in tensors.items()
    }
    assert_same(weights_of(tmp_path / "out"), expected)
    written = config_of(tmp_path / "out")
    fields = {
        "family": "gguf",
        "aux_boundary_ids": [2, 15, 27],
        "norm_before_residual": True,
        "pre_fc_norm": "concat",
        "rms_norm_eps": 1e-5,
        "vocab_size": 128,
    }
    assert {key: written[key] for key in fields} == fields


def test_gguf_of_the_demo_head(tmp_path):
    """The same weights as from the original file."""
    config = json.loads((DEMO / "config.json").read_text())
    original = {name: t.numpy() for name, t in open_checkpoint(str(DEMO)).tensors.items()}
    tensors = renamed(original, ("midlayer.", "layers.0."))
    write_gguf(tmp_path / "head.gguf", tensors, config)
    convert(str(tmp_path / "head.gguf"), str(tmp_path / "a"), quantize=False)
    convert(str(DEMO), str(tmp_path / "b"), quantize=False)
    ours, theirs = weights_of(tmp_path / "a"), weights_of(tmp_path / "b")
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]).item() for name in ours)


@pytest.mark.parametrize("kind", BLOCKS)
def test_block_formats(kind):
    """Any bytes decode as the gguf package decodes them."""
    _, _, num_bytes, decode = BLOCKS[kind]
    data = np.random.default_rng(kind).integers(0, 120, (9, num_bytes), dtype=np.uint8)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind))
    assert np.array_equal(decode(data).reshape(9, -1), expected)


def test_gguf_frequency_factors(tmp_path):
    """llama3 scaling as llama.cpp stores it: divisors of the frequencies."""
    factors = np.array([1, 1, 1, 2, 4, 8, 8, 8], np.float32)
    path = write_gguf(
        tmp_path / "head.gguf", PLAIN, CONFIG, **{"rope_freqs.weight": factors}
    )
    convert(str(path), str(tmp_path / "out"))
    rope = config_of(tmp_path / "out")["rope"]
    module = initialize_rope(16, rope["theta"], False, rope["scaling"], 2048)
    x = mx.random.normal((1, 1, 3, 16))
    freqs = mx.array(factors) * 10000.0 ** (mx.arange(0, 16, 2) / 16)
    expected = mx.fast.rope(x, 16, traditional=False, base=None, scale=1.0, offset=3, freqs=freqs)
    assert mx.allclose(module(x, offset=3), expected, atol=1e-6).item()


def test_damaged_gguf(tmp_path, capsys):
    path = write_gguf(tmp_path / "head.gguf", PLAIN, CONFIG)
    whole = path.read_bytes()
    out = tmp_path / "results" / "head"
    for size in (0, 3, 20, 400, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:size])
        assert "head.gguf" in refused(capsys, path, out)
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "llama" in refused(capsys, path, out)
