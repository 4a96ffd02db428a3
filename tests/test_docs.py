"""README.md and the documentation: commands parse, snippets run, links lead somewhere.

Commands are judged by their own parsers, make targets by make. Snippets run as they stand, on a
tiny pair in place of the models that they name.
"""

import argparse
import ast
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import mlx_lm
import pytest
import yaml
from documents import (
    DOCS,
    DOCUMENTS,
    EXTRAS,
    FENCE,
    OTHERS,
    PAGES,
    ROOT,
    SCRIPTS,
    blocks,
    commands,
    spans,
)
from drafter_pairs import tiny_gemma3
from grids import thorough
from helpers import PROMPT, byte_tokenizer, speculative, tiny_head, tiny_llama
from mlx._distributed_utils import config, launch
from mlx._distributed_utils.common import Hostfile
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from test_package import make
from test_rooms import arrows

import mlx_eagle
from mlx_eagle.bench import __main__ as bench
from mlx_eagle.commands import flags
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.demo import __main__ as demo
from mlx_eagle.drafters.pairs import PAIRS
from mlx_eagle.server.__main__ import agent_lines
from mlx_eagle.target_model import rollback

LOG = ROOT / "bench" / "log"
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
PACKAGES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("mlx_eagle", "tests")
    for path in (ROOT / folder).glob("*/")
]
FOLDERS = [
    "",
    "tests",
    "mlx_eagle",
    "convert",
    "bench",
    *PACKAGES,
]  # where a file may be named from

STEPS = ("generate", "convert", "chat", "server", "bench", "doctor")  # of the quickstart
README_LINES, README_COLUMNS = 130, 110
CODE_COLUMNS = 92  # more would scroll on the site

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

NOW = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]  # which has what is gone, too
every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def parser_of(name: str) -> argparse.ArgumentParser:
    """The argument parser of one of our commands."""
    module = SCRIPTS[name].split(":")[0]
    found = vars(importlib.import_module(module))
    return (found.get("build_parser") or found["make_parser"])()


def demo_flags(words: list[str]) -> list[tuple]:
    """What the demo would be run with."""
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "run", lambda *args: runs.append(args))
        demo.main(words)
    return runs


def check_own(words: list[str]) -> None:
    """Parse a command of ours, and judge its values as far as that needs no model."""
    name, given = words[0], words[1:]
    if "--version" in given:
        return  # run by another test
    args = parser_of(name).parse_args(given)
    if name in ("mlx_eagle.generate", "mlx_eagle.chat"):
        flags.check_arguments(args)
    if name == "mlx_eagle.bench":
        bench.read_settings(args)


def check_make(words: list[str]) -> None:
    """The targets exist, and what goes to a program of ours suits it."""
    done = make(ROOT, "-n", *words[1:])
    assert done.returncode == 0, f"{words}: {done.stderr}"
    values = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    arguments = shlex.split(values.get("ARGS", ""))
    if "bench" in words:
        check_own(["mlx_eagle.bench", *arguments])
    if "demo" in words:
        assert demo_flags(arguments)


def check_python(words: list[str]) -> None:
    """A module that is there to be run, or a file of the repository."""
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None, f"no module {words[2]}"
    else:
        assert (ROOT / words[1]).is_file(), f"no file {words[1]}"


def check_pip(words: list[str]) -> None:
    """The only thing to install is this repository."""
    extras = ["", *(f"[{extra}]" for extra in EXTRAS)]
    assert words[1:] in [["install", "-e", f".{extra}"] for extra in extras], words


def check_source(words: list[str]) -> None:
    assert words[1:] == [".venv/bin/activate"], words


def check_launch(words: list[str]) -> None:
    """Flags of MLX's launcher, then a command of ours behind two dashes."""
    where = words.index("--")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*words[:where], "--print-python"])
        launch.main()
    check_own(words[where + 1 :])


