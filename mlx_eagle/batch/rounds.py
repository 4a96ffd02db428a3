"""The rounds of a batch: one draft and one verify pass for all requests, however long each is.

Each request keeps its own number of rows; the draft length is decided once per round for all.
Requests join and leave between rounds. The number of operations in a round does not grow with the
number of requests, unless a drafter or a rule handles them one by one.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..decoding.accept import AskedLogprobs, ProcessedRows, log_softmax
from ..decoding.agreement import AgreedController, agreed
from ..decoding.auto import AdaptiveController, fixed_controller
from ..decoding.decoder import MOST_BEHIND
from ..decoding.loop import MOST_FORCED, Controller, Pipeline
from ..decoding.processors import ask_grammars
from ..decoding.round_costs import costs_of
from ..drafters.acceptance_stats import CopySeen
from ..drafters.base import BatchDrafter, Draft, Drafter, PendingPairs
from ..drafters.seen_text import TextMatch
from ..drafters.tree import PLAIN, DraftPlan, DraftShape, chains_for
from ..target_model.cache_view import close_windows
from ..target_model.kernels import KernelOptions
from ..target_model.probe import batch_mask_axes
from ..target_model.ragged import RaggedCaches
from ..target_model.states import recurrent_caches
from ..target_model.target import Target
from .acceptance import BatchChoice, BatchVerification, open_rules
from .requests import Request, RoundPart, SharedRound

LEAST_FORCED = 3  # tokens of a grammar that a text begins with, in however large a batch


def shared_controller(
    model: nn.Module,
    drafter: Drafter,
    rule: object,
    num_draft_tokens: int | str,
    num_requests: int,
    stream: mx.Stream | mx.ThreadLocalStream,
    drafts: bool = True,
) -> Controller:
    """Make the controller for rounds that ``num_requests`` share; without ``drafts`` it copies.

    ``stream`` is the one that the passes run on.
    """
    copies = drafter.copies is not None
    if isinstance(num_draft_tokens, str):  # auto
        chains = chains_for(drafter.longest_draft) if drafts else ()
        costs = costs_of(model, drafter, rule)
        own = AdaptiveController(costs, chains, num_requests, copies=copies)
        return agreed(own, model, stream)
    return fixed_controller(num_draft_tokens, drafts and drafter.longest_draft != 0, copies)


class Batch:
    """Requests that are decoded together: ``join``, ``leave``, and ``round`` after ``round``.

    To join, a request must have emitted its first token (``requests.prefill`` and
    ``first_token``), on caches that ``can_share``. A round adds to the ``tokens`` of each request,
    and releases requests that have ``ended``. Greedy and sampled requests may be mixed. With
    ``keep_caches`` a request that leaves gets its caches back in its decoder: it may continue
    elsewhere, or ``requests.restore_caches`` completes them.

    ``controller`` chooses one draft length for all, and is told the number of requests.

    It is a ``loop.Runner`` of ``SharedRound``.
    """

    def __init__(
        self,
        model: nn.Module,
        draft_model: Drafter,
        controller: Controller,
        *,
        options: KernelOptions | None = None,
        keep_caches: bool = False,
        stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    ):
        self.requests: list[Request] = []
        self.controller = controller
        self._caches = RaggedCaches(batch_mask_axes(model))
        self._drafts = draft_model.batch_drafter() or BatchDrafter()
        self._keep_caches = keep_caches
        self._stream = stream
        with mx.stream(stream):
            self._target = Target(model, draft_model.taps)
        if isinstance(controller, AgreedController):
            controller.ride(self._target)
        if options is not None:
            self._target.attention.use(options.splits_attention, options.forces_fused)
        self._roots = mx.zeros((0, 1), mx.int32)
        self._pending = PendingPairs()
        self._waiting: list[Request] = []
        self._pipeline: Pipeline[SharedRound] | None = None
        self._rounds: Iterator[SharedRound] = iter(())
        self._num_tokens = 0.0

    def join(self, request: Request) -> None:
        """Add a request, from the next round on that has not begun."""
        self._waiting.append(request)

    def leave(self, request: Request) -> None:
        """Release a request that has not ended; its tokens do not change any more.

        It gets its caches back when the current round has ended.
        """
        request.cancelled = True

    def dissolve(self) -> SharedRound | None:
        """Finish the round in flight and release all requests; returns the round, if any."""
        with mx.stream(self._stream):
            done = None if self._pipeline is None else self._pipeline.upcoming
            self._pipeline = None
            if done is not None:
                self.finish(done)
            self._let_go([])
            self._waiting.clear()
        return done

    def round(self) -> SharedRound | None:
        """Run one round, perhaps starting the next; None if no request is left."""
        with mx.stream(self._stream):
            while self.is_running:
                if self._pipeline is None:
                    self.admit()
                    if not self.requests:
                        return None
                    self._pipeline = Pipeline(self, self.controller)
                    self._rounds = iter(self._pipeline)
                done = next(self._rounds, None)
                if done is not None:
                    return done
                self._pipeline = None
            self._pipeline = None
            self.admit()
        return None

    @property
    def num_tokens(self) -> int:
        """Tokens emitted so far, averaged over the requests of each round."""
        return int(self._num_tokens)

    @property
    def is_running(self) -> bool:
        return bool(self._waiting) or any(not request.ended for request in self.requests)

    @property
    def matches(self) -> Sequence[TextMatch]:
        found = (request.decoder.copies for request in self.requests)
        return [copies.latest for copies in found if copies is not None]

    def choose(self, plan: DraftPlan) -> DraftShape:
        """See ``Runner.choose``: a copy if all copy, else the length that one has room for."""
        shapes = [request.decoder.choose(plan) for request in self.requests]
        most = max(shapes, key=lambda shape: (shape.size > 0, shape.num_levels))
        limits = ((request.limits, request.decoder.num_emitted) for request in self.requests)
        return max(own.at_most(most, num_emitted) for own, num_emitted in limits)

    def launch(self, plan: DraftPlan, absorb: bool = False) -> SharedRound:
        """Draft or copy for all, and start one pass that verifies all drafts, without waiting.

        If nothing is drafted, the drafter falls behind unless ``absorb`` is set.
        """
        most_forced = max(LEAST_FORCED, (MOST_FORCED + 1) // len(self.requests) - 1)
        parts = [RoundPart.of(request, plan, most_forced) for request in self.requests]
        room = [part.room for part in parts]
        choice = open_rules(
            [request.decoder.rule for request in self.requests],
            [part.position for part in parts],
            room,
            [part.known for part in parts],
        )
        drafts, lengths = self._draft(max(room), choice, parts)
        for part, length in zip(parts, lengths, strict=True):
            part.num_drafted = min(length, max(part.room, len(part.known)))
        logits, features = self._verify(mx.concatenate([self._roots, drafts], axis=1))
        num_drafted = [part.num_drafted for part in parts]
        verification, logits = self._accept(choice, drafts, num_drafted, logits)
        is_drafted = any(part.is_drafter_asked for part in parts)
        longest_copy = PLAIN._replace(copy=max(len(part.copied) for part in parts))
        launched = SharedRound(
            parts,
            DraftShape(max(room)) if is_drafted else longest_copy,
            verification,
            features,
            self._asked_logprobs(logits, verification.following),
        )
        if absorb or is_drafted or any(part.forced and not part.copied for part in parts):
            rows = [length + 1 for length in lengths]
            self._flush_pairs()
            self._drafts.extend(verification.following, features, verification.num_kept, rows)
            launched.absorbed = True
        mx.async_eval(launched.pending, self._drafts.pending())
        return launched

    def _asked_logprobs(self, logits: mx.array, following: mx.array) -> AskedLogprobs | None:
        """Number of log-probabilities for all: the most that any asks for; None if none asks."""
        wishes = [request.decoder.num_top for request in self.requests]
        most = max((num for num in wishes if num is not None), default=None)
        return None if most is None else AskedLogprobs.of(log_softmax(logits), following, most)

    def _draft(
        self, size: int, choice: BatchChoice, parts: list[RoundPart]
    ) -> tuple[mx.array, list[int]]:
        """Drafts (B, k) that begin with known tokens, and the number of valid tokens in each.

        The drafter is asked if a request needs more tokens than that.
        """
        is_asked = [part.is_drafter_asked for part in parts]
        num_known = [len(part.known) for part in parts]
        drafts = mx.zeros((len(parts), 0), mx.int32)
        lengths = [0] * len(parts)
        if any(is_asked):
            self._flush_pairs()
            self._drafts.see_target(self._caches)
            drafts, lengths = self._drafts.propose(size, choice, is_asked)
            lengths = [length * asked for length, asked in zip(lengths, is_asked, strict=True)]
        if any(num_known):
            width = max(drafts.shape[1], *num_known)
            known = (part.known for part in parts)
            given = mx.array([tokens + [0] * (width - len(tokens)) for tokens in known], mx.int32)
            is_known = mx.arange(width) < mx.array(num_known)[:, None]
            drafts = mx.pad(drafts, [(0, 0), (0, width - drafts.shape[1])])
            drafts = mx.where(is_known, given, drafts)
        if any(is_asked):
            # The device drafts while the host builds the target's pass, the larger graph.
            mx.async_eval(drafts)
        return drafts, list(map(max, lengths, num_known))

    def _verify(self, tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        """One pass over tokens (B, R), split if necessary when R > 1: logits and features."""
        caches = self._caches.open()
        num_rows = tokens.shape[1]
        if num_rows == 1 or not any(recurrent_caches(caches)):
            return self._target.batch(tokens, caches)
        with self._target.recording(caches, num_rows, self._caches.keep_updates):
            return self._target.batch(tokens, caches)

    def can_run_ahead(self, done: SharedRound) -> bool:
        """Whether all steps were plain, no request waits, and none reaches its limit.

        Never with a grammar: what it forces next depends on the token.
        """
        return (
            done.shape.is_plain
            and not self._waiting
            and all(
                part.request.limits.has_room_after(part.position + 1)
                and not part.request.decoder.processors.grammars
                for part in done.parts
            )
        )

    def can_launch_before_read(self, plan: DraftPlan) -> bool:
        """False for drafts, since a request may turn out to have ended."""
        return all(request.decoder.choose(plan).is_plain for request in self.requests)

    def commit_plain(self, done: SharedRound) -> None:
        self._commit(done, [1] * len(done.parts), done.verification.following[:, :1])

    def finish(self, done: SharedRound) -> None:
        done.read()
        if not done.committed:
            lengths = [len(part.run) for part in done.parts]
            roots = mx.array([part.run[-1:] for part in done.parts], mx.int32)
            self._commit(done, lengths, roots)
        for b, part in enumerate(done.parts):
            request = part.request
            run = part.run
            seen = request.decoder.see(run)
            if seen is not None:
                done.copies_seen.append(seen)
            if request.cancelled:
                request.tokens_after_leave += run
                continue
            num = part.num_drafted
            num_accepted = min(part.num_kept, len(run))
            forwards = self._drafts.num_forwards(b)
            request.stats.record(num, num, num_accepted, len(run), forwards, bool(part.copied))
            request.tokens += run
            if request.logprobs is not None:
                request.logprobs += [own for own, _ in done.logprobs(b)]

    def acceptance_of(self, done: SharedRound) -> tuple[DraftShape, Sequence[int]] | None:
        """See ``Runner``; leaves out drafts that a request's end cut short, as they tell little.

        It also leaves out drafts that begin with forced tokens, and copies beside drafts.
        """
        size = done.shape.num_levels
        is_copy = done.shape.copy > 0
        whole = [
            part
            for part in done.parts
            if part.room == size and not part.forced and bool(part.copied) == is_copy
        ]
        if size == 0 or not whole:
            return None
        tried = max(1, *(part.num_drafted for part in whole))
        return done.shape.at_most(tried), [part.num_kept for part in whole]

    def ranks_of(self, done: SharedRound) -> Sequence[int]:
        """(): a batch drafts chains only."""
        return ()

    def copies_of(self, done: SharedRound) -> Sequence[CopySeen]:
        return done.copies_seen

    def retire(
        self, done: SharedRound, upcoming: SharedRound | None, controller: Controller
    ) -> SharedRound | None:
        """Remove requests that have ended, and add the ones that wait."""
        return self.admit(upcoming)

    def admit(self, upcoming: SharedRound | None = None) -> SharedRound | None:
        """Let requests leave and join now; returns the round in flight for the rest.

        No request can join while a round is in flight.
        """
        num_before = len(self.requests)
        left = [b for b, request in enumerate(self.requests) if not request.ended]
        if len(left) < num_before:
            self._let_go(left)
            upcoming = upcoming.of(left) if left and upcoming is not None else None
        if upcoming is None:
            for request in self._waiting:
                if not request.ended:
                    self._take_in(request)
            self._waiting.clear()
        if len(left) < num_before or len(self.requests) > len(left):
            self.controller.resize(max(1, len(self.requests)))
        return upcoming

    def _take_in(self, request: Request) -> None:
        """Append a request to the batch, and release its own caches."""
        self._flush_pairs()
        decoder = request.decoder
        close_windows(decoder.cache)
        self._caches.join(decoder.cache)
        self._drafts.join(decoder.drafter)
        self._roots = mx.concatenate([self._roots, decoder.root[None].astype(mx.int32)])
        decoder.cache = []
        request.cache = []
        self.requests.append(request)

    def _let_go(self, left: list[int]) -> None:
        """Remove all requests except ``left``."""
        if self._keep_caches:
            self._flush_pairs()
        for b, request in enumerate(self.requests):
            if b in left:
                continue
            request.stats.drafting_events = list(self.controller.events)
            if self._keep_caches:
                request.decoder.cache = self._caches.extract(b)
                request.decoder.drafter = self._drafts.extract(b)
                request.decoder.root = self._roots[b]
        self.requests = [self.requests[b] for b in left]
        self._caches.keep(left)
        self._drafts.keep(left)
        self._roots = self._roots[mx.array(left, mx.int32)]
        if left:
            self._pending.keep(left)
        else:
            self._pending.clear()

    def _flush_pairs(self) -> None:
        """Let the drafter absorb the tokens that were decoded without it."""
        lengths = self._pending.lengths
        if lengths:
            last = None if min(lengths) == max(lengths) else mx.array(lengths) - 1
            self._pending.flush(partial(self._drafts.extend, last=last, num_rows=lengths))
            self._drafts.advance(lengths)

    def _commit(self, done: SharedRound, lengths: list[int], roots: mx.array) -> None:
        """Add the first ``lengths[b]`` tokens of the round to request b."""
        self._caches.advance(lengths)
        if done.absorbed:
            self._drafts.advance(lengths)
        else:
            self._pending.add(0, done.verification.following, done.features, lengths)
            if len(self._pending) >= MOST_BEHIND:
                self._flush_pairs()
        self._roots = roots
        for b, (part, length) in enumerate(zip(done.parts, lengths, strict=True)):
            emitted = done.verification.following[b, :length]
            part.request.decoder.follow(emitted, length - 1, part.run)
        done.committed = True
        self._num_tokens += sum(lengths) / len(lengths)

    def _accept(
        self, choice: BatchChoice, drafts: mx.array, num_drafted: list[int], logits: mx.array
    ) -> tuple[BatchVerification, mx.array]:
        """Apply the rules to logits (B, R, V), after each request's own processors."""
        decoders = [request.decoder for request in self.requests]
        if not any(map(len, (decoder.processors for decoder in decoders))):
            return choice.verify(drafts, num_drafted, logits), logits
        bound = [b for b, decoder in enumerate(decoders) if decoder.processors.grammars]
        if bound:
            mx.async_eval(logits)  # the device goes on with the pass while drafts are read
            ids: Any = drafts.tolist()
            ask_grammars([(decoders[b].processors, ids[b], None) for b in bound], logits.shape[-1])
        texts = [
            ProcessedRows(own.processors, own.rule, own.history, Draft(drafts[b]), logits[b])
            for b, own in enumerate(decoders)
        ]
        while True:
            for_rule = mx.stack([text.for_rule for text in texts])
            verification = choice.verify(drafts, num_drafted, for_rule)
            is_waited_for = any(text.left for text in texts)
            kept: Any = verification.num_kept.tolist() if is_waited_for else ()
            more = [text.process_next(range(k + 1)) for text, k in zip(texts, kept, strict=False)]
            if not any(more):
                return verification, mx.stack([text.logits for text in texts])
