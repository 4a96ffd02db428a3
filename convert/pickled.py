"""Read ``pytorch_model.bin`` without torch, building tensors and nothing else.

A pickle is a program. The one thing that lets it act is ``find_class``, and here that hands
out a fixed table: ordered dictionaries, storage types and two functions that describe a
tensor. Any other name is refused before anything is called.
"""

import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .stored import FORMATS, Stored, map_file

STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
# What the pickle machine raises on bytes that are no pickle, or half of one.
MALFORMED = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


class RefusedPickle(ValueError):
    """The pickle asks for something that a checkpoint of tensors does not need."""


@dataclass(frozen=True)
class _Storage:
    key: str
    format: str


@dataclass(frozen=True)
class _View:
    """A tensor as the pickle describes it: a window on a storage, counted in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO):
        super().__init__(file)
        # Bound methods and strings only: a pickle can set attributes on neither.
        self._globals: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): self._parameter,
            **{("torch", name): kind for name, kind in STORAGES.items()},
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._globals:
            raise RefusedPickle(
                f"it asks for {module}.{name}, and only tensors are read from a pickle; "
                "if you trust the file, save it as safetensors"
            )
        return self._globals[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        # ("storage", type, key, device, elements[, view]); the device does not matter here.
        match pid:
            case ("storage", str(kind), str(key), _, int(), *rest) if rest in ([], [None]):
                return _Storage(key, kind)
        raise RefusedPickle(f"it refers to {pid!r}, which is not a plain tensor storage")

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _View:
        numbers = (offset, *shape, *strides)
        if (
            not isinstance(storage, _Storage)
            or len(shape) != len(strides)
            or not all(isinstance(n, int) and n >= 0 for n in numbers)
        ):
            raise RefusedPickle("a tensor in it is not described as torch describes one")
        return _View(storage, offset, tuple(shape), tuple(strides))

    def _parameter(self, data: Any, *_: Any) -> Any:
        return data


def _unpickle(file: BinaryIO) -> Any:
    return _TensorUnpickler(file).load()


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))


def _stored(view: _View, storage: np.ndarray) -> Stored:
    """Lay a view on the bytes of its storage, which it must not leave."""
    width = np.dtype(FORMATS[view.storage.format]).itemsize
    available = len(storage) // width
    last = view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.strides))
    size = int(np.prod(view.shape, dtype=object))
    if size and (last >= available or size > available):
        raise RefusedPickle("a tensor in it reaches beyond its storage")
    strides = None if view.strides == _row_major(view.shape) else view.strides
    return Stored(view.storage.format, view.shape, storage[view.offset * width :], strides)


def _tensors(state: Any, storage: Callable[[_Storage], np.ndarray]) -> dict[str, Stored]:
    if not isinstance(state, dict):
        raise RefusedPickle("it holds no dictionary of tensors")
    for name, view in state.items():
        if not isinstance(name, str) or not isinstance(view, _View):
            raise RefusedPickle(f"its entry {name!r} is not a tensor")
    return {name: _stored(view, storage(view.storage)) for name, view in state.items()}


def _read_zip(path: Path) -> dict[str, Stored]:
    data = map_file(path)
    with zipfile.ZipFile(path) as archive:
        index = next((n for n in archive.namelist() if n.endswith("data.pkl")), None)
        if index is None:
            raise RefusedPickle("it is a zip file without a data.pkl, so torch did not save it")
        folder = index.removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist():
            if archive.read(f"{folder}byteorder") != b"little":
                raise RefusedPickle("it was saved on a big-endian machine")

        def storage(wanted: _Storage) -> np.ndarray:
            info = archive.getinfo(f"{folder}data/{wanted.key}")
            if info.compress_type != zipfile.ZIP_STORED:
                return np.frombuffer(archive.read(info), np.uint8)
            # The local header: 30 bytes, then name and extra field of its own length.
            start = info.header_offset
            name, extra = struct.unpack("<HH", data[start + 26 : start + 30].tobytes())
            start += 30 + name + extra
            return data[start : start + info.file_size]

        with archive.open(index) as file:
            return _tensors(_unpickle(file), storage)


def _read_legacy(path: Path) -> dict[str, Stored]:
    """The format before torch 1.6: five pickles, then the storages one after the other."""
    with path.open("rb") as file:
        if _unpickle(file) != LEGACY_MAGIC:
            raise RefusedPickle("it is a pickle, but not one that torch saved")
        _version, system, state, keys = (_unpickle(file) for _ in range(4))
        if not system.get("little_endian", True):
            raise RefusedPickle("it was saved on a big-endian machine")
        start = file.tell()
    formats = {view.storage.key: view.storage.format for view in state.values()}
    data = map_file(path)
    storages = {}
    for key in keys:
        (elements,) = struct.unpack("<q", data[start : start + 8].tobytes())
        size = elements * np.dtype(FORMATS[formats[key]]).itemsize
        storages[key] = data[start + 8 : start + 8 + size]
        start += 8 + size
    return _tensors(state, lambda wanted: storages[wanted.key])


def read_bin(path: Path) -> dict[str, Stored]:
    """The tensors of one ``.bin`` shard, by name.

    Raises ValueError where the file is cut off or holds anything but tensors; nothing that
    the pickle names is ever imported or called.
    """
    try:
        return _read_zip(path) if zipfile.is_zipfile(path) else _read_legacy(path)
    except RefusedPickle as err:
        raise ValueError(f"{path.name} was not read: {err}") from err
    except (zipfile.BadZipFile, struct.error, *MALFORMED) as err:
        raise ValueError(
            f"{path.name} is not a complete torch checkpoint ({err}); download it again"
        ) from err
