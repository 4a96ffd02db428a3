"""The rounds of a batch: one verify pass of the target for all requests, ragged in what is kept.

Each request keeps a number of rows of its own; how many are drafted is decided once per round for
all. Every request drafts by itself: a head's pass is short, and its caches are one request's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..decoding.accept import Sampler
from ..decoding.controller import Controller
from ..decoding.costs import BatchCosts, DraftShape, Ways
from ..decoding.decoder import Decoder
from ..decoding.limits import Limits
from ..decoding.live_costs import LiveCosts
from ..decoding.loop import speculative_generate_step
from ..decoding.pipeline import Pipeline
from ..decoding.processors import LogitsProcessor
from ..decoding.round import OpenRound, Round
from ..decoding.sampling import Sampling
from ..decoding.setup import begin_drafter, open_decoder, split_cache
from ..decoding.stats import Stats
from ..drafters.base import Drafter
from ..system.machines import fused_rows
from ..system.progress import silent
from ..target.rollback import CacheQuantization
from ..target.taps import Target
from .cache import BatchCache

UNQUANTIZED = CacheQuantization(None, 64, 0)


@dataclass
class Request:
    """One prompt and what became of it; ``row`` is its place in the batch."""

    prompt: list[int]
    limits: Limits
    cache: list  # the target's, then the drafter's where there are any
    row: int = 0
    decoder: Decoder | None = None
    stats: Stats = field(default_factory=Stats)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None  # of the tokens, where they are asked for

    @property
    def ended(self) -> bool:
        full = not self.limits.has_room_after(len(self.tokens))
        return full or bool(self.tokens) and self.limits.end(self.tokens[-1])

    def add(self, done: Round) -> None:
        """Count a round and take over what it emitted."""
        done.count(self.stats)
        self.tokens += done.run
        done.num_taken = len(done.run)
        if self.logprobs is not None:
            rows = mx.arange(len(done.run))
            self.logprobs += done.verification.logprobs[rows, mx.array(done.run)].tolist()


@dataclass(frozen=True)
class Options:
    """What holds for every request of a batch."""

    stream: mx.Stream | mx.ThreadLocalStream = generation_stream
    num_draft_tokens: int | str = 3
    sampler: Sampler | None = None
    logits_processors: list[LogitsProcessor] | None = None
    acceptance: str | None = None
    prefill_step_size: int = 2048

    def sampler_of(self, request: Request) -> Sampler | None:
        """The sampler, for one request: a ``Sampling`` has noise of its own for each row."""
        is_ours = isinstance(self.sampler, Sampling)
        return self.sampler.begin(request.row) if is_ours else self.sampler


class KeptRows:
    """A request's part in a shared window: how many of its rows stay."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows

    def rollback(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def rollback_to_branch(self, rows: list[int]) -> None:
        raise AssertionError("a batch drafts chains only")


def prefill(model: nn.Module, draft_model: Drafter, request: Request, options: Options) -> None:
    """Run the prompt but its last token, alone."""
    request.stats.start()
    cache, draft_cache = split_cache(request.cache, model, None)
    request.decoder = open_decoder(
        model,
        begin_drafter(draft_model, draft_cache),
        cache,
        UNQUANTIZED,
        options.stream,
        sampler=options.sampler_of(request),
        logits_processors=options.logits_processors,
        acceptance=options.acceptance,
    )
    request.decoder.prefill(mx.array(request.prompt), options.prefill_step_size, silent)


def generate_together(
    model: nn.Module,
    draft_model: Drafter,
    requests: list[Request],
    controller: Controller,
    costs: BatchCosts | None,
    options: Options,
    keep_caches: bool,
) -> None:
    """All requests to their ends, round by round in one pass.

    ``costs``, where ``controller`` goes by them, are looked up again for the requests that are
    left.
    """
    for request in requests:
        prefill(model, draft_model, request, options)
        first = request.decoder.launch_first()
        run = first.read().run
        request.decoder.commit(first, 1)
        first.run = run
        request.add(first)
        if request.ended and keep_caches:
            _stop(request, first, None)
    running = [request for request in requests if not request.ended]
    if not running:
        return
    with mx.stream(options.stream):
        ways = Ways() if costs is None else costs.alone.ways
        batch = Batch(model, running, costs, ways=ways, keep_caches=keep_caches)
        batch.go_by_size(controller)
        for _ in Pipeline(batch, controller):
            pass  # what each round emitted is in the requests


def _stop(request: Request, last: Round, upcoming: Round | None) -> None:
    """Put into ``request.cache`` what a generation of its own would have left."""
    request.decoder.stop(last, upcoming)
    request.cache = request.decoder.cache + request.decoder.drafter.cache


def _width(rounds: Sequence[Round | OpenRound]) -> int:
    """Rows of the shared window."""
    return max(done.num_drafted for done in rounds) + 1


class Batch:
    """The requests that still run, on shared caches: a ``pipeline.Runner`` of lists of rounds.

    A list of rounds has one for each of ``requests``, in order.
    """

    def __init__(
        self,
        model: nn.Module,
        requests: list[Request],
        costs: BatchCosts | None = None,
        *,
        ways: Ways = Ways(),
        keep_caches: bool = False,
    ):
        for request in requests:
            request.decoder.use(ways)
        self.requests = requests
        self.cache = BatchCache([request.decoder.cache for request in requests])
        self._target = Target(model, requests[0].decoder.drafter.taps, fused_rows)
        self._target.parts.is_on = ways.splits_attention
        self._costs = costs
        self._keep_caches = keep_caches
        self._began_with = requests

    @property
    def num_tokens(self) -> int:
        """Of the request that has come furthest, whether it still runs or not."""
        return max(request.decoder.num_emitted for request in self._began_with)

    @property
    def is_running(self) -> bool:
        return bool(self.requests)

    def fit(self, shape: DraftShape) -> DraftShape:
        """Each request cuts it by itself: see ``_open``."""
        return shape

    def launch(self, shape: DraftShape, absorb: bool = False) -> list[Round]:
        """Draft for every request and start one pass that verifies them all, without waiting.

        Of size 0, the drafters fall behind unless they are to ``absorb`` the step.
        """
        opened = [_open(request, shape) for request in self.requests]
        if shape.size > 0:
            # The device drafts while the host builds the target's pass, the larger graph.
            mx.async_eval([own.draft.tokens for own in opened])
        width = _width(opened)
        windows = []
        for request, own in zip(self.requests, opened):
            root = request.decoder.root.astype(mx.int32)
            filler = mx.zeros((width - 1 - own.num_drafted,), mx.int32)  # no row before sees it
            windows.append(mx.concatenate([root, own.draft.tokens, filler]))
        self.cache.open(width)
        logits, features = self._target.batch(mx.stack(windows), self.cache.layers)
        rounds = []
        for b, (request, own) in enumerate(zip(self.requests, opened)):
            num_rows = own.num_drafted + 1
            seen = None if features is None else features[b, :num_rows]
            launched = request.decoder.close_round(
                own, None, logits[b, :num_rows], seen, KeptRows(num_rows)
            )
            if absorb or own.shape.size > 0:
                request.decoder.absorb(launched)
            rounds.append(launched)
        pending = [request.decoder.drafter.pending() for request in self.requests]
        mx.async_eval([launched.verification.pending for launched in rounds], pending)
        return rounds

    def can_run_ahead(self, done: list[Round]) -> bool:
        """Whether all steps were plain, and none reaches its request's limit."""
        return _width(done) == 1 and all(
            request.limits.has_room_after(step.position + 1)
            for request, step in zip(self.requests, done)
        )

    def can_launch_unread(self, shape: DraftShape) -> bool:
        """Not a draft: a request may be found to have ended, and would keep one row at most."""
        return shape.size == 0

    def commit_plain(self, done: list[Round]) -> None:
        for request, step in zip(self.requests, done):
            request.decoder.commit(step, 1)
        self.cache.cut(1, [1] * len(done))

    def finish(self, done: list[Round]) -> None:
        mx.eval([own.verification.pending for own in done])
        were_committed = all(own.committed for own in done)
        for request, own in zip(self.requests, done):
            run = request.limits.cut(own.read().run, own.position)
            if not own.committed:
                request.decoder.commit(own, len(run))
            own.run = run
            request.add(own)
        if not were_committed:
            self.cache.cut(_width(done), [own.target_rows.num_rows for own in done])

    def learned(self, done: list[Round]) -> tuple[DraftShape, Sequence[int]] | None:
        """Drafts that were cut short at a request's end tell little, and are left out."""
        most = max(own.shape.size for own in done)
        if most == 0:
            return None
        whole = [own for own in done if own.shape.size == most]
        shape = max((own.tried_shape for own in whole), key=lambda tried: tried.size)
        return shape, [own.outcome.num_kept for own in whole]

    def settle(
        self, done: list[Round], upcoming: list[Round] | None, controller: Controller
    ) -> list[Round] | None:
        """Drop what has ended; the controller goes by the costs of the batch that is left."""
        left = [b for b, request in enumerate(self.requests) if not request.ended]
        if len(left) == len(self.requests):
            return upcoming
        for b, request in enumerate(self.requests):
            if request.ended:
                request.stats.drafting_events = list(controller.events)
                if self._keep_caches:
                    request.decoder.cache[:] = self.cache.extract(b)
                    _stop(request, done[b], None if upcoming is None else upcoming[b])
        if left:
            self.cache.keep_requests(left)
        self.requests = [self.requests[b] for b in left]
        self.go_by_size(controller)
        return None if upcoming is None else [upcoming[b] for b in left]

    def go_by_size(self, controller: Controller) -> None:
        """Give the controller the costs of a batch of this size, where it began with more."""
        if self._costs is not None and 0 < len(self.requests) < self._costs.batch_size:
            controller.update_costs(LiveCosts(self._costs.of(len(self.requests))))


def _open(request: Request, shape: DraftShape) -> OpenRound:
    """As much of ``shape`` as the request has room for, drafted."""
    decoder = request.decoder
    shape = request.limits.at_most(shape, decoder.num_emitted)
    return decoder.open_round(shape, decoder.checkpoint_draft(shape))


def generate_in_turn(
    model: nn.Module, draft_model: Drafter, requests: list[Request], options: Options
) -> None:
    """Each request alone, for targets that cannot share a pass."""
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
            sampler=options.sampler_of(request),
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
