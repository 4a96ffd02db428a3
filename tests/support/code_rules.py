"""Checks of how the product's code is written, and the graph of its imports.

``python tests/support/code_rules.py [--only packed,state,words,rings] [PATH ...]`` lists every
place that breaks a rule, as file:line; without a path, those of the whole product and of tools/.
``tests/test_rooms.py`` holds the same rules.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "mlx_eagle"
ELSEWHERE = ("convert", "bench")  # source folders that become subpackages when installed
LOOP = f"{PACKAGE}.decoding.loop"

VERSION = f"{PACKAGE}.__version__"
"""The one name that modules import from the package itself: it stands above its imports."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Place:
    """A line that breaks a rule."""

    path: Path
    line: int
    rule: str
    found: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.rule}: {self.found}"


def source_files() -> dict[str, Path]:
    """The modules of the package by their dotted names."""
    folders = [(PACKAGE, ROOT / PACKAGE)]
    folders += [(f"{PACKAGE}.{name}", ROOT / name) for name in ELSEWHERE]
    found = {}
    for prefix, folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join([prefix, *parts])] = path.resolve()
    return found


MODULES = source_files()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def is_entry_point(module: str) -> bool:
    return module == PACKAGE or module.endswith(".__main__")


def package_of(module: str) -> str:
    """The folder under mlx_eagle/, or the file beside the folders; "" of the package itself."""
    return module.partition(".")[2].partition(".")[0]


def absolute(module: str, node: ast.ImportFrom) -> str:
    """The dotted name behind ``from``, relative ones resolved."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    above = parts[: len(parts) - node.level + (MODULES[module].name == "__init__.py")]
    return ".".join([*above, *filter(None, [node.module])])


def is_for_main(node: ast.stmt) -> bool:
    """Whether a statement is ``if __name__ == "__main__":``, which an import never runs."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def imported_names(module: str) -> Iterator[tuple[str, int]]:
    """The dotted names in a module's imports and their lines, also those inside functions."""
    imported = [node for node in tree_of(MODULES[module]).body if not is_for_main(node)]
    for node in ast.walk(ast.Module(imported, [])):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


@cache
def import_lines(module: str) -> dict[str, int]:
    """The modules of ours that it imports, ``from . import x`` resolved to x, and first lines."""
    found: dict[str, int] = {}
    for name, line in imported_names(module):
        if name == VERSION:
            continue
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        if name and name != module:
            found.setdefault(name, line)
    return found


def imports(module: str) -> set[str]:
    return set(import_lines(module))


def reached(module: str) -> set[str]:
    """The modules of ours that one imports, by whatever way, itself included."""
    found, left = set(), {module}
    while left:
        found |= left
        left = set().union(*map(imports, left)) - found
    return found


def lines_of(modules: Iterable[str]) -> int:
    return sum(len(MODULES[module].read_text(encoding="utf-8").splitlines()) for module in modules)


# One statement a line


def elements(node: ast.expr) -> list[ast.expr] | None:
    return node.elts if isinstance(node, ast.Tuple | ast.List) else None


def is_packed(target: ast.expr, value: ast.expr) -> bool:
    """Whether several values are written out for several names, and it is not a swap."""
    names = elements(target)
    values = elements(value)
    if names is None or values is None or len(names) != len(values):
        return False
    if any(isinstance(node, ast.Starred) for node in [*names, *values]):
        return False
    return {ast.unparse(node) for node in names} != {ast.unparse(node) for node in values}


def walruses(path: Path) -> dict[ast.AST, list[ast.NamedExpr]]:
    """The walruses of each statement, without those of the statements inside it."""
    found: dict[ast.AST, list[ast.NamedExpr]] = {}
    owner: dict[ast.AST, ast.AST] = {}
    for node in nodes_of(path):  # parents come before their children
        own = node if isinstance(node, ast.stmt | ast.match_case) else owner.get(node, node)
        owner.update(dict.fromkeys(ast.iter_child_nodes(node), own))
        if isinstance(node, ast.NamedExpr):
            found.setdefault(own, []).append(node)
    return found


def packed(path: Path) -> Iterator[Place]:
    """Lines with more than one statement: packed assignments, semicolons, chains of walruses."""
    for node in nodes_of(path):
        if isinstance(node, ast.Assign) and any(is_packed(t, node.value) for t in node.targets):
            yield Place(path, node.lineno, "packed", ast.unparse(node))
    for inside in walruses(path).values():
        if len(inside) > 1:
            line = min(walrus.lineno for walrus in inside)
            yield Place(path, line, "packed", f"{len(inside)} walruses in one statement")
    source = io.StringIO(path.read_text(encoding="utf-8"))
    for token in tokenize.generate_tokens(source.readline):
        if token.type == tokenize.OP and token.string == ";":
            yield Place(path, token.start[0], "packed", "a semicolon")


# First words

