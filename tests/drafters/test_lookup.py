"""Prompt lookup: the index against a naive search, and what it is for."""

import random

import mlx.core as mx
import pytest
from drafter_pairs import naive_lookup
from helpers import VOCAB, Recital, speculative

from mlx_eagle.drafters.lookup import LookupDrafter, NgramIndex


def test_lookup_equals_its_naive_twin():
    dice = random.Random(3)
    for _ in range(150):
        max_ngram = dice.randint(1, 4)
        min_ngram = dice.randint(1, max_ngram)
        index, text = NgramIndex(max_ngram, min_ngram), []
        for _ in range(40):
            size = dice.randint(1, 6)
            n, copied = index.match(size)
            assert copied == naive_lookup(text, size, max_ngram, min_ngram)
            assert copied == (naive_lookup(text, size, n, n) if n else [])
            token = dice.randrange(5)
            index.append(token)
            text.append(token)


def test_lookup_reads_no_rows_after_the_last():
    drafter = LookupDrafter().begin()
    drafter.extend(mx.array([1, 2, 3]), None)
    drafter.extend(mx.array([1, 2, 9, 9]), None, last=mx.array(1))
    assert drafter.propose(4, None).tokens.tolist() == [3, 1, 2, 3]
    drafter.extend(mx.array([7, 3]), None, last=mx.array(0))
    draft = drafter.propose(4, None)
    assert draft.tokens.shape == (0,) and draft.tokens.dtype == mx.int32


def test_lookup_on_copy_and_edit():
    dice = random.Random(5)
    original = [dice.randrange(VOCAB) for _ in range(80)]
    edited = list(original)
    for place in (12, 33, 34, 61):
        edited[place] = (edited[place] + 7) % VOCAB
    text = original + [1, 2] + edited + [0] * 10
    model, prompt = Recital(text), [*original, 1, 2]
    tokens, stats = speculative(model, LookupDrafter(), prompt, 80, num_draft_tokens=5)
    assert tokens == edited
    assert stats.num_head_forwards == 0
    assert stats.tau > 3.5


def test_lookup_on_a_repetitive_text():
    model = Recital([4, 5, 6] * 30)
    _, stats = speculative(model, LookupDrafter(), [4, 5, 6, 4], 25, num_draft_tokens=5)
    assert stats.tau == 6


def test_bad_ngrams_are_refused():
    for sizes in ({"max_ngram": 2, "min_ngram": 3}, {"min_ngram": 0}):
        with pytest.raises(ValueError, match="min_ngram of 1 or more"):
            LookupDrafter(**sizes)
