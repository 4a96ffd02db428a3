"""Read ``pytorch_model.bin`` without torch, building tensors and nothing else.

``torch.save`` has two file formats: a zip file, and before torch 1.6 some pickles with the
storages behind them. Members of the zip file are stored one after the other, as they are.
Python's own reader inflates and believes what a directory says of sizes; this one only tells
where each member lies, after checking that it lies in the file. What a pickle may say is in
``unpickle.py``.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_eagle.system.json_schema import is_whole, shown
from mlx_eagle.system.safetensors import is_name

from .stored import FORMATS, CutOff, Stored, map_file
from .unpickle import MAX_BYTES, RefusedPickle, Storage, Unpickler, View

PICKLE = b"\x80"
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
NUM_LEGACY_PICKLES = 5
START = b"PK\x03\x04"
MAX_MEMBERS = 1 << 14
END = struct.Struct("<4s4H2LH")  # end of the directory
END_64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR_64 = struct.Struct("<4sLQL")  # of END_64; it stands before END
ENTRY = struct.Struct("<4s6H3L5H2L")
LOCAL = struct.Struct("<4s5H3L2H")  # stands before each member's bytes
STORED, ENCRYPTED, FULL = 0, 1, 0xFFFFFFFF


class DamagedArchive(ValueError):
    """A zip file that is cut off, or whose directory does not fit it."""


@dataclass(frozen=True)
class Member:
    """``size`` bytes behind the local header at ``header``; compressed unless ``is_stored``."""

    header: int
    size: int
    is_stored: bool


@dataclass(frozen=True)
class Archive:
    """A zip file's bytes, (n,) uint8, and where its members' headers are."""

    data: np.ndarray
    members: dict[str, Member]

    def read(self, name: str) -> np.ndarray:
        """The bytes of a member, (size,) uint8, not copied."""
        member = self.members.get(name)
        if member is None:
            raise DamagedArchive(f"it lacks its member {shown(name)}")
        if not member.is_stored:
            raise DamagedArchive(f"its member {shown(name)} is compressed, as torch never does")
        header = _unpack(LOCAL, self.data, member.header, START)
        start = member.header + LOCAL.size + header[-2] + header[-1]
        if start + member.size > len(self.data):
            raise DamagedArchive(f"its member {shown(name)} reaches beyond the end: cut off")
        return self.data[start : start + member.size]


def open_archive(data: np.ndarray) -> Archive:
    """The directory of the zip file with these bytes; DamagedArchive where it is none."""
    tail = max(len(data) - 0xFFFF - END.size, 0)
    at = data[tail:].tobytes().rfind(b"PK\x05\x06")
    if at < 0 or tail + at + END.size > len(data):
        raise DamagedArchive("the zip file is cut off")
    count, size, start = _directory(data, tail + at)
    if count > MAX_MEMBERS:
        raise DamagedArchive(f"it has {count} members, more than any draft head")
    if start + size > len(data):
        raise DamagedArchive("its directory reaches beyond the end: cut off")
    return Archive(data, dict(_members(data[: start + size], start, count)))


def _directory(data: np.ndarray, end: int) -> tuple[int, int, int]:
    """How many members the directory has, its size and where it starts."""
    *_, count, size, start, _ = _unpack(END, data, end, b"PK\x05\x06")
    if count < 0xFFFF and FULL not in (size, start):
        return count, size, start
    if end < LOCATOR_64.size:
        raise DamagedArchive("its directory has no place")
    _, _, place, _ = _unpack(LOCATOR_64, data, end - LOCATOR_64.size, b"PK\x06\x07")
    *_, count, size, start = _unpack(END_64, data, place, b"PK\x06\x06")
    return count, size, start


def _members(data: np.ndarray, at: int, count: int) -> Iterator[tuple[str, Member]]:
    for _ in range(count):
        entry = _unpack(ENTRY, data, at, b"PK\x01\x02")
        flags, method = entry[3], entry[4]
        packed, size, header = entry[8], entry[9], entry[16]
        name_end = at + ENTRY.size + entry[10]
        name = data[at + ENTRY.size : name_end].tobytes().decode("utf-8", "replace")
        extra = data[name_end : name_end + entry[11]].tobytes()
        size, packed, header = _sizes_64(extra, (size, packed, header))
        is_stored = method == STORED and not flags & ENCRYPTED and size == packed
        yield name, Member(header, size, is_stored)
        at = name_end + entry[11] + entry[12]


def _sizes_64(extra: bytes, sizes: tuple[int, ...]) -> Iterator[int]:
    """The sizes, with those that do not fit into 32 bits from the entry's extra field."""
    fields, at = b"", 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            fields = extra[at + 4 : at + 4 + length]
        at += 4 + length
    for size in sizes:
        if size == FULL and len(fields) >= 8:
            size, fields = int.from_bytes(fields[:8], "little"), fields[8:]
        yield size


def _unpack(layout: struct.Struct, data: np.ndarray, at: int, signature: bytes) -> tuple:
    if at + layout.size > len(data):
        raise DamagedArchive("the zip file is cut off")
    fields = layout.unpack(data[at : at + layout.size].tobytes())
    if fields[0] != signature:
        raise DamagedArchive("its directory is damaged")
    return fields


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))


