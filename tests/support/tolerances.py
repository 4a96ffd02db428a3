"""How near numbers come to what they are compared with, by type and device.

On a GPU sums are taken in another order, and cosines and fast_exp are the fast ones: MLX's
own tests allow ten times as much there. On some, products in float32 keep 10 bits of the
mantissa, unless ``MLX_ENABLE_TF32`` is 0 (see docs/pages/exactness.md).
"""

import os

import mlx.core as mx

from mlx_eagle.system.device import this_machine

ON_CPU = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 5e-2}
ON_GPU = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 1e-1}
TF32 = 2e-3


def tolerance(dtype: mx.Dtype = mx.float32) -> float:
    """The greatest difference to be expected, as a share of the greatest number."""
    if mx.default_device() == mx.cpu:
        return ON_CPU[dtype]
    if dtype == mx.float32 and has_tf32():
        return TF32
    return ON_GPU[dtype]


def has_tf32() -> bool:
    """Whether products of float32 may be rounded here: on CUDA and from M5 on, by default."""
    machine = this_machine()
    old = machine.backend == "metal" and machine.generation in ("M1", "M2", "M3", "M4")
    return os.environ.get("MLX_ENABLE_TF32", "1") != "0" and not old
