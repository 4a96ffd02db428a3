"""Blocks of a report, written as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of plain prose."""

    text: str


@dataclass(frozen=True)
class Table:
    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Image:
    """A plot: an SVG file, and what it shows."""

    path: Path
    caption: str


@dataclass(frozen=True)
class Folded:
    """Blocks that are shown on demand only, under these words."""

    words: str
    blocks: "Sequence[Block]"


Block = Heading | Paragraph | Table | Image | Folded


def markdown(blocks: Sequence[Block], folder: Path) -> str:
    """The report as Markdown; images are named relative to ``folder``."""
    return "\n\n".join(_markdown(block, folder) for block in blocks) + "\n"


def _markdown(block: Block, folder: Path) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Paragraph(text):
            return text
        case Table(header, rows):
            return markdown_table(header, rows)
        case Image(path, caption):
            return f"![{caption}]({path.relative_to(folder).as_posix()})"
        case Folded(words, blocks):
            inside = markdown(blocks, folder)
            return f"<details><summary>{words}</summary>\n\n{inside}\n</details>"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table; each row is one line, and bars inside cells are escaped."""

    def line(cells: Sequence[str]) -> str:
        shown = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(shown)} |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])
