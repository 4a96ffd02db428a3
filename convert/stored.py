"""One tensor as it lies in a checkpoint file, read only when it is asked for.

Knows number formats and strides; knows neither file formats nor what a tensor is for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

# How each stored format looks to NumPy, which has no bfloat16.
FORMATS: dict[str, type[np.generic]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U32": np.uint32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def map_file(path: Path) -> np.ndarray:
    """The bytes of a file, (size,) uint8, paged in as they are touched."""
    if not path.stat().st_size:
        raise ValueError(f"{path.name} is empty: cut off; download it again")
    return np.memmap(path, np.uint8, "r")


@dataclass(frozen=True)
class Stored:
    """A tensor of ``shape`` whose bytes begin at ``data[0]``.

    ``strides`` count elements; None means row-major. ``decode`` turns the bytes of a block
    format into float values.
    """

    format: str
    shape: tuple[int, ...]
    data: np.ndarray
    strides: tuple[int, ...] | None = None
    decode: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def numpy(self) -> np.ndarray:
        """The values; bfloat16 comes as its bits in uint16."""
        if self.decode is not None:
            return self.decode(self.data).reshape(self.shape)
        if self.format not in FORMATS:
            raise ValueError(
                f"a tensor is stored as {self.format}, which this converter does not read "
                f"(it reads {', '.join(FORMATS)}); save the checkpoint in bfloat16 first"
            )
        kind = np.dtype(FORMATS[self.format])
        if self.strides is None:
            return self.data[: self.size * kind.itemsize].view(kind).reshape(self.shape)
        flat = self.data[: len(self.data) // kind.itemsize * kind.itemsize].view(kind)
        steps = [stride * kind.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)

    def read(self) -> mx.array:
        """The values as an array; float64 becomes float32."""
        values = self.numpy()
        if self.format == "F64":
            values = values.astype(np.float32)
        array = mx.array(np.ascontiguousarray(values).reshape(self.shape))
        return array.view(mx.bfloat16) if self.format == "BF16" else array


@dataclass(frozen=True)
class Derived:
    """Another order or selection of the rows of a tensor, made when it is read."""

    source: "Tensor"
    change: Callable[[mx.array], mx.array]
    num_rows: int | None = None

    @property
    def format(self) -> str:
        return self.source.format

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.source.rows if self.num_rows is None else self.num_rows
        return (rows, *self.source.shape[1:])

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self) -> mx.array:
        return self.change(self.source.read())


Tensor = Stored | Derived
