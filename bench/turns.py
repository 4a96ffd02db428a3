"""Turns: the order in which configurations run, and the runs that each of them got."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .configurations import PLAIN, Configuration
from .flags import Settings
from .questions import Question


@dataclass(kw_only=True)
class Turns:
    """Runs of one configuration, and the plain runs between them."""

    configuration: Configuration
    plain: list[Any] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)

    @property
    def both(self) -> tuple[list[Any], list[Any]]:
        """The plain runs, and the configuration's."""
        return self.plain, self.runs

    def numbered(self) -> Iterator[tuple[str, int, Any]]:
        """All runs with their role ("plain" or "speculative") and their number in it."""
        for role, runs in zip(("plain", "speculative"), self.both, strict=True):
            for number, run in enumerate(runs):
                yield role, number, run


@dataclass(kw_only=True)
class Cell(Turns):
    """Runs of one configuration on one prompt, each a ``Run``."""

    question: Question
    prompt: list[int]

    @property
    def set_name(self) -> str:
        return self.question.set_name


def schedule(cells: Sequence[Turns], order: str) -> list[tuple[Configuration, list[list[Any]]]]:
    """Plan one repeat: the configurations in order, each with the lists that its run belongs to.

    "abba": plain B B plain for each configuration B; "mirror": plain B C ... C B plain, where all
    share the plain runs. Both cancel a linear drift of the machine. "weave": plain B C ..., all
    at once in short turns, which also cancels what comes and goes within seconds.
    """
    steps = []
    drafted = [(cell.configuration, [cell.runs]) for cell in cells]
    if order == "abba":
        for cell, step in zip(cells, drafted, strict=True):
            plain = (PLAIN, [cell.plain])
            steps += [plain, step, step, plain]
        return steps
    steps = [(PLAIN, [cell.plain for cell in cells]), *drafted]
    return steps if order == "weave" else steps + steps[::-1]


def num_steps(configurations: Sequence[Configuration], order: str) -> int:
    """Number of runs in one repeat."""
    return len(schedule([Turns(configuration=each) for each in configurations], order))


def take_turns(
    cells: Sequence[Turns],
    order: str,
    run_all: Callable[[list[Configuration]], Iterable[Any]],
    progress: Callable[[], None],
) -> None:
    """Run one repeat and call ``progress`` after each run.

    ``run_all`` runs a list of configurations and returns their runs in the same order.
    """
    steps = schedule(cells, order)
    runs = run_all([configuration for configuration, _ in steps])
    for (_, lists), run in zip(steps, runs, strict=True):
        for each in lists:
            each.append(run)
        progress()


def repeat_turns(
    cells: Sequence[Turns],
    settings: Settings,
    warm_up: Callable[[Configuration], object],
    run: Callable[[Configuration], Any],
    progress: Callable[[], None],
) -> None:
    """Warm up every configuration, then run all repeats."""
    for configuration in (PLAIN, *(cell.configuration for cell in cells)):
        warm_up(configuration)
    for _ in range(settings.repeats):
        take_turns(cells, settings.order, partial(map, run), progress)