def check_hosts(words: list[str]) -> None:
    """The flags are those that MLX's command lists."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", [*words, "--help"])
        config.main()
    assert stop.value.code == 0


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "python": check_python,
    "python3": check_python,
    "python3.13": check_python,
    "pip": check_pip,
    ".": check_source,
    "mlx.launch": check_launch,
    "mlx.distributed_config": check_hosts,
}


def test_the_example_of_hosts_is_one():
    found = Hostfile.from_file(PAGES / "two-macs.json")
    assert found.backend == "jaccl" and len(found.hosts) == 2
    for i, host in enumerate(found.hosts):
        assert host.rdma[i] is None and len(host.rdma) == len(found.hosts)


@every_document
def test_commands_parse(path, capsys):
    for words in commands(path):
        assert words[0] in CHECKS or words[0] in SCRIPTS, f"{path.name}: unknown {words[0]}"
        try:
            CHECKS.get(words[0], check_own)(words)
        except (SystemExit, ValueError) as err:
            pytest.fail(f"{path.name}: {shlex.join(words)}: {err} {capsys.readouterr().err}")


def test_commands_are_found():
    """What is checked is there, in README.md and in every guide, and the checks can fail."""
    assert set(CHECKS) == set(OTHERS)
    found = {path.name: {words[0] for words in commands(path)} for path in DOCUMENTS}
    assert {"make", "pip", "mlx_eagle.server", "mlx_eagle.generate"} <= found["README.md"]
    assert {f"mlx_eagle.{name}" for name in STEPS} <= found["quickstart.md"]
    with pytest.raises(SystemExit):
        check_own(["mlx_eagle.generate", "--num-draft-token", "x"])
    with pytest.raises(ValueError):
        check_own(["mlx_eagle.bench", "--limit", "-1"])
    with pytest.raises(AssertionError):
        check_make(["make", "tset"])


def test_commands_without_a_model_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("mlx_eagle.draft_models.user_cache", lambda: tmp_path)
    lines = {shlex.join(words) for path in DOCUMENTS for words in commands(path)}
    lines |= {span for path in DOCUMENTS for span in spans(path)}
    cheap = [shlex.split(line) for line in lines if re.search(r" --(version|list)$", line)]
    assert ["mlx_eagle.generate", "--list"] in cheap
    assert ["mlx_eagle.generate", "--version"] in cheap
    for words in cheap:
        module, function = SCRIPTS[words[0]].split(":")
        monkeypatch.setattr(sys, "argv", words)
        try:
            getattr(importlib.import_module(module), function)()
        except SystemExit as stop:
            assert stop.code == 0
        assert capsys.readouterr().out


def test_agents_are_told_what_the_server_prints():
    page = (PAGES / "clients.md").read_text().replace("\\\n    ", "")
    claude, codex, _ = agent_lines("http://127.0.0.1:8080", has_key=False)
    for line in (claude, codex):
        assert f"\n{line.partition(': ')[2]}\n" in page


def flags_of(name: str) -> set[str]:
    return {flag for action in parser_of(name)._actions for flag in action.option_strings}


@pytest.mark.parametrize("path", NOW, ids=lambda path: path.name)
def test_flags_in_the_text_exist(path):
    """Also where only the flag is named; after a command's name they are that command's."""
    known = {name: flags_of(name) for name in SCRIPTS}
    of_tests = FLAG.findall((ROOT / "tests" / "conftest.py").read_text())
    everywhere = set(of_tests).union(*known.values())
    for span in spans(path):
        if span.startswith("git "):
            continue  # whose flags are its own
        own = known.get(span.split()[0], everywhere)
        unknown = set(FLAG.findall(span)) - own
        assert not unknown, f"{path.name} speaks of {unknown} in `{span}`"


def resolve(dotted: str) -> None:
    """Follow ``mlx_eagle.a.b`` through modules and attributes; AttributeError where it ends."""
    found = mlx_eagle
    for i, name in enumerate(dotted.split(".")[1:], 1):
        if not hasattr(found, name):
            importlib.import_module(".".join(dotted.split(".")[: i + 1]))
        found = getattr(found, name)


@every_document
def test_names_in_the_text_exist(path):
    for span in spans(path):
        for dotted in re.findall(r"\bmlx_eagle(?:\.\w+)+", span):
            if dotted in SCRIPTS:  # one is a keyword of Python, and no module
                continue
            try:
                resolve(dotted)
            except (AttributeError, ImportError):
                pytest.fail(f"{path.name} speaks of {dotted}, which does not exist")
        for name in re.findall(r"[\w/.-]+\.py\b", span):
            places = [ROOT / folder / name for folder in FOLDERS]
            assert any(place.is_file() for place in places), f"{path.name} speaks of {name}"


@pytest.fixture
def tiny_pair(monkeypatch, tmp_path):
    """Every way of loading in a snippet gives the same tiny pair; no cache of the user is used."""
    model, tokenizer = tiny_llama(vocab_size=258), byte_tokenizer()
    drafter = tiny_head(model)
    monkeypatch.setattr(mlx_lm, "load", lambda name: (model, tokenizer))
    monkeypatch.setattr(mlx_eagle, "load", lambda name: (model, tokenizer))
    monkeypatch.setattr(mlx_eagle, "load_demo", lambda: (model, tokenizer, drafter))
    monkeypatch.setattr(mlx_eagle, "load_drafter", lambda name, model: drafter)
    monkeypatch.setattr(mlx_eagle, "open_drafter", lambda name, model, tokenizer: drafter)
    yield
    mlx_eagle.uninstall()


WITH_SNIPPETS = [path for path in DOCUMENTS if list(blocks(path, "python"))]


QUICK = [path for path in WITH_SNIPPETS if path.name in ("README.md", "python.md")]


@pytest.mark.parametrize("path", thorough(WITH_SNIPPETS, *QUICK), ids=lambda path: path.name)
def test_snippets_run(path, tiny_pair):
    """In their order and an empty namespace, each on what the ones before it defined."""
    names: dict[str, object] = {}
    for _, text in blocks(path, "python"):
        exec(compile(text, path.name, "exec"), names)


def slugs(path: Path) -> set[str]:
    """The anchors of a document's headings: "Let it choose: auto" -> let-it-choose-auto."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"\s", "-", heading) for heading in plain}


