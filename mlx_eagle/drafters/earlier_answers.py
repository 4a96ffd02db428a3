"""Earlier answers of a server, from which other requests of the same scope may copy."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from .copies import Scope
from .seen_text import GAP, NO_MATCH, SeenText, TextMatch

DEFAULT_BOUND = 65_536  # tokens in all scopes together, 256 KB
LEAST_ANSWER = 32  # tokens: shorter answers are not kept
LEAST_LENGTH = 4  # tokens that a match in another answer must have
MOST_SCOPES = 16


@dataclass
class _ScopeAnswers:
    """The answers of one scope, the oldest first, a gap behind each."""

    text: SeenText = field(default_factory=SeenText)
    ranks: list[int] = field(default_factory=list)  # the place of each among all answers added
    lengths: list[int] = field(default_factory=list)  # with the gap


class EarlierAnswers:
    """At most ``bound`` tokens of answers, by scope; to be used from any thread.

    The oldest answers leave first, whole; of more than ``MOST_SCOPES`` scopes the one that was
    used longest ago. Only memory holds them.
    """

    def __init__(self, bound: int):
        self.bound = bound
        self._scopes: dict[Scope, _ScopeAnswers] = {}  # the one used last at the end
        self._num_added = 0
        self._lock = Lock()

    @property
    def num_tokens(self) -> int:
        """Tokens kept, gaps included."""
        with self._lock:
            return self._count()

    def add(self, scope: Scope, tokens: Sequence[int]) -> None:
        """Keep an answer that has ended, if it is long enough and fits the bound."""
        length = len(tokens) + 1
        if len(tokens) < LEAST_ANSWER or length > self.bound:
            return
        with self._lock:
            kept = self._use(scope)
            kept.text.extend([*tokens, GAP])
            kept.lengths.append(length)
            kept.ranks.append(self._num_added)
            self._num_added += 1
            while len(self._scopes) > MOST_SCOPES:
                del self._scopes[next(iter(self._scopes))]
            while self._count() > self.bound:
                self._drop_oldest()

    def match(self, scope: Scope, end: np.ndarray, size: int) -> TextMatch:
        """Find the longest match of a text's ``end`` in the answers of its scope."""
        with self._lock:
            if scope not in self._scopes:
                return NO_MATCH
            found = self._use(scope).text.match(size, end)
        if found.length < LEAST_LENGTH or not found.tokens:
            return NO_MATCH
        return TextMatch(found.length, found.tokens, is_answer=True)

    def _use(self, scope: Scope) -> _ScopeAnswers:
        """The answers of a scope, which is the one used last now."""
        kept = self._scopes.pop(scope, None) or _ScopeAnswers()
        self._scopes[scope] = kept
        return kept

    def _count(self) -> int:
        return sum(len(kept.text) for kept in self._scopes.values())

    def _drop_oldest(self) -> None:
        scope = min(self._scopes, key=lambda scope: self._scopes[scope].ranks[0])
        kept = self._scopes[scope]
        kept.text.drop_first(kept.lengths.pop(0))
        del kept.ranks[0]
        if not kept.ranks:
            del self._scopes[scope]
