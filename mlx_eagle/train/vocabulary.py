"""The draft vocabulary of a fresh head: the tokens that answers use most."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .examples import Example


@dataclass(frozen=True)
class DraftVocabulary:
    """``ids`` (Vd,) int32, ascending target ids; ``coverage``: their share of all that was
    answered."""

    ids: np.ndarray
    coverage: float

    @property
    def offsets(self) -> np.ndarray:
        """d2t, (Vd,) int32: draft id i is target id i + d2t[i]."""
        return (self.ids - np.arange(len(self.ids))).astype(np.int32)


def choose_vocabulary(examples: Sequence[Example], size: int, vocab_size: int) -> DraftVocabulary:
    """The ``size`` tokens that are most frequent in the answers, of ``vocab_size``.

    Where the answers use fewer, the smallest ids that are left fill it up: in most
    vocabularies these are the commonest.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"the draft vocabulary is to have {size} tokens, but the target has {vocab_size}: "
            "give at most that many."
        )
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.tokens[example.num_prompt :])
    order = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    ids = np.array(sorted(order[:size]), np.int32)
    covered = sum(counts[token] for token in order[:size])
    return DraftVocabulary(ids, covered / max(1, sum(counts.values())))


def coverage(examples: Sequence[Example], ids: np.ndarray) -> float:
    """The share of the answers' tokens that are among ``ids``."""
    known = set(ids.tolist())
    answers = [token for x in examples for token in x.tokens[x.num_prompt :]]
    return sum(token in known for token in answers) / max(1, len(answers))
