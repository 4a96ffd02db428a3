"""Blocks of a report, and the two ways of writing them: Markdown and one HTML file."""

import base64
import html
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

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: #1d2126;
  background: #fff; max-width: 1200px; margin: 2.5rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.9rem; margin: 0 0 .6rem; }
h2 { font-size: 1.35rem; margin: 2.6rem 0 .5rem; padding-top: .8rem;
  border-top: 1px solid #dfe3e8; }
h3 { font-size: 1.08rem; margin: 1.8rem 0 .4rem; }
p { max-width: 96ch; }
.scroll { overflow-x: auto; margin: .8rem 0 1.2rem; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums;
  width: 100%; }
th, td { padding: .32rem .6rem; border-bottom: 1px solid #e6e9ed; text-align: left; }
th { background: #f4f6f8; font-weight: 600; vertical-align: bottom; }
.number { text-align: right; }
td.number { white-space: nowrap; }
tr:hover td { background: #f9fafb; }
figure { margin: 1.2rem 0 1.6rem; }
figure img { max-width: 100%; height: auto; }
figcaption { color: #57606a; font-size: .9rem; max-width: 96ch; }
summary { cursor: pointer; color: #0b5cad; margin: .6rem 0; }
"""


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
    """A pipe table; bars inside cells are escaped."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


def html_page(title: str, blocks: Sequence[Block]) -> str:
    """The report as one HTML file that needs no other: images are inside it."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Table(header, rows):
            return f'<div class="scroll">{_html_table(header, rows)}</div>'
        case Folded(words, blocks):
            inside = "\n".join(_html(each) for each in blocks)
            return f"<details><summary>{html.escape(words)}</summary>{inside}</details>"
        case Image(path, caption):
            data = base64.b64encode(path.read_bytes()).decode()
            text = html.escape(caption)
            return (
                f'<figure><img alt="{text}" src="data:image/svg+xml;base64,{data}">'
                f"<figcaption>{text}</figcaption></figure>"
            )


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    # A column of numbers is set flush right, so that digits line up.
    classes = [' class="number"' if all(map(_is_number, cells)) else "" for cells in zip(*rows)]
    classes = classes or [""] * len(header)
    head = "".join(f"<th{kind}>{html.escape(cell)}</th>" for kind, cell in zip(classes, header))
    lines = []
    for row in rows:
        cells = "".join(f"<td{kind}>{html.escape(cell)}</td>" for kind, cell in zip(classes, row))
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _is_number(cell: str) -> bool:
    """Whether a cell is one number, perhaps with its unit and spread, or says that there is none.

    "1.23x", "14.2 [13.9-14.5]" and "5.1 MB" are; "0.49 0.58" is a list, which may be broken.
    """
    first, *others = cell.split(" ") or [""]
    is_one = not others or others[0][:1] in "[(" or others[0].isalpha()
    return cell in ("", "-") or (is_one and first[:2].lstrip("+-")[:1].isdigit())
