"""What a head can draft: the tokens that answers use most."""

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
    ids = resized_vocabulary(examples, np.array([], np.int32), size, vocab_size)
    return DraftVocabulary(ids, coverage(examples, ids))


def resized_vocabulary(
    examples: Sequence[Example], ids: np.ndarray, size: int, vocab_size: int
) -> np.ndarray:
    """What a head is to draft that can draft ``ids`` (Vd,): (size,), ascending.

    All of them and the other tokens that are most frequent in the answers, or those of them that
    are.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"the draft vocabulary is to have {size} tokens, but here it can have 1 to "
            f"{vocab_size}: give a --draft-vocab-size between them."
        )
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.tokens[example.num_prompt :])
    own = set(ids.tolist())
    kept, choice = ([], own) if size < len(own) else (list(own), set(range(vocab_size)) - own)
    order = sorted(choice, key=lambda token: (-counts[token], token))
    return np.array(sorted([*kept, *order[: size - len(kept)]]), np.int32)


def coverage(examples: Sequence[Example], ids: np.ndarray) -> float:
    """The share of the answers' tokens that are among ``ids``."""
    known = set(ids.tolist())
    answers = [token for x in examples for token in x.tokens[x.num_prompt :]]
    return sum(token in known for token in answers) / max(1, len(answers))
