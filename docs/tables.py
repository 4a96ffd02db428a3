"""Tables of the documentation that are made from the code, so that they cannot fall behind it.

A page has ``<!-- table: NAME -->`` where one belongs; ``hooks.py`` puts it there.
"""

import ast
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from mlx_eagle.drafters.pairs import PAIRS, targets_within

PACKAGE = Path(__file__).parents[1] / "mlx_eagle"
HUB = "https://huggingface.co"


def pair_table() -> str:
    """Every known target with its drafters in the order in which ``auto`` takes them."""
    rows = []
    for target, pairs in groupby(PAIRS, key=lambda pair: pair.target):
        for i, pair in enumerate(pairs):
            place = target if pair.head == pair.kind else pair.head
            owner, name, *folder = place.split("/")
            page = "/".join([HUB, owner, name, *(["tree/main", *folder] if folder else [])])
            drafter = f"[{pair.head}]({page})"
            published = "; ".join(map(str, pair.figures))
            row = [target if i == 0 else "", drafter, pair.kind, pair.size, pair.licence]
            rows.append([*row, published])
    header = ["target", "drafter", "kind", "size as published", "licence of the drafter"]
    header.append("published by others")
    return markdown_table(header, rows)


# Of a Mac's memory in GB, what macOS lets a GPU use.
USABLE = {16: 2 / 3, 24: 2 / 3, 32: 2 / 3, 64: 3 / 4, 128: 3 / 4}


def memory_table() -> str:
    """Which known targets fit into a memory and not into the one before it."""
    rows, before = [], set()
    for size, share in USABLE.items():
        fit, _ = targets_within(size * share * 1e9)
        rows.append([f"{size} GB", ", ".join(name for name in fit if name not in before)])
        before |= set(fit)
    return markdown_table(["memory", "targets"], rows)


def file_tables() -> str:
    """The files of every folder of the package, with the first line of their docstrings."""
    parts = []
    for package in sorted(path.parent for path in PACKAGE.glob("*/__init__.py")):
        files = [path for path in sorted(package.glob("*.py")) if not path.name.startswith("__")]
        if files:
            parts.append(f"### {package.name}/\n\n{first_line(package / '__init__.py')}")
            rows = [[f"`{path.name}`", first_line(path)] for path in files]
            parts.append(markdown_table(["file", "what is there"], rows))
    return "\n\n".join(parts)


def first_line(path: Path) -> str:
    """The first paragraph of a module's docstring as one line, in Markdown."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("``", "`")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


TABLES: dict[str, Callable[[], str]] = {
    "pairs": pair_table,
    "memory": memory_table,
    "files": file_tables,
}
