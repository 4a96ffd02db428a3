"""Runner: one generation of a configuration, its clock, and the order of taking turns."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse, generation_stream, wired_limit
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.base import Drafter
from mlx_eagle.drafters.tree import parse_tree
from mlx_eagle.generate import stream_generate

from .questions import Question

WARM_UP_TOKENS = 16  # of a batch and of loads of servers, before what is measured
ORDERS = ("abba", "mirror", "weave")
TURN_TOKENS = 8  # of each in turn where they are woven: rounds around a pause cannot be timed


@dataclass(frozen=True)
class Models:
    """What is measured: a target with drafters by their names.

    ``compared`` is an ordinary draft model for mlx-lm's own method.
    """

    target: nn.Module
    tokenizer: TokenizerWrapper
    drafters: Mapping[str, Drafter]
    compared: nn.Module | None = None


@dataclass(frozen=True)
class Configuration:
    """A way to decode. ``kind``: "plain", "chain", "auto", "copies", "tree" or "mlx-lm-draft".

    ``size`` is the draft length where it is fixed; ``options`` go to ``stream_generate``;
    ``drafter`` names one of ``Models.drafters``.
    """

    label: str
    kind: str
    size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    drafter: str = ""


PLAIN = Configuration("plain", "plain")


def make_configurations(
    sizes: Sequence[int | str],
    trees: Sequence[str] = (),
    compares: bool = False,
    copied: Sequence[int | str] = (),
    drafters: Sequence[str] = ("",),
) -> list[Configuration]:
    """The speculative ones of the flags: chains, trees, then mlx-lm's method at every fixed k.

    At lengths of ``copied``, too, with copies from the text. Each of several ``drafters`` has all
    of them, with its name in front.
    """
    configurations = [of_length(size) for size in sizes]
    for size in copied:
        chain = of_length(size)
        configurations.append(replace(chain, label=f"{chain.label} + lookup", kind="copies"))
    for tree in trees:
        shape = tree if tree == "auto" else parse_tree(tree)
        configurations.append(Configuration(f"tree {tree}", "tree", None, {"tree": shape}))
    configurations = [
        replace(c, drafter=name, label=f"{name}, {c.label}" if len(drafters) > 1 else c.label)
        for name in drafters
        for c in configurations
    ]
    if compares:
        fixed = [size for size in sizes if size != "auto" and size > 0] or [2]
        configurations += [
            Configuration(f"mlx-lm draft k={k}", "mlx-lm-draft", k, {"num_draft_tokens": k})
            for k in fixed
        ]
    return configurations


def of_length(size: int | str) -> Configuration:
    """Chains of a length, or of those that "auto" picks."""
    options = {"num_draft_tokens": size}
    if isinstance(size, str):
        return Configuration("auto", "auto", None, options)
    return Configuration(f"k={size}", "chain", size, options)


@dataclass(frozen=True)
class Run:
    """One generation. Times are in seconds.

    ``num_timed`` tokens came in ``seconds``, from the first token to the last one: the first
    is prefill's and not among them, nor is what arrived with it.
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


@dataclass(kw_only=True)
class Turns:
    """The runs of one configuration, and the plain ones between them."""

    configuration: Configuration
    plain: list[Any] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)


@dataclass(kw_only=True)
class Cell(Turns):
    """Those on one prompt, each a ``Run``."""

    question: Question
    prompt: list[int]

    @property
    def set_name(self) -> str:
        return self.question.set_name


def responses(
    models: Models,
    configuration: Configuration,
    prompt: list[int],
    max_tokens: int,
    temp: float = 0.0,
    seed: int = 0,
) -> Iterator[GenerationResponse]:
    """The generation of one configuration, not started yet."""
    options: dict[str, Any] = {"max_tokens": max_tokens, **configuration.options}
    if configuration.kind == "mlx-lm-draft":
        if temp > 0:  # this loop hands all rows to the sampler at once, ours wants them singly
            options["sampler"] = make_sampler(temp=temp)
        options["draft_model"] = models.compared
        return mlx_lm.stream_generate(models.target, models.tokenizer, prompt, **options)
    if temp > 0:
        options["sampler"] = Sampling(temp=temp, seed=seed)
    if configuration.kind == "plain":
        return mlx_lm.stream_generate(models.target, models.tokenizer, prompt, **options)
    drafter = models.drafters[configuration.drafter]
    options["draft_model"] = drafter.with_copies() if configuration.kind == "copies" else drafter
    return stream_generate(models.target, models.tokenizer, prompt, **options)


