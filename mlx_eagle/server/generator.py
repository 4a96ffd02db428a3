"""The thread that generates: drafts while a request is alone, mlx-lm's batches when it is not.

Here is the order of requests, and what becomes of their caches. HTTP is in ``handler.py``.
"""

import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from threading import Lock

import mlx.core as mx
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import can_trim_prompt_cache
from mlx_lm.server import (
    CompletionRequest,
    GenerationContext,
    ResponseGenerator,
)
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..commands.flags import draft_options
from ..decoding.stats import Stats
from ..drafters.base import Drafter
from ..generate import stream_generate
from .answer import Answer, RequestError, State, Told
from .body import PairArguments
from .caches import Caches, PairCache, prepare
from .drafted import Origins, message
from .metrics import Metrics
from .prompt import LONG, TEMPLATE_ERRORS, Tokenized, check_prompt, check_text_length, render
from .provider import PairProvider
from .sampling import make_processors, make_sampler

LARGE = 2**16  # bytes of a body; larger prompts are tokenized one after the other
TIME_LIMIT = 600.0  # seconds


@dataclass
class Sequence:
    """A sequence that is decoded alone: ``tokens`` are the prompt and what was generated.

    ``num_cached`` of them were in ``caches`` when its decoding began; all of them are at its end.
    """

    tokens: list[int]
    num_cached: int
    caches: Caches


class SomebodyWaits(Exception):
    """Another request has come while the cost of rounds was measured."""


