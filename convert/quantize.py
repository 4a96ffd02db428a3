"""Which tensors of a head are quantized, and how finely."""

from dataclasses import dataclass

import mlx.core as mx

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True)
class Quantization:
    """Affine quantization: ``bits`` a weight, one scale and bias a ``group_size`` weights."""

    bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"cannot quantize to {self.bits} bits; choose one of {BITS}")
        if self.group_size not in GROUP_SIZES:
            raise ValueError(
                f"cannot quantize in groups of {self.group_size}; choose one of {GROUP_SIZES}"
            )

    def group_for(self, width: int) -> int | None:
        """The largest group, up to ``group_size``, that divides the width; None without one.

        It depends on the width alone, so q, k, v and gate, up, which are joined when the
        head is loaded, always agree.
        """
        fitting = (g for g in GROUP_SIZES if g <= self.group_size and width % g == 0)
        return next(fitting, None)


def pack(name: str, weight: mx.array, bits: int, group_size: int) -> dict[str, mx.array]:
    """A matrix as packed weights, scales and biases under the names mlx.nn uses.

    On the CPU, whatever the default device is: a GPU rounds ties otherwise, and the same
    checkpoint would become other files there. It takes 8 ns per weight, 3 s for the head of an
    8B model.
    """
    path = name.removesuffix(".weight")
    packed, scales, biases = mx.quantize(weight, group_size=group_size, bits=bits, stream=mx.cpu)
    return {name: packed, f"{path}.scales": scales, f"{path}.biases": biases}
