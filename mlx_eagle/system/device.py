"""What the computation runs on, by name, and what commands set or say before they begin."""

import ctypes
import os
import platform
import sys
from pathlib import Path

import mlx.core as mx

from .machines import this_machine

INSTALL = "apt install libopenblas0-pthread"
PRELOADED = "openblas-pthread/libopenblas.so.0"
NO_OPENBLAS = (
    "Note: drafting cannot be faster here, because MLX's CPU build for Linux comes with a "
    "reference BLAS, with which k + 1 rows take k + 1 times as long as one: {missing}put OpenBLAS "
    "in front of it with `export LD_PRELOAD={library}` (make demo, make test and make bench do "
    "that by themselves)."
)

CUDNN = "MLX_CUDA_USE_CUDNN_SDPA"
CUDNN_OFF = (
    f"Note: {CUDNN}=0 is set for this command: cuDNN's attention would make a new plan, about 20 "
    "ms, at every length of the text, so in every round."
)


def is_openblas_in_front() -> bool:
    """Whether a preloaded OpenBLAS answers MLX's calls instead of the wheel's own BLAS."""
    return hasattr(ctypes.CDLL(None), "openblas_get_config")


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
    if not is_openblas_in_front():
        return "reference BLAS"
    return f"OpenBLAS with {ctypes.CDLL(None).openblas_get_num_threads()} threads"


def openblas_path() -> Path:
    """Where Debian and Ubuntu put the library, whether it is there or not."""
    return Path("/usr/lib") / f"{platform.machine()}-linux-gnu" / PRELOADED


def blas_note() -> str | None:
    """In one line, that this build cannot gain from drafting, and the remedy; None where it can.

    A reference BLAS is only the CPU build's for Linux.
    """
    on_cpu = mx.default_device() == mx.cpu
    if sys.platform != "linux" or not on_cpu or is_openblas_in_front():
        return None
    library = openblas_path()
    missing = "" if library.exists() else f"install it (`{INSTALL}`), then "
    return NO_OPENBLAS.format(missing=missing, library=library)


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
