"""The rounds of a batch: one verify pass of the target for all texts, ragged in what is kept.

How many rows each text keeps is its own affair; how many are drafted is one decision a round.
Drafting goes text by text: a head's pass is short, its caches are one text's. Knows the steps of
a text by ``decoder.py``, the shared caches by ``batch_cache.py``.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..decoding.accept import LogitsProcessor, Sampler
from ..decoding.controller import BatchCosts, Controller, DraftShape
from ..decoding.decoder import Decoder, Round
from ..decoding.loop import (
    Limits,
    begin_drafter,
    open_decoder,
    speculative_generate_step,
    split_cache,
)
from ..decoding.stats import Stats
from ..drafters.base import Draft, Drafter, empty_draft
from ..target.rollback import CacheQuantization, Checkpoint
from ..target.taps import Target
from .cache import BatchCache


@dataclass(frozen=True)
class Options:
    """What holds for every text of a batch."""

    stream: mx.Stream | mx.ThreadLocalStream = generation_stream
    num_draft_tokens: int | str = 3
    sampler: Sampler | None = None
    logits_processors: list[LogitsProcessor] | None = None
    acceptance: str | None = None
    prefill_step_size: int = 2048


@dataclass
class Request:
    """One prompt and what became of it."""

    prompt: list[int]
    limits: Limits
    cache: list  # the target's, then the drafter's where there are any
    decoder: Decoder | None = None
    stats: Stats = field(default_factory=Stats)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None  # of the tokens, where they are asked for

    @property
    def ended(self) -> bool:
        full = 0 <= self.limits.max_tokens <= len(self.tokens)
        return full or bool(self.tokens) and self.limits.end(self.tokens[-1])

    def add(self, done: Round, num_kept: int, run: list[int]) -> None:
        """Count a round and take over what it emitted."""
        done.count(self.stats, num_kept, len(run))
        self.tokens += run
        if self.logprobs is not None:
            rows = mx.arange(len(run))
            self.logprobs += done.verification.logprobs[rows, mx.array(run)].tolist()


class RowCount:
    """A text's part in a shared window: how many of its rows stay."""

    def __init__(self, num_rows: int):
        self.kept = num_rows

    def rollback(self, num_rows: int) -> None:
        self.kept = num_rows


def prefill(model: nn.Module, draft_model: Drafter, request: Request, options: Options) -> None:
    """Run the prompt but its last token, alone."""
    request.stats.start()
    cache, draft_cache = split_cache(request.cache, model, None)
    request.decoder = open_decoder(
        model,
        begin_drafter(draft_model, draft_cache),
        cache,
        CacheQuantization(None, 64, 0),
        options.stream,
        sampler=options.sampler,
        logits_processors=options.logits_processors,
        acceptance=options.acceptance,
    )
    request.decoder.prefill(mx.array(request.prompt), options.prefill_step_size, lambda *_: None)


def generate_together(
    model: nn.Module,
    draft_model: Drafter,
    requests: list[Request],
    controller: Controller,
    costs: BatchCosts | None,
    options: Options,
    keep_caches: bool,
) -> None:
    """All texts to their ends, round by round in one pass.

    ``costs``, where ``pace`` goes by them, are looked up again for the texts that are left.
    """
    for request in requests:
        prefill(model, draft_model, request, options)
        first = request.decoder.launch_first()
        num_kept, following = first.read()
        request.decoder.commit(first, 1)
        request.add(first, num_kept, following[:1])
        if request.ended and keep_caches:
            _leave(request, first, None, following[:1])
    running = [request for request in requests if not request.ended]
    if not running:
        return
    with mx.stream(options.stream):
        _rounds(Batch(model, running), controller, costs, keep_caches)


def _rounds(batch: "Batch", controller: Controller, costs: BatchCosts | None, keep_caches: bool) -> None:
    """Round after round until every text has ended."""
    batch_size = len(batch.requests)
    if costs is not None and batch_size < costs.batch_size:
        controller.update_costs(costs.of(batch_size))
    upcoming, shape = None, None
    while batch.requests:
        rounds = upcoming or batch.launch(shape or controller.next_shape(batch.num_tokens))
        upcoming, shape = None, None
        if controller.drafting_off and _width(rounds) == 1 and batch.goes_on:
            # Plain decoding is pipelined. A draft waits, because a text may be found to have
            # ended, and of its window no more than one row could stay.
            batch.commit_plain(rounds)
            shape = controller.next_shape(batch.num_tokens)
            upcoming = batch.launch(shape) if shape.size == 0 else None
        runs = batch.finish(rounds)
        _record(controller, rounds)
        for b, request in enumerate(batch.requests):
            if request.ended:
                request.stats.drafting_events = list(controller.events)
                if keep_caches:
                    request.decoder.cache[:] = batch.cache.extract(b)
                    _leave(request, rounds[b], upcoming and upcoming[b], runs[b])
        left = [b for b, request in enumerate(batch.requests) if not request.ended]
        if len(left) < len(batch.requests):
            upcoming = upcoming and [upcoming[b] for b in left]
            batch.keep_requests(left)
            if costs is not None and left:
                controller.update_costs(costs.of(len(left)))


def _record(controller: Controller, rounds: list[Round]) -> None:
    """Tell what became of the drafts; those that were cut short at a text's end tell little."""
    if not any(done.num_drafted for done in rounds):
        return
    shape = max((done.shape for done in rounds), key=lambda shape: shape.size)
    controller.record(shape, *(done.read()[0] for done in rounds if done.shape == shape))


