"""Batches: each follows from the seed and its number only, and ranks share it without a rest."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from mlx_eagle.train.batches import PAD_TO, BatchOrder, make_batch
from mlx_eagle.train.data import Example

LENGTHS = [5 + 37 * i % 400 for i in range(23)]
SIZE = 4
EXAMPLES = tuple(Example(tuple(range(1, n + 1)), n // 3) for n in LENGTHS)


def test_a_batch_does_not_depend_on_those_before():
    """A run that resumes learns from the same batches as one that was not stopped."""
    whole = BatchOrder(LENGTHS, SIZE, seed=3)
    batches = [whole.batch(number) for number in range(4 * whole.num_batches)]
    for number in (17, 2, 9, 19):
        assert BatchOrder(LENGTHS, SIZE, seed=3).batch(number) == batches[number]
    assert [BatchOrder(LENGTHS, SIZE, seed=4).batch(i) for i in range(5)] != batches[:5]


def test_an_epoch_has_a_sequence_at_most_once_and_leaves_out_others_each_time():
    order = BatchOrder(LENGTHS, SIZE, seed=0)
    assert order.num_batches == 5
    left_out = []
    for epoch in range(8):
        numbers = [order.batch(5 * epoch + i) for i in range(5)]
        counts = Counter(number for batch in numbers for number in batch)
        assert set(counts.values()) == {1} and counts.total() == 20
        left_out.append(frozenset(range(23)) - set(counts))
    assert len(set(left_out)) > 4


def test_the_sequences_of_a_batch_are_of_similar_length():
    """Sorted by length in parts of ``PAD_TO``, no two batches of an epoch overlap."""
    order = BatchOrder(LENGTHS, SIZE, seed=1)
    for epoch in range(4):
        parts = [
            sorted(-(-LENGTHS[i] // PAD_TO) for i in order.batch(5 * epoch + n)) for n in range(5)
        ]
        parts.sort()
        assert all(low[-1] <= high[0] for low, high in pairwise(parts))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_have_each_sequence_of_a_batch_once(num_ranks):
    numbers = BatchOrder(LENGTHS, SIZE, seed=2).batch(3)
    parts = [make_batch(EXAMPLES, numbers, rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(number for part in parts for number in part.numbers) == sorted(numbers)
    longest = max(LENGTHS[number] for number in numbers)
    for part in parts:
        assert part.tokens.shape == (SIZE // num_ranks, longest)
        for row, number in enumerate(part.numbers):
            example = EXAMPLES[number]
            tokens = part.tokens[row]
            assert tuple(tokens[: len(example.tokens)]) == example.tokens
            assert not tokens[len(example.tokens) :].any()
            # The slot before each token of the answer.
            wanted = np.arange(len(tokens))
            wanted = (wanted >= example.num_prompt - 1) & (wanted < len(example.tokens) - 1)
            assert np.array_equal(part.counts[row], wanted)
