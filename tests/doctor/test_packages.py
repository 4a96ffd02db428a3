"""Installed packages, and a wrong installation, which every command explains in a sentence."""

import json
import os
import platform
import subprocess
import sys
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from documents import ROOT
from packaging.requirements import Requirement

from mlx_eagle.doctor import packages
from mlx_eagle.doctor.packages import is_well

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def install(site: Path, name: str, version: str, files: dict[str, int] | None = None) -> None:
    """A stand-in: the package's metadata, and files of so many bytes, later ones over others."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{path},sha256=0,{size}\n" for path, size in (files or {}).items()]
    (info / "RECORD").write_text("".join(lines))
    for path, size in (files or {}).items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(b"x" * size)


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """A folder of packages, the only one that is looked at."""

    def find(name: str) -> PathDistribution | None:
        found = list(tmp_path.glob(f"{name.replace('-', '_')}-*.dist-info"))
        return PathDistribution(found[0]) if found else None

    monkeypatch.setattr(packages, "find", find)
    library = tmp_path / "mlx" / "lib" / "libmlx.so"
    monkeypatch.setattr(packages, "library", lambda: library if library.exists() else None)
    return tmp_path


LIBRARY = "mlx/lib/libmlx.so"


def test_one_build(site):
    install(site, "mlx", "0.32.4")
    install(site, "mlx-cpu", "0.32.4", {LIBRARY: 20})
    found = packages.check_build()
    assert (found.level, found.text) == ("ok", "mlx-cpu 0.32.4 (CPU)")


def test_two_builds_over_each_other(site):
    install(site, "mlx", "0.32.4")
    for name, size in (("mlx-cpu", 20), ("mlx-cuda-12", 90)):
        install(site, name, "0.32.4", {LIBRARY: size})
    found = packages.check_build()
    assert found.level == "problem"
    assert found.text == "mlx-cpu and mlx-cuda-12 are installed over each other"
    assert "pip uninstall mlx mlx-cpu mlx-cuda-12, then pip install" in found.remedy


def test_no_build(site):
    assert "no MLX" in packages.check_build().text
    install(site, "mlx", "0.32.4")
    found = packages.check_build()
    assert found.level == "problem" and "without a library" in found.text
    install(site, "mlx-cuda-12", "0.32.4")  # whose library went with another one's removal
    found = packages.check_build()
    assert "a part of mlx-cuda-12 was removed" in found.text and "uninstall" in found.remedy


def test_builds_of_another_version(site):
    install(site, "mlx", "0.32.4")
    install(site, "mlx-cpu", "0.32.3", {LIBRARY: 20})
    found = packages.check_build()
    assert found.level == "problem" and "do not belong together" in found.text


@pytest.mark.parametrize(
    "version, level",
    [
        ("0.31.9", "problem"),
        ("0.32.2", "ok"),
        ("0.32.9", "ok"),
        ("0.32.10rc1", "ok"),
        ("0.33", "problem"),
        ("0.33.0.dev1+g5", "problem"),
    ],
)
def test_versions_of_mlx_lm(site, version, level):
    install(site, "mlx-lm", version)
    found = packages.check_version(*packages.MLX_LM)
    assert found.level == level and version in found.text
    if level == "problem":
        assert found.remedy == "pip install 'mlx-lm>=0.32.2,<0.33'"


def test_the_versions_are_those_of_the_project():
    found = [Requirement(name) for name in PROJECT["dependencies"]]
    extras = PROJECT["optional-dependencies"]
    builds = [[Requirement(name) for name in extras[x]] for x in ("cpu", "cuda12", "cuda13")]
    wanted_by = [(packages.MLX_LM, found), *((packages.MLX, x) for x in (found, *builds))]
    for (name, limits, tested), among in wanted_by:
        (requirement,) = [r for r in among if r.name == name]
        assert requirement.specifier == limits
        assert tested in requirement.specifier
    oldest = ".".join(map(str, packages.OLDEST_PYTHON))
    assert PROJECT["requires-python"] == f">={oldest}"


@pytest.mark.parametrize(
    "translated, sentence", [(True, "runs under Rosetta"), (False, "on an Intel Mac")]
)
def test_an_intel_python(monkeypatch, translated, sentence):
    monkeypatch.setattr(packages.sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(packages, "read_sysctl", lambda name: int(translated))
    found = packages.check_python()
    assert found.level == "problem" and sentence in found.text and found.remedy


@pytest.mark.parametrize("version, level", [("13.6", "problem"), ("14.0", "ok"), ("26.2", "ok")])
def test_versions_of_macos(monkeypatch, version, level):
    monkeypatch.setattr(packages.sys, "platform", "darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: (version, ("", "", ""), "arm64"))
    found = packages.check_system()
    assert found.level == level and version in found.text


def test_this_installation_is_whole():
    assert is_well(packages.check_packages())


@pytest.mark.parametrize(
    "argv, original, command",
    [
        (["/usr/bin/mlx_eagle.chat", "--help"], [], "mlx_eagle.chat"),
        (["-m"], ["python", "-m", "mlx_eagle.train"], "mlx_eagle.train"),
        (["-m"], ["python", "-X", "dev", "-m", "another.program"], None),
        (["notebook.py"], [], None),
        (["-c"], ["python", "-c", "import mlx_eagle"], None),
        ([], [], None),
    ],
)
def test_who_is_running(monkeypatch, argv, original, command):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert packages.running_command() == command


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> dict[str, Path]:
    """Folders to put before all others: an old mlx-lm, and an MLX without its library."""
    old = tmp_path_factory.mktemp("old")
    install(old, "mlx-lm", "0.28.1", {"mlx_lm/__init__.py": 0})
    bare = tmp_path_factory.mktemp("bare")
    (bare / "mlx").mkdir()
    (bare / "mlx" / "__init__.py").write_text("")
    return {"old": old, "bare": bare}


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


SENTENCES = {
    "old": "mlx-lm: 0.28.1, expected >=0.32.2,<0.33: pip install 'mlx-lm>=0.32.2,<0.33'.",
    "bare": "MLX build: none: MLX is installed without a library to compute with",
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_a_command_says_it_in_one_sentence(broken, kind):
    done = python(broken[kind], "-m", "mlx_eagle.generate", "--help")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {SENTENCES[kind]}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", SENTENCES)
def test_the_doctor_gives_its_page_all_the_same(broken, kind):
    done = python(broken[kind], "-m", "mlx_eagle.doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and done.stderr == "" and found["ok"] is False
    (problem,) = [each for each in found["findings"] if each["level"] == "problem"]
    assert f"{problem['name']}: {problem['text']}".startswith(
        SENTENCES[kind].partition(": pip")[0]
    )


def test_a_program_of_others_gets_an_import_error(broken):
    code = "try: from mlx_eagle import generate\nexcept ImportError as err: print(err)"
    done = python(broken["old"], "-c", code)
    assert done.stdout == f"{SENTENCES['old']}\n"


def test_what_is_not_known_goes_on_as_it_is():
    with pytest.raises(ImportError, match="of another kind"), packages.explained():
        raise ImportError("of another kind")


def test_an_import_neither_prints_nor_ends_the_program():
    code = "import sys; sys.argv = ['mlx_eagle.generate', '--version']; import mlx_eagle; print(1)"
    assert python(ROOT, "-c", code).stdout == "1\n"
