"""Measuring: from models to one document of results, which ``results.json`` holds.

Batches are several prompts at once, mlx-lm's own against ours with the drafter, in turns: greedy,
prompts as they are. Their figures are all tokens of all outputs over the time of the whole call,
and over its time after prefill.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream

from mlx_eagle.batch.generate import batch_generate
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.base import Drafter
from mlx_eagle.drafters.tree import Tree
from mlx_eagle.system.device import weight_bytes

from . import conditions, summary
from .costs import Costs
from .parity import compare
from .part_timing import SAMPLES, Bench, Samples
from .questions import Question, prompt_tokens, typical_context
from .runner import (
    PLAIN,
    WARM_UP_TOKENS,
    Cell,
    Configuration,
    Models,
    Turns,
    make_configurations,
    repeat_turns,
    run_once,
    run_prompt,
    schedule,
)
from .summary import by_set

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


@dataclass(frozen=True)
class BatchRun:
    """One call: the tokens of every output, stop tokens left out; times in seconds.

    ``prefill``, part of ``seconds``, also yields the first ``num_first`` tokens.
    """

    tokens: list[list[int]]
    seconds: float
    prefill: float
    num_first: int
    stats: list[Stats]  # of every output; none of the plain batch

    @property
    def tps(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def tps_after_prefill(self) -> float:
        return (sum(map(len, self.tokens)) - self.num_first) / (self.seconds - self.prefill)


def check_batches(batches: Sequence[int], questions: Sequence[Question]) -> None:
    """Raise ValueError where a set has fewer prompts than a batch takes."""
    for name, group in by_set(questions).items():
        if batches and len(group) < max(batches):
            raise ValueError(
                f"--batch holds {max(batches)}, but {len(group)} prompts of {name} are taken: "
                "give a smaller batch, or a larger --limit where the set has more."
            )


def run_batch(
    models: Models, prompts: list[list[int]], max_tokens: int, configuration: Configuration
) -> BatchRun:
    """One call of mlx-lm's ``batch_generate``, or of ours with the drafter."""
    mx.synchronize(generation_stream)
    options = {"max_tokens": max_tokens, "return_token_ids": True, **configuration.options}
    if configuration is not PLAIN:
        drafter = models.drafters[configuration.drafter]
        options |= {"draft_model": drafter, "max_speculative_batch": len(prompts)}
    generate = mlx_lm.batch_generate if configuration is PLAIN else batch_generate
    start = time.perf_counter()
    response = generate(models.target, models.tokenizer, prompts, **options)
    seconds, tokens = time.perf_counter() - start, response.token_ids
    plain = response.stats if configuration is PLAIN else response.batch_stats
    stats = [] if configuration is PLAIN else response.stats
    if plain is not None:  # mlx-lm's clock leaves the pass of a first token to decoding
        return BatchRun(tokens, seconds, plain.prompt_time, 0, stats)
    prefill, num_first = sum(counts.prompt_time for counts in stats), sum(map(bool, tokens))
    return BatchRun(tokens, seconds, prefill, num_first, stats)


def batch_result(
    models: Models, set_name: str, prompts: list[list[int]], cell: Turns
) -> dict[str, Any]:
    """One configuration on one batch, with the parity of every output."""
    plain, ours = cell.plain[0].tokens, cell.runs[0].tokens
    merged = sum((counts for run in cell.runs for counts in run.stats), Stats())
    speeds = {}
    for name, ratio in (("tps", "speedup"), ("tps_after_prefill", "speedup_after_prefill")):
        before, after = (
            median(getattr(run, name) for run in runs) for runs in (cell.plain, cell.runs)
        )
        speeds |= {f"plain_{name}": before, name: after, ratio: after / before if before else None}
    last_to_end = max(cell.runs[0].stats, key=lambda counts: len(counts.drafting_events))
    return {
        "batch": len(prompts),
        "set": set_name,
        "configuration": cell.configuration.label,
        "output_tokens": sum(map(len, ours)),
        **speeds,
        "mean_acceptance_length": merged.mean_acceptance_length,
        "num_rounds": merged.num_rounds,
        "num_plain_steps": merged.num_plain_steps,
        "num_runs": len(cell.runs),
        "parity": [
            compare(models.target, prompt, one, other)
            for prompt, one, other in zip(prompts, plain, ours, strict=True)
        ],
        "drafting_events": [event.what for event in last_to_end.drafting_events],
    }


