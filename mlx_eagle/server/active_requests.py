"""Requests in the generating thread: begun on cached prefixes, sampled and written."""

import random
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise

import mlx.core as mx
from mlx_lm.generate import make_stop_sequences
from mlx_lm.server import _make_logits_processors
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper

from ..batch.group import RoundOutput
from ..batch.requests import Request, restore_caches
from ..decoding.accept import TokenLogprobs
from ..decoding.decoder import Decoder, Limits
from ..decoding.processors import LogitsProcessor, is_pure
from ..decoding.sampling import Sampler, Sampling, SamplingOptions, sampler_for
from ..decoding.setup import begin_drafter, open_decoder, read_tree
from ..drafters.base import NullDrafter
from ..target_model.cache_view import close_windows
from ..target_model.rollback import CacheQuantization
from .answer_stream import AnswerStream, PairResponse, TokenOrigin
from .body import PairArguments
from .cache_files import Caches
from .caches import PairCache, prepare, without_last
from .grammars import make_grammar
from .prompt import Tokenized
from .provider import PairProvider

NOT_SHOWN: TokenLogprobs = 0.0, ()
CONTINUED = 8  # tokens of a prompt that its continuation is spelled behind


class ActiveRequest:
    """A request that is being answered.

    ``num_cached`` tokens of its prompt were in caches; of the ``num_uncached`` others ``num_read``
    have been read, and each step of ``chunks`` reads some. ``is_single``: a round that it shared
    has failed, so it shares none any more. ``tokens`` were sent. Its client ``has_left``, or it
    ``is_overdue``; it ``is_done`` when all was said that will be.
    """

    chunks: Iterator[int]
    num_cached: int
    num_uncached: int
    num_read: int

    def __init__(
        self,
        provider: PairProvider,
        prompt_cache: PairCache,
        stream: mx.Stream,
        answer: AnswerStream,
        tokenized: Tokenized,
        args: PairArguments,
    ):
        """Begin it, ready to read its prompt. Raises ValueError where the pair cannot do it."""
        self._provider = provider
        self._prompt_cache = prompt_cache
        self._stream = stream
        self.answer = answer
        self.args = args
        self.is_drafted = provider.draft_model is not None and args.num_draft_tokens != 0
        if self.is_drafted and args.tree is not None:
            provider.check_tree(args.tree)
        self.tree = read_tree(args.tree) if self.is_drafted else None
        self.writer = ResponseWriter(provider.tokenizer, args, tokenized.tokens)
        self.is_single = self.is_done = self.has_left = self.is_overdue = False
        self.tokens: list[int] = []
        self._ends = tokenized.ends if provider.needs_snapshots else {}
        limits = Limits(args.max_tokens, provider.tokenizer.eos_token_ids)
        self.request = Request(tokenized.tokens, limits, [])
        if self.is_drafted:
            answer.stats = self.request.stats
        self._begin()

    @property
    def decoder(self) -> Decoder:
        return self.request.decoder

    def begin_again(self) -> None:
        """Begin again behind the tokens already sent; the caches are computed anew."""
        old = self.request
        said = list(self.tokens)
        self.request = Request(old.prompt, old.limits, [], stats=old.stats, tokens=said)
        self._begin()
        self.decoder.num_emitted = len(said)

    def _begin(self) -> None:
        provider = self._provider
        args = self.args
        request = self.request
        text = request.prompt + request.tokens
        drafter = provider.draft_model if self.is_drafted else None
        copies = None if drafter is None else drafter.copies
        caches = None
        rest = text
        if args.reuse_caches:
            caches, rest = self._prompt_cache.fetch(text, args.cache_salt)
        known = text[: len(text) - len(rest)]
        self.num_cached = len(known)
        self.num_uncached = len(rest)
        self.num_read = 0
        flags = provider.cli_args
        processors = make_processors(args, provider.tokenizer, known)
        if args.constraint is not None:
            grammar = args.grammar or make_grammar(args.constraint, provider.tokenizer)
            processors.insert(0, grammar.behind(known, len(request.tokens)))
        with mx.stream(self._stream):
            caches = prepare(caches, provider.model, drafter, known)
        request.stats.start()
        request.decoder = open_decoder(
            provider.model,
            NullDrafter() if drafter is None else begin_drafter(drafter, caches.draft),
            caches.target,
            CacheQuantization(flags.kv_bits, flags.kv_group_size, flags.quantized_kv_start),
            self._stream,
            sampler=make_sampler(args, provider.tokenizer),
            logits_processors=processors,
            acceptance=args.acceptance if self.is_drafted else None,
            tree=self.tree,
            copies=None if copies is None else copies.begin(known, rest, args.scope),
            exact=args.exact,
        )
        request.decoder.discards_features = drafter is None
        if args.logprobs or args.top_logprobs > 0:
            request.decoder.num_top = max(0, args.top_logprobs)
        self.chunks = self._read(known, rest)

    def _read(self, known: list[int], rest: list[int]) -> Iterator[int]:
        """Read ``rest`` except its last token; file the caches where ``Tokenized.ends`` says."""
        decoder = self.decoder
        step_size = self._provider.cli_args.prefill_step_size
        prompt = mx.array(rest)
        last = len(rest) - 1
        ends = {end - len(known): whose for end, whose in self._ends.items()}
        for start, end in pairwise([0, *sorted(end for end in ends if 0 < end < last), last]):
            for done in decoder.prefill_chunks(prompt[start : end + 1], step_size):
                if start + done in ends:
                    self.file_copy(known + rest[: start + done], ends[start + done])
                decoder.history = prompt  # not only this part of it
                yield start + done

    def file_copy(self, text: list[int], whose: str) -> None:
        """File a copy of the caches of ``text``, which remain in use."""
        copies = deepcopy(self.decoder.cache + self.decoder.drafter.cache)
        close_windows(copies)
        self._file(text, Caches(copies, len(self.decoder.cache)), whose)

    def _file(self, text: list[int], caches: Caches, whose: str) -> None:
        salt = self.args.cache_salt
        self._prompt_cache.insert_cache(text, caches, cache_type=whose, salt=salt)

    def file(self) -> None:
        """Keep the caches at the end, for requests that continue the text."""
        request = self.request
        num_target = len(self.decoder.cache)
        text = request.prompt + request.tokens + request.tokens_after_leave
        caches = None if request.cache else without_last(request)
        if caches is not None:
            text = text[:-1]
        else:
            if not request.cache:
                restore_caches(request)
            caches = Caches(request.cache, num_target)
        # What was decoded without the drafter is not in its part of the caches.
        caches = Caches(caches.target) if self.decoder.discards_features else caches
        self._file(text, caches, "assistant")

    def keep_answer(self) -> None:
        """Keep the answer for other requests to copy from, if this one allows it."""
        drafter = self._provider.draft_model
        source = None if drafter is None else drafter.copies
        if source is not None and source.answers is not None and self.args.is_stored:
            source.answers.add(self.args.scope, self.tokens)


