"""What the computation runs on, by name, and what commands set or say before they begin."""

import ctypes
import os
import platform
import re
import sys

import mlx.core as mx

from .blas import openblas, slow_because
from .machines import this_machine

REFERENCE_BLAS = (
    "Note: drafting cannot be faster here, because MLX's CPU build for Linux comes with a "
    "reference BLAS, with which k + 1 rows take k + 1 times as long as one: {reason}."
)

CUDNN = "MLX_CUDA_USE_CUDNN_SDPA"
CUDNN_OFF = (
    f"Note: {CUDNN}=0 is set for this command: cuDNN's attention would make a new plan, about 20 "
    "ms, at every length of the text, so in every round."
)


def device_name() -> str:
    """The chip, and on a Linux CPU the BLAS that decides what several rows cost."""
    on_cpu = mx.default_device() == mx.cpu
    name = str(mx.device_info().get("device_name", platform.processor() or platform.machine()))
    if not on_cpu:
        return name
    return f"{name} CPU" if sys.platform == "darwin" else f"{name} CPU, {blas_name()}"


def blas_name() -> str:
    """The library behind products of floats on a CPU."""
    if sys.platform == "darwin":
        return "Accelerate"
    found = openblas()
    if found is None:
        return "reference BLAS"
    found.openblas_get_config.restype = ctypes.c_char_p
    config = re.search(r"OpenBLAS (\d+\.\d+\.\d+)", found.openblas_get_config().decode())
    version = f" {config[1]}" if config else ""
    return f"OpenBLAS{version} with {found.openblas_get_num_threads()} threads"


def blas_note() -> str | None:
    """In one line, that this build cannot gain from drafting, and the remedy; None where it can.

    A reference BLAS is only the CPU build's for Linux.
    """
    on_cpu = mx.default_device() == mx.cpu
    if sys.platform != "linux" or not on_cpu or openblas() is not None:
        return None
    return REFERENCE_BLAS.format(reason=slow_because())


def prepare_device() -> None:
    """For commands, before the first attention: what lets drafting gain, or that it cannot.

    On CUDA the environment is changed, unless the user has said something about cuDNN there;
    what is changed or wanting is said on standard error.
    """
    if note := blas_note():
        print(note, file=sys.stderr)
    if this_machine().backend == "cuda" and CUDNN not in os.environ:
        os.environ[CUDNN] = "0"
        print(CUDNN_OFF, file=sys.stderr)


def settle_compiling() -> None:
    """Let MLX find out now whether it can compile for this device.

    On a CPU it runs the compiler to see that, once per process, before the first compiled
    function; and as long as a process waits in C's ``system``, Ctrl-C is lost to it. So whoever
    shall miss none begins with this.
    """
    mx.compile(lambda: None)()
