"""What a head can draft: the tokens that answers use most."""

from collections import Counter
from collections.abc import Iterable, Sequence
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
    _check_size(size, 1, vocab_size)
    counts = _count(examples)
    ids = np.array(sorted(_by_frequency(counts, range(vocab_size))[:size]), np.int32)
    covered = sum(counts[token] for token in ids.tolist())
    return DraftVocabulary(ids, covered / max(1, counts.total()))


def widened_vocabulary(
    examples: Sequence[Example], ids: np.ndarray, size: int, vocab_size: int
) -> np.ndarray:
    """``ids`` (Vd,) and the most frequent other tokens of the answers: (size,), ascending."""
    _check_size(size, len(ids), vocab_size)
    others = set(range(vocab_size)) - set(ids.tolist())
    added = _by_frequency(_count(examples), others)[: size - len(ids)]
    return np.array(sorted([*ids.tolist(), *added]), np.int32)


def _check_size(size: int, least: int, most: int) -> None:
    if not least <= size <= most:
        raise ValueError(
            f"the draft vocabulary is to have {size} tokens, but here it can have {least} to "
            f"{most}: give a --draft-vocab-size between them."
        )


def _count(examples: Sequence[Example]) -> Counter[int]:
    """How often the answers use each token."""
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.tokens[example.num_prompt :])
    return counts


def _by_frequency(counts: Counter[int], tokens: Iterable[int]) -> list[int]:
    return sorted(tokens, key=lambda token: (-counts[token], token))


def coverage(examples: Sequence[Example], ids: np.ndarray) -> float:
    """The share of the answers' tokens that are among ``ids``."""
    known = set(ids.tolist())
    answers = [token for x in examples for token in x.tokens[x.num_prompt :]]
    return sum(token in known for token in answers) / max(1, len(answers))
