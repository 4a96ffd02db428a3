"""Heads of blocks and MTP layers in llama.cpp's GGUF files: the same as in safetensors."""

import json
from dataclasses import replace
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from block_twin import LEARNED, published, tiny_dflash, tiny_dflash2, tiny_dspark
from checkpoints import config_of, fails, refused, weights_of
from gguf_files import block_values, write_blocks, write_file, write_mtp
from golden import frozen
from grids import thorough
from helpers import PROMPT, byte_tokenizer, plain, speculative, tiny_llama
from mtp_checkpoints import FAMILIES, Published, check_layers, full_config, write_checkpoint

from mlx_eagle.convert import convert
from mlx_eagle.convert.checkpoint import open_checkpoint
from mlx_eagle.draft_models import open_drafter
from mlx_eagle.drafters.block_config import MUSE_TYPE

LLAMA, TOKENIZER = tiny_llama(num_hidden_layers=6), byte_tokenizer()
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 9,
    "use_sliding_window": True,
}
DFLASH, DFLASH2, DSPARK = (LEARNED[name] for name in ("dflash", "dflash2", "dspark"))
INSIDE = DFLASH2["dflash_config"]
SCALED = INSIDE | {"output_multiplier": 0.25, "final_logit_softcapping": 3.0, "selector_top_k": 5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
HEADS = {
    "dflash": (tiny_dflash, {}, DFLASH),
    "sinks and windows": (tiny_dflash, {"has_sinks": True}, DFLASH | SLIDING),
    "not causal": (tiny_dflash, {}, DFLASH | SLIDING | {"is_causal": False}),
    "yarn": (tiny_dflash, {}, DFLASH | {"rope_scaling": YARN | {"beta_fast": 16.0}}),
    "dflash2": (tiny_dflash2, {}, DFLASH2),
    "scaled": (tiny_dflash2, {}, DFLASH2 | {"dflash_config": SCALED}),
    "dspark": (tiny_dspark, {}, DSPARK),
    "confident": (tiny_dspark, {"confidence": "markov"}, DSPARK),
    "own output": (tiny_dspark, {"lm_head_source": "file", "draft_vocab_size": 48}, DSPARK),
}
SCALING = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
    "rope.scaling.yarn_beta_fast": 16.0,
}


def same_folders(ours: Path, theirs: Path) -> None:
    """Converted folders with the same weights and, but for their source, the same config."""
    one, two = weights_of(ours), weights_of(theirs)
    assert one.keys() == two.keys()
    for name, array in one.items():
        assert mx.array_equal(array, two[name]).item(), name
    assert config_of(ours) | {"source": None} == config_of(theirs) | {"source": None}


@pytest.mark.parametrize("head", HEADS)
def test_heads_of_blocks(tmp_path, head):
    make, changes, config = HEADS[head]
    more = {"d2t": mx.arange(48, dtype=mx.int64)} if head == "own output" else {}
    source = published(tmp_path / "source", make(LLAMA, **changes), config, more=more)
    tensors = {name: t.numpy() for name, t in open_checkpoint(str(source)).tensors.items()}
    said = SCALING if head == "yarn" else {}
    said = said | ({"sample_from_anchor": True} if make is tiny_dspark else {})
    path = write_blocks(tmp_path / "head.gguf", tensors, config, **said)
    for hf_path, folder in ((source, "a"), (path, "b")):
        convert(str(hf_path), str(tmp_path / folder), quantize=False)
    same_folders(tmp_path / "b", tmp_path / "a")


