"""Rounds of a batch: who comes and goes, and what a round asks of the device."""

import mlx.core as mx
import pytest
from architectures import build
from grids import thorough
from helpers import ScriptedDrafter, num_primitives, plain, tiny_head, tiny_llama
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from test_batch import MODELS, PROMPTS, VOCAB
from tolerances import tolerance

from mlx_eagle.batch.acceptance import judged_together
from mlx_eagle.batch.requests import Options, Request, first_token, prefill, restore_caches
from mlx_eagle.batch.rounds import Batch
from mlx_eagle.decoding.auto import FixedController
from mlx_eagle.decoding.decoder import Limits
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.rules import make_rule
from mlx_eagle.decoding.sampling import Sampling, noise_of_rows
from mlx_eagle.drafters.feature_drafter import HeadBatchDrafter
from mlx_eagle.drafters.tree import DraftPlan, DraftShape
from mlx_eagle.target_model.ragged import RaggedCaches
from mlx_eagle.target_model.states import StateUpdates, recurrent_caches
from mlx_eagle.target_model.target import Target

BY_UPDATE = (
    "bailing_hybrid", "jamba", "lfm2", "mamba", "mamba2", "qwen3_next", "recurrent_gemma",
    "rwkv7",
)  # fmt: skip
"""An architecture for each way in which recurrent states come about."""


def started(model, drafter, prompt, max_tokens, chunk=2048, ends=(), **options) -> Request:
    """A request that may join."""
    request = Request(prompt, Limits(max_tokens, ends), make_prompt_cache(model))
    for _ in prefill(model, drafter, request, Options(prefill_step_size=chunk, **options)):
        pass
    first_token(request)
    return request


def graph_of(batch: Batch, size: int) -> int:
    """How many primitives a round of that size has, with what it leaves in the caches."""
    with mx.stream(generation_stream):
        done = batch.launch(DraftPlan(DraftShape(size)))
        caches = [layer.state for layer in batch._caches.layers + batch._drafts._caches.layers]
        arrays = [
            done.verification.packed,
            *batch._drafts.pending(),
            *(a for state in caches for a in state),
        ]
        count = num_primitives(*arrays)
        mx.eval(arrays)
        batch.finish(done)
    return count


SAMPLED = {"sampler": Sampling(temp=0.8, top_p=0.9, seed=1)}


CASES = [("llama", {}), ("gemma3, windowed", {}), ("llama", SAMPLED)]


@pytest.mark.parametrize("case", thorough(CASES, CASES[-1]), ids=str)
def test_a_round_asks_no_more_of_the_device_for_many_than_for_one(monkeypatch, case):
    make, options = case
    model = MODELS[make]()
    drafter, counts = tiny_head(model), {}
    for num in (1, 2, 8):
        batch = Batch(model, drafter, FixedController(DraftShape(3)))
        for b in range(num):
            batch.join(started(model, drafter, [b + 1] * (3 + b), -1, **options))
        batch.admit()
        with monkeypatch.context() as patch:
            # Nothing is computed before it is counted.
            patch.setattr(mx, "async_eval", lambda *arrays: None)
            graph_of(batch, 3)  # the first one grows the row buffers
            counts[num] = {size: graph_of(batch, size) for size in (0, 1, 3)}
    assert counts[2] == counts[8]
    for size, one in counts[1].items():  # whose rope takes a single offset
        assert 100 < one <= counts[8][size] <= 1.05 * one, counts


class Texts(ScriptedDrafter):
    """Knows the text of every prompt by its first token; accepted lengths follow a script."""

    def __init__(self, model, prompts, num_tokens, script, vocab=VOCAB):
        self.texts = {p[0]: p + plain(model, p, num_tokens) for p in prompts}
        super().__init__([], script, vocab)

    def propose(self, size, pick=None):
        self.text = self.texts[self.absorbed[0][0][0].item()]
        return super().propose(size, pick)


MANY = [[i + 1, *PROMPTS[i % 4][1:], i] for i in range(7)]


