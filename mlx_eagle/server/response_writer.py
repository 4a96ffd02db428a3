"""Responses for the tokens of one answer, whose text is cut at stop words here."""

from collections.abc import Iterator

from mlx_lm.generate import make_stop_sequences
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper

from ..batch.group import RoundOutput
from ..decoding.accept import TokenLogprobs
from .answer_stream import PairResponse, TokenOrigin
from .body import PairArguments

NOT_SHOWN: TokenLogprobs = 0.0, ()
CONTINUED = 8  # tokens of a prompt that its continuation is spelled behind


class ResponseWriter:
    """Writes the responses for the tokens of one answer, in order."""

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
