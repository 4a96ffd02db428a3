"""Whether steps are compiled, as they are on a GPU, and the sizes of arrays that this asks for."""

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
