"""Precision of a target on a CPU and elsewhere, and what is said about memory."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers import tiny_llama
from mlx.utils import tree_flatten

from mlx_eagle.system import device as devices
from mlx_eagle.system.device import set_precision, weight_bytes

CPU, GPU = mx.Device(mx.cpu), mx.Device(mx.gpu)


def dtypes(model: nn.Module) -> set[mx.Dtype]:
    return {array.dtype for _, array in tree_flatten(model.parameters())}


@pytest.fixture
def packed() -> nn.Module:
    """A target in 4 bits whose floats are half precision."""
    model = tiny_llama()
    model.set_dtype(mx.float16)
    nn.quantize(model, group_size=32, bits=4)
    return model


@pytest.fixture
def device(monkeypatch):
    """Let MLX's default device be another one, as far as anybody asks."""
    return lambda kind: monkeypatch.setattr(mx, "default_device", lambda: kind)


def test_on_a_cpu_it_becomes_float32_and_the_memory_is_said(packed, device, capsys):
    device(CPU)
    before = weight_bytes(packed)
    tokens = mx.array([[1, 2, 3]])
    expected = packed(tokens).astype(mx.float32)
    model = set_precision(packed)
    assert dtypes(model) == {mx.float32}
    assert mx.allclose(model(tokens), expected, atol=0.05, rtol=0.05)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--dtype" in said
    after = weight_bytes(model)
    assert f"{after / 1e6:.0f} MB in place of {before / 1e6:.0f} MB" in said


def test_float32_is_not_spoken_of(device, capsys):
    device(CPU)
    assert dtypes(set_precision(tiny_llama())) == {mx.float32}
    assert capsys.readouterr().err == ""


def test_on_a_gpu_it_stays_as_it_is(packed, device, capsys):
    device(GPU)
    before = dtypes(packed)
    assert dtypes(set_precision(packed)) == before == {mx.uint32, mx.float16}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", [CPU, GPU])
def test_who_chooses_a_type_gets_it_and_keeps_packed_weights(
    packed, device, capsys, kind, monkeypatch
):
    device(kind)
    mac = devices.machine_of({"architecture": "applegpu_g16s"}, "metal")
    monkeypatch.setattr(devices, "this_machine", lambda: mac)
    assert dtypes(set_precision(packed, "float32")) == {mx.uint32, mx.float32}
    assert dtypes(set_precision(packed, "bfloat16")) == {mx.uint32, mx.bfloat16}
    assert capsys.readouterr().err == ""


def test_what_does_not_fit_stays_as_it_is_aloud(packed, device, capsys, monkeypatch):
    device(CPU)
    monkeypatch.setattr(devices, "ram", lambda: 1000)
    assert dtypes(set_precision(packed)) == {mx.uint32, mx.float16}
    assert "they stay as they are" in capsys.readouterr().err


def test_float32_that_is_there_already_is_not_too_large(device, capsys, monkeypatch):
    device(CPU)
    monkeypatch.setattr(devices, "ram", lambda: 1000)
    set_precision(tiny_llama())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("backend, dtype, lines", [
    ("cuda", "float32", 1), ("cuda", "bfloat16", 0), ("metal", "float32", 0),
])  # fmt: skip
def test_packed_weights_in_float32_are_told_of_on_cuda(
    packed, device, capsys, monkeypatch, backend, dtype, lines
):
    device(GPU)
    machine = devices.machine_of({"architecture": "sm_90"}, backend)
    monkeypatch.setattr(devices, "this_machine", lambda: machine)
    set_precision(packed, dtype)
    said = capsys.readouterr().err
    assert said.count("\n") == lines and ("tensor cores" in said) == bool(lines)
    set_precision(tiny_llama(), "float32")
    assert capsys.readouterr().err == "", "dense weights have their own kernels"
