"""README.md and the documentation as tests read them: blocks, spans, commands."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = DOCS / "pages"
AT_ROOT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
DOCUMENTS = [*(ROOT / name for name in AT_ROOT), *sorted(PAGES.glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS, EXTRAS = PROJECT["scripts"], PROJECT["optional-dependencies"]
OTHERS = (
    "make", "python", "python3", "python3.13", "pip", ".", "mlx.launch", "mlx.distributed_config",
)  # fmt: skip

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")


def blocks(path: Path, *languages: str) -> Iterator[tuple[str, str]]:
    """(language, text) of the fenced blocks in these languages; "" is a block without one."""
    for language, text in FENCE.findall(path.read_text()):
        if language in languages:
            yield language, text


def spans(path: Path) -> list[str]:
    """What stands in backticks in the running text."""
    return [" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", path.read_text()))]


def commands(path: Path) -> list[list[str]]:
    """The words of every command in console blocks; an "or:" behind one counts too."""
    found = []
    for language, text in blocks(path, "", "sh"):
        for line in text.replace("\\\n", " ").replace("# or: ", "\n").splitlines():
            first = (line.split() or ["#"])[0]
            # Blocks without a language show output as well.
            if first != "#" and (language == "sh" or first in OTHERS or first in SCRIPTS):
                found.append(shlex.split(line, comments=True))
    return found
