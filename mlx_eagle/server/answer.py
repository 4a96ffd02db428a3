"""What the thread that generates says to one client, and how it can fail.

Knows mlx-lm's kinds of messages; knows neither HTTP nor models.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, Queue
from types import TracebackType
from typing import Any

from mlx_lm.server import CompletionRequest, GenerationContext, Response

from ..decoding.stats import Stats

POLL = 0.5  # seconds between looks at whether the client is still there
ToolParser = Callable[[str, Any], Any]
"""From the text of a call, and the tools, to calls: one dict, or several in a list."""


class RequestError(Exception):
    """A request that is not answered, in one sentence, with its HTTP status."""

    def __init__(self, sentence: str, status: int = 400):
        super().__init__(" ".join(sentence.split()))
        self.status = status


@dataclass
class Continued(CompletionRequest):
    """The rest of a request that was begun: ``tokens`` are the prompt and what came of it."""

    tokens: list[int] = field(default_factory=list)


@dataclass
class Tail:
    """What must go on where a request changes from one way of decoding to another.

    mlx-lm begins a detokenizer and a matcher of stop words for each way; the text and the stop
    words of the whole answer need these two, which have seen all of it.
    """

    detokenizer: Any
    matcher: Any

    @classmethod
    def after(cls, tokens: list[int], detokenizer: Any, matcher: Any) -> "Tail":
        """After ``tokens``, whose text has been sent; ``detokenizer`` is a new one."""
        for token in tokens:
            detokenizer.add_token(token)
            _ = detokenizer.last_segment  # reading it is what marks it as sent
        return cls(detokenizer, matcher)

    def follow(self, response: Response) -> None:
        """Correct the text of a response, and whether the answer stops with it."""
        if response.finish_reason != "stop":
            self.detokenizer.add_token(response.token)
            if self.matcher.advance(response.token):
                response.finish_reason = "stop"
        if response.finish_reason is not None:
            self.detokenizer.finalize()
        response.text = self.detokenizer.last_segment


class Answer(Queue):
    """The messages to one client, in order: a context, responses and progress, then None.

    An exception ends it too. It is filled by the thread that generates, through mlx-lm's code
    as well as ours, and emptied by the thread of the client. ``stats`` are those of the stretches
    that were drafted; ``tail`` is set where what follows is decoded in another way than what
    came before. ``on_end`` is called once nothing more will be generated for it.
    """

    def __init__(self, on_end: Callable[["Answer"], None]):
        super().__init__()
        self.stats: list[Stats] = []
        self.tail: Tail | None = None
        self.is_abandoned = False
        self._on_end = on_end
        self._context: GenerationContext | None = None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Say something to the client."""
        if isinstance(item, GenerationContext):
            is_first, self._context = self._context is None, item
            if self.is_abandoned:  # set before ``abandon`` looks for a context
                item.stop()
            if not is_first:
                return
        if self.tail is not None:
            if isinstance(item, tuple):
                return  # progress through a prompt that the client knows to be done
            if isinstance(item, Response):
                going_on = item.finish_reason is None
                self.tail.follow(item)
                if going_on and item.finish_reason is not None:
                    super().put(item)
                    self.end()
                    return
        if item is None or isinstance(item, Exception):
            self._on_end(self)
        super().put(item)

    def end(self) -> None:
        """Nothing more is wanted, although more may be on its way."""
        super().put(None)
        self.abandon()

    def abandon(self) -> None:
        """The client is served, or gone: generate no more for it."""
        self.is_abandoned = True
        if self._context is not None:
            self._context.stop()
        self._on_end(self)

    def next(self, check: Callable[[], None]) -> Any:
        """The next message; ``check`` is called while waiting and may raise."""
        while True:
            check()
            try:
                return self.get(timeout=POLL)
            except Empty:
                pass

    def context(self, check: Callable[[], None]) -> GenerationContext:
        """The first message. Raises RequestError where the request could not be begun."""
        first = self.next(check)
        if isinstance(first, Exception):
            raise RequestError(_sentence(first)) from first
        return first

    def responses(
        self, check: Callable[[], None], progress: Callable[[int, int], None]
    ) -> Iterator[Response]:
        """The others. Raises RequestError where generation broke off."""
        while (item := self.next(check)) is not None:
            if isinstance(item, Exception):
                raise RequestError(_sentence(item), 500) from item
            if isinstance(item, tuple):
                progress(*item)
            else:
                yield item


class Told:
    """Within, what goes wrong with one request is told to its client, and the server goes on."""

    def __init__(self, answer: Answer):
        self._answer = answer

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._answer.put(error)
        return True


def checked(tool_parser: ToolParser) -> ToolParser:
    """The parser, raising ValueError, upon which mlx-lm drops a call, whatever the model wrote.

    A call without arguments or a name would break the answer off where it is formatted.
    """

    def parse(text: str, tools: Any) -> Any:
        try:
            parsed = tool_parser(text, tools)
        except (LookupError, TypeError, AttributeError, SyntaxError) as err:
            raise ValueError(f"the parser failed with {err!r}") from err
        for call in parsed if isinstance(parsed, list) else [parsed]:
            if not isinstance(call, dict) or not {"name", "arguments"} <= call.keys():
                raise ValueError("a call has no name or no arguments")
        return parsed

    return parse


def _sentence(error: Exception) -> str:
    if isinstance(error, (ValueError, RuntimeError)) and str(error):
        return str(error)
    return f"the request failed: {type(error).__name__}: {error}"
