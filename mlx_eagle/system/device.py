"""What the computation runs on, by name."""

import ctypes
import platform
import sys
from pathlib import Path

import mlx.core as mx

INSTALL = "apt install libopenblas0-pthread"
PRELOADED = "openblas-pthread/libopenblas.so.0"
NO_OPENBLAS = (
    "Note: drafting cannot be faster here, because MLX's CPU build for Linux comes with a "
    "reference BLAS, with which k + 1 rows take k + 1 times as long as one: {missing}put OpenBLAS "
    "in front of it with `export LD_PRELOAD={library}` (make demo, make test and make bench do "
    "that by themselves)."
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
    blas = ""
    if sys.platform == "linux":
        blas = ", reference BLAS"
        if is_openblas_in_front():
            blas = f", OpenBLAS with {ctypes.CDLL(None).openblas_get_num_threads()} threads"
    return f"{name} CPU{blas}"


def openblas_path() -> Path:
    """Where Debian and Ubuntu put the library, whether it is there or not."""
    return Path("/usr/lib") / f"{platform.machine()}-linux-gnu" / PRELOADED


def print_blas_note() -> None:
    """Say on stderr, in one line, where this build cannot gain from drafting, and the remedy."""
    on_cpu = mx.default_device() == mx.cpu
    if sys.platform == "linux" and on_cpu and not is_openblas_in_front():
        library = openblas_path()
        missing = "" if library.exists() else f"install it (`{INSTALL}`), then "
        print(NO_OPENBLAS.format(missing=missing, library=library), file=sys.stderr)
