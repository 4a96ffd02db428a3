"""Generating thread and its scheduler, which begins, reads and decodes requests.

Prompts are read chunk by chunk, and between two chunks all requests get a round. Requests with
the same drafting settings are a group, and share their rounds where their caches can.

Under ``mlx.launch`` every rank has this thread, and takes the same steps: rank 0 alone has
clients, and tells the others in ``Orders`` what they asked for.
"""

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from queue import Empty
from secrets import randbits
from threading import Event, Lock

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import ResponseGenerator

from ..batch.group import Group, RoundOutput
from ..batch.requests import Request, first_token, reason_not_batchable
from ..drafters.base import NullDrafter
from ..system.ranks import is_first, is_lost, num_ranks, share
from .active_requests import ActiveRequest
from .answer_stream import AnswerStream, RequestError, as_request_errors, on_error
from .body import PairArguments
from .caches import PairCache
from .grammars import make_grammar
from .metrics import Metrics
from .prompt import Tokenized
from .provider import PairProvider

TIME_LIMIT = 600.0  # seconds
IDLE = 0.1  # seconds between looks at whether to stop, while there are no requests


@dataclass
class Orders:
    """Orders for the next step, from the clients and the clock of rank 0.

    They are the requests to begin, the indices of active requests whose clients have ``left`` and
    of requests that are ``overdue``, and whether to stop.
    """

    requests: list[tuple[Tokenized, PairArguments]]
    left: list[int]
    overdue: list[int]
    is_stopping: bool


