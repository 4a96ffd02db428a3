"""The members of a zip file that torch wrote: stored one after the other, as they are.

Python's own reader inflates and believes what a directory says of sizes; this one only tells
where each member lies, after checking that it lies in the file.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mlx_eagle.system.json_schema import shown

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
