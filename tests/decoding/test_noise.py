"""A ``Sampling``'s noise: fresh per generation, or the seed's; of each row; in any thread."""

import threading

import mlx.core as mx
import pytest
from grids import thorough
from helpers import PROMPT, speculative, tiny_head, tiny_llama
from mlx_lm.generate import generate_step

from mlx_eagle.decoding.sampling import Sampling

NUM = 12


@pytest.fixture(scope="module")
def pair():
    model = tiny_llama()
    return model, tiny_head(model)


def text(pair, sampler, **options) -> tuple[int, ...]:
    options = {"num_draft_tokens": 3} | options
    return tuple(speculative(*pair, PROMPT, NUM, sampler=sampler, **options)[0])


def plain_text(pair, sampler) -> tuple[int, ...]:
    steps = generate_step(mx.array(PROMPT), pair[0], max_tokens=NUM, sampler=sampler)
    return tuple(token for token, _ in steps)


@pytest.mark.parametrize("acceptance", ["match", "coupled", "reject"])
def test_one_sampler_without_a_seed_gives_four_texts(pair, acceptance):
    sampler = Sampling(temp=1.0)
    assert len({text(pair, sampler, acceptance=acceptance) for _ in range(4)}) == 4


def test_one_sampler_without_a_seed_gives_four_texts_of_plain_decoding(pair):
    sampler = Sampling(temp=1.0)
    assert len({text(pair, sampler, num_draft_tokens=0) for _ in range(4)}) == 4
    assert len({plain_text(pair, sampler) for _ in range(4)}) == 4, "in mlx-lm's own function"


@pytest.mark.parametrize("acceptance", ["match", "coupled"])
@pytest.mark.parametrize("k", thorough([1, 3, 5], 3))
def test_a_seed_gives_one_text_drafted_or_not(pair, acceptance, k):
    sampler = Sampling(temp=1.0, seed=3)
    texts = [text(pair, sampler, acceptance=acceptance, num_draft_tokens=k) for _ in range(2)]
    assert {*texts} == {text(pair, sampler, num_draft_tokens=0)}
    assert {*texts} == {plain_text(pair, Sampling(temp=1.0, seed=3))}
    assert texts[0] != text(pair, Sampling(temp=1.0, seed=4), acceptance=acceptance)


def test_mlx_s_seed_repeats_a_sampler_without_one(pair):
    texts = []
    for _ in range(2):
        mx.random.seed(11)
        sampler = Sampling(temp=1.0)
        texts.append([text(pair, sampler) for _ in range(2)])
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]


def test_rows_differ_and_row_0_is_the_generation_alone(pair):
    texts = [text(pair, Sampling(temp=1.0, seed=3, row=row)) for row in range(4)]
    assert len(set(texts)) == 4
    assert texts[0] == text(pair, Sampling(temp=1.0, seed=3))
    assert texts[3] == text(pair, Sampling(temp=1.0, seed=3, row=1).begin(2))


def test_rows_of_one_call_draw_with_the_noise_of_their_rows():
    logprobs = mx.zeros((3, 50)) - mx.log(mx.array(50.0))
    together = Sampling(temp=1.0, seed=5)
    alone = [Sampling(temp=1.0, seed=5, row=row) for row in range(3)]
    for _ in range(4):
        drawn = together(logprobs)
        assert drawn.shape == (3,)
        assert drawn.tolist() == [s(logprobs[:1]).item() for s in alone]


def in_thread(function):
    """What ``function`` returns or raises in a thread of its own."""
    results = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as err:  # shown to the test
            results.append(err)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    (result,) = results
    return result


def test_a_sampler_of_one_thread_works_in_another():
    logprobs = mx.log(mx.softmax(mx.arange(20.0)))[None]
    mx.eval(logprobs)
    for sampler in (Sampling(temp=1.0, seed=3), Sampling(temp=1.0)):
        here = [sampler.begin()(logprobs).item() for _ in range(3)]
        there = in_thread(lambda s=sampler: [s.begin()(logprobs).item() for _ in range(3)])
        if sampler.seed is not None:
            assert there == here
        used = in_thread(lambda s=sampler: s(logprobs).item())
        assert isinstance(used, int)


def test_fresh_threads_draw_fresh_noise():
    """mlx's random state of every thread starts at the same numbers."""
    logprobs = mx.zeros((1, 1000))
    mx.eval(logprobs)
    drawn = [in_thread(lambda: Sampling(temp=1.0)(logprobs).item()) for _ in range(4)]
    assert len(set(drawn)) == 4


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "7", True])
def test_seeds_out_of_range_are_refused(seed):
    with pytest.raises(ValueError, match="give a whole number from 0 to"):
        Sampling(temp=1.0, seed=seed)


@pytest.mark.parametrize("temp", [0, -1, float("nan"), float("inf"), "1", None])
def test_temperatures_that_are_none_are_refused(temp):
    with pytest.raises(ValueError, match="sampling needs a number above 0"):
        Sampling(temp)


def test_a_temperature_too_large_for_an_integer_of_mlx():
    assert Sampling(temp=2**70, seed=1)(mx.zeros((1, 4))).item() in range(4)