def _leave(request: Request, last: Round, upcoming: Round | None, run: list[int]) -> None:
    """Put into ``text.cache`` what a generation of its own would have left."""
    request.decoder.leave(last, upcoming, len(run), run)
    request.cache = request.decoder.cache + request.decoder.drafter.cache


def _width(rounds: list[Round]) -> int:
    """Rows of the shared window."""
    return max(done.num_drafted for done in rounds) + 1


class Batch:
    """The texts that still run, on shared caches, and the steps of their rounds.

    A list of rounds has one for each of ``texts``, in order.
    """

    def __init__(self, model: nn.Module, requests: list[Request]):
        self.requests = requests
        self.cache = BatchCache([request.decoder.cache for request in requests])
        self._target = Target(model, requests[0].decoder.drafter.taps)
        self._began_with = requests

    @property
    def num_tokens(self) -> int:
        """Of the text that has come furthest, whether it still runs or not."""
        return max(request.decoder.num_emitted for request in self._began_with)

    @property
    def goes_on(self) -> bool:
        """Whether one token more leaves every text room for another."""
        shapes = [request.limits.at_most(DraftShape(0), request.decoder.num_emitted + 1) for request in self.requests]
        return None not in shapes

    def launch(self, shape: DraftShape, absorb: bool = False) -> list[Round]:
        """Draft for every text and start one pass that verifies them all, without waiting.

        Of size 0, the drafters are left behind unless they are to ``absorb`` the step.
        """
        opened = [_open(request, shape) for request in self.requests]
        width = max(len(draft) for _, _, draft, _ in opened) + 1
        windows = []
        for request, (_, _, draft, _) in zip(self.requests, opened):
            filler = mx.zeros((width - 1 - len(draft),), mx.int32)  # causal: seen by no row before
            root = request.decoder.root.astype(mx.int32)
            windows.append(mx.concatenate([root, draft.tokens, filler]))
        self.cache.open(width)
        logits, features = self._target.batch(mx.stack(windows), self.cache.layers)
        rounds = []
        for b, (request, (own, choice, draft, draft_checkpoint)) in enumerate(zip(self.requests, opened)):
            num_rows = len(draft) + 1
            decoder = request.decoder
            seen = None if features is None else features[b, :num_rows]
            logprobs = decoder.logprobs(draft, None, logits[b, :num_rows])
            verification = choice.verify(draft, None, logprobs)
            absorbed = absorb or own.size > 0
            if absorbed:
                decoder.drafter.extend(verification.following, seen, last=verification.num_kept)
            rounds.append(
                Round(
                    own,
                    len(draft),
                    draft.num_levels,
                    verification,
                    seen,
                    verification.packed(),
                    RowCount(num_rows),
                    draft_checkpoint,
                    decoder.num_head_forwards,
                    absorbed,
                )
            )
        pending = [array for request in self.requests for array in request.decoder.drafter.pending()]
        mx.async_eval([done.packed for done in rounds], pending)
        return rounds

    def commit_plain(self, rounds: list[Round]) -> None:
        """Commit rounds without drafts, whose one token need not be read for that."""
        for request, done in zip(self.requests, rounds):
            request.decoder.commit(done, 1)
        self.cache.cut(1, [1] * len(rounds))

    def finish(self, rounds: list[Round]) -> list[list[int]]:
        """Read rounds, and commit what is not committed yet; the tokens each text emitted."""
        mx.eval([done.packed for done in rounds])
        is_committed, runs = rounds[0].committed, []
        for request, done in zip(self.requests, rounds):
            num_kept, following = done.read()
            num_before = request.decoder.num_emitted - is_committed
            run = request.limits.cut(following[: num_kept + 1], num_before)
            if not is_committed:
                request.decoder.commit(done, len(run))
            request.add(done, num_kept, run)
            runs.append(run)
        if not is_committed:
            self.cache.cut(_width(rounds), [done.target_checkpoint.kept for done in rounds])
        return runs

    def keep_requests(self, index: list[int]) -> None:
        """Drop all texts but these."""
        if index:
            self.cache.keep_requests(index)
        self.requests = [self.requests[b] for b in index]


def _open(request: Request, shape: DraftShape) -> tuple[DraftShape, Any, Draft, Checkpoint]:
    """As much of ``plan`` as the text has room for, drafted."""
    decoder = request.decoder
    shape = request.limits.at_most(shape, decoder.num_emitted) or DraftShape(0)
    if shape.size > 0:
        decoder.catch_up()
    window = Checkpoint(decoder.drafter.cache)
    choice = decoder.rule.open(decoder.num_emitted)
    draft = decoder.drafter.propose(shape.size, choice.pick) if shape.size > 0 else empty_draft()
    return shape, choice, draft, window


def generate_in_turn(
    model: nn.Module, draft_model: Drafter, requests: list[Request], options: Options
) -> None:
    """Each text alone, for targets that cannot share a pass."""
    for request in requests:
        cache, draft_cache = split_cache(request.cache, model, None)
        request.cache = cache + (draft_cache or draft_model.make_cache())
        steps = speculative_generate_step(
            mx.array(request.prompt),
            model,
            draft_model,
            options.stream,
            num_draft_tokens=options.num_draft_tokens,
            max_tokens=request.limits.max_tokens,
            sampler=options.sampler,
            logits_processors=options.logits_processors,
            acceptance=options.acceptance,
            prompt_cache=request.cache,
            prefill_step_size=options.prefill_step_size,
            stop_tokens=request.limits.stop_tokens,
            stats=request.stats,
        )
        for token, logprobs, _ in steps:
            request.tokens.append(token)
            if request.logprobs is not None:
                request.logprobs.append(logprobs[token].item())
