"""Client session: one prompt and its answer, from a request's fields to pieces of text."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_lm.generate import TextStateMachine
from mlx_lm.server import CompletionRequest, GenerationContext, ToolCallFormatter

from ..decoding.stats import Stats
from ..system.progress import silent
from .answer_stream import AnswerStream, DraftReport, PairResponse, counts
from .body import PairArguments
from .collect import Collector, chat_row
from .engine import PairGenerator
from .prompt import Tokenized
from .tool_formats import checked, readable


@dataclass
class Piece:
    """A piece of an answer; the last one has a ``finish_reason``.

    ``calls`` are tool calls in the form of the OpenAI API; ``responses`` are the tokens since the
    previous piece; ``draft`` is the report on them, for clients that ask.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    responses: list[PairResponse] = field(default_factory=list)
    draft: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Margin:
    """White space before and after calls, which waits until text or a call follows."""

    def __init__(self, has_calls: bool):
        self._has_calls = has_calls
        self._has_text = False  # since the last call
        self.waiting = ""

    def add(self, text: str) -> str:
        """Return the text that can be shown, with the white space that waited before it."""
        self.waiting += text
        if self._has_calls and not self._has_text and not self.waiting.strip():
            return ""
        self._has_text = True
        return self.at_end()

    def at_call(self) -> int:
        """Drop the waiting white space; return the number of its letters."""
        num_letters = len(self.waiting)
        self.waiting = ""
        self._has_text = False
        return num_letters

    def at_end(self) -> str:
        """Return the waiting white space."""
        waiting = self.waiting
        self.waiting = ""
        return waiting