NEVER_FIRST = {
    "what", "how", "which", "those", "that", "of", "within", "as", "whatever", "whoever",
}  # fmt: skip
"""Words that begin no docstring: it begins with a noun or a verb."""

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Strings that stand for themselves, with their lines: also those below an attribute."""
    for node in nodes_of(path):
        if isinstance(node, DOCUMENTED):
            for part in node.body:
                value = part.value if isinstance(part, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield part.lineno, value.value


def words(path: Path) -> Iterator[Place]:
    """Docstrings that begin with a word that says nothing yet."""
    for line, text in docstrings(path):
        first = re.match(r"\W*(\w+)", text)
        if first and first[1].lower() in NEVER_FIRST:
            yield Place(path, line, "words", text.strip().partition("\n")[0])


# Rings

EAGLE = ("eagle3", "head", "head_cache", "head_weights", "config", "feature_drafter")
SHARED_BY_DRAFTERS = (
    "base", "tree", "acceptance_stats", "folder", "target_parts",
    "copies", "seen_text", "kind", "quantize", "output_rows",
)  # fmt: skip
RINGS = {
    "reference": 0,
    **dict.fromkeys(("system", "target_model", "decoding"), 1),
    **{f"drafters.{name}": 1 for name in (*EAGLE, *SHARED_BY_DRAFTERS)},
    **dict.fromkeys(("drafters", "generate", "batch", "structured"), 2),
}
"""The ring of a folder or a file of mlx_eagle/; what is not named here is in ``OUTERMOST``."""

OUTERMOST = 3


def ring(module: str) -> int:
    """0: the reference; 1: loop and EAGLE head; 2: other drafters, batches; 3: all around it."""
    name = module.partition(".")[2]
    while name and name not in RINGS:
        name = name.rpartition(".")[0]
    return RINGS.get(name, OUTERMOST)


def rings(module: str) -> Iterator[Place]:
    """Imports from a ring farther out; of the reference, all imports of the package."""
    own = ring(module)
    for other, line in import_lines(module).items():
        if own == 0 or ring(other) > own:
            text = f"ring {own} imports {other} of ring {ring(other)}"
            yield Place(MODULES[module], line, "rings", text)


# Module state

CHANGES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop",
    "popitem", "popleft", "put", "put_nowait", "get_nowait", "remove", "reverse", "setdefault",
    "sort", "update", "acquire", "release", "set",
}  # fmt: skip
"""Methods of Python's own objects that change them."""

CHANGED_BY = {"next", "setattr", "delattr", "heappush", "heappop", "heapify"}
"""Functions that change their first argument."""

MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Call)
CONTAINERS = {
    "dict", "list", "set", "Counter", "OrderedDict", "count", "deque", "local", "Lock", "RLock",
    "Queue", "SimpleQueue", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary",
}  # fmt: skip
MEMOS = {"cache", "lru_cache"}


def last_name(node: ast.AST | None) -> str:
    """``c`` of ``a.b.c``, ``a.b.c(...)`` and ``a.b.c[...]``; "" of anything else."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "attr", getattr(node, "id", ""))


def changed(node: ast.AST) -> Iterator[ast.expr]:
    """The objects that one node changes in place."""
    if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
        yield node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in CHANGES:
            yield node.func.value
    elif isinstance(node, ast.Call) and last_name(node) in CHANGED_BY and node.args:
        yield node.args[0]
    elif isinstance(node, ast.With):
        yield from (item.context_expr for item in node.items)


def bound_in(function: Function) -> set[str]:
    """Arguments and variables of a function, those of functions inside it included."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += filter(None, [arguments.vararg, arguments.kwarg])
    stored = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    shared = {n for node in ast.walk(function) if isinstance(node, ast.Global) for n in node.names}
    return {argument.arg for argument in every} | (stored - shared)


def changes_inside(node: ast.AST) -> Iterator[ast.expr]:
    """Objects from outside that functions in ``node`` change: a name, or an attribute of one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            targets = [target for inner in ast.walk(child) for target in changed(inner)]
            own = bound_in(child) if targets else set()
            for target in targets:
                first = target.value if isinstance(target, ast.Attribute) else target
                if isinstance(first, ast.Name) and first.id not in own:
                    yield target
        else:
            yield from changes_inside(child)


def top_statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements that run at import, also those in an ``if`` or a ``try``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ExceptHandler):
            yield from top_statements(child)
        elif isinstance(child, ast.stmt):
            yield child
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from top_statements(child)


@dataclass(frozen=True)
class TopName:
    """A name of a module whose object might change, the line, and what makes the object."""

    name: str
    line: int
    value: ast.expr | None


@cache
def top_names(path: Path) -> dict[str, TopName]:
    """Names at the top of a module that hold something that can be changed."""
    found = {}
    for node in top_statements(tree_of(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = TopName(node.name, node.lineno, None)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, MUTABLE):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found[target.id] = TopName(target.id, node.lineno, node.value)
    return found


@cache
def names_from_elsewhere(module: str) -> dict[str, tuple[str, str]]:
    """Local names of other modules' names: (module, name), the name "" for a module itself."""
    found = {}
    for node in nodes_of(MODULES[module]):
        if isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                whole = (inner, "") if inner in MODULES else (base, alias.name)
                found[alias.asname or alias.name] = whole
    return found


