"""Quantization of a drafter: the bits and the group size of each matrix, and its packing.

``usual_quantization`` is the rule for drafters that are opened as they were published.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..system.cli_values import GROUP_SIZES, QUANTIZED_BITS
from ..system.device import Machine, this_machine

Packing = dict[str, int]
"""The packing of a matrix, as in a ``quantization`` entry: {"group_size": 64, "bits": 5}"""

USUAL_BITS = 4
MORE_BITS = 8
"""Bits of a drafter whose target has more than ``USUAL_BITS``."""
FINE_BITS = ({"fc": 6, "lm_head": 6}, {"fc": 5, "lm_head": 6}, {"fc": 5, "lm_head": 5})
"""Bits of the fusion and the output matrix, best first: nearly all loss is from their rounding."""
MOST_BYTES = 1.3
"""The most that a head may take with more bits for these two, relative to its size in 4 bits."""


@dataclass(frozen=True)
class Quantization:
    """Affine quantization: ``bits`` per weight, a scale and a bias per ``group_size`` weights.

    Without ``bits`` they are mixed: 4, and for two matrices the first of ``FINE_BITS`` with which
    the head takes at most ``MOST_BYTES``, or the last one.
    """

    bits: int | None = None
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.bits is not None and self.bits not in QUANTIZED_BITS:
            raise ValueError(
                f"cannot quantize to {self.bits} bits; choose one of {QUANTIZED_BITS}"
            )
        if self.group_size not in GROUP_SIZES:
            raise ValueError(
                f"cannot quantize in groups of {self.group_size}; choose one of {GROUP_SIZES}"
            )

    @property
    def words(self) -> str:
        """The bits for people: "8 bits", or "4 to 6 bits"."""
        return between(self.bits or USUAL_BITS, self.bits or max(FINE_BITS[0].values()))

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Packing | None]:
        """The packing of each matrix by its path; None if no group size divides its width.

        q, k, v and gate, up are joined when the head is loaded, so they are always packed alike.
        """
        sizes = [size for size in GROUP_SIZES if size <= self.group_size]
        groups = {
            path: max((size for size in sizes if shape[-1] % size == 0), default=None)
            for path, shape in shapes.items()
        }

        def packed(usual: int, fine: Mapping[str, int]) -> dict[str, Packing | None]:
            return {
                path: {"group_size": group, "bits": fine.get(path, usual)} if group else None
                for path, group in groups.items()
            }

        if self.bits is not None:
            return packed(self.bits, {})
        most = MOST_BYTES * num_bytes(shapes, packed(USUAL_BITS, {}))
        mixed = [packed(USUAL_BITS, fine) for fine in FINE_BITS]
        return next((m for m in mixed if num_bytes(shapes, m) <= most), mixed[-1])

    def notes(
        self, shapes: Mapping[str, tuple[int, ...]], chosen: Mapping[str, Packing | None]
    ) -> list[str]:
        """A line for each matrix whose width allows only smaller groups, or no groups."""
        lines = []
        for path, own in chosen.items():
            if own is None or own["group_size"] != self.group_size:
                done = f"in groups of {own['group_size']}" if own else "not quantized"
                width = shapes[path][-1]
                lines.append(
                    f"{path}: {width} columns are no multiple of {self.group_size}; {done}"
                )
        return lines

    def entry(self, chosen: Mapping[str, Packing | None]) -> dict[str, Any]:
        """The entry ``quantization`` of a config, as mlx-lm writes it: exceptions by path."""
        most = {"group_size": self.group_size, "bits": self.bits or USUAL_BITS}
        return most | {path: own or False for path, own in chosen.items() if own != most}


def shapes_of_matrices(
    tensors: Mapping[str, Any], never: tuple[str, ...] = ()
) -> dict[str, tuple[int, ...]]:
    """The shapes by path of the tensors that may be packed, unless their names end in ``never``.

    A tensor is an array, or one of a checkpoint that has not been read.
    """
    return {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if len(tensor.shape) in (2, 3) and name.endswith(".weight") and not name.endswith(never)
    }


def num_bytes(
    shapes: Mapping[str, tuple[int, ...]], chosen: Mapping[str, Packing | None]
) -> float:
    """The bytes of matrices so packed; scales, biases and unpacked weights take 16 bits."""
    bits = {
        path: own["bits"] + 32 / own["group_size"] if own else 16 for path, own in chosen.items()
    }
    return sum(math.prod(shape) * bits[path] for path, shape in shapes.items()) / 8


def pack(name: str, weight: mx.array, packing: Packing) -> dict[str, mx.array]:
    """A matrix as packed weights, scales and biases, by the names of mlx.nn.

    It is packed on the CPU, for a GPU rounds ties differently, and files would depend on the
    machine. That takes 8 ns per weight, 3 s for the head of an 8B model.
    """
    path = name.removesuffix(".weight")
    packed, scales, biases = mx.quantize(
        weight, packing["group_size"], packing["bits"], stream=mx.cpu
    )
    return {name: packed, f"{path}.scales": scales, f"{path}.biases": biases}


def packed(
    config: dict[str, Any],
    arrays: dict[str, mx.array],
    quantization: Quantization | None,
    never: tuple[str, ...],
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Config and arrays of a converted folder, quantized but for names that end in ``never``."""
    if quantization is None:
        return config, arrays
    chosen = quantization.choose(shapes_of_matrices(arrays, never))
    stored: dict[str, mx.array] = {}
    for name, array in arrays.items():
        packing = chosen.get(name.removesuffix(".weight"))
        stored |= pack(name, array, packing) if packing else {name: array}
    return config | {"quantization": quantization.entry(chosen)}, stored


