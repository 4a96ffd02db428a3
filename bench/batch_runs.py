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
from .flags import Settings
from .parity import compare
from .questions import Question, by_set, prompt_tokens
from .runner import WARM_UP_TOKENS, Models
from .summary import ratio
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


def batch_result(
    models: Models, set_name: str, prompts: list[list[int]], cell: Turns
) -> dict[str, Any]:
    """One configuration on one batch, with the parity of every output."""
    speeds = {}
    for suffix in ("", "_after_prefill"):
        plain = median(getattr(run, f"tps{suffix}") for run in cell.plain)
        drafted = median(getattr(run, f"tps{suffix}") for run in cell.runs)
        speeds[f"plain_tps{suffix}"] = plain
        speeds[f"tps{suffix}"] = drafted
        speeds[f"speedup{suffix}"] = ratio(drafted, plain)
    first = cell.runs[0]
    texts = zip(prompts, cell.plain[0].tokens, first.tokens, strict=True)
    merged = sum((counts for run in cell.runs for counts in run.stats), Stats())
    last_to_end = max(first.stats, key=lambda counts: len(counts.drafting_events))
    return {
        "batch": len(prompts),
        "set": set_name,
        "configuration": cell.configuration.label,
        "output_tokens": sum(map(len, first.tokens)),
        **speeds,
        "mean_acceptance_length": merged.mean_acceptance_length,
        "num_rounds": merged.num_rounds,
        "num_plain_steps": merged.num_plain_steps,
        "num_runs": len(cell.runs),
        "parity": [compare(models.target, prompt, one, other) for prompt, one, other in texts],
        "drafting_events": [event.what for event in last_to_end.drafting_events],
    }


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
        results += [batch_result(models, name, prompts, cell) for cell in cells]
    return results
