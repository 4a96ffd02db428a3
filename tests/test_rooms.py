"""Rules of the code: imports run downwards only, files are short, names and places are kept.

A package is here a folder under mlx_eagle/ (``convert`` and ``bench`` lie at the top of the
repository) or a file next to the folders. Entry points stand on top of all: ``__main__`` modules,
and the ``__init__`` of the package.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import code_rules
import pytest
from code_rules import (
    ELSEWHERE,
    LOOP,
    MODULES,
    PACKAGE,
    RINGS,
    ROOT,
    imports,
    is_entry_point,
    lines_of,
    package_of,
    reached,
    ring,
    tree_of,
)

MOST_LEVELS, MOST_FILES, MOST_LINES, MOST_COLUMNS, LONGEST_FUNCTION = 8, 9, 600, 99, 60

MOST_BEHIND_THE_LOOP = 25  # modules, the loop among them; two of copies, one each of latent
# attention and of exact rows
MOST_LINES_BEHIND_THE_LOOP = 6_200

ALLOWED_STATE: dict[str, str] = {
    "decoding.round_costs._known": "later texts of a pair start from what earlier ones cost",
    "decoding.sampling._thread_draws": "threads of one process must not draw the same noise",
    "target_model.probe._refusals": "a model is probed once, for it takes several passes",
    "target_model.probe._axes": "a model is probed once, for it takes several passes",
    "target_model.probe._cuts_states": "a model is probed once, for it takes several passes",
    "structured._vocabularies": "making one takes a second; gone with its tokenizer",
}
"""Reasons for objects at the top of a module that may change: ``decoding.round_costs._known``."""

MIRRORS = {
    "speculative_generate_step": "mlx_lm.generate.speculative_generate_step",
    "batch_generate": "mlx_lm.generate.batch_generate",
}
"""Functions that may be longer, because their signature is that of a function of mlx-lm."""


def arrows() -> dict[str, set[str]]:
    """Packages that each package imports; entry points belong to none."""
    packages: dict[str, set[str]] = {}
    for module in MODULES:
        if not is_entry_point(module):
            here = packages.setdefault(package_of(module), set())
            here |= {package_of(other) for other in imports(module) if not is_entry_point(other)}
    return {name: others - {name} for name, others in packages.items()}


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Nodes that lead to each other in this order; [] where there are none."""
    left = {node: set(others) & graph.keys() for node, others in graph.items()}
    while free := [node for node, others in left.items() if not others]:
        for node in free:
            del left[node]
        for others in left.values():
            others.difference_update(free)
    if not left:
        return []
    path = [next(iter(left))]
    while (following := min(left[path[-1]])) not in path:
        path.append(following)
    return path[path.index(following) :]


def level(package: str, graph: dict[str, set[str]]) -> int:
    return 1 + max((level(other, graph) for other in graph[package]), default=0)


def python_files() -> list[Path]:
    """Every Python file of the repository, tests included."""
    folders = [ROOT / name for name in (PACKAGE, *ELSEWHERE, "docs", "tests", "tools")]
    return sorted({path.resolve() for folder in folders for path in folder.rglob("*.py")})


def test_no_circle_of_modules():
    assert circle_in({module: set(imports(module)) for module in MODULES}) == []


def test_imports_between_packages_run_downwards_over_few_levels():
    graph = arrows()
    assert circle_in(graph) == []
    levels = {name: level(name, graph) for name in graph}
    assert max(levels.values()) <= MOST_LEVELS, sorted(levels.items(), key=lambda item: item[1])
    assert (
        levels["system"] == 1 and levels["target_model"] < levels["drafters"] < levels["decoding"]
    )


def test_the_loop_is_understood_from_few_modules():
    found = reached(LOOP)
    steps = (
        "decoding.decoder",
        "decoding.accept",
        "target_model.rollback",
        "target_model.stand_in",
    )
    assert {f"mlx_eagle.{step}" for step in steps} <= found
    assert len(found) <= MOST_BEHIND_THE_LOOP, sorted(found)
    assert lines_of(found) <= MOST_LINES_BEHIND_THE_LOOP, lines_of(found)


def test_nobody_imports_an_entry_point():
    found = {
        module: [other for other in imports(module) if is_entry_point(other)]
        for module in MODULES
        if not is_entry_point(module)
    }
    assert {module: others for module, others in found.items() if others} == {}


def test_few_files_stand_beside_the_folders():
    files = sorted(path.name for path in (ROOT / PACKAGE).iterdir() if path.is_file())
    assert len(files) <= MOST_FILES, files


def test_files_are_short():
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert {module: n for module, n in lengths.items() if n > MOST_LINES} == {}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def test_functions_are_short():
    found = [
        (module, name, length)
        for module, path in MODULES.items()
        for name, length in functions(path)
        if length > LONGEST_FUNCTION and name not in MIRRORS
    ]
    assert found == []


