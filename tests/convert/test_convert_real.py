"""Configs of published heads, at full size but without weights, resolve as they should.

The facts come from the published configs and model cards.
"""

from pathlib import Path

import numpy as np
import pytest
from checkpoints import assert_same, config_of, weights_of
from golden import frozen
from public_heads import KIMI_YARN

from mlx_eagle.convert import convert
from mlx_eagle.convert.checkpoint import DraftCheckpoint, TargetFolder
from mlx_eagle.convert.head_config import Resolved, resolve
from mlx_eagle.convert.stored import Stored
from mlx_eagle.drafters.config import Eagle3Config

IDS = "eagle_aux_hidden_state_layer_ids"


def sizes(h: int, mlp: int, heads: int, kv: int, dim: int, vocab: int, draft: int) -> dict:
    return {
        "hidden_size": h,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "vocab_size": vocab,
        "draft_vocab_size": draft,
    }


def shapes(config: dict, embedding: bool = False, target_size: int | None = None) -> dict:
    """The shape of each tensor of a head, under the names of the original files."""
    c = config
    h, draft = c["hidden_size"], c["draft_vocab_size"] or c["vocab_size"]
    query, key = (c[f"num_{kind}_heads"] * c["head_dim"] for kind in ("attention", "key_value"))
    layer = {
        "self_attn.q_proj": (query, 2 * h),
        "self_attn.k_proj": (key, 2 * h),
        "self_attn.v_proj": (key, 2 * h),
        "self_attn.o_proj": (h, query),
        "mlp.gate_proj": (c["intermediate_size"], h),
        "mlp.up_proj": (c["intermediate_size"], h),
        "mlp.down_proj": (h, c["intermediate_size"]),
        "hidden_norm": (h,),
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
    }
    found = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    found |= {
        "fc.weight": (h, 3 * (target_size or h)),
        "norm.weight": (h,),
        "lm_head.weight": (draft, h),
    }
    if embedding:
        found["embed_tokens.weight"] = (c["vocab_size"], h)
    if draft < c["vocab_size"]:
        found["d2t"] = (draft,)
    return found


def nested(config: dict, **keys: object) -> dict:
    """The same sizes as speculators writes them."""
    layer = {key: value for key, value in config.items() if key != "draft_vocab_size"}
    draft = {"draft_vocab_size": config["draft_vocab_size"], "speculators_model_type": "eagle3"}
    return draft | {"transformer_layer_config": layer | {"model_type": "llama"}} | keys


def resolved(config: dict, tensors: dict, depth: int, hidden_size: int, vocab: int) -> Resolved:
    stored = {}
    for name, shape in tensors.items():
        data = np.zeros(0, np.uint8)
        if name == "d2t":  # the last ids of the vocabulary
            ids = np.arange(shape[0]) + vocab - shape[0]
            data = (ids - np.arange(shape[0])).view(np.uint8)
        stored[name] = Stored("I64" if name == "d2t" else "BF16", shape, data)
    values = {"num_hidden_layers": depth, "hidden_size": hidden_size, "vocab_size": vocab}
    target = TargetFolder.of("target", Path("."), values)
    return resolve(DraftCheckpoint("head", config, stored, ()), target)


LLAMA_8B = sizes(4096, 14336, 32, 8, 128, 128256, 32000)
LLAMA_70B = sizes(6144, 16384, 48, 8, 128, 128256, 32000)
VICUNA_13B = sizes(5120, 13824, 40, 40, 128, 32000, 32000)
QWEN3_4B = sizes(2560, 9728, 32, 8, 128, 151936, 32000)
QWEN3_30B = sizes(2048, 12288, 32, 4, 128, 151936, 32000)
GPT_OSS = sizes(2880, 17280, 64, 8, 64, 201088, 32000)
GEMMA_4 = sizes(5376, 21504, 32, 16, 256, 262144, 32000)
MAVERICK = sizes(5120, 16384, 40, 8, 128, 202048, 32000)
KIMI = sizes(7168, 18432, 64, 64, 128, 163840, 32000)
KIMI_25 = sizes(7168, 12288, 64, 64, 128, 163840, 163840)
MINICPM4 = sizes(4096, 16384, 32, 2, 128, 73448, 15000)


def dropping(config: dict, *keys: str) -> dict:
    return {key: value for key, value in config.items() if key not in keys}


