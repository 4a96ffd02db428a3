"""Configurations: plain decoding and the ways to draft, their runs, and the order of these."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_eagle.decoding.setup import AUTO
from mlx_eagle.drafters.tree import parse_tree

from .figures import median_of
from .flags import Settings
from .questions import Question


@dataclass(frozen=True)
class Configuration:
    """A way to decode.

    ``kind``: "plain", "chain", "auto", "copies", "tree", "exact" or "mlx-lm-draft".

    ``size`` is the draft length if it is fixed; ``options`` go to ``stream_generate``;
    ``drafter`` names one of ``Models.drafters``.
    """

    label: str
    kind: str
    size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    drafter: str = ""


PLAIN = Configuration("plain", "plain")


def make_configurations(
    settings: Settings, drafters: Iterable[str] = ("",), compares: bool = False
) -> list[Configuration]:
    """List the configurations: chains, chains with copies, trees, mlx-lm's method at fixed k.

    With ``settings.exact``, chains and trees that are computed row by row stand beside the
    others. Each of several ``drafters`` has all configurations, with its name in front;
    ``compares`` asks for mlx-lm's method.
    """
    found = [chain_of(size) for size in settings.sizes]
    for size in settings.copied:
        chain = chain_of(size)
        found.append(replace(chain, label=f"{chain.label} + lookup", kind="copies"))
    for tree in settings.trees:
        shape = tree if tree == AUTO else parse_tree(tree)
        found.append(Configuration(f"tree {tree}", "tree", None, {"tree": shape}))
    for each in [each for each in found if settings.exact and each.kind != "copies"]:
        options = {**each.options, "exact": True}
        found.append(replace(each, label=f"{each.label}, exact", kind="exact", options=options))
    names = list(drafters)
    found = [
        replace(each, drafter=name, label=f"{name}, {each.label}" if names[1:] else each.label)
        for name in names
        for each in found
    ]
    for k in [size for size in settings.sizes if size not in (AUTO, 0)] or [2]:
        options = {"num_draft_tokens": k}
        if compares:
            found.append(Configuration(f"mlx-lm draft k={k}", "mlx-lm-draft", k, options))
    return found


def chain_of(size: int | str) -> Configuration:
    """Chains of a fixed length, or of the lengths that "auto" picks."""
    options = {"num_draft_tokens": size}
    if isinstance(size, str):
        return Configuration(AUTO, AUTO, None, options)
    return Configuration(f"k={size}", "chain", size, options)


@dataclass
class Cell:
    """Runs of one configuration on some questions, and the plain runs between them.

    ``at_once`` questions are answered at the same time: one, a batch, or those of the clients.
    ``parity`` compares the texts of the first run of each kind.
    """

    configuration: Configuration
    questions: Sequence[Question] = ()
    prompts: Sequence[list[int]] = ()
    at_once: int = 1
    plain: list[Any] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)
    parity: list[dict[str, Any]] = field(default_factory=list)

    @property
    def set_name(self) -> str:
        return self.questions[0].set_name

    @property
    def speedup(self) -> float | None:
        """Speedup in the median pair of neighbouring runs, one plain and one not.

        Both runs of a pair meet the same moments of the machine; medians of each kind would
        compare different moments.
        """
        pairs = zip(self.plain, self.runs, strict=True)
        return median_of(run.tps / base.tps for base, run in pairs if base.tps and run.tps)

    @property
    def both(self) -> tuple[list[Any], list[Any]]:
        """The plain runs, and the configuration's."""
        return self.plain, self.runs

    def numbered(self) -> Iterator[tuple[str, int, Any]]:
        """All runs with their role ("plain" or "speculative") and their number in it."""
        for role, runs in zip(("plain", "speculative"), self.both, strict=True):
            for number, run in enumerate(runs):
                yield role, number, run


Cells = Sequence[Cell]


def schedule(cells: Cells, order: str) -> list[tuple[Configuration, list[list[Any]]]]:
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


def num_runs(groups: Iterable[Cells], settings: Settings) -> int:
    """Number of runs of all repeats, without warm-ups."""
    return settings.repeats * sum(len(schedule(cells, settings.order)) for cells in groups)


def run_turns(
    groups: Iterable[Cells],
    settings: Settings,
    run_all: Callable[[Cells, list[Configuration]], Iterable[Any]],
    progress: Callable[[], None],
) -> None:
    """Run all repeats of groups of cells, and call ``progress`` after each run.

    ``run_all`` runs a group's configurations, and returns their runs in the same order.
    """
    for cells in [*groups] * settings.repeats:
        steps = schedule(cells, settings.order)
        runs = run_all(cells, [configuration for configuration, _ in steps])
        for (_, lists), run in zip(steps, runs, strict=True):
            for each in lists:
                each.append(run)
            progress()
