"""What ``auto`` measures: whole rounds, undone, remembered, and in bounded time."""

import json

import mlx.core as mx
import pytest
from architectures import build
from helpers import PROMPT, plain, speculative, tiny_head, tiny_llama
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.decoding import calibrate, timing
from mlx_eagle.drafters.lookup import LookupDrafter


def test_calibration_changes_nothing_and_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_eagle.decoding.calibrate.user_cache", lambda: tmp_path)
    measured = []
    measure = calibrate.measure
    monkeypatch.setattr(calibrate, "measure", lambda *args: measured.append(1) or measure(*args))
    for make in (tiny_llama, lambda: build("gemma3_text"), lambda: build("qwen3_next")):
        model = make()
        drafter, calls = tiny_head(model), []

        def sampler(logprobs):
            calls.append(logprobs.shape)
            return mx.argmax(logprobs, axis=-1)

        cache, reference = make_prompt_cache(model), make_prompt_cache(model)
        tokens, _ = speculative(
            model, drafter, PROMPT, 20, num_draft_tokens="auto", prompt_cache=cache,
            sampler=sampler,
        )  # fmt: skip
        assert tokens == plain(model, PROMPT, 20, prompt_cache=reference)
        assert len(calls) <= 8 * 20, "the caller's sampler ran in the calibration"
        speculative(model, drafter, PROMPT, 5, num_draft_tokens="auto")
    assert len(measured) == 3
    file = tmp_path / "calibration.json"
    assert len(json.loads(file.read_text())) == 3
    file.write_text("{ damaged")
    speculative(model, drafter, PROMPT, 5, num_draft_tokens="auto")
    assert len(measured) == 4 and len(json.loads(file.read_text())) == 1


def test_measured_costs_are_of_whole_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_eagle.decoding.calibrate.user_cache", lambda: tmp_path)
    model = tiny_llama()
    cache = make_prompt_cache(model)
    seen = []
    measure = calibrate.measure

    def watch(decoder, *args):
        before = [c.state for c in decoder.cache]
        costs = measure(decoder, *args)
        seen.append(costs)
        assert [c.offset for c in decoder.cache] == [len(PROMPT) - 1] * len(decoder.cache)
        after = [c.state for c in decoder.cache]
        for a, b in zip(before, after):
            assert mx.array_equal(a[0], b[0]).item() and mx.array_equal(a[1], b[1]).item()
        return costs

    monkeypatch.setattr(calibrate, "measure", watch)
    speculative(model, tiny_head(model), PROMPT, 3, num_draft_tokens="auto", prompt_cache=cache)
    (costs,) = seen
    assert tuple(costs.rounds) == calibrate.CHAINS and costs.plain > 0
    assert min(costs.rounds.values()) > 0


def test_where_a_step_takes_long_less_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_eagle.decoding.calibrate.user_cache", lambda: tmp_path)
    monkeypatch.setattr(calibrate, "TIME_LIMIT", 0.0)
    timed, seen, reports = [], [], []
    for module, name, calls in ((timing, "time_rounds", timed), (calibrate, "measure", seen)):
        function = getattr(module, name)
        keep = lambda *a, f=function, calls=calls: calls.append(f(*a)) or calls[-1]  # noqa: E731
        monkeypatch.setattr(module, name, keep)
    model = tiny_llama()
    tokens, _ = speculative(
        model, tiny_head(model), PROMPT, 20, num_draft_tokens="auto",
        calibration_progress_callback=lambda *args: reports.append(args),
    )  # fmt: skip
    assert tokens == plain(model, PROMPT, 20)
    (costs,), (one, three, seven) = seen, map(min, timed)
    assert tuple(costs.rounds) == calibrate.CHAINS
    expected = [one, (one + three) / 2, three]
    expected += [three + (seven - three) * share for share in (0.25, 0.5, 0.75, 1.0)]
    assert list(costs.rounds.values()) == pytest.approx(expected)
    assert reports[-2][0] == 3 and reports[-1][0] == reports[-1][1]


@pytest.mark.parametrize("make", [tiny_llama, lambda: build("gemma3_text")])
def test_tree_auto_gives_the_targets_text(make, tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_eagle.decoding.calibrate.user_cache", lambda: tmp_path)
    model = make()
    tokens, _ = speculative(model, tiny_head(model), PROMPT, 30, tree="auto")
    assert tokens == plain(model, PROMPT, 30)
    (known,) = json.loads((tmp_path / "calibration.json").read_text()).values()
    assert len(known["rounds"]) == len(calibrate.CHAINS + calibrate.TREES)


def test_every_kind_of_drafter_is_calibrated_with_full_drafts(tmp_path, monkeypatch):
    """Lookup finds nothing to copy in a text without repetition; its rounds must be costed yet."""
    monkeypatch.setattr("mlx_eagle.decoding.calibrate.user_cache", lambda: tmp_path)
    model, sizes = tiny_llama(), []
    launch = calibrate.Decoder.launch

    def watch(self, shape, absorb=False):
        done = launch(self, shape, absorb)
        sizes.append((shape.size, done.num_drafted))
        return done

    monkeypatch.setattr(calibrate.Decoder, "launch", watch)
    tokens, _ = speculative(model, LookupDrafter(), PROMPT, 1, num_draft_tokens="auto")
    assert tokens == plain(model, PROMPT, 1)
    assert {size for size, _ in sizes} == set(range(8))
    assert all(size == drafted for size, drafted in sizes)