@pytest.mark.parametrize("kind", thorough(["dflash", "dflash2", "dspark"], "dflash2"))
def test_drafts_are_those_of_the_safetensors(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = Path(frozen.FOLDER) / f"learned-{kind}"
    checkpoint = open_checkpoint(str(source))
    tensors = {n: np.array(t.read().astype(mx.float32)) for n, t in checkpoint.tensors.items()}
    path = write_blocks(tmp_path / "head.gguf", tensors, checkpoint.config)
    found = []
    for name in (source, path):
        drafter = open_drafter(str(name), LLAMA, TOKENIZER, quantize_bits=0)
        tokens, stats = speculative(LLAMA, drafter, PROMPT, 22, num_draft_tokens=4)
        assert tokens == plain(LLAMA, PROMPT, 22)
        found.append((stats.num_drafted, stats.num_accepted))
    assert found[0] == found[1] and found[0][1] > 10


def test_vectors_of_llama_cpps_quantizer_are_matrices_of_one_row(tmp_path):
    source = published(tmp_path / "source", tiny_dspark(LLAMA, confidence="markov"), DSPARK)
    tensors = {name: t.numpy() for name, t in open_checkpoint(str(source)).tensors.items()}
    tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"][0]
    path = write_blocks(tmp_path / "head.gguf", tensors, DSPARK)
    for hf_path, folder in ((source, "a"), (path, "b")):
        convert(str(hf_path), str(tmp_path / folder), quantize=False)
    same_folders(tmp_path / "b", tmp_path / "a")


def test_quantized_blocks(tmp_path):
    """Matrices are what the gguf package makes of their blocks."""
    source = published(tmp_path / "source", tiny_dflash2(LLAMA), DFLASH2)
    tensors = {name: t.numpy() for name, t in open_checkpoint(str(source)).tensors.items()}
    tensors = {n: v for n, v in tensors.items() if v.shape[-1] % 32 == 0}  # all but the selector's
    path = write_file(tmp_path / "x.gguf", "dflash", block_values(DFLASH2), tensors, "Q8_0")
    form = gguf.GGMLQuantizationType.Q8_0
    read = open_checkpoint(str(path)).tensors
    for name in ("fc.weight", "layers.0.mlp.up_proj.weight"):
        expected = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], form), form)
        assert np.array_equal(read[name].numpy(), expected)


def test_gemmas_own_scale_is_not_taken_twice(tmp_path):
    """Newer converters write the square root of the hidden size for targets of Gemma."""
    source = published(tmp_path / "source", tiny_dflash(LLAMA), DFLASH)
    tensors = {name: t.numpy() for name, t in open_checkpoint(str(source)).tensors.items()}
    for scale, wanted in ((8.0, 1.0), (0.5, 0.5)):
        path = write_blocks(tmp_path / "x.gguf", tensors, DFLASH, embedding_scale=scale)
        made = convert(str(path), str(tmp_path / f"head-{scale}"), quantize=False)
        assert (made["embed_scale"], made["scales_as_target"]) == (wanted, True)


def test_an_assistant_of_muse_is_known_by_its_mask(tmp_path):
    """It is written as a head of DFlash, and its windows and its block are read otherwise."""
    for causal, wanted in (({}, MUSE_TYPE), ({"attention.causal": False}, None)):
        values = block_values(DFLASH) | {"tokenizer.ggml.mask_token_id": 201818, **causal}
        path = write_file(tmp_path / "x.gguf", "dflash", values, {"fc.weight": np.ones((4, 4))})
        assert open_checkpoint(str(path)).config.get("model_type") == wanted


# MTP layers

READ = ("qwen3.5", "qwen3.5 moe, tied", "qwen3-next moe", "glm-4.5", "glm-4.7-flash", "glm-5")


def rounded(name: str) -> Published:
    """A target and its layer, with numbers of bfloat16, to which one is added without loss."""
    part = FAMILIES[name]()
    whole = {
        n: mx.array(a).astype(mx.bfloat16).astype(mx.float32) for n, a in part.tensors.items()
    }
    return replace(part, tensors={n: np.array(a) for n, a in whole.items()})


@pytest.fixture
def model_file(tmp_path):
    def write(name: str) -> tuple[Published, Path, Path]:
        part = rounded(name)
        folder = write_checkpoint(tmp_path / "target", part)
        (folder / "config.json").write_text(json.dumps(full_config(part)))
        model_type = part.target.model_type
        return (
            part,
            folder,
            write_mtp(tmp_path / "model.gguf", model_type, part.tensors, part.config),
        )

    return write


