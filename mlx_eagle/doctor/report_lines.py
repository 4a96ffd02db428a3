"""Lines of the doctor's page: what was found, and what to do about it."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]
WIDTH = 96


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, what is there, and what to do, if anything.

    A "note" costs nothing but speed or certainty; with a "problem" something will not work.
    """

    name: str
    text: str
    level: Level = "ok"
    remedy: str = ""


def page(findings: Sequence[Finding]) -> str:
    """All findings for people: notes and problems are marked, and their remedies stand below."""
    marks = {"ok": " ", "note": "-", "problem": "!"}
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        start = f"{marks[finding.level]} {finding.name:{width}}  "
        space = " " * len(start)
        lines += textwrap.wrap(
            finding.text, WIDTH, initial_indent=start, subsequent_indent=space,
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip
        if finding.remedy:
            lines += textwrap.wrap(
                f"{finding.level}: {finding.remedy}", WIDTH, initial_indent=space,
                subsequent_indent=space, break_on_hyphens=False, break_long_words=False,
            )  # fmt: skip
    return "\n".join([*lines, "", verdict(findings)])


def verdict(findings: Sequence[Finding]) -> str:
    """The last line of the page."""
    problems = [finding.name for finding in findings if finding.level == "problem"]
    if not problems:
        return "Nothing is wrong."
    what = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{what}: {', '.join(problems)}."


def is_well(findings: Sequence[Finding]) -> bool:
    """Whether there is no problem among them."""
    return all(finding.level != "problem" for finding in findings)
