"""Exponentials as fast as the device makes them.

On a CPU, MLX's powers take a quarter of the time of its exp, of which training needs millions.
"""

import math
from typing import Any

import mlx.core as mx

from .compiled import is_compiled


def exponentials(x: mx.array) -> mx.array:
    """e to the ``x``."""
    return mx.exp(x) if is_compiled() else mx.power(math.e, x)


def softmax(x: mx.array) -> mx.array:
    """Over the last axis, in float32 and back to the type of ``x``."""
    if is_compiled():
        return mx.softmax(x, axis=-1, precise=True)
    return powers(x.astype(mx.float32)).astype(x.dtype)


def _powers(x: mx.array) -> mx.array:
    exps = exponentials(x - x.max(axis=-1, keepdims=True))
    return exps / exps.sum(axis=-1, keepdims=True)


def _gradient(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    of_output = cotangent * output
    return of_output - output * of_output.sum(axis=-1, keepdims=True)


powers: Any = mx.custom_function(_powers)
powers.vjp(_gradient)
