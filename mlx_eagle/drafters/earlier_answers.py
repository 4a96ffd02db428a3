"""Earlier answers of a server, from which other requests of the same scope may copy."""

from collections.abc import Sequence
from threading import RLock

import numpy as np

from .copies import Scope
from .seen_text import GAP, NO_MATCH, SeenText, TextMatch

DEFAULT_BOUND = 65_536  # tokens in all scopes together, 256 KB
LEAST_ANSWER = 32  # tokens: shorter answers are not kept
LEAST_LENGTH = 4  # tokens that a match in another answer must have
MOST_SCOPES = 16


class EarlierAnswers:
    """At most ``bound`` tokens of answers, by scope; to be used from any thread.

    The oldest answers leave first, whole; of more than ``MOST_SCOPES`` scopes the one that was
    used longest ago. Only memory holds them.
    """

    def __init__(self, bound: int):
        self.bound = bound
        # The answers of each scope, a gap behind each; the scope that was used last at the end.
        self._scopes: dict[Scope, SeenText] = {}
        self._order: list[Scope] = []  # of all answers, the oldest first
        self._lock = RLock()

    @property
    def num_tokens(self) -> int:
        """Tokens kept, gaps included."""
        with self._lock:
            return sum(map(len, self._scopes.values()))

    def add(self, scope: Scope, tokens: Sequence[int]) -> None:
        """Keep an answer that has ended, if it is long enough and fits the bound."""
        if not LEAST_ANSWER <= len(tokens) < self.bound:
            return
        with self._lock:
            self._use(scope).extend([*tokens, GAP])
            self._order.append(scope)
            if len(self._scopes) > MOST_SCOPES:
                unused = next(iter(self._scopes))
                del self._scopes[unused]
                self._order = [each for each in self._order if each != unused]
            while self.num_tokens > self.bound:
                oldest = self._order.pop(0)
                answers = self._scopes[oldest]
                left = answers.tokens[1 + int(np.argmax(answers.tokens == GAP)) :]
                self._scopes[oldest] = SeenText(left)
                if not len(left):
                    del self._scopes[oldest]

    def match(self, scope: Scope, end: np.ndarray, size: int) -> TextMatch:
        """Find the longest match of a text's ``end`` in the answers of its scope."""
        with self._lock:
            if scope not in self._scopes:
                return NO_MATCH
            found = self._use(scope).match(size, end)
        if found.length < LEAST_LENGTH or not found.tokens:
            return NO_MATCH
        return TextMatch(found.length, found.tokens, is_answer=True)

    def _use(self, scope: Scope) -> SeenText:
        """The answers of a scope, which is the one used last now."""
        self._scopes[scope] = self._scopes.pop(scope, SeenText())
        return self._scopes[scope]
