"""Precision of a target: what its weights are computed with, and the memory that this takes."""

import os
import sys

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, get_total_parameters

DTYPES = ("float32", "float16", "bfloat16")
SHARE_OF_RAM = 0.75  # for weights and caches, where nobody says how much
FLOAT32 = (
    "Note: on a CPU the weights are loaded as float32, {after} in place of {before}, as MLX is "
    "many times slower there with others. --dtype float32 leaves packed weights packed, --dtype "
    "float16 and bfloat16 take half precision."
)
TOO_LARGE = (
    "Note: MLX is many times slower on a CPU with weights that are not float32, but as float32 "
    "these would take {after} of {total}: they stay as they are, {before}."
)


def set_precision(model: nn.Module, dtype: str | None = None) -> nn.Module:
    """A model, just loaded, with floats of type ``dtype``; its packed weights stay packed.

    By default everything stays as it is stored. But on a CPU it is unpacked and made float32, if
    the memory is enough; a line on standard error says what that takes.
    """
    if dtype is None and mx.default_device() == mx.gpu:
        return model
    if dtype is None:
        before, after, total = weight_bytes(model), 4 * get_total_parameters(model), ram()
        size = {"before": megabytes(before), "after": megabytes(after), "total": megabytes(total)}
        if after > SHARE_OF_RAM * total:
            print(TOO_LARGE.format(**size), file=sys.stderr)
            return model
        if after > before:
            print(FLOAT32.format(**size), file=sys.stderr)
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


def megabytes(size: float) -> str:
    """1.5e9 -> "1500 MB" """
    return f"{size / 1e6:.0f} MB"