@dataclass
class TurnClock:
    """The tokens of some turns and the seconds that they took; see ``Take``."""

    num_tokens: int = 0
    seconds: float = 0.0
    _was_plain: bool = False
    _left_over: float = 0.0  # of the turn before: from its last token until the device was done

    def add(self, start: float, times: Sequence[float], done: float, is_plain: bool) -> None:
        """A turn: its start, when each token came, and when the device was done."""
        last = times[-1] if times else start
        if is_plain and self._was_plain:
            self.num_tokens += len(times) - 1
            self.seconds += last - times[0]
        else:
            self.num_tokens += len(times)
            self.seconds += self._left_over + last - start
        self._was_plain, self._left_over = is_plain, done - last


class Take:
    """One generation under way, in turns of some tokens; its clock runs in turns only.

    A turn ends when what it started on the device is done, so that none pays for another.
    Plain decoding, which prepares a step while the one before runs, would pay for that: where
    a turn of it follows another, it is timed from its first token to its last one, which are
    as many steps in an unbroken run. What our loop decodes plainly is timed alike.
    """

    def __init__(self, configuration: Configuration, responses: Iterator[GenerationResponse]):
        self.has_ended = False
        self._configuration = configuration
        self._responses = responses
        self._tokens: list[int] = []
        self._drafted: list[bool] = []
        self._clock = TurnClock()
        self._ttft = 0.0
        self._own_bytes = self._peak_bytes = 0  # beyond what was there before it began
        self._stats: Stats | None = None

    def go_on(self, num_tokens: int | None = None) -> None:
        """A turn of so many tokens, or of all that are left; nothing may be in flight."""
        mx.reset_peak_memory()
        bytes_before, num_plain = mx.get_active_memory(), self._num_plain()
        start, times = time.perf_counter(), []
        for response in islice(self._responses, num_tokens):
            times.append(time.perf_counter())
            self._tokens.append(response.token)
            self._drafted.append(response.from_draft)
            self.has_ended = response.finish_reason is not None
            self._stats = getattr(response, "stats", None)
        if self.has_ended:
            next(self._responses, None)  # lets go of its caches
        mx.synchronize(generation_stream)
        done = time.perf_counter()
        is_plain = self._num_plain() - num_plain == len(times)
        if len(times) == len(self._tokens):
            self._ttft = times[0] - start
            start, times = times[0], times[first_batch(self._drafted) :]
        self._clock.add(start, times, done, is_plain)
        peak = mx.get_peak_memory() - bytes_before + self._own_bytes
        self._peak_bytes = max(self._peak_bytes, peak)
        self._own_bytes += mx.get_active_memory() - bytes_before

    def _num_plain(self) -> int:
        """How many tokens so far came from plain steps."""
        if self._configuration.kind == "plain":
            return len(self._tokens)
        return 0 if self._stats is None else self._stats.num_plain_steps

    def result(self, bytes_before: int) -> Run:
        """The whole of it, where so many bytes were in use before it began."""
        stats, seconds, num_timed = copy(self._stats), self._clock.seconds, self._clock.num_tokens
        if self._configuration.kind == "mlx-lm-draft":
            num_first = first_batch(self._drafted)
            stats = stats_of_flags(self._drafted[num_first:], self._configuration.size)
        if stats is not None:
            # Its own has the others' turns in it.
            stats.generation_time = seconds / max(1, num_timed) * stats.num_emitted
        peak = bytes_before + self._peak_bytes
        return Run(self._tokens, num_timed, seconds, self._ttft, peak, stats)


def run_once(
    models: Models, configuration: Configuration, prompt: list[int], *args: Any, **options: Any
) -> Run:
    """One generation without interruption; the arguments are those of ``responses``."""
    return run_woven(models, [configuration], prompt, None, *args, **options)[0]


