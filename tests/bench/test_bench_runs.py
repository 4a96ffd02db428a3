"""The parts of a benchmark run that run a model: costs, counts, clocks."""

import gc
import itertools
import statistics
from collections import Counter
from random import Random
from types import SimpleNamespace

import mlx.core as mx
import pytest
from helpers import PROMPT, plain
from mlx_lm.generate import generate_step, generation_stream

from mlx_eagle.bench import measure, parity, questions, runner
from mlx_eagle.bench.configurations import PLAIN, Configuration, make_configurations
from mlx_eagle.bench.costs import Bench, Timings, costs_of, time_parts
from mlx_eagle.bench.flags import Settings
from mlx_eagle.decoding.sampling import Sampling


def head_of(tiny: runner.Models):
    return tiny.drafters["tiny head"]


def of_tiny(compares: bool = False, **settings) -> list[Configuration]:
    return make_configurations(Settings(**settings), ["tiny head"], compares)


# --- pure parts ---------------------------------------------------------------------------


def test_costs_leave_no_trace_and_cover_every_size(tiny):
    bench = Bench(tiny.target, head_of(tiny), list(range(30)))
    first = bench.verify(3)[0].tolist()
    with bench.window():
        mx.eval(bench.verify(3), bench.accept(3))
    # The first pass was not cut: three rows more than the context's 29.
    assert bench.drafter.cache[0].offset == 29
    timings: Timings = {}
    sizes = {"verify": [1, 2, 3, 4, 9], "propose": [1, 4], "accept": [1, 2, 3, 4]}
    bench = Bench(tiny.target, head_of(tiny), list(range(30)))
    time_parts(bench, timings, sizes, 2)
    verify, propose, accept = timings.values()
    assert sorted(verify) == [1, 2, 3, 4, 9] and sorted(accept) == [1, 2, 3, 4]
    assert all(len(timings) == 2 for timings in verify.values())
    assert len(first) == 3
    costs = costs_of(timings)
    assert costs["verify_seconds"][2] == statistics.median(t.run for t in verify[2])
    assert sorted(propose) == [1, 4]
    bench = Bench(tiny.target, head_of(tiny), [1, 2])
    time_parts(bench, timings, {"verify": [1, 2], "accept": [1], "propose": [3]}, 1)
    assert [len(verify[rows]) for rows in (1, 2, 3)] == [3, 3, 2]
    assert sorted(accept) == [1, 2, 3, 4] and sorted(propose) == [1, 3, 4]


