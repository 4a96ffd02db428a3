"""Something fails in the middle: model and caches stay usable, and nothing wrong is kept.

A fault is put at every point of a request, at its first call and at later ones. What was
yielded until then must stand in the caches as plain decoding leaves it, a request that
follows must go on as mlx-lm would, and the model must be the one the caller passed.
"""

from collections.abc import Callable

import mlx.core as mx
import pytest
from architectures import build
from grids import thorough
from helpers import PROMPT, plain, speculative, tiny_head, tiny_llama, tiny_qwen3
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.decoding.decoder import Round
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.drafters.feature_drafter import last_features
from mlx_eagle.target_model.cache_view import WindowCache, single_caches
from mlx_eagle.target_model.states import StateUpdates
from mlx_eagle.target_model.target import Target

LONG_PROMPT = [*PROMPT, 9, 33, 7, 50, 51, 52]
PREFILL_STEP = 4
TARGETS = {
    "llama": tiny_llama,
    "rotating": tiny_qwen3,  # with max_kv_size
    "gemma3": lambda: build("gemma3_text"),
    "qwen3_next": lambda: build("qwen3_next"),
    "recurrent_gemma": lambda: build("recurrent_gemma"),
}
QUICK = ("rotating", "qwen3_next")
OPTIONS = {"rotating": {"max_kv_size": 10}}


class Injected(RuntimeError):
    pass


def failing(function: Callable, call: int) -> Callable:
    """``function``, but its ``call``-th call does its work and then raises."""
    left = [call]

    def wrapped(*args, **kwargs):
        result = function(*args, **kwargs)
        left[0] -= 1
        if left[0] == 0:
            raise Injected
        return result

    return wrapped


class FailingDrafter:
    """A drafter that fails in one of its verbs."""

    def __init__(self, inner, verb: str, call: int):
        self.inner, self.verb, self.call = inner, verb, call

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def begin(self, cache=None):
        inner = self.inner.begin(cache)
        setattr(inner, self.verb, failing(getattr(inner, self.verb), self.call))
        return inner


@pytest.fixture(scope="module", params=thorough(TARGETS, *QUICK))
def case(request):
    model = TARGETS[request.param]()
    return model, tiny_head(model), OPTIONS.get(request.param, {})


def run_until_it_fails(case, drafter, cache, **options) -> tuple[list[int], int]:
    """The tokens yielded, and how much of the prompt was reported as done."""
    model, _, _fixed = case
    taken, done = [], [0]
    with pytest.raises(Injected):
        for token, _, _ in speculative_generate_step(
            mx.array(LONG_PROMPT),
            model,
            drafter,
            num_draft_tokens=3,
            max_tokens=24,
            prompt_cache=cache,
            prefill_step_size=PREFILL_STEP,
            **{"prompt_progress_callback": lambda n, _: done.append(n), **options},
        ):
            taken.append(token)
    return taken, done[-1]


def assert_usable(case, cache, taken, num_done) -> None:
    """The caches hold what was done, and the next request goes on from there as mlx-lm does."""
    model, drafter, options = case
    num_caches = len(make_prompt_cache(model))
    ours, theirs = (list(single_caches(c)) for c in (cache[:num_caches], make_prompt_cache(model)))
    assert len(ours) == len(theirs) and not any(isinstance(c, WindowCache) for c in ours)
    offsets = {c.offset for c in ours if hasattr(c, "offset")}
    if not taken and num_done == len(LONG_PROMPT) - 1:
        # The prompt's last token is in the cache from the moment that its round was launched.
        assert offsets in ({num_done}, {num_done + 1})
        (num_done,) = offsets
    text = LONG_PROMPT + taken if taken else LONG_PROMPT[:num_done]
    assert offsets == {len(text)}
    pairs = {c.offset for c in cache[num_caches:-1]}
    assert pairs == {max(len(text) - 1, 0)}, "one pair a token but the first and the next"
    assert cache[-1].offset == (1 if text else 0)

    reference = make_prompt_cache(model, **options)
    if text:
        features = run_as_mlx_lm(Target(model, drafter.taps), text, reference)
        assert mx.allclose(last_features(cache[-1]), features[-1:], rtol=1e-3, atol=1e-3).item()
    tokens, _ = speculative(model, drafter, [3, 4], 10, num_draft_tokens=3, prompt_cache=cache)
    assert tokens == plain(model, [3, 4], 10, prompt_cache=reference)