def usual_quantization(target: nn.Module, machine: Machine | None = None) -> Quantization | None:
    """The quantization of a drafter that is opened as published; None: it stays as it is.

    Beside a target in 4 bits or fewer the converter's own, with more 8 bits. It stays beside a
    target that is not quantized, and where packed weights multiply more slowly than floats.
    ``machine`` is this one unless given.
    """
    weights = weights_by_bits([target])
    packed = {bits: num for bits, num in weights.items() if bits in QUANTIZED_BITS}
    if not packed or (machine or this_machine()).prefers_floats:
        return None
    most = max(packed, key=lambda bits: packed[bits])
    return Quantization(None if most <= USUAL_BITS else MORE_BITS)


def weights_by_bits(modules: Iterable[nn.Module]) -> Counter[int]:
    """Number of weights of layers by the bits that each takes, without its scales."""
    found: Counter[int] = Counter()
    for module in modules:
        for layer in module.modules():
            weight = layer.get("weight")
            if isinstance(weight, mx.array) and weight.ndim > 1:
                bits = layer.bits if "scales" in layer else 8 * weight.itemsize
                found[bits] += 8 * weight.nbytes // bits
    return found


def packing_words(modules: Iterable[nn.Module]) -> str:
    """The packing of a drafter for people: "quantized to 4 to 6 bits", or "not quantized"."""
    bits = [bits for bits in weights_by_bits(modules) if bits in QUANTIZED_BITS]
    return f"quantized to {between(min(bits), max(bits))}" if bits else "not quantized"


def between(least: int, most: int) -> str:
    """4, 6 -> "4 to 6 bits" """
    return f"{least} bits" if least == most else f"{least} to {most} bits"


def bits_of(quantization: Mapping[str, Any]) -> str:
    """The bits of a ``quantization`` entry for people.

    {"group_size": 64, "bits": 5, "lm_head": {"group_size": 64, "bits": 6}} -> "5 to 6 bits"
    """
    own = [entry["bits"] for entry in quantization.values() if isinstance(entry, dict)]
    return between(min([quantization["bits"], *own]), max([quantization["bits"], *own]))


def quantize_now(
    module: nn.Module,
    stored: Mapping[str, Any] | None,
    quantization: Quantization | None,
    kept: str | tuple[str, ...] = (),
) -> None:
    """Quantize a module, None: not at all; ``stored`` is the ``quantization`` entry it has.

    Layers whose path ends in ``kept`` stay as they are. Raises ValueError where there is an entry.
    """
    if quantization is None:
        return
    if stored:
        raise ValueError(
            f"the head is already quantized to {bits_of(stored)}: load it as it is, or "
            "convert it again with another --q-bits."
        )
    shapes = {
        path: layer.weight.shape
        for path, layer in module.named_modules()
        if hasattr(layer, "to_quantized") and not path.endswith(kept)
    }
    chosen = quantization.choose(shapes)
    nn.quantize(module, class_predicate=lambda path, _: chosen.get(path) or False)
