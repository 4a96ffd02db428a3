"""Runner: generations of configurations, one by one, woven together or in batches; clocks."""

import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse, generation_stream, wired_limit
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_eagle.batch.generate import batch_generate
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.base import Drafter
from mlx_eagle.generate import stream_generate

from .configurations import PLAIN, Configuration

WARM_UP_TOKENS = 16  # of batches and servers' loads, before anything is measured
TURN_TOKENS = 8  # per turn of a woven run: one round between two pauses cannot be timed


@dataclass(frozen=True)
class Models:
    """A target, its tokenizer, and the drafters by their names.

    ``compared`` is an ordinary draft model for mlx-lm's own method.
    """

    target: nn.Module
    tokenizer: TokenizerWrapper
    drafters: Mapping[str, Drafter]
    compared: nn.Module | None = None


@dataclass(frozen=True)
class Run:
    """One generation, or one call with several prompts: the tokens of every text; in seconds.

    ``num_timed`` tokens took ``seconds``: neither first tokens, which prefill yields, nor those
    that arrive with them are among them. ``call_seconds`` are those of a whole call.
    """

    texts: list[list[int]]
    num_timed: int
    seconds: float
    stats: Stats | None = None
    ttft: float = 0.0
    peak_bytes: int = 0
    call_seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def tps(self) -> float | None:
        """Tokens per second after the first; None if there is nothing to time."""
        return self.num_timed / self.seconds if self.num_timed and self.seconds > 0 else None

    @property
    def call_tps(self) -> float:
        """Tokens per second over the whole call."""
        return self.num_tokens / self.call_seconds


def responses(
    models: Models, configuration: Configuration, prompt: list[int], max_tokens: int,
    temp: float = 0.0, seed: int = 0,
) -> Iterator[GenerationResponse]:  # fmt: skip
    """Prepare the generation of one configuration; it starts with the first response."""
    options: dict[str, Any] = {"max_tokens": max_tokens, **configuration.options}
    generate = mlx_lm.stream_generate
    if temp > 0:
        options["sampler"] = Sampling(temp=temp, seed=seed)
    if configuration.kind == "mlx-lm-draft":
        options["draft_model"] = models.compared
        if temp > 0:  # mlx-lm hands all rows to the sampler at once, ours takes one row
            options["sampler"] = make_sampler(temp=temp)
    elif configuration is not PLAIN:
        drafter = models.drafters[configuration.drafter]
        is_copying = configuration.kind == "copies"
        options["draft_model"] = drafter.with_copies() if is_copying else drafter
        generate = stream_generate
    return generate(models.target, models.tokenizer, prompt, **options)


@dataclass
class TurnClock:
    """Tokens of several turns, and the seconds that they took; see ``Take``."""

    num_tokens: int = 0
    seconds: float = 0.0
    _was_plain: bool = False
    _left_over: float = 0.0  # of the turn before: from its last token until the device was done

    def add(self, start: float, times: Sequence[float], done: float, is_plain: bool) -> None:
        """Add a turn: its start, the arrival of each token, and when the device was done."""
        last = times[-1] if times else start
        if is_plain and self._was_plain:
            self.num_tokens += len(times) - 1
            self.seconds += last - times[0]
        else:
            self.num_tokens += len(times)
            self.seconds += self._left_over + last - start
        self._was_plain = is_plain
        self._left_over = done - last


class Take:
    """One generation under way, in turns of some tokens; its clock runs only during turns.

    A turn ends when the device has finished what the turn started, so that no turn pays for
    another. Plain decoding prepares a step while the one before is running, and would pay for
    that. So a plain turn after a plain turn is timed from its first token to its last, which are
    as many steps of an unbroken run. Plain steps of our own loop are timed alike.
    """

    def __init__(self, configuration: Configuration, responses: Iterator[GenerationResponse]):
        self.has_ended = False
        self._configuration = configuration
        self._responses = responses
        self._tokens: list[int] = []
        self._drafted: list[bool] = []
        self._num_plain = 0  # tokens so far that came from plain steps
        self._clock = TurnClock()
        self._ttft = 0.0
        self._own_bytes = 0  # in use beyond the bytes in use before this generation
        self._peak_bytes = 0
        self._stats: Stats | None = None

    def go_on(self, num_tokens: int | None = None) -> None:
        """Take a turn of ``num_tokens``, or of all tokens left; the device must be idle."""
        mx.reset_peak_memory()
        bytes_before = mx.get_active_memory()
        times = []
        start = time.perf_counter()
        for response in islice(self._responses, num_tokens):
            times.append(time.perf_counter())
            self._tokens.append(response.token)
            self._drafted.append(response.from_draft)
            self.has_ended = response.finish_reason is not None
            self._stats = getattr(response, "stats", None)
        if self.has_ended:
            next(self._responses, None)  # releases its caches
        mx.synchronize(generation_stream)
        done = time.perf_counter()
        num_plain = self._stats.num_plain_steps if self._stats is not None else 0
        if self._configuration.kind == "plain":
            num_plain = len(self._tokens)
        is_plain = num_plain - self._num_plain == len(times)
        self._num_plain = num_plain
        if len(times) == len(self._tokens):
            self._ttft = times[0] - start
            start = times[0]
            times = times[first_batch(self._drafted) :]
        self._clock.add(start, times, done, is_plain)
        peak = mx.get_peak_memory() - bytes_before + self._own_bytes
        self._peak_bytes = max(self._peak_bytes, peak)
        self._own_bytes += mx.get_active_memory() - bytes_before

    def result(self, bytes_before: int) -> Run:
        """The finished run; ``bytes_before`` were in use before the generation began."""
        clock = self._clock
        stats = copy(self._stats)
        if self._configuration.kind == "mlx-lm-draft":
            num_first = first_batch(self._drafted)
            stats = stats_of_flags(self._drafted[num_first:], self._configuration.size)
        if stats is not None:
            # The time in the statistics includes the turns of the other generations.
            stats.generation_time = clock.seconds / max(1, clock.num_tokens) * stats.num_emitted
        peak = bytes_before + self._peak_bytes
        return Run([self._tokens], clock.num_tokens, clock.seconds, stats, self._ttft, peak)


