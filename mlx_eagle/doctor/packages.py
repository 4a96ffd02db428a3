"""Check of the packages: whether Python, MLX and mlx-lm are here, and fit together.

Nothing is imported for it, because an import fails if they do not fit: ``explained`` turns that
into one sentence. For Linux, three packages bring the same files of MLX, and the last one
installed wins; for a Mac there is one.
"""

import importlib
import json
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .. import __version__

Level = Literal["ok", "note", "problem"]
WIDTH = 96  # columns, if standard output is no terminal
COMMAND = re.compile(r"mlx_eagle(\.\w+)+")
DOCTOR = "mlx_eagle.doctor"
OLDEST_PYTHON = (3, 11)
OLDEST_MACOS = 14
BUILDS = {
    "mlx-metal": "Metal",
    "mlx-cpu": "CPU",
    "mlx-cuda-12": "CUDA 12",
    "mlx-cuda-13": "CUDA 13",
}
"""Packages that bring ``libmlx``, and the device that each computes on."""
GET_MLX = "pip install mlx"
if sys.platform == "linux":
    GET_MLX = "pip install 'mlx[cpu]' (with an NVIDIA card 'mlx[cuda12]' or 'mlx[cuda13]')"


@dataclass(frozen=True)
class Finding:
    """A line of the page: the name of the check, the text found, and the remedy, if any.

    A "note" costs only speed or certainty; with a "problem" something will not work.
    """

    name: str
    text: str
    level: Level = "ok"
    remedy: str = ""


def page(findings: Sequence[Finding]) -> str:
    """The findings as text: notes and problems are marked, and their remedies stand below."""
    columns = shutil.get_terminal_size((WIDTH, 24)).columns
    marks = {"ok": " ", "note": "-", "problem": "!"}
    width = max(len(finding.name) for finding in findings)
    indent = " " * (width + 4)
    look = {"break_on_hyphens": False, "break_long_words": False, "subsequent_indent": indent}
    lines = []
    for finding in findings:
        start = f"{marks[finding.level]} {finding.name:{width}}  "
        lines += textwrap.wrap(finding.text, columns, initial_indent=start, **look)
        if finding.remedy:
            said = f"{finding.level}: {finding.remedy}"
            lines += textwrap.wrap(said, columns, initial_indent=indent, **look)
    problems = [finding.name for finding in findings if finding.level == "problem"]
    number = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    verdict = f"{number}: {', '.join(problems)}." if problems else "Nothing is wrong."
    return "\n".join([*lines, "", verdict])


def is_well(findings: Sequence[Finding]) -> bool:
    """Whether no finding is a problem."""
    return all(finding.level != "problem" for finding in findings)


MLX = ("mlx", ">=0.32.4", "0.32.4")
MLX_LM = ("mlx-lm", ">=0.32.2,<0.33", "0.32.2")
"""Packages, the limits of their versions, for pip, and the version that the tests ran with."""


