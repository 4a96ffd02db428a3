"""Batches: several prompts at once, mlx-lm's own against ours with the drafter, in turns.

Greedy, prompts as they are. The figures are all tokens of all outputs over the time of the whole
call, and over its time after prefill.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generation_stream

from mlx_eagle.batch.generate import batch_generate
from mlx_eagle.decoding.stats import Stats

from . import parity, summary
from .questions import Question, prompt_tokens
from .runner import PLAIN, WARM_UP_TOKENS, Configuration, Models, make_configurations, schedule


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


@dataclass
class BatchCell:
    """The runs of one configuration on one batch of prompts, and the plain ones between them."""

    set_name: str
    prompts: list[list[int]]
    configuration: Configuration
    plain: list[BatchRun] = field(default_factory=list)
    runs: list[BatchRun] = field(default_factory=list)


def check_batches(batches: Sequence[int], questions: Sequence[Question]) -> None:
    """Raise ValueError where a set has fewer prompts than a batch takes."""
    for name, group in _by_set(questions).items():
        if batches and len(group) < max(batches):
            raise ValueError(
                f"--batch holds {max(batches)}, but {len(group)} prompts of {name} are taken: "
                "give a smaller batch, or a larger --limit where the set has more."
            )


def num_batch_runs(
    settings: Any, questions: Sequence[Question], drafters: Collection[str] = ("",)
) -> int:
    """Measured calls in all."""
    configurations = make_configurations(settings.sizes, drafters=tuple(drafters))
    steps = schedule(configurations, settings.order)
    return len(settings.batches) * len(_by_set(questions)) * settings.repeats * len(steps)


def measure_batches(
    models: Models,
    questions: Sequence[Question],
    settings: Any,
    progress: Callable[[BatchRun], None],
) -> list[dict[str, Any]]:
    """A row of figures per batch size, set and configuration; ``settings`` are ``Settings``."""
    rows = []
    for batch_size in settings.batches:
        for name, group in _by_set(questions).items():
            prompts = [prompt_tokens(q, models.tokenizer) for q in group[:batch_size]]
            # A batch drafts chains only.
            cells = [
                BatchCell(name, prompts, configuration)
                for configuration in make_configurations(
                    settings.sizes, drafters=tuple(models.drafters)
                )
            ]
            for run in _run_all(models, cells, settings):
                progress(run)
            rows += [batch_result(models, cell) for cell in cells]
    return rows


def _run_all(models: Models, cells: list[BatchCell], settings: Any) -> Iterator[BatchRun]:
    """A warm-up of each, then all repeats in the order of the flags; runs land in their cells."""
    configurations, prompts = [cell.configuration for cell in cells], cells[0].prompts
    for configuration in (PLAIN, *configurations):
        run_batch(models, configuration, prompts, min(settings.max_tokens, WARM_UP_TOKENS))
    by_label = {cell.configuration.label: cell for cell in cells}
    for _ in range(settings.repeats):
        for configuration, owners in schedule(configurations, settings.order):
            run = run_batch(models, configuration, prompts, settings.max_tokens)
            for owner in owners:
                cell = by_label[owner.label]
                (cell.plain if configuration is PLAIN else cell.runs).append(run)
            yield run


def run_batch(
    models: Models, configuration: Configuration, prompts: list[list[int]], max_tokens: int
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


def batch_result(models: Models, cell: BatchCell) -> dict[str, Any]:
    """One configuration on one batch, with the parity of every output."""
    plain, ours = cell.plain[0].tokens, cell.runs[0].tokens
    merged = summary.merge_stats(counts for run in cell.runs for counts in run.stats)
    speeds = {}
    for name, ratio in (("tps", "speedup"), ("tps_after_prefill", "speedup_after_prefill")):
        before, after = (
            median(getattr(run, name) for run in runs) for runs in (cell.plain, cell.runs)
        )
        speeds |= {f"plain_{name}": before, name: after, ratio: after / before if before else None}
    last_to_end = max(cell.runs[0].stats, key=lambda counts: len(counts.drafting_events))
    events = [event.what for event in last_to_end.drafting_events]
    return {
        "batch": len(cell.prompts),
        "set": cell.set_name,
        "configuration": cell.configuration.label,
        "output_tokens": sum(map(len, ours)),
        **speeds,
        "mean_acceptance_length": merged.mean_acceptance_length,
        "num_rounds": merged.num_rounds,
        "num_plain_steps": merged.num_plain_steps,
        "num_runs": len(cell.runs),
        "parity": [
            parity.compare(models.target, prompt, one, other)
            for prompt, one, other in zip(cell.prompts, plain, ours, strict=True)
        ],
        "drafting_events": events,
    }


def _by_set(questions: Sequence[Question]) -> dict[str, list[Question]]:
    names = dict.fromkeys(question.set_name for question in questions)
    return {name: [q for q in questions if q.set_name == name] for name in names}