@every_document
def test_links_lead_somewhere(path):
    for target in LINK.findall(FENCE.sub("", path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.is_file(), f"{path.name} links to {target}"
        assert not anchor or anchor in slugs(file), f"{path.name} links to {target}"


def test_api_page_has_every_public_name():
    listed = re.findall(r"^::: mlx_eagle(?:\.generate(?=\.))?\.(\w+)$",
                        (PAGES / "api.md").read_text(), re.MULTILINE)  # fmt: skip
    assert sorted(listed) == sorted(set(mlx_eagle.__all__) - {"__version__"})


def test_workflow_runs_what_the_makefile_has():
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    scripts = "\n".join(s["run"] for job in jobs.values() for s in job["steps"] if "run" in s)
    targets = re.findall(r"^make (\w+)", scripts, re.MULTILINE)
    assert {"test", "docs"} <= set(targets)
    for target in targets:
        check_make(["make", target])
    for name in re.findall(r"\bmlx_eagle\.\w+(?= --)", scripts):
        assert name in SCRIPTS


def test_the_self_test_runs_on_every_wheel_of_mlx_for_macs():
    """MLX has wheels for macOS 14, 15 and 26; the last one's has kernels that the others lack."""
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    for job, machine in (("test", "macOS"), ("imports", "macos-26")):
        steps = [s for s in jobs[job]["steps"] if "--self-test" in s.get("run", "")]
        assert [machine in step["if"] for step in steps] == [True]


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= README_LINES
    assert not [line for line in lines if len(line) > README_COLUMNS]


@every_document
def test_code_fits_the_page(path):
    for language, text in blocks(path, "sh", "python"):
        assert not [line for line in text.splitlines() if len(line) > CODE_COLUMNS], language


@every_document
def test_tau_is_explained_where_it_first_stands(path):
    text = FENCE.sub("", path.read_text())
    first = re.search(r"\btau\b", re.sub(r"`[^`]*`", "", text))
    if first:
        before = " ".join(re.sub(r"`[^`]*`", "", text)[: first.start()].split())
        assert before.lower().endswith("mean acceptance length ("), before[-80:]


def masked(text: str) -> list[str]:
    """Lines without their figures, whose number is the text's own as well."""
    return [re.sub(r"[\d.]+( [\d.]+)*", "N", line) for line in text.splitlines()]


def test_demo_in_the_readme_looks_like_the_demo():
    """What the README shows of `make demo` has the lines that the program prints."""
    stats = Stats()
    for num_accepted in (0, 1, 2):
        stats.record(2, 2, num_accepted, num_accepted + 1, 0)
    last = SimpleNamespace(generation_tps=10.0, stats=stats)
    run = ([1, 2, 3], last)
    (shown,) = [text for _, text in blocks(ROOT / "README.md", "text") if "Prompt:" in text]
    printed = masked("\n".join(demo.report(run, run)))
    assert masked(shown)[-len(printed) :] == printed


def tables_module() -> ModuleType:
    """docs/tables.py, which is part of no package."""
    spec = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_made_from_the_code_are_whole():
    tables = tables_module().TABLES
    pages = "".join(path.read_text() for path in PAGES.glob("*.md"))
    assert set(re.findall(r"<!-- table: (\w+) -->", pages)) == set(tables)
    pairs = tables["pairs"]()
    assert all(f"[{pair.head}]" in pairs and pair.target in pairs for pair in PAIRS)
    assert len(pairs.splitlines()) == len(PAIRS) + 2
    for pair, line in zip(PAIRS, pairs.splitlines()[2:], strict=True):
        published = [text for figure in pair.figures for text in vars(figure).values()]
        assert all(text in line for text in published if text != "-")
    reports = [json.loads(path.read_text()) for path in (ROOT / "measured").glob("*.json")]
    measured = tables["measured"]().splitlines()
    assert len(measured) == 2 + sum(len(report["runs"]) for report in reports) > 2
    for report in reports:
        for run in report["runs"]:
            ratio = run["tps"] / run["plain_tps"]
            (line,) = [li for li in measured if f"| {ratio:.2f}x | {run['tau']:.2f} |" in li]
            assert report["notes"] in line and report["machine"]["chip"] in line
    contexts = tables["context"]()
    assert "| Llama-3.1-8B | 4.5 | 1.1 | 4.3 |" in contexts  # 131072 bytes per token
    assert "| vicuna-13b-v1.3 | 7.3 | 6.7 |" in contexts  # 819200
    assert "| M4, also Pro and Max | 1.4 to 1.9x |" in tables["speedup"]()
    files = tables["files"]()
    for package in (ROOT / "mlx_eagle").glob("*/__init__.py"):
        others = list(package.parent.glob("[!_]*.py"))
        assert f"### {package.parent.name}/" in files or not others
    cells = re.findall(r"^\| `(.*?)` \| (.*) \|$", files, re.MULTILINE)
    assert all(file and line for file, line in cells)


def test_what_drafters_read_is_counted_from_their_shapes():
    """Against published sizes: MTP layers of 810 MiB (15 tensors), a DFlash head of 2.41 GiB."""
    tables = tables_module()
    dense = {name: tables.draft_bytes(name, None) for name in tables.DRAFTERS}
    assert dense["Qwen3.5-27B, MTP"] == pytest.approx(810 * 2**20, rel=0.001)
    assert dense["Qwen3.5-9B, DFlash"] == pytest.approx(2.41 * 2**30, rel=0.005)
    # Of 256 experts of 3 x 2048 x 512 numbers, 8 are read.
    shared = 2 * (2 * 2048**2 + 3 * 16 * 256 * 2048 + 2 * 2 * 256 * 2048 + 2048 * (256 + 1))
    experts = 2 * 3 * 2048 * 512 * (8 + 1)
    assert dense["Qwen3.5-35B-A3B, MTP"] == pytest.approx(shared + experts, rel=0.001)
    for name in tables.DRAFTERS:
        assert tables.draft_bytes(name, tables.Quantization()) <= 0.35 * dense[name]
        full, some = (tables.output_bytes(name, num) for num in (None, 65536))
        assert some <= full / 2 or "assistant" in name


@pytest.mark.exhaustive
def test_the_levels_of_the_architecture_page():
    """All packages are there, each above those it imports; the drawing says the same."""
    page = (PAGES / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d) \| `([\w/.]+)` \|", page, re.MULTILINE)
    levels = {re.sub(r"/$|\.py$", "", name): int(level) for level, name in rows}
    graph = arrows()
    assert levels.keys() == graph.keys() and len(rows) == len(levels)
    upwards = {(a, b) for a in graph for b in graph[a] if levels[a] <= levels[b]}
    assert upwards == set()
    drawn = re.findall(r"^│ (\d) │ ([\w ]+)│", page, re.MULTILINE)
    assert {name: int(level) for level, names in drawn for name in names.split()} == levels


def defined_in(path: Path) -> set[str]:
    """What a file defines: at its top, and in its classes."""
    found = set()
    body = ast.parse(path.read_text()).body
    for node in [*body, *(n for c in body if isinstance(c, ast.ClassDef) for n in c.body)]:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        found |= {getattr(node, "name", None), *(getattr(t, "id", None) for t in targets)}
    return found


def test_the_map_names_what_is_there():
    """A name in a row of the map is defined in a file of that row."""
    rows = re.findall(
        r"^\| (.*?) \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    checked = []
    for question, answer in rows:
        spans = re.findall(r"`([^`]+)`", answer)
        names = {span for span in spans if re.fullmatch(r"[A-Za-z_]+", span)}
        files = [ROOT / span for span in spans if span.endswith(".py") and "/" in span]
        known = set().union(*map(defined_in, files))
        assert names <= known, f"{question}: {names - known} is not in {answer}"
        checked += names
    assert len(checked) >= 3


@every_document
def test_no_merge_is_left_half_done(path):
    assert not re.findall(r"^(?:<{7} |>{7} |={7}$).*", path.read_text(), re.MULTILINE)


def test_the_index_of_the_log_is_whole():
    """Each entry of each month, newest first; lines that are no rows of tables are short."""
    index = (ROOT / "bench" / "LOG.md").read_text()
    months = sorted(LOG.glob("*.md"), reverse=True)
    assert re.findall(r"^## \[.*\]\(log/(.*)\)$", index, re.MULTILINE) == [m.name for m in months]
    entries = [re.findall(r"^## (.*)$", m.read_text(), re.MULTILINE) for m in months]
    assert all(
        title.startswith(m.stem)
        for m, found in zip(months, entries, strict=True)
        for title in found
    )
    assert re.findall(r"^\* (.*)$", index, re.MULTILINE) == [title for e in entries for title in e]
    lines = [line for m in months for line in m.read_text().splitlines()]
    assert not [line for line in lines if len(line) > README_COLUMNS and not line.startswith("|")]


def test_site_shows_every_page():
    """`make docs` makes sure of the rest, and runs in the workflow."""
    nav = (DOCS / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r": ([\w-]+\.md)$", nav, re.MULTILINE)
    taken = ["index.md", "changelog.md", "contributing.md", "log.md"]  # docs/hooks.py makes them
    taken += [f"log-{path.name}" for path in LOG.glob("*.md")]
    assert sorted(listed) == sorted([path.name for path in PAGES.glob("*.md")] + taken)


ROLLBACKS = {
    "in a sliding window": (tiny_gemma3, make_prompt_cache),
    "in a rotating cache that keeps first tokens": (
        tiny_llama,
        lambda model: [RotatingKVCache(12, keep=4) for _ in model.layers],
    ),
}
"""Rows of the map, and a case in which what they name has to run."""


@pytest.mark.parametrize("case", ROLLBACKS)
def test_the_map_sends_readers_to_the_rollback_that_runs(case, monkeypatch):
    """Forty tokens, past the window, with drafts that are mostly wrong."""
    row = rf"^\| change how drafts are rolled back {case} \| (.*) \|$"
    (answer,) = re.findall(row, (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    kinds = (rollback.TrimRollback, rollback.RotatingRollback)
    (named,) = {kind.__name__ for kind in kinds} & set(re.findall(r"`(\w+)`", answer))
    ran = []
    for kind in kinds:
        for name in ("rollback", "cut"):
            method = getattr(kind, name, None)
            if method is not None:

                def noting(self, *args, method=method):
                    if isinstance(self.cache, RotatingKVCache):  # not a layer that sees all
                        ran.append(type(self).__name__)
                    return method(self, *args)

                monkeypatch.setattr(kind, name, noting)
    make_model, make_cache = ROLLBACKS[case]
    model = make_model()
    cache = make_cache(model)
    tokens, stats = speculative(model, tiny_head(model), PROMPT, 40, prompt_cache=cache)
    assert len(tokens) == 40 and stats.num_rejected > 30
    assert set(ran) == {named}
