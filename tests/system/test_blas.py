"""The fast BLAS: the copy that is made of it, and that MLX multiplies with it."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_eagle.system import blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the wheels for a Mac need none")

PRODUCT = """
import ctypes, json, sys
import mlx_eagle
early = any(name in sys.modules for name in ("mlx.core", "mlx_lm"))
loaded = mlx_eagle.load_fast_blas() if sys.argv[1:] else None
import mlx.core as mx
with mx.stream(mx.cpu):
    product = (mx.arange(6.0).reshape(2, 3) @ mx.ones((3, 2))).tolist()

class Place(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("file", "base", "name", "address")]

place, process = Place(), ctypes.CDLL(None)
found = getattr(process, "cblas_sgemm", None)
if found is not None:
    process.dladdr(ctypes.cast(found, ctypes.c_void_p), ctypes.byref(place))
file = ctypes.string_at(place.file).decode() if place.file else None
try:
    mlx_eagle.load_fast_blas()
    late = ""
except RuntimeError as err:
    late = str(err)
print(json.dumps([early, loaded, product, file, late]))
"""


def start(home: Path, *command: str, **environment: str) -> subprocess.Popen:
    """A process whose home is ``home``, with no BLAS preloaded."""
    variables = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "LD_DEBUG")}
    return subprocess.Popen(
        command,
        env=variables | {"HOME": str(home)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out


def copies(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "mlx-eagle").iterdir())


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A home in which the copy has been made, by three processes at once."""
    home = tmp_path_factory.mktemp("home")
    code = "import mlx_eagle; print(mlx_eagle.load_fast_blas())"
    processes = [start(home, sys.executable, "-c", code) for _ in range(3)]
    assert [finish(process) for process in processes] == ["True\n"] * 3
    return home


@pytest.mark.exhaustive
def test_racing_processes_leave_one_copy(home):
    (copy,) = copies(home)
    assert copy.name == f"openblas-{blas.find_source()[1]}-{blas.checksum(copy)}.so"


@pytest.mark.exhaustive
def test_mlx_multiplies_with_the_copy(home):
    """Asked of the linker both ways: where the name leads, and what MLX's library was given."""
    log = home / "bindings"
    out = finish(
        start(
            home, sys.executable, "-c", PRODUCT, "load",
            LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(log), LD_BIND_NOW="1",
        )
    )  # fmt: skip
    (copy,) = copies(home)
    assert json.loads(out) == [False, True, [[3, 3], [12, 12]], str(copy), ""]
    text = "".join(path.read_text() for path in home.glob("bindings*"))
    found = [
        line.partition(" to ")[2].split()[0]
        for line in text.splitlines()
        if "libmlx.so" in line.partition(" to ")[0] and "`cblas_sgemm'" in line
    ]
    assert found and set(found) == {str(copy)}


@pytest.mark.exhaustive
def test_importing_us_loads_nothing_and_afterwards_it_is_too_late(home):
    early, loaded, product, file, late = json.loads(
        finish(start(home, sys.executable, "-c", PRODUCT))
    )
    assert (early, loaded, product) == (False, None, [[3, 3], [12, 12]])
    assert file is None or "openblas" not in file
    assert "before anything imports mlx" in late


@pytest.mark.exhaustive
def test_commands_load_it_unasked(home):
    out = finish(start(home, sys.executable, "-m", "mlx_eagle.doctor", "--json"))
    (found,) = [f for f in json.loads(out)["findings"] if f["name"] == "BLAS"]
    assert found["level"] == "ok" and found["text"].startswith("OpenBLAS 0.3.")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("first", "expected"),
    [("", "True"), ("import mlx.core", "RuntimeError('mlx is imported already")],
    ids=["ours", "mlx"],
)
def test_the_first_public_name_loads_it_unless_mlx_is_there(home, first, expected):
    code = f"{first}\nimport mlx_eagle\nmlx_eagle.load\ntry: said = mlx_eagle.load_fast_blas()\n"
    code += "except RuntimeError as err: said = repr(err)\nprint(said)"
    assert finish(start(home, sys.executable, "-c", code)).startswith(expected)


@pytest.mark.exhaustive
def test_the_number_of_threads_is_the_environments(home):
    code = "import mlx_eagle; mlx_eagle.load_fast_blas(); import mlx_eagle.system.device as d"
    process = start(
        home, sys.executable, "-c", f"{code}; print(d.blas_name())", OPENBLAS_NUM_THREADS="1"
    )
    assert finish(process).endswith(" with 1 threads\n")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(blas, "user_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(blas, "temporary_cache", lambda: tmp_path / "temporary")
    return tmp_path / "cache"


def test_a_damaged_copy_is_made_again(cache):
    first = blas.fast_blas()
    content = first.read_bytes()
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert blas.fast_blas() == first and first.read_bytes() == content
    before = first.stat()
    assert blas.fast_blas() == first
    assert first.stat().st_mtime_ns == before.st_mtime_ns, "a whole one stays"
    assert [path.name for path in cache.iterdir()] == [first.name]


def test_without_a_cache_it_lies_among_temporary_files(cache):
    cache.write_text("a file where the folder should be")
    assert blas.fast_blas().parent == cache.parent / "temporary"


def test_a_library_that_does_not_work_here_is_not_kept(cache, monkeypatch):
    monkeypatch.setattr(blas, "TRY", "import os; os.abort()")
    with pytest.raises(ValueError, match=r"could not be prepared .*exit code -6"):
        blas.fast_blas()
    assert [path for path in cache.parent.rglob("*") if path.is_file()] == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels are those of x86")
@pytest.mark.parametrize("core", ["Sandybridge", "Haswell", "Zen"])
def test_the_kernels_of_processors_without_avx512_work(cache, monkeypatch, core):
    monkeypatch.setenv("OPENBLAS_CORETYPE", core)
    assert blas.fast_blas().parent == cache


def test_without_the_extra_it_says_how_to_get_it(cache, monkeypatch):
    monkeypatch.setattr(blas, "SOURCE", "no-such-package-is-installed")
    assert "pip install 'mlx-eagle[cpu]'" in blas.slow_because()
    monkeypatch.setattr(blas, "openblas", lambda: None)
    monkeypatch.delitem(sys.modules, "mlx.core")
    assert blas.load_fast_blas() is False
    assert not cache.exists()


def test_a_mac_needs_none(cache, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.load_fast_blas() is False and not cache.exists()
