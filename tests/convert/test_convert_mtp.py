"""MTP layers and packed drafters through the converter: what is written is what drafts."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from assistants import published, tiny_assistant, tiny_gemma4
from checkpoints import write_config
from grids import thorough
from helpers import PROMPT, plain, speculative
from hub import commit_of, running_hub, use_hub
from mlx.utils import tree_flatten
from mtp_checkpoints import (
    FAMILIES,
    STEPPED,
    Published,
    check_layers,
    full_config,
    write_checkpoint,
)

from mlx_eagle.convert import convert, pipeline
from mlx_eagle.convert.check import measure_acceptance
from mlx_eagle.draft_models import open_drafter
from mlx_eagle.drafters.kinds import load_drafter
from mlx_eagle.drafters.mtp import readings
from mlx_eagle.drafters.mtp_layers import stack_experts

QWEN, MOE, GLM = (FAMILIES[name]() for name in ("qwen3.5", "qwen3.5 moe, tied", "glm-4.5"))


def written(folder: Path, part: Published) -> str:
    """A target's checkpoint with its layers in the last shard, and the config it comes with."""
    write_checkpoint(folder, part)
    write_config(folder, full_config(part))
    return str(folder)


QUICK = ("qwen3.5", "glm-4.7-flash", "mimo")


@pytest.mark.parametrize(
    "name",
    thorough([*FAMILIES, *STEPPED], *QUICK),
)
def test_layers_of_a_targets_own_checkpoint(tmp_path, name):
    part = {**FAMILIES, **STEPPED}[name]()
    source = written(tmp_path / "target", part)
    (tmp_path / "target" / "model-00001-of-00003.safetensors").write_bytes(b"never read")
    config = convert(source, str(tmp_path / "head"), quantize=False)
    assert (config["kind"], config["hidden_size"]) == ("mtp", 64)
    check_layers(load_drafter(tmp_path / "head", part.target), part)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STEPPED)
def test_four_bits_of_several_layers(tmp_path, name):
    """Also without the checkpoint's own matrices of logits, which are the target's then."""
    part = STEPPED[name]()
    for key in [key for key in part.tensors if "shared_head.output" in key]:
        del part.tensors[key]
    convert(written(tmp_path / "target", part), str(tmp_path / "head"))
    drafter = load_drafter(tmp_path / "head", part.target)
    assert [step.layers[0].self_attn.q_proj.bits for step in drafter.head.steps] == [4, 4, 4]
    tokens, stats = speculative(part.target, drafter, PROMPT, 10, num_draft_tokens=3)
    assert tokens == plain(part.target, PROMPT, 10) and stats.num_drafted > 0


@pytest.mark.exhaustive
def test_a_config_that_says_nothing_of_the_layers(tmp_path):
    part = STEPPED["step-3.5"]()
    source = written(tmp_path / "target", part)
    cut = {
        key: value[:3] if isinstance(value, list) else value
        for key, value in full_config(part).items()
    }
    write_config(tmp_path / "target", cut)
    with pytest.raises(ValueError, match="describes its 3 layers and not the MTP layers behind"):
        convert(source, str(tmp_path / "head"))


@pytest.mark.parametrize("part", [MOE, GLM], ids=["qwen3.5 moe", "glm-4.5"])
def test_four_bits_by_default(tmp_path, part):
    config = convert(written(tmp_path / "target", part), str(tmp_path / "head"))
    assert config["quantization"]["bits"] == 4
    drafter = load_drafter(tmp_path / "head", part.target)
    layer = drafter.head.layers[0]
    assert drafter.head.fc.bits > 4 and layer.self_attn.q_proj.bits == 4
    assert "scales" not in layer.mlp.gate  # which chooses experts
    tokens, stats = speculative(part.target, drafter, PROMPT, 10, num_draft_tokens=2)
    assert tokens == plain(part.target, PROMPT, 10) and stats.num_drafted > 0


PACKED = {"bits": 4, "group_size": 32}


