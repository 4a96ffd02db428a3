"""Rules of the code: imports run downwards only, files are short, names and places are kept.

A package is here a folder under mlx_eagle/ (``convert`` and ``bench`` lie at the top of the
repository) or a file next to the folders. Entry points stand on top of all: ``__main__`` modules,
and the ``__init__`` of the package.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "mlx_eagle"
ELSEWHERE = ("convert", "bench")  # source folders that become subpackages when installed
MOST_LEVELS, MOST_FILES, MOST_LINES, MOST_COLUMNS, LONGEST_FUNCTION = 8, 9, 500, 99, 60

MOST_MODULES = 150  # on the way to 130; kinds of drafters, APIs, the disk store, grammars
MOST_REACHED = 30  # modules behind the loop, itself among them

MIRRORS = {
    "speculative_generate_step": "mlx_lm.generate.speculative_generate_step",
    "batch_generate": "mlx_lm.generate.batch_generate",
}
"""Functions that may be longer, because their signature is that of a function of mlx-lm."""


def source_files() -> dict[str, Path]:
    """The modules of the package by their dotted names."""
    folders = [(PACKAGE, ROOT / PACKAGE)]
    folders += [(f"{PACKAGE}.{name}", ROOT / name) for name in ELSEWHERE]
    found = {}
    for prefix, folder in folders:
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join([prefix, *parts])] = path
    return found


MODULES = source_files()


def is_entry_point(module: str) -> bool:
    return module == PACKAGE or module.endswith(".__main__")


def package_of(module: str) -> str:
    return module.split(".")[1]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_names(module: str) -> Iterator[str]:
    """The dotted names in a module's imports, also those inside functions."""
    is_package = MODULES[module].name == "__init__.py"
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                above = parts[: len(parts) - node.level + is_package]
                base = ".".join([*above, *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of ours that it imports, ``from . import x`` resolved to x."""
    found = set()
    for name in imported_names(module):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        if name and name != module:
            found.add(name)
    return frozenset(found)


def arrows() -> dict[str, set[str]]:
    """Which packages each package imports; entry points belong to none."""
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
    assert levels["system"] == 1 and levels["target"] < levels["drafters"] < levels["decoding"]


def reached(module: str) -> set[str]:
    """The modules of ours that one imports, by whatever way, itself included."""
    found, left = set(), {module}
    while left:
        found |= left
        left = set().union(*map(imports, left)) - found
    return found


def test_the_loop_is_understood_from_few_modules():
    found = reached("mlx_eagle.decoding.loop")
    assert {"mlx_eagle.decoding.decoder", "mlx_eagle.target.rollback"} <= found
    assert len(found) <= MOST_REACHED, sorted(found)


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


def test_there_are_few_modules():
    assert len(MODULES) <= MOST_MODULES


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


INTERFACE = {"base", "tree", "acceptance_stats", "batch_drafter"}


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


def test_a_circle_is_found():
    """The check itself: a circle that other modules lead to and away from."""
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}
    assert sorted(circle_in(graph)) == ["b", "c"]
    assert circle_in({"a": {"b"}, "b": set()}) == []
