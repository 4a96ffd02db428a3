"""Client session: one prompt and its answer, from a request's fields to pieces of text."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import make_text_state_machine
from mlx_lm.server import CompletionRequest, ToolCallFormatter

from ..system.progress import silent
from .answer_stream import AnswerStream, DraftReport, Letter, PairResponse, TextReader, counts
from .body import PairArguments
from .collect import Collector
from .engine import PairGenerator
from .prompt import Tokenized, num_letters, read_prompt, render
from .tool_formats import checked, readable

LARGE = 2**16  # letters of a request; larger ones are read and tokenized one after the other


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


class ClientSession:
    """One prompt and its answer: ``submit``, ``open``, then ``pieces``; at last ``close``.

    ``asked`` is the ``time.monotonic()`` of the request.
    ``check_connected`` is called while the client waits, and raises if it has left.
    """

    def __init__(
        self,
        generator: PairGenerator,
        request: CompletionRequest,
        args: PairArguments,
        asked: float,
        check_connected: Callable[["ClientSession"], None],
    ):
        self.generator = generator
        self.request = request
        self.args = args
        self._asked = asked
        self._check_connected = check_connected
        self.answer = AnswerStream(generator.open_answers.discard)
        self.prompt = Tokenized([])
        self.num_cached = 0  # tokens of the prompt that an earlier request had computed
        self.num_generated = 0
        self.finish_reason: str | None = None
        self.stop_word: str | None = None  # of the client's, with which the answer ended
        self.read_since = 0.0  # time.monotonic() of the first look at the answer
        self._report = DraftReport() if args.reports_drafts else None

    def submit(self, leader: "ClientSession | None" = None) -> None:
        """Tokenize the prompt and queue the request. Raises RequestError.

        ``leader``: a session that was submitted with the same prompt, which is read once.
        """
        if leader is None:
            is_large = num_letters(self.request) > LARGE
            with self.generator.large_requests if is_large else nullcontext():
                self._check()
                provider = self.generator.model_provider
                self.prompt = read_prompt(self.request, self.args, provider)
        else:
            self.prompt = leader.prompt
            self.args.chat_template_kwargs = leader.args.chat_template_kwargs
        behind = None if leader is None else leader.answer
        self.generator.submit(self.answer, self.prompt, self.args, behind)

    def open(self) -> None:
        """Wait until the request has begun. Raises RequestError if it cannot."""
        self.read_since = time.monotonic()
        self.num_cached = self.answer.wait(self._check)

    def pieces(
        self, progress: Callable[[int, int], None], is_stream: bool, is_whole: bool = False
    ) -> Iterator[Piece]:
        """Yield the pieces of the answer as soon as mlx-lm's text machine gives them.

        White space beside calls is dropped: clients would take it for text in front of them.
        ``progress`` is called with the number of prompt tokens read, and of all.
        ``is_stream``: calls have an ``index``. ``is_whole``: there is one piece. Raises
        RequestError.
        """
        if not self.read_since:
            self.open()
        tokenizer = self.generator.model_provider.tokenizer
        parser = tokenizer.tool_parser
        tools = readable(self.request.tools, parser)
        formatter = ToolCallFormatter(checked(parser), tools, is_stream)
        previous = self.prompt.initial_state
        machine = make_text_state_machine(tokenizer, self.args.stop_words)
        reader = TextReader(machine.make_state(previous))
        called = ""
        has_called = False
        has_margins = tokenizer.has_tool_calling and self.request.request_type == "chat"
        is_margin = has_margins  # there was no text since the last call
        margin: list[Letter] = []  # white space that waits until text or a call follows
        shown: list[Letter] = []
        piece = Piece()
        for response in self._responses(progress):
            piece.responses.append(response)
            for state, letters in reader.read(response):
                if state == "tool":
                    called += "".join(letter for _, _, letter in letters)
                    margin = []
                    is_margin = has_margins
                    previous = state
                    continue
                if state != "reasoning":
                    if previous == "tool":
                        piece.calls += formatter([called])
                        called = ""
                        has_called = True
                    is_margin &= all(letter.isspace() for _, _, letter in letters)
                margin += letters
                if state == "reasoning" or not is_margin:
                    shown += margin
                    margin = []
                previous = state
            is_settled = previous != "tool" and not margin and not is_whole
            if is_settled and (shown or piece.calls):
                yield self._complete(piece, shown, reader)
                shown = []
                piece = Piece()
        if previous == "tool" and called:
            piece.calls += formatter([called])
            has_called = True
        shown += [] if has_called else margin
        self.finish_reason = self.finish_reason or "stop"
        if self.finish_reason == "stop" and has_called:
            self.finish_reason = "tool_calls"
        piece.finish_reason = self.finish_reason
        yield self._complete(piece, shown, reader)

    def _complete(self, piece: Piece, shown: list[Letter], reader: TextReader) -> Piece:
        """Add its text to a piece, and the report of it if the client asked for that."""
        piece.text = "".join(letter for _, state, letter in shown if state != "reasoning")
        piece.reasoning = "".join(letter for _, state, letter in shown if state == "reasoning")
        if self._report is not None:
            piece.draft = self._report.take(shown, reader.num_read)
            if piece.finish_reason is not None:
                piece.draft["counts"] = counts(self.answer.stats, self._report.num_batched)
        return piece

    def whole(self) -> Piece:
        """Wait for the whole answer and return it in one piece."""
        (piece,) = self.pieces(silent, is_stream=False, is_whole=True)
        return piece

    def collect(self, collector: Collector) -> None:
        """Give the chat and its answer to ``collector``, if it is one and was not cut off.

        It gets the row of one of mlx-lm's data sets, with the exact tokens, as
        ``mlx_eagle.train --regenerate`` writes them, if the tokenizer makes the same prompt of the
        messages again; else the reader of the row would refuse them.
        """
        request = self.request
        template = self.args.chat_template_kwargs or {}
        is_chat = request.request_type == "chat" and "continue_final_message" not in template
        if not is_chat or self.finish_reason not in ("stop", "tool_calls"):
            return
        tokenizer = self.generator.model_provider.tokenizer
        answer = self.answer.tokens
        prompt = self.prompt.tokens
        is_ended = bool(answer) and answer[-1] in tokenizer.eos_token_ids
        text = tokenizer.decode(answer[:-1] if is_ended else answer)
        row: dict[str, Any] = {
            "temperature": self.args.sampling.temperature,
            "finish_reason": "stop",
            "messages": [*request.messages, {"role": "assistant", "content": text}],
        }
        row |= {"tools": request.tools} if request.tools else {}
        row |= {"chat_template_kwargs": template} if template else {}
        if tokenizer.has_chat_template and render(request, tokenizer, template, True) == prompt:
            row |= {"prompt_length": len(prompt), "tokens": [*prompt, *answer]}
        collector.keep(row)

    def close(self) -> None:
        """Generate no more for this client."""
        self.answer.leave()

    def _responses(self, progress: Callable[[int, int], None]) -> Iterator[PairResponse]:
        for response in self.answer.responses(self._check, progress):
            if self.num_generated == 0:
                seconds = time.monotonic() - self._asked
                self.generator.metrics.count_first_token(seconds)
            self.num_generated += 1
            self.finish_reason = response.finish_reason
            self.stop_word = response.stop_word
            if self._report is not None:
                self._report.follow(response)
            yield response

    def _check(self) -> None:
        """Raise if no answer will come."""
        self._check_connected(self)
        self.generator.check_alive()
