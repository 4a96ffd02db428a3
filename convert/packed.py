"""Matrices that a checkpoint holds quantized, as floats again, exactly as their formats say.

What a matrix P.weight is made of lies beside it:

    integers        weight_packed (int32), weight_scale, weight_shape, perhaps
                    weight_zero_point and weight_g_idx      compressed-tensors, pack-quantized
    bytes           weight (int8 or an 8-bit float), weight_scale (one, one a row, a group or a
                    block)                                  compressed-tensors, ModelOpt FP8
                    with weight_scale_inv or qscale_weight  fine-grained FP8, Mistral
    4-bit floats    weight_packed, weight_scale, weight_global_scale (a divisor; without one
                    the scales are powers of two)           compressed-tensors, NVFP4 and MXFP4
                    weight, weight_scale, weight_scale_2    ModelOpt NVFP4

The tensors decide; of the config only what they leave open is read: bits and sizes of blocks.
Formats: compressed-tensors' compressors, Model-Optimizer's qtensor, and the OCP specification
of microscaling formats 1.0 (E2M1 and E8M0).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .stored import Shaped, Stored, Tensor

SCALES = ("weight_scale", "weight_scale_inv", "qscale_weight")
PARTS = (
    "weight_packed",
    *SCALES,
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
)
# Of activations and caches, which are not quantized here.
UNUSED = re.compile(r"\.(((input|output|[kqv])_(scale|zero_point|global_scale))|qscale_act)$")
FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
BLOCK = (128, 128)  # of fine-grained FP8 whose config does not say it


def _small_floats(exponent: int, mantissa: int, has_infinity: bool) -> np.ndarray:
    """Every value of an 8-bit float, (256,) float32, by its bits."""
    bits = np.arange(256)
    fraction = (bits & ((1 << mantissa) - 1)) / (1 << mantissa)
    power, bias = (bits >> mantissa) & ((1 << exponent) - 1), (1 << (exponent - 1)) - 1
    leading = np.where(power == 0, 0, 1)
    values = (leading + fraction) * 2.0 ** (np.maximum(power, 1) - bias)
    top = power == (1 << exponent) - 1
    if has_infinity:
        values = np.where(top, np.where(fraction == 0, np.inf, np.nan), values)
    else:
        values = np.where(top & (bits & 7 == 7), np.nan, values)
    return np.where(bits & 128, -values, values).astype(np.float32)


with np.errstate(over="ignore"):
    BYTES = {
        "F8_E4M3": _small_floats(4, 3, has_infinity=False),
        "F8_E5M2": _small_floats(5, 2, has_infinity=True),
        "F8_E8M0": np.ldexp(np.float32(1), np.arange(256) - 127),
        "I8": np.arange(256).astype(np.uint8).view(np.int8).astype(np.float32),
    }
"""The values of one-byte types, by their bits."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
NIBBLES = np.concatenate([E2M1, -E2M1])


