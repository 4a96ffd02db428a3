"""Groups of requests with the same draft settings: one by itself, several in shared rounds.

A request moves between the two at the end of a round, with its caches, its noise and its position:
nothing is computed twice, and its text is the same as in a generation of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from ..decoding.accept import TokenLogprobs
from ..decoding.auto import FixedController
from ..decoding.decoder import Decoder, Round
from ..decoding.generate_step import CLEAR_CACHE_EVERY, make_controller
from ..decoding.loop import Controller, Pipeline, SingleRunner
from ..decoding.stats import DraftingEvent
from ..drafters.base import Drafter, NullDrafter
from ..drafters.tree import PLAIN, Tree
from .requests import Request, SharedRound
from .rounds import Batch, shared_controller


@dataclass(frozen=True)
class RoundOutput:
    """Output of a round for one request.

    The first ``num_kept`` tokens were drafted; ``length`` is the length of the draft, for a tree
    its number of levels. ``logprobs`` belong to ``tokens``; [] if the decoder was asked for none.
    ``events`` are the controller's events since the previous round.
    """

    request: Request
    tokens: list[int]
    num_kept: int
    length: int
    logprobs: list[TokenLogprobs]
    events: tuple[DraftingEvent, ...] = ()
    is_shared: bool = False


class OwnRunner:
    """One request by itself, as ``speculative_generate_step`` decodes it."""

    is_shared = False

    def __init__(self, request: Request, controller: Controller):
        self._request = request
        self._controller = controller
        self._generation = SingleRunner(request.decoder, request.limits)
        self._num_events = 0
        self._last: Round | None = None
        self._pipeline = Pipeline(self._generation, controller)
        self._rounds = iter(self._pipeline)

    def round(self) -> list[RoundOutput]:
        """One round."""
        return self._emitted(next(self._rounds))

    def dissolve(self) -> list[RoundOutput]:
        """Finish the round in flight; another runner may then continue the request."""
        done = self._take_upcoming()
        made = [] if done is None else self._emitted(done)
        if self._generation.is_running:
            self._request.decoder.restore_states()
            self._request.decoder.flush_pairs()
        return made

    def leave(self, request: Request, num_unread: int) -> None:
        """Stop before the end, and drop the last ``num_unread`` tokens of the last round."""
        last = self._last
        if last is None:  # no round was read yet
            last = self._take_upcoming()
        else:
            last.num_taken -= num_unread
            del request.tokens[len(request.tokens) - num_unread :]
        if last is not None:
            self._stop(last)

    def _take_upcoming(self) -> Round | None:
        """Finish the round in flight, and return it."""
        done = self._pipeline.upcoming
        self._pipeline.upcoming = None
        if done is not None:
            self._generation.finish(done)
        return done

    def _emitted(self, done: Round) -> list[RoundOutput]:
        request = self._request
        controller = self._controller
        self._last = done
        done.num_taken = len(done.run)
        request.stats.num_reruns = request.decoder.num_reruns
        done.count(request.stats)
        request.tokens += done.run
        events = tuple(controller.events[self._num_events :])
        self._num_events = len(controller.events)
        if not self._generation.is_running:
            self._stop(done)
        kept = done.outcome.num_kept
        length = done.draft.num_levels
        logprobs = done.verification.read_logprobs(len(done.run))
        return [RoundOutput(request, done.run, kept, length, logprobs, events)]

    def _stop(self, last: Round) -> None:
        """Give the request the caches that its own generation would leave."""
        decoder = self._request.decoder
        decoder.stop(last, self._pipeline.upcoming)
        self._request.cache = decoder.cache + decoder.drafter.cache


class SharedRunner:
    """Several requests in shared rounds."""

    is_shared = True

    def __init__(self, batch: Batch, is_plain: bool):
        """``is_plain``: nothing is drafted, and drafters are released."""
        self._batch = batch
        self._is_plain = is_plain
        self._num_events = len(batch.controller.events)

    def join(self, request: Request) -> None:
        """Add a request."""
        decoder = request.decoder
        if self._is_plain:
            decoder.drafter = NullDrafter(decoder.drafter.num_forwards)
            decoder.discards_features = True
        self._batch.join(request)

    def leave(self, request: Request, num_unread: int) -> None:
        """Release a request that has not ended; its unread tokens stay in its caches."""
        self._batch.leave(request)

    def round(self) -> list[RoundOutput]:
        """One round."""
        return self._emitted(self._batch.round())

    def dissolve(self) -> list[RoundOutput]:
        """Finish the round in flight; other runners may then continue the requests."""
        return self._emitted(self._batch.dissolve())

    def _emitted(self, done: SharedRound | None) -> list[RoundOutput]:
        events = self._batch.controller.events[self._num_events :]
        self._num_events += len(events)
        if done is None:
            return []
        made = []
        for b, part in enumerate(done.parts):
            request = part.request
            if request.cancelled:
                continue
            # The controller counts by the mean request.
            before = len(request.tokens) - len(part.run)
            own = tuple(replace(event, num_tokens=before) for event in events)
            kept = min(part.num_kept, len(part.run))
            logprobs = done.logprobs(b)
            made.append(
                RoundOutput(request, part.run, kept, part.num_drafted, logprobs, own, True)
            )
        return made


@dataclass(eq=False)
class Group:
    """Requests with the same draft settings: ``join``, ``leave``, and ``round`` after ``round``.

    To join, a request must have emitted its first token. ``num_draft_tokens`` is as in
    ``speculative_generate_step``, one length per round for all; "auto" judges by what all requests
    accept, and by the costs of rounds of that many. Without ``drafts_together``, for targets whose
    states can share only plain steps, a single request is drafted for, and several are decoded
    plainly. With a ``tree``, or if caches cannot share a pass, the group may have one request. If
    one's decoder ``discards_features``, all requests that share its rounds are decoded plainly.
    """

    model: nn.Module
    draft_model: Drafter
    stream: mx.Stream | mx.ThreadLocalStream
    num_draft_tokens: int | str
    tree: Tree | str | None = None
    drafts_together: bool = True

    def __post_init__(self) -> None:
        self._runner: OwnRunner | SharedRunner | None = None
        self._num_rounds = 0
        self._running: list[Request] = []
        self._joining: list[Request] = []
        self._left: list[Request] = []

    @property
    def requests(self) -> list[Request]:
        """The requests that are still in the group."""
        return [*self._running, *self._joining]

    @property
    def is_empty(self) -> bool:
        """Whether no request is left, and no round is in flight."""
        return not self.requests and self._runner is None

    def join(self, request: Request) -> None:
        """Add a request, from the next round on."""
        request.cache = []
        self._joining.append(request)

    def leave(self, request: Request, num_unread: int = 0) -> None:
        """Release a request that has not ended, whose last ``num_unread`` tokens are unwanted.

        These tokens are dropped if it ran by itself, and stay if it shared rounds.
        """
        if request in self._joining:
            self._joining.remove(request)
            self._left.append(request)
        elif self._runner is not None:
            self._runner.leave(request, num_unread)
        request.cancelled = True
        self._give_back()

    def round(self) -> list[RoundOutput]:
        """Run one round of all requests, and return its output for each."""
        running = [request for request in self._running if not request.ended]
        num = len(running) + len(self._joining)
        if self._runner is not None and (num == 0 or self._runner.is_shared != self._shares(num)):
            made = self._runner.dissolve()
            self._runner = None
            self._give_back()
            self._joining = [*self._running, *self._joining]
            self._running = []
            return made
        if num == 0:
            return []
        if self._runner is None:
            self._runner = self._begin(self._joining)
        elif isinstance(self._runner, SharedRunner):
            for request in self._joining:
                self._runner.join(request)
        self._running += self._joining
        self._joining = []
        made = self._runner.round()
        self._give_back()
        self._num_rounds += 1
        if self._num_rounds % CLEAR_CACHE_EVERY == 0:
            mx.clear_cache()
        return made

    def take_left(self) -> list[Request]:
        """Return the requests that have ended or left since the last call.

        Their decoders have their caches. If ``Request.cache`` is empty, these lack the last
        token: see ``requests.restore_caches``.
        """
        left = self._left
        self._left = []
        return left

    def _shares(self, num_requests: int) -> bool:
        """Whether ``num_requests`` share their rounds."""
        return num_requests > 1

    def _give_back(self) -> None:
        back = [request for request in self._running if request.ended and request.decoder.cache]
        self._running = [request for request in self._running if request not in back]
        self._left += back
        if not self._running and self._runner is not None:
            self._runner = None

    def _begin(self, requests: Sequence[Request]) -> OwnRunner | SharedRunner:
        """Make the runner that decodes these requests from now on."""
        if self._shares(len(requests)):
            shared = self._share([request.decoder for request in requests])
            for request in requests:
                shared.join(request)
            return shared
        (request,) = requests
        decoder = request.decoder
        if decoder.discards_features and decoder.copies is None:
            return OwnRunner(request, FixedController(PLAIN, drafting_off=True))
        controller = make_controller(decoder, self.num_draft_tokens, self.tree, request.stats)
        return OwnRunner(request, controller)

    def _share(self, decoders: Sequence[Decoder]) -> SharedRunner:
        """Make the runner of shared rounds for these requests, which have not joined yet."""
        drafter = self.draft_model
        is_plain = any(decoder.discards_features for decoder in decoders)
        if not self.drafts_together or (is_plain and drafter.copies is None):
            controller: Controller = FixedController(PLAIN, drafting_off=True)
        else:
            controller = shared_controller(
                self.model,
                drafter,
                decoders[0].rule,
                self.num_draft_tokens,
                len(decoders),
                self.stream,
                drafts=not is_plain,
            )
        if is_plain:
            drafter = NullDrafter()
        batch = Batch(
            self.model,
            drafter,
            controller,
            options=decoders[0].options,
            keep_caches=True,
            stream=self.stream,
        )
        return SharedRunner(batch, is_plain)
