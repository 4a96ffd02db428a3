"""Arithmetic that differs where steps are compiled: they are on a GPU, and not on a CPU."""

import math

import mlx.core as mx


def is_compiled() -> bool:
    """Return whether steps are compiled: on a GPU they are.

    On a CPU every fused kernel is a run of the C++ compiler, which takes minutes in total.
    """
    return bool(mx.default_device() == mx.gpu)


def padded(size: int, part: int) -> int:
    """Round ``size`` up to a multiple of ``part`` where steps are compiled.

    A compiled step serves one shape only, so there must not be many of them.
    """
    return -(-size // part) * part if is_compiled() else size


def fast_exp(x: mx.array) -> mx.array:
    """Raise e to ``x``; on a CPU, MLX's power takes a quarter of the time of its exp."""
    return mx.exp(x) if is_compiled() else mx.power(math.e, x)


def softmax(x: mx.array) -> mx.array:
    """Take the softmax over the last axis, in float32, and return it in the type of ``x``."""
    if is_compiled():
        return mx.softmax(x, axis=-1, precise=True)
    return softmax_of_powers(x.astype(mx.float32)).astype(x.dtype)


@mx.custom_function
def softmax_of_powers(x: mx.array) -> mx.array:
    """Take the softmax over the last axis by ``fast_exp``."""
    powers = fast_exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _softmax_gradient(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    product = cotangent * output
    return product - output * product.sum(axis=-1, keepdims=True)


softmax_of_powers.vjp(_softmax_gradient)
