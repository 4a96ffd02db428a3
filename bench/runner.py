"""Running the arms: one generation, its clock, and the order in which arms take turns.

Knows how to drive mlx-lm and our loop; draws no conclusions.
"""

import time
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse, generation_stream
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_eagle.drafter import Drafter
from mlx_eagle.generate import stream_generate
from mlx_eagle.sampling import Sampling
from mlx_eagle.stats import Stats
from mlx_eagle.tree import parse_tree

from .questions import Question

WARM_UPS = 2
WARM_UP_TOKENS = 16
ORDERS = ("abba", "mirror")


@dataclass(frozen=True)
class Models:
    """What is measured. ``compared`` is an ordinary draft model for mlx-lm's own method."""

    target: nn.Module
    tokenizer: TokenizerWrapper
    drafter: Drafter
    compared: nn.Module | None = None


@dataclass(frozen=True)
class Arm:
    """A way to decode. ``kind``: "plain", "chain", "auto", "tree" or "mlx-lm-draft".

    ``size`` is the draft length where it is fixed; ``options`` go to ``stream_generate``.
    """

    label: str
    kind: str
    size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


PLAIN = Arm("plain", "plain")


def make_arms(
    sizes: Sequence[int | str], trees: Sequence[str] = (), compares: bool = False
) -> list[Arm]:
    """The speculative arms of the flags: chains, trees, then mlx-lm's method at every fixed k."""
    arms = []
    for size in sizes:
        options = {"num_draft_tokens": size}
        if size == "auto":
            arms.append(Arm("auto", "auto", None, options))
        else:
            arms.append(Arm(f"k={size}", "chain", size, options))
    for tree in trees:
        shape = tree if tree == "auto" else parse_tree(tree)
        arms.append(Arm(f"tree {tree}", "tree", None, {"tree": shape}))
    if compares:
        fixed = [size for size in sizes if size != "auto" and size > 0] or [2]
        arms += [
            Arm(f"mlx-lm draft k={k}", "mlx-lm-draft", k, {"num_draft_tokens": k}) for k in fixed
        ]
    return arms


@dataclass(frozen=True)
class Run:
    """One generation. Times are in seconds.

    ``num_timed`` tokens came in ``seconds``, from the first token to the last one: the first
    is prefill's and not among them, nor is what arrived together with it.
    """

    tokens: list[int]
    num_timed: int
    seconds: float
    ttft: float
    peak_bytes: int
    stats: Stats | None = None

    @property
    def tps(self) -> float | None:
        """Tokens per second after the first; None where there is nothing to time."""
        return self.num_timed / self.seconds if self.num_timed and self.seconds > 0 else None


@dataclass
class Cell:
    """The runs of one arm on one prompt, and the plain ones between them."""

    question: Question
    prompt: list[int]
    arm: Arm
    plain: list[Run] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)


def responses(
    models: Models, arm: Arm, prompt: list[int], max_tokens: int, temp: float, seed: int
) -> Iterator[GenerationResponse]:
    """The generation of one arm, not started yet."""
    options: dict[str, Any] = {"max_tokens": max_tokens, **arm.options}
    if arm.kind == "mlx-lm-draft":
        if temp > 0:  # this loop hands all rows to the sampler at once, ours wants them singly
            options["sampler"] = make_sampler(temp=temp)
        options["draft_model"] = models.compared
        return mlx_lm.stream_generate(models.target, models.tokenizer, prompt, **options)
    if temp > 0:
        options["sampler"] = Sampling(temp=temp, seed=seed)
    if arm.kind == "plain":
        return mlx_lm.stream_generate(models.target, models.tokenizer, prompt, **options)
    options["draft_model"] = models.drafter
    return stream_generate(models.target, models.tokenizer, prompt, **options)


def run_once(
    models: Models, arm: Arm, prompt: list[int], max_tokens: int, temp: float = 0.0, seed: int = 0
) -> Run:
    """Generate once and take the time around the response iterator."""
    mx.synchronize(generation_stream)  # mlx-lm leaves a step in flight behind
    mx.reset_peak_memory()
    tokens, drafted, times = [], [], []
    start = time.perf_counter()
    for response in responses(models, arm, prompt, max_tokens, temp, seed):
        times.append(time.perf_counter())
        tokens.append(response.token)
        drafted.append(response.from_draft)
    peak = mx.get_peak_memory()
    num_first = first_batch(drafted)
    stats = None
    if arm.kind == "mlx-lm-draft":
        stats = stats_of_flags(drafted[num_first:], arm.size)
    elif arm.kind != "plain":
        stats = copy(response.stats)
    return Run(
        tokens, len(tokens) - num_first, times[-1] - times[0], times[0] - start, peak, stats
    )


def first_batch(drafted: Sequence[bool]) -> int:
    """How many tokens arrived with the first: up to the first that was not drafted.

    One, but for mlx-lm's own method, which drafts before it has emitted anything:
    [T, T, F, T] -> 3
    """
    for i, from_draft in enumerate(drafted):
        if not from_draft:
            return i + 1
    return len(drafted)


def stats_of_flags(drafted: Sequence[bool], size: int) -> Stats:
    """Counts of mlx-lm's own method from ``from_draft`` flags: a round ends with a False."""
    stats = Stats()
    num_kept = 0
    for i, from_draft in enumerate(drafted):
        num_kept += from_draft
        if from_draft and i + 1 < len(drafted):
            continue
        stats.num_rounds += 1
        stats.num_evals += 1
        stats.num_accepted += num_kept
        stats.accepted_histogram += [0] * (num_kept + 1 - len(stats.accepted_histogram))
        stats.accepted_histogram[num_kept] += 1
        num_kept = 0
    stats.num_emitted = len(drafted)
    stats.num_drafted = stats.num_head_forwards = size * stats.num_rounds
    stats.drafted_by_position = [stats.num_rounds] * (size if stats.num_rounds else 0)
    return stats


def schedule(arms: Sequence[Arm], order: str) -> list[tuple[Arm, list[Arm]]]:
    """The runs of one prompt in their order, each with the arms it counts for.

    "abba": plain B B plain for each arm B; "mirror": plain B C ... C B plain, where all arms
    share the plain runs. Both cancel a linear drift of the machine.
    """
    if order == "mirror":
        half = [(PLAIN, list(arms)), *((arm, [arm]) for arm in arms)]
        return half + half[::-1]
    return [step for b in arms for step in ((PLAIN, [b]), (b, [b]), (b, [b]), (PLAIN, [b]))]


def warm_up(models: Models, arms: Sequence[Arm], prompt: list[int], max_tokens: int) -> None:
    """Two short runs of every arm, not counted."""
    for _ in range(WARM_UPS):
        for arm in (PLAIN, *arms):
            run_once(models, arm, prompt, min(max_tokens, WARM_UP_TOKENS))


def run_prompt(
    models: Models,
    cells: Sequence[Cell],
    steps: Sequence[tuple[Arm, list[Arm]]],
    **options: Any,
) -> Iterator[Run]:
    """One repeat of one prompt: ``steps`` in turn; runs land in their cells and are yielded.

    ``cells`` are those of all arms on that prompt; ``options`` are those of ``run_once``.
    """
    by_arm = {cell.arm.label: cell for cell in cells}
    for arm, owners in steps:
        run = run_once(models, arm, cells[0].prompt, **options)
        for owner in owners:
            cell = by_arm[owner.label]
            (cell.plain if arm is PLAIN else cell.runs).append(run)
        yield run