@pytest.mark.parametrize("name", MIRRORS)
def test_the_exceptions_are_mirrors(name):
    module, _, function = MIRRORS[name].rpartition(".")
    assert name == function and hasattr(__import__(module, fromlist=[name]), name)
    assert any(name == found for path in MODULES.values() for found, _ in functions(path))


def test_lines_are_short():
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in python_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MOST_COLUMNS
    ]
    assert found == []


SHARED_FILES = {
    "__init__.py", "__main__.py",  # Python's own names
    "flags.py",  # of the command of each package
    "generate.py",  # the public functions, a command, and what batches run
    # Kinds of drafters, in drafters/, and how each is trained, in train/.
    "kinds.py", "assistant.py", "dflash.py", "dflash2.py", "dspark.py", "eagle3.py", "mtp.py",
}  # fmt: skip


def test_one_thing_has_one_name():
    """No two modules of the product have the same file name, and no two classes the same name."""
    files = Counter(path.name for path in MODULES.values())
    assert {name for name, count in files.items() if count > 1} <= SHARED_FILES
    classes = Counter(
        node.name
        for path in MODULES.values()
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in classes.items() if count > 1} == set()


READ = "mlx_eagle.reference"  # by people


def top_names(path: Path) -> Iterator[str]:
    """Functions, classes and constants at the top of a module."""
    for node in tree_of(path).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        yield from filter(None, (getattr(n, "id", getattr(n, "name", None)) for n in targets))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def test_nothing_is_left_over():
    """What a module defines is named once more in the product, or is a command."""
    places = [*MODULES.values(), ROOT / "pyproject.toml"]
    words = Counter(re.findall(r"\w+", "".join(path.read_text() for path in places)))
    unused = {
        module: [n for n in top_names(path) if words[n] == 1 and not n.startswith("__")]
        for module, path in MODULES.items()
        if module != READ
    }
    assert {module: names for module, names in unused.items() if names} == {}


INTERFACE = {"base", "tree", "acceptance_stats", "copies", "seen_text"}


def test_drafters_are_known_by_their_interface():
    """The loop imports nothing else of them, and no module asks what kind one is."""
    prefix = f"{PACKAGE}.drafters."
    loop = [m for m in MODULES if m.startswith((f"{PACKAGE}.decoding.", f"{PACKAGE}.batch."))]
    assert loop
    known = {o.removeprefix(prefix) for m in loop for o in imports(m) if o.startswith(prefix)}
    assert known <= INTERFACE
    outside = [path for module, path in MODULES.items() if not module.startswith(prefix)]
    asked = [
        f"{path.name}:{node.lineno}"
        for path in outside
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance"
        if re.search(r"\w+Drafter\b", ast.unparse(node.args[1]))
    ]
    assert asked == []


def rules() -> str:
    """The rules of the code, on one line."""
    return " ".join((ROOT / "CONTRIBUTING.md").read_text().split())


def test_the_environment_is_read_where_the_rules_say():
    said = re.search(r"Environment variables are read in (.*?) only:", rules())
    assert said, "CONTRIBUTING.md does not say where"
    allowed = {f"{path.strip('/').replace('/', '.')}." for path in re.findall("`(.*?)`", said[1])}
    readers = [
        module
        for module, path in MODULES.items()
        if re.search(r"\bos\.environ|\bgetenv\(", path.read_text(encoding="utf-8"))
    ]
    assert readers
    assert [m for m in readers if not any(m.startswith(prefix) for prefix in allowed)] == []


def asked_names(tree: ast.Module) -> Iterator[int]:
    """Lines that compare or look up the name of a class."""
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.Attribute):  # type(x).__name__.startswith("Rotating")
            parts = [node.value]
        named = [n for n in parts if isinstance(n, ast.Attribute) and n.attr == "__name__"]
        if any(not isinstance(n.value, ast.Name) for n in named):
            yield node.lineno


def test_names_of_classes_are_said_and_never_asked():
    assert "Class names are said" in rules()
    asked = {module: list(asked_names(tree_of(path))) for module, path in MODULES.items()}
    assert {module: lines for module, lines in asked.items() if lines} == {}
    assert list(asked_names(ast.parse("type(cache).__name__ == 'KVCache'"))) == [1]
    assert list(asked_names(ast.parse("a = 1\nRULES[type(cache).__name__]"))) == [2]
    assert list(asked_names(ast.parse("type(cache).__name__.startswith('KV')"))) == [1]
    assert list(asked_names(ast.parse("f'a {type(cache).__name__}'"))) == []


def held_files() -> list[Path]:
    files = [*MODULES.values(), *(ROOT / "tools").rglob("*.py")]
    return [path.resolve() for path in files]


@pytest.mark.parametrize("rule", ["packed", "words", "rings"])
def test_rules_of_writing_are_kept(rule):
    assert list(map(str, code_rules.places(held_files(), [rule]))) == []


def test_no_module_changes_after_its_import():
    found = {
        name: place for module in MODULES for name, place in code_rules.changing(module).items()
    }
    assert [str(place) for name, place in found.items() if name not in ALLOWED_STATE] == []
    assert set(ALLOWED_STATE) <= set(found)  # none that is no longer there