def find(name: str) -> Distribution | None:
    """The installed package of that name; None if there is none."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def check_version(name: str, limits: str, tested: str) -> Finding:
    """Whether a package is there, in a version that we can work with, and as tested."""
    found = find(name)
    remedy = f"pip install '{name}{limits}'"
    if found is None:
        return Finding(name, "not installed", "problem", remedy)
    if found.version not in SpecifierSet(limits, prereleases=True):
        return Finding(name, f"{found.version}, expected {limits}", "problem", remedy)
    if Version(found.version) != Version(tested):
        return Finding(name, f"{found.version} (the tests ran with {tested})")
    return Finding(name, f"{found.version}, as tested")


def check_python() -> Finding:
    """The running Python: its version, and on a Mac whether it is built for Apple silicon."""
    text = f"{platform.python_version()} ({platform.machine()})"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("Python", text, "problem", "install Python 3.11 or newer")
    if sys.platform == "darwin" and platform.machine() == "x86_64":
        if read_sysctl("sysctl.proc_translated") == 1:
            text += ", an Intel build that runs under Rosetta"
            remedy = "MLX needs a native (arm64) Python: install one and make a new environment"
        else:
            text += ", on an Intel Mac"
            remedy = "MLX runs on Macs with Apple silicon only"
        return Finding("Python", text, "problem", remedy)
    return Finding("Python", text)


def read_sysctl(name: str) -> int | None:
    """A whole number of the macOS kernel by its name; None if there is none of that name."""
    if sys.platform != "darwin":
        return None
    done = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True)
    return int(done.stdout) if done.stdout.strip().isdigit() else None


def check_system() -> Finding:
    """The operating system; MLX is built for macOS 14 and newer."""
    if sys.platform != "darwin":
        return Finding("system", platform.platform(terse=True))
    version = platform.mac_ver()[0]
    if int(version.partition(".")[0] or 0) < OLDEST_MACOS:
        remedy = f"MLX is built for macOS {OLDEST_MACOS} and newer: update the system"
        return Finding("system", f"macOS {version}", "problem", remedy)
    return Finding("system", f"macOS {version}")


def library() -> Path | None:
    """The ``libmlx`` that an import would load; None if there is none."""
    spec = find_spec("mlx")
    folders = (spec and spec.submodule_search_locations) or ()
    found = (path for folder in folders for path in Path(folder, "lib").glob("libmlx.*"))
    return next((path for path in found if path.suffix in (".so", ".dylib")), None)


def check_build() -> Finding:
    """Whether one build of MLX is here, and its library."""
    here = {name: found for name in BUILDS if (found := find(name)) is not None}
    anew = f"pip uninstall {' '.join(['mlx', *here])}, then {GET_MLX}"
    if (mlx := find("mlx")) is None:
        return Finding("MLX build", "none, as there is no MLX", "problem", GET_MLX)
    if not here or library() is None:
        text = "none: MLX is installed without a library to compute with"
        if here:
            text += f", for a part of {' and '.join(here)} was removed"
        return Finding("MLX build", text, "problem", anew if here else GET_MLX)
    if len(here) > 1:
        text = f"{' and '.join(here)} are installed over each other"
        return Finding("MLX build", text, "problem", anew)
    ((name, found),) = here.items()
    if found.version != mlx.version:
        text = f"{name} {found.version} with mlx {mlx.version}, which do not belong together"
        remedy = f"pip install --force-reinstall mlx=={mlx.version} {name}=={mlx.version}"
        return Finding("MLX build", text, "problem", remedy)
    return Finding("MLX build", f"{name} {found.version} ({BUILDS[name]})")


def check_import() -> Finding:
    """Whether MLX can be loaded."""
    try:
        importlib.import_module("mlx.core")
    except ImportError as err:
        remedy = "install a build that fits this machine (see above), and for CUDA its driver"
        return Finding("loading MLX", f"fails: {err}", "problem", remedy)
    return Finding("loading MLX", "works")


def check_packages() -> list[Finding]:
    """Findings about the system, Python and the packages."""
    found = [check_system(), check_python(), check_version(*MLX)]
    found += [check_build(), check_version(*MLX_LM)]
    return [*found, check_import()] if is_well(found) else found


@contextmanager
def explained() -> Iterator[None]:
    """Explain failed imports in one sentence if they fail because of what is installed.

    A command prints it and ends with 2, the doctor prints its page and ends with 1; a program
    that imports us gets it as an ImportError. Other errors are raised as they are.
    """
    try:
        yield
    except (ImportError, AttributeError) as err:
        findings = check_packages()
        if is_well(findings):
            raise
        command = running_command()
        if command == DOCTOR:
            say(findings, "--json" in sys.argv or "--json" in sys.orig_argv)
            sys.exit(1)
        worst = next(finding for finding in findings if finding.level == "problem")
        sentence = f"{worst.name}: {worst.text}: {worst.remedy}."
        if command is None:
            raise ImportError(sentence) from err
        print(f"error: {sentence} More: {DOCTOR}.", file=sys.stderr)
        sys.exit(2)


def say(findings: list[Finding], as_json: bool) -> None:
    """Print the findings as a page, or as one JSON document."""
    if as_json:
        document = {"version": __version__, "ok": is_well(findings)}
        print(json.dumps(document | {"findings": list(map(asdict, findings))}))
    else:
        print(page(findings))


def running_command() -> str | None:
    """The command of ours that this process runs; None in any other program.

    While Python looks for the module of ``python -m``, ``sys.argv`` has no name yet.
    """
    name = Path(sys.argv[0]).name if sys.argv else ""
    if name == "-m" and "-m" in sys.orig_argv[:-1]:
        name = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    return name if COMMAND.fullmatch(name) else None