def run_with_visitors(model, drafter, size, lengths, make_options, ends=()):
    """Seven requests, at most three at a time: one joins whenever there is room."""
    batch = Batch(model, drafter, FixedController(DraftShape(size)), keep_caches=True)
    waiting, requests, most = list(range(len(MANY))), [], 0
    while True:
        while waiting and sum(not request.ended for request in requests) < 3:
            b = waiting.pop(0)
            # The prompt in chunks, with rounds of the others between them.
            request = Request(MANY[b], Limits(lengths[b], ends), make_prompt_cache(model))
            options = Options(**make_options(b), prefill_step_size=5)
            for _ in prefill(model, drafter, request, options):
                batch.round()
            first_token(request)
            batch.join(request)
            requests.append(request)
        if batch.round() is None and not waiting:
            for request in requests:
                restore_caches(request)
            return requests
        most = max(most, len(batch.requests))
        assert most <= 3


@pytest.mark.parametrize("make", thorough(MODELS, "gemma3, windowed"))
@pytest.mark.parametrize("size", thorough(range(1, 8), 4))
def test_requests_come_and_go(make, size):
    model = MODELS[make]()
    lengths = [18, 3, 11, 1, 14, 7, 16]  # past the window of 12, or not
    drafter = Texts(model, MANY, 40, lambda r, num: (r * r + size) % (num + 1))
    requests = run_with_visitors(model, drafter, size, lengths, lambda b: {})
    for prompt, length, request in zip(MANY, lengths, requests, strict=True):
        assert request.tokens == drafter.texts[prompt[0]][len(prompt) :][:length]
        assert request.stats.num_emitted == length - 1
        cache = request.cache[: len(model.layers)]
        assert cache[0].offset == len(prompt) + length
        assert plain(model, [7, 9], 3, prompt_cache=cache) == plain(
            model, [*prompt, *request.tokens, 7, 9], 3
        )


def prompts_for(num: int) -> list[list[int]]:
    """Prompts for any architecture, each with another first token."""
    return [[b + 1, *(token % 90 for token in PROMPTS[b % 4][1:]), b] for b in range(num)]


def rounds_of(model, num: int, length: int, size: int = 3) -> int:
    """How many passes of the target that many requests take, every text and cache checked.

    In one round each text has another number of right tokens.
    """
    prompts = prompts_for(num)
    drafter = Texts(model, prompts, length + size, lambda r, most: most - r % 3 % (most + 1), 96)
    batch = Batch(model, drafter, FixedController(DraftShape(size)), keep_caches=True)
    requests = [started(model, drafter, prompt, length - b) for b, prompt in enumerate(prompts)]
    for b, request in enumerate(requests):
        request.decoder.drafter.num_rounds = b
        batch.join(request)
    count = 0
    while batch.round() is not None:
        count += 1
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens == drafter.texts[prompt[0]][len(prompt) :][: len(request.tokens)]
        assert len(request.tokens) == request.limits.max_tokens
        restore_caches(request)
        cache = request.cache[: len(make_prompt_cache(model))]
        text = [*prompt, *request.tokens, 7, 9]
        assert plain(model, [7, 9], 3, prompt_cache=cache) == plain(model, text, 3)
    return count


@pytest.mark.parametrize("name", thorough(BY_UPDATE, "lfm2"))
@pytest.mark.parametrize("num", thorough([1, 2, 4, 8], 4))
def test_recurrent_batches_take_as_many_passes_as_others(name, num):
    """With the same drafts accepted, in unequal numbers; and fewer than half of a pass a token."""
    llama = tiny_llama(vocab_size=96)
    count = rounds_of(build(name), num, 20)
    assert count == rounds_of(llama, num, 20) <= 20 / 2


def operations_after(model, kept: list[int]) -> int:
    """Of a pass of the target, after one of which each text keeps another number of rows."""
    target, caches = Target(model), RaggedCaches()
    for b in range(len(kept)):
        cache = make_prompt_cache(model)
        target(mx.array([b + 1] * (3 + b)), cache)
        caches.join(cache)
    rows = mx.array([[5, 6, 7, 8]] * len(kept))
    for counted in (False, True):
        opened = caches.open()
        with target.recording(opened, rows.shape[1], caches.keep_updates):
            logits, _ = target.batch(rows, opened)
        if counted:
            return num_primitives(logits)
        mx.eval(logits, [c.state for c in opened])
        caches.advance(kept)
    raise AssertionError


