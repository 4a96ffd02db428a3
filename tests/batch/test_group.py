"""Requests that come and go: each gets the text that it gets alone, whoever shares its rounds."""

import itertools

import mlx.core as mx
import pytest
from architecture_configs import RECURRENT
from architectures import build
from costs import SettledCosts, curve
from grids import thorough
from helpers import plain, speculative, tiny_head, tiny_llama
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from test_batch import MODELS, PROMPTS, VOCAB
from test_rounds import BY_UPDATE, MANY, Texts, started
from tolerances import tolerance

from mlx_eagle.batch import rounds
from mlx_eagle.batch.group import Group
from mlx_eagle.batch.requests import Request, reason_not_batchable, restore_caches
from mlx_eagle.batch.rounds import Batch
from mlx_eagle.decoding import generate_step
from mlx_eagle.decoding.accept import AskedLogprobs
from mlx_eagle.decoding.auto import FixedController
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.base import NullDrafter
from mlx_eagle.drafters.tree import PLAIN, DraftPlan, DraftShape


def run(
    group: Group, arrivals: dict[int, Request], departures: dict[int, Request] | None = None
) -> list:
    """Rounds until all have ended; requests join and leave before the rounds of these numbers.

    Per round, what it has given: (request, whether it was shared, number of tokens).
    """
    seen, number = [], 0
    last = max(arrivals)
    while number <= last or not group.is_empty:
        if number in arrivals:
            group.join(arrivals[number])
        if number in (departures or {}):
            group.leave(departures[number])
        for made in group.round():
            seen.append((made.request, made.is_shared, len(made.tokens)))
            assert made.logprobs == [] and made.num_kept <= made.length
        number += 1
        assert number < 500, "it does not end"
    return seen


def assert_goes_on(model, request: Request, prompt: list[int]) -> None:
    """Its caches are those of its text."""
    if not request.cache:
        restore_caches(request)
    cache = request.cache[: len(make_prompt_cache(model))]
    text = [*prompt, *request.tokens, *request.tokens_after_leave]
    assert max(getattr(layer, "offset", len(text)) for layer in cache) == len(text)
    assert plain(model, [7, 9], 3, prompt_cache=cache) == plain(model, [*text, 7, 9], 3)


@pytest.mark.parametrize("make", thorough(MODELS, "gemma3, windowed"))
@pytest.mark.parametrize("size", thorough([1, 2, 3, 5, 7, "auto", 0], 3, "auto"))
def test_texts_are_those_of_each_alone(make, size):
    """Two come while the first writes, and go; it is by itself again, twice."""
    model = MODELS[make]()
    drafter = tiny_head(model)
    group = Group(model, drafter, generation_stream, size)
    lengths = [34, 6, 4, 1 + 8]
    requests = [started(model, drafter, MANY[b], n) for b, n in enumerate(lengths)]
    if size == 0:
        for request in requests:
            request.decoder.discards_features = True
    seen = run(group, dict(zip([0, 3, 4, 14], requests, strict=True)))
    for prompt, length, request in zip(MANY, lengths, requests, strict=False):
        assert request.tokens == plain(model, prompt, length)
        assert request.stats.num_emitted == length - 1
        assert_goes_on(model, request, prompt)
    assert {*map(id, group.take_left())} == {*map(id, requests)} and group.take_left() == []
    of_first = [is_shared for request, is_shared, _ in seen if request is requests[0]]
    changes = [a for a, b in itertools.pairwise(of_first) if a != b]
    assert not of_first[0] and of_first[-1] is False and changes == [False, True] * 2
    assert all(is_shared for request, is_shared, _ in seen if request is requests[2])
    if size == 0:
        assert sum(request.stats.num_drafted for request in requests) == 0


STATES = tuple(name for name in RECURRENT if name != "longcat_flash_ngram")  # never shared
SMALL = [[t % 90 for t in prompt] for prompt in MANY]  # of the tokens of any architecture


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STATES)
def test_recurrent_targets_are_drafted_for_in_shared_rounds(name):
    """Two come while the first writes, and go: every text and cache is that of the text alone."""
    model, lengths = build(name), [24, 6, 4, 1 + 8]
    assert reason_not_batchable(model, make_prompt_cache(model)) is None
    drafter = Texts(model, SMALL[:4], 40, lambda r, size: r * r % (size + 1), 96)
    requests = [started(model, drafter, SMALL[b], n) for b, n in enumerate(lengths)]
    group = Group(model, drafter, generation_stream, 3)
    seen = run(group, dict(zip([0, 2, 3, 7], requests, strict=True)))
    for prompt, length, request in zip(SMALL, lengths, requests, strict=False):
        assert request.tokens == drafter.texts[prompt[0]][len(prompt) :][:length]
        assert_goes_on(model, request, prompt)
    assert any(is_shared and num > 1 for _, is_shared, num in seen)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BY_UPDATE)
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_who_leaves_a_recurrent_batch_gets_its_states_back(name, stop):
    """After any round, with a draft under way behind it."""
    model = build(name)
    drafter = Texts(model, SMALL[:3], 60, lambda r, size: (r + 1) % (size + 1), 96)
    requests = [started(model, drafter, prompt, 30) for prompt in SMALL[:3]]
    group = Group(model, drafter, generation_stream, 3)
    for b, request in enumerate(requests):
        request.decoder.drafter.num_rounds = b  # each keeps another number of rows
        group.join(request)
    for _ in range(stop):
        group.round()
    group.leave(requests[1])
    group.round()
    assert group.take_left() == [requests[1]]
    assert_goes_on(model, requests[1], SMALL[1])
    while not group.is_empty:
        group.round()
    assert requests[0].tokens == plain(model, SMALL[0], 30)


