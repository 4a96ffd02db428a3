"""The activations of gated MLPs, by the names that checkpoints give them."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn


def _gated(activation: Callable[[mx.array], mx.array]) -> Callable[[mx.array, mx.array], mx.array]:
    """activation(gate) * up, in one kernel."""
    return mx.compile(lambda gate, up: activation(gate) * up, shapeless=True)


GATED = {
    "silu": _gated(nn.silu),
    "gelu": _gated(nn.gelu),
    "gelu_pytorch_tanh": _gated(nn.gelu_approx),
}
