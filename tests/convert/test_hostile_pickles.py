"""Pickles that mean harm: what reached foreign memory, grew without bound, or said too much."""

import struct
import zipfile

import numpy as np
import pytest
from checkpoints import CONFIG, _global, _int, _str, _tuple, refused, write_bin, write_config

from mlx_eagle.convert.stored import Stored
from mlx_eagle.convert.torch_file import read_bin

ARRAY = np.arange(16, dtype=np.float32).reshape(4, 4)
NO_HOOKS = _global("collections", "OrderedDict") + b")R"


def storage(elements: int = 16, kind: str = "FloatStorage", key: str = "0") -> bytes:
    parts = _str("storage"), _global("torch", kind), _str(key), _str("cpu"), _int(elements)
    return _tuple(*parts) + b"Q"


def view(stored: bytes, offset: bytes, shape: bytes, strides: bytes) -> bytes:
    call = _global("torch._utils", "_rebuild_tensor_v2")
    return call + _tuple(stored, offset, shape, strides, b"\x89", NO_HOOKS) + b"R"


def state(*entries: bytes) -> bytes:
    named = b"".join(_str(f"t{i}") + entry for i, entry in enumerate(entries))
    return b"\x80\x02" + NO_HOOKS + b"(" + named + b"u."


def ints(*values: int) -> bytes:
    return _tuple(*map(_int, values))