def _stored(name: str, view: View, storage: np.ndarray) -> Stored:
    """Lay a view on the bytes of its storage, which it must not leave."""
    width = np.dtype(FORMATS[view.storage.format]).itemsize
    if view.offset < 0 or len(storage) // width != view.storage.elements:
        raise RefusedPickle(
            f"a tensor in it reaches beyond its storage: {name} lies in "
            f"{shown(view.storage.elements)} elements of {width} bytes, and the file has "
            f"{len(storage)} bytes for them"
        )
    strides = None if view.strides == _row_major(view.shape) else view.strides
    stored = Stored(view.storage.format, view.shape, storage[view.offset * width :], strides)
    if problem := stored.problem():
        raise RefusedPickle(f"a tensor in it reaches beyond its storage: {name} {problem}")
    return stored


def _tensors(state: Any, storage: Callable[[Storage], np.ndarray]) -> dict[str, Stored]:
    if not isinstance(state, dict):
        raise RefusedPickle("it holds no dictionary of tensors")
    for name, view in state.items():
        if not is_name(name):
            raise RefusedPickle(f"it holds a tensor named {shown(name)}, which no head has")
        if not isinstance(view, View):
            raise RefusedPickle(f"its entry {shown(name)} is not a tensor")
    return {name: _stored(name, view, storage(view.storage)) for name, view in state.items()}


def _folder(archive: Archive) -> str:
    """What stands before the names of all members: archive/data.pkl -> archive/"""
    index = next((name for name in archive.members if name.endswith("data.pkl")), None)
    if index is None:
        raise RefusedPickle("it is a zip file without a data.pkl, so torch did not save it")
    folder = index.removesuffix("data.pkl")
    order = f"{folder}byteorder"
    if order in archive.members and (found := archive.read(order).tobytes()) != b"little":
        if found == b"big":
            raise RefusedPickle("it was saved on a big-endian machine")
        raise DamagedArchive(f"its member {shown(order)} is neither little nor big")
    return folder


def _read_zip(data: np.ndarray) -> dict[str, Stored]:
    archive = open_archive(data)
    folder = _folder(archive)
    index = archive.read(f"{folder}data.pkl")
    if len(index) > MAX_BYTES:
        raise RefusedPickle(f"its data.pkl has {len(index)} bytes, more than any draft head's")
    state = Unpickler(index.tobytes()).load()
    return _tensors(state, lambda storage: archive.read(f"{folder}data/{storage.key}"))


def _read_legacy(data: np.ndarray) -> dict[str, Stored]:
    """The format before torch 1.6: five pickles, then the storages one after the other."""
    pickles = Unpickler(data[: NUM_LEGACY_PICKLES * MAX_BYTES].tobytes())
    magic = pickles.load()
    if not is_whole(magic) or magic != LEGACY_MAGIC:
        raise RefusedPickle("it is a pickle, but not one that torch saved")
    _version, system, state, keys = (pickles.load() for _ in range(NUM_LEGACY_PICKLES - 1))
    if not isinstance(system, dict) or not isinstance(keys, list):
        raise RefusedPickle("it is a pickle, but not one that torch saved")
    if system.get("little_endian", True) is not True:
        raise RefusedPickle("it was saved on a big-endian machine")
    at, storages = pickles.at, {}
    for key in keys:
        storage = pickles.storages.get(key) if isinstance(key, str) else None
        if storage is None:
            raise RefusedPickle(f"it holds a storage {shown(key)} that no tensor has")
        size = storage.elements * np.dtype(FORMATS[storage.format]).itemsize
        elements = int.from_bytes(data[at : at + 8].tobytes(), "little")
        if at + 8 + size > len(data):
            raise CutOff(f"it is cut off in the storage {shown(key)}")
        if elements != storage.elements:
            raise RefusedPickle(f"its storage {shown(key)} is of another size than it says")
        storages[key] = data[at + 8 : at + 8 + size]
        at += 8 + size

    def find(storage: Storage) -> np.ndarray:
        if storage.key not in storages:
            raise RefusedPickle(f"it lacks the storage {shown(storage.key)}")
        return storages[storage.key]

    return _tensors(state, find)


def read_bin(path: Path) -> dict[str, Stored]:
    """The tensors of one ``.bin`` shard, by name.

    Raises ValueError where the file is cut off or holds anything but tensors; nothing that
    the pickle names is ever imported or called.
    """
    data = map_file(path)
    beginning = data[: len(START)].tobytes()
    try:
        if beginning == START:
            return _read_zip(data)
        if not beginning.startswith(PICKLE):
            raise RefusedPickle(
                f"it begins with {shown(beginning.decode('latin-1'))}, and is neither a zip file "
                "nor a pickle as torch.save writes them; download it again"
            )
        return _read_legacy(data)
    except RefusedPickle as err:
        raise ValueError(f"{path.name} was not read: {err}") from err
    except (DamagedArchive, CutOff) as err:
        raise ValueError(
            f"{path.name} is not a complete torch checkpoint ({err}); download it again"
        ) from err
