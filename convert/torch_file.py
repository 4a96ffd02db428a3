"""Read ``pytorch_model.bin`` without torch, building tensors and nothing else.

``torch.save`` writes a zip file whose members are stored one after the other, not compressed. Of
Python's own reader only the directory is used, for it inflates members and trusts the sizes
stated there; the place of a member in the file is checked here. Its pickle is read by
``unpickle.py``.
"""

import io
import struct
import zipfile
from pathlib import Path

import numpy as np

from mlx_eagle.system.fields import shown
from mlx_eagle.system.safetensors import is_name

from .stored import FORMATS, CutOff, Refused, Stored, map_file
from .unpickle import Unpickler, View

PICKLE = b"\x80"
START = b"PK\x03\x04"
LOCAL = struct.Struct("<4s22x2H")  # before each member; ends with the sizes of name and extra
MAX_DIRECTORY = 1 << 21  # bytes, of which a tensor takes about a hundred
ENCRYPTED = 1
NO_ZIP = (zipfile.BadZipFile, NotImplementedError, OverflowError, ValueError, struct.error)


class _File(io.FileIO):
    """A file that reads at most the size of a directory at once."""

    def read(self, size: int = -1, /) -> bytes:
        return super().read(min(size, MAX_DIRECTORY))


class Archive:
    """A zip file's bytes, (n,) uint8, and where its members' headers are."""

    def __init__(self, path: Path, data: np.ndarray):
        """Raise CutOff if ``data`` is no zip file."""
        self.data = data
        try:
            with _File(path) as file, zipfile.ZipFile(file) as archive:
                self.members = {member.filename: member for member in archive.infolist()}
        except NO_ZIP as err:
            raise CutOff(f"the zip file is cut off or damaged: {shown(str(err))}") from err

    def read(self, name: str) -> np.ndarray:
        """The bytes of a member, (size,) uint8, not copied."""
        member = self.members.get(name)
        if member is None:
            raise CutOff(f"it lacks its member {shown(name)}")
        is_plain = member.file_size == member.compress_size and not member.flag_bits & ENCRYPTED
        if member.compress_type != zipfile.ZIP_STORED or not is_plain:
            raise CutOff(f"its member {shown(name)} is compressed, as torch never does")
        at = member.header_offset
        header = self.data[at : at + LOCAL.size].tobytes() if at >= 0 else b""
        if len(header) < LOCAL.size or not header.startswith(START):
            raise CutOff("its directory is damaged")
        start = at + LOCAL.size + sum(LOCAL.unpack(header)[1:])
        if start + member.file_size > len(self.data):
            raise CutOff(f"its member {shown(name)} reaches beyond the end: cut off")
        return self.data[start : start + member.file_size]


def _stored(name: str, view: View, storage: np.ndarray) -> Stored:
    """A view as a tensor on the bytes of its storage, which it must not leave."""
    width = np.dtype(FORMATS[view.storage.format]).itemsize
    if view.offset < 0 or len(storage) // width != view.storage.elements:
        raise Refused(
            f"a tensor in it reaches beyond its storage: {name} lies in "
            f"{shown(view.storage.elements)} elements of {width} bytes, and the file has "
            f"{len(storage)} bytes for them"
        )
    data = storage[view.offset * width :]
    stored = Stored(view.storage.format, view.shape, data, view.strides)
    problem = stored.problem()
    if problem is not None:
        raise Refused(f"a tensor in it reaches beyond its storage: {name} {problem}")
    return stored


def _folder(archive: Archive) -> str:
    """The prefix of the names of all members: archive/data.pkl -> archive/"""
    index = next((name for name in archive.members if name.endswith("data.pkl")), None)
    if index is None:
        raise Refused("it is a zip file without a data.pkl, so torch did not save it")
    folder = index.removesuffix("data.pkl")
    order = f"{folder}byteorder"
    found = archive.read(order).tobytes() if order in archive.members else b"little"
    if found == b"big":
        raise Refused("it was saved on a big-endian machine")
    if found != b"little":
        raise CutOff(f"its member {shown(order)} is neither little nor big")
    return folder


def _read(path: Path, data: np.ndarray) -> dict[str, Stored]:
    beginning = data[: len(START)].tobytes()
    if beginning.startswith(PICKLE):
        raise Refused(
            "it is a pickle and no zip file, as torch saved before its version 1.6; load it with "
            "PyTorch and save its tensors as safetensors"
        )
    if beginning != START:
        raise Refused(
            f"it begins with {shown(beginning.decode('latin-1'))}, and is no zip file as "
            "torch.save writes it; download it again"
        )
    archive = Archive(path, data)
    folder = _folder(archive)
    state = Unpickler(archive.read(f"{folder}data.pkl")).load()
    if not isinstance(state, dict):
        raise Refused("it holds no dictionary of tensors")
    tensors = {}
    for name, view in state.items():
        if not is_name(name):
            raise Refused(f"it holds a tensor named {shown(name)}, which no head has")
        if not isinstance(view, View):
            raise Refused(f"its entry {shown(name)} is not a tensor")
        tensors[name] = _stored(name, view, archive.read(f"{folder}data/{view.storage.key}"))
    return tensors


def read_bin(path: Path) -> dict[str, Stored]:
    """The tensors of one ``.bin`` shard, by name.

    Raises ValueError if the file is cut off or holds anything but tensors. Nothing that the
    pickle names is ever imported or called.
    """
    try:
        return _read(path, map_file(path))
    except Refused as err:
        raise ValueError(f"{path.name} was not read: {err}") from err
    except CutOff as err:
        raise ValueError(
            f"{path.name} is not a complete torch checkpoint ({err}); download it again"
        ) from err