@pytest.mark.parametrize("name", thorough(BY_UPDATE, "lfm2"))
def test_recurrent_targets_share_plain_steps(name):
    """What an ended request leaves has not seen the step that was under way."""
    model = build(name)
    drafter = tiny_head(model)
    assert reason_not_batchable(model, make_prompt_cache(model), plainly=True) is None
    group = Group(model, drafter, generation_stream, 3, drafts_together=False)
    prompts, lengths = SMALL, [34, 6, 4, 1 + 8]
    requests = [started(model, drafter, prompts[b], n) for b, n in enumerate(lengths)]
    seen = run(group, dict(zip([0, 3, 4, 14], requests, strict=True)))
    for prompt, length, request in zip(prompts, lengths, requests, strict=False):
        assert request.tokens == plain(model, prompt, length)
        assert_goes_on(model, request, prompt)
    of_first = [shared for request, shared, _ in seen if request is requests[0]]
    assert True in of_first and not of_first[0] and not of_first[-1]
    # By itself it was drafted for, in the end as well, and in shared rounds nobody was.
    assert all(num == 1 for _, is_shared, num in seen if is_shared)
    assert requests[0].stats.num_drafted > 0 == requests[2].stats.num_drafted


@pytest.mark.parametrize("make", thorough(MODELS, "llama"))
def test_drafts_go_on_where_they_were(make):
    """A head that moves in and out of shared rounds drafts what one drafts that never did."""
    model = MODELS[make]()
    drafter, size, length = tiny_head(model), 3, 40
    alone, other = (started(model, drafter, MANY[b], length) for b in (0, 1))
    group = Group(model, drafter, generation_stream, size)
    run(group, {0: alone})
    first = started(model, drafter, MANY[0], length)
    group = Group(model, drafter, generation_stream, size)
    run(group, {0: first, 4: other}, {9: other})
    assert first.tokens == alone.tokens
    for name in ("num_drafted", "num_accepted", "draft_lengths", "accepted_histogram"):
        assert getattr(first.stats, name) == getattr(alone.stats, name), name
    for mine, theirs in zip(first.cache, alone.cache, strict=True):
        assert mine.offset == theirs.offset
        if mine.keys is not None and mine.offset:
            pairs = zip(mine.keys_and_values(), theirs.keys_and_values(), strict=True)
            assert all(mx.allclose(a, b, atol=1e-3).item() for a, b in pairs)


def test_greedy_and_sampled_ones_together():
    model = MODELS["llama"]()
    drafter, length = tiny_head(model), 12
    kinds = [{}, {"sampler": Sampling(temp=0.8, seed=1)}, {"sampler": Sampling(temp=0.8, seed=1)}]
    requests = [
        started(model, drafter, prompt, length, **kind)
        for prompt, kind in zip(MANY, kinds, strict=False)
    ]
    run(Group(model, drafter, generation_stream, 2), dict(zip([0, 2, 4], requests, strict=True)))
    for prompt, kind, request in zip(MANY, kinds, requests, strict=False):
        tokens, _ = speculative(model, drafter, prompt, length, num_draft_tokens=2, **kind)
        assert request.tokens == tokens