class Schedule:
    """Requests that are being answered, and the order in which they are computed."""

    def __init__(self, generator: "PairGenerator"):
        provider = generator.model_provider
        self._generator = generator
        self._provider = provider
        self._stream = mx.default_stream(mx.default_device())
        self._active: list[ActiveRequest] = []
        self._reading: deque[ActiveRequest] = deque()
        self._groups: dict[object, Group] = {}
        flags = provider.cli_args
        caches = make_prompt_cache(provider.model)
        self._drafts_together = reason_not_batchable(provider.model, caches) is None
        can_share = reason_not_batchable(provider.model, caches, plainly=True) is None
        self._can_share = can_share and flags.kv_bits is None

    @property
    def is_idle(self) -> bool:
        return not self._active

    @property
    def room(self) -> int:
        """The number of requests that can be begun now."""
        flags = self._provider.cli_args
        free = flags.decode_concurrency - len(self._active)
        return max(0, min(free, flags.prompt_concurrency - len(self._reading)))

    def see_clients(self) -> tuple[list[int], list[int]]:
        """Indices of active requests whose clients have left, and of overdue ones."""
        answers = [active.answer for active in self._active]
        left = [i for i, answer in enumerate(answers) if answer.is_over]
        return left, [i for i, answer in enumerate(answers) if self._is_overdue(answer)]

    def mark(self, orders: Orders) -> None:
        """Mark the active requests that are to end."""
        for i in orders.left:
            self._active[i].has_left = True
        for i in orders.overdue:
            self._active[i].is_overdue = True

    def begin(self, answer: AnswerStream, prompt: Tokenized, args: PairArguments) -> None:
        """Begin a request, which is answered from the next step on.

        Raises ValueError if the pair cannot do it.
        """
        cache = self._generator.prompt_cache
        active = ActiveRequest(self._provider, cache, self._stream, answer, prompt, args)
        answer.put(active.num_cached)
        answer.put((0, active.num_uncached))
        self._active.append(active)
        self._reading.append(active)

    def step(self) -> None:
        """Read one chunk of one prompt, and run a round of every group."""
        if self._reading:
            self._read(self._reading.popleft())
        for key, group in list(self._groups.items()):
            self._round(key, group)

    def close(self) -> None:
        """End all requests: the server stops."""
        for active in self._active:
            active.answer.put(RequestError("the server is stopping.", 503))

    def _read(self, active: ActiveRequest) -> None:
        """Read a chunk of a prompt; after the last one, generate the first token."""
        if active.has_left:
            self._active.remove(active)
            return
        decoder = active.decoder
        last = active.num_uncached - 1
        with on_error(partial(self._fail, active)):
            begun = time.perf_counter()
            active.num_read = next(active.chunks, last)
            decoder.prefill_time += time.perf_counter() - begun
            if active.num_read < last:
                active.answer.put((active.num_read, active.num_uncached))
                self._reading.append(active)
            else:
                if active.args.has_followers:
                    active.file_copy((active.request.prompt + active.request.tokens)[:-1], "user")
                self._begin_text(active)

    def _begin_text(self, active: ActiveRequest) -> None:
        request = active.request
        first = first_token(request)
        active.answer.put((active.num_uncached, active.num_uncached))
        logprobs = first.verification.read_logprobs(len(first.run))
        self._say(active, RoundOutput(request, first.run, 0, 0, logprobs))
        if active.is_done or request.ended:
            self._end(active)
        else:
            self._group_of(active).join(request)

    def _group_of(self, active: ActiveRequest) -> Group:
        """The group for these draft settings, or a private one if it cannot share rounds."""
        args = active.args
        tree = active.tree
        can_share = self._can_share and tree is None and not args.exact and not active.is_single
        num_draft_tokens = args.num_draft_tokens if active.is_drafted else 0
        key = num_draft_tokens if can_share else active
        if key not in self._groups:
            drafter = self._provider.draft_model if active.is_drafted else NullDrafter()
            self._groups[key] = Group(
                self._provider.model,
                drafter,
                self._stream,
                num_draft_tokens,
                tree,
                self._drafts_together,
            )
        return self._groups[key]

    def _round(self, key: object, group: Group) -> None:
        with on_error(partial(self._recover, key, group)):
            for request in group.requests:
                active = self._active_of(request)
                if active.has_left and not active.is_done:
                    active.is_done = True
                    group.leave(request)
            for emitted in group.round():
                active = self._active_of(emitted.request)
                num_unread = self._say(active, emitted)
                if active.is_done and not emitted.request.ended:
                    group.leave(emitted.request, num_unread)
        for request in group.take_left():
            self._end(self._active_of(request))
        if group.is_empty:
            self._groups.pop(key, None)

    def _say(self, active: ActiveRequest, emitted: RoundOutput) -> int:
        """Send a client the tokens of a round; return how many of them it does not want."""
        stats = emitted.request.stats
        for i, response in enumerate(active.writer.responses(emitted)):
            num_unread = len(emitted.tokens) - i - 1
            if response.finish_reason is None and active.is_overdue:
                response.finish_reason = "length"
            is_last = response.finish_reason is not None or active.has_left
            if is_last:  # the client reads the counts with its last token
                stats.take_back(num_unread, i + 1)
                active.is_done = True
            active.tokens.append(response.token)
            active.answer.put(response)
            if is_last:
                return num_unread
        return 0

    def _is_overdue(self, answer: AnswerStream) -> bool:
        """Whether an answer has used up its time and keeps another from beginning."""
        flags = self._provider.cli_args
        is_late = time.monotonic() - answer.began >= flags.time_limit
        is_full = len(self._active) >= flags.decode_concurrency
        return is_late and is_full and self._generator.has_waiting()

    def _end(self, active: ActiveRequest) -> None:
        """End a complete answer: keep its caches, then tell its client."""
        self._active.remove(active)
        if active.is_drafted:
            self._generator.metrics.count_drafts(active.request.stats)
        with on_error(partial(logging.warning, "The caches of an answer could not be kept (%s).")):
            active.file()
        active.keep_answer()
        active.answer.put(None)

    def _fail(self, active: ActiveRequest, error: Exception) -> None:
        """Send a client the error, or just the end if its answer was complete."""
        self._active = [other for other in self._active if other is not active]
        active.answer.put(None if active.is_done else error)

    def _active_of(self, request: Request) -> ActiveRequest:
        return next(active for active in self._active if active.request is request)

    def _recover(self, key: object, group: Group, error: Exception) -> None:
        """Recover from a failed round: a request that ran by itself gets the error.

        Requests that shared the round continue, each by itself, so that only the cause fails.
        """
        del self._groups[key]
        all_active = [self._active_of(request) for request in group.requests]
        for active in all_active:
            if active.is_done or len(all_active) == 1:
                self._fail(active, error)
                continue
            with on_error(partial(self._fail, active)):
                active.is_single = True
                active.begin_again()
                self._reading.append(active)


