"""The benchmark from models to one document of results: what ``results.json`` holds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx_eagle.drafters.tree import Tree

from . import conditions, parity, predict, summary
from .batched import BatchRun, measure_batches, num_batch_runs
from .part_timing import SAMPLES, Bench, Samples
from .questions import Question, prompt_tokens, typical_context
from .runner import (
    Cell,
    Configuration,
    Models,
    Run,
    make_configurations,
    run_prompt,
    schedule,
    warm_up,
)

LONGEST = 8  # rows of a verify pass that are always calibrated


@dataclass(frozen=True)
class Settings:
    """The flags of a benchmark that shape what is run."""

    prompts: tuple[str, ...] = ("mt_bench", "humaneval", "gsm8k")
    limit: int = 10
    max_tokens: int = 128
    sizes: tuple[int | str, ...] = (3,)
    copied: tuple[int | str, ...] = ()
    temps: tuple[float, ...] = (0.0,)
    trees: tuple[str, ...] = ()
    contexts: tuple[int | None, ...] = (None,)
    repeats: int = 3
    order: str = "abba"
    seed: int = 0
    samples: int = SAMPLES
    batches: tuple[int, ...] = ()
    clients: tuple[int, ...] = ()


def configurations_of(settings: Settings, models: Models) -> list[Configuration]:
    """The speculative ones that are to run."""
    return make_configurations(
        settings.sizes, settings.trees, models.compared is not None, settings.copied
    )


def num_runs(
    settings: Settings, questions: Sequence[Question], configurations: Sequence[Configuration]
) -> int:
    """Measured generations in all, a batch being one, without warm-ups."""
    scenarios = len(settings.contexts) * len(settings.temps)
    singles = (
        scenarios
        * settings.repeats
        * len(questions)
        * len(schedule(configurations, settings.order))
    )
    return singles + num_batch_runs(settings, questions)


def measure(
    models: Models,
    names: dict[str, str],
    questions: Sequence[Question],
    settings: Settings,
    progress: Callable[[Run | BatchRun], None] = lambda run: None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run everything: the document of results, and a row per run for the CSV."""
    configurations = configurations_of(settings, models)
    machine = conditions.machine()  # before the run: it notes the load of the machine
    scenarios, rows = [], []
    for context in settings.contexts:
        for temp in settings.temps:
            cells, samples = run_scenario(
                models, questions, configurations, settings, context, temp, progress
            )
            name = {"context": context, "temp": temp}
            scenarios.append(summarize(models, cells, configurations, samples, settings, name))
            rows += summary.run_rows(cells, name)
    document = {
        "format": 1,
        "conditions": {**machine, **conditions.describe(models, names)},
        "settings": asdict(settings),
        "scenarios": scenarios,
        "batches": measure_batches(models, questions, settings, progress),
    }
    return document, rows


def run_scenario(
    models: Models,
    questions: Sequence[Question],
    configurations: Sequence[Configuration],
    settings: Settings,
    context: int | None,
    temp: float,
    progress: Callable[[Run], None],
) -> tuple[list[Cell], Samples]:
    """All repeats at one context length and temperature, a calibration before every prompt."""
    prompts = [prompt_tokens(question, models.tokenizer, context) for question in questions]
    rows = [
        [Cell(q, p, configuration) for configuration in configurations]
        for q, p in zip(questions, prompts, strict=True)
    ]
    typical = typical_context(prompts, settings.max_tokens)
    longest, wide = calibrated_rows(configurations)
    num_samples = math.ceil(settings.samples / (settings.repeats * len(rows)))
    samples = Samples()
    options = {"max_tokens": settings.max_tokens, "temp": temp, "seed": settings.seed}
    warm_up(models, configurations, prompts[0], settings.max_tokens)
    for _ in range(settings.repeats):
        for row in rows:
            # Not kept over the runs: their peak memory is theirs alone.
            bench = Bench(models.target, models.drafter, typical)
            samples.measure(bench, longest, wide, num_samples)
            del bench
            for run in run_prompt(models, row, settings.order, **options):
                progress(run)
    return [cell for row in rows for cell in row], samples


def calibrated_rows(configurations: Sequence[Configuration]) -> tuple[int, list[int]]:
    """Rows of the verify passes to time: 1 up to the first, and those of trees.

    At least 1 to 8; a tree of 16 nodes has 17 rows.
    """
    longest = max(
        [
            LONGEST,
            *(configuration.size + 1 for configuration in configurations if configuration.size),
        ]
    )
    shapes = [
        configuration.options["tree"]
        for configuration in configurations
        if configuration.kind == "tree"
    ]
    wide = {shape.nodes + 1 for shape in shapes if isinstance(shape, Tree)}
    return longest, sorted(n for n in wide if n > longest)


def summarize(
    models: Models,
    cells: Sequence[Cell],
    configurations: Sequence[Configuration],
    samples: Samples,
    settings: Settings,
    name: dict[str, Any],
) -> dict[str, Any]:
    """One scenario as plain data."""
    costs = predict.Costs.of(samples)
    prompts = list({cell.question: cell.prompt for cell in cells}.values())
    typical = typical_context(prompts, settings.max_tokens)
    results = [
        configuration_result(
            configuration, [c for c in cells if c.configuration == configuration], costs
        )
        for configuration in configurations
    ]
    outputs = [len(run.tokens) for cell in cells for run in cell.plain]
    return {
        **name,
        "prompt_tokens": summary.spread_of(map(len, prompts)),
        "output_tokens": summary.spread_of(outputs),
        "calibration": {"context": len(typical), **costs.to_dict()},
        "plain_step_measured": summary.median_seconds([r for c in cells for r in c.plain]),
        "configurations": results,
        "curve": model_curve(results, costs),
        "prompts": [prompt_result(models, cell) for cell in cells],
    }


def configuration_result(
    configuration: Configuration, cells: Sequence[Cell], costs: predict.Costs
) -> dict[str, Any]:
    """One configuration, overall and per set; with prediction and time split for a fixed k."""
    groups = {"overall": list(cells), **summary.by_set(cells)}
    figures = {}
    for name, group in groups.items():
        figures[name] = summary.configuration_summary(group)
        if configuration.kind == "chain" and configuration.size:
            figure = figures[name]
            figure["prediction"] = predict.predict(
                costs, figure["mean_acceptance_length"], configuration.size, figure["speedup"]
            )
            if figure["round_seconds"] is not None:
                split = predict.time_split(costs, configuration.size, figure["round_seconds"])
                figure["time_split"] = split
    return {
        "label": configuration.label,
        "kind": configuration.kind,
        "num_draft_tokens": configuration.size,
        "overall": figures.pop("overall"),
        "sets": figures,
    }


def model_curve(results: Sequence[dict[str, Any]], costs: predict.Costs) -> list[dict[str, float]]:
    """The prediction at every k, from the acceptance of the longest chain that was run."""
    chains = [r for r in results if r["kind"] == "chain" and r["num_draft_tokens"]]
    if not chains:
        return []
    longest = max(chains, key=lambda result: result["num_draft_tokens"])
    return predict.curve(costs, longest["overall"]["acceptance_by_position"])


def prompt_result(models: Models, cell: Cell) -> dict[str, Any]:
    """One configuration on one prompt, with its parity."""
    plain, drafted = cell.plain[0].tokens, cell.runs[0].tokens
    return {
        **summary.cell_summary(cell),
        "parity": parity.compare(models.target, cell.prompt, plain, drafted),
        "stats": cell.runs[0].stats.to_dict(),
    }
