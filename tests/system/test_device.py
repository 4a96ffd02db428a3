"""What commands set, and say, before they run anything on the device."""

import os

import pytest

from mlx_eagle.system import device
from mlx_eagle.system.device import machine_of

CUDA = machine_of({"device_name": "NVIDIA H100", "architecture": "sm_90"}, "cuda")
APPLE = machine_of({"device_name": "Apple M4", "architecture": "applegpu_g16g"}, "metal")


@pytest.fixture
def prepared(monkeypatch, capsys):
    """What is said, and what cuDNN's variable is then, on a machine where it was ``before``."""

    def prepared(machine, before: str | None) -> tuple[str, str | None]:
        monkeypatch.setattr(device, "this_machine", lambda: machine)
        monkeypatch.setattr(device, "blas_note", lambda: None)
        monkeypatch.setenv(device.CUDNN, before or "")  # so that it is put back
        if before is None:
            del os.environ[device.CUDNN]
        device.prepare_device()
        return capsys.readouterr().err, os.environ.get(device.CUDNN)

    return prepared


def test_on_cuda_cudnn_is_kept_out_aloud(prepared):
    said, value = prepared(CUDA, None)
    assert value == "0"
    assert said.startswith("Note: MLX_CUDA_USE_CUDNN_SDPA=0 is set") and said.count("\n") == 1


@pytest.mark.parametrize("chosen", ["0", "1"])
def test_who_has_chosen_keeps_the_choice(prepared, chosen):
    assert prepared(CUDA, chosen) == ("", chosen)


def test_elsewhere_nothing_is_set(prepared):
    assert prepared(APPLE, None) == ("", None)
    assert prepared(machine_of({}, "cpu"), None) == ("", None)


def test_the_remedy_for_a_reference_blas_is_a_line(monkeypatch):
    monkeypatch.setattr(device.sys, "platform", "linux")
    monkeypatch.setattr(device, "openblas", lambda: None)
    monkeypatch.setattr(device, "slow_because", lambda: "it is Tuesday")
    monkeypatch.setattr(device.mx, "default_device", lambda: device.mx.cpu)
    note = device.blas_note()
    assert note.startswith("Note: drafting cannot be faster here")
    assert note.endswith(": it is Tuesday.") and "\n" not in note
    monkeypatch.setattr(device, "openblas", lambda: "one")
    assert device.blas_note() is None
