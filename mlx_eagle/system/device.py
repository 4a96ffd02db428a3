"""What the computation runs on, by name."""

import ctypes
import platform
import sys

import mlx.core as mx

NO_OPENBLAS = (
    "Note: speculation cannot win here, because without OpenBLAS in front the CPU wheel's "
    "reference BLAS takes k + 1 times as long for k + 1 rows: `apt install libopenblas0-pthread`, "
    "then `make demo` and `make bench` use it."
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


def print_blas_note() -> None:
    """Say on stderr, in one line, where this build cannot gain from speculation, and why."""
    on_cpu = mx.default_device() == mx.cpu
    if sys.platform == "linux" and on_cpu and not is_openblas_in_front():
        print(NO_OPENBLAS, file=sys.stderr)
