"""Batches of the benchmark: several prompts in one greedy call, mlx-lm's own and ours in turns."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generation_stream

from mlx_eagle.batch.generate import batch_generate
from mlx_eagle.decoding.stats import Stats

from .configurations import PLAIN, Configuration
from .figures import Figure, number, ratio, row_of, times
from .flags import Settings
from .parity import count_identical, largest_margin, parities
from .questions import Question, by_set, prompt_tokens
from .runner import WARM_UP_TOKENS, Models
from .summary import counted
from .turns import Cell, repeat_turns


@dataclass(frozen=True)
class BatchRun:
    """One call: the tokens of every output without stop tokens; times in seconds.

    ``prefill`` is a part of ``seconds``, in which the first ``num_first`` tokens come too.
    ``events`` say what became of drafting.
    """

    texts: list[list[int]]
    seconds: float
    prefill: float
    num_first: int
    stats: Stats = field(default_factory=Stats)
    events: Sequence[str] = ()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def tps(self) -> float:
        """Tokens per second of all outputs over the whole call."""
        return self.num_tokens / self.seconds

    @property
    def tps_after_prefill(self) -> float:
        """Tokens per second of all outputs after prefill."""
        return (self.num_tokens - self.num_first) / (self.seconds - self.prefill)


def run_batch(
    models: Models, prompts: list[list[int]], max_tokens: int, configuration: Configuration
) -> BatchRun:
    """Call mlx-lm's ``batch_generate``, or ours with the drafter."""
    options = {"max_tokens": max_tokens, "return_token_ids": True, **configuration.options}
    generate = mlx_lm.batch_generate
    if configuration is not PLAIN:
        options["draft_model"] = models.drafters[configuration.drafter]
        options["max_speculative_batch"] = len(prompts)
        generate = batch_generate
    mx.synchronize(generation_stream)
    start = time.perf_counter()
    response = generate(models.target, models.tokenizer, prompts, **options)
    seconds = time.perf_counter() - start
    texts = response.token_ids
    if configuration is PLAIN:  # mlx-lm's clock counts the pass of a first token as decoding
        return BatchRun(texts, seconds, response.stats.prompt_time, 0)
    stats = response.stats
    # The last output to end knows of all that became of drafting.
    last = max(stats, key=lambda counts: len(counts.drafting_events))
    found = sum(stats, Stats()), [event.what for event in last.drafting_events]
    if response.batch_stats is not None:
        return BatchRun(texts, seconds, response.batch_stats.prompt_time, 0, *found)
    prefill = sum(counts.prompt_time for counts in stats)
    return BatchRun(texts, seconds, prefill, sum(map(bool, texts)), *found)


def speeds(name: str, plain: str, drafted: str, speedup: str) -> tuple[Figure, ...]:
    """Plain and drafted speed by one clock of ``BatchRun``, each the median run's; their ratio."""

    def speed(runs: Sequence[BatchRun]) -> float:
        return median(getattr(run, name) for run in runs)

    return (
        Figure(f"plain_{name}", plain, number, lambda cell: speed(cell.plain)),
        Figure(name, drafted, number, lambda cell: speed(cell.runs)),
        Figure(name.replace("tps", "speedup"), speedup, times,
               lambda cell: ratio(speed(cell.runs), speed(cell.plain))),
    )  # fmt: skip


BATCH = (
    Figure("batch", "prompts at once", of=lambda cell: cell.at_once),
    Figure("set", "set", of=lambda cell: cell.set_name),
    Figure("configuration", "configuration", of=lambda cell: cell.configuration.label),
    Figure("output_tokens", of=lambda cell: cell.runs[0].num_tokens),
    *speeds("tps_after_prefill", "plain batch tok/s", "speculative tok/s", "ratio"),
    *speeds("tps", "whole call: plain", "whole call: speculative", "whole call: ratio"),
    counted("mean_acceptance_length", "tau", number),
    counted("num_rounds"),
    counted("num_plain_steps"),
    Figure("num_runs", of=lambda cell: len(cell.runs)),
    Figure("parity", "outputs identical", count_identical),  # which needs the target
    Figure("parity", "largest margin where not", largest_margin),
    Figure("drafting_events", "drafting events", lambda events: ", ".join(events) or "-",
           lambda cell: cell.runs[0].events),
)  # fmt: skip
"""Figures of a configuration on a batch."""


def measure_batches(
    models: Models,
    configurations: Sequence[Configuration],
    questions: Sequence[Question],
    settings: Settings,
    progress: Callable[[], None],
) -> list[dict[str, Any]]:
    """Measure every batch size on every set: one result per configuration."""
    results = []
    for size, group in product(settings.batches, by_set(questions).values()):
        asked = group[:size]
        prompts = [prompt_tokens(question, models.tokenizer) for question in asked]
        cells = [Cell(configuration, asked, prompts, size) for configuration in configurations]
        warm_up = partial(run_batch, models, prompts, min(settings.max_tokens, WARM_UP_TOKENS))
        run = partial(run_batch, models, prompts, settings.max_tokens)
        repeat_turns(cells, settings, warm_up, run, progress)
        results += [row_of(BATCH, cell, parity=parities(models.target, cell)) for cell in cells]
    return results
