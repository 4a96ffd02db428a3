"""The parts of the self-test: what each is called, what it says, and how they are run.

A part that fails or whose kernel raises becomes a line of the report, and the rest goes on.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

KERNEL_ERRORS = (RuntimeError, ValueError)
"""What MLX raises where a kernel cannot be built or run, and we where something is refused."""


@dataclass(frozen=True)
class Line:
    """A line of a table of the report."""

    cells: tuple[str, ...]
    ok: bool = True


@dataclass(frozen=True)
class Part:
    """One thing that is tried: ``run`` returns its lines of the table."""

    name: str
    run: Callable[[], Sequence[Line]]


@dataclass(frozen=True)
class Section:
    """A table of the report: what its columns are called, and the parts that fill it."""

    title: str
    header: tuple[str, ...]
    parts: Sequence[Part]
    remark: str = ""


@dataclass
class Result:
    """What a part gave: its lines, or the error that ended it."""

    part: Part
    lines: Sequence[Line] = ()
    error: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.error and all(line.ok for line in self.lines)


@dataclass
class Outcome:
    """A section with the results of its parts."""

    section: Section
    results: list[Result] = field(default_factory=list)


def run_part(part: Part) -> Result:
    """Run one part; what a kernel raises is its result."""
    result, start = Result(part), time.perf_counter()
    try:
        result.lines = part.run()
    except KERNEL_ERRORS as err:
        reason = " ".join(str(err).split()) or "no reason given"
        result.error = f"{type(err).__name__}: {reason}"
    result.seconds = time.perf_counter() - start
    return result
