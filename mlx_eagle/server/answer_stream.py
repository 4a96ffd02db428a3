"""Messages from the generating thread to one client, with a report of the drafted tokens.

No HTTP and no models in here. The generating thread sends a
``TokenOrigin`` with every token; in the client's thread a ``TextReader`` splits the text, and for
clients that ask with ``include_draft`` a ``DraftReport`` puts the tokens beside it.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from threading import RLock
from typing import Any

from jinja2 import TemplateError
from mlx_lm.generate import TextStateMachine
from mlx_lm.server import Response

from ..decoding.stats import DraftingEvent, Stats
from ..structured import GrammarError
from ..system.ranks import is_lost

TEMPLATE_ERRORS = (
    TemplateError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""Errors that chat templates raise for messages they were not written for."""
POLL = 0.5  # seconds between looks at whether the client is still there


@dataclass(frozen=True)
class TokenOrigin:
    """Origin of a token: drafted or chosen by the target.

    ``depth`` is its position in the draft (0: the target chose it), ``length`` the length of its
    round's draft. ``events`` are the controller's since the previous token. ``batched``: other
    requests shared the round.
    """

    depth: int = 0
    length: int = 0
    events: tuple[DraftingEvent, ...] = ()
    batched: bool = False


@dataclass
class PairResponse(Response):
    """mlx-lm's response, with the token's origin and the stop word that ended the text, if any."""

    origin: TokenOrigin = TokenOrigin()
    stop_word: str | None = None


Document = dict[str, Any]
"""A JSON object sent to a client or received from it."""
Message = int | PairResponse | tuple[int, int] | Exception | None
"""The number of cached tokens, progress through the prompt, responses, then None or an error."""


class RequestError(Exception):
    """A request that is not answered, in one sentence, with its HTTP status.

    ``code`` is the word that clients of the API know it by, where they have one.
    """

    def __init__(self, sentence: str, status: int = 400, code: str | None = None):
        super().__init__(" ".join(sentence.split()))
        self.status = status
        self.code = code


@contextmanager
def as_request_errors() -> Iterator[None]:
    """Context manager that raises errors of a request or its prompt as RequestError."""
    try:
        yield
    except ValueError as err:
        raise RequestError(str(err)) from err
    except TEMPLATE_ERRORS as err:
        raise RequestError(
            f"the chat template cannot take these messages ({type(err).__name__}: {err})."
        ) from err


def error_document(error: RequestError) -> Document:
    """Return an error in the form of the OpenAI API."""
    error_type = "invalid_request_error" if error.status < 500 else "server_error"
    code = error.code or error.status
    return {"error": {"message": str(error), "type": error_type, "code": code}}


class AnswerStream:
    """The messages to one client, in order.

    ``put`` is called in the generating thread; ``wait`` and ``responses`` in the client's;
    ``leave`` in either. ``tokens`` were generated so far, ``stats`` counts the drafted ones.
    ``on_end`` is called once nothing more will be generated.
    """

    def __init__(self, on_end: Callable[["AnswerStream"], None]):
        self.began = 0.0  # time.monotonic() of the first thing computed for it
        self.ended = 0.0  # and of the end
        self.tokens: list[int] = []
        self.stats = Stats()
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._when_read: list[Callable[[], None]] = []
        self._on_end = on_end
        self._lock = RLock()

    @property
    def is_over(self) -> bool:
        """Whether all was sent, or the client has left."""
        return self.ended > 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether nothing has been computed for it yet."""
        return self.began == self.ended == 0.0

    def put(self, message: Message) -> None:
        """Send a message to the client; messages after the end are dropped."""
        with self._lock:
            if self.is_over:
                return
            if message is None or isinstance(message, Exception):
                self._end(message)
                return
            self.began = self.began or time.monotonic()
            if isinstance(message, PairResponse):
                self.tokens.append(message.token)
            self._messages.put(message)
            if self.tokens:
                self._note_read()

    def leave(self) -> None:
        """End the answer: the client is served, or gone."""
        with self._lock:
            if not self.is_over:
                self._end(None)

    def when_read(self, act: Callable[[], None]) -> None:
        """Call ``act`` once the prompt is read, or never will be; in either thread."""
        with self._lock:
            if self.tokens or self.is_over:
                act()
            else:
                self._when_read.append(act)

    def _note_read(self) -> None:
        acts = self._when_read
        self._when_read = []
        for act in acts:
            act()

    def _end(self, last: Exception | None) -> None:
        self.ended = time.monotonic()
        self._on_end(self)
        self._messages.put(last)
        self._note_read()

    def next(self, check: Callable[[], None]) -> Message:
        """Wait for the next message; ``check`` is called meanwhile and may raise."""
        while True:
            check()
            try:
                return self._messages.get(timeout=POLL)
            except Empty:
                pass

    def wait(self, check: Callable[[], None]) -> int:
        """Wait until the request has begun; return how many tokens of its prompt were cached.

        Raises RequestError if it could not be begun.
        """
        first = self.next(check)
        if isinstance(first, Exception):
            raise _as_request_error(first, 400) from first
        if not isinstance(first, int):
            raise RequestError("the server is stopping.", 503)
        return first

    def responses(
        self, check: Callable[[], None], progress: Callable[[int, int], None]
    ) -> Iterator[PairResponse]:
        """Yield the responses. Raises RequestError if generation broke off."""
        while (message := self.next(check)) is not None:
            if isinstance(message, Exception):
                raise _as_request_error(message, 500) from message
            if isinstance(message, tuple):
                progress(*message)
            elif isinstance(message, PairResponse):
                yield message


class on_error:
    """Context manager that gives an error to ``act`` instead of raising it: the server goes on.

    It cannot where another rank is gone.
    """

    def __init__(self, act: Callable[[Exception], None]) -> None:
        self._act = act

    def __enter__(self) -> None:
        """Nothing is needed before."""

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception) or is_lost(error):
            return False
        self._act(error)
        return True


def told_as(error: Exception) -> RequestError:
    """Return an error as a client is told it; one that nobody foresaw is logged, with status 500.

    Errors of connections are raised: there is nobody to tell.
    """
    if isinstance(error, (ConnectionError, TimeoutError)):
        raise error
    if isinstance(error, RequestError):
        return error
    logging.error("A request failed, and should not have: please report this.", exc_info=error)
    return RequestError("the server failed to answer this request: its log says why.", 500)


def _as_request_error(error: Exception, status: int) -> RequestError:
    """Return an error of the generating thread as a client is told it."""
    if isinstance(error, (ValueError, RuntimeError)) and str(error):
        return RequestError(str(error), 400 if isinstance(error, GrammarError) else status)
    return told_as(error)


Letter = tuple[int, str, str]
"""A letter of an answer: the number of its token, the state of mlx-lm's text machine, itself."""


