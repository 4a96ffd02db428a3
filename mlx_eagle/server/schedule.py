"""Whose turn it is: prompts are read chunk by chunk, and between two chunks all get a round.

Requests whose drafting settings agree are a group, and share their rounds where their caches can.
All of it runs in the generating thread.
"""

import logging
import time
from collections import deque
from typing import Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..batch.group import Emitted, Group
from ..batch.requests import Request, first_token, why_alone
from ..decoding.calibrate import round_costs
from ..decoding.decoder import Decoder
from ..decoding.live_costs import LiveCosts
from ..drafters.base import NullDrafter
from .active_requests import Opener, Served
from .answers import Caught, RequestError
from .metrics import Metrics
from .provider import PairProvider


class SomebodyWaits(Exception):
    """The cost of rounds was being measured, and there is something better to do."""


class Door(Protocol):
    """Where requests come from."""

    @property
    def is_stopping(self) -> bool:
        """Whether nobody shall be answered any more."""

    def is_anybody_waiting(self) -> bool:
        """Whether a request has not been begun."""


class Schedule:
    """The requests that are being answered, and the order of what is computed for them."""

    def __init__(
        self,
        provider: PairProvider,
        opener: Opener,
        metrics: Metrics,
        stream: mx.Stream,
        door: Door,
    ):
        self._provider, self._opener, self._metrics = provider, opener, metrics
        self._stream, self._door = stream, door
        self._served: list[Served] = []
        self._reading: deque[Served] = deque()
        self._groups: dict[object, Group] = {}
        flags = provider.cli_args
        self._recalibrates = flags.recalibrate
        caches = make_prompt_cache(provider.model)
        self._drafts_together = why_alone(provider.model, caches) is None
        can_share = why_alone(provider.model, caches, plainly=True) is None
        self._can_share = can_share and flags.kv_bits is None

    @property
    def is_idle(self) -> bool:
        return not self._served

    @property
    def is_full(self) -> bool:
        """Whether nobody can be begun until somebody has ended."""
        return len(self._served) >= self._provider.cli_args.decode_concurrency

    @property
    def has_room(self) -> bool:
        """Whether the next request can be begun now."""
        num_prompts = self._provider.cli_args.prompt_concurrency
        return not self.is_full and len(self._reading) < num_prompts

    def add(self, served: Served) -> None:
        """Answer this one too, from the next step on."""
        served.answer.put((0, served.num_uncached))
        self._served.append(served)
        self._reading.append(served)

    def step(self) -> None:
        """One chunk of one prompt, and a round of every group."""
        if self._reading:
            self._read(self._reading.popleft())
        for key, group in list(self._groups.items()):
            self._round(key, group)

    def close(self) -> None:
        """Answer nobody any more."""
        for served in self._served:
            served.answer.put(RequestError("the server is stopping.", 503))

    def _read(self, served: Served) -> None:
        """A chunk of a prompt, and behind its last one the first token."""
        if served.answer.is_over:  # its client has left
            self._served.remove(served)
            return
        decoder, last = served.decoder, served.num_uncached - 1
        with Caught() as caught:
            begun = time.perf_counter()
            served.num_read = next(served.chunks, last)
            decoder.prefill_time += time.perf_counter() - begun
            if served.num_read < last:
                served.answer.put((served.num_read, served.num_uncached))
                self._reading.append(served)
            else:
                self._begin_text(served)
        if caught.error is not None:
            self._fail(served, caught.error)

    def _begin_text(self, served: Served) -> None:
        request = served.request
        first = first_token(request)
        served.answer.put((served.num_uncached, served.num_uncached))
        made = first.verification
        self._say(served, Emitted(request, first.run, 0, 0, lambda i: made.logprobs[i]))
        if served.is_done or request.ended:
            self._end(served)
        else:
            self._group_of(served).join(request)

    def _group_of(self, served: Served) -> Group:
        """That of its drafting settings; one of its own where it can share no rounds."""
        args, tree = served.args, served.tree
        can_share = self._can_share and tree is None and not served.is_alone
        num_draft_tokens = args.num_draft_tokens if served.is_drafted else 0
        key = num_draft_tokens if can_share else served
        if key not in self._groups:
            drafter = self._provider.draft_model if served.is_drafted else NullDrafter()
            self._groups[key] = Group(
                self._provider.model,
                drafter,
                self._stream,
                num_draft_tokens,
                tree,
                self._find_costs,
                self._drafts_together,
            )
        return self._groups[key]

    def _round(self, key: object, group: Group) -> None:
        with Caught() as caught:
            for request in group.requests:
                served = self._served_of(request)
                if served.answer.is_over and not served.is_done:  # its client has left
                    served.is_done = True
                    group.leave(request)
            for emitted in group.round():
                served = self._served_of(emitted.request)
                num_unread = self._say(served, emitted)
                if served.is_done and not emitted.request.ended:
                    group.leave(emitted.request, num_unread)
        if caught.error is not None:
            del self._groups[key]
            self._recover([self._served_of(r) for r in group.requests], caught.error)
        for request in group.take_left():
            self._end(self._served_of(request))
        if group.is_empty:
            self._groups.pop(key, None)

    def _say(self, served: Served, emitted: Emitted) -> int:
        """Tell a client what a round has given it; how many tokens are not wanted any more."""
        answer, stats = served.answer, emitted.request.stats
        for i, response in enumerate(served.writer.responses(emitted)):
            num_unread = len(emitted.tokens) - i - 1
            is_last = response.finish_reason is not None
            if is_last:  # the client reads the counts with its last token
                stats.take_back(num_unread, i + 1)
            answer.put(response)
            if response.finish_reason is not None or answer.is_over:
                if not is_last:
                    stats.take_back(num_unread, i + 1)
                served.is_done = True
                return num_unread
        return 0

    def _end(self, served: Served) -> None:
        """All was generated: keep its caches, then tell its client."""
        self._served.remove(served)
        if served.is_drafted:
            self._metrics.count_drafts(served.request.stats)
        with Caught() as caught:
            self._opener.file(served)
        if caught.error is not None:
            logging.warning(f"The caches of an answer could not be kept ({caught.error}).")
        served.answer.put(None)

    def _fail(self, served: Served, error: Exception) -> None:
        """Tell a client; where its answer was complete, that it has ended."""
        self._served = [other for other in self._served if other is not served]
        served.answer.put(None if served.is_done else error)

    def _served_of(self, request: Request) -> Served:
        return next(served for served in self._served if served.request is request)

    def _recover(self, all_served: list[Served], error: Exception) -> None:
        """After a round that has failed: whoever was by itself is told so.

        Those who shared it go on, each by itself, so that it fails those only that it is to blame
        on.
        """
        for served in all_served:
            if served.is_done or len(all_served) == 1:
                self._fail(served, error)
                continue
            with Caught() as caught:
                served.is_alone = True
                self._opener.open_again(served)
                self._reading.append(served)
            if caught.error is not None:
                self._fail(served, caught.error)

    def _find_costs(self, decoder: Decoder, with_trees: bool) -> LiveCosts:
        """See ``round_costs``; measuring takes seconds, and stops as soon as anybody waits."""
        if not self._recalibrates or len(self._served) > 1:
            return round_costs(decoder, with_trees)
        (served,) = self._served

        def measuring(num_done: int, num_groups: int) -> None:
            if num_done == num_groups:
                self._recalibrates = False  # once is enough
                return
            is_wanted = not self._door.is_stopping and not served.answer.is_over
            if not is_wanted or self._door.is_anybody_waiting():
                raise SomebodyWaits

        try:
            return round_costs(decoder, with_trees, measuring, recalibrate=True)
        except SomebodyWaits:
            return round_costs(decoder, with_trees)
