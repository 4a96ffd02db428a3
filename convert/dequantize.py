"""Dequantize the matrices of a checkpoint, exactly as their formats define it.

The parts of a matrix P.weight have names of their own, P.weight_scale and so on; each format is
a row of ``PACKED_FORMATS``. The tensors decide. The config only settles what they leave open: the
sizes of blocks, and further parts that must be there.

Formats: compressed-tensors' compressors, Model-Optimizer's qtensor, and the OCP specification
of microscaling formats 1.0 (E2M1 and E8M0).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_eagle.drafters.kind import Tensor
from mlx_eagle.system.fields import check, list_of, shown, whole

from .published_config import PACKING
from .stored import Stored

SCALES = ("weight_scale", "weight_scale_inv", "qscale_weight")


@dataclass(frozen=True)
class PackedFormat:
    """A way to store a matrix: the tensor of its numbers, their types, and those of the scales.

    All of ``needs`` must be there, and one of ``SCALES``. A stored column holds ``columns`` of
    the matrix; None if weight_shape gives them.
    """

    name: str
    numbers: str
    types: tuple[str, ...]
    scale_types: tuple[str, ...]
    needs: tuple[str, ...] = ()
    columns: int | None = 1


FLOATS = {"F64": mx.float32, "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
"""The dtypes of stored floats."""
WHOLE = ("I64", "I32")
"""The types of groups and sizes."""
POWERS = ("U8", "F8_E8M0")
PACKED_FORMATS = (
    PackedFormat("integers", "weight_packed", ("I32",), tuple(FLOATS), ("weight_shape",), None),
    PackedFormat("NVFP4", "weight_packed", ("U8",), ("F8_E4M3",), ("weight_global_scale",), 2),
    PackedFormat("MXFP4", "weight_packed", ("U8",), POWERS, columns=2),
    PackedFormat("ModelOpt's NVFP4", "weight", ("U8",), ("F8_E4M3",), ("weight_scale_2",), 2),
    PackedFormat("ModelOpt's MXFP4", "weight", ("U8",), POWERS, columns=2),
    PackedFormat("bytes", "weight", ("F8_E4M3", "F8_E5M2", "I8"), (*FLOATS, *POWERS)),
)
ASKED = {
    "weight_zero_point": ("symmetric", (False,)),
    "weight_g_idx": ("actorder", (True, "group", "dynamic")),
}
"""Parts that a config asks for: a key of its entry for weights, and the values that do."""
ONE_NUMBER = ("weight_scale_2", "weight_global_scale")
PARTS = ("weight_packed", "weight_shape", *SCALES, *ONE_NUMBER, *ASKED)
# Parts for activations and caches, which are not quantized here.
UNUSED = re.compile(r"\.(((input|output|[kqv])_(scale|zero_point|global_scale))|qscale_act)$")
SIDES = list_of(whole(1), "sizes")  # rows and columns of a block, as configs write them
BLOCK = (128, 128)  # rows and columns, for fine-grained FP8 whose config does not say it
BITS = np.arange(256, dtype=np.uint16)
# As float16, whose exponents have one bit more and count from 8 further down.
E4M3 = ((BITS & 128) << 8 | (BITS & 127) << 7).view(np.float16) * np.float32(256)
BYTES = {
    "F8_E4M3": np.where(BITS & 127 == 127, np.float32(np.nan), E4M3),
    "F8_E5M2": (BITS << 8).view(np.float16).astype(np.float32),
    "F8_E8M0": np.float32([*np.ldexp(1.0, np.arange(-127, 128)), np.nan]),
    "I8": BITS.astype(np.int8).astype(np.float32),
}
"""The values of one-byte types, by their bits."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
NIBBLES = np.concatenate([E2M1, -E2M1])


