"""What decodes requests for now: one of them by itself, or several in shared rounds.

Both give what a round has emitted in the same form, and hand requests over to each other at the
end of a round.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from ..decoding.accept import log_softmax
from ..decoding.controller import Controller, DraftingEvent
from ..decoding.generation import Generation
from ..decoding.pipeline import Pipeline
from ..decoding.round import Round
from ..drafters.base import NullDrafter
from .requests import Request
from .rounds import Batch
from .shared_round import SharedRound


@dataclass(frozen=True)
class Emitted:
    """What a round has given to one request.

    The first ``num_kept`` tokens were drafted; ``length`` is how far the round had drafted, in a
    tree in levels. ``logprobs`` makes those (V,) of a token, by its place in ``tokens``.
    ``events`` are the controller's since the round before.
    """

    request: Request
    tokens: list[int]
    num_kept: int
    length: int
    logprobs: Callable[[int], mx.array]
    events: tuple[DraftingEvent, ...] = ()
    is_shared: bool = False


class Alone:
    """One request by itself, as ``speculative_generate_step`` decodes it."""

    is_shared = False

    def __init__(self, request: Request, controller: Controller):
        self._request, self._controller = request, controller
        self._generation = Generation(request.decoder, request.limits)
        self._num_events = 0
        self._last: Round | None = None
        self._pipeline = Pipeline(self._generation, controller)
        self._rounds = iter(self._pipeline)

    def round(self) -> list[Emitted]:
        """One round."""
        return self._emitted(next(self._rounds))

    def part(self) -> list[Emitted]:
        """Finish what is under way; if the request has not ended, others may decode it then."""
        done = self._take_upcoming()
        made = [] if done is None else self._emitted(done)
        if self._generation.is_running:
            self._request.decoder.catch_up()
        return made

    def leave(self, request: Request, num_unread: int) -> None:
        """Stop before the end; of the last round's tokens, so many are dropped."""
        last = self._last
        if last is None:  # no round was read yet
            last = self._take_upcoming()
        else:
            last.num_taken -= num_unread
            del request.tokens[len(request.tokens) - num_unread :]
        self._stop(last)

    def close(self) -> None:
        """What was learned of costs is kept."""
        self._controller.close()

    def _take_upcoming(self) -> Round | None:
        """The round that is under way, finished."""
        done, self._pipeline.upcoming = self._pipeline.upcoming, None
        if done is not None:
            self._generation.finish(done)
        return done

    def _emitted(self, done: Round) -> list[Emitted]:
        request, controller = self._request, self._controller
        self._last, done.num_taken = done, len(done.run)
        request.stats.num_reruns = request.decoder.num_reruns
        done.count(request.stats)
        request.tokens += done.run
        events = tuple(controller.events[self._num_events :])
        self._num_events = len(controller.events)
        if not self._generation.is_running:
            self._stop(done)
        made, kept = done.verification, done.outcome.num_kept
        return [
            Emitted(request, done.run, kept, done.num_levels, lambda i: made.logprobs[i], events)
        ]

    def _stop(self, last: Round) -> None:
        """Give the request the caches that a generation of its own leaves."""
        decoder = self._request.decoder
        decoder.stop(last, self._pipeline.upcoming)
        self._request.cache = decoder.cache + decoder.drafter.cache


def _logprobs(logits: mx.array, index: int, row: int) -> mx.array:
    """Those (V,) of one row of one request, from logits (B, R, V)."""
    return log_softmax(logits[index, row])


class Shared:
    """Several requests in shared rounds."""

    is_shared = True

    def __init__(self, batch: Batch, is_plain: bool):
        """``is_plain``: nothing is drafted, and drafters are let go of."""
        self._batch, self._is_plain = batch, is_plain
        self._num_events = len(batch.controller.events)

    def join(self, request: Request) -> None:
        """Take in one more."""
        decoder = request.decoder
        if self._is_plain:
            decoder.drafter = NullDrafter(decoder.drafter.num_forwards)
            decoder.drops_drafter = True
        self._batch.join(request)

    def leave(self, request: Request, num_unread: int) -> None:
        """Let go of one that has not ended; what it has not read stays in its caches."""
        self._batch.leave(request)

    def round(self) -> list[Emitted]:
        """One round."""
        return self._emitted(self._batch.round())

    def part(self) -> list[Emitted]:
        """Finish what is under way; others may decode whoever has not ended then."""
        return self._emitted(self._batch.dissolve())

    def close(self) -> None:
        """See ``Alone.close``."""
        self._batch.controller.close()

    def _emitted(self, done: SharedRound | None) -> list[Emitted]:
        events = self._batch.controller.events[self._num_events :]
        self._num_events += len(events)
        if done is None:
            return []
        made = []
        for b, (request, run) in enumerate(zip(done.requests, done.runs)):
            if request.has_left:
                continue
            # The controller counts by the mean request.
            before = len(request.tokens) - len(run)
            own = tuple(replace(event, num_tokens=before) for event in events)
            made.append(
                Emitted(
                    request,
                    run,
                    min(done.kept[b], len(run)),
                    done.num_drafted[b],
                    partial(_logprobs, done.logits, b),
                    own,
                    is_shared=True,
                )
            )
        return made
