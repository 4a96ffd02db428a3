"""The self-test: every part in turn, and one Markdown report for an issue.

The report names no path, no user and no host.
"""

import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..system.atomic_folder import check_writable
from ..system.device import prepare_device
from ..system.version import __version__
from .checks import TF32, check_all
from .pair import cost_section, parity_section
from .parts import Outcome, Section, run_part
from .report_lines import Finding
from .tiny import attention_section, cache_section

PRIVATE = ("cache", "calibration", "known pairs")
"""Findings that are nobody else's business, or say nothing about the machine."""
PATH = re.compile(r"(?<![\w./~])~?(?:/[^\s/:'\"`,()]+)+/?")
LONGEST_ERROR = 300
LEGEND = (
    "Written by `mlx_eagle.doctor --self-test`, which tries what a machine could get wrong. A "
    "near-tie is no failure: two tokens are so close there that rounding decides between them."
)


def sections() -> list[Section]:
    """Everything that is tried, quick things first."""
    return [cache_section(), attention_section(), cost_section(), parity_section()]


def self_test(tried: Sequence[Section], file: Path) -> tuple[list[Outcome], bool]:
    """Run all parts, saying how far it is on standard error, and write the report to ``file``.

    It is also written before each part: should one end the whole process, it says which. Returns
    the outcomes, and whether all is well. Raises ValueError where ``file`` cannot be written,
    before anything is run.
    """
    check_writable(file, "--out")
    prepare_device()
    # Read once, at the first product: float32 is to be compared as float32.
    os.environ.setdefault(TF32, "0")
    findings, outcomes, start = check_all(), [Outcome(section) for section in tried], time.time()
    total, number = sum(len(section.parts) for section in tried), 0
    for outcome in outcomes:
        for part in outcome.section.parts:
            number += 1
            file.write_text(report(findings, outcomes, time.time() - start, part.name))
            result = run_part(part)
            outcome.results.append(result)
            said = "ok" if result.ok else "FAILED"
            line = f"[{number}/{total}] {part.name}: {said} ({result.seconds:.1f} s)"
            print(line, file=sys.stderr, flush=True)
    file.write_text(report(findings, outcomes, time.time() - start))
    return outcomes, not failures(outcomes)


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """The parts that failed."""
    results = [result for outcome in outcomes for result in outcome.results]
    return [result.part.name for result in results if not result.ok]


def report(
    findings: Sequence[Finding], outcomes: Sequence[Outcome], seconds: float, running: str = ""
) -> str:
    """The Markdown of all that was found; ``running`` is the part that has not come back."""
    failed, num_parts = failures(outcomes), sum(len(outcome.results) for outcome in outcomes)
    verdict = f"{len(failed)} of {num_parts} parts failed" if failed else "all parts passed"
    verdict = f'ended in the part "{running}"' if running else verdict
    rows = [
        (f.name, f.text if f.level == "ok" else f"{f.text} ({f.level})")
        for f in findings
        if f.name not in PRIVATE
    ]
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    text = [
        f"## mlx-eagle {__version__} self-test: {verdict}",
        f"{day}, {seconds:.0f} seconds, {TF32}={os.environ.get(TF32, 'unset')}",
        LEGEND,
    ]
    if failed:
        text.append(f"Failed: {'; '.join(failed)}")
    text.append(table(("this machine", "what is there"), rows))
    text += [part for outcome in outcomes if outcome.results for part in blocks(outcome)]
    return redact("\n\n".join(text)) + "\n"


def blocks(outcome: Outcome) -> list[str]:
    """The heading, the remark and the table of a section."""
    header = outcome.section.header
    rows: list[tuple[str, ...]] = []
    for result in outcome.results:
        rows += [line.cells for line in result.lines]
        if result.error:
            told = (result.part.name, result.error[:LONGEST_ERROR], "FAILED")
            rows.append((told[0], *[""] * (len(header) - 3), *told[1:]))
    remark = [outcome.section.remark] if outcome.section.remark else []
    return [f"### {outcome.section.title}", *remark, table(header, rows)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; what would end a cell or a line is replaced."""
    lines = [header, ["---"] * len(header), *rows]
    cells = [[" ".join(cell.split()).replace("|", "/") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def redact(text: str) -> str:
    """Without what is private: of a path its last part stays, and the host has no name.

    "/home/ann/models/x.json cannot be read" -> ".../x.json cannot be read"
    """
    text = PATH.sub(lambda path: f".../{path[0].rstrip('/').rpartition('/')[2]}", text)
    host = platform.node()
    return re.sub(rf"\b{re.escape(host)}\b", "(host)", text) if len(host) > 2 else text


def document(outcomes: Sequence[Outcome], well: bool) -> dict[str, Any]:
    """The outcomes for ``--json``."""
    parts = [
        {
            "section": outcome.section.title,
            "name": result.part.name,
            "ok": result.ok,
            "seconds": round(result.seconds, 2),
            "lines": [list(line.cells) for line in result.lines],
            "error": redact(result.error),
        }
        for outcome in outcomes
        for result in outcome.results
    ]
    return {"version": __version__, "ok": well, "parts": parts}
