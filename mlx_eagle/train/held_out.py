"""Sequences held out for evaluation, with all whose prompts are too much like theirs."""

import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

HELD_OUT = 0.05  # of the prompts
MOST_HELD_OUT = 128  # prompts
ALIKE = 0.8  # prompts that share this much of their words (Jaccard's index) count as the same
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+")  # a character where words are not spaced


def words_of(fields: dict[str, Any]) -> frozenset[str]:
    """Return the words of what a row asks; for a conversation, those of its first question.

    {"prompt": "What's 2 + 3?", ...} -> what, s, 2, 3
    """
    asked = fields.get("prompt", fields.get("text", fields.get("tokens")))
    if "messages" in fields:
        messages = fields["messages"]
        asked = next((m.get("content") for m in messages if m["role"] == "user"), messages)
    plain = unicodedata.normalize("NFKC", asked if isinstance(asked, str) else str(asked))
    return frozenset(WORD.findall(plain.casefold())) or frozenset([plain.strip()])


def likeness(asked: Sequence[frozenset[str]]) -> Callable[[frozenset[str]], set[int]]:
    """Make a function that takes words and returns the numbers of those of ``asked`` like them."""
    sizes = np.array([len(words) for words in asked])
    places: dict[str, list[int]] = {}
    for i, words in enumerate(asked):
        for word in words:
            places.setdefault(word, []).append(i)

    def alike(words: frozenset[str]) -> set[int]:
        found = [places[word] for word in words if word in places]
        shared = np.bincount(np.concatenate(found or [[]]).astype(int), minlength=len(asked))
        return set(np.flatnonzero(shared >= ALIKE * (sizes + len(words) - shared)).tolist())

    return alike


def choose_held_out(words: Sequence[frozenset[str]]) -> set[int]:
    """Choose sequences by the ``words`` of their prompts; returns their numbers.

    The last prompts are held out, with all prompts that are like them, those that are like these,
    and so on. A prompt that would take more with it than its share of all prompts is kept for
    training.
    """
    asked = list(dict.fromkeys(words))
    alike = likeness(asked)
    most = min(MOST_HELD_OUT, int(len(asked) * HELD_OUT))
    held: set[int] = set()
    seen: set[int] = set()
    for last in reversed(range(len(asked))):
        group: set[int] = set()
        waiting = {last} - seen
        while waiting and len(held | group | waiting) <= most:
            group |= waiting
            waiting = set().union(*(alike(asked[i]) for i in waiting)) - group
        seen |= group | waiting
        if not waiting:
            held |= group
    chosen = {asked[i] for i in held}
    return {i for i, own in enumerate(words) if own in chosen}