class ClientSession:
    """One prompt and its answer: ``submit``, ``open``, then ``pieces``; at last ``close``.

    ``asked`` is the ``time.monotonic()`` of the request, whose body has ``num_bytes``.
    ``check_connected`` is called while the client waits, and raises if it has left.
    """

    def __init__(
        self,
        generator: PairGenerator,
        request: CompletionRequest,
        args: PairArguments,
        asked: float,
        num_bytes: int,
        check_connected: Callable[["ClientSession"], None],
    ):
        self.generator = generator
        self.request = request
        self.args = args
        self._asked = asked
        self._num_bytes = num_bytes
        self._check_connected = check_connected
        self.answer: AnswerStream | None = None
        self.prompt: list[int] = []
        self.num_generated = 0
        self.stop_word: str | None = None  # of the client's, with which the answer ended
        self.read_since = 0.0  # time.monotonic() of the first look at the answer
        self._tokenized = Tokenized([])
        self._context: GenerationContext | None = None
        self._report: DraftReport | None = None
        self._finish_reason: str | None = None

    @property
    def stats(self) -> Stats:
        """Counts of its drafts so far."""
        return Stats() if self.answer is None else self.answer.stats

    @property
    def num_cached(self) -> int:
        """Number of prompt tokens that an earlier request had computed."""
        return max(0, self._context.prompt_cache_count) if self._context is not None else 0

    def submit(self, leader: "ClientSession | None" = None) -> None:
        """Tokenize the prompt and queue the request. Raises RequestError.

        ``leader``: a session that was submitted with the same prompt, which is read once.
        """
        if leader is None:
            self._tokenized = self.generator.read_prompt(
                self.request, self.args, self._num_bytes, self._check
            )
        else:
            self._tokenized = leader._tokenized
            self.args.chat_template_kwargs = leader.args.chat_template_kwargs
        self.prompt = self._tokenized.tokens
        behind = None if leader is None else leader.answer
        self.answer = self.generator.submit(self._tokenized, self.args, behind)

    def open(self) -> GenerationContext:
        """Wait until the request has begun. Raises RequestError if it cannot."""
        assert self.answer is not None
        self.read_since = time.monotonic()
        self._context = context = self.answer.context(self._check)
        if self.args.reports_drafts:
            self._report = DraftReport(context.text_sm.make_state(context.initial_state))
        return context

    def pieces(self, progress: Callable[[int, int], None], is_stream: bool) -> Iterator[Piece]:
        """Yield the pieces of the answer as soon as mlx-lm's text machine gives them.

        White space beside calls is dropped: clients would take it for text in front of them.
        ``progress`` is called with the number of prompt tokens read, and of all.
        ``is_stream``: calls have an ``index``, and drafts are reported piece by piece. Raises
        RequestError.
        """
        context = self._context or self.open()
        parser = checked(context.tool_parser)
        tools = readable(self.request.tools, context.tool_parser)
        formatter = ToolCallFormatter(parser, tools, is_stream)
        state = context.text_sm.make_state(context.initial_state)
        previous = context.initial_state
        called = ""
        has_called = False
        margin = _Margin(context.has_tool_calling and self.request.request_type == "chat")
        num_sent = 0  # letters since the last report
        piece = Piece()
        for response in self._responses(progress):
            piece.responses.append(response)
            state, segments = _split(state, response)
            for segment_type, text in segments:
                if segment_type == "tool":
                    self._drop(num_sent + len(piece.text), margin.at_call())
                    called += text
                elif segment_type == "reasoning":
                    piece.text += margin.at_end()
                    piece.reasoning += text
                else:
                    if previous == "tool":
                        piece.calls += formatter([called])
                        called = ""
                        has_called = True
                    piece.text += margin.add(text)
                previous = segment_type
            is_settled = previous != "tool" and not margin.waiting
            if is_settled and (piece.text or piece.reasoning or piece.calls):
                num_sent += 0 if is_stream else len(piece.text)
                yield self._reported(piece) if is_stream else piece
                piece = Piece()
        if previous == "tool" and called:
            piece.calls += formatter([called])
            has_called = True
        if has_called:
            self._drop(num_sent + len(piece.text), margin.at_call())
        piece.text += margin.at_end()
        piece.finish_reason = self._finish_reason or "stop"
        if piece.finish_reason == "stop" and has_called:
            piece.finish_reason = "tool_calls"
        yield self._reported(piece)

    def whole(self) -> Piece:
        """Wait for the whole answer and return it in one piece."""
        pieces = list(self.pieces(silent, is_stream=False))
        return replace(
            pieces[-1],
            text="".join(piece.text for piece in pieces),
            reasoning="".join(piece.reasoning for piece in pieces),
            calls=[call for piece in pieces for call in piece.calls],
            responses=[response for piece in pieces for response in piece.responses],
        )

    def collect(self, collector: Collector) -> None:
        """Give the chat and its answer to ``collector``, unless the answer was cut off."""
        if self.request.request_type != "chat" or self._finish_reason != "stop":
            return
        assert self.answer is not None
        args = self.args
        tokenizer = self.generator.model_provider.tokenizer
        facts = {"temperature": args.sampling.temperature, "finish_reason": self._finish_reason}
        template = args.chat_template_kwargs or {}
        tokens = self.answer.tokens
        collector.keep(chat_row(self.request, self.prompt, tokens, tokenizer, template, facts))

    def close(self) -> None:
        """Generate no more for this client."""
        if self.answer is not None:
            self.answer.leave()

    def _responses(self, progress: Callable[[int, int], None]) -> Iterator[PairResponse]:
        assert self.answer is not None
        for response in self.answer.responses(self._check, progress):
            if self.num_generated == 0:
                seconds = time.monotonic() - self._asked
                self.generator.metrics.count_first_token(seconds)
            self.num_generated += 1
            self._finish_reason = response.finish_reason
            self.stop_word = response.stop_word
            if self._report is not None:
                self._report.follow(response)
            yield response

    def _drop(self, start: int, num_letters: int) -> None:
        """Drop letters of the text since the last draft report from the next one, too."""
        if self._report is not None and num_letters:
            self._report.drop(start, num_letters)

    def _reported(self, piece: Piece) -> Piece:
        """Add the draft report to the piece if the client asked for it."""
        if self._report is None or self.answer is None:
            return piece
        piece.draft = self._report.take()
        if piece.finish_reason is not None:
            piece.draft["counts"] = counts(self.answer.stats, self._report.num_batched)
        return piece

    def _check(self) -> None:
        """Raise if no answer will come."""
        self._check_connected(self)
        self.generator.check_alive()


def _split(state: Any, response: PairResponse) -> tuple[Any, list[tuple[str, str]]]:
    """Return the text machine's next state, and the segments that it yields."""
    segments: list[tuple[str, str]] = []
    if response.finish_reason != "stop" or response.stop_word is not None:
        state, segments = TextStateMachine.split(state, response.text)
    if response.finish_reason == "stop":
        state, segment_type = TextStateMachine.discard(state)
        segments = [*segments, (segment_type, "")]
    if response.finish_reason == "length":
        state, rest, segment_type = TextStateMachine.flush(state)
        segments = [*segments, (segment_type, rest)]
    return state, segments