def test_names_of_folders_are_true():
    modules = {module.partition(".")[2] for module in MODULES}
    assert [name for name in RINGS if name not in modules] == []


def test_the_rings():
    assert ring("mlx_eagle.reference") == 0 and imports("mlx_eagle.reference") == set()
    assert {ring(module) for module in reached(LOOP)} == {1}
    assert ring("mlx_eagle.drafters.eagle3") == 1 and ring("mlx_eagle.drafters.mtp") == 2
    assert ring("mlx_eagle.batch.rounds") == 2 and ring("mlx_eagle.server.engine") == 3


def test_the_version_and_imports_for_main_do_not_count(tmp_path, monkeypatch):
    file = tmp_path / "made_up.py"
    file.write_text(
        "from . import __version__, chat\n"
        "def f():\n    from . import public\n"
        'if __name__ == "__main__":\n    from .generate import main\n'
    )
    monkeypatch.setitem(MODULES, "mlx_eagle.made_up", file)
    assert imports("mlx_eagle.made_up") == {"mlx_eagle.chat", "mlx_eagle.public"}


def test_an_import_from_an_outer_ring_is_found(tmp_path, monkeypatch):
    file = tmp_path / "target.py"
    file.write_text("from .. import structured\nfrom ..drafters import base, mtp\n")
    monkeypatch.setitem(MODULES, "mlx_eagle.target_model.made_up", file)
    monkeypatch.setitem(MODULES, "mlx_eagle.reference.made_up", file)
    found = [place.found for place in code_rules.rings("mlx_eagle.target_model.made_up")]
    assert found == [
        "ring 1 imports mlx_eagle.structured of ring 2",
        "ring 1 imports mlx_eagle.drafters.mtp of ring 2",
    ]
    assert len(list(code_rules.rings("mlx_eagle.reference.made_up"))) == 3


BREAKS = {
    "packed": (
        "a, b = 1, 2",
        "(a, b), c = f(), 1",
        "self.a, self.b = self.c, self.d",
        "a = 1; b = 2",
        "if (a := f()) and (b := g(a)):\n    pass",
    ),
    "words": (
        '"""What it is."""',
        'def f():\n    """Within, there is one."""',
        'class A:\n    x = 1\n    """How many."""',
    ),
}
KEEPS = """
a, b = b, a
a, b = f()
a, *b = 1, *c
x[i], x[j] = x[j], x[i]
if c := f():
    d = [e := 1]
for i, j in ((1, 2), (3, 4)):
    f("What it is; no docstring.")
def whatever():
    'Note what this is.'
"""


@pytest.mark.parametrize("rule, text", [(rule, t) for rule in BREAKS for t in BREAKS[rule]])
def test_a_broken_rule_is_found(tmp_path, rule, text):
    file = tmp_path / "broken.py"
    file.write_text(text)
    assert [place.rule for place in code_rules.places([file])] == [rule]


def test_a_kept_rule_is_not_found_broken(tmp_path):
    file = tmp_path / "kept.py"
    file.write_text(KEEPS)
    assert code_rules.places([file]) == []


HAS_STATE = """
from functools import cache, lru_cache
from . import other
from .other import shared
_known = {}
_filled = [1]
_number = 1
ROWS = {1: 2}
ROWS[3] = 4
class Memo:
    def of(self, key):
        self.values[key] = key
class Value:
    def __init__(self):
        self.x = 1
_memo = Memo()
VALUE = Value()
CHANGED = Value()
def kept(function):
    known = {}
    def inner(key):
        known[key] = function(key)
    return inner
def f(ROWS):
    ROWS.append(1)
    _filled.append(1)
    shared.append(1)
    other.pages.clear()
    CHANGED.x = 2
def g():
    global _number
    _number += 1
@cache
def h():
    return []
@lru_cache(5)
def i(x):
    return x
@kept
def j(x):
    return x
"""


def test_module_state_is_found(tmp_path, monkeypatch):
    modules = {"p.some": tmp_path / "some.py", "p.other": tmp_path / "other.py"}
    modules["p.some"].write_text(HAS_STATE)
    modules["p.other"].write_text("shared = [1]\npages = {1: 2}\nTABLE = {1: 2}\n")
    monkeypatch.setattr(code_rules, "MODULES", modules)
    for name in ("changed_names", "makers_of_state"):  # of these modules, in place of what is kept
        monkeypatch.setattr(code_rules, name, getattr(code_rules, name).__wrapped__)
    found = {name.partition(".")[2] for name in code_rules.changing("p.some")}
    assert found == {"_known", "_filled", "_number", "_memo", "CHANGED", "h", "j"}
    assert set(code_rules.changing("p.other")) == {"other.shared", "other.pages"}


def test_a_circle_is_found():
    """The check itself: a circle that other modules lead to and away from."""
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}
    assert sorted(circle_in(graph)) == ["b", "c"]
    assert circle_in({"a": {"b"}, "b": set()}) == []
