"""What ``--recalibrate`` measures: whole rounds, undone, remembered, and in bounded time."""

import json

import mlx.core as mx
import pytest
from architectures import build
from helpers import PROMPT, plain, speculative, tiny_head, tiny_llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_eagle import Sampling
from mlx_eagle.decoding import calibrate, timing
from mlx_eagle.decoding.accept import Coupled, Match
from mlx_eagle.decoding.costs import PLAIN, DraftShape, Ways
from mlx_eagle.decoding.rejection import Reject
from mlx_eagle.decoding.sampling import stand_in
from mlx_eagle.decoding.setup import open_decoder
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.system.machines import first_look, machine_of
from mlx_eagle.target import attention_parts
from mlx_eagle.target.rollback import CacheQuantization
from mlx_eagle.target.taps import Target

AUTO = {"num_draft_tokens": "auto", "recalibrate": True}


def test_calibration_changes_nothing_and_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_eagle.decoding.calibrate.user_cache", lambda: tmp_path)
    measured = []
    measure = calibrate.measure
    monkeypatch.setattr(calibrate, "measure", lambda *args: measured.append(1) or measure(*args))
    for make in (tiny_llama, lambda: build("gemma3_text"), lambda: build("qwen3_next")):
        model = make()
        drafter, calls = tiny_head(model), []

        def sampler(logprobs):
            calls.append(logprobs.shape)  # noqa: B023
            return mx.argmax(logprobs, axis=-1)

        cache, reference = make_prompt_cache(model), make_prompt_cache(model)
        tokens, _ = speculative(
            model, drafter, PROMPT, 20, num_draft_tokens="auto", prompt_cache=cache,
            sampler=sampler, recalibrate=True,
        )  # fmt: skip
        assert tokens == plain(model, PROMPT, 20, prompt_cache=reference)
        assert len(calls) <= 8 * 20, "the caller's sampler ran in the calibration"
        speculative(model, drafter, PROMPT, 5, num_draft_tokens="auto", sampler=sampler)
    assert len(measured) == 3
    file = tmp_path / "calibration.json"
    assert len(json.loads(file.read_text())) == 3
    file.write_text("{ damaged")
    speculative(model, drafter, PROMPT, 5, **AUTO)
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
        for a, b in zip(before, after, strict=True):
            assert mx.array_equal(a[0], b[0]).item() and mx.array_equal(a[1], b[1]).item()
        return costs

    monkeypatch.setattr(calibrate, "measure", watch)
    speculative(model, tiny_head(model), PROMPT, 3, **AUTO, prompt_cache=cache)
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
        model, tiny_head(model), PROMPT, 20, **AUTO,
        calibration_progress_callback=lambda *args: reports.append(args),
    )  # fmt: skip
    assert tokens == plain(model, PROMPT, 20)
    (costs,), (one, three, seven) = seen, map(min, timed)
    assert tuple(costs.rounds) == calibrate.CHAINS
    expected = [one, (one + three) / 2, three]
    expected += [three + (seven - three) * share for share in (0.25, 0.5, 0.75, 1.0)]
    assert list(costs.rounds.values()) == pytest.approx(expected)
    assert reports[-2][0] == 3 and reports[-1][0] == reports[-1][1]