# name: config, tensors, depth and width of the target, taps, rope base, more fields, doubts
HEADS = {
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": (
        dropping(LLAMA_8B, "head_dim") | {"rms_norm_eps": 1e-5},
        shapes(LLAMA_8B),
        (32, 4096),
        (2, 16, 29),
        10000.0,
        {"rms_norm_eps": 1e-5, "head_dim": 128, "embed_source": "target"},
        False,
    ),
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": (
        dropping(LLAMA_70B, "head_dim") | {"target_hidden_size": 8192},
        shapes(LLAMA_70B, embedding=True, target_size=8192),
        (80, 8192),
        (2, 40, 77),
        10000.0,
        {"hidden_size": 6144, "target_hidden_size": 8192, "embed_source": "file"},
        False,
    ),
    "the same without target_hidden_size": (
        dropping(LLAMA_70B, "head_dim"),
        shapes(LLAMA_70B, embedding=True, target_size=8192),
        (80, 8192),
        (2, 40, 77),
        10000.0,
        {"num_aux": 3, "target_hidden_size": 8192},
        False,
    ),
    "yuhuili/EAGLE3-Vicuna1.3-13B": (
        dropping(VICUNA_13B, "head_dim") | {"num_hidden_layers": 40},
        shapes(VICUNA_13B),
        (40, 5120),
        (2, 20, 37),
        10000.0,
        {"num_layers": 1, "has_d2t": False, "draft_vocab_size": 32000},
        False,
    ),
    "AngelSlim/Qwen3-4B_eagle3": (
        QWEN3_4B
        | {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        },
        shapes(QWEN3_4B),
        (36, 2560),
        (2, 18, 33),
        1e6,
        {"family": "angelslim", "head_dim": 128, "lm_head_source": "file"},
        True,  # the base it was trained with
    ),
    "lmsys/SGLang-EAGLE3-Qwen3-30B-A3B": (
        QWEN3_30B
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "rope_theta": 1e6,
            "eagle_config": {IDS: [1, 23, 44], "use_aux_hidden_state": True},
        },
        shapes(QWEN3_30B),
        (48, 2048),
        (2, 24, 45),
        1e6,
        {"family": "specforge", "aux_ids_source": "nested+1"},
        False,
    ),
    "lmsys/EAGLE3-gpt-oss-120b-bf16": (
        GPT_OSS | {"eagle_config": {IDS: [1, 17, 33]}, "max_position_embeddings": 4096},
        shapes(GPT_OSS),
        (36, 2880),
        (2, 18, 34),
        10000.0,
        {"head_dim": 64, "max_position_embeddings": 4096},
        False,
    ),
    "zhuyksir/EAGLE3-gpt-oss-20b-bf16": (
        GPT_OSS | {"eagle_config": {IDS: [1, 11, 21]}},
        shapes(GPT_OSS),
        (24, 2880),
        (2, 12, 22),
        10000.0,
        {},
        False,
    ),
    "nvidia/gpt-oss-120b-Eagle3-v3": (
        GPT_OSS | {"eagle_config": {IDS: [24, 30, 36], "norm_before_fc": True}},
        shapes(GPT_OSS) | {"input_norm.weight": (8640,)},
        (36, 2880),
        (24, 30, 36),
        10000.0,
        {"pre_fc_norm": "concat", "family": "modelopt", "aux_ids_source": "nested-as-is"},
        False,
    ),
    "nvidia/gpt-oss-120b-Eagle3": (
        GPT_OSS | {"draft_vocab_size": None},
        dropping(shapes(GPT_OSS | {"draft_vocab_size": None}), "lm_head.weight"),
        (36, 2880),
        (2, 18, 33),
        10000.0,
        {"lm_head_source": "target", "has_d2t": False, "draft_vocab_size": 201088},
        False,
    ),
    "RedHatAI/gemma-4-31B-it-speculator.eagle3": (
        nested(
            GEMMA_4 | {"rope_theta": 10000.0},
            norm_before_residual=True,
            norm_before_fc=False,
            speculators_config={"proposal_methods": [{"speculative_tokens": 3}]},
            **{IDS: [2, 30, 57]},
        ),
        shapes(GEMMA_4, embedding=True),
        (60, 5376),
        (2, 30, 57),
        10000.0,
        {"norm_before_residual": True, "embed_source": "file", "speculative_tokens_hint": 3},
        False,
    ),
    "RedHatAI/Llama-4-Maverick-17B-128E-Instruct-speculator.eagle3": (
        nested(MAVERICK, norm_before_residual=False, **{IDS: [1, 23, 44]}),
        shapes(MAVERICK),
        (48, 5120),
        (1, 23, 44),
        10000.0,
        {"aux_ids_source": "top-level", "norm_before_residual": False},
        True,  # numbers copied from the other convention
    ),
    "nvidia/Llama-4-Maverick-17B-128E-Eagle3": (
        MAVERICK
        | {
            "model_type": "llama4_text",
            "intermediate_size_mlp": 16384,
            "intermediate_size": 8192,
            "eagle_config": {IDS: [1, 23, 44], "use_last_layernorm": True},
        },
        shapes(MAVERICK),
        (48, 5120),
        (2, 24, 45),
        10000.0,
        {"intermediate_size": 16384, "rms_norm_eps": 1e-5},
        False,
    ),
    "AQ-MedAI/Kimi-K2-Instruct-eagle3": (
        KIMI | {"rope_theta": 1e6, "eagle_config": {IDS: [2, 30, 58]}},
        shapes(KIMI),
        (61, 7168),
        (2, 30, 58),
        1e6,
        {"aux_ids_source": "nested-as-is"},
        False,
    ),
    "lightseekorg/kimi-k2.5-eagle3": (
        dropping(KIMI_25, "draft_vocab_size")
        | {"rope_theta": 5e4, "rope_scaling": KIMI_YARN, "max_position_embeddings": 262144},
        shapes(KIMI_25),
        (61, 7168),
        (2, 30, 58),
        5e4,
        {"draft_vocab_size": 163840, "has_d2t": False},
        False,
    ),
    "linglingdan/Eagle3_for_MiniCPM4": (
        dropping(MINICPM4, "head_dim") | {"rope_theta": 1e4},
        shapes(MINICPM4),
        (32, 4096),
        (2, 16, 29),
        10000.0,
        {"draft_vocab_size": 15000, "num_kv_heads": 2},
        False,
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_head(name):
    config, tensors, (depth, width), taps, theta, fields, doubts = HEADS[name]
    vocab = config.get("vocab_size") or config["transformer_layer_config"]["vocab_size"]
    head = resolved(config, tensors, depth, width, vocab)
    assert head.config.aux_boundary_ids == taps
    assert head.config.rope["theta"] == theta
    assert {key: getattr(head.config, key) for key in fields} == fields
    assert bool(head.notes) == doubts, head.notes
    Eagle3Config.from_dict(head.config.to_dict())


def test_rope_of_kimi():
    head = resolved(*HEADS["lightseekorg/kimi-k2.5-eagle3"][:2], 61, 7168, 163840)
    assert head.config.rope == {
        "type": "yarn",
        "theta": 5e4,
        "dims": 128,
        "scaling": KIMI_YARN,
    }


# Left out of, or spelled in another way in, the configs written by hand.
PROVENANCE = ("family", "aux_ids_source", "aux_boundary_ids", "speculative_tokens_hint", "rope")


@pytest.mark.parametrize("name", frozen.CHANGES)
def test_checkpoint_of_a_real_library(tmp_path, name):
    """The config written by hand and the frozen weights; test_head.py has the logits."""
    head, out = frozen.load(name), tmp_path / "out"
    convert(str(frozen.FOLDER / name), str(out), quantize=False, dtype="float32")
    expected = dict(head.weights) | {"embed_tokens.weight": head.embed}
    if head.d2t is not None:
        expected["d2t"] = head.d2t
    assert_same(weights_of(out), expected)
    ours, theirs = Eagle3Config.from_dict(config_of(out)).to_dict(), head.config.to_dict()
    for key in theirs.keys() - set(PROVENANCE):
        assert ours[key] == theirs[key], key
    rope, by_hand = ours["rope"], theirs["rope"]
    assert rope["theta"] == by_hand["theta"]
    assert rope["dims"] == (by_hand.get("dims") or head.config.head_dim)
    assert (rope["scaling"] or {}).items() >= (by_hand.get("scaling") or {}).items()
    family = name.split("-")[0]
    assert ours["family"] == {"peagle": "speculators"}.get(family, family)