@dataclass(frozen=True)
class Unpacked(Tensor):
    """A matrix that is made from several tensors, ``parts`` by their last names, when it is read.

    ``format`` is the type that the format's own library gives it; with float32 scales values are
    not rounded further. Rows and columns of a ``block`` share a scale, where blocks do.
    """

    name: str
    parts: Mapping[str, Stored]
    shape: tuple[int, ...]
    format: str
    block: Sequence[int]

    def read(self) -> mx.array:
        """The values; ValueError if the parts do not go together."""
        values = self._values()
        scales = self._scales()
        if "weight_zero_point" in self.parts:
            values = values - self._over_columns(self._zero_points(scales))
        with np.errstate(over="ignore", invalid="ignore"):
            product = values * self._over_columns(scales)
        return mx.array(product).astype(FLOATS[self.format])

    def _values(self) -> np.ndarray:
        """The quantized numbers, (rows, columns) float32."""
        packed = self.parts.get("weight_packed") or self.parts["weight"]
        data = packed.numpy()
        if packed.format == "I32":
            return self._integers(data, self.shape[1])
        if packed.format == "U8":
            halves = np.stack([data & 15, data >> 4], axis=-1)
            return NIBBLES[halves.reshape(self.shape)]
        return BYTES[packed.format][data.view(np.uint8)]

    def _integers(self, words: np.ndarray, count: int) -> np.ndarray:
        """Rows of int32 words as ``count`` signed integers each, bit after bit, float32."""
        bits = _bits_of(words.shape[1], count)
        if bits is None:
            raise ValueError(
                f"{self.name} is packed as {words.shape[1]} words of {count} integers, expected 1 "
                "to 8 bits for each; the checkpoint is damaged"
            )
        stream = np.unpackbits(
            np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little"
        )
        places = stream[:, : count * bits].reshape(len(words), count, bits)
        values = (places * (1 << np.arange(bits))).sum(axis=-1)
        return (values - (1 << (bits - 1))).astype(np.float32)

    def _scales(self) -> np.ndarray:
        """The scales as floats, in two dimensions."""
        scales = _floats(next(self.parts[name] for name in SCALES if name in self.parts))
        if "weight_global_scale" in self.parts:
            scales = scales / _floats(self.parts["weight_global_scale"]).reshape(())
        if "weight_scale_2" in self.parts:
            scales = scales * _floats(self.parts["weight_scale_2"]).reshape(())
        return scales.reshape(-1, 1) if scales.ndim < 2 else scales.reshape(len(scales), -1)

    def _zero_points(self, scales: np.ndarray) -> np.ndarray:
        stored = self.parts["weight_zero_point"]
        if stored.format == "I32" and len(stored.shape) == 2:  # packed down the rows
            zeros = self._integers(stored.numpy().T, self.shape[0]).T
        else:
            zeros = _floats(stored)
        if zeros.size != scales.size:
            raise ValueError(
                f"{self.name} has {scales.size} scales and zero points of the shape "
                f"{shown(stored.shape)}, expected as many; the checkpoint is damaged"
            )
        return zeros.reshape(scales.shape)

    def _over_columns(self, per_group: np.ndarray) -> np.ndarray:
        """One number for every number of the matrix."""
        rows, columns = self.shape
        if "weight_g_idx" in self.parts:  # the group of each column
            stored = self.parts["weight_g_idx"]
            groups = stored.numpy().reshape(-1)
            are_known = np.isin(groups, np.arange(per_group.shape[1])).all()
            if stored.format in WHOLE and len(groups) == columns and are_known:
                return per_group[:, groups]
            raise ValueError(f"{self.name} has groups that are none; the checkpoint is damaged")
        spread = per_group
        for axis, (size, count) in enumerate(zip(self.shape, per_group.shape, strict=True)):
            step = _step(size, count, self.block[axis] if rows != len(per_group) else None)
            if step is None:
                raise ValueError(
                    f"{self.name} is {rows} x {columns} with scales of "
                    f"{' x '.join(map(str, per_group.shape))}, which do not go together; the "
                    "checkpoint is damaged"
                )
            spread = np.repeat(spread, step, axis)
        return spread[:rows, :columns]


