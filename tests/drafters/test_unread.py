"""Kinds of drafters that are not read: named, with what there is for the same target."""

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import CONFIG, as_midlayer, eagle3_tensors, ones, write_safetensors
from drafter_pairs import tiny_qwen3_next
from helpers import tiny_llama

import mlx_eagle
from mlx_eagle.convert import convert
from mlx_eagle.drafters.kinds import OTHERWISE, recognise
from mlx_eagle.drafters.mtp import load_mtp
from mlx_eagle.drafters.pairs import PAIRS, drafters_for

MTP = "an MTP layer of a form that is not known"
KINDS = [
    ("a Laguna drafter", [], {"architectures": ["LagunaDFlashModel"]}),
    (MTP, ["mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.gate.w"], {}),  # Nemotron-H
    (MTP, ["model.mtp_layers.0.token_layernorm.weight"], {}),  # MiMo
    (MTP, ["mtp_layers.0.input_proj.weight"], {}),  # speculators
    (MTP, ["model.layers.61.eh_proj.weight"], {}),  # DeepSeek
    (MTP, ["model.hnorm.weight", "model.mtp_block.x"], {}),  # GLM
    (MTP, ["model.mtp_block.0.mlp.up_proj.weight"], {}),  # ERNIE
    (MTP, [], {"architectures": ["Ernie4_5_MTPModel"]}),
    ("an XPress drafter", [], {"model_type": "xpress"}),
    ("a Domino drafter", [], {"architectures": ["Qwen3DominoModel"]}),
]


@pytest.mark.parametrize(
    "name",
    (
        "bailing_hybrid", "bailing_moe_v3", "ernie4_5_moe", "exaone_moe", "kimi_k3",
        "kimi_linear", "longcat_flash",
    ),
)  # fmt: skip
def test_targets_whose_mtp_layers_are_not_read_are_named(name):
    target = tiny_llama()
    target.model_type = name
    with pytest.raises(ValueError, match=f"a {name} model: MTP layers are known for") as err:
        mlx_eagle.open_drafter("mtp", target)
    assert "\n" not in str(err.value)


def test_two_mtp_layers_of_qwen_are_refused_by_number():
    target = tiny_qwen3_next()
    names = ["fc.weight", *(f"layers.{i}.self_attn.q_proj.weight" for i in (0, 1))]
    weights = {f"mtp.{name}": mx.zeros((64, 64)) for name in names}
    with pytest.raises(ValueError, match="several MTP layers, and of a qwen3_next model one is"):
        load_mtp(weights, target)


@pytest.mark.parametrize("title, names, config", KINDS)
def test_it_is_named(title, names, config):
    with pytest.raises(ValueError, match=title) as caught:
        recognise(names, config, "somebody/drafter")
    assert "which is not read; use an EAGLE or DFlash head" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.0.self_attn.q_proj.weight", "model.layers.46.eh_proj.weight"],
        ["model.layers.0.self_attn.q_proj.weight", "model.mtp_layers.0.input_proj.weight"],
        ["backbone.layers.0.mixer.in_proj.weight", "mtp.layers.0.eh_proj.weight"],
        ["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"],
        list(as_midlayer(eagle3_tensors())),
    ],
)
def test_a_whole_model_and_an_eagle_head_are_none(names):
    found = recognise(names, {"model_type": "glm4_moe"}, "somebody/model")
    assert found == ("eagle3" if "midlayer.hidden_norm.weight" in names else OTHERWISE)


NAMES = {
    "somebody/Qwen3-8B-MTP-4bit": "Qwen/Qwen3-8B",
    "mlx-community/Qwen3.5-9B-MTP-4bit": "Qwen/Qwen3.5-9B",
    "google/gemma-4-31B-it-assistant": "google/gemma-4-31B-it",
    "somebody/Qwen3-Coder-30B-A3B-Instruct-draft": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "somebody/Qwen33-8B": "",
    "somebody/draft": "",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_target_that_a_name_speaks_of(name):
    target, known = drafters_for([name])
    assert target == NAMES[name]
    assert known == [pair.head for pair in PAIRS if pair.target == target]


def test_what_works_for_the_target_is_said():
    first = next(pair.head for pair in PAIRS if pair.target == "google/gemma-4-31B-it")
    for config, source, target in (
        ({}, "google/gemma-4-31B-it-assistant", None),
        (
            {"speculators_config": {"verifier": {"name_or_path": "google/gemma-4-31B-it"}}},
            "x",
            None,
        ),
        ({}, "draft", "mlx-community/gemma-4-31b-it-4bit"),
    ):
        with pytest.raises(ValueError, match=rf"for google/gemma-4-31B-it there is {first} or "):
            recognise(["hnorm.weight"], config, source, target)


def test_both_doors_say_it(tmp_path):
    tensors = {"eh_proj.weight": ones(64, 128), "model.norm.weight": np.ones(64)}
    folder = write_safetensors(tmp_path / "Qwen3-8B-assistant", CONFIG, tensors)
    for door in (
        lambda: convert(str(folder), str(tmp_path / "out")),
        lambda: mlx_eagle.open_drafter(str(folder), tiny_llama()),
    ):
        with pytest.raises(
            ValueError, match=r"is an MTP layer of a form .* for Qwen/Qwen3-8B there is"
        ):
            door()
