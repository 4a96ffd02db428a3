"""The demo pair: the target that ``target.py`` fetches, with the head in ``head/``."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.utils import dequantize_model

from ..drafters import eagle3
from ..drafters.eagle3 import EagleDrafter
from ..drafters.folder import LoadOptions, read_config
from .target import demo_target_path

HEAD = Path(__file__).parent / "head"


def load_demo(
    dtype: mx.Dtype | str | None = None,
    *,
    quantized: bool | None = None,
    quantize_bits: int | None = None,
) -> tuple[nn.Module, Any, EagleDrafter]:
    """The demo pair: (model, tokenizer, drafter); the target is fetched the first time.

    Without arguments the target stays 4-bit on a GPU, in float16, and is dequantized to
    float32 on a CPU, where other types are slow; the head, which is shipped in 4 to 6 bits,
    follows it. A ``dtype`` (its name will do) means dense weights of that type; ``quantized``
    keeps them packed, or not, whatever the device. ``quantize_bits`` quantizes the head while
    loading it.

    The tokenizer is mlx-lm's ``TokenizerWrapper``, whose methods have no types: as Any, strict
    type checkers let them be called.

    Raises ValueError where the target cannot be fetched.
    """
    on_gpu = mx.default_device() == mx.gpu
    if quantized is None:
        quantized = on_gpu and dtype is None
    if isinstance(dtype, str):
        dtype = getattr(mx, dtype)
    if dtype is None:
        dtype = mx.float16 if on_gpu else mx.float32
    model, tokenizer = mlx_lm.load(str(demo_target_path()), lazy=True)
    if not quantized:
        # Before the cast: the target is what its float16 scales say, in any dtype.
        model = dequantize_model(model)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    drafter = eagle3.load(HEAD, read_config(HEAD), model, LoadOptions(quantize_bits))
    if not quantized and quantize_bits is None:
        drafter.head = dequantize_model(drafter.head)
        mx.eval(drafter.head.parameters())  # another thread could not compute them
    return model, tokenizer, drafter
