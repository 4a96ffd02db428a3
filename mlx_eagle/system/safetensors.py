"""Safetensors files: writing, and headers checked against the file before anything is read."""

import errno
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .fields import LONGEST_NAME, list_of, shown, whole
from .json_file import MAX_MEMORY, parse_object

BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16,
    "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
MAX_DIMS = 8
MAX_SIZE = 2**48
SIZES = list_of(whole(0, MAX_SIZE), "sizes")


@dataclass(frozen=True)
class Entry:
    """A tensor's place: bytes ``start`` to ``end`` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def is_name(name: object) -> bool:
    """Whether a tensor can have that name: short, and printable on one line."""
    return isinstance(name, str) and len(name) <= LONGEST_NAME and name.isprintable()


def is_type(name: object) -> bool:
    """Whether ``name`` can be a type of numbers: a word such as F8_E4M3, known here or not."""
    return isinstance(name, str) and re.fullmatch(r"\w{1,16}", name, re.ASCII) is not None


def check_name(name: object, where: str | Path) -> None:
    """Raise ValueError for a name that no tensor can have."""
    if not is_name(name):
        raise ValueError(f"{where} holds a tensor named {shown(name)}, which no head has")


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of the file, by name; nothing of the tensors is read.

    Raises ValueError where the file is cut off, or its header does not fit it.
    """
    return parse_header(*_header_and_size(path), path)


def read_metadata(path: Path) -> dict[str, str]:
    """The file's metadata; {} where it has none. Raises ValueError as ``read_header`` does."""
    found = _values(_header_and_size(path)[0], path).get("__metadata__", {})
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise ValueError(f"{path} is damaged: its metadata are {shown(found)}, expected texts")
    return found


def _header_and_size(path: Path) -> tuple[bytes, int]:
    """The header as it lies in the file, and the bytes of the whole file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = header_length(file.read(8), size, path)
            return file.read(length), size
    except OSError as err:
        raise ValueError(f"{path} cannot be read: {err.strerror}") from err


def header_length(start: bytes, size: int, path: str | Path) -> int:
    """Bytes in the header of a file of ``size`` bytes; ValueError where it has none."""
    length = int.from_bytes(start[:8], "little")
    if size < 8:
        raise ValueError(f"{path} is {size} bytes long: cut off; download it again")
    if 8 + length > size:
        raise ValueError(f"{path} is cut off, or no safetensors file; download it again")
    if length > MAX_MEMORY:
        raise ValueError(
            f"{path} is no safetensors file: its header would have {length} bytes; download it "
            "again"
        )
    return length


def parse_header(header: bytes, size: int, path: str | Path) -> dict[str, Entry]:
    """Every tensor of a file of ``size`` bytes, by the header behind its first eight bytes.

    Raises ValueError, which names the file by ``path``, where they do not fit each other.
    """
    values = _values(header, path)
    start = 8 + len(header)
    values.pop("__metadata__", None)
    return {name: _entry(path, name, entry, start, size) for name, entry in values.items()}


def _values(header: bytes, path: str | Path) -> dict[str, Any]:
    if not header.startswith(b"{"):
        raise ValueError(f"{path} is no safetensors file: its header is no JSON object")
    return parse_object(header, f"the header of {path}")


def _entry(path: str | Path, name: str, entry: object, start: int, size: int) -> Entry:
    check_name(name, path)
    match entry:
        case {"dtype": dtype, "shape": shape, "data_offsets": [first, last], **_rest} if (
            is_type(dtype)
            and SIZES.holds([first, last])
            and SIZES.holds(shape)
            and is_shape(tuple(shape))
        ):
            pass
        case _:
            raise ValueError(
                f"{path} is no safetensors file: its {name} is {shown(entry)}, expected dtype, "
                "shape and data_offsets"
            )
    if start + last > size:
        raise ValueError(
            f"{path} is cut off: {size} bytes, and {name} ends at {start + last}; "
            "download it again"
        )
    bits = BITS.get(dtype)
    if last < first or (bits is not None and -(-math.prod(shape) * bits // 8) != last - first):
        raise ValueError(
            f"{path} is damaged: {name} is {shown(dtype)} {shown(shape)} in {last - first} bytes"
        )
    return Entry(dtype, tuple(shape), start + first, start + last)


def is_shape(shape: tuple[int, ...]) -> bool:
    """Whether a tensor can have that shape: few sizes, none negative, no monstrous product."""
    sizes = [size for size in shape if size]
    return len(shape) <= MAX_DIMS and min(shape, default=0) >= 0 and math.prod(sizes) <= MAX_SIZE


def save_arrays(path: Path, arrays: Mapping[str, mx.array], layout: str = "mlx") -> None:
    """Write a safetensors file; OSError where it does not fit.

    ``layout`` is the ``format`` that its metadata name: mlx, or pt for PyTorch's.
    """
    try:
        mx.save_safetensors(str(path), dict(arrays), metadata={"format": layout})
    except RuntimeError as err:
        # MLX says that it could not write, and not why.
        needed = sum(array.nbytes for array in arrays.values())
        if shutil.disk_usage(path.parent).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from err
        raise OSError(errno.EIO, str(err), str(path)) from err