class ResponseWriter:
    """Writes the responses for the tokens of one answer, in order, and cuts at stop words."""

    def __init__(self, tokenizer: TokenizerWrapper, args: PairArguments, prompt: list[int]):
        self._tokenizer = tokenizer
        self._args = args
        self._detokenizer = tokenizer.detokenizer
        self._matcher = make_stop_sequences(tokenizer, args.stop_words).matcher()
        self._num_tokens = 0
        self._tail = ""  # of the text, in which a stop word may have begun
        if args.keeps_space:  # mlx-lm takes a space away from what a text begins with
            for token in prompt[-CONTINUED:]:
                self._detokenizer.add_token(token)
            if not isinstance(self._detokenizer, NaiveStreamingDetokenizer):
                self._detokenizer.finalize()  # a space at the end is the prompt's
            _ = self._detokenizer.last_segment

    def response(self, token: int, origin: TokenOrigin, logprobs: TokenLogprobs) -> PairResponse:
        """Make the response of a token, in the form of mlx-lm's handlers."""
        args = self._args
        finish_reason = None
        stop_word = None
        own, top = logprobs
        self._num_tokens += 1
        is_end = token in self._tokenizer.eos_token_ids
        if not is_end:
            self._detokenizer.add_token(token)
        if self._matcher.advance(token) or is_end:
            finish_reason = "stop"
        elif self._num_tokens == args.max_tokens:
            finish_reason = "length"
        if finish_reason is not None:
            self._detokenizer.finalize()
        text = self._detokenizer.last_segment
        if not is_end:
            text, stop_word = self._until_stop_word(text)
        finish_reason = finish_reason if stop_word is None else "stop"
        return PairResponse(text, token, own, finish_reason, top, origin, stop_word)

    def _until_stop_word(self, text: str) -> tuple[str, str | None]:
        """Cut the text at the first stop word that it completes; return it and that word.

        mlx-lm looks for the tokens of a stop word, and misses one that begins or ends inside a
        token: the tokens "lo " and "there" contain "lo t", but not its own tokens.
        """
        words = self._args.stop_words
        if not words:
            return text, None
        tail = self._tail
        known = len(self._tail)
        seen = tail + text
        self._tail = seen[-max(map(len, words)) :]
        ends = {word: seen.find(word) + len(word) for word in words if word in seen}
        word = min(ends, key=lambda each: ends[each], default=None)
        return (text, None) if word is None else (text[: ends[word] - known], word)

    def responses(self, emitted: RoundOutput) -> Iterator[PairResponse]:
        """Yield the responses for the tokens that a round has emitted."""
        for i, token in enumerate(emitted.tokens):
            origin = TokenOrigin(
                i + 1 if i < emitted.num_kept else 0,
                emitted.length,
                emitted.events if i == 0 else (),
                emitted.is_shared,
            )
            shown = emitted.logprobs[i] if emitted.logprobs else NOT_SHOWN
            yield self.response(token, origin, shown)