def rounds_with_logprobs(monkeypatch, wishes: list[int | None]) -> tuple[list, list[Request], int]:
    """What requests get that ask for these, one by itself and then all in shared rounds.

    And how often the host waits; for nothing but what was computed with the round.
    """
    model, waits, computed = tiny_llama(vocab_size=VOCAB), [], []
    drafter = tiny_head(model)
    requests = [started(model, drafter, MANY[b], n) for b, n in enumerate((30, 8, 12))]
    for request, num_top in zip(requests, wishes, strict=True):
        request.decoder.num_top = num_top
    mx_eval, read = mx.eval, AskedLogprobs.read
    found: list = [[] for _ in requests]

    def counted(*args) -> None:
        waits.append(1)
        computed.extend(array for part in args if type(part) is list for array in part)
        mx_eval(*args)

    def checked(self, *args, **kwargs):
        assert {id(array) for array in self.arrays} <= {id(array) for array in computed}
        return read(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", counted)
        patch.setattr(AskedLogprobs, "read", checked)
        group = Group(model, drafter, generation_stream, 3)
        for number in itertools.count():
            arriving = {0: requests[:1], 3: requests[1:]}.get(number, [])
            for request in arriving:
                group.join(request)
            if group.is_empty:
                break
            for made in group.round():
                found[requests.index(made.request)] += made.logprobs
    for request in requests:
        text = mx.array([request.prompt + request.tokens])
        logits = model(text)[0, len(request.prompt) : -1]
        request.expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return found, requests, len(waits)


def test_logprobs_that_are_asked_for_come_with_the_round(monkeypatch):
    """As many waits as without, by itself and in shared rounds; each gets what it asks for."""
    asked, requests, num_waits = rounds_with_logprobs(monkeypatch, [3, None, 0])
    unasked, _, num_without = rounds_with_logprobs(monkeypatch, [None] * 3)
    assert num_waits == num_without and unasked == [[], [], []] and asked[1] == []
    for b, num_top in ((0, 3), (2, 0)):
        rows, tokens = requests[b].expected.tolist(), requests[b].tokens[1:]
        assert len(asked[b]) == len(tokens)
        for row, token, (own, top) in zip(rows, tokens, asked[b], strict=True):
            assert own == pytest.approx(row[token], abs=10 * tolerance())
            best = sorted(row, reverse=True)[:num_top]
            assert [value for _, value in top] == pytest.approx(best, abs=10 * tolerance())
            assert [row[i] for i, _ in top] == pytest.approx(best, abs=10 * tolerance())


def test_who_leaves_gives_its_caches_back():
    """Before any round, by itself with tokens that nobody wants, in shared rounds, and waiting."""
    model = MODELS["llama"]()
    drafter = Texts(model, MANY[:5], 30, lambda r, num: num)

    def request(b: int) -> Request:
        return started(model, drafter, MANY[b], 24)

    group = Group(model, drafter, generation_stream, 3)
    group.join(waiting := request(0))
    group.leave(waiting)
    assert group.round() == [] and group.is_empty and group.take_left() == [waiting]
    assert_goes_on(model, waiting, MANY[0])
    for num_unread in range(4):
        group.join(alone := request(1))
        assert len(group.round()[0].tokens) == 4
        group.leave(alone, num_unread)
        assert len(alone.tokens) == 5 - num_unread and group.take_left() == [alone]
        assert_goes_on(model, alone, MANY[1])
    first, second, third = request(2), request(3), request(4)
    group.join(first)
    group.join(second)
    group.round()
    group.join(third)
    group.leave(third)
    group.leave(first)
    while not group.is_empty:
        group.round()
    assert {*map(id, group.take_left())} == {id(first), id(second), id(third)}
    for b, each in ((2, first), (3, second), (4, third)):
        assert_goes_on(model, each, MANY[b])
    assert second.tokens == plain(model, MANY[3], 24)
    assert len(third.tokens) == 1 < len(first.tokens) < 24


def test_where_no_draft_can_pay_nothing_is_drafted(monkeypatch):
    """Neither alone nor together, and the drafter is let go of."""
    model = MODELS["llama"]()
    drafter = tiny_head(model)
    hopeless = SettledCosts(curve(lambda k: 100.0))
    for module in (generate_step, rounds):
        monkeypatch.setattr(module, "costs_of", lambda *_: hopeless)
    group = Group(model, drafter, generation_stream, "auto")
    first, second = (started(model, drafter, MANY[b], 20) for b in (0, 1))
    seen = run(group, {0: first, 5: second})
    assert {is_shared for _, is_shared, _ in seen} == {True, False}
    for b, request in ((0, first), (1, second)):
        assert request.tokens == plain(model, MANY[b], 20)
        assert request.decoder.discards_features and request.stats.num_drafted == 0


def test_a_drafter_that_falls_behind_catches_up_in_time(monkeypatch):
    """What it has yet to absorb does not grow without end; it then drafts as if it never had."""
    monkeypatch.setattr(rounds, "MOST_BEHIND", 4)
    model = MODELS["llama"]()
    drafter = tiny_head(model)
    found = []
    for absorbs in (False, True):
        batch = Batch(model, drafter, FixedController(PLAIN, drafting_off=True))
        for b in (0, 1):
            batch.join(started(model, drafter, MANY[b], 60))
        with mx.stream(generation_stream):
            batch.admit()
            for _ in range(11):
                batch.finish(batch.launch(DraftPlan(PLAIN), absorb=absorbs))
                assert len(batch._pending) < 4
            done = batch.launch(DraftPlan(DraftShape(3)))
            batch.finish(done)
        found.append([(part.run, part.num_kept) for part in done.parts])
    assert found[0] == found[1]


def test_a_drafter_that_is_none():
    model = tiny_llama(vocab_size=VOCAB)
    request = started(model, NullDrafter(), PROMPTS[0], 9)
    request.decoder.discards_features = True
    run(Group(model, NullDrafter(), generation_stream, 0), {0: request})
    assert request.tokens == plain(model, PROMPTS[0], 9)
    assert len(request.cache) == len(make_prompt_cache(model))
