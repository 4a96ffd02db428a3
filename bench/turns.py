"""Turns: the order in which configurations run, and the runs that each of them got."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlx_eagle.decoding.stats import Stats

from .configurations import PLAIN, Configuration
from .flags import Settings
from .questions import Question


@dataclass
class Cell:
    """Runs of one configuration on some questions, and the plain runs between them.

    ``at_once`` questions are answered at the same time: one, a batch, or those of the clients.
    """

    configuration: Configuration
    questions: Sequence[Question] = ()
    prompts: Sequence[list[int]] = ()
    at_once: int = 1
    plain: list[Any] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)

    @property
    def set_name(self) -> str:
        return self.questions[0].set_name

    @property
    def stats(self) -> Stats:
        """Counts of all runs of the configuration together."""
        return sum((run.stats for run in self.runs), Stats())

    @property
    def both(self) -> tuple[list[Any], list[Any]]:
        """The plain runs, and the configuration's."""
        return self.plain, self.runs

    def numbered(self) -> Iterator[tuple[str, int, Any]]:
        """All runs with their role ("plain" or "speculative") and their number in it."""
        for role, runs in zip(("plain", "speculative"), self.both, strict=True):
            for number, run in enumerate(runs):
                yield role, number, run


def schedule(cells: Sequence[Cell], order: str) -> list[tuple[Configuration, list[list[Any]]]]:
    """Plan one repeat: the configurations in order, each with the lists that its run belongs to.

    "abba": plain B B plain for each configuration B; "mirror": plain B C ... C B plain, where all
    share the plain runs. Both cancel a linear drift of the machine. "weave": plain B C ..., all
    at once in short turns, which also cancels what comes and goes within seconds.
    """
    drafted = [(cell.configuration, [cell.runs]) for cell in cells]
    if order == "abba":
        plain = [(PLAIN, [cell.plain]) for cell in cells]
        pairs = zip(plain, drafted, strict=True)
        return [step for one, other in pairs for step in (one, other, other, one)]
    steps = [(PLAIN, [cell.plain for cell in cells]), *drafted]
    return steps if order == "weave" else steps + steps[::-1]


def num_steps(configurations: Sequence[Configuration], order: str) -> int:
    """Number of runs in one repeat."""
    return len(schedule([Cell(each) for each in configurations], order))


def take_turns(
    cells: Sequence[Cell],
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
    cells: Sequence[Cell],
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