def packed_folder(
    folder: Path, part: Published = QWEN, mode: str = "affine"
) -> tuple[str, dict[str, mx.array]]:
    """A folder of packed layers, as mlx-vlm writes it, and what its tensors are worth."""
    own = {name.removeprefix("mtp."): array for name, array in part.arrays().items()}
    group, stored, worth = (16 if mode == "nvfp4" else 32), {}, {}
    for bare, array in stack_experts(own).items():
        worth[bare] = array + 1 if array.ndim == 1 else array
        stored[bare] = worth[bare]
        if array.ndim > 1 and bare != "layers.0.mlp.gate.weight":
            parts = mx.quantize(array, group, 4, mode=mode)
            path = bare.removesuffix(".weight")
            names = (bare, f"{path}.scales", f"{path}.biases")[: len(parts)]
            stored |= dict(zip(names, parts, strict=True))
            worth[bare] = mx.dequantize(*parts, group_size=group, bits=4, mode=mode)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), stored)
    packing = {"bits": 4, "group_size": group, "mode": mode}
    config = {"model_type": "qwen3_5_mtp", "text_config": part.config, "quantization": packing}
    write_config(folder, config)
    return str(folder), worth


def test_a_packed_folder_is_unpacked_as_it_says(tmp_path):
    source, worth = packed_folder(tmp_path / "layers")
    convert(source, str(tmp_path / "head"), quantize=False)
    drafter = load_drafter(tmp_path / "head", QWEN.target)
    own = dict(tree_flatten(drafter.head.parameters()))
    for name, array in worth.items():
        assert mx.allclose(own[name], array, rtol=1e-6, atol=1e-6), name


@pytest.mark.parametrize("dtype", ["float32", None])
def test_a_folder_packed_in_bfloat16_is_unpacked_without_rounding(tmp_path, dtype):
    """Word by word: numbers of 4 bits, the lowest first, times a scale, plus a bias."""
    source, _ = packed_folder(tmp_path / "layers")
    file = f"{source}/model.safetensors"
    stored = {
        name: array if array.dtype == mx.uint32 else array.astype(mx.bfloat16)
        for name, array in mx.load(file).items()
    }
    mx.save_safetensors(file, stored)
    convert(source, str(tmp_path / "head"), quantize=False, dtype=dtype)
    own = mx.load(str(tmp_path / "head" / "model.safetensors"))
    for path in ("fc", "layers.0.mlp.down_proj", "layers.0.self_attn.q_proj"):
        words = np.array(stored[f"{path}.weight"])
        numbers = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
        groups = numbers.reshape(len(words), -1, 32).astype(np.float32)
        scales, biases = (
            np.array(stored[f"{path}.{part}"].astype(mx.float32))[..., None]
            for part in ("scales", "biases")
        )
        expected = mx.array((groups * scales + biases).reshape(len(words), -1))
        found = own[f"{path}.weight"]
        assert found.dtype == (mx.float32 if dtype else mx.bfloat16)
        assert mx.allclose(found, expected.astype(found.dtype), rtol=1e-6, atol=1e-6), path


@pytest.mark.parametrize("part", [QWEN, pytest.param(MOE, marks=pytest.mark.exhaustive)])
def test_a_packed_folder_stays_as_it_is(tmp_path, part, capsys):
    """Packed anew its words would be other ones; it drafts as it does unconverted."""
    source, _ = packed_folder(tmp_path / "layers", part)
    config = convert(source, str(tmp_path / "head"))
    assert "no multiple" not in capsys.readouterr().out
    stored = mx.load(f"{source}/model.safetensors")
    own = mx.load(str(tmp_path / "head" / "model.safetensors"))
    words = {name for name, array in stored.items() if array.dtype == mx.uint32}
    assert words and config["quantization"]["fc"] == PACKED
    assert all(mx.array_equal(own[name], stored[name]) for name in words)
    drafter = load_drafter(tmp_path / "head", part.target)
    usual = dict(tree_flatten(open_drafter(source, part.target).head.parameters()))
    for name, array in tree_flatten(drafter.head.parameters()):
        assert mx.array_equal(array, usual[name]), name


