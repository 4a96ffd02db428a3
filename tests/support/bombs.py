"""Files that are small, or nearly so, and want to become large or slow."""

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from checkpoints import (
    CONFIG,
    as_midlayer,
    eagle3_tensors,
    state_dict_pickle,
    write_bin,
    write_config,
    write_safetensors,
)

TENSORS = as_midlayer(eagle3_tensors())


def _bin(data: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_config(folder, CONFIG)
        write_bin(folder / "pytorch_model.bin", TENSORS, data)

    return write


def _config(data: bytes, name: str = "config.json") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_safetensors(folder, CONFIG, TENSORS)
        (folder / name).write_bytes(data)

    return write


def _header(data: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_config(folder, CONFIG)
        path = folder / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(data)) + data)

    return write


def _gguf(data: bytes, num_values: int = 1) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        folder.mkdir()
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, num_values)
        (folder / "head.gguf").write_bytes(head + data)

    return write


def _array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, kind, count) + data


def deflated(folder: Path) -> None:
    """A storage of 256 MB in 256 KB."""
    write_config(folder, CONFIG)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", state_dict_pickle(TENSORS))
        archive.writestr("archive/data/0", bytes(1 << 28))


def many_members(folder: Path) -> None:
    write_config(folder, CONFIG)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        for number in range(60000):
            archive.writestr(f"{number}", b"")


def an_endless_header(folder: Path) -> None:
    """A sparse file whose header would be nearly all of it."""
    write_config(folder, CONFIG)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", (1 << 33) - 8) + b"{")
        file.truncate(1 << 33)


def overlapping(folder: Path) -> None:
    """As many layers as the header can name, all of them the same bytes."""
    data = np.zeros(1 << 19, np.float32).tobytes()
    layers = {
        f"layers.{i}.self_attn.q_proj.weight": {
            "dtype": "F32", "shape": [512, 1024], "data_offsets": [0, len(data)]
        }
        for i in range(2000)
    }  # fmt: skip
    header = json.dumps(layers).encode()
    _header(header)(folder)
    with (folder / "model.safetensors").open("ab") as file:
        file.write(data)


EMPTIES = b'{"a":[' + b"{}," * 10**6 + b"{}]}"
DICTIONARIES = b'{"a":[' + b'{"":{}},' * 10**5 + b"{}]}"
NAMES = json.dumps({f"key{i}": i + 0.5 for i in range(240000)}).encode()
ASTRAL = ('{"a":"' + "\U0001f600" + "x" * (15 << 20) + '"}').encode()
ASTRAL_STRING = struct.pack("<Q", 4 + (40 << 20)) + "\U0001f600".encode() + b"x" * (40 << 20)
TUPLES = b"\x80\x02K\x01\x85q\x00" + b"h\x00h\x00\x86q\x00" * 40 + b"."
BOMBS: dict[str, Callable[[Path], None]] = {
    "deflated": deflated,
    "many members": many_members,
    "overlapping": overlapping,
    "an endless header": an_endless_header,
    "lists": _bin(b"\x80\x02" + b"]" * 500_000 + b"."),
    "dictionaries": _bin(b"\x80\x02" + b"}" * 500_000 + b"."),
    "filled dictionaries": _bin(b"\x80\x02X\x01\0\0\0aq\0" + b"}h\0Ns" * 80_000 + b"."),
    "too long": _bin(b"\x80\x02" + b"]" * 5_000_000 + b"."),
    "marks": _bin(b"\x80\x02" + b"(" * 500_000 + b"."),
    "nested": _bin(b"\x80\x02)" + b"\x85" * 500_000 + b"."),
    "shared": _bin(TUPLES),
    "a long string": _bin(b"\x80\x02X" + struct.pack("<I", 2**31) + b"x" * 1000 + b"."),
    "long numbers": _bin(b"\x80\x02" + b"\x8a\xff" * 10**5),
    "json empties": _config(EMPTIES),
    "json dictionaries": _config(DICTIONARIES),
    "json names": _config(NAMES),
    "json astral": _config(ASTRAL),
    "json digits": _config(b'{"a":' + b"9" * 10**6 + b"}"),
    "json depth": _config(b'{"a":' * 10**5),
    "an index": _config(NAMES, "model.safetensors.index.json"),
    "a header": _header(EMPTIES),
    "a header of names": _header(NAMES),
    "gguf numbers": _gguf(_array(4, 4_000_000, bytes(16_000_000))),
    "gguf strings": _gguf(_array(8, 500_000, (struct.pack("<Q", 1) + b"x") * 500_000)),
    "gguf endless strings": _gguf(_array(8, 2**60, bytes(8 << 20))),
    "gguf endless numbers": _gguf(_array(10, 2**60, bytes(100))),
    "gguf a long string": _gguf(
        struct.pack("<Q", 1) + b"a" + struct.pack("<I", 8) + ASTRAL_STRING
    ),
    "gguf a long key": _gguf(ASTRAL_STRING + struct.pack("<I", 0) + bytes(1)),
    "gguf nested": _gguf(_array(9, 1, struct.pack("<IQ", 9, 1) * 10**5)),
    "gguf values": _gguf(
        b"".join(struct.pack("<Q", 4) + struct.pack("<I", i) + bytes(5) for i in range(70_000)),
        70_000,
    ),
}
