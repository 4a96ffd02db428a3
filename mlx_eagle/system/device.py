"""What the computation runs on, by name, and what commands set or say before they begin."""

import ctypes
import os
import re
import sys

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, get_total_parameters

from .blas import openblas, slow_because
from .machines import Machine, this_machine

REFERENCE_BLAS = (
    "Note: drafting cannot be faster here, because MLX's CPU build for Linux comes with a "
    "reference BLAS, with which k + 1 rows take k + 1 times as long as one: {reason}."
)

CUDNN = "MLX_CUDA_USE_CUDNN_SDPA"
CUDNN_OFF = (
    f"Note: {CUDNN}=0 is set for this command: cuDNN's attention would make a new plan, about 20 "
    "ms, at every length of the text, so in every round."
)


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


DTYPES = ("float32", "float16", "bfloat16")
SHARE_OF_RAM = 0.75  # for weights and caches, where nobody says how much
FLOAT32 = (
    "Note: on a CPU {whose} weights are loaded as float32, {after} in place of {before}, as MLX "
    "is many times slower there with others."
)
TARGET = "the target's"
CHOICE = (
    " --dtype float32 leaves packed weights packed, --dtype float16 and bfloat16 take half "
    "precision."
)
TOO_LARGE = (
    "Note: MLX is many times slower on a CPU with weights that are not float32, but as float32 "
    "{whose} would take {after} of {total}: they stay as they are, {before}."
)


def set_precision(model: nn.Module, dtype: str | None = None, whose: str = TARGET) -> nn.Module:
    """A model, just loaded, with floats of type ``dtype``; its packed weights stay packed.

    By default everything stays as it is stored. But on a CPU it is unpacked and made float32, if
    the memory is enough; a line on standard error says what that takes.
    """
    if dtype is None and mx.default_device() == mx.gpu:
        return model
    if dtype is None:
        before, after, total = weight_bytes(model), 4 * get_total_parameters(model), ram()
        sizes = {"before": before, "after": after, "total": total}
        size = {name: megabytes(value, digits=0) for name, value in sizes.items()}
        if after > before and after > SHARE_OF_RAM * total:
            print(TOO_LARGE.format(whose=whose, **size), file=sys.stderr)
            return model
        if after > before:
            choice = CHOICE if whose == TARGET else ""
            print(FLOAT32.format(whose=whose, **size) + choice, file=sys.stderr)
        # Before the cast: a packed weight is what its scales say in their own type.
        model = dequantize_model(model)
    model.set_dtype(getattr(mx, dtype or "float32"))
    mx.eval(model.parameters())  # another thread could not compute them
    return model


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters as they are stored (packed where quantized)."""
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def ram() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory(machine: Machine) -> tuple[float, float]:
    """Bytes of memory, and of those that this process may have for weights and caches."""
    info = mx.device_info()
    if machine.backend == "metal":
        return float(info["memory_size"]), float(info["max_recommended_working_set_size"])
    if machine.backend == "cuda":
        free = float(info["free_memory"]) + mx.get_active_memory() + mx.get_cache_memory()
        return float(info["total_memory"]), free
    total = float(ram())
    return total, SHARE_OF_RAM * total


def megabytes(size: float, digits: int = 1) -> str:
    """1.5e9 bytes -> "1500.0 MB" """
    return f"{size / 1e6:.{digits}f} MB"
