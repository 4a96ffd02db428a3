"""Batches of training sequences: their order, which a seed settles, and their padding."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .data import Example

PAD_TO = 64  # tokens: texts of a batch differ by up to this


@dataclass(frozen=True)
class TokenBatch:
    """Sequences padded to one length: ``tokens`` (B, T) int32, ``counts`` (B, T) bool.

    The length is that of the longest on all ranks; ``numbers`` are those of this rank's examples.
    A slot counts if the token that it takes, the one after its own, is part of the answer:
    decoding drafts from each of these slots, the first time from the last one of the prompt.
    """

    tokens: np.ndarray
    counts: np.ndarray
    numbers: tuple[int, ...]


class BatchOrder:
    """Order of batches: the sequences of each depend only on the seed and the batch's number.

    In an epoch every sequence is used at most once. The sequences of a batch are of similar
    length, and the batches come in random order. If the sequences do not divide into batches, a
    few are left out, other ones in every epoch.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int):
        if len(lengths) < batch_size:
            raise ValueError(
                f"there are {len(lengths)} sequences to learn from, fewer than the batch size "
                f"of {batch_size}: give more data, or a smaller --batch-size."
            )
        self.num_batches = len(lengths) // batch_size
        self._lengths = lengths
        self._size = batch_size
        self._seed = seed
        self._batches = lru_cache(1)(self._make_epoch)

    def batch(self, number: int) -> list[int]:
        """Return the numbers of the sequences in a batch; batches count from 0 over all epochs."""
        epoch, place = divmod(number, self.num_batches)
        return self._batches(epoch)[place]

    def _make_epoch(self, epoch: int) -> list[list[int]]:
        rng = random.Random(f"{self._seed}:{epoch}")
        order = list(range(len(self._lengths)))
        rng.shuffle(order)
        order = order[: self.num_batches * self._size]
        order.sort(key=lambda i: -(-self._lengths[i] // PAD_TO))
        starts = range(0, len(order), self._size)
        batches = [order[start : start + self._size] for start in starts]
        rng.shuffle(batches)
        return batches


def make_batch(
    examples: Sequence[Example], numbers: Sequence[int], rank: int = 0, num_ranks: int = 1
) -> TokenBatch:
    """Make a batch of the examples with these ``numbers``; each rank takes its share of them."""
    longest = max(len(examples[i].tokens) for i in numbers)
    own = tuple(numbers[rank::num_ranks])
    shape = (len(own), longest)
    tokens = np.zeros(shape, np.int32)
    counts = np.zeros(shape, bool)
    for row, number in enumerate(own):
        example = examples[number]
        tokens[row, : len(example.tokens)] = example.tokens
        counts[row, max(0, example.num_prompt - 1) : len(example.tokens) - 1] = True
    return TokenBatch(tokens, counts, own)
