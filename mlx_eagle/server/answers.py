"""What the generating thread says to one client, and how far that has got.

No HTTP and no models in here; mlx-lm's kinds of messages only.
"""

import time
from collections.abc import Callable, Iterator
from enum import Enum
from queue import Empty, SimpleQueue
from threading import RLock
from types import TracebackType
from typing import Any

from mlx_lm.server import GenerationContext

from ..decoding.stats import Stats
from .drafted import PairResponse

POLL = 0.5  # seconds between looks at whether the client is still there
ToolParser = Callable[[str, Any], Any]
"""From the text of a call, and the tools, to calls: one dict, or several in a list."""
Message = GenerationContext | PairResponse | tuple[int, int] | Exception | None
"""A context, then responses and progress through the prompt, then None or what went wrong."""


class RequestError(Exception):
    """A request that is not answered, in one sentence, with its HTTP status."""

    def __init__(self, sentence: str, status: int = 400):
        super().__init__(" ".join(sentence.split()))
        self.status = status


class State(Enum):
    """How far an answer has got. It only ever moves forward."""

    WAITING = "nothing was computed for it yet"
    DECODING = "its prompt is read, or its text written"
    ENDED = "everything was said, or nobody listens any more"


class Answer:
    """The messages to one client, in order.

    ``put`` is called in the generating thread; ``context`` and ``responses`` in the client's;
    ``leave`` in either. ``tokens`` are those generated so far, ``stats`` the counts of what was
    drafted. ``on_end`` is called once nothing more will be generated. ``is_overdue`` says whether
    the answer has taken its share of time.
    """

    def __init__(
        self,
        on_end: Callable[["Answer"], None],
        is_overdue: Callable[["Answer"], bool] = lambda answer: False,
    ):
        self.state = State.WAITING
        self.began = 0.0  # time.monotonic() of the first thing computed for it
        self.ended = 0.0  # and of the end
        self.tokens: list[int] = []
        self.stats = Stats()
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._on_end, self._is_overdue = on_end, is_overdue
        self._lock = RLock()

    @property
    def is_over(self) -> bool:
        return self.state is State.ENDED

    def put(self, message: Message) -> None:
        """Say something to the client. What comes after the end is dropped."""
        with self._lock:
            if self.state is State.ENDED:
                return
            if isinstance(message, GenerationContext):
                self._messages.put(message)
            elif isinstance(message, PairResponse):
                self._begin()
                self._respond(message)
            elif isinstance(message, tuple):
                self._begin()
                self._messages.put(message)
            else:
                self._end(message)

    def leave(self) -> None:
        """The client is served, or gone: generate no more for it."""
        with self._lock:
            if self.state is not State.ENDED:
                self._end(None)

    def _begin(self) -> None:
        if self.began == 0.0:
            self.began = time.monotonic()
        if self.state is State.WAITING:
            self.state = State.DECODING

    def _respond(self, response: PairResponse) -> None:
        self.tokens.append(response.token)
        if response.finish_reason is None and self._is_overdue(self):
            response.finish_reason = "length"
        self._messages.put(response)

    def _end(self, last: Exception | None) -> None:
        self.state = State.ENDED
        self.ended = time.monotonic()
        self._on_end(self)
        self._messages.put(last)

    def next(self, check: Callable[[], None]) -> Message:
        """The next message; ``check`` is called while waiting and may raise."""
        while True:
            check()
            try:
                return self._messages.get(timeout=POLL)
            except Empty:
                pass

    def context(self, check: Callable[[], None]) -> GenerationContext:
        """The first message. Raises RequestError where the request could not be begun."""
        first = self.next(check)
        if isinstance(first, Exception):
            raise RequestError(_sentence(first), _status(first, 400)) from first
        if not isinstance(first, GenerationContext):
            raise RequestError("the server is stopping.", 503)
        return first

    def responses(
        self, check: Callable[[], None], progress: Callable[[int, int], None]
    ) -> Iterator[PairResponse]:
        """The others. Raises RequestError where generation broke off."""
        while (message := self.next(check)) is not None:
            if isinstance(message, Exception):
                raise RequestError(_sentence(message), _status(message, 500)) from message
            if isinstance(message, tuple):
                progress(*message)
            elif isinstance(message, PairResponse):
                yield message


class Caught:
    """Within, what goes wrong is kept as ``error`` instead of raised: the server goes on."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> "Caught":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = error
        return True


def checked(tool_parser: ToolParser) -> ToolParser:
    """The parser, raising ValueError for whatever the model wrote: mlx-lm then drops the call.

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
    if isinstance(error, (ValueError, RuntimeError, RequestError)) and str(error):
        return str(error)
    return f"the request failed: {type(error).__name__}: {error}"


def _status(error: Exception, otherwise: int) -> int:
    return error.status if isinstance(error, RequestError) else otherwise