def run_once(
    models: Models, configuration: Configuration, prompt: list[int], *args: Any, **options: Any
) -> Run:
    """Run one generation without interruption; the arguments are those of ``responses``."""
    return run_woven(models, [configuration], prompt, None, *args, **options)[0]


def run_woven(
    models: Models,
    configurations: Sequence[Configuration],
    prompt: list[int],
    num_tokens: int | None = TURN_TOKENS,
    *args: Any,
    **options: Any,
) -> list[Run]:
    """Run all configurations at once, ``num_tokens`` each in turn, see ``in_turns``."""
    mx.synchronize(generation_stream)  # mlx-lm leaves a step in flight behind
    bytes_before = mx.get_active_memory()
    takes = [Take(c, responses(models, c, prompt, *args, **options)) for c in configurations]
    # Around all of them: otherwise the first one to end would reset the limit for the others.
    with wired_limit(models.target, [generation_stream]):
        for order in in_turns(takes, Random(str(prompt))):
            for take in order:
                if not take.has_ended:
                    take.go_on(num_tokens)
            if all(take.has_ended for take in takes):
                break
    return [take.result(bytes_before) for take in takes]


def in_turns(takes: Sequence[Take], random: Random) -> Iterator[Sequence[Take]]:
    """Orders without end, each drawn anew, in which no take follows itself.

    The turn before decides what is still in the processor's caches and in MLX's buffers. If the
    order merely alternated between forwards and backwards, the first and the last take would
    follow themselves, and would be faster.
    """
    last = None
    while True:
        order = random.sample(takes, len(takes))
        if order[0] is last:
            order.reverse()
        last = order[-1]
        yield order


def first_batch(drafted: Sequence[bool]) -> int:
    """Number of tokens that arrived at once with the first: up to the first one not drafted.

    It is 1, except for mlx-lm's own method, which drafts before it emits anything:
    [T, T, F, T] -> 3
    """
    return next((i + 1 for i, from_draft in enumerate(drafted) if not from_draft), len(drafted))


def stats_of_flags(drafted: Sequence[bool], size: int) -> Stats:
    """Counts of mlx-lm's own method from ``from_draft`` flags: a round ends with a False."""
    stats = Stats()
    num_kept = 0
    for number, from_draft in enumerate(drafted, 1):
        num_kept += from_draft
        if not from_draft or number == len(drafted):
            num_emitted = num_kept + (not from_draft)
            stats.record(size, size, num_kept, num_emitted, (stats.num_rounds + 1) * size)
            num_kept = 0
    return stats


def run_batch(
    models: Models, prompts: list[list[int]], max_tokens: int, configuration: Configuration
) -> Run:
    """Call mlx-lm's ``batch_generate`` greedily, or ours with the drafter."""
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
    num_first = 0  # mlx-lm's clock counts the pass of a first token as decoding
    stats = None
    counts = response.stats
    if configuration is not PLAIN:
        stats = sum(counts, Stats())
        # The last output to end knows of all that became of drafting.
        last = max(counts, key=lambda own: len(own.drafting_events))
        stats.drafting_events = last.drafting_events
        counts = response.batch_stats or stats
        num_first = 0 if response.batch_stats else sum(map(bool, texts))
    num_timed = sum(map(len, texts)) - num_first
    return Run(texts, num_timed, seconds - counts.prompt_time, stats, call_seconds=seconds)
