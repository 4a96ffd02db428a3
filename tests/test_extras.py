"""Which build of MLX each extra brings, as pip and uv resolve it against the real index.

Nothing is installed. Where no index can be reached, or uv is not there, that is said at the end.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mlx_eagle.doctor.packages import MLX_LM, OLDEST_MACOS

ROOT = Path(__file__).parent.parent
PROJECT = ROOT / "pyproject.toml"
PYTHONS = ("3.11", "3.14")  # the oldest and the newest
EXTRAS = {"cpu": "mlx-cpu", "cuda12": "mlx-cuda-12", "cuda13": "mlx-cuda-13"}
PLATFORMS = ("aarch64-apple-darwin", "x86_64-manylinux_2_35", "aarch64-manylinux_2_35")
LIMIT = 240  # seconds

pytestmark = pytest.mark.exhaustive


def resolve(*command: str | Path, **variables: str) -> subprocess.CompletedProcess:
    environment = os.environ | variables
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT
    )


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> None:
    """A package index that answers."""
    name, _, tested = MLX_LM
    wheel = f"{name}=={tested}"
    folder = tmp_path_factory.mktemp("wheels")
    pip = (sys.executable, "-m", "pip", "--retries", "0", "download", "--no-deps", "--dest")
    if resolve(*pip, folder, wheel).returncode != 0:
        pytest.skip("no package index can be reached: extras are not resolved")


@pytest.fixture(scope="module")
def uv(index) -> str:
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = shutil.which("uv", path=folders)
    if found is None:
        pytest.skip("uv is not installed: its resolving of the extras is not tried")
    return found


def builds(names: set[str]) -> set[str]:
    return {name for name in names if re.match(r"mlx-(metal|cpu|cuda)", name)}


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_uv_finds_wheels_with_one_build(uv, extra, platform, python):
    """For all that the extra brings, on the oldest and newest Python and the oldest macOS."""
    done = resolve(
        uv, "pip", "compile", PROJECT, "--extra", extra, "--python-platform", platform,
        "--python-version", python, "--only-binary", ":all:", "--no-header", "--no-annotate",
        "--quiet", MACOSX_DEPLOYMENT_TARGET=f"{OLDEST_MACOS}.0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = {line.split("==")[0] for line in done.stdout.splitlines()}
    assert builds(names) == {"mlx-metal" if "darwin" in platform else EXTRAS[extra]}
    assert {"mlx", "mlx-lm"} <= names


def test_uv_refuses_two_of_them(uv, tmp_path):
    """Where it reads the project: ``uv lock`` says so, and ``uv sync`` goes by that."""
    shutil.copy(PROJECT, tmp_path)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    extras = [flag for extra in ("cpu", "cuda12") for flag in ("--extra", extra)]
    done = resolve(uv, "export", "--project", tmp_path, "--quiet", "--no-emit-project", *extras)
    assert done.returncode != 0 and "incompatible" in done.stderr, done.stderr


@pytest.mark.parametrize("extra", EXTRAS)
def test_pip_finds_one_build(index, extra):
    """On this machine; pip reads markers by the Python that runs it, whatever it resolves for."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"][extra]
    pip = (sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet")
    done = resolve(*pip, "--only-binary", ":all:", "--report", "-", *wanted)
    assert done.returncode == 0, done.stderr
    names = {found["metadata"]["name"] for found in json.loads(done.stdout)["install"]}
    assert builds(names) == {"mlx-metal" if sys.platform == "darwin" else EXTRAS[extra]}