def make_sampler(args: PairArguments, tokenizer: TokenizerWrapper) -> Sampler | None:
    """The sampler of a request, ready to begin.

    mlx-lm's samplers use one random state for all requests: for a request with a seed it is set
    before each draw, and to an unpredictable one afterwards.
    """
    given = vars(args.sampling) | {"acceptance": args.acceptance}
    options = SamplingOptions(temp=given.pop("temperature"), **given)
    sampler = sampler_for(options, tokenizer, args.seed)
    if args.seed is None or sampler is None or isinstance(sampler, Sampling):
        return sampler
    seeds = random.Random(args.seed)

    def draw(logprobs: mx.array) -> mx.array:
        mx.random.seed(seeds.getrandbits(64))
        try:
            return sampler(logprobs)
        finally:
            mx.random.seed(random.getrandbits(64))

    return draw


def make_processors(
    args: PairArguments, tokenizer: TokenizerWrapper, before: list[int]
) -> list[LogitsProcessor]:
    """Return mlx-lm's processors and ours; they also see the tokens that the cache holds."""
    processors = _make_logits_processors(args) + end_thoughts(args, tokenizer)
    if not before:
        return processors
    cached = mx.array(before)

    def seeing_all(processor: LogitsProcessor) -> LogitsProcessor:
        def seeing(tokens: mx.array, logits: mx.array) -> mx.array:
            return processor(mx.concatenate([cached, tokens]), logits)

        seeing.is_pure = is_pure(processor)  # type: ignore[attr-defined]
        return seeing

    return [seeing_all(processor) for processor in processors]


def end_thoughts(args: PairArguments, tokenizer: TokenizerWrapper) -> list[LogitsProcessor]:
    """Return a processor that ends thoughts after their budget, if their marks are one token each.

    It has to see the whole text, prompt included.
    """
    budget = args.thinking_budget
    marks = (tokenizer.think_start_tokens, tokenizer.think_end_tokens)
    if budget is None or not tokenizer.has_thinking or any(len(mark) != 1 for mark in marks):
        return []
    (start,), (end,) = marks

    def end_now(tokens: mx.array, logits: mx.array) -> mx.array:
        indices = mx.arange(1, tokens.size + 1)
        begun, ended = (mx.where(tokens == mark, indices, 0).max() for mark in (start, end))
        is_due = (begun > ended) & (tokens.size - begun >= budget)
        forced = mx.where(mx.arange(logits.shape[-1]) == end, 0.0, -mx.inf).astype(logits.dtype)
        return mx.where(is_due, forced, logits)

    end_now.is_pure = True  # type: ignore[attr-defined]
    return [end_now]
