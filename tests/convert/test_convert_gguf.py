"""Heads in llama.cpp's GGUF files, written by the gguf package."""

import json
import sys
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    CONFIG,
    assert_same,
    config_of,
    eagle3_tensors,
    fails,
    ones,
    refused,
    renamed,
    weights_of,
    write_gguf,
)
from mlx_lm.models.rope_utils import initialize_rope

from mlx_eagle.convert import convert
from mlx_eagle.convert.checkpoint import open_checkpoint
from mlx_eagle.convert.gguf import read_gguf

DEMO = Path(__file__).parents[1] / "data" / "eagle3-smollm2-135m-instruct"
PLAIN = eagle3_tensors()

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


@pytest.mark.parametrize("kind", ["Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_NL", "TQ1_0"])
def test_blocks_are_read_by_the_gguf_package(tmp_path, monkeypatch, capsys, kind):
    form = gguf.GGMLQuantizationType[kind]
    width, num_bytes = gguf.GGML_QUANT_SIZES[form]
    blocks = np.random.default_rng(1).integers(0, 60, (16 * 256 // width, num_bytes))
    data = blocks.astype(np.uint8).reshape(16, -1)
    path = tmp_path / "head.gguf"
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_tensor("fc.weight", data, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, tensors = read_gguf(path)
    assert tensors["fc.weight"].shape == (16, 256)
    assert np.array_equal(tensors["fc.weight"].numpy(), gguf.quants.dequantize(data, form))
    monkeypatch.setitem(sys.modules, "gguf", None)
    sentence = fails(capsys, "--hf-path", path, "--mlx-path", tmp_path / "out")
    assert f"type {form.value}" in sentence and "mlx-eagle[gguf]" in sentence


def test_gguf_frequency_factors(tmp_path):
    """llama3 scaling as llama.cpp stores it: divisors of the frequencies."""
    factors = np.array([1, 1, 1, 2, 4, 8, 8, 8], np.float32)
    path = write_gguf(tmp_path / "head.gguf", PLAIN, CONFIG, **{"rope_freqs.weight": factors})
    convert(str(path), str(tmp_path / "out"))
    rope = config_of(tmp_path / "out")["rope"]
    module = initialize_rope(16, rope["theta"], False, rope["scaling"], 2048)
    x = mx.random.normal((1, 1, 3, 16))
    freqs = mx.array(factors) * 10000.0 ** (mx.arange(0, 16, 2) / 16)
    expected = mx.fast.rope(x, 16, traditional=False, base=None, scale=1.0, offset=3, freqs=freqs)
    assert mx.allclose(module(x, offset=3), expected, atol=1e-6).item()


def test_damaged_gguf(tmp_path, out, capsys):
    path = write_gguf(tmp_path / "head.gguf", PLAIN, CONFIG)
    whole = path.read_bytes()
    for size in (0, 3, 20, 400, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:size])
        assert "head.gguf" in refused(capsys, path, out)
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "llama" in refused(capsys, path, out)
