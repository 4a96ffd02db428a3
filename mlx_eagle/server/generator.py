"""The thread that generates: drafts while a request is alone, mlx-lm's batches when it is not.

Knows the order of requests and what becomes of their caches; knows nothing of HTTP.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache
from mlx_lm.server import (
    CompletionRequest,
    GenerationContext,
    Response,
    ResponseGenerator,
    _format_top_logprobs,
    _make_logits_processors,
    _make_sampler,
)

from ..commands.flags import draft_options
from ..decoding.accept import LogitsProcessor, Sampler
from ..decoding.sampling import Sampling
from ..drafters.base import Drafter
from ..drafters.load import find_embedding
from ..generate import stream_generate
from .answer import POLL, Answer, Continued, RequestError, Tail, Told
from .body import PairArguments, check_prompt
from .caches import Caches, PairCache, prepare
from .provider import PairProvider


@dataclass
class Text:
    """One text in progress: ``tokens`` are the prompt and what has come of it, all in ``caches``.

    ``num_prompt`` is the length of the prompt, of which ``num_cached`` tokens were in
    ``caches`` before.
    """

    tokens: list[int]
    num_prompt: int
    num_cached: int
    caches: Caches

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class PairGenerator(ResponseGenerator):
    """mlx-lm's generator of responses, for a pair.

    A request that is alone is drafted. As soon as another comes, it goes on in a batch of
    mlx-lm's, from the token where it is and without drafts, and the other joins it there.
    Where batches are impossible (a seed, a quantized cache, a cache that cannot be merged or
    trimmed, a decode concurrency of 1), requests are served in turn.
    """

    model_provider: PairProvider
    prompt_cache: PairCache

    def __init__(self, provider: PairProvider, prompt_cache: PairCache):
        self._open: set[Answer] = set()
        super().__init__(provider, prompt_cache)

    def wait_until_loaded(self) -> None:
        """Raises what is wrong with the pair's names, if something is."""
        while not self.model_provider.loaded.wait(POLL):
            pass  # polled, so that a Ctrl-C is heard
        if self.model_provider.error is not None:
            raise self.model_provider.error
        if self.model_provider.model is None:
            raise ValueError("the pair could not be loaded: the reason stands above.")

    def submit(self, request: CompletionRequest, args: PairArguments) -> Answer:
        """Queue a request; raises RequestError where nobody would answer it."""
        self.check_alive()
        answer = Answer(on_end=self._open.discard)
        self._open.add(answer)
        self.requests.put((answer, request, args))
        return answer

    def generate(
        self,
        request: CompletionRequest,
        generation_args: PairArguments,
        progress_callback: Callable[[int, int], None] | None = None,
    ) -> tuple:
        """See mlx-lm's."""
        answer = self.submit(request, generation_args)
        context = answer.context(self.check_alive)
        return context, answer.responses(self.check_alive, progress_callback or (lambda *_: None))

    def check_alive(self) -> None:
        """Raise RequestError where the thread is gone, and whoever waits for it waits in vain."""
        if not self._generation_thread.is_alive():
            raise RequestError("the server is stopping or has failed.", 503)

    def _run_generate(self) -> None:
        super()._run_generate()
        # An error in a batch ends mlx-lm's loop. It costs those in the batch their answers, but
        # not those who wait, nor the server.
        while self._generation_failed and not self._stop and self.model_provider.model is not None:
            with self.requests.mutex:
                waiting = {answer for answer, _, _ in self.requests.queue}
            for answer in self._open - waiting:
                answer.put(RuntimeError("the batch of this request failed; see the server's log."))
            self._generation_failed = False
            super()._run_generate()

    def _next_request(self, timeout: float | None = None) -> tuple | None:
        request = super()._next_request(timeout)
        return None if request is None or request[0].is_abandoned else request

    def _tokenize(
        self, tokenizer, request: CompletionRequest, args: PairArguments
    ) -> tuple:
        if isinstance(request, Continued):
            return request.tokens, [request.tokens], ["assistant"], "normal", None
        parts = super()._tokenize(tokenizer, request, args)
        model = self.model_provider.model
        check_prompt(parts[0], args, find_embedding(model)[1], model)
        if args.tree is not None and self._drafter(args) is not None:
            self.model_provider.check_tree(args.tree)
        return parts

    def _drafter(self, args: PairArguments) -> Drafter | None:
        return self.model_provider.draft_model if args.num_draft_tokens != 0 else None

    def _could_batch(self, args: PairArguments) -> bool:
        """Whether a request may share a batch, if there is another to share it with."""
        return super()._is_batchable(args) and self.cli_args.decode_concurrency > 1

    def _is_batchable(self, args: PairArguments) -> bool:
        if self._drafter(args) is None:
            return super()._is_batchable(args)
        return self._could_batch(args) and len(self._open) > 1

    def _should_give_way(self, args: PairArguments, caches: Caches) -> bool:
        """Whether a lone request should go on in a batch, with the one that waits."""
        if not self._could_batch(args) or not can_trim_prompt_cache(caches.target):
            return False
        with self.requests.mutex:
            waiting = [item for item in self.requests.queue if not item[0].is_abandoned]
        return bool(waiting) and self._could_batch(waiting[0][2])

    def _serve_single(self, request: tuple, stream: mx.Stream) -> None:
        answer, request, args = request
        with Told(answer):
            self._serve_alone(answer, request, args, stream)

    def _serve_alone(
        self,
        answer: Answer,
        request: CompletionRequest,
        args: PairArguments,
        stream: mx.Stream,
    ) -> None:
        """Answer one request, or begin to, while no other is being answered."""
        provider, tokenizer = self.model_provider, self.model_provider.tokenizer
        prompt, _, _, initial_state, _ = self._tokenize(tokenizer, request, args)
        stop_sequences, text_machine = self._make_state_machine(
            provider.model_key, tokenizer, args.stop_words
        )
        self._log_cache_stats()
        caches, rest = self.prompt_cache.fetch(provider.model_key, prompt)
        num_cached = len(prompt) - len(rest)
        with mx.stream(stream):
            caches = prepare(caches, provider.model, self._drafter(args), prompt[:num_cached])
        context = GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text_machine,
            initial_state=initial_state,
            prompt=prompt,
            prompt_cache_count=num_cached,
        )
        answer.put(context)
        text = Text(list(prompt), len(prompt), num_cached, caches)
        matcher = stop_sequences.matcher()
        gives_way = self._stream(answer, args, stream, text, matcher)
        self.prompt_cache.insert_cache(provider.model_key, text.tokens, text.caches)
        if not gives_way:
            answer.put(None)
            return
        if answer.tail is None:
            answer.tail = Tail.after(text.generated, tokenizer.detokenizer, matcher)
        args = replace(args, max_tokens=args.max_tokens - len(text.generated))
        again = Continued("text", "", [], None, None, tokens=text.tokens)
        self.requests.put((answer, again, args))

    def _stream(
        self, answer: Answer, args: PairArguments, stream: mx.Stream, text: Text, matcher
    ) -> bool:
        """Generate into ``answer`` until it ends or gives way; whether it gave way."""
        tokenizer, drafter = self.model_provider.tokenizer, self._drafter(args)

        def progress(num_done: int, num_tokens: int) -> None:
            self._check_wanted(answer)
            answer.put((num_done, num_tokens))

        responses = stream_generate(
            self.model_provider.model,
            tokenizer,
            text.tokens[text.num_cached :],
            max_tokens=args.max_tokens,
            stream=stream,
            sampler=_sampler(args, tokenizer),
            logits_processors=_processors(args, text.tokens[: text.num_cached]),
            prompt_cache=text.caches,
            prompt_progress_callback=progress,
            prefill_step_size=self.cli_args.prefill_step_size,
            kv_bits=self.cli_args.kv_bits,
            kv_group_size=self.cli_args.kv_group_size,
            quantized_kv_start=self.cli_args.quantized_kv_start,
            **draft_options(args, drafter),
        )
        gives_way = False
        with closing(responses):  # leaves in the caches what was yielded, and no more
            for response in responses:
                text.tokens.append(response.token)
                is_stop = matcher.advance(response.token)
                finish_reason = "stop" if is_stop else response.finish_reason
                answer.put(_message(response, finish_reason, args, tokenizer))
                if finish_reason is not None or answer.is_abandoned:
                    break
                self._check_wanted(answer)
                gives_way = self._should_give_way(args, text.caches)
                if gives_way:
                    break
        if drafter is not None:
            answer.stats.append(response.stats)
            if response.stats.left_drafter:
                text.caches = Caches(text.caches.target)  # its part lacks what was generated
        return gives_way

    def _check_wanted(self, answer: Answer) -> None:
        if answer.is_abandoned or self._stop:
            raise RequestError("the server is stopping.", 503)