class TextReader:
    """Splits the text of one answer as mlx-lm's text machine does, which begins at ``state``.

    The machine holds back text that may begin a stop word or a mark around reasoning and calls.
    It is fed letter by letter, so that the token of every letter is known.
    """

    def __init__(self, state: tuple[Any, ...]):
        self.num_tokens = 0
        self._state = state
        self._held: deque[tuple[int, str]] = deque()

    @property
    def num_read(self) -> int:
        """Number of the first tokens whose letters were all given, or belong to a mark."""
        return self._held[0][0] if self._held else self.num_tokens

    def read(self, response: PairResponse) -> Iterator[tuple[str, list[Letter]]]:
        """Yield the states that the next token's text leads through, with the letters in each."""
        if response.finish_reason != "stop" or response.stop_word is not None:
            for letter in response.text:
                self._held.append((self.num_tokens, letter))
                self._state, segments = TextStateMachine.split(self._state, letter)
                for state, text in segments:
                    yield state, self._take(state, len(text))
                if len(segments) > 1:  # a mark or a stop word is whole: the letters are its own
                    self._held.clear()
        self.num_tokens += 1
        if response.finish_reason == "stop":
            self._held.clear()  # as mlx-lm does
            self._state, state = TextStateMachine.discard(self._state)
            yield state, []
        if response.finish_reason == "length":
            self._state, text, state = TextStateMachine.flush(self._state)
            yield state, self._take(state, len(text))

    def _take(self, state: str, num_letters: int) -> list[Letter]:
        taken = [self._held.popleft() for _ in range(num_letters)]
        return [(number, state, letter) for number, letter in taken]


class DraftReport:
    """Report of the tokens of one answer: drafted or not, and with which letters."""

    def __init__(self) -> None:
        self.num_batched = 0
        self._tokens: list[Document] = []
        self._events: list[DraftingEvent] = []
        self._num_listed = 0  # of the tokens

    def follow(self, response: PairResponse) -> None:
        """Take the next token."""
        origin = response.origin
        token: Document = {"index": len(self._tokens), "id": response.token, "text": ""}
        token |= {"depth": origin.depth, "length": origin.length}
        self._tokens.append(token | ({"batched": True} if origin.batched else {}))
        self.num_batched += origin.batched
        self._events += origin.events

    def take(self, shown: Sequence[Letter], num_read: int) -> Document:
        """Report the letters that a client gets now, and the first ``num_read`` tokens, once.

        A token has an entry for each stretch of its letters; one without letters has one, too.
        """
        texts: dict[tuple[int, bool], str] = {}
        for number, state, letter in shown:
            key = number, state == "reasoning"
            texts[key] = texts.get(key, "") + letter
        end = max([self._num_listed, num_read, *(number + 1 for number, _ in texts)])
        empty = set(range(self._num_listed, end)) - {number for number, _ in texts}
        self._num_listed = end
        entries = [
            self._tokens[number] | {"text": text} | ({"reasoning": True} if is_reasoning else {})
            for (number, is_reasoning), text in texts.items()
        ]
        entries += [self._tokens[number] for number in empty]
        events = self._events
        self._events = []
        entries.sort(key=lambda entry: entry["index"])
        return {"tokens": entries, "drafting_events": list(map(asdict, events))}


def draft_usage(answers: Iterable[Stats]) -> dict[str, Any]:
    """Draft statistics of some answers; the mean acceptance length is 1 without drafts."""
    stats = sum(answers, Stats())
    return {
        "drafted_tokens": stats.num_drafted,
        "accepted_tokens": stats.num_accepted,
        "copied_tokens": stats.num_copied,
        "accepted_copied_tokens": stats.num_accepted_copied,
        "mean_acceptance_length": stats.mean_acceptance_length or 1.0,  # plain decoding: 1
    }


def counts(stats: Stats, num_batched: int) -> dict[str, Any]:
    """Count the drafted tokens of an answer, named as in ``/metrics``."""
    return draft_usage([stats]) | {
        "rounds": stats.num_rounds,
        "target_passes": stats.num_target_forwards,
        "emitted_tokens": stats.num_emitted,
        "batched_tokens": num_batched,
        "drafted_by_position": stats.drafted_by_position,
        "accepted_by_position": stats.accepted_by_position,
        "acceptance_by_position": stats.cumulative_acceptance_by_position,
        "draft_lengths": stats.draft_lengths,
    }
