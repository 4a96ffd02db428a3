"""Which tokens of an answer were drafted, for clients that ask with ``include_draft``.

The generating thread sends an ``Origin`` with every token; in the client's thread a
``DraftReport`` puts them beside the text, chunk by chunk.
"""

from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mlx_lm.generate import TextStateMachine
from mlx_lm.server import Response

from ..decoding.controller import DraftingEvent
from ..decoding.stats import Stats

SHOWN_AS = {"normal": "text", "reasoning": "reasoning"}
"""States of mlx-lm's text machine whose text a client gets as text; that of calls it does not."""


@dataclass(frozen=True)
class Origin:
    """How a token came about.

    ``depth`` is its position in the draft (0: the target chose it), ``length`` how far its round
    had drafted. ``events`` are the controller's since the token before. ``batched``: other
    requests shared the round.
    """

    depth: int = 0
    length: int = 0
    events: tuple[DraftingEvent, ...] = ()
    batched: bool = False


@dataclass
class PairResponse(Response):
    """mlx-lm's, with the token's origin."""

    origin: Origin = Origin()


@dataclass
class Entry:
    """A token, or a part of it, as a client reads of it."""

    index: int
    id: int
    origin: Origin
    shown_as: str = "text"
    text: str = ""

    def to_dict(self) -> dict[str, Any]:
        origin = self.origin
        found: dict[str, Any] = {"index": self.index, "id": self.id, "text": self.text}
        found |= {"depth": origin.depth, "length": origin.length}
        if self.shown_as == "reasoning":
            found["reasoning"] = True
        if origin.batched:
            found["batched"] = True
        return found


@dataclass
class DraftReport:
    """What is told of the tokens of one answer.

    mlx-lm's handler holds text back that may begin a stop word or a mark around reasoning and
    calls. Its text machine runs here a second time, letter by letter, so that every letter that
    a client gets is known by its token. ``state`` is where that machine begins.
    """

    state: tuple[Any, ...]
    num_batched: int = 0
    _num_tokens: int = 0
    _entries: list[Entry] = field(default_factory=list)  # to be told with the next chunk
    _unlisted: deque[Entry] = field(default_factory=deque)  # the first waits for a letter held
    _held: deque[tuple[Entry, str]] = field(default_factory=deque)
    _events: list[DraftingEvent] = field(default_factory=list)

    def follow(self, response: PairResponse) -> None:
        """Take the next token."""
        origin = response.origin
        token = Entry(self._num_tokens, response.token, origin)
        self._num_tokens += 1
        self.num_batched += origin.batched
        self._events += origin.events
        self._unlisted.append(token)
        if response.finish_reason == "stop":
            self._held.clear()  # and the text that comes with it, as mlx-lm does
        else:
            for letter in response.text:
                self._held.append((token, letter))
                self._read(letter)
        if response.finish_reason == "length":
            self._show(self.state[0], len(self._held))
        self._list_up_to(self._held[0][0].index if self._held else self._num_tokens)

    def take(self) -> dict[str, Any]:
        """What is to be told of the tokens since the last call."""
        entries, self._entries = self._entries, []
        events, self._events = self._events, []
        return {
            "tokens": [entry.to_dict() for entry in entries],
            "drafting_events": [asdict(event) for event in events],
        }

    def _read(self, letter: str) -> None:
        """Let the machine read a letter, and show or drop what it no longer holds."""
        self.state, segments = TextStateMachine.split(self.state, letter)
        for shown_as, text in segments:
            self._show(shown_as, len(text))
        if len(segments) > 1:  # a mark or a stop word is complete: the letters are its own
            self._held.clear()

    def _show(self, state: str, num_letters: int) -> None:
        for _ in range(num_letters):
            token, letter = self._held.popleft()
            if state not in SHOWN_AS:
                continue
            self._list_up_to(token.index)
            if self._unlisted and self._unlisted[0].index == token.index:
                self._unlisted.popleft()
                self._entries.append(replace(token, shown_as=SHOWN_AS[state]))
            last = self._entries[-1] if self._entries else None
            if last is None or (last.index, last.shown_as) != (token.index, SHOWN_AS[state]):
                last = replace(token, shown_as=SHOWN_AS[state])
                self._entries.append(last)
            last.text += letter

    def _list_up_to(self, index: int) -> None:
        """List the tokens before ``index``, which have no text to come."""
        while self._unlisted and self._unlisted[0].index < index:
            self._entries.append(self._unlisted.popleft())


def counts(stats: Stats, num_batched: int) -> dict[str, Any]:
    """What was drafted for an answer, in the words of ``/metrics``."""
    drafted, accepted = stats.drafted_by_position, stats.accepted_by_position
    return {
        "drafted_tokens": stats.num_drafted,
        "accepted_tokens": stats.num_accepted,
        "rounds": stats.num_rounds,
        "target_passes": stats.num_target_forwards,
        "emitted_tokens": stats.num_emitted,
        "batched_tokens": num_batched,
        "mean_acceptance_length": stats.mean_acceptance_length or 1.0,  # plain decoding: 1
        "drafted_by_position": drafted,
        "accepted_by_position": accepted,
        "acceptance_by_position": stats.cumulative_acceptance_by_position,
        "draft_lengths": stats.draft_lengths,
    }