def test_a_folder_packed_in_another_way_is_not_packed_anew(tmp_path):
    """With scales of float8, which converted folders do not have."""
    source, _ = packed_folder(tmp_path / "layers", mode="nvfp4")
    with pytest.raises(ValueError, match="an MTP layer that is packed already, and packed anew"):
        convert(source, str(tmp_path / "head"))


def test_a_packed_folder_that_says_not_how(tmp_path):
    source, _ = packed_folder(tmp_path / "layers")
    write_config(Path(source), {"model_type": "qwen3_5_mtp", "text_config": QWEN.config})
    with pytest.raises(ValueError, match=r"is packed by MLX, and config.json says not how"):
        convert(source, str(tmp_path / "head"))
    write_config(Path(source), {"model_type": "other_mtp", "quantization": PACKED})
    with pytest.raises(ValueError, match="which says not what model these MTP layers are for"):
        convert(source, str(tmp_path / "head"))
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_assistant(tmp_path, bits):
    """Its words stay as they are, for packed anew they would be other ones."""
    target = tiny_gemma4(seed=33)
    drafter = tiny_assistant(target, num_centroids=12, centroid_top_k=4)
    source = published(tmp_path / "source", drafter)
    weights = mx.load(str(source / "model.safetensors"))
    stored = dict(weights)
    for name, array in weights.items():
        if array.ndim == 2 and "centroids" not in name and array.shape[1] % 32 == 0:
            path, parts = name.removesuffix(".weight"), mx.quantize(array, 32, bits)
            names = (name, f"{path}.scales", f"{path}.biases")
            stored |= dict(zip(names, parts, strict=True))
    mx.save_safetensors(str(source / "model.safetensors"), stored)
    config = json.loads((source / "config.json").read_text())
    config["quantization"] = {"bits": bits, "group_size": 32}
    write_config(source, config)
    convert(str(source), str(tmp_path / "head"), q_group_size=32)
    loaded = load_drafter(tmp_path / "head", target)
    own = dict(tree_flatten(loaded.head.parameters()))
    words = {name.removeprefix("model."): a for name, a in stored.items() if a.dtype == mx.uint32}
    assert len(words) > 15
    assert all(mx.array_equal(own[name], array) for name, array in words.items())
    tokens, _ = speculative(target, loaded, PROMPT, 20, num_draft_tokens=3)
    assert tokens == plain(target, PROMPT, 20)


class Tokenizer:
    """Reads a number as a prompt of its own."""

    has_chat_template, eos_token_ids = False, ()

    def encode(self, text: str) -> list[int]:
        return [*PROMPT, int(text)]


@pytest.mark.exhaustive
def test_check_measures_other_readings(tmp_path, monkeypatch, capsys):
    short = partial(measure_acceptance, questions=("1", "2"), num_tokens=8)
    monkeypatch.setattr(pipeline, "measure_acceptance", short)
    monkeypatch.setattr(pipeline, "load_model", lambda *_: (QWEN.target, Tokenizer()))
    source = written(tmp_path / "target", QWEN)
    write_config(tmp_path / "target", full_config(QWEN) | {"vocab_size": 97, "hidden_size": 64})
    options = {"target": source, "check": True, "quantize": False}
    found = convert(source, str(tmp_path / "head"), **options)["check"]
    assert found["alternatives"].keys() == {"state before embedding", "state before norm"}
    assert found["num_prompts"] == 2 and found["tau"] >= 1
    said = capsys.readouterr().out
    assert "tokens per pass of the target" in said and "in 2 answers" in said


