"""Tokens of a text in one growing array, and matches of its end with earlier text.

Nothing is indexed. A match is found by comparing the array with itself: 0.1 ms in a text of
100,000 tokens, off the device's path. To load it takes 2 ms, and a token takes 4 bytes. An n-gram
dictionary or a suffix automaton finds a match sooner, but takes 0.3 to 0.8 s to load and 180 to
590 bytes a token, at every turn of a conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GAP = -1  # in place of what has no tokens, and behind an answer: equal to no token
LONGEST_MATCH = 64  # tokens that are compared; a longer match counts as this long
MOST_STARTS = 4096  # occurrences of one token that are looked at, the latest ones
MOST_COMPARED = 64  # places whose last three tokens agree that are compared further, the latest
FREE_SLOTS = 1024  # of an array that was full, and a quarter of its tokens more


@dataclass(frozen=True)
class TextMatch:
    """A match: the last ``length`` tokens of a text occur elsewhere, followed by ``tokens``.

    ``is_answer``: elsewhere is another answer, not the text itself.
    """

    length: int = 0
    tokens: tuple[int, ...] = ()
    is_answer: bool = False


NO_MATCH = TextMatch()


class SeenText:
    """A growing text of token ids, int32."""

    def __init__(self, tokens: Sequence[int] | np.ndarray = ()):
        self._array = np.array(tokens, np.int32)
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """The text (n,), which must not be changed."""
        return self._array[: self._length]

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens to the text."""
        length = self._length + len(tokens)
        if length > len(self._array):
            grown = np.empty(length + length // 4 + FREE_SLOTS, np.int32)
            grown[: self._length] = self.tokens
            self._array = grown
        self._array[self._length : length] = tokens
        self._length = length

    def cut(self, length: int) -> None:
        """Drop everything after the first ``length`` tokens."""
        self._length = min(self._length, length)

    @property
    def end(self) -> np.ndarray:
        """The last tokens, at most as many as matches compare."""
        return self.tokens[-LONGEST_MATCH:]

    def match(self, size: int, end: np.ndarray | None = None) -> TextMatch:
        """Find the longest match of the text's end, or of another text's ``end``, and its copy.

        Of equally long matches the latest one counts. The copy has ``size`` tokens, fewer only
        where a gap follows. In the text itself a copy that reaches the end reads on in itself:
        a b c a b -> c a b c a b.
        """
        text = self.tokens
        is_own = end is None
        end = self.end if end is None else end
        if len(end) == 0 or end[-1] == GAP:
            return NO_MATCH
        # In the text itself the last occurrence is the end, and nothing follows it.
        starts = np.flatnonzero((text[:-1] if is_own else text) == end[-1])[-MOST_STARTS:] + 1
        if len(starts) == 0:
            return NO_MATCH
        length, start = _longest(text, end, starts)
        return TextMatch(length, self._copy(start, size, reads_on=is_own))

    def _copy(self, start: int, size: int, reads_on: bool) -> tuple[int, ...]:
        """Take ``size`` tokens from ``start`` on, up to a gap."""
        copied = self.tokens[start : start + size]
        if reads_on and 0 < len(copied) < size:
            copied = np.resize(copied, size)
        gaps = np.flatnonzero(copied == GAP)
        return tuple(copied[: gaps[0]].tolist() if len(gaps) else copied.tolist())


def _longest(text: np.ndarray, end: np.ndarray, starts: np.ndarray) -> tuple[int, int]:
    """The length of the longest match that ends before one of ``starts``, and that start.

    The token before each start is the last of ``end``.
    """
    for length in (2, 3):
        if len(end) < length or end[-length] == GAP:
            return length - 1, int(starts[-1])
        agreeing = starts[starts >= length]
        agreeing = agreeing[text[agreeing - length] == end[-length]]
        if len(agreeing) == 0:
            return length - 1, int(starts[-1])
        starts = agreeing
    starts = starts[-MOST_COMPARED:]
    back = np.arange(1, len(end) + 1)
    before = starts[:, None] - back
    ours = end[::-1]
    is_equal = (text[np.maximum(before, 0)] == ours) & (before >= 0) & (ours != GAP)
    lengths = np.where(is_equal.all(axis=1), len(end), is_equal.argmin(axis=1))
    best = len(lengths) - 1 - int(lengths[::-1].argmax())
    return int(lengths[best]), int(starts[best])