@dataclass(frozen=True)
class Measurement:
    """What is measured, on which questions, and how."""

    models: Models
    questions: Sequence[Question]
    settings: Settings

    @property
    def configurations(self) -> list[Configuration]:
        """The speculative ones; of several drafters, trees where one can draw them."""
        settings, drafters = self.settings, self.models.drafters
        compares = self.models.compared is not None
        found = make_configurations(
            settings.sizes, settings.trees, compares, settings.copied, tuple(drafters)
        )
        if len(drafters) == 1:
            return found
        return [c for c in found if c.kind != "tree" or drafters[c.drafter].supports_trees]

    @property
    def batched(self) -> list[Configuration]:
        """Those of batches, which draft chains only."""
        return make_configurations(self.settings.sizes, drafters=tuple(self.models.drafters))

    def num_runs(self) -> int:
        """Measured generations in all, a batch being one, without warm-ups."""
        settings, groups = self.settings, by_set(self.questions)
        singles = len(settings.contexts) * len(settings.temps) * len(self.questions)
        singles *= len(schedule(self.configurations, settings.order))
        batches = len(settings.batches) * len(groups) * len(schedule(self.batched, settings.order))
        return settings.repeats * (singles + batches)

    def run(
        self, names: dict[str, str], progress: Callable[[], None]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Run everything: the document of results, and a row per run for the CSV.

        ``names`` are those of the models, for the report; ``progress`` is called after every run.
        """
        machine = conditions.machine()  # before the run: it notes the load of the machine
        scenarios, rows = [], []
        for context, temp in product(self.settings.contexts, self.settings.temps):
            cells, samples = self.run_scenario(context, temp, progress)
            name = {"context": context, "temp": temp}
            scenarios.append(name | self.summarize(cells, samples))
            rows += summary.run_rows(cells, name)
        document = {
            "format": 1,
            "conditions": {**machine, **conditions.describe(self.models, names)},
            "settings": asdict(self.settings),
            "scenarios": scenarios,
            "batches": self.measure_batches(progress),
        }
        return document, rows

    def run_scenario(
        self, context: int | None, temp: float, progress: Callable[[], None]
    ) -> tuple[list[Cell], dict[str, Samples]]:
        """All repeats at one context and temperature; parts are timed before every prompt."""
        models, settings, configurations = self.models, self.settings, self.configurations
        prompts = [prompt_tokens(q, models.tokenizer, context) for q in self.questions]
        rows = [
            [Cell(question=q, prompt=p, configuration=each) for each in configurations]
            for q, p in zip(self.questions, prompts, strict=True)
        ]
        typical = typical_context(prompts, settings.max_tokens)
        accepted, verified = timed_rows(configurations)
        num_samples = math.ceil(settings.samples / (settings.repeats * len(rows)))
        samples = {name: Samples() for name in models.drafters}
        options = {"max_tokens": settings.max_tokens, "temp": temp, "seed": settings.seed}
        for configuration in (PLAIN, *configurations):  # ``auto`` gets to know the pair in it
            run_once(models, configuration, prompts[0], settings.max_tokens)
        for row in rows * settings.repeats:
            for name, drafter in models.drafters.items():
                # Not kept over the runs: their peak memory is their own.
                bench = Bench(models.target, drafter, typical)
                drafted = (1, len(accepted) - 1)
                samples[name].measure(bench, verified, accepted, drafted, num_samples)
                del bench
            for _ in run_prompt(models, row, settings.order, **options):
                progress()
        return [cell for row in rows for cell in row], samples

    def summarize(self, cells: Sequence[Cell], samples: Mapping[str, Samples]) -> dict[str, Any]:
        """One scenario as plain data."""
        costs = {name: Costs.of(timed) for name, timed in samples.items()}
        prompts = list({cell.question: cell.prompt for cell in cells}.values())
        typical = typical_context(prompts, self.settings.max_tokens)
        results = [
            configuration_result(
                configuration,
                [c for c in cells if c.configuration == configuration],
                costs.get(configuration.drafter),
            )
            for configuration in self.configurations
        ]
        outputs = [len(run.tokens) for cell in cells for run in cell.plain]
        checked = [
            {
                **summary.cell_summary(cell),
                "parity": compare(
                    self.models.target, cell.prompt, cell.plain[0].tokens, cell.runs[0].tokens
                ),
                "stats": cell.runs[0].stats.to_dict(),
            }
            for cell in cells
        ]
        return {
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
            "side_by_side": side_by_side(self.models, results, checked),
            "prompts": checked,
        }

    def measure_batches(self, progress: Callable[[], None]) -> list[dict[str, Any]]:
        """A row of figures per batch size, set and configuration."""
        models, settings = self.models, self.settings
        short = min(settings.max_tokens, WARM_UP_TOKENS)
        rows = []
        for batch_size, (name, group) in product(settings.batches, by_set(self.questions).items()):
            prompts = [prompt_tokens(q, models.tokenizer) for q in group[:batch_size]]
            cells = [Turns(configuration=configuration) for configuration in self.batched]
            warm_up = partial(run_batch, models, prompts, short)
            measured = partial(run_batch, models, prompts, settings.max_tokens)
            for _ in repeat_turns(cells, settings, warm_up, measured):
                progress()
            rows += [batch_result(models, name, prompts, cell) for cell in cells]
        return rows


def timed_rows(configurations: Sequence[Configuration]) -> tuple[list[int], list[int]]:
    """Rows of the accept passes to time, at least 1 to 8, and of the verify passes.

    The latter have those of trees as well: a tree of 16 nodes has 17 rows.
    """
    longest = max([LONGEST, *(c.size + 1 for c in configurations if c.size)])
    shapes = [c.options["tree"] for c in configurations if c.kind == "tree"]
    wide = {shape.nodes + 1 for shape in shapes if isinstance(shape, Tree)}
    rows = list(range(1, longest + 1))
    return rows, sorted(wide.union(rows))


def configuration_result(
    configuration: Configuration, cells: Sequence[Cell], costs: Costs | None
) -> dict[str, Any]:
    """One configuration, overall and per set; with prediction and time split for a fixed k."""
    groups = {"overall": list(cells), **summary.by_set(cells)}
    figures = {}
    for name, group in groups.items():
        figure = figures[name] = summary.configuration_summary(group)
        if costs is not None and configuration.kind == "chain" and configuration.size:
            figure["prediction"] = costs.predict(
                figure["mean_acceptance_length"], configuration.size, figure["speedup"]
            )
            if figure["round_seconds"] is not None:
                split = costs.time_split(configuration.size, figure["round_seconds"])
                figure["time_split"] = split
    return {
        "label": configuration.label,
        "drafter": configuration.drafter,
        "kind": configuration.kind,
        "num_draft_tokens": configuration.size,
        "overall": figures.pop("overall"),
        "sets": figures,
    }


def model_curve(results: Sequence[dict[str, Any]], costs: Costs) -> list[dict[str, float]]:
    """The prediction at every k, from the acceptance of the longest chain that was run."""
    chains = [r for r in results if r["kind"] == "chain" and r["num_draft_tokens"]]
    if not chains:
        return []
    longest = max(chains, key=lambda result: result["num_draft_tokens"])
    return costs.curve(longest["overall"]["acceptance_by_position"])


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
    shown = ("tps", "plain_tps", "speedup", "mean_acceptance_length")
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
                **{key: overall[key] for key in shown},
                "speedup_of_worst_prompt": overall["speedup_by_prompt"]["min"],
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
