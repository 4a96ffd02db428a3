"""Measuring: every configuration on every prompt, and on batches of prompts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

from mlx_eagle.drafters.tree import Tree

from . import conditions
from .configurations import PLAIN, Configuration, make_configurations
from .costs import Costs
from .figures import row_of
from .flags import Settings
from .parity import parities
from .part_timing import Bench, Timings, time_parts
from .questions import Question, by_set, prompt_tokens, typical_context
from .runner import WARM_UP_TOKENS, Models, run_batch, run_once, run_prompt
from .summary import BATCH, run_rows, scenario_summary
from .turns import Cell, num_steps, repeat_turns

LONGEST = 8  # rows of a verify pass that are always timed


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

    @property
    def batched(self) -> list[Configuration]:
        """Configurations for batches, which draft only chains."""
        chains = Settings(sizes=self.settings.sizes)
        return make_configurations(chains, self.models.drafters)

    def num_runs(self) -> int:
        """Number of measured generations, a batch being one, without warm-ups."""
        settings = self.settings
        prompts = len(settings.contexts) * len(settings.temps) * len(self.questions)
        batches = len(settings.batches) * len(by_set(self.questions))
        steps = prompts * num_steps(self.configurations, settings.order)
        steps += batches * num_steps(self.batched, settings.order)
        return settings.repeats * steps

    def run(self, progress: Callable[[], None]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Measure everything: results and conditions for the document, and a row per run.

        ``progress`` is called after every run.
        """
        scenarios = []
        rows = []
        for context, temp in product(self.settings.contexts, self.settings.temps):
            cells, drafters = self.run_scenario(context, temp, progress)
            name = {"context": context, "temp": temp}
            scenarios.append(name | scenario_summary(self.models, cells, *drafters))
            rows += run_rows(cells, name)
        batches = self.run_batches(progress)
        models = conditions.describe(self.models, self.names)
        return {"conditions": models, "scenarios": scenarios, "batches": batches}, rows

    def run_scenario(
        self, context: int | None, temp: float, progress: Callable[[], None]
    ) -> tuple[list[Cell], tuple[dict[str, Costs], int]]:
        """Run all repeats at one context and temperature; parts are timed before every prompt.

        Returns the cells, the costs of every drafter, and the tokens of context they are for.
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
        sizes = {"verify": verified, "accept": accepted, "propose": (1, len(accepted) - 1)}
        num_samples = math.ceil(settings.samples / (settings.repeats * len(rows)))
        timings: dict[str, Timings] = {name: {} for name in models.drafters}
        options = {"max_tokens": settings.max_tokens, "temp": temp, "seed": settings.seed}
        for configuration in (PLAIN, *configurations):  # ``auto`` learns the costs of the pair
            run_once(models, configuration, prompts[0], settings.max_tokens)
        for row in rows * settings.repeats:
            for name, drafter in models.drafters.items():
                # Its memory is free again before the runs, whose peak is measured.
                time_parts(
                    Bench(models.target, drafter, typical), timings[name], sizes, num_samples
                )
            run_prompt(models, row, settings.order, progress, **options)
        costs = {name: Costs.of(found) for name, found in timings.items()}
        return list(chain(*rows)), (costs, len(typical))

    def run_batches(self, progress: Callable[[], None]) -> list[dict[str, Any]]:
        """Run every batch size on every set: one result per configuration."""
        models = self.models
        most = self.settings.max_tokens
        results = []
        for size, group in product(self.settings.batches, by_set(self.questions).values()):
            asked = group[:size]
            prompts = [prompt_tokens(question, models.tokenizer) for question in asked]
            cells = [Cell(configuration, asked, prompts, size) for configuration in self.batched]
            warm_up = partial(run_batch, models, prompts, min(most, WARM_UP_TOKENS))
            run = partial(run_batch, models, prompts, most)
            repeat_turns(cells, self.settings, warm_up, run, progress)
            results += [row_of(BATCH, c, parity=parities(models.target, c)) for c in cells]
        return results


def timed_rows(configurations: Sequence[Configuration]) -> tuple[list[int], list[int]]:
    """Numbers of rows of the accept passes to time, at least 1 to 8, and of the verify passes.

    Trees need verify passes of their own: a tree of 16 nodes has 17 rows.
    """
    longest = max([LONGEST, *(c.size + 1 for c in configurations if c.size)])
    shapes = [c.options["tree"] for c in configurations if c.kind == "tree"]
    wide = {shape.nodes + 1 for shape in shapes if isinstance(shape, Tree)}
    rows = list(range(1, longest + 1))
    return rows, sorted(wide.union(rows))