class PairGenerator(ResponseGenerator):
    """mlx-lm's generator of responses, for a pair.

    A request that is alone is drafted. As soon as another comes, it goes on in a batch of
    mlx-lm's, from the token where it is and without drafts, and the other joins it there.
    Where batches are impossible (sampling with a seed, a quantized cache, a cache that cannot be
    merged or trimmed, a decode concurrency of 1), requests are served in turn.
    """

    model_provider: PairProvider
    prompt_cache: PairCache

    def __init__(self, provider: PairProvider, prompt_cache: PairCache):
        self.metrics = Metrics()
        self._recalibrates = provider.cli_args.recalibrate
        self._open: dict[Answer, tuple[Tokenized, PairArguments]] = {}
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
                tokens, segments, kinds, initial_state, _ = super()._tokenize(
                    tokenizer, request, args
                )
                check_prompt(tokens, args, provider.vocab_size, provider.context)
            except ValueError as err:
                raise RequestError(str(err)) from err
            except TEMPLATE_ERRORS as err:
                raise RequestError(
                    f"the chat template cannot take these messages ({type(err).__name__}: {err})."
                ) from err
        return Tokenized.of(tokens, segments, kinds, initial_state)

    def submit(self, request: Tokenized, args: PairArguments) -> Answer:
        """Queue a request; raises RequestError where nobody would answer it."""
        self.check_alive()
        answer = Answer(self._close, self._is_overdue)
        self._open[answer] = request, args
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

    def _close(self, answer: Answer) -> None:
        self._open.pop(answer, None)

    def _is_overdue(self, answer: Answer) -> bool:
        """Whether an answer has had its time, and another cannot begin because of it."""
        if time.monotonic() - answer.began < self.cli_args.time_limit:
            return False
        return any(other.state is State.WAITING for other in list(self._open))

    def _run_generate(self) -> None:
        super()._run_generate()
        # An error in a batch ends mlx-lm's loop. Those who were in it go on, each alone, so that
        # it fails those only that it is to blame on; those who wait and the server go on too.
        while self._generation_failed and not self._stop and self.model_provider.model is not None:
            with self.requests.mutex:
                queued = {answer for answer, _, _ in self.requests.queue}
            for answer, (request, args) in list(self._open.items()):
                if answer not in queued:
                    self._go_on(answer, request, replace(args, is_alone=True))
            self._generation_failed = False
            super()._run_generate()

    def _go_on(self, answer: Answer, request: Tokenized, args: PairArguments) -> None:
        """Queue a request again, with what was generated for it, to be decoded in another way."""
        tokenizer = self.model_provider.tokenizer
        stop_sequences, _ = self._machines(args)
        answer.move(tokenizer.detokenizer, stop_sequences.matcher())
        again = request.going_on(answer.tokens)
        num_left = args.max_tokens - len(answer.tokens)
        self.requests.put((answer, again, replace(args, max_tokens=num_left)))

    def _machines(self, args: PairArguments) -> tuple:
        """Stop sequences, and mlx-lm's machine that tells reasoning, tools and text apart."""
        provider = self.model_provider
        return self._make_state_machine(provider.model_key, provider.tokenizer, args.stop_words)

    def _next_request(self, timeout: float | None = None) -> tuple | None:
        request = super()._next_request(timeout)
        return None if request is None or request[0].is_over else request

    def _tokenize(
        self, tokenizer: TokenizerWrapper, request: Tokenized, args: PairArguments
    ) -> tuple:
        if args.tree is not None and self._drafter(args) is not None:
            self.model_provider.check_tree(args.tree)
        return request.parts()

    def _drafter(self, args: PairArguments) -> Drafter | None:
        return self.model_provider.draft_model if args.num_draft_tokens != 0 else None

    def _could_batch(self, args: PairArguments) -> bool:
        """Whether a request may be decoded in a batch with others."""
        may_share = not args.is_alone and self.cli_args.decode_concurrency > 1
        return may_share and super()._is_batchable(args)

    def _is_batchable(self, args: PairArguments) -> bool:
        if self._drafter(args) is None and not args.is_alone:
            return super()._is_batchable(args)
        return self._could_batch(args) and len(self._open) > 1

    def _waiting(self) -> list[PairArguments]:
        """What those who wait ask for, the first first."""
        with self.requests.mutex:
            return [args for answer, _, args in self.requests.queue if not answer.is_over]

    def _should_give_way(self, args: PairArguments, caches: Caches) -> bool:
        """Whether a lone request should go on in a batch, with the one that waits."""
        if not self._could_batch(args) or not can_trim_prompt_cache(caches.target):
            return False
        waiting = self._waiting()
        return bool(waiting) and self._could_batch(waiting[0])

    def _serve_single(self, request: tuple, stream: mx.Stream) -> None:
        answer, request, args = request
        with Told(answer):
            self._serve_alone(answer, request, args, stream)

    def _serve_alone(
        self,
        answer: Answer,
        request: Tokenized,
        args: PairArguments,
        stream: mx.Stream,
        may_measure: bool = True,
    ) -> None:
        """Answer one request, or begin to, while no other is being answered.

        ``may_measure``: before, what rounds cost is measured, if --recalibrate asks for it.
        """
        provider, tokenizer = self.model_provider, self.model_provider.tokenizer
        prompt, _, _, initial_state, _ = self._tokenize(tokenizer, request, args)
        stop_sequences, text_machine = self._machines(args)
        sequence = self._sequence(prompt, args, stream)
        context = GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text_machine,
            initial_state=initial_state,
            prompt=prompt,
            prompt_cache_count=sequence.num_cached,
        )
        answer.put(context)
        try:
            matcher = stop_sequences.matcher()
            gives_way = self._stream(answer, args, stream, sequence, matcher, may_measure)
        except SomebodyWaits:
            # Its caches hold the prompt but the last token; the drafter's part may lack some.
            if len(prompt) > 1:
                caches = Caches(sequence.caches.target)
                self.prompt_cache.insert_cache(provider.model_key, prompt[:-1], caches)
            self._serve_alone(answer, request, args, stream, may_measure=False)
            return
        self.prompt_cache.insert_cache(provider.model_key, sequence.tokens, sequence.caches)
        if not gives_way:
            answer.put(None)
        elif (asked := self._open.get(answer)) is not None:  # the client has not left
            self._go_on(answer, *asked)

    def _sequence(self, prompt: list[int], args: PairArguments, stream: mx.Stream) -> Sequence:
        """The prompt, on the caches of what is known of it."""
        provider = self.model_provider
        self._log_cache_stats()
        caches, rest = None, prompt
        if args.reuse_caches:
            caches, rest = self.prompt_cache.fetch(provider.model_key, prompt)
        num_cached = len(prompt) - len(rest)
        with mx.stream(stream):
            caches = prepare(caches, provider.model, self._drafter(args), prompt[:num_cached])
        return Sequence(list(prompt), num_cached, caches)

    def _stream(
        self,
        answer: Answer,
        args: PairArguments,
        stream: mx.Stream,
        sequence: Sequence,
        matcher: StopSequences.Matcher,
        may_measure: bool,
    ) -> bool:
        """Generate into ``answer`` until it ends or gives way; whether it gave way.

        Raises SomebodyWaits where it began to measure what rounds cost, and another has come.
        """
        tokenizer, drafter = self.model_provider.tokenizer, self._drafter(args)
        drafting = draft_options(args, drafter, may_measure and self._recalibrates)
        if drafter is not None:
            answer.stats.append(Stats())  # running: the client may read them at its last token
            drafting |= self._calibrating(answer) | {"stats": answer.stats[-1]}
        responses = stream_generate(
            self.model_provider.model,
            tokenizer,
            sequence.tokens[sequence.num_cached :],
            max_tokens=args.max_tokens,
            stream=stream,
            sampler=make_sampler(args, tokenizer),
            logits_processors=make_processors(args, sequence.tokens[: sequence.num_cached]),
            prompt_cache=sequence.caches,
            prompt_progress_callback=self._progress(answer),
            prefill_step_size=self.cli_args.prefill_step_size,
            kv_bits=self.cli_args.kv_bits,
            kv_group_size=self.cli_args.kv_group_size,
            quantized_kv_start=self.cli_args.quantized_kv_start,
            **drafting,
        )
        gives_way, origins = False, Origins(len(answer.tokens))
        with closing(responses):  # leaves in the caches what was yielded, and no more
            for response in responses:
                sequence.tokens.append(response.token)
                is_stop = matcher.advance(response.token)
                finish_reason = "stop" if is_stop else response.finish_reason
                origin = origins.of(response)
                answer.put(message(response, finish_reason, args, tokenizer, origin))
                if finish_reason is not None or answer.is_over:
                    break
                self._check_wanted(answer)
                gives_way = self._should_give_way(args, sequence.caches)
                if gives_way:
                    break
        if drafter is not None:
            self.metrics.count_drafts(response.stats)
            if response.stats.left_drafter:
                # The drafter's part lacks what was generated.
                sequence.caches = Caches(sequence.caches.target)
        return gives_way

    def _progress(self, answer: Answer) -> Callable[[int, int], None]:
        def progress(num_done: int, num_tokens: int) -> None:
            self._check_wanted(answer)
            answer.put((num_done, num_tokens))

        return progress

    def _calibrating(self, answer: Answer) -> dict[str, Callable]:
        """Measuring what rounds cost takes seconds: it stops as soon as anybody waits."""

        def calibrating(num_done: int, num_groups: int) -> None:
            self._check_wanted(answer)
            if num_done < num_groups and self._waiting():
                raise SomebodyWaits
            self._recalibrates = num_done < num_groups  # once is enough

        return {"calibration_progress_callback": calibrating}

    def _check_wanted(self, answer: Answer) -> None:
        if answer.is_over or self._stop:
            raise RequestError("the server is stopping.", 503)
