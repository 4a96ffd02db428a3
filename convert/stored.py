"""A tensor as a checkpoint file of any format stores it, read only on demand."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_eagle.drafters.kind import Tensor
from mlx_eagle.system.fields import is_whole
from mlx_eagle.system.safetensors import is_shape

# The NumPy type of each stored format; there is none for bfloat16 and floats of 8 bits.
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
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
}


class CutOff(ValueError):
    """The file ends before it is complete, or its parts do not fit one another."""


class Refused(ValueError):
    """The file holds something that no drafter's file holds."""


def map_file(path: Path) -> np.ndarray:
    """The bytes of a file, (size,) uint8, paged in as they are touched.

    Raises ValueError if it is empty or cannot be read.
    """
    try:
        if not path.stat().st_size:
            raise ValueError(f"{path.name} is empty: cut off; download it again")
        return np.asarray(np.memmap(path, np.uint8, "r"))
    except OSError as err:
        raise ValueError(f"{path} cannot be read: {err.strerror}") from err


@dataclass(frozen=True)
class Stored(Tensor):
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
    def num_bytes(self) -> int:
        """The bytes that it takes as stored; in an unknown format all bytes that are there."""
        if self.decode is not None or self.format not in FORMATS:
            return len(self.data)
        return self.size * np.dtype(FORMATS[self.format]).itemsize

    def problem(self) -> str | None:
        """A fault of shape or strides, for a message; None if all elements are in ``data``.

        Block formats are left to their reader.
        """
        numbers = (*self.shape, *(self.strides or ()))
        if not all(map(is_whole, numbers)) or min(numbers, default=0) < 0:
            return "has sizes or strides that are no whole numbers from 0"
        if not is_shape(self.shape):
            return f"has {len(self.shape)} dimensions, or a size beyond all measure"
        if self.decode is not None or self.format not in FORMATS or not self.size:
            return None
        last = self.size - 1
        if self.strides is not None:
            if len(self.strides) != len(self.shape):
                return "has not one stride per dimension"
            last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        available = len(self.data) // np.dtype(FORMATS[self.format]).itemsize
        if last >= available or self.size > available:
            return f"takes {max(last + 1, self.size)} elements, and {available} are there"
        return None

    def numpy(self) -> np.ndarray:
        """The values; bfloat16 comes as its bits in uint16.

        Raises ValueError if not all of them are in ``data``.
        """
        problem = self.problem()
        if problem is not None:
            raise ValueError(f"a tensor {problem}; the checkpoint is damaged")
        if self.decode is not None:
            return self.decode(self.data).reshape(self.shape)
        if self.format not in FORMATS:
            raise ValueError(
                f"a tensor is stored as {self.format}, which this converter does not read "
                f"(it reads {', '.join(FORMATS)}); save the checkpoint in bfloat16 first"
            )
        dtype = np.dtype(FORMATS[self.format])
        if not self.size:
            return np.zeros(self.shape, dtype)
        if self.strides is None:
            return self.data[: self.size * dtype.itemsize].view(dtype).reshape(self.shape)
        flat = self.data[: len(self.data) // dtype.itemsize * dtype.itemsize].view(dtype)
        # The stride of a single row is never used, and may be any number.
        steps = [
            s * dtype.itemsize if n > 1 else 0
            for n, s in zip(self.shape, self.strides, strict=True)
        ]
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)

    def read(self) -> mx.array:
        """The values as an array; float64 becomes float32."""
        values = self.numpy()
        if self.format == "F64":
            values = values.astype(np.float32)
        array = mx.array(np.ascontiguousarray(values).reshape(self.shape))
        return array.view(mx.bfloat16) if self.format == "BF16" else array


@dataclass(frozen=True)
class LazyTensor(Tensor):
    """A tensor made from another one, by reordering or selecting its numbers, when it is read."""

    source: Tensor
    change: Callable[[mx.array], mx.array]
    shape: tuple[int, ...]

    @property
    def format(self) -> str:
        return self.source.format

    def read(self) -> mx.array:
        return self.change(self.source.read())