def big(value: int) -> bytes:
    data = value.to_bytes(100, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


PLAIN = view(storage(), _int(0), ints(4, 4), ints(4, 1))
ATTRIBUTES = _str("strides") + ints(-4000, 1) + _str("offset") + _int(-(2**30))
HOSTILE = {
    "strides by BUILD": state(PLAIN + b"}(" + ATTRIBUTES + b"ub"),
    "strides by BUILD with slots": state(PLAIN + b"N}(" + ATTRIBUTES + b"u\x86b"),
    "BUILD on a storage": state(
        view(storage() + b"}" + _str("key") + _str("x") + b"sb", _int(0), ints(4, 4), ints(4, 1))
    ),
    "BUILD on a function": _global("torch._utils", "_rebuild_tensor_v2")
    + b"}" + _str("__code__") + b"Nsb.",
    "negative strides": state(view(storage(), _int(0), ints(4, 4), ints(-4, 1))),
    "negative offset": state(view(storage(), _int(-1), ints(4, 3), ints(4, 1))),
    "an offset beyond": state(view(storage(), _int(1), ints(4, 4), ints(4, 1))),
    "strides beyond": state(view(storage(), _int(0), ints(4, 4), ints(5, 1))),
    "huge strides": state(view(storage(), _int(0), ints(4, 4), _tuple(big(2**700), _int(1)))),
    "a huge shape": state(view(storage(), _int(0), _tuple(big(2**700)), ints(0))),
    "many dimensions": state(view(storage(), _int(0), ints(*[1] * 99), ints(*[1] * 99))),
    "one value many times": state(view(storage(), _int(0), ints(1 << 20, 1 << 20), ints(0, 0))),
    "more than is stored": state(view(storage(1 << 20), _int(0), ints(1024, 1024), ints(1024, 1))),
    "less than is stored": state(view(storage(4), _int(0), ints(2, 2), ints(2, 1))),
    "a negative storage": state(view(storage(-1), _int(0), ints(4, 4), ints(4, 1))),
    "two kinds of one storage": state(
        PLAIN, view(storage(16, "HalfStorage"), _int(0), ints(4, 4), ints(4, 1))
    ),
    "a storage elsewhere": state(view(storage(key="../0"), _int(0), ints(4, 4), ints(4, 1))),
    "a list for a shape": state(view(storage(), _int(0), b"](K\x04K\x04e", ints(4, 1))),
    "a view of a view": state(view(PLAIN, _int(0), ints(4, 4), ints(4, 1))),
    "a called storage": b"\x80\x02" + _global("torch", "FloatStorage") + b")R.",
    "a made object": b"\x80\x02" + _global("torch", "FloatStorage") + b")\x81.",
    "an extension": b"\x80\x02\x82\x01.",
    "an instance": b"\x80\x02(icollections\nOrderedDict\n.",
    "a name from the stack": b"\x80\x04\x8c\x05posix\x8c\x06system\x93.",
    "a text number": b"\x80\x02I99999999\n.",
    "itself": b"\x80\x02]q\x00h\x00a.",
    "no state": b"\x80\x02K\x01.",
    "a number for a name": b"\x80\x02}K\x01K\x02s.",
    "a long key of a storage": state(
        view(storage(key="k" * 10**5), _int(0), ints(4, 4), ints(4, 1))
    ),
    "a key of two lines": state(view(storage(key="a\nb"), _int(0), ints(4, 4), ints(4, 1))),
    "a long name": b"\x80\x02}" + _str("n" * 10**5) + PLAIN + b"s.",
    "a name of two lines": b"\x80\x02}" + _str("a\n\x1b[31mb") + PLAIN + b"s.",
    "a storage beyond numbers": state(PLAIN.replace(_int(16), big(2**790))),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickles_are_refused_in_a_sentence(tmp_path, out, capsys, case):
    write_config(tmp_path / "source", CONFIG)
    write_bin(tmp_path / "source" / "pytorch_model.bin", {"t0": ARRAY}, HOSTILE[case])
    sentence = refused(capsys, tmp_path / "source", out)
    assert "pytorch_model.bin" in sentence and len(sentence) < 400


def test_what_torch_writes_is_read(tmp_path):
    """The versions in a state dict are set by BUILD, and other protocols name things otherwise."""
    versions = _str("_metadata") + NO_HOOKS + b"(" + _str("") + b"}" + _str("version") + b"K\x01su"
    metadata = b"}" + versions + b"sb."
    parameter = _global("torch._utils", "_rebuild_parameter") + _tuple(PLAIN, b"\x88", NO_HOOKS)
    for data in (state(PLAIN)[:-1] + metadata, state(parameter + b"R")):
        write_bin(tmp_path / "x.bin", {"t0": ARRAY}, data)
        assert np.array_equal(read_bin(tmp_path / "x.bin")["t0"].numpy(), ARRAY)


@pytest.mark.parametrize("levels", [3, 40])
def test_shared_tuples_are_not_spelled_out(tmp_path, levels):
    data = b"\x80\x02K\x01\x85q\x00" + b"h\x00h\x00\x86q\x00" * levels + b"Q."
    write_bin(tmp_path / "x.bin", {"t0": ARRAY}, data)
    with pytest.raises(ValueError) as caught:
        read_bin(tmp_path / "x.bin")
    assert len(str(caught.value)) < 300


def test_compressed_members_are_refused_unread(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", state(PLAIN), zipfile.ZIP_STORED)
        archive.writestr("archive/data/0", bytes(1 << 24))
    with pytest.raises(ValueError, match="compressed"):
        read_bin(tmp_path / "x.bin")


def test_names_of_members_are_not_spelled_out(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("a\n" * 20000 + "/data.pkl", state(PLAIN))
    with pytest.raises(ValueError) as caught:
        read_bin(tmp_path / "x.bin")
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"version https://git-lfs.github.com/spec/v1", b"<html>", b"PK\x05\x06", b"\x7fELF"]
)
def test_what_is_no_checkpoint_is_not_taken_for_a_pickle(tmp_path, data):
    (tmp_path / "x.bin").write_bytes(data + bytes(100))
    with pytest.raises(ValueError, match=r"no zip file as torch.save writes it"):
        read_bin(tmp_path / "x.bin")


def test_sizes_are_compared_with_what_is_declared(tmp_path):
    write_bin(tmp_path / "x.bin", {"t0": np.zeros(1 << 20, np.float32)}, state(PLAIN))
    with pytest.raises(ValueError, match="16 elements of 4 bytes, and the file has 4194304"):
        read_bin(tmp_path / "x.bin")


@pytest.mark.parametrize(
    "order, sentence", [(b"big", "big-endian"), (b"\x80\x02", "neither little nor big")]
)
def test_the_order_of_bytes_is_read(tmp_path, order, sentence):
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("archive/byteorder", order)
        archive.writestr("archive/data.pkl", state(PLAIN))
    with pytest.raises(ValueError, match=sentence):
        read_bin(tmp_path / "x.bin")


def test_a_cut_zip_is_cut_off(tmp_path):
    path = tmp_path / "x.bin"
    write_bin(path, {"t0": ARRAY}, state(PLAIN))
    whole = path.read_bytes()
    for size in (4, 30, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut off"):
            read_bin(path)


@pytest.mark.parametrize("shift", [1, 29, 31, 5000, -1])
def test_members_lie_within_the_file(tmp_path, shift):
    """A directory that is said to begin elsewhere moves the places of all members with it."""
    path = tmp_path / "x.bin"
    write_bin(path, {"t0": np.zeros(5000, np.float32)}, state(PLAIN))
    data = bytearray(path.read_bytes())
    at = data.rfind(b"PK\x05\x06") + 16
    data[at : at + 4] = (int.from_bytes(data[at : at + 4], "little") + shift).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ValueError, match="its directory is damaged"):
        read_bin(path)


def test_large_archives_are_read(tmp_path):
    """The directory that torch appends: with 64-bit places, whatever the size."""
    path = tmp_path / "x.bin"
    write_bin(path, {"t0": ARRAY}, state(PLAIN))
    data = path.read_bytes()
    at = data.rfind(b"PK\x05\x06")
    count, size, start = struct.unpack("<HLL", data[at + 10 : at + 20])
    end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1)
    last = data[at : at + 8] + b"\xff" * 12 + data[at + 20 :]
    path.write_bytes(data[:at] + end + locator + last)
    assert np.array_equal(read_bin(path)["t0"].numpy(), ARRAY)


def test_views_are_checked_where_they_are_used():
    """Whoever made them: no view reads outside its bytes."""
    data = np.zeros(64, np.uint8)
    for shape, strides in (
        ((4, 4), (-4, 1)),
        ((4, 4), (5, 1)),
        ((4, 5), None),
        ((2**40, 2**40), (0, 0)),
        ((4,), (1, 1)),
    ):
        with pytest.raises(ValueError, match="damaged"):
            Stored("F32", shape, data, strides).numpy()
    assert Stored("F32", (4, 4), data, (1, 4)).numpy().shape == (4, 4)