def test_the_margin_is_that_of_the_worse_token(tiny):
    text = plain(tiny.target, PROMPT, 8)
    assert parity.compare(tiny.target, PROMPT, text, text)["identical"]
    other = [*text[:5], (text[5] + 1) % 258, *text[6:]]
    found = parity.compare(tiny.target, PROMPT, text, other)
    assert found["index"] == 5 and not found["identical"]
    steps = list(generate_step(mx.array(PROMPT), tiny.target, max_tokens=6))
    logprobs = steps[5][1].tolist()
    below = max(logprobs) - logprobs[other[5]]
    assert found["margin"] == pytest.approx(below, rel=1e-3, abs=1e-5)
    assert "token 5" in parity.parity_words(found)


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_the_margin_of_a_scenario_is_that_of_what_was_drawn(monkeypatch, tiny, temp):
    """Between the token that plain decoding took and the one put in its place."""
    run_once = runner.run_once

    def changed(models, configuration, prompt, *args, **options):
        run = run_once(models, configuration, prompt, *args, **options)
        run.texts[0][2] = (run.texts[0][2] + (configuration is not PLAIN)) % 258
        return run

    monkeypatch.setattr(measure, "run_once", changed)
    lone = runner.Models(tiny.target, tiny.tokenizer, tiny.drafters)
    settings = Settings(sizes=(1,), max_tokens=4, repeats=1, samples=1, seed=5)
    asked = [questions.Question("mine", "0", "so?")]
    rows, _ = measure.Measurement(lone, {}, asked, settings).run_scenario(None, temp, lambda: None)
    ((cell,),) = rows
    plain_text = cell.plain[0].texts[0]
    logits = tiny.target(mx.array([cell.prompts[0] + plain_text[:2]]))[0, -1]
    scores = logits if not temp else logits / temp + Sampling(temp=temp, seed=5).noise(2, 258)
    assert mx.argmax(scores).item() == plain_text[2]
    below = (scores[plain_text[2]] - scores[cell.runs[0].texts[0][2]]).item()
    assert cell.parity[0]["index"] == 2
    assert cell.parity[0]["margin"] == pytest.approx(below, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_a_run_counts_the_tokens_after_the_first(tiny, temp):
    configurations = [PLAIN, *of_tiny(compares=True, sizes=(2,))]
    prompt = tiny.tokenizer.encode("Hello there")
    runs = [
        runner.run_once(tiny, configuration, prompt, 12, temp) for configuration in configurations
    ]
    assert runs[0].num_timed == runs[0].num_tokens - 1
    assert runs[0].texts == runs[1].texts
    assert runs[1].num_timed == runs[1].stats.num_emitted
    assert runs[2].num_timed == runs[2].stats.num_emitted
    assert all(run.seconds > 0 and run.ttft > 0 and run.peak_bytes > 0 for run in runs)


def test_copies_are_made_where_they_are_measured(tiny, monkeypatch):
    """Here wherever there is a match, and with the same drafter none elsewhere."""
    monkeypatch.setattr("mlx_eagle.decoding.auto.FIXED_PRIOR", 0.0)
    alone, copied = of_tiny(sizes=(3,), copied=(3,))
    prompt = [*PROMPT, *plain(tiny.target, PROMPT, 9), *PROMPT]
    runs = [runner.run_once(tiny, configuration, prompt, 12) for configuration in (alone, copied)]
    assert runs[0].texts == runs[1].texts
    drafts, copies = (run.stats for run in runs)
    assert drafts.num_head_forwards >= drafts.num_drafted
    assert copies.num_head_forwards < copies.num_drafted


@pytest.mark.exhaustive
def test_woven_runs_are_those_of_one_after_the_other(tiny):
    configurations = [
        PLAIN,
        *of_tiny(compares=True, sizes=(3, "auto"), trees=("2x2:3",)),
    ]
    prompt = tiny.tokenizer.encode("Hello there")
    alone = [runner.run_once(tiny, configuration, prompt, 30) for configuration in configurations]
    woven = runner.run_woven(tiny, configurations, prompt, 7, max_tokens=30)
    for one, other, configuration in zip(alone, woven, configurations, strict=True):
        assert one.texts == other.texts
        if configuration.kind in ("chain", "tree"):  # auto decides by the clock
            assert one.num_timed == other.num_timed
            assert one.stats.accepted_histogram == other.stats.accepted_histogram
            assert one.stats.num_evals == other.stats.num_evals
            assert other.stats.generation_tps == pytest.approx(other.tps)


def test_turns_are_short(monkeypatch):
    turns = []

    def responses(models, configuration, prompt, max_tokens, *_):
        for i in range(max_tokens):
            turns.append(configuration.label)
            yield SimpleNamespace(
                token=i, from_draft=False, finish_reason="length" if i + 1 == max_tokens else None
            )

    monkeypatch.setattr(runner, "responses", responses)
    configurations = [
        PLAIN,
        Configuration("b", "mlx-lm-draft", 1),
        Configuration("c", "mlx-lm-draft", 1),
    ]
    plain, b, _ = runner.run_woven(
        SimpleNamespace(target=None), configurations, [1], 2, max_tokens=5
    )
    assert [len(list(run)) for _, run in itertools.groupby(turns)] == 6 * [2] + 3 * [1]
    assert [turns.count(configuration.label) for configuration in configurations] == [5, 5, 5]
    assert b.num_timed == 4 and b.seconds > 0 and plain.num_timed == 2  # 1, 1 of 2, 0 of 1


@pytest.mark.parametrize("num", [2, 3, 7])
def test_in_turns_each_follows_every_other_and_none_itself(num):
    orders = list(itertools.islice(runner.in_turns(range(num), Random(0)), 2000))
    assert all(sorted(order) == list(range(num)) for order in orders)
    pairs = Counter(itertools.pairwise(itertools.chain(*orders)))
    equal = (2000 * num - 1) / (num * (num - 1))
    assert set(pairs) == set(itertools.permutations(range(num), 2))
    assert all(abs(seen - equal) < 0.15 * equal for seen in pairs.values())


def test_the_clock_of_turns():
    clock = runner.TurnClock()
    # Eight steps of 10 s, 1 s of each before it is under way; two turns of four, begun at 100
    # and 200. Unbroken, the first second of a step is hidden behind the step before.
    clock.add(100, [110, 119, 128, 137], 146, True)
    assert (clock.num_tokens, clock.seconds) == (4, 37)
    clock.add(200, [201, 210, 219, 228], 237, True)
    assert (clock.num_tokens, clock.seconds) == (4 + 3, 37 + 27)
    # A turn with a round pays for what the one before has left to it, and for its own start.
    clock.add(300, [301, 320, 320, 340], 360, False)
    assert (clock.num_tokens, clock.seconds) == (7 + 4, 64 + 9 + 40)
    clock.add(400, [402, 411], 420, True)
    assert (clock.num_tokens, clock.seconds) == (11 + 2, 113 + 20 + 11)
    clock.add(500, [501], 501, True)
    assert (clock.num_tokens, clock.seconds) == (13, 144)


def test_the_peak_of_a_woven_run_is_its_own(tiny):
    prompt = tiny.tokenizer.encode("Hello there " * 40)
    configurations = [PLAIN, *of_tiny(sizes=(2,))]
    gc.collect()  # what tests before this one left is not to be freed in its midst
    mx.synchronize(generation_stream)  # nor a step that mlx-lm left in flight
    before = mx.get_active_memory()
    alone = [
        runner.run_once(tiny, configuration, prompt, 24).peak_bytes
        for configuration in configurations
    ]
    woven = [
        run.peak_bytes for run in runner.run_woven(tiny, configurations, prompt, 6, max_tokens=24)
    ]
    assert all(peak > before for peak in woven)
    for one, other in zip(alone, woven, strict=True):
        assert other - before == pytest.approx(one - before, rel=0.1)