@pytest.mark.parametrize("name", thorough(READ, "qwen3.5 moe, tied", "glm-4.5", "glm-5"))
def test_layers_of_a_models_file(tmp_path, model_file, name):
    part, folder, path = model_file(name)
    convert(str(folder), str(tmp_path / "a"), quantize=False)
    convert(str(path), str(tmp_path / "b"), quantize=False, target=str(folder))
    same_folders(tmp_path / "b", tmp_path / "a")
    check_layers(open_drafter(str(path), part.target, quantize_bits=0), part)


def test_a_models_file_alone_says_not_enough(model_file, out, capsys):
    _, _, path = model_file("qwen3.5")
    assert "--target" in refused(capsys, path, out)


def test_layers_for_another_target(model_file):
    _, _, path = model_file("qwen3.5")
    with pytest.raises(ValueError, match=r"the head (lacks|has)"):
        open_drafter(str(path), FAMILIES["glm-4.5"]().target)


# Mistakes

MODEL = {"block_count": 4, "nextn_predict_layers": 1}
NO_SIZES = {
    k: v
    for k, v in block_values(DFLASH).items()
    if k not in ("embedding_length", "embedding_scale")
}
WRONG = {
    "no drafter": ("llama", MODEL, "dflash, which are DFlash, DFlash2 and DSpark"),
    "no MTP layers": ("qwen35", {"block_count": 4}, "without MTP layers"),
    "several MTP layers": ("glm4moe", MODEL | {"nextn_predict_layers": 2}, "2 MTP layers"),
    "more layers than blocks": ("qwen35", MODEL | {"nextn_predict_layers": 5}, "without MTP"),
    "no taps": ("dflash", {"block_size": 4}, "says no target_layer_ids"),
    "no mask": ("dflash", {"block_size": 4, "target_layers": [1]}, "says no mask_token_id"),
    "taps of text": (
        "dflash",
        block_values(DFLASH) | {"target_layers": "1"},
        'target_layer_ids is "1"',
    ),
    "no sizes": ("dflash", NO_SIZES, "is a drafter of blocks"),
    "scaled values": ("dflash", block_values(DFLASH, **{"attention.value_scale": 0.7}), "scales"),
    "windows of text": (
        "dflash",
        block_values(DFLASH) | {"attention.sliding_window_pattern": 2},
        "layer_types is 2, expected a list",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_what_is_not_read(tmp_path, out, capsys, mistake):
    architecture, values, words = WRONG[mistake]
    path = write_file(tmp_path / "x.gguf", architecture, values, {"fc.weight": np.ones((4, 4))})
    assert words in refused(capsys, path, out)


def test_an_unknown_tensor_is_refused(tmp_path, out, capsys):
    source = published(tmp_path / "source", tiny_dflash(LLAMA), DFLASH)
    tensors = {name: t.numpy() for name, t in open_checkpoint(str(source)).tensors.items()}
    path = write_blocks(tmp_path / "x.gguf", tensors, DFLASH)
    named = {t.name: t.data.reshape(t.shape[::-1]) for t in gguf.GGUFReader(path).tensors}
    named["blk.0.hc_attn_fn.weight"] = np.ones((4, 4), np.float32)
    path = write_file(tmp_path / "y.gguf", "dflash", block_values(DFLASH), named)
    assert "blk.0.hc_attn_fn.weight" in refused(capsys, path, out)


@pytest.mark.parametrize("kept", [0.2, 0.9])
def test_files_that_are_cut_off(tmp_path, model_file, out, capsys, kept):
    _, folder, path = model_file("glm-4.5")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    options = ("--hf-path", path, "--mlx-path", out, "--target", folder)
    assert "cut off" in fails(capsys, *options)
