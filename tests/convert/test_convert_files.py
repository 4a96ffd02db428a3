"""Reading checkpoints: every file format, hostile pickles, damaged and missing files."""

import os
import pickle
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    CONFIG,
    as_midlayer,
    assert_same,
    eagle3_tensors,
    refused,
    state_dict_pickle,
    weights_of,
    write_bin,
    write_config,
    write_safetensors,
    write_shards,
)

from mlx_eagle.convert import convert
from mlx_eagle.convert.torch_file import read_bin

# Reading


@pytest.mark.parametrize(
    "form, sharded",
    [
        ("safetensors", False),
        ("safetensors", True),
        ("bin", False),
        ("bin", True),
    ],
)
def test_every_file_format_gives_the_same_weights(tmp_path, out, form, sharded):
    tensors = eagle3_tensors()
    native, folder = as_midlayer(tensors), tmp_path / "source"
    write_config(folder, CONFIG)
    if sharded:
        write_shards(folder, CONFIG, native, form)
    elif form == "safetensors":
        write_safetensors(folder, CONFIG, native)
    else:
        write_bin(folder / "pytorch_model.bin", native)
    convert(str(folder), str(out), quantize=False)
    assert_same(weights_of(out), tensors)
    assert weights_of(out)["d2t"].dtype == mx.int32


def test_bin_holds_every_number_format(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, 5))
    tensors = {
        "double": values,
        "float": values.astype(np.float32),
        "half": values.astype(np.float16),
        "bfloat": (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
        "long": rng.integers(-9, 9, 4),
        "int": rng.integers(-9, 9, 4).astype(np.int32),
        "bool": np.array([True, False]),
        "transposed": values.astype(np.float32).T,
        "scalar": np.array(3.0, np.float32),
    }
    write_bin(tmp_path / "x.bin", tensors)
    read = {name: tensor.read() for name, tensor in read_bin(tmp_path / "x.bin").items()}
    for name, value in tensors.items():
        if name == "bfloat":
            assert read[name].dtype == mx.bfloat16
            assert np.allclose(np.array(read[name].astype(mx.float32)), values, rtol=1e-2)
        else:
            expected = value.astype(np.float32) if name == "double" else value
            assert np.array_equal(np.array(read[name]), expected), name


def test_safetensors_are_preferred(tmp_path, out):
    folder = write_safetensors(tmp_path / "source", CONFIG, eagle3_tensors(seed=1))
    write_bin(folder / "pytorch_model.bin", eagle3_tensors(seed=2))
    convert(str(folder), str(out), quantize=False)
    assert_same(weights_of(out), eagle3_tensors(seed=1))


class Evil:
    """What runs when it is unpickled as usual."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_hostile_pickle_does_not_run(tmp_path, out, capsys):
    trace = tmp_path / "trace"
    payload = pickle.dumps({"fc.weight": Evil(trace)})
    folder = tmp_path / "source"
    write_config(folder, CONFIG)
    write_bin(folder / "pytorch_model.bin", {}, payload)
    sentence = refused(capsys, folder, out)
    assert "system" in sentence and "safetensors" in sentence
    (folder / "pytorch_model.bin").write_bytes(payload)  # begins as one from before torch 1.6
    assert "before its version 1.6" in refused(capsys, folder, out)
    assert not trace.exists()
    pickle.loads(payload)
    assert trace.exists(), "the payload is a real one"


@pytest.mark.parametrize(
    "payload",
    [
        b"cbuiltins\neval\n(X\x05\x00\x00\x001 + 1tR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n.",
        b"ctorch\nHalfStorage\n)R.",
        b"X\x01\x00\x00\x00aQ.",
        b"}X\x01\x00\x00\x00aK\x01s.",
        b"ctorch._utils\n_rebuild_tensor_v2\n}X\x08\x00\x00\x00__code__K\x01s\x86b.",
        b"garbage",
        b"",
    ],
)
def test_odd_pickles_are_refused(tmp_path, out, capsys, payload):
    write_config(tmp_path / "source", CONFIG)
    write_bin(tmp_path / "source" / "pytorch_model.bin", {}, payload or b" ")
    assert "pytorch_model.bin" in refused(capsys, tmp_path / "source", out)


def test_a_tensor_cannot_reach_beyond_its_storage(tmp_path, out, capsys):
    tensors = eagle3_tensors()
    data = state_dict_pickle(tensors)
    tensors["fc.weight"] = tensors["fc.weight"][:10]
    write_config(tmp_path / "source", CONFIG)
    write_bin(tmp_path / "source" / "pytorch_model.bin", tensors, data)
    assert "beyond its storage" in refused(capsys, tmp_path / "source", out)


# Damaged sources


def test_truncated_files(source, tmp_path, out, capsys):
    path = source / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "cut off" in refused(capsys, source, out)
    path.write_bytes(b"\x05\0\0\0\0\0\0\0hello")
    assert "no safetensors file" in refused(capsys, source, out)
    path.unlink()
    write_bin(source / "pytorch_model.bin", as_midlayer(eagle3_tensors()))
    whole = (source / "pytorch_model.bin").read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        (source / "pytorch_model.bin").write_bytes(whole[:size])
        assert "pytorch_model.bin" in refused(capsys, source, out)


def test_missing_files(source, tmp_path, out, capsys):
    assert "does not exist" in refused(capsys, tmp_path / "nowhere", out)
    (source / "config.json").rename(source / "other.json")
    assert "no config.json" in refused(capsys, source, out)
    (source / "config.json").write_text("{")
    assert "not valid JSON" in refused(capsys, source, out)
    (source / "other.json").replace(source / "config.json")
    (source / "model.safetensors").unlink()
    assert "no weights" in refused(capsys, source, out)
    sharded = write_shards(tmp_path / "sharded", CONFIG, eagle3_tensors(), "safetensors")
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002" in refused(capsys, sharded, out)


@pytest.mark.parametrize("name", sorted(eagle3_tensors().keys() - {"t2d", "lm_head.weight"}))
def test_a_missing_tensor_is_named(tmp_path, out, capsys, name):
    tensors = eagle3_tensors()
    del tensors[name]
    if name == "d2t":
        del tensors["t2d"]
    folder = write_safetensors(tmp_path / "source", CONFIG, tensors)
    assert name in refused(capsys, folder, out)


def test_an_unknown_tensor_is_refused(tmp_path, out, capsys):
    tensors = eagle3_tensors() | {"layers.0.self_attn.sinks": np.zeros(4, np.float32)}
    folder = write_safetensors(tmp_path / "source", CONFIG, tensors)
    assert "self_attn.sinks" in refused(capsys, folder, out)
