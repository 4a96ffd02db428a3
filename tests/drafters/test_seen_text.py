"""Matches in a text, against a naive search; how much is compared; answers of others."""

import random

import numpy as np
import pytest

from mlx_eagle.drafters import seen_text
from mlx_eagle.drafters.earlier_answers import LEAST_ANSWER, MOST_SCOPES, EarlierAnswers
from mlx_eagle.drafters.seen_text import GAP, NO_MATCH, SeenText, TextMatch

LONGEST = 64


def naive_match(text: list[int], size: int) -> tuple[int, tuple[int, ...]]:
    """Every place one by one: the longest match, of equally long ones the latest."""
    found, at = 0, 0
    for place in range(1, len(text)):
        length = 0
        while length < min(LONGEST, place) and (
            text[place - 1 - length] == text[len(text) - 1 - length] != GAP
        ):
            length += 1
        if length > 0 and length >= found:
            found, at = length, place
    copied = list(text)
    for i in range(size if found else 0):
        copied.append(copied[at + i])
    return found, tuple(copied[len(text) :])


@pytest.mark.parametrize("num_texts", [60, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_the_match_is_that_of_a_naive_search(num_texts):
    dice = random.Random(3)
    for _ in range(num_texts):
        num_tokens, seen, text = dice.randint(2, 20), SeenText(), []
        for _ in range(dice.randint(1, 40)):
            more = [dice.randrange(num_tokens) for _ in range(dice.randint(1, 4))]
            seen.extend(more)
            text += more
            if dice.random() < 0.2:
                length = dice.randint(0, len(text))
                seen.cut(length)
                del text[length:]
            size = dice.randint(1, 9)
            found = seen.match(size)
            assert (found.length, found.tokens) == naive_match(text, size)
            assert seen.tokens.tolist() == text


def test_edges():
    assert SeenText().match(3) == SeenText([5]).match(3) == SeenText([5, 6]).match(3) == NO_MATCH
    assert SeenText([7, 7]).match(3) == TextMatch(1, (7, 7, 7))
    long = list(range(100))
    assert SeenText([*long, *long]).match(2) == TextMatch(LONGEST, (0, 1))


def test_nothing_is_copied_across_a_gap_or_from_it():
    assert SeenText([1, 2, GAP, 3, 1, 2]).match(4) == TextMatch(2, ())
    assert SeenText([9, 1, 2, 8, GAP, 1, 2]).match(4) == TextMatch(2, (8,))
    assert SeenText([1, 2, GAP]).match(4) == NO_MATCH


def test_the_worst_text_is_compared_at_a_bounded_number_of_places(monkeypatch):
    """One token repeated: each place matches as long as any."""
    compared = []
    find = seen_text._longest
    monkeypatch.setattr(
        seen_text, "_longest", lambda text, end, places: compared.append(len(places)) or find(
            text, end, places
        )
    )  # fmt: skip
    assert SeenText([4] * 100_000).match(3) == TextMatch(LONGEST, (4, 4, 4))
    assert compared == [seen_text.MOST_STARTS]


def test_a_token_takes_four_bytes_and_loading_copies_no_more():
    seen = SeenText(list(range(100_000)))
    assert seen._array.nbytes == 4 * 100_000
    seen.extend([1])
    assert seen._array.nbytes <= 2 * 4 * 100_001


# --- answers of others ------------------------------------------------------------------------


def answer(first: int, length: int = LEAST_ANSWER) -> list[int]:
    return list(range(first, first + length))


def test_a_match_in_an_answer_needs_four_tokens():
    answers = EarlierAnswers(1000)
    answers.add(("a",), answer(100))
    for length, found in ((3, NO_MATCH), (4, TextMatch(4, (107, 108), is_answer=True))):
        end = np.array([9, 9, *range(107 - length, 107)])
        assert answers.match(("a",), end, 2) == found
    assert answers.match(("b",), np.arange(100, 110), 2) == NO_MATCH


def test_a_match_does_not_go_from_one_answer_into_the_next():
    answers = EarlierAnswers(1000)
    answers.add((), answer(100))
    answers.add((), answer(200))
    end = np.array(answer(100)[-5:])
    assert answers.match((), end, 4) == NO_MATCH, "nothing follows"
    end = np.array([*answer(100)[-5:], 200, 201])
    assert answers.match((), end, 4) == NO_MATCH, "two tokens of the second match"


def test_the_oldest_answers_leave_first_and_whole():
    answers = EarlierAnswers(3 * (LEAST_ANSWER + 1) + 5)
    for first, scope in ((100, "a"), (200, "b"), (300, "a"), (400, "b")):
        answers.add((scope,), answer(first))
        assert answers.num_tokens <= answers.bound
    kept = {
        first: answers.match((scope,), np.arange(first, first + 9), 1).length
        for first, scope in ((100, "a"), (200, "b"), (300, "a"), (400, "b"))
    }
    assert kept == {100: 0, 200: 9, 300: 9, 400: 9}
    assert answers.num_tokens == 3 * (LEAST_ANSWER + 1)


def test_what_is_not_kept():
    answers = EarlierAnswers(100)
    answers.add((), answer(100, LEAST_ANSWER - 1))
    answers.add((), answer(100, 100))  # with its gap it is one too many
    assert answers.num_tokens == 0
    nothing = EarlierAnswers(0)
    nothing.add((), answer(100))
    assert nothing.num_tokens == 0


def test_of_too_many_scopes_the_one_used_longest_ago_leaves():
    answers = EarlierAnswers(10_000)
    for scope in range(MOST_SCOPES):
        answers.add((str(scope),), answer(100))
    end = np.arange(100, 110)
    assert answers.match(("0",), end, 1).length == 10
    answers.add(("more",), answer(100))
    assert answers.match(("0",), end, 1).length == 10
    assert answers.match(("1",), end, 1) == NO_MATCH
