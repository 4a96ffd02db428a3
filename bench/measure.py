"""Measuring: every configuration on every prompt, and on batches of prompts."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.tree import Tree

from . import conditions
from .configurations import PLAIN, Cell, Cells, Configuration, make_configurations, run_turns
from .costs import Bench, Costs, Timings, costs_of, time_parts
from .flags import Settings
from .parity import compare_texts
from .questions import Question, by_set, prompt_tokens, typical_context
from .runner import WARM_UP_TOKENS, Models, Run, run_batch, run_once, run_woven
from .summary import batch_figures, run_rows, scenario_summary

LONGEST = 8  # rows of a verify pass that are always timed
Progress = Callable[[], None]


@dataclass(frozen=True)
class Measurement:
    """Models, questions and settings of a benchmark.

    ``names`` are those of the models, as the user gave them.
    """

    models: Models
    names: dict[str, str]
    questions: Sequence[Question]
    settings: Settings

    @property
    def configurations(self) -> list[Configuration]:
        """Configurations for single prompts; of several drafters, only some can draw trees."""
        drafters = self.models.drafters
        compares = self.models.compared is not None
        found = make_configurations(self.settings, drafters, compares)
        if len(drafters) == 1:
            return found
        return [c for c in found if "tree" not in c.options or drafters[c.drafter].supports_trees]

    def groups(self) -> list[list[Cell]]:
        """All cells: those of a prompt take turns, and those of a batch."""
        scenarios = len(self.settings.contexts) * len(self.settings.temps)
        prompts = [[Cell(each) for each in self.configurations]] * len(self.questions)
        return [*prompts * scenarios, *self.batches()]

    def batches(self) -> list[list[Cell]]:
        """Cells of every batch size and set; batches draft only chains."""
        chains = make_configurations(Settings(sizes=self.settings.sizes), self.models.drafters)
        found = []
        for size, group in product(self.settings.batches, by_set(self.questions).values()):
            prompts = [prompt_tokens(question, self.models.tokenizer) for question in group[:size]]
            found.append([Cell(each, group[:size], prompts, size) for each in chains])
        return found

    def run(self, progress: Progress) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Measure everything: results and conditions for the document, and a row per run.

        ``progress`` is called after every run.
        """
        scenarios = []
        runs = []
        for context, temp in product(self.settings.contexts, self.settings.temps):
            name = {"context": context, "temp": temp}
            rows, costs = self.run_scenario(context, temp, progress)
            scenarios.append(name | scenario_summary(self.models, rows, costs))
            runs += [name | run for row in rows for cell in row for run in run_rows(cell)]
        batches = self.run_batches(progress)
        models = conditions.describe(self.models, self.names)
        return {"conditions": models, "scenarios": scenarios, "batches": batches}, runs

    def run_scenario(
        self, context: int | None, temp: float, progress: Progress
    ) -> tuple[list[list[Cell]], dict[str, Costs]]:
        """Run all repeats at one context and temperature; parts are timed before every prompt.

        Returns the cells of every prompt, and the costs of every drafter.
        """
        models = self.models
        settings = self.settings
        configurations = self.configurations
        prompts = [prompt_tokens(q, models.tokenizer, context) for q in self.questions]
        rows = [
            [Cell(each, (question,), (prompt,)) for each in configurations]
            for question, prompt in zip(self.questions, prompts, strict=True)
        ]
        typical = typical_context(prompts, settings.max_tokens)
        accepted, verified = timed_rows(configurations)
        sizes = {"verify": verified, "propose": (1, len(accepted) - 1), "accept": accepted}
        num_samples = math.ceil(settings.samples / (settings.repeats * len(rows)))
        timings: dict[str, Timings] = {name: {} for name in models.drafters}
        options = {"max_tokens": settings.max_tokens, "temp": temp, "seed": settings.seed}
        for configuration in (PLAIN, *configurations):  # ``auto`` learns the costs of the pair
            run_once(models, configuration, prompts[0], settings.max_tokens)

        def run_all(row: Cells, steps: list[Configuration]) -> Iterable[Run]:
            for name, drafter in models.drafters.items():
                # Its memory is free again before the runs, whose peak is measured.
                bench = Bench(models.target, drafter, typical)
                time_parts(bench, timings[name], sizes, num_samples)
                del bench
            (prompt,) = row[0].prompts
            if settings.order == "weave":
                return run_woven(models, steps, prompt, **options)
            return (run_once(models, each, prompt, **options) for each in steps)

        run_turns(rows, settings, run_all, progress)
        sampling = Sampling(temp=temp, seed=settings.seed) if temp else None
        compare_texts(models.target, chain(*rows), sampling)
        timed = {"context": len(typical)}
        return rows, {name: timed | costs_of(found) for name, found in timings.items()}

    def run_batches(self, progress: Progress) -> list[dict[str, Any]]:
        """Run every batch size on every set: one result per configuration."""
        models = self.models
        most = self.settings.max_tokens

        def run_all(cells: Cells, steps: list[Configuration]) -> Iterator[Run]:
            return (run_batch(models, cells[0].prompts, most, each) for each in steps)

        groups = self.batches()
        for cells in groups:
            for each in (PLAIN, *(cell.configuration for cell in cells)):
                run_batch(models, cells[0].prompts, min(most, WARM_UP_TOKENS), each)
            run_turns([cells], self.settings, run_all, progress)
            compare_texts(models.target, cells)
        return [batch_figures(cell) for cell in chain(*groups)]


def timed_rows(configurations: Sequence[Configuration]) -> tuple[list[int], list[int]]:
    """Numbers of rows of the accept passes to time, at least 1 to 8, and of the verify passes.

    Trees need verify passes of their own: a tree of 16 nodes has 17 rows.
    """
    longest = max([LONGEST, *(c.size + 1 for c in configurations if c.size)])
    shapes = [c.options.get("tree") for c in configurations if c.kind == "tree"]
    wide = {shape.nodes + 1 for shape in shapes if isinstance(shape, Tree)}
    rows = list(range(1, longest + 1))
    return rows, sorted(wide.union(rows))