def _message(
    response, finish_reason: str | None, args: PairArguments, tokenizer
) -> Response:
    """A response as mlx-lm's handlers take it; the device is asked for no more than they show."""
    return Response(
        response.text,
        response.token,
        response.logprobs[response.token].item() if args.logprobs else 0.0,
        finish_reason,
        _format_top_logprobs(response.logprobs, args.top_logprobs, tokenizer),
    )


def _sampler(args: PairArguments, tokenizer) -> Sampler | None:
    """None for greedy, ours where it can be coupled with a draft's, else mlx-lm's."""
    options = args.sampling
    if options.temperature == 0:
        return None
    if options.xtc_probability > 0 or args.acceptance == "match":
        if args.seed is not None:
            mx.random.seed(args.seed)
        return _make_sampler(args, tokenizer)
    return Sampling(
        temp=options.temperature,
        top_p=options.top_p,
        min_p=options.min_p,
        top_k=options.top_k,
        seed=args.seed,
    )


def _processors(args: PairArguments, before: list[int]) -> list[LogitsProcessor]:
    """mlx-lm's, which also see the tokens that the cache holds, as they do in its batches."""
    processors = _make_logits_processors(args)
    if not before:
        return processors
    cached = mx.array(before)

    def seeing_all(processor: LogitsProcessor) -> LogitsProcessor:
        return lambda tokens, logits: processor(mx.concatenate([cached, tokens]), logits)

    return [seeing_all(processor) for processor in processors]