def test_the_other_order_is_a_key_of_the_config(tmp_path):
    convert(written(tmp_path / "target", QWEN), str(tmp_path / "head"), quantize=False)
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state_first": True}))
    drafter = load_drafter(tmp_path / "head", QWEN.target)
    usual = load_drafter(written_head(tmp_path), QWEN.target)
    first, second = mx.split(usual.head.fc.weight, 2, axis=-1)
    usual.head.fc.weight = mx.concatenate([second, first], axis=-1)
    for each in (drafter, usual):
        each.extend(mx.array(PROMPT[1:]), mx.ones((len(PROMPT) - 1, 64)))
    assert mx.allclose(drafter._first, usual._first, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", thorough(["qwen3.5", *STEPPED], "step-3.5"))
def test_the_other_states_are_a_key_of_the_config(tmp_path, name):
    """Also without the key, as folders of before have none."""
    part = {**FAMILIES, **STEPPED}[name]()
    config = convert(written(tmp_path / "target", part), str(tmp_path / "head"), quantize=False)
    is_normed = config["state_normed"]
    assert is_normed == (name not in STEPPED)
    (reading,) = (found for found in readings(config).values() if "state_normed" in found)
    assert reading == {"state_normed": not is_normed}
    taps = {True: (len(part.target.layers) + 1,), False: (len(part.target.layers),)}
    bare = {key: value for key, value in config.items() if key != "state_normed"}
    for given, wanted in ((config, is_normed), (bare, is_normed), (bare | reading, not is_normed)):
        write_config(tmp_path / "head", given)
        drafter = load_drafter(tmp_path / "head", part.target)
        assert (drafter.taps, drafter.head.state_normed) == (taps[wanted], wanted)


def written_head(tmp_path: Path) -> Path:
    convert(str(tmp_path / "target"), str(tmp_path / "usual"), quantize=False)
    return tmp_path / "usual"


def test_upload_and_what_a_copy_is_told(tmp_path, monkeypatch):
    """Of a repository the layers alone are fetched, and go up with a card."""
    with running_hub(tmp_path / "hub") as hub:
        use_hub(monkeypatch, hub.address, tmp_path / "home")
        written(hub.root / "maker" / "original", QWEN)
        out = tmp_path / "head"
        convert("maker/original", str(out), upload_repo="me/layers")
        assert not any("00001-of" in path or "00002-of" in path for path in hub.requests)
        assert hub.uploads["model.safetensors"] == (out / "model.safetensors").read_bytes()
        card = hub.uploads["README.md"].decode()
        assert "- mtp\n" in card and "| Family | an MTP layer |" in card
        copy = tmp_path / "copy"
        copy.mkdir()
        mx.save_safetensors(
            str(copy / "model.safetensors"), {"model.layers.0.mlp.up_proj.weight": mx.ones((4, 4))}
        )
        write_config(copy, full_config(QWEN))
        (copy / "README.md").write_text(
            "---\nlibrary_name: mlx\nbase_model: maker/original\n---\n"
        )
        with pytest.raises(ValueError, match="without MTP layers: convert maker/original, which"):
            convert(str(copy), str(tmp_path / "other"))


def test_a_revision_of_a_target(tmp_path, monkeypatch):
    """What lies there is taken, a part of a file of it, and none of what the main branch has."""
    older = replace(QWEN, tensors={name: 2 * array for name, array in QWEN.tensors.items()})
    with running_hub(tmp_path / "hub") as hub:
        use_hub(monkeypatch, hub.address, tmp_path / "home")
        for name, part in (("original", QWEN), ("original@v1", older)):
            write_checkpoint(hub.root / "maker" / name, part, beside=400_000)
            write_config(hub.root / "maker" / name, full_config(part))
        convert("maker/original", str(tmp_path / "old"), quantize=False, revision="v1")
        weights = [path for path in hub.requests if path.endswith(".safetensors")]
        assert weights and all(commit_of("v1") in path for path in weights)
        convert("maker/original", str(tmp_path / "new"), quantize=False)
        old, new = (
            mx.load(str(tmp_path / name / "model.safetensors"))["fc.weight"]
            for name in ("old", "new")
        )
        assert mx.array_equal(old, 2 * new)
        with pytest.raises(ValueError, match="maker/original has no revision v9 on the hub"):
            convert("maker/original", str(tmp_path / "none"), revision="v9")
        assert not (tmp_path / "none").exists()


def test_layers_for_another_target_are_refused(tmp_path):
    convert(written(tmp_path / "target", QWEN), str(tmp_path / "head"))
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 32}))
    with pytest.raises(
        ValueError, match="for a target of hidden size 32, but this target's is 64"
    ):
        load_drafter(tmp_path / "head", QWEN.target)
