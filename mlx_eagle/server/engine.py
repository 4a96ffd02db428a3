"""The thread that generates, as the threads of the clients see it.

What it does for whom and when is in ``schedule.py``; HTTP is in ``handler.py``.
"""

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from threading import Lock

import mlx.core as mx
from mlx_lm.server import CompletionRequest, GenerationContext, ResponseGenerator

from .active_requests import Opener
from .answers import Answer, Caught, RequestError, State
from .body import PairArguments
from .caches import PairCache
from .metrics import Metrics
from .prompt import LONG, TEMPLATE_ERRORS, Tokenized, check_prompt, check_text_length, render
from .provider import PairProvider
from .schedule import Schedule

LARGE = 2**16  # bytes of a body; larger prompts are tokenized one after the other
TIME_LIMIT = 600.0  # seconds
IDLE = 0.1  # seconds between looks at whether to stop, where nobody asks


class PairGenerator(ResponseGenerator):
    """mlx-lm's generator of responses, with a loop of its own, which drafts for all."""

    model_provider: PairProvider
    prompt_cache: PairCache

    def __init__(self, provider: PairProvider, prompt_cache: PairCache):
        self.metrics = Metrics()
        self._open: set[Answer] = set()
        self._schedule: Schedule | None = None
        self._large_prompts = Lock()
        super().__init__(provider, prompt_cache)

    def is_loaded(self) -> bool:
        """Whether the pair was loaded, or never will be."""
        return self.model_provider.loaded.is_set()

    def check_loaded(self) -> None:
        """Raise what is wrong with the pair's names, if something is."""
        if self.model_provider.error is not None:
            raise self.model_provider.error
        if self.model_provider.model is None:
            raise ValueError("the pair could not be loaded: the reason stands above.")

    def read_prompt(
        self,
        request: CompletionRequest,
        args: PairArguments,
        num_bytes: int,
        check: Callable[[], None],
    ) -> Tokenized:
        """The tokens of a request whose body has so many bytes; in the thread of its client.

        A prompt that is far too long is refused before all of it was tokenized. ``check`` is
        called on the way and may raise. Raises RequestError.
        """
        with self._large_prompts if num_bytes > LARGE else nullcontext():
            self.check_alive()
            provider, tokenizer = self.model_provider, self.model_provider.tokenizer
            try:
                if provider.context is not None and num_bytes > LONG * provider.context:
                    template_args = self.cli_args.chat_template_args | (
                        args.chat_template_kwargs or {}
                    )
                    text = render(request, tokenizer, template_args)
                    check_text_length(text, tokenizer.encode, provider.context, check)
                tokens, _, _, initial_state, _ = super()._tokenize(tokenizer, request, args)
                check_prompt(tokens, args, provider.vocab_size, provider.context)
            except ValueError as err:
                raise RequestError(str(err)) from err
            except TEMPLATE_ERRORS as err:
                raise RequestError(
                    f"the chat template cannot take these messages ({type(err).__name__}: {err})."
                ) from err
        return Tokenized(tokens, initial_state)

    def submit(self, request: Tokenized, args: PairArguments) -> Answer:
        """Queue a request; raises RequestError where nobody would answer it."""
        self.check_alive()
        answer = Answer(self._open.discard, self._is_overdue)
        self._open.add(answer)
        self.requests.put((answer, request, args))
        return answer

    def check_alive(self) -> None:
        """Raise RequestError where the thread is gone, and whoever waits for it waits in vain."""
        if self._stop or not self._generation_thread.is_alive():
            raise RequestError("the server is stopping or has failed.", 503)

    def count_open(self) -> tuple[int, int]:
        """How many requests wait, and how many are being answered."""
        states = [answer.state for answer in list(self._open)]
        num_waiting = states.count(State.WAITING)
        return num_waiting, len(states) - num_waiting

    @property
    def is_stopping(self) -> bool:
        return self._stop

    def is_anybody_waiting(self) -> bool:
        """Whether a request was not begun yet whose client is still there."""
        with self.requests.mutex:
            return any(not answer.is_over for answer, _, _ in self.requests.queue)

    def _is_overdue(self, answer: Answer) -> bool:
        """Whether an answer has had its time, and another cannot begin because of it."""
        if time.monotonic() - answer.began < self.cli_args.time_limit:
            return False
        is_full = self._schedule is not None and self._schedule.is_full
        return is_full and self.is_anybody_waiting()

    def _generate(self) -> None:
        """All that the generating thread does; nothing else in this process computes."""
        provider = self.model_provider
        provider.load_default()
        if provider.model is not None:
            stream = mx.default_stream(mx.default_device())
            opener = Opener(provider, self.prompt_cache, stream)
            schedule = Schedule(provider, opener, self.metrics, stream, self)
            self._schedule = schedule
            while not self._stop:
                self._take_in(schedule, opener)
                schedule.step()
            schedule.close()
            del schedule, opener
        # What was made in this thread has to go in it.
        self._schedule = None
        provider.reset()
        del self.prompt_cache
        gc.collect()

    def _take_in(self, schedule: Schedule, opener: Opener) -> None:
        """Begin as many requests as there is room for; wait for one where there is none."""
        while schedule.has_room:
            asked = self._next_request(IDLE if schedule.is_idle else None)
            if asked is None:
                return
            answer, tokenized, args = asked
            if answer.is_over:
                continue
            with Caught() as caught:
                self._begin(schedule, opener, answer, tokenized, args)
            if caught.error is not None:
                answer.put(caught.error)

    def _begin(
        self,
        schedule: Schedule,
        opener: Opener,
        answer: Answer,
        tokenized: Tokenized,
        args: PairArguments,
    ) -> None:
        """Answer a request from now on. Raises ValueError for what the pair cannot do."""
        provider, tokenizer = self.model_provider, self.model_provider.tokenizer
        stop_sequences, text_machine = self._make_state_machine(
            provider.model_key, tokenizer, args.stop_words
        )
        self._log_cache_stats()
        served = opener.open(answer, tokenized.tokens, args, stop_sequences)
        context = GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text_machine,
            initial_state=tokenized.initial_state,
            prompt=tokenized.tokens,
            prompt_cache_count=served.num_cached,
        )
        answer.put(context)
        schedule.add(served)