def test_states_are_made_for_all_texts_at_once():
    """Unequal numbers cost what equal ones do but for an index, however many texts there are."""
    model = build("qwen3_next")
    num_states = len(list(recurrent_caches(make_prompt_cache(model))))
    equal, unequal = operations_after(model, [2, 2]), operations_after(model, [2, 3])
    whole = operations_after(model, [4, 4])
    assert operations_after(model, [1, 2, 3, 4]) == unequal
    assert whole < equal and unequal <= equal + 3 * num_states + 8


def test_the_next_drafts_are_started_before_states_are_restored(monkeypatch):
    events: list[str] = []

    def watch(owner, method: str, event: str) -> None:
        original = getattr(owner, method)
        monkeypatch.setattr(
            owner, method, lambda *args: (events.append(event), original(*args))[1]
        )

    watch(Texts, "propose", "draft")
    watch(StateUpdates, "states", "restore")
    watch(Target, "batch", "pass")
    start = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *a: (events.append("start"), start(*a))[1])
    count = rounds_of(build("lfm2"), 2, 20)
    num_layers = 2
    a_round = ["draft", "draft", "start", *["restore"] * num_layers, "pass", "start"]
    found = sum(events[i : i + len(a_round)] == a_round for i in range(len(events)))
    assert count // 2 < found and events.count("restore") >= num_layers * found


@pytest.mark.parametrize("draft_cache", thorough(["exact", "lagging"], "exact"))
def test_greedy_and_sampled_requests_share_rounds(draft_cache):
    """Each gets the text that it gets alone, whatever the others are."""
    model = MODELS["llama"]()
    drafter, length = tiny_head(model).with_draft_cache(draft_cache), 8

    def ban(tokens, logits):
        return mx.where(mx.arange(VOCAB) == tokens[-1], -mx.inf, logits)

    kinds = [
        lambda: {},
        lambda: {"sampler": Sampling(temp=0.8, seed=1)},
        lambda: {"sampler": Sampling(temp=0.8, seed=2), "logits_processors": [ban]},
        lambda: {"sampler": Sampling(temp=0.5, top_k=20, seed=3), "acceptance": "match"},
        lambda: {"sampler": make_sampler(temp=0.0)},
        lambda: {"sampler": Sampling(temp=0.8, seed=2)},
        lambda: {"logits_processors": [ban]},
    ]
    requests = run_with_visitors(model, drafter, 2, [length] * 7, lambda b: kinds[b]())
    for prompt, kind, request in zip(MANY, kinds, requests, strict=True):
        steps = speculative_generate_step(
            mx.array(prompt), model, drafter, max_tokens=length, num_draft_tokens=2, **kind()
        )
        assert request.tokens == [token for token, _, _ in steps]


def test_a_request_that_leaves_gets_nothing_more():
    model = MODELS["llama"]()
    drafter = tiny_head(model)
    batch = Batch(model, drafter, FixedController(DraftShape(2)))
    first, second, third = (started(model, drafter, p, 20) for p in PROMPTS[:3])
    for request in (first, second, third):
        batch.join(request)
    batch.leave(third)  # before any round
    batch.round()
    batch.leave(first)
    had = list(first.tokens)
    while batch.round() is not None:
        pass
    assert first.tokens == had and len(third.tokens) == 1 and third not in batch.requests
    assert second.tokens == plain(model, PROMPTS[1], 20) and batch.requests == []
    batch.join(first := started(model, drafter, PROMPTS[0], 5))  # and it starts again
    while batch.round() is not None:
        pass
    assert first.tokens == plain(model, PROMPTS[0], 5)


