"""Batches of the benchmark: several prompts in one greedy call, mlx-lm's own and ours in turns."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from .parity import compare, count_identical, largest_margin
from .questions import Question, by_set, prompt_tokens
from .runner import WARM_UP_TOKENS, Models
from .turns import Turns, repeat_turns


@dataclass(frozen=True)
class BatchRun:
    """One call: the tokens of every output without stop tokens; times in seconds.

    ``prefill`` is a part of ``seconds``, in which the first ``num_first`` tokens come too.
    ``stats`` has an entry per output, and none for the plain batch.
    """

    tokens: list[list[int]]
    seconds: float
    prefill: float
    num_first: int
    stats: list[Stats]

    @property
    def tps(self) -> float:
        """Tokens per second of all outputs over the whole call."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def tps_after_prefill(self) -> float:
        """Tokens per second of all outputs after prefill."""
        return (sum(map(len, self.tokens)) - self.num_first) / (self.seconds - self.prefill)


def run_batch(
    models: Models, prompts: list[list[int]], max_tokens: int, configuration: Configuration
) -> BatchRun:
    """Call mlx-lm's ``batch_generate``, or ours with the drafter."""
    is_plain = configuration is PLAIN
    options = {"max_tokens": max_tokens, "return_token_ids": True, **configuration.options}
    if not is_plain:
        options["draft_model"] = models.drafters[configuration.drafter]
        options["max_speculative_batch"] = len(prompts)
    generate = mlx_lm.batch_generate if is_plain else batch_generate
    mx.synchronize(generation_stream)
    start = time.perf_counter()
    response = generate(models.target, models.tokenizer, prompts, **options)
    seconds = time.perf_counter() - start
    tokens = response.token_ids
    stats = [] if is_plain else response.stats
    by_mlx_lm = response.stats if is_plain else response.batch_stats
    if by_mlx_lm is not None:  # its clock counts the pass of a first token as decoding
        return BatchRun(tokens, seconds, by_mlx_lm.prompt_time, 0, stats)
    prefill = sum(counts.prompt_time for counts in stats)
    return BatchRun(tokens, seconds, prefill, sum(map(bool, tokens)), stats)


class MeasuredBatch:
    """Runs of one configuration on one batch, and the parity of every output."""

    def __init__(self, models: Models, set_name: str, prompts: list[list[int]], cell: Turns):
        self.set_name = set_name
        self.cell = cell
        self.first: BatchRun = cell.runs[0]
        texts = zip(prompts, cell.plain[0].tokens, self.first.tokens, strict=True)
        self.parity = [compare(models.target, prompt, one, other) for prompt, one, other in texts]
        self.stats = sum((counts for run in cell.runs for counts in run.stats), Stats())
        # The last output to end knows of all that became of drafting.
        last = max(self.first.stats, key=lambda counts: len(counts.drafting_events))
        self.drafting_events = [event.what for event in last.drafting_events]

    def speed(self, name: str) -> list[float]:
        """The median speed by a clock of ``BatchRun``: plain, and drafted."""
        return [median(getattr(run, name) for run in runs) for runs in self.cell.both]


def speeds(name: str, plain: str, drafted: str, speedup: str) -> tuple[Figure, ...]:
    """The figures of one clock of ``BatchRun``: plain and drafted speed, and their ratio."""
    return (
        Figure(f"plain_{name}", plain, number, lambda b: b.speed(name)[0]),
        Figure(name, drafted, number, lambda b: b.speed(name)[1]),
        Figure(name.replace("tps", "speedup"), speedup, times,
               lambda b: ratio(*b.speed(name)[::-1])),
    )  # fmt: skip


BATCH = (
    Figure("batch", "prompts at once", of=lambda b: len(b.parity)),
    Figure("set", "set", of=lambda b: b.set_name),
    Figure("configuration", "configuration", of=lambda b: b.cell.configuration.label),
    Figure("output_tokens", of=lambda b: sum(map(len, b.first.tokens))),
    *speeds("tps_after_prefill", "plain batch tok/s", "speculative tok/s", "ratio"),
    *speeds("tps", "whole call: plain", "whole call: speculative", "whole call: ratio"),
    Figure("mean_acceptance_length", "tau", number, lambda b: b.stats.tau),
    Figure("num_rounds", of=lambda b: b.stats.num_rounds),
    Figure("num_plain_steps", of=lambda b: b.stats.num_plain_steps),
    Figure("num_runs", of=lambda b: len(b.cell.runs)),
    Figure("parity", "outputs identical", count_identical, lambda b: b.parity),
    Figure("parity", "largest margin where not", largest_margin),
    Figure("drafting_events", "drafting events", lambda events: ", ".join(events) or "-",
           lambda b: b.drafting_events),
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
    short = min(settings.max_tokens, WARM_UP_TOKENS)
    results = []
    for size, (name, group) in product(settings.batches, by_set(questions).items()):
        prompts = [prompt_tokens(question, models.tokenizer) for question in group[:size]]
        cells = [Turns(configuration=configuration) for configuration in configurations]
        warm_up = partial(run_batch, models, prompts, short)
        run = partial(run_batch, models, prompts, settings.max_tokens)
        repeat_turns(cells, settings, warm_up, run, progress)
        results += [row_of(BATCH, MeasuredBatch(models, name, prompts, cell)) for cell in cells]
    return results