@dataclass(frozen=True)
class Unpacked(Shaped):
    """A matrix that is made of several tensors, ``parts`` by their last names, when it is read.

    ``format`` is what the format's own library makes of it; where scales are float32, values
    are not rounded further.
    """

    name: str
    parts: Mapping[str, Stored]
    shape: tuple[int, ...]
    format: str
    num_bits: tuple[int, ...]  # that the config speaks of
    block: tuple[int, int] | None

    def read(self) -> mx.array:
        """The values; ValueError where the parts do not go together."""
        values, scales = self._values(), self._scales()
        if "weight_zero_point" in self.parts:
            values = values - self._over_columns(self._zero_points(scales))
        with np.errstate(over="ignore", invalid="ignore"):
            product = values * self._over_columns(scales)
        return mx.array(product).astype(FLOATS[self.format])

    def _values(self) -> np.ndarray:
        """The quantized numbers, (rows, columns) float32."""
        packed = self.parts.get("weight_packed", self.parts.get("weight"))
        assert packed is not None
        data = packed.numpy()
        if packed.format == "I32":
            return self._integers(data, self.shape[1])
        if packed.format == "U8":
            halves = np.stack([data & 15, data >> 4], axis=-1)
            return NIBBLES[halves.reshape(self.shape)]
        return BYTES[packed.format][data.view(np.uint8)]

    def _integers(self, words: np.ndarray, count: int) -> np.ndarray:
        """Rows of int32 words as ``count`` signed integers each, float32.

        They lie bit behind bit, as now, or only whole ones in a word, as until 2025, which is
        another order where the bits do not divide 32.
        """
        fitting = []
        for bits in self.num_bits or tuple(range(1, 9)):
            dense, whole = -(-count * bits // 32), -(-count // (32 // bits))
            if words.shape[1] in (dense, whole):
                fitting.append((bits, words.shape[1] == dense))
        if len(fitting) != 1:
            raise ValueError(
                f"{self.name} is packed as {words.shape[1]} words of {count} integers, and the "
                "config does not say of how many bits; the checkpoint is damaged"
            )
        ((bits, is_dense),) = fitting
        stream = np.unpackbits(
            np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little"
        )
        if not is_dense:
            stream = stream.reshape(len(words), -1, 32)[..., : 32 // bits * bits]
            stream = stream.reshape(len(words), -1)
        places = stream[:, : count * bits].reshape(len(words), count, bits)
        values = (places * (1 << np.arange(bits))).sum(axis=-1)
        return (values - (1 << (bits - 1))).astype(np.float32)

    def _scales(self) -> np.ndarray:
        """Scales as floats, in as many dimensions as they are stored, at least two."""
        stored = next(self.parts[name] for name in SCALES if name in self.parts)
        scales = _floats(stored)
        if "weight_global_scale" in self.parts:
            scales = scales / _floats(self.parts["weight_global_scale"]).reshape(-1)[0]
        if "weight_scale_2" in self.parts:
            scales = scales * _floats(self.parts["weight_scale_2"]).reshape(-1)[0]
        return scales.reshape(-1, 1) if scales.ndim < 2 else scales.reshape(len(scales), -1)

    def _zero_points(self, scales: np.ndarray) -> np.ndarray:
        stored = self.parts["weight_zero_point"]
        if stored.format == "I32":  # packed down the rows
            return self._integers(stored.numpy().T, self.shape[0]).T
        zeros = _floats(stored)
        return zeros.reshape(scales.shape)

    def _over_columns(self, per_group: np.ndarray) -> np.ndarray:
        """One number for every number of the matrix, or as many as broadcast to that."""
        rows, columns = self.shape
        if "weight_g_idx" in self.parts:  # which group each column is of
            groups = self.parts["weight_g_idx"].numpy().reshape(-1)
            if len(groups) == columns and groups.min() >= 0 and groups.max() < per_group.shape[1]:
                return per_group[:, groups]
            raise ValueError(f"{self.name} has groups that are none; the checkpoint is damaged")
        steps = []
        for axis, (size, count) in enumerate(zip(self.shape, per_group.shape, strict=True)):
            is_block = self.shape[0] != per_group.shape[0]
            step = _step(size, count, (self.block or BLOCK)[axis] if is_block else None)
            if step is None:
                raise ValueError(
                    f"{self.name} is {rows} x {columns} with scales of "
                    f"{' x '.join(map(str, per_group.shape))}, which do not go together; the "
                    "checkpoint is damaged"
                )
            steps.append(step)
        down, across = steps
        spread = per_group if down in (1, rows) else np.repeat(per_group, down, axis=0)[:rows]
        if across in (1, columns):
            return spread
        return np.repeat(spread, across, axis=1)[:, :columns]


def _step(size: int, count: int, block: int | None) -> int | None:
    """How many numbers in a row have a scale in common, where ``count`` serve ``size``."""
    if count in (1, size):
        return size // count
    if block is not None and -(-size // block) == count:
        return block
    return size // count if size % count == 0 else None


def _floats(stored: Stored) -> np.ndarray:
    """Scales or zero points in float32."""
    values = stored.numpy()
    if stored.format == "U8":  # powers of two, of MX formats
        return BYTES["F8_E8M0"][values]
    if stored.format in BYTES:
        return BYTES[stored.format][values.view(np.uint8)]
    return np.array(stored.read().astype(mx.float32))


def _weights_groups(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What the quantization entry says of weights, group by group."""
    entry = config.get("quantization_config") or config.get("compression_config") or {}
    groups = entry.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
            yield group["weights"]
    yield {"block_structure": entry.get("weight_block_size")}


def _settings(config: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """Bits of integers and sizes of blocks that the config names."""
    bits, block = set(), None
    for weights in _weights_groups(config):
        if isinstance(weights.get("num_bits"), int) and 1 <= weights["num_bits"] <= 8:
            bits.add(weights["num_bits"])
        found = weights.get("block_structure")
        sizes = found if isinstance(found, list) and len(found) == 2 else [0]
        if all(isinstance(size, int) and size > 0 for size in sizes):
            block = (sizes[0], sizes[1])
    return tuple(sorted(bits)), block


def _shape(name: str, parts: Mapping[str, Stored]) -> tuple[int, ...]:
    """Rows and columns of the matrix; ValueError for parts that are of no format known here."""
    packed = parts.get("weight_packed", parts.get("weight"))
    scale = next((parts[part] for part in SCALES if part in parts), None)
    if packed is not None and scale is not None and len(packed.shape) == 2:
        if packed.format == "I32" and "weight_shape" in parts:
            shape = tuple(map(int, parts["weight_shape"].numpy().reshape(-1)))
            room = packed.shape[1] * 32
            if len(shape) == 2 and shape[0] == packed.rows and 0 < shape[1] <= room:
                return shape
            raise ValueError(f"{name} is said to be {shape}; the checkpoint is damaged")
        if packed.format == "U8" and scale.format in ("F8_E4M3", "F8_E8M0", "U8"):
            return packed.rows, 2 * packed.shape[1]
        if packed.format in ("F8_E4M3", "F8_E5M2", "I8"):
            return packed.shape
    found = ", ".join(f"{part} ({tensor.format})" for part, tensor in parts.items())
    raise ValueError(
        f"{name} is quantized in a way that is not read ({found}); compressed-tensors (integers, "
        "FP8, NVFP4, MXFP4), ModelOpt's FP8 and NVFP4 and GGUF are, so take such a head, or the "
        "bfloat16 one it was made from"
    )


def unpacked(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors with every quantized matrix in one piece, unread; others as they are.

    Raises ValueError for a matrix that is quantized in a way not known here.
    """
    groups: dict[str, dict[str, Stored]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in PARTS:
            groups.setdefault(module, {})[part] = tensor
    if not groups:
        return dict(tensors)
    num_bits, block = _settings(config)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if UNUSED.search(name) or part in PARTS:
            continue
        if part == "weight" and module in groups:
            groups[module]["weight"] = tensor
        else:
            found[name] = tensor
    for module, parts in groups.items():
        name = f"{module}.weight"
        scale = next((parts[part] for part in SCALES if part in parts), None)
        form = scale.format if scale is not None and scale.format in FLOATS else "BF16"
        form = "F32" if "weight_scale_2" in parts else form
        found[name] = Unpacked(name, parts, _shape(name, parts), form, num_bits, block)
    return found