@pytest.mark.parametrize(
    "make",
    [tiny_llama, pytest.param(lambda: build("gemma3_text"), marks=pytest.mark.exhaustive)],
)
def test_tree_auto_gives_the_targets_text(make, tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_eagle.decoding.calibrate.user_cache", lambda: tmp_path)
    model = make()
    tokens, _ = speculative(model, tiny_head(model), PROMPT, 30, tree="auto", recalibrate=True)
    assert tokens == plain(model, PROMPT, 30)
    (known,) = json.loads((tmp_path / "calibration.json").read_text()).values()
    assert len(known["rounds"]) == len(calibrate.CHAINS + calibrate.TREES)


@pytest.mark.parametrize("generation, first", [("M4", (1, 4, 5, 7)), ("M1", (1, 4, 5, 7))])
def test_what_is_timed_first_is_for_the_machine(tmp_path, monkeypatch, generation, first):
    """Where time is short: both sides of each jump that the table of machines knows."""
    architecture = {"M4": "applegpu_g16g", "M1": "applegpu_g13g"}[generation]
    machine = machine_of({"architecture": architecture}, "metal")
    monkeypatch.setattr(calibrate, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(calibrate, "this_machine", lambda: machine)
    monkeypatch.setattr(calibrate, "fastest_ways", lambda *_: Ways())
    monkeypatch.setattr(calibrate, "TIME_LIMIT", 0.0)
    timed, time_rounds = [], timing.time_rounds
    monkeypatch.setattr(
        timing, "time_rounds", lambda *a: timed.append(a[1].size) or time_rounds(*a)
    )
    model = tiny_llama()
    speculative(model, tiny_head(model), PROMPT, 2, **AUTO)
    assert tuple(timed) == first_look(machine) == first


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
    tokens, _ = speculative(model, LookupDrafter(), PROMPT, 1, **AUTO)
    assert tokens == plain(model, PROMPT, 1)
    assert {size for size, _ in sizes} == set(range(8))
    assert all(size == drafted for size, drafted in sizes)


class Limited:
    """A device on which passes of more rows than ``most`` fail, once prefill is over."""

    def __init__(self, monkeypatch, most: int):
        self.most, self.is_prefilled, call = most, False, Target._pass
        self.rows: list[int] = []

        def limited(target, tokens, cache, record=False):
            num_rows = tokens.shape[1]
            self.rows.append(num_rows)
            self.is_prefilled |= num_rows == 1
            result = call(target, tokens, cache, record)
            if self.is_prefilled and num_rows > self.most:
                raise RuntimeError("[metal] Maximum threads per threadgroup is 896\nmore")
            return result

        monkeypatch.setattr(Target, "_pass", limited)


@pytest.mark.parametrize(
    "make, most, failed",
    [
        (lambda: build("gemma3_text"), 5, (5, 6, 7)),
        (tiny_llama, 1, (1, 2, 3, 4, 5, 6, 7)),
        pytest.param(tiny_llama, 5, (5, 6, 7), marks=pytest.mark.exhaustive),
    ],
)
def test_what_fails_is_not_offered_and_the_text_goes_on(
    make, most, failed, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(calibrate, "user_cache", lambda: tmp_path)
    model = make()
    expected = plain(model, PROMPT, 30)
    device = Limited(monkeypatch, most)
    drafter, cache = tiny_head(model), make_prompt_cache(model)
    tokens, stats = speculative(model, drafter, PROMPT, 30, **AUTO, prompt_cache=cache)
    assert tokens == expected and cache[0].offset == len(PROMPT) + 30
    notes = capsys.readouterr().err.splitlines()
    assert notes == [
        f"Note: rounds that draft {size} fail on this device and are left out ([metal] Maximum "
        "threads per threadgroup is 896)."
        for size in sorted(failed, key=notes_order(notes))
    ]
    (known,) = json.loads((tmp_path / "calibration.json").read_text()).values()
    assert {*known["failed"]} == {str(size) for size in failed}
    assert known["rounds"].keys() == {str(size) for size in range(1, 8)} - {*known["failed"]}
    if most == 1:
        assert stats.drafting_events[0].reason == "no draft can be verified on this device"
    # And it is remembered: nothing fails a second time.
    device.rows, device.is_prefilled = [], False
    assert speculative(model, drafter, PROMPT, 30, num_draft_tokens="auto")[0] == expected
    assert max(device.rows[1:]) <= most and capsys.readouterr().err == ""


def notes_order(notes: list[str]):
    """Which length comes first: as the notes have it."""
    return lambda size: next(i for i, note in enumerate(notes) if f"draft {size} " in note)


def test_a_plain_step_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "user_cache", lambda: tmp_path)
    Limited(monkeypatch, 0)
    model = tiny_llama()
    with pytest.raises(RuntimeError, match="Maximum threads"):
        speculative(model, tiny_head(model), PROMPT, 9, **AUTO)


def decoder_for_ways():
    """A decoder after its prompt, whose target and drafter know other ways."""
    model = tiny_llama(num_attention_heads=8, num_key_value_heads=1, head_dim=64)
    drafter = tiny_head(model)
    decoder = open_decoder(
        model, drafter.begin(), make_prompt_cache(model), CacheQuantization(None, 64, 0),
        mx.default_stream(mx.cpu), sampler=None, logits_processors=None, acceptance=None,
    )  # fmt: skip
    decoder.prefill(mx.array(PROMPT), 2048, lambda *_: None)
    return decoder


@pytest.mark.parametrize(
    "seconds, expected",
    [
        # of (splits attention, keeps a tail)
        ({}, Ways()),
        ({(1, 0): 0.9}, Ways(splits_attention=True)),
        ({(0, 1): 0.9}, Ways(keeps_tail=True)),
        ({(1, 0): 0.9, (1, 1): 0.8}, Ways(True, True)),
        ({(1, 0): 0.9, (1, 1): 0.89}, Ways(True, False)),  # hardly faster
        ({(1, 0): float("inf"), (0, 1): 0.9}, Ways(keeps_tail=True)),  # it fails
    ],
)
def test_the_faster_way_is_taken(seconds, expected, monkeypatch):
    decoder = decoder_for_ways()
    assert decoder.other_ways == ["splits_attention", "keeps_tail"]
    monkeypatch.setattr(
        calibrate,
        "_round_time",
        lambda _, w: seconds.get((int(w.splits_attention), int(w.keeps_tail)), 1.0),
    )
    found = calibrate.fastest_ways(decoder, lambda: False, decoder.other_ways)
    assert found == expected
    assert calibrate.fastest_ways(decoder, lambda: True, decoder.other_ways) == Ways(), "late"
    assert calibrate.fastest_ways(decoder, lambda: False) == Ways(), "nothing to try on a CPU"


@pytest.mark.parametrize("ways", [Ways(), Ways(True, True)])
def test_each_way_is_timed_in_real_rounds_that_are_undone(ways, monkeypatch):
    decoder, used, split = decoder_for_ways(), [], attention_parts.attend
    monkeypatch.setattr(
        attention_parts, "attend", lambda q, *a, **k: used.append(q.shape[2]) or split(q, *a, **k)
    )
    assert 0 < calibrate._round_time(decoder, ways) < float("inf")
    assert max(used) == (4 if ways.splits_attention else 8)
    assert [c.offset for c in decoder.cache] == [len(PROMPT) - 1] * len(decoder.cache)
    assert not decoder.target.parts.is_on
    monkeypatch.setattr(calibrate, "time_rounds", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # an error of ours is no kernel's
        calibrate._round_time(decoder, ways)


def test_a_decoder_goes_by_what_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(calibrate, "fastest_ways", lambda *_: Ways(True, True))
    for is_first in (True, False):
        decoder = decoder_for_ways()
        costs = calibrate.round_costs(decoder, recalibrate=is_first)
        assert costs.current.ways == Ways(True, True)
        assert decoder.target.parts.is_on and decoder.drafter._keeps_tail
        monkeypatch.setattr(calibrate, "fastest_ways", lambda *_: 1 / 0)
    (known,) = json.loads((tmp_path / "calibration.json").read_text()).values()
    assert known["ways"] == ["splits_attention", "keeps_tail"]


@pytest.mark.parametrize("acceptance", [None, "coupled", "reject"])
def test_samplers_and_processors_are_in_the_timing_but_not_the_callers(
    acceptance, tmp_path, monkeypatch
):
    """Theirs may keep a state, and the text must not hang on whether it was measured before."""
    monkeypatch.setattr(calibrate, "user_cache", lambda: tmp_path)
    model, calls, rules = tiny_llama(), [], []
    on_trial = calibrate.on_trial

    def watch(decoder):
        trial = on_trial(decoder)
        rules.append((type(trial.rule), trial.rule != decoder.rule, trial.processors))
        return trial

    def processor(tokens, logits):
        calls.append(1)
        return logits * 0.9

    monkeypatch.setattr(calibrate, "on_trial", watch)
    texts = []
    for recalibrate in (False, True):
        mx.random.seed(5)
        sampler = Sampling(0.8, seed=3) if acceptance else make_sampler(0.8)
        options = {"sampler": sampler, "logits_processors": [processor], "acceptance": acceptance}
        calls.clear()
        tokens, _ = speculative(
            model, tiny_head(model), PROMPT, 1, **AUTO | {"recalibrate": recalibrate}, **options
        )
        texts.append(tokens)
        assert len(calls) <= 9, "the caller's processor ran while measuring"
    assert texts[0] == texts[1]
    kind = {None: Match, "coupled": Coupled, "reject": Reject}[acceptance]
    assert set(rules) == {(kind, True, (stand_in,))}


def test_ways_are_tried_unasked_where_the_prompt_took_longer(tmp_path, monkeypatch):
    """A long context is where they matter; whoever asked little is not kept waiting."""
    monkeypatch.setattr(calibrate, "user_cache", lambda: tmp_path)
    limits, tried = [], []
    monkeypatch.setattr(calibrate, "late_after", lambda limit, _: limits.append(limit))
    monkeypatch.setattr(
        calibrate, "fastest_ways", lambda *_: tried.append(1) or Ways(keeps_tail=True)
    )
    for seconds, expected in ((0.5, 0), (3.0, 1), (3.0, 1)):  # short; long; long, and known
        decoder = decoder_for_ways()
        decoder.prefill_time = seconds
        costs = calibrate.round_costs(decoder)
        assert len(tried) == expected and costs.current.knows_ways == bool(expected)
        assert decoder.drafter._keeps_tail == bool(expected)
        for shape in (PLAIN, DraftShape(1)):
            costs.record(shape, 0.01)
        costs.close()
    assert limits == [1.5]