def run_as_mlx_lm(target, text: list[int], cache: list) -> mx.array:
    """Bring ``cache`` over text: the prompt in chunks, the rest a token at a time."""
    start, end = 0, len(LONG_PROMPT) - 1
    while start < len(text):
        stop = min(start + PREFILL_STEP, end) if start < end else start + 1
        _, features = target(mx.array(text[start:stop]), cache)
        start = stop
    return features


def fresh_cache(case) -> list:
    model, drafter, options = case
    return make_prompt_cache(model, **options) + drafter.make_cache()


VERBS = ["extend", "propose", "pending", "_forward"]


@pytest.mark.parametrize("call", thorough([1, 2, 11], 2))
@pytest.mark.parametrize("verb", thorough(VERBS, "extend", "propose"))
def test_in_the_drafter(case, verb, call):
    cache = fresh_cache(case)
    result = run_until_it_fails(case, FailingDrafter(case[1], verb, call), cache)
    assert_usable(case, cache, *result)


@pytest.mark.parametrize("call", thorough([1, 2, 9], 2))
def test_in_a_processor(case, call):
    cache = fresh_cache(case)
    processor = failing(lambda tokens, logits: logits, call)
    result = run_until_it_fails(case, case[1], cache, logits_processors=[processor])
    assert_usable(case, cache, *result)


@pytest.mark.parametrize("call", thorough([1, 2, 9], 2))
def test_in_a_sampler(case, call):
    cache = fresh_cache(case)
    sampler = failing(lambda logprobs: mx.argmax(logprobs, axis=-1), call)
    result = run_until_it_fails(case, case[1], cache, sampler=sampler)
    assert_usable(case, cache, *result)


@pytest.mark.parametrize("call", thorough([1, 2, 4, 5], 4, 5))  # the last with the first token
def test_in_the_progress_callback(case, call):
    cache, done = fresh_cache(case), []
    callback = failing(lambda n, _: done.append(n), call)
    run_until_it_fails(case, case[1], cache, prompt_progress_callback=callback)
    assert_usable(case, cache, [], done[-1])


@pytest.mark.parametrize("call", thorough([1, 3, 4, 6], 3))
def test_in_the_target(case, call, monkeypatch):
    """Half of the layers have run: prefill, the first step, verify passes, repeated layers."""
    model = case[0]
    cache = fresh_cache(case)
    classes = [type(layer) for layer in model.layers]
    layer = model.layers[len(model.layers) // 2]
    block = layer.mlp if hasattr(layer, "mlp") else layer.mlp_block
    mlp = type(block)
    with monkeypatch.context() as patch:
        of_layer = failing(lambda: None, call)

        def call_mlp(self, *args, original=mlp.__call__, **kwargs):
            if self is block:
                of_layer()
            return original(self, *args, **kwargs)

        patch.setattr(mlp, "__call__", call_mlp)
        result = run_until_it_fails(case, case[1], cache)
    assert [type(layer) for layer in model.layers] == classes
    assert_usable(case, cache, *result)


@pytest.mark.parametrize("call", thorough([3, 14, 20], 14))
def test_in_a_cache(case, call, monkeypatch):
    """Out of memory, say, when a layer's keys are appended: some caches grew and some did not."""
    cache = fresh_cache(case)
    with monkeypatch.context() as patch:
        for kind in {type(c) for c in cache if hasattr(c, "update_and_fetch")}:
            patch.setattr(kind, "update_and_fetch", failing(kind.update_and_fetch, call))
        result = run_until_it_fails(case, case[1], cache)
    assert_usable(case, cache, *result)


@pytest.mark.parametrize("call", thorough([1, 2, 3, 6], 2))
def test_in_states_that_are_made_again(call, monkeypatch):
    """The next draft has started, and some of the recurrent layers have their states."""
    model = TARGETS["qwen3_next"]()
    case = model, tiny_head(model), {}
    cache = fresh_cache(case)
    with monkeypatch.context() as patch:
        patch.setattr(StateUpdates, "states", failing(StateUpdates.states, call))
        result = run_until_it_fails(case, case[1], cache)
    assert_usable(case, cache, *result)


def test_ctrl_c_while_waiting_for_the_device(case, monkeypatch):
    """A KeyboardInterrupt out of the blocking read."""
    cache = fresh_cache(case)
    with monkeypatch.context() as patch:
        patch.setattr(Round, "read", failing(Round.read, 4))
        result = run_until_it_fails(case, case[1], cache)
    assert_usable(case, cache, *result)
