"""Timing rounds, of one request or of a batch: the loops that calibration runs."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import mlx.nn as nn

from ..system.progress import Progress, silent
from ..target.sharding import in_any_process, is_sharded
from .costs import PLAIN, DraftShape, RoundCosts, on_line, typical
from .pipeline import R, Runner


@dataclass(frozen=True)
class Amount:
    """How much is timed: so many plain steps and rounds of each shape, in each repeat."""

    plain_steps: int
    rounds: int
    repeats: int


class RoundFailed(RuntimeError):
    """A round of ``shape`` cannot be run on this device."""

    def __init__(self, shape: DraftShape):
        super().__init__(f"a round of {shape} drafts failed")
        self.shape = shape


def time_in_turn(
    runner: Runner[R],
    shapes: Sequence[DraftShape],
    later: Collection[DraftShape],
    amount: Amount,
    late: Callable[[], bool],
    progress: Progress = silent,
) -> RoundCosts:
    """Costs of plain steps and rounds of ``shapes``, in turn; those ``later`` come last.

    Nothing is begun once it is ``late`` but the first look, which is what is not ``later``.
    Raises RoundFailed for the first shape whose kernels raise an error; the runner is then of no
    more use.
    """
    plain: list[float] = []
    rounds: dict[DraftShape, list[float]] = {shape: [] for shape in shapes}
    first = [PLAIN, *(shape for shape in shapes if shape not in later)]
    groups = [*first, *later] * amount.repeats
    for i, shape in enumerate(groups):
        progress(i, len(groups))
        if shape == PLAIN:
            plain += time_plain(runner, amount.plain_steps)
        else:
            try:
                rounds[shape] += time_rounds(runner, shape, amount.rounds)
            except RuntimeError as err:
                raise RoundFailed(shape) from err
        if i + 1 >= len(first) and late():
            break
    progress(len(groups), len(groups))
    return typical_costs(plain, rounds)


def time_rounds(runner: Runner[R], shape: DraftShape, num_rounds: int) -> list[float]:
    """Seconds from the end of one such round to the end of the next; the first catches up."""
    ends = []
    for _ in range(num_rounds + 1):
        runner.finish(runner.launch(shape))
        ends.append(time.perf_counter())
    return [after - before for before, after in zip(ends, ends[1:])]


def time_plain(runner: Runner[R], num_steps: int) -> list[float]:
    """Seconds from read to read of pipelined plain steps, taps included."""
    done, reads = runner.launch(PLAIN), []
    for _ in range(num_steps + 1):
        runner.commit_plain(done)
        upcoming = runner.launch(PLAIN)
        runner.finish(done)
        reads.append(time.perf_counter())
        done = upcoming
    runner.finish(done)
    return [after - before for before, after in zip(reads, reads[1:])]


def late_after(limit: float, model: nn.Module) -> Callable[[], bool]:
    """Whether ``limit`` seconds have gone by, for all processes of a model at once."""
    start = time.perf_counter()

    def late() -> bool:
        is_late = time.perf_counter() - start > limit
        return in_any_process(is_late) if is_sharded(model) else is_late

    return late


def typical_costs(
    plain: Sequence[float], rounds: Mapping[DraftShape, Sequence[float]]
) -> RoundCosts:
    """The typical times, as ``LiveCosts`` takes them: the two are compared with each other.

    A chain that was not timed lies between those that were, or is left out.
    """
    known = {shape.size: typical(s) for shape, s in rounds.items() if s and shape.tree is None}
    between = range(min(known, default=0), max(known, default=0) + 1)
    return RoundCosts(
        typical(plain),
        {
            shape: typical(s) if s else on_line(known, shape.size)
            for shape, s in rounds.items()
            if s or shape.size in between
        },
    )
