"""Measuring: from models to one document of results, which ``results.json`` holds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx.utils import tree_flatten

from mlx_eagle.drafters.base import Drafter
from mlx_eagle.drafters.tree import Tree
from mlx_eagle.system.device import weight_bytes

from . import conditions, parity, summary
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

LONGEST = 8  # rows of a verify pass that are always timed


@dataclass(frozen=True)
class Settings:
    """The flags of a benchmark that shape its runs."""

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
    """The speculative ones that are to run; of several drafters, trees where one can draw them."""
    found = make_configurations(
        settings.sizes,
        settings.trees,
        models.compared is not None,
        settings.copied,
        tuple(models.drafters),
    )
    if len(models.drafters) == 1:
        return found
    return [c for c in found if c.kind != "tree" or models.drafters[c.drafter].supports_trees]


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
    drafters = {c.drafter for c in configurations if c.kind != "mlx-lm-draft"}
    return singles + num_batch_runs(settings, questions, drafters)


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
) -> tuple[list[Cell], dict[str, Samples]]:
    """All repeats at one context length and temperature; parts are timed before every prompt."""
    prompts = [prompt_tokens(question, models.tokenizer, context) for question in questions]
    rows = [
        [Cell(q, p, configuration) for configuration in configurations]
        for q, p in zip(questions, prompts, strict=True)
    ]
    typical = typical_context(prompts, settings.max_tokens)
    longest, wide = timed_rows(configurations)
    num_samples = math.ceil(settings.samples / (settings.repeats * len(rows)))
    samples = {name: Samples() for name in models.drafters}
    options = {"max_tokens": settings.max_tokens, "temp": temp, "seed": settings.seed}
    warm_up(models, configurations, prompts[0], settings.max_tokens)
    for _ in range(settings.repeats):
        for row in rows:
            for name, drafter in models.drafters.items():
                # Not kept over the runs: their peak memory is their own.
                bench = Bench(models.target, drafter, typical)
                samples[name].measure(bench, longest, wide, num_samples)
                del bench
            for run in run_prompt(models, row, settings.order, **options):
                progress(run)
    return [cell for row in rows for cell in row], samples


def timed_rows(configurations: Sequence[Configuration]) -> tuple[int, list[int]]:
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
    samples: Mapping[str, Samples],
    settings: Settings,
    name: dict[str, Any],
) -> dict[str, Any]:
    """One scenario as plain data."""
    costs = {name: summary.Costs.of(timed) for name, timed in samples.items()}
    prompts = list({cell.question: cell.prompt for cell in cells}.values())
    typical = typical_context(prompts, settings.max_tokens)
    results = [
        configuration_result(
            configuration,
            [c for c in cells if c.configuration == configuration],
            costs.get(configuration.drafter),
        )
        for configuration in configurations
    ]
    outputs = [len(run.tokens) for cell in cells for run in cell.plain]
    checked = [prompt_result(models, cell) for cell in cells]
    return {
        **name,
        "prompt_tokens": summary.spread_of(map(len, prompts)),
        "output_tokens": summary.spread_of(outputs),
        "plain_step_measured": summary.median_seconds([r for c in cells for r in c.plain]),
        "configurations": results,
        "drafters": [
            {
                "name": name,
                "costs": {"context": len(typical), **found.to_dict()},
                "curve": model_curve([r for r in results if r["drafter"] == name], found),
            }
            for name, found in costs.items()
        ],
        "side_by_side": side_by_side(models, results, checked),
        "prompts": checked,
    }


def configuration_result(
    configuration: Configuration, cells: Sequence[Cell], costs: summary.Costs | None
) -> dict[str, Any]:
    """One configuration, overall and per set; with prediction and time split for a fixed k."""
    groups = {"overall": list(cells), **summary.by_set(cells)}
    figures = {}
    for name, group in groups.items():
        figures[name] = summary.configuration_summary(group)
        if costs is not None and configuration.kind == "chain" and configuration.size:
            figure = figures[name]
            figure["prediction"] = summary.predict(
                costs, figure["mean_acceptance_length"], configuration.size, figure["speedup"]
            )
            if figure["round_seconds"] is not None:
                split = summary.time_split(costs, configuration.size, figure["round_seconds"])
                figure["time_split"] = split
    return {
        "label": configuration.label,
        "drafter": configuration.drafter,
        "kind": configuration.kind,
        "num_draft_tokens": configuration.size,
        "overall": figures.pop("overall"),
        "sets": figures,
    }


def model_curve(results: Sequence[dict[str, Any]], costs: summary.Costs) -> list[dict[str, float]]:
    """The prediction at every k, from the acceptance of the longest chain that was run."""
    chains = [r for r in results if r["kind"] == "chain" and r["num_draft_tokens"]]
    if not chains:
        return []
    longest = max(chains, key=lambda result: result["num_draft_tokens"])
    return summary.curve(costs, longest["overall"]["acceptance_by_position"])


def side_by_side(
    models: Models, results: Sequence[dict[str, Any]], checked: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Each of several drafters in its fastest configuration, the fastest drafter first.

    ``peak_bytes`` are without the weights of the others, which were loaded as well.
    """
    if len(models.drafters) < 2:
        return []
    weights = {name: weights_of(drafter) for name, drafter in models.drafters.items()}
    loaded = {key: size for own in weights.values() for key, size in own.items()}
    if models.compared is not None:
        loaded["compared"] = weight_bytes(models.compared)
    rows = []
    for name, own in weights.items():
        ways = [r for r in results if r["drafter"] == name and r["overall"]["speedup"]]
        if not ways:
            continue
        best = max(ways, key=lambda result: result["overall"]["speedup"])
        overall = best["overall"]
        others = sum(size for key, size in loaded.items() if key not in own)
        parities = [row["parity"] for row in checked if row["configuration"] == best["label"]]
        rows.append(
            {
                "drafter": name,
                "configuration": best["label"],
                "tps": overall["tps"],
                "plain_tps": overall["plain_tps"],
                "speedup": overall["speedup"],
                "speedup_of_worst_prompt": overall["speedup_by_prompt"]["min"],
                "mean_acceptance_length": overall["mean_acceptance_length"],
                "weight_bytes": sum(own.values()),
                "peak_bytes": overall["peak_bytes"] - others,
                "identical": sum(parity["identical"] for parity in parities),
                "num_prompts": len(parities),
            }
        )
    return sorted(rows, key=lambda row: -row["speedup"])


def weights_of(drafter: Drafter) -> dict[int | str, int]:
    """The bytes of each array of weights; drafters may share some."""
    arrays = (tree_flatten(module.parameters()) for module in drafter.modules())
    return {id(array): array.nbytes for found in arrays for _, array in found}


def prompt_result(models: Models, cell: Cell) -> dict[str, Any]:
    """One configuration on one prompt, with its parity."""
    plain, drafted = cell.plain[0].tokens, cell.runs[0].tokens
    return {
        **summary.cell_summary(cell),
        "parity": parity.compare(models.target, cell.prompt, plain, drafted),
        "stats": cell.runs[0].stats.to_dict(),
    }