class PairGenerator(ResponseGenerator):
    """mlx-lm's response generator for the clients' threads, with a loop that drafts."""

    model_provider: PairProvider
    prompt_cache: PairCache

    def __init__(self, provider: PairProvider, prompt_cache: PairCache):
        self.metrics = Metrics(prompt_cache.counts, provider.answers)
        self.open_answers: set[AnswerStream] = set()
        self.large_requests = Lock()  # hostile ones together would leave no time to generate
        self.is_hurried = Event()  # caches are no longer written to files at the end
        super().__init__(provider, prompt_cache)

    def stop(self, wait: Callable[[float], bool]) -> None:
        """End the generating thread; ``wait`` waits for a signal and tells whether to hurry."""
        self._stop = True
        while self.generation_available():
            if wait(IDLE):
                self.is_hurried.set()
        self.stop_and_join()

    def check_loaded(self) -> None:
        """Raise the error of opening the pair, if there was one."""
        if self.model_provider.error is not None:
            raise self.model_provider.error
        if self.model_provider.model is None:
            raise ValueError("the pair could not be loaded: the reason stands above.")

    def submit(
        self,
        answer: AnswerStream,
        request: Tokenized,
        args: PairArguments,
        behind: AnswerStream | None = None,
    ) -> None:
        """Queue a request. Raises RequestError for an unusable constraint, or if the thread ended.

        ``behind``: an earlier answer to the same prompt, for which the prompt is read first.
        """
        self.check_alive()
        if args.constraint is not None:
            with as_request_errors():
                args.grammar = make_grammar(args.constraint, self.model_provider.tokenizer)
        self.open_answers.add(answer)
        queue = partial(self.requests.put, (answer, request, args))
        if behind is None:
            queue()
        else:
            behind.when_read(queue)

    def check_alive(self) -> None:
        """Raise RequestError if the generating thread has ended."""
        if self._stop or not self._generation_thread.is_alive():
            raise RequestError("the server is stopping or has failed.", 503)

    def count_open(self) -> tuple[int, int]:
        """Count the requests that wait, and those being answered."""
        answers = list(self.open_answers)
        num_waiting = sum(answer.is_waiting for answer in answers)
        return num_waiting, len(answers) - num_waiting

    def has_waiting(self) -> bool:
        """Whether a request waits whose client is still there."""
        with self.requests.mutex:
            return any(not answer.is_over for answer, _, _ in self.requests.queue)

    def _generate(self) -> None:
        """Run the generating thread; no other thread computes."""
        provider = self.model_provider
        provider.load_default()
        if provider.model is not None:
            schedule = Schedule(self)
            if self.prompt_cache.folder is not None:
                self.prompt_cache.folder.pair = provider.describe()
            try:
                while self._take_in(schedule):
                    schedule.step()
                    if schedule.is_idle:
                        self.prompt_cache.save_next()
            except (RuntimeError, ValueError) as err:
                if not is_lost(err):
                    provider.error = err
                    raise
                self._generation_failed = True
            schedule.close()
            self.prompt_cache.save_all(self.is_hurried.is_set)
            del schedule
        # What was made in this thread has to go in it.
        provider.reset()
        del self.prompt_cache
        gc.collect()

    def _take_in(self, schedule: Schedule) -> bool:
        """Begin the requests there is room for, and mark those to end; whether to go on."""
        answers: list[AnswerStream] = []
        orders = self._read_orders(schedule, answers) if is_first() else None
        sent = None if orders == Orders([], [], [], False) else orders
        orders = share(sent) if num_ranks() > 1 else sent
        if orders is None:
            return True
        schedule.mark(orders)
        for i, (tokenized, args) in enumerate(orders.requests):
            if not is_first():
                answers.append(AnswerStream(lambda answer: None))
            with on_error(answers[i].put):
                schedule.begin(answers[i], tokenized, args)
        return not orders.is_stopping

    def _read_orders(self, schedule: Schedule, answers: list[AnswerStream]) -> Orders:
        """Take as many requests as there is room for; wait for one while the schedule is idle.

        Their ``answers`` are added to the list.
        """
        requests = []
        for answer, tokenized, args in islice(self._waiting(schedule.is_idle), schedule.room):
            answers.append(answer)
            if num_ranks() > 1:  # grammars cannot be sent, and chance must be the same for all
                seed = randbits(63) if args.seed is None else args.seed
                args = replace(args, grammar=None, seed=seed)
            requests.append((tokenized, args))
        return Orders(requests, *schedule.see_clients(), self._stop)

    def _waiting(self, is_idle: bool) -> Iterator[tuple[AnswerStream, Tokenized, PairArguments]]:
        """Requests of clients that are still there; the first is waited for if it ``is_idle``."""
        while True:
            try:
                asked = self.requests.get(block=is_idle, timeout=IDLE)
            except Empty:
                return
            if not asked[0].is_over:
                is_idle = False
                yield asked