def test_all_leave_while_a_round_is_under_way():
    model = MODELS["llama"]()
    drafter = tiny_head(model)
    batch = Batch(model, drafter, FixedController(DraftShape(2)), keep_caches=True)
    request = started(model, drafter, PROMPTS[0], 20)
    batch.join(request)
    batch.round()
    batch.leave(request)
    assert not batch.is_running and batch.round() is None
    restore_caches(request)
    left, num = request.cache, len(request.tokens)
    assert left[0].offset == len(PROMPTS[0]) + num
    batch.join(other := started(model, drafter, PROMPTS[2], 9))
    while batch.round() is not None:
        pass
    assert other.tokens == plain(model, PROMPTS[2], 9)


def test_noise_of_rows_is_that_of_each():
    samplings = [Sampling(seed=seed, row=row) for seed, row in ((1, 0), (1, 2), (9, 1))]
    positions = [[0, 1], [300, 301], [70000, 70001]]
    keys = mx.stack([sampling.base_key for sampling in samplings])
    noise = noise_of_rows(keys, mx.array(positions, mx.uint32), 11)
    for sampling, places, rows in zip(samplings, positions, noise, strict=True):
        for place, row in zip(places, rows, strict=True):
            assert mx.array_equal(row, sampling.noise(place, 11))


def test_requests_of_one_kind_are_judged_together():
    def rule(**kwargs):
        made = make_rule(None, Sampling(seed=1, **kwargs))
        made.vocab_size = 9
        return made

    greedy, closure = make_rule(None, None), make_rule("match", make_sampler(temp=1.0))
    rejecting = make_rule("reject", Sampling(seed=2))
    rules = [greedy, rule(temp=0.5), closure, greedy, rule(temp=0.7), rejecting, rule(temp=0.5)]
    assert sorted(judged_together(rules).values()) == [[0, 3], [1, 6], [2, 5], [4]]


def test_which_heads_draft_in_shared_passes():
    model = tiny_llama(vocab_size=VOCAB)
    scaling = {"type": "dynamic", "factor": 2.0}
    rope = {"theta": 10000.0, "scaling": scaling}
    assert type(tiny_head(model).batch_drafter()) is HeadBatchDrafter
    assert tiny_head(model).with_draft_cache("lagging").batch_drafter() is None
    assert tiny_head(model, rope=rope).batch_drafter() is None
    masked = tiny_head(model, mask_token_id=3)
    assert type(masked.batch_drafter()) is HeadBatchDrafter
    assert masked.with_draft_window(8).batch_drafter() is None


def test_logprobs_that_are_asked_for_come_with_the_round(monkeypatch):
    """Started with what the host reads anyway, it waits once a round, however many ask."""
    model = tiny_llama()
    drafter, waits, begun = tiny_head(model), [], []
    batch = Batch(model, drafter, FixedController(DraftShape(3)))
    requests = [started(model, drafter, [b + 1] * (3 + b), 8) for b in range(4)]
    for b, request in enumerate(requests):
        request.logprobs = [] if b > 0 else None
        request.decoder.num_top = 0 if b > 0 else None
        batch.join(request)
    mx_eval, start = mx.eval, mx.async_eval
    monkeypatch.setattr(mx, "eval", lambda *args: (waits.append(1), mx_eval(*args)))
    monkeypatch.setattr(mx, "async_eval", lambda *args: (begun.append(args), start(*args)))
    num_rounds = 0
    while (done := batch.round()) is not None:
        num_rounds += 1
        found = [array for args in begun for part in args if type(part) is list for array in part]
        of_requests = done.pending[0].shape[0] == 4  # from then on some have been let go of
        assert not of_requests or {id(array) for array in done.pending} <= set(map(id, found))
    assert num_rounds > 2 and len(waits) == num_rounds
    for request in requests[1:]:
        text = mx.array([request.prompt + request.tokens])
        logits = model(text)[0, len(request.prompt) : -1].astype(mx.float32)
        rows = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        alone = mx.take_along_axis(rows, mx.array(request.tokens[1:])[:, None], axis=-1)
        assert mx.allclose(mx.array(request.logprobs), alone[:, 0], atol=10 * tolerance())
