"""Whether steps are compiled, and the few shapes that they are then given."""

import mlx.core as mx


def is_compiled() -> bool:
    """On a GPU. On a CPU every fused kernel is a run of the C++ compiler, for minutes on end."""
    return bool(mx.default_device() == mx.gpu)


def padded(size: int, part: int) -> int:
    """``size``, up to a multiple of ``part`` where steps are compiled: one serves one shape."""
    return -(-size // part) * part if is_compiled() else size