def run_woven(
    models: Models,
    configurations: Sequence[Configuration],
    prompt: list[int],
    num_tokens: int | None = TURN_TOKENS,
    *args: Any,
    **options: Any,
) -> list[Run]:
    """A generation of every configuration, ``num_tokens`` each in turn, see ``in_turns``."""
    mx.synchronize(generation_stream)  # mlx-lm leaves a step in flight behind
    bytes_before = mx.get_active_memory()
    takes = [Take(c, responses(models, c, prompt, *args, **options)) for c in configurations]
    # Around all of them: else the first one to end sets the limit back for the others.
    with wired_limit(models.target, [generation_stream]):
        for order in in_turns(takes, Random(str(prompt))):
            for take in order:
                if not take.has_ended:
                    take.go_on(num_tokens)
            if all(take.has_ended for take in takes):
                break
    return [take.result(bytes_before) for take in takes]


def in_turns(takes: Sequence[Take], random: Random) -> Iterator[Sequence[Take]]:
    """Orders without end, drawn anew each time, in which none follows itself.

    What comes before a turn leaves caches and buffers as it needs them: forwards and backwards,
    the first and the last would follow themselves, and be faster for it.
    """
    last = None
    while True:
        order = random.sample(takes, len(takes))
        if order[0] is last:
            order.reverse()
        last = order[-1]
        yield order


def first_batch(drafted: Sequence[bool]) -> int:
    """How many tokens arrived with the first: up to the first that was not drafted.

    One, but for mlx-lm's own method, which drafts before it has emitted anything:
    [T, T, F, T] -> 3
    """
    return next((i + 1 for i, from_draft in enumerate(drafted) if not from_draft), len(drafted))


def stats_of_flags(drafted: Sequence[bool], size: int) -> Stats:
    """Counts of mlx-lm's own method from ``from_draft`` flags: a round ends with a False."""
    stats, num_kept = Stats(), 0
    for i, from_draft in enumerate(drafted):
        num_kept += from_draft
        if not from_draft or i + 1 == len(drafted):
            num_emitted = num_kept + (not from_draft)
            stats.record(size, size, num_kept, num_emitted, (stats.num_rounds + 1) * size)
            num_kept = 0
    return stats


def schedule(
    configurations: Sequence[Configuration], order: str
) -> list[tuple[Configuration, list[Configuration]]]:
    """The runs of one prompt in their order, each with the configurations it counts for.

    "abba": plain B B plain for each configuration B; "mirror": plain B C ... C B plain, where all
    share the plain runs. Both cancel a linear drift of the machine. "weave": plain B C ..., all
    at once in short turns, which also cancels what comes and goes within seconds.
    """
    if order == "abba":
        return [
            step
            for b in configurations
            for step in ((PLAIN, [b]), (b, [b]), (b, [b]), (PLAIN, [b]))
        ]
    once = [(PLAIN, list(configurations)), *((b, [b]) for b in configurations)]
    return once if order == "weave" else once + once[::-1]


def take_turns(
    cells: Sequence[Turns], order: str, run_all: Callable[[list[Configuration]], Iterable[Any]]
) -> Iterator[Any]:
    """One repeat: runs land in the cells that they count for, and are yielded.

    ``cells`` are those of all configurations; ``run_all`` runs configurations as they are listed.
    """
    by_label = {cell.configuration.label: cell for cell in cells}
    steps = schedule([cell.configuration for cell in cells], order)
    runs = run_all([configuration for configuration, _ in steps])
    for (configuration, owners), run in zip(steps, runs, strict=True):
        for owner in owners:
            cell = by_label[owner.label]
            (cell.plain if configuration is PLAIN else cell.runs).append(run)
        yield run


def repeat_turns(
    cells: Sequence[Turns],
    settings: Any,
    warm_up: Callable[[Configuration], object],
    run: Callable[[Configuration], Any],
) -> Iterator[Any]:
    """A warm-up of each, then all repeats, as ``settings`` (``Settings``) say."""
    for configuration in (PLAIN, *(cell.configuration for cell in cells)):
        warm_up(configuration)
    for _ in range(settings.repeats):
        yield from take_turns(cells, settings.order, partial(map, run))


def run_prompt(models: Models, cells: Sequence[Cell], order: str, **options: Any) -> Iterator[Run]:
    """One repeat of one prompt, in its cells; ``options`` are those of ``responses``."""
    prompt = cells[0].prompt

    def run_all(configurations: list[Configuration]) -> Iterable[Run]:
        if order == "weave":
            return run_woven(models, configurations, prompt, **options)
        return (run_once(models, each, prompt, **options) for each in configurations)

    return take_turns(cells, order, run_all)
