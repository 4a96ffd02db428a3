"""Copies: tokens that followed an earlier occurrence of the text's end, used instead of drafts.

Prompt lookup (Saxena 2023, "prompt lookup decoding"; Yang et al. 2023, arXiv:2304.04487) on all
that a request has seen: its prompt, what its prompt cache held before, and what it has emitted;
with a server also on earlier answers (``earlier_answers.py``). A copy costs no forward of a
drafter, and may be as long as the match before it promises.
"""

from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from ..target_model.cache_view import single_caches
from .acceptance_stats import CopySeen
from .seen_text import NO_MATCH, SeenText, TextMatch
from .tree import MOST_COPIED

Tokens = Sequence[int] | np.ndarray

Scope = tuple[str | None, ...]
"""Scope of a request: requests of equal scope may copy from each other's answers."""


class OtherTexts(Protocol):
    """Texts of other requests, such as the ``EarlierAnswers`` of a server."""

    def match(self, scope: Scope, end: np.ndarray, size: int) -> TextMatch:
        """Find the longest match of a text's ``end`` among the texts of a scope."""

    def add(self, scope: Scope, tokens: Sequence[int]) -> None:
        """Keep a text that has ended."""


class Copies:
    """Copies for one request.

    ``text`` has all its tokens that the host has read. ``num_unread`` more have been committed by
    a plain step that the host has not read yet.
    """

    def __init__(self, text: SeenText, answers: OtherTexts | None = None, scope: Scope = ()):
        self.text = text
        self.num_unread = 0
        self._answers = answers
        self._scope = scope
        self.latest = NO_MATCH  # that was looked for, perhaps of the text as it was before
        self._is_latest = False

    @property
    def match(self) -> TextMatch:
        """The longest match of the end of the text: in the text, or longer in another answer."""
        if self._is_latest:
            return self.latest
        size = MOST_COPIED + 1  # the first of them may be in flight already
        own = self.text.match(size)
        found = [own if own.tokens else NO_MATCH]
        if self._answers is not None:
            found.append(self._answers.match(self._scope, self.text.end, size))
        self.latest = max(found, key=lambda match: match.length)
        self._is_latest = True
        return self.latest

    def tokens(self, size: int) -> list[int]:
        """Copy at most ``size`` tokens that may follow the committed ones."""
        start = self.num_unread
        return list(self.match.tokens[start : start + size])

    def read(self, run: Sequence[int]) -> CopySeen:
        """Add the tokens of a round; return how far a copy was, or would have been, right."""
        match = self.match
        self.text.extend(run)
        self.num_unread = 0
        self._is_latest = False
        agrees = [copied == token for copied, token in zip(match.tokens, run, strict=False)]
        num_right = [*agrees, False].index(False)
        num_seen = min(num_right + 1, len(agrees))
        return CopySeen(match.length, num_seen, num_right, match.is_answer)

    def drop_last(self, num_tokens: int) -> None:
        """Drop tokens that were read and are undone."""
        self.text.cut(len(self.text) - num_tokens)
        self._is_latest = False


class CopySource:
    """Texts that the requests of one drafter copy from, beside their own prompts.

    After a generation with a prompt cache it remembers the tokens that this cache holds, as long
    as the cache object lives. ``answers`` are those of a server, if it keeps any.
    """

    def __init__(self) -> None:
        self.answers: OtherTexts | None = None
        self._texts: WeakKeyDictionary[Any, np.ndarray] = WeakKeyDictionary()
        self._lock = Lock()

    def __reduce__(self) -> tuple[type["CopySource"], tuple[()]]:
        """Copy the source without its texts."""
        return CopySource, ()

    def begin(self, known: Tokens, prompt: Tokens, scope: Scope = ()) -> Copies:
        """Copies for a request with ``prompt``, before which its caches hold ``known`` tokens."""
        text = SeenText(known)
        text.extend(prompt)
        return Copies(text, self.answers, scope)

    def remember(self, caches: list[Any], text: SeenText) -> None:
        """Remember the tokens that a target's caches hold."""
        first = _first_with_offset(caches)
        if first is not None:
            with self._lock:
                self._texts[first] = text.tokens

    def remembered(self, caches: list[Any]) -> Tokens:
        """The tokens that a target's caches hold, as far as they are remembered."""
        first = _first_with_offset(caches)
        if first is None:
            return ()
        with self._lock:
            tokens: Tokens = self._texts.get(first, ())
        return tokens[: first.offset]


def _first_with_offset(caches: list[Any]) -> Any:
    """The first cache that counts its tokens; None where there is none."""
    return next((cache for cache in single_caches(caches) if hasattr(cache, "offset")), None)
