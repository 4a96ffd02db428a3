"""The first text of a machine, and those after it: nothing is waited for, all is learned."""

import itertools
import json
import random

import mlx.core as mx
import mlx.nn as nn
import pytest
from costs import FLAT
from helpers import PROMPT, VOCAB, Recital, plain, speculative, tiny_head, tiny_llama
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_eagle import Sampling
from mlx_eagle.decoding import calibrate, pipeline, remembered
from mlx_eagle.decoding.calibrate import CHAINS
from mlx_eagle.decoding.cost_keys import make_key
from mlx_eagle.decoding.costs import PLAIN, DraftShape
from mlx_eagle.decoding.generation import Generation
from mlx_eagle.decoding.guess import guess_costs
from mlx_eagle.decoding.loop import speculative_generate_step
from mlx_eagle.decoding.setup import make_rule
from mlx_eagle.drafters.base import Draft, DrafterBase
from mlx_eagle.system.machines import machine_of
from mlx_eagle.target.rollback import CacheQuantization
from mlx_eagle.target.taps import Target

AUTO = {"num_draft_tokens": "auto"}
DAY = 24 * 3600


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Where costs are kept; there is nothing yet."""
    monkeypatch.setattr(calibrate, "user_cache", lambda: tmp_path)
    return tmp_path / "calibration.json"


class Prompter(DrafterBase):
    """A drafter that knows the text, and is wrong as often as it is told to be."""

    taps, cache, num_forwards = (), [], 0

    def __init__(self, text: list[int], alpha: float, seed: int = 0):
        self.text, self.alpha, self.seed = text, alpha, seed
        self.dice, self.position, self.last = random.Random(seed), 0, None

    def begin(self, cache=None) -> "Prompter":
        return Prompter(self.text, self.alpha, self.seed)

    def make_cache(self) -> list:
        return []

    def extend(self, tokens, features, last=None) -> None:
        self._settle()
        self.last = mx.array(tokens.shape[0] - 1) if last is None else last

    def _settle(self) -> None:
        if self.last is not None:
            self.position += self.last.item() + 1
            self.last = None

    def propose(self, size, pick=None) -> Draft:
        self._settle()
        right = self.text[self.position : self.position + size]
        wrong = [self.dice.random() > self.alpha for _ in right]
        return Draft(
            mx.array([(t + w) % VOCAB for t, w in zip(right, wrong, strict=True)], mx.int32)
        )


class Clock:
    """The time that rounds take, by costs that are given; stands still otherwise."""

    def __init__(self, monkeypatch, costs):
        self.now, self.costs = 0.0, costs
        finish = Generation.finish

        def finish_in_time(generation, done) -> None:
            finish(generation, done)
            size = done.num_drafted
            self.now += costs.rounds[DraftShape(size)] if size else costs.plain

        monkeypatch.setattr(Generation, "finish", finish_in_time)
        monkeypatch.setattr(pipeline, "time", self)

    def perf_counter(self) -> float:
        return self.now


START, LENGTH = 12, 60


@pytest.fixture
def pair(monkeypatch):
    """A pair whose rounds take what ``FLAT`` says, and the prompt for it: see ``write``."""
    dice = random.Random(1)
    text = [dice.randrange(VOCAB) for _ in range(200)]
    Clock(monkeypatch, FLAT)
    return Recital(text), Prompter(text, 0.6)


def write(pair, length: int = LENGTH, **options):
    """The counts of a text with "auto", which is as the target recites it."""
    (model, drafter), text = pair, pair[0].text
    tokens, stats = speculative(model, drafter, text[:START], length, **AUTO, **options)
    assert tokens == text[START : length + START]
    return stats


def new_process(file) -> None:
    """Forget what only this process knows."""
    remembered.open_cost_file.cache_clear()


def test_the_first_text_of_a_machine_waits_for_nothing(file, monkeypatch):
    """The prompt and the first token are the passes before it, cold or warm."""
    model = tiny_llama()
    drafter, run, num_passes = tiny_head(model), Target._pass, []
    Clock(monkeypatch, FLAT)
    monkeypatch.setattr(Target, "_pass", lambda *a: num_passes.append(1) or run(*a))
    monkeypatch.setattr(calibrate, "measure", lambda *_: 1 / 0)
    before = []
    for _ in range(2):  # cold, warm
        num_passes.clear()
        steps = speculative_generate_step(mx.array(PROMPT), model, drafter, **AUTO, max_tokens=25)
        tokens = [next(steps)[0]]
        before.append(len(num_passes))
        assert tokens + [token for token, _, _ in steps] == plain(model, PROMPT, 25)
        assert file.exists()
        new_process(file)
        monkeypatch.setattr(calibrate, "guess_costs", lambda *_: 1 / 0)
    assert before == [3, 3]  # the last is of the round behind the first token


def test_a_text_leaves_what_it_has_learned_and_the_next_one_learns_more(file, pair, monkeypatch):
    def known() -> dict:
        (entry,) = json.loads(file.read_text()).values()
        return entry

    write(pair, 20)
    first = known()
    assert first["rounds"].keys() == {str(shape) for shape in CHAINS}
    assert first["plain"] == pytest.approx(FLAT.plain)
    assert "0" not in first["guessed"] and 0 < len(first["guessed"]) < 7
    new_process(file)
    write(pair, 180)
    assert {*known().get("guessed", [])} < {*first["guessed"]}
    assert known()["date"] == first["date"], "it was begun with the first"
    monkeypatch.setattr(calibrate, "measure", lambda *_: FLAT)
    write(pair, 2, recalibrate=True)
    assert "guessed" not in known()


@pytest.mark.parametrize("change", ["date", "date to come", "versions", "no date"])
def test_what_is_old_is_a_guess_to_begin_with(file, pair, monkeypatch, change):
    monkeypatch.setattr(calibrate, "measure", lambda *_: FLAT)
    write(pair, 2, recalibrate=True)
    document = json.loads(file.read_text())
    (key,) = document
    assert "guessed" not in document[key] and "versions" in document[key]
    fresh = document[key]["date"]
    changed = {
        "date": {"date": fresh - 15 * DAY},
        "date to come": {"date": fresh + 15 * DAY},
        "versions": {"versions": "mlx 0.1"},
        "no date": {"date": None},
    }
    document[key] |= changed[change]
    document[key] = {name: v for name, v in document[key].items() if v is not None}
    file.write_text(json.dumps(document))
    new_process(file)
    known = remembered.CostFile(file).get(key, CHAINS)
    assert known.guessed == {PLAIN, *CHAINS} and known.plain == document[key]["plain"]
    write(pair)
    (entry,) = json.loads(file.read_text()).values()
    assert abs(entry["date"] - fresh) < DAY and entry["versions"] == remembered.versions()
    assert len(entry.get("guessed", [])) < 7, "some were timed anew"


def test_the_file_stays_small(file):
    entry = {"plain": 1.0, "rounds": {"1": 1.5}, "versions": "mlx 0.1"}
    now = remembered.time.time()
    ages = {"new": 1, "a month": 30, "three months": 90, "years to come": -900}
    document = {name: entry | {"date": now - age * DAY} for name, age in ages.items()}
    document |= {f"entry {i}": entry | {"date": now - DAY - i} for i in range(600)}
    file.write_text(json.dumps(document | {"of version 0.1.0": {"plain": 1, "rounds": {"1": 2}}}))
    remembered.CostFile(file).put("fresh", FLAT)
    left = json.loads(file.read_text())
    assert len(left) == remembered.MOST_ENTRIES and {"fresh", "new"} <= left.keys()
    assert not {"three months", "years to come", "of version 0.1.0", "a month"} & left.keys()
    assert "entry 400" in left and "entry 599" not in left


def fail(monkeypatch, rows: set[int]) -> list[int]:
    """Passes of so many rows fail from now on; returns a list of those that were tried."""
    run, tried = Target._pass, []

    def limited(target, tokens, cache, record=False):
        result = run(target, tokens, cache, record)
        if tokens.shape[1] in rows:
            tried.append(tokens.shape[1])
            raise RuntimeError("[metal] Maximum threads per threadgroup is 896\nmore")
        return result

    monkeypatch.setattr(Target, "_pass", limited)
    return tried


def note(size: int) -> str:
    return (
        f"Note: rounds that draft {size} fail on this device and are left out ([metal] Maximum "
        "threads per threadgroup is 896)."
    )


def test_a_shape_that_fails_in_a_text_is_left_out_and_the_text_goes_on(
    file, pair, monkeypatch, capsys
):
    cache, tried = pair[0].make_cache(), fail(monkeypatch, {3, 4})
    write(pair, 150, prompt_cache=cache)
    assert cache[0].offset == START + 150
    assert sorted(capsys.readouterr().err.splitlines()) == [note(2), note(3)]
    new_process(file)
    assert write(pair, 150).num_drafted > 30 and capsys.readouterr().err == ""
    (entry,) = json.loads(file.read_text()).values()
    assert entry["failed"] == ["2", "3"]
    assert len(tried) <= 6, "once each, and where a longer draft is cut at the end of a text"


def test_a_head_drafts_on_after_a_round_that_failed(file, monkeypatch, capsys):
    """It has absorbed the step that came in its place, and drafts from where the text is."""
    model = tiny_llama()
    Clock(monkeypatch, FLAT)
    tried = fail(monkeypatch, {2})
    tokens, stats = speculative(model, tiny_head(model), PROMPT, 30, **AUTO)
    assert tokens == plain(model, PROMPT, 30) and tried == [2]
    assert stats.num_drafted > 0 and capsys.readouterr().err.startswith(note(1))


def test_where_no_draft_can_be_verified_texts_are_plain(file, pair, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "CHAINS", CHAINS[:3])
    fail(monkeypatch, {2, 3, 4})
    for num_notes in (3, 0):
        stats = write(pair)
        assert stats.num_rounds == 0
        assert stats.drafting_events[-1].reason == "no draft can be verified on this device"
        assert capsys.readouterr().err.count("left out") == num_notes


def test_an_error_of_a_shape_that_has_worked_ends_the_text(file, pair, monkeypatch):
    monkeypatch.setattr(calibrate, "measure", lambda *_: FLAT)
    write(pair, 2, recalibrate=True)
    fail(monkeypatch, set(range(2, 9)))
    with pytest.raises(RuntimeError, match="Maximum threads"):
        write(pair)


# --- figures that are wrong -------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.6, 1 / 1.6])
def test_figures_wrong_by_a_factor_are_right_from_the_third_text_on(
    file, pair, monkeypatch, factor
):
    """Costs of rounds in the file, 1.6 times what they are: put there by hand."""
    clock = pipeline.time

    def seconds() -> float:
        new_process(file)
        start = clock.now
        write(pair, 180)
        return clock.now - start

    monkeypatch.setattr(calibrate, "measure", lambda *_: FLAT)
    write(pair, 2, recalibrate=True)
    right = seconds()
    document = json.loads(file.read_text())
    (entry,) = document.values()
    entry["plain"] = FLAT.plain
    entry["rounds"] = {str(shape): factor * cost for shape, cost in FLAT.rounds.items()}
    file.write_text(json.dumps(document))
    taken = [seconds() for _ in range(4)]
    assert max(taken[2:]) < 1.05 * right, (taken, right)
    (corrected,) = json.loads(file.read_text()).values()
    for size in (2, 3):
        exact = FLAT.rounds[DraftShape(size)]
        assert corrected["rounds"][str(size)] == pytest.approx(exact, rel=0.05)
    assert corrected["plain"] == pytest.approx(FLAT.plain, rel=0.05)


# --- keys and guesses -------------------------------------------------------------------------


def test_a_key_has_all_that_changes_a_cost():
    model, size = tiny_llama(), 512
    half, packed = tiny_llama(), tiny_llama()
    half.set_dtype(mx.float16)
    nn.quantize(packed, group_size=32, bits=8)
    drafter, plain_cache = tiny_head(model), make_prompt_cache(model)
    none, eight = CacheQuantization(None, 64, 0), CacheQuantization(8, 64, 0)
    greedy, sampling = make_rule(None, None), Sampling(temp=0.7)
    rules = [greedy, make_rule(None, lambda x: x), make_rule(None, Sampling(0.7, top_p=0.9))]
    rules += [make_rule(name, sampling) for name in ("coupled", "reject", "match")]
    usual = (model, drafter, plain_cache, none, greedy, (), size, "chains")
    same = make_key(*usual)
    assert same == make_key(tiny_llama(3), tiny_head(model, 4), *usual[2:])
    keys = {make_key(*usual[:4], rule, *usual[5:]) for rule in rules}
    assert len(keys) == len(rules) and same in keys
    others = [
        (half, *usual[1:]),
        (packed, *usual[1:]),
        (model, drafter.with_draft_cache("lagging"), *usual[2:]),
        (model, drafter, [RotatingKVCache(64)], *usual[3:]),
        (model, drafter, [RotatingKVCache(128)], *usual[3:]),
        (*usual[:3], eight, *usual[4:]),
        (*usual[:3], CacheQuantization(4, 64, 0), *usual[4:]),
        (*usual[:3], CacheQuantization(8, 64, 99), *usual[4:]),
        (*usual[:5], [lambda tokens, logits: logits], *usual[6:]),
        (*usual[:6], 1024, "chains"),
        (*usual[:7], "chains and trees"),
    ]
    keys |= {make_key(*values) for values in others}
    assert len(keys) == len(rules) + len(others)
    assert max(map(len, keys)) < remembered.LONGEST_KEY / 4


def test_a_guess_knows_the_jumps_of_the_machine(monkeypatch):
    model = tiny_llama()
    drafter = tiny_head(model)
    nn.quantize(model, group_size=32, bits=4)
    machine = machine_of({"architecture": "applegpu_g16g"}, "metal")
    monkeypatch.setattr("mlx_eagle.decoding.guess.this_machine", lambda: machine)
    costs = guess_costs(model, drafter, CHAINS)
    steps = [costs.rounds[b] - costs.rounds[a] for a, b in itertools.pairwise(CHAINS)]
    assert steps.index(max(steps)) == 3, "from 4 drafts to 5 the sixth row comes"
    assert costs.guessed == {PLAIN, *CHAINS} and min(steps) > 0