def _step(size: int, count: int, block: int | None) -> int | None:
    """The number of values that share a scale, with ``count`` scales for ``size`` values."""
    if count in (1, size):
        return size // count
    if block is not None and -(-size // block) == count:
        return block
    return size // count if size % count == 0 else None


def _floats(stored: Stored) -> np.ndarray:
    """Scales or zero points in float32."""
    values = stored.numpy()
    kind = "F8_E8M0" if stored.format == "U8" else stored.format  # powers of two, in MX formats
    if kind in BYTES:
        return BYTES[kind][values.view(np.uint8)]
    return np.array(stored.read().astype(mx.float32))


def _bits_of(words: int, count: int) -> int | None:
    """The bits of each of ``count`` integers in so many words; None if they do not fill them."""
    bits = words * 32 // count
    return bits if 1 <= bits <= 8 and -(-count * bits // 32) == words else None


def _entries(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """The entry about quantization, and the parts of it about weights, by group of layers."""
    entry = config.get("quantization_config") or config.get("compression_config") or {}
    groups = entry.get("config_groups")
    groups = groups.values() if isinstance(groups, Mapping) else ()
    weights = (group.get("weights") for group in groups if isinstance(group, Mapping))
    return entry, [own for own in weights if isinstance(own, Mapping)]


def _in_parts(name: str, parts: Mapping[str, Stored], config: Mapping[str, Any]) -> Unpacked:
    """A matrix that is made from its parts; ValueError if one is missing or unknown."""
    found = ", ".join(f"{part} ({tensor.format[:20]})" for part, tensor in parts.items())
    numbers = parts.get("weight_packed") or parts.get("weight")
    if numbers is None:
        raise ValueError(f"{name} lacks its numbers, there is only {found}; it is incomplete")
    scale = next((parts[part] for part in SCALES if part in parts), None)
    entry, weights = _entries(config)
    for form in PACKED_FORMATS:
        if form.numbers not in parts or numbers.format not in form.types:
            continue
        if scale is None:
            raise ValueError(
                f"{name} is quantized ({found}) and lacks its weight_scale; the checkpoint is "
                "incomplete"
            )
        if scale.format in form.scale_types and len(numbers.shape) == 2:
            _check_parts(name, parts, form, weights)
            dtype = scale.format if scale.format in FLOATS else "BF16"
            dtype = "F32" if "weight_scale_2" in parts else dtype
            if form.columns is None:
                shape = _integer_shape(name, numbers, parts["weight_shape"])
            else:
                shape = (numbers.rows, form.columns * numbers.shape[1])
            written = [
                *(own.get("block_structure") for own in weights),
                entry.get("weight_block_size"),
            ]
            pairs = [sizes for sizes in written if SIDES.holds(sizes) and len(sizes) == 2]
            return Unpacked(name, parts, shape, dtype, [BLOCK, *pairs][-1])
    raise ValueError(
        f"{name} is quantized in a way that is not read ({found}); compressed-tensors (integers, "
        "FP8, NVFP4, MXFP4), ModelOpt's FP8 and NVFP4 and GGUF are, so take such a head, or the "
        "bfloat16 one it was made from"
    )


def _check_parts(
    name: str, parts: Mapping[str, Stored], form: PackedFormat, weights: list[Mapping[str, Any]]
) -> None:
    """Raise ValueError if a part is missing, or is not the one number it has to be.

    The format has needs of its own, and the config, in ``weights``, asks for further parts.
    """
    needed = dict.fromkeys(form.needs, f"its format has ({form.name})")
    integers = [own for own in weights if own.get("type", "int") == "int" and len(own) > 1]
    if integers and parts[form.numbers].format in ("I32", "I8"):
        for part, (key, values) in ASKED.items():
            if all(own.get(key) in values for own in integers):
                needed[part] = f"the config asks for ({key})"
    for part, why in needed.items():
        if part not in parts:
            raise ValueError(
                f"{name} lacks its {part}, which {why}; the checkpoint is incomplete, download "
                "it again"
            )
    for part in ONE_NUMBER:
        if part in parts and parts[part].size != 1:
            raise ValueError(
                f"{part} of {name} is of the shape {shown(parts[part].shape)}, expected one "
                "number; the checkpoint is damaged"
            )


def _integer_shape(name: str, packed: Stored, stated: Stored) -> tuple[int, ...]:
    """The shape in weight_shape; ValueError if its integers do not fill the words."""
    sizes = stated.numpy().reshape(-1)[:3] if stated.format in WHOLE else ()
    shape = tuple(map(int, sizes))
    words = packed.shape[1]
    fits = len(shape) == 2 and shape[0] == packed.rows and shape[1] > 0
    if fits and _bits_of(words, shape[1]) is not None:
        return shape
    raise ValueError(
        f"{name} is said to be {' x '.join(map(str, shape))} (weight_shape), and is packed in "
        f"{packed.rows} rows of {words} words, which do not go together; the checkpoint is damaged"
    )


@dataclass(frozen=True)
class MLXPacked(Tensor):
    """A matrix as mlx.nn packs it, or a stack of them: words, scales and maybe biases.

    ``format`` is the type that mlx.nn computes it in.
    """

    name: str
    parts: Mapping[str, Stored]
    shape: tuple[int, ...]
    format: str
    bits: int
    group_size: int
    mode: str

    @property
    def packing(self) -> dict[str, int] | None:
        """Its packing, or None if it is in a mode that we do not write."""
        if self.mode != "affine":
            return None
        return {"group_size": self.group_size, "bits": self.bits}

    def stored(self, name: str) -> dict[str, mx.array]:
        """Its parts as they are, by the names that mlx.nn gives the parts of weight ``name``."""
        path = name.removesuffix(".weight")
        return {f"{path}.{part}": tensor.read() for part, tensor in self.parts.items()}

    def read(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The values as mlx.nn computes them from scales and biases of that type.

        Raises ValueError if the parts do not go together.
        """
        own = {part: tensor.read() for part, tensor in self.parts.items()}
        if self.mode == "affine":  # others have scales of one byte
            own |= {n: own[n].astype(dtype) for n in ("scales", "biases") if n in own}
        try:
            found: mx.array = mx.dequantize(
                own["weight"],
                own["scales"],
                own.get("biases"),
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
                dtype=dtype,
                stream=mx.cpu,
            )
        except ValueError as err:
            raise ValueError(
                f"{self.name} cannot be unpacked as config.json says ({self.bits} bits in groups "
                f"of {self.group_size}, {self.mode}): {err}"
            ) from err
        return found


def _packed_by_mlx(name: str, parts: Mapping[str, Stored], config: Mapping[str, Any]) -> MLXPacked:
    """A matrix that mlx.nn packed, as the config says; ValueError if it does not."""
    path = name.removesuffix(".weight")
    entry = config.get("quantization") or config.get("quantization_config") or {}
    own = entry.get(path, entry.get(f"mtp.{path}"))
    own = own if isinstance(own, Mapping) else entry
    check(own, PACKING, "config.json", "quantization.")
    if own.get("bits") is None or own.get("group_size") is None:
        raise ValueError(
            f"{name} is packed by MLX, and config.json says not how: download the folder again"
        )
    bits = own["bits"]
    *stack, words = parts["weight"].shape
    form = parts["scales"].format
    dtype = form if form in FLOATS else "BF16"
    shape = (*stack, words * 32 // bits)
    return MLXPacked(name, parts, shape, dtype, bits, own["group_size"], own.get("mode", "affine"))


def unpacked(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors with every quantized matrix in one piece, unread; others as they are.

    Raises ValueError for a matrix that is quantized in an unknown way.
    """
    groups: dict[str, dict[str, Stored]] = {}
    for name in tensors:
        module, _, part = name.rpartition(".")
        weight = tensors.get(f"{module}.weight")
        if part in PARTS or (part == "scales" and weight is not None and weight.format == "U32"):
            groups[module] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        is_part = module in groups and part in (*PARTS, "weight", "scales", "biases")
        if is_part and isinstance(tensor, Stored):
            groups[module][part] = tensor
        elif not UNUSED.search(name):
            found[name] = tensor
    for module, parts in groups.items():
        name = f"{module}.weight"
        make = _packed_by_mlx if "scales" in parts else _in_parts
        found[name] = make(name, parts, config)
    return found