@cache
def changed_names() -> set[tuple[str, str]]:
    """(module, name) of everything at the top of a module that some function changes."""
    found = set()
    for module in MODULES:
        others = names_from_elsewhere(module)
        for target in changes_inside(tree_of(MODULES[module])):
            if isinstance(target, ast.Name):
                found.add(others.get(target.id, (module, target.id)))
            elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                home, name = others.get(target.value.id, ("", ""))
                if home and not name:
                    found.add((home, target.attr))
    return found


def keeps_state(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Whether what a class or a function makes changes later on.

    Of a class: a method besides ``__init__`` changes ``self``. Of a function: one inside it
    changes a variable of it.
    """
    if isinstance(node, ast.FunctionDef):
        targets = [
            target for inner in node.body for target in changes_inside(ast.Module([inner], []))
        ]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        return bool(names) and not names.isdisjoint(bound_in(node))
    methods = [
        method
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name not in ("__init__", "__post_init__")
    ]
    targets = [t for method in methods for inner in ast.walk(method) for t in changed(inner)]
    return any(ast.unparse(target).partition(".")[0] == "self" for target in targets)


@cache
def makers_of_state() -> set[str]:
    """Classes and functions of ours that make objects with a state."""
    return {
        node.name
        for path in MODULES.values()
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and keeps_state(node)
    }


def has_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    every = node.args
    return bool(every.posonlyargs or every.args or every.kwonlyargs or every.vararg or every.kwarg)


def starts_empty(value: ast.expr | None) -> bool:
    """Whether an object is made without contents: it is there to be filled."""
    if isinstance(value, ast.Call):
        return last_name(value) in CONTAINERS and not value.args and not value.keywords
    if isinstance(value, ast.Dict):
        return not value.keys
    return isinstance(value, ast.List) and not value.elts


def state_of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Describe what a decorator keeps for a function; "" if it keeps nothing."""
    decorators = {last_name(decorator) for decorator in node.decorator_list}
    if decorators & MEMOS and not has_arguments(node):
        return "is computed once and kept"
    if decorators & makers_of_state():
        return "is kept by a decorator that has a state"
    return ""


def state_of_value(module: str, top: TopName) -> str:
    """Describe how the object behind a name of a module changes; "" if it does not."""
    if (module, top.name) in changed_names():
        return "is changed by a function"
    if starts_empty(top.value):
        return "starts empty"
    if last_name(top.value) in makers_of_state():
        return f"is made by {last_name(top.value)}, which makes what changes"
    return ""


def changing(module: str) -> dict[str, Place]:
    """Objects at the top of a module that change after import.

    Keys are the names of an allow-list: ``decoding.setup._known``, without the package.
    """
    path = MODULES[module]
    found = {top.name: (top.line, state_of_value(module, top)) for top in top_names(path).values()}
    for node in nodes_of(path):
        if isinstance(node, ast.Global):
            found |= dict.fromkeys(node.names, (node.lineno, "is global in a function"))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            known = found.get(node.name, (0, ""))[1]
            found[node.name] = (node.lineno, state_of_function(node) or known)
    return {
        f"{module.partition('.')[2]}.{name}": Place(path, line, "state", f"{name} {text}")
        for name, (line, text) in found.items()
        if text
    }


def state(module: str) -> Iterator[Place]:
    yield from changing(module).values()


OF_FILES: dict[str, Callable[[Path], Iterator[Place]]] = {"packed": packed, "words": words}
OF_MODULES: dict[str, Callable[[str], Iterator[Place]]] = {"state": state, "rings": rings}


def places(paths: Iterable[Path], rules: Iterable[str] = (*OF_FILES, *OF_MODULES)) -> list[Place]:
    """Every place in these files that breaks one of the rules, in order."""
    modules = {path: module for module, path in MODULES.items()}
    found = []
    for path in sorted({path.resolve() for path in paths}):
        checks = [OF_FILES[rule](path) for rule in rules if rule in OF_FILES]
        if path in modules:
            checks += [OF_MODULES[rule](modules[path]) for rule in rules if rule in OF_MODULES]
        of_file = [place for check in checks for place in check]
        found += sorted(of_file, key=lambda place: (place.line, place.rule))
    return found


def files_in(given: Iterable[Path]) -> list[Path]:
    """Python files: those given, and all in the folders given, links followed."""
    found = []
    for path in given:
        if path.is_file():
            found.append(path)
        else:
            inside = [path, *(link for link in path.iterdir() if link.is_symlink())]
            found += [file for folder in inside for file in folder.resolve().rglob("*.py")]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    parser.add_argument("--only", default=",".join([*OF_FILES, *OF_MODULES]), metavar="RULES")
    arguments = parser.parse_args()
    given = arguments.paths or [ROOT / name for name in (PACKAGE, *ELSEWHERE, "tools")]
    found = places(files_in(given), arguments.only.split(","))
    for place in found:
        print(place)
    counts = Counter(place.rule for place in found)
    behind = reached(LOOP)
    print(f"{len(found)} places:", ", ".join(f"{n} {rule}" for rule, n in counts.items()))
    print(f"Behind the loop: {len(behind)} modules, {lines_of(behind):,} lines")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
