"""The first text of a machine, and those after it: nothing is waited for, all is learned."""

import json
import random

import mlx.core as mx
import mlx.nn as nn
import pytest
from costs import FLAT
from helpers import PROMPT, VOCAB, plain, speculative, tiny_head, tiny_llama
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_eagle import Sampling
from mlx_eagle.decoding import calibrate, pipeline, remembered
from mlx_eagle.decoding.accept import make_rule
from mlx_eagle.decoding.calibrate import CHAINS
from mlx_eagle.decoding.cost_keys import make_key
from mlx_eagle.decoding.costs import PLAIN, DraftShape
from mlx_eagle.decoding.generation import Generation
from mlx_eagle.decoding.guess import guess_costs
from mlx_eagle.decoding.loop import speculative_generate_step
from mlx_eagle.drafters.base import Draft
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


def new_process(file) -> None:
    """Forget what only this process knows."""
    remembered.open_cost_file.cache_clear()


def passes_before_the_first_token(model: nn.Module, drafter, monkeypatch, **options) -> int:
    passes, run = [], Target._pass
    with monkeypatch.context() as patch:
        patch.setattr(Target, "_pass", lambda *a, **k: passes.append(1) or run(*a, **k))
        steps = speculative_generate_step(mx.array(PROMPT), model, drafter, **AUTO, **options)
        next(steps)
        num_passes = len(passes)
        for _ in steps:
            pass
    return num_passes


def test_the_first_text_of_a_machine_waits_for_nothing(file, monkeypatch):
    """The prompt and the first token are the passes before it, cold or warm."""
    model = tiny_llama()
    drafter = tiny_head(model)
    monkeypatch.setattr(calibrate, "measure", lambda *_: 1 / 0)
    cold = passes_before_the_first_token(model, drafter, monkeypatch, max_tokens=30)
    assert file.exists()
    new_process(file)
    monkeypatch.setattr(calibrate, "guess_costs", lambda *_: 1 / 0)
    warm = passes_before_the_first_token(model, drafter, monkeypatch, max_tokens=30)
    assert cold == warm == 3  # and the round behind the first token is under way


def test_a_text_leaves_what_it_has_learned_and_the_next_one_learns_more(file):
    model = tiny_llama()
    drafter = tiny_head(model)

    def known() -> dict:
        (entry,) = json.loads(file.read_text()).values()
        return entry

    tokens, _ = speculative(model, drafter, PROMPT, 60, **AUTO)
    assert tokens == plain(model, PROMPT, 60)
    first = known()
    assert first["rounds"].keys() == {str(shape) for shape in CHAINS}
    assert 0 < first["plain"] < 1 and "0" not in first["guessed"] and len(first["guessed"]) < 7
    new_process(file)
    speculative(model, drafter, PROMPT, 60, **AUTO)
    assert {*known().get("guessed", [])} <= {*first["guessed"]}
    assert known()["date"] == first["date"], "it was begun with the first"
    speculative(model, drafter, PROMPT, 2, **AUTO, recalibrate=True)
    assert "guessed" not in known()


@pytest.mark.parametrize("change", ["date", "date to come", "versions", "no date"])
def test_what_is_old_is_a_guess_to_begin_with(file, change):
    model = tiny_llama()
    drafter = tiny_head(model)
    speculative(model, drafter, PROMPT, 3, **AUTO, recalibrate=True)
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
    speculative(model, drafter, PROMPT, 60, **AUTO)
    (entry,) = json.loads(file.read_text()).values()
    assert abs(entry["date"] - fresh) < DAY and entry["versions"] == remembered.versions()
    assert 0 < len(entry["guessed"]) < 7, "some were timed anew"


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


def test_a_shape_that_fails_in_a_text_is_left_out_and_the_text_goes_on(file, monkeypatch, capsys):
    model = tiny_llama()
    expected = plain(model, PROMPT, 60)
    drafter, run, tried = tiny_head(model), Target._pass, []

    def limited(target, tokens, cache, record=False):
        result = run(target, tokens, cache, record)
        if tokens.shape[1] in (2, 3):  # the prompt has more rows, and is not read here
            tried.append(tokens.shape[1])
            raise RuntimeError("[metal] Maximum threads per threadgroup is 896\nmore")
        return result

    monkeypatch.setattr(Target, "_pass", limited)
    for _ in range(2):
        cache = make_prompt_cache(model)
        tokens, _ = speculative(model, drafter, PROMPT, 60, **AUTO, prompt_cache=cache)
        assert tokens == expected and cache[0].offset == len(PROMPT) + 60
        new_process(file)
    notes = capsys.readouterr().err.splitlines()
    assert notes == [
        f"Note: rounds that draft {size} fail on this device and are left out ([metal] Maximum "
        "threads per threadgroup is 896)."
        for size in (1, 2)
    ]
    assert tried == [2, 3], "once each, in the first text"
    (entry,) = json.loads(file.read_text()).values()
    assert entry["failed"] == ["1", "2"]


def test_where_no_draft_can_be_verified_texts_are_plain(file, monkeypatch, capsys):
    model = tiny_llama()
    expected, run = plain(model, PROMPT, 40), Target._pass

    def limited(target, tokens, cache, record=False):
        if 1 < tokens.shape[1] and tokens.shape[1] != len(PROMPT) - 1:
            raise RuntimeError("no such kernel")
        return run(target, tokens, cache, record)

    drafter = tiny_head(model)
    monkeypatch.setattr(Target, "_pass", limited)
    monkeypatch.setattr(calibrate, "CHAINS", CHAINS[:3])
    for num_notes in (3, 0):
        tokens, stats = speculative(model, drafter, PROMPT, 40, **AUTO)
        assert tokens == expected and stats.num_rounds <= 1
        assert stats.drafting_events[-1].reason == "no draft can be verified on this device"
        assert capsys.readouterr().err.count("left out") == num_notes


def test_an_error_of_a_shape_that_has_worked_ends_the_text(file, monkeypatch):
    model = tiny_llama()
    drafter, run = tiny_head(model), Target._pass
    speculative(model, drafter, PROMPT, 3, **AUTO, recalibrate=True)

    def broken(target, tokens, cache, record=False):
        if tokens.shape[1] == 2:
            raise RuntimeError("the device is gone")
        return run(target, tokens, cache, record)

    monkeypatch.setattr(Target, "_pass", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        for _ in range(3):
            speculative(model, drafter, PROMPT, 200, **AUTO)


# --- figures that are wrong -------------------------------------------------------------------


class Recital(nn.Module):
    """A target that recites a text: what it chooses depends on the position alone."""

    def __init__(self, text: list[int]):
        super().__init__()
        self.layers = [nn.Identity()]
        self.text = text

    def __call__(self, tokens, cache):
        start = cache[0].offset
        cache[0].update_and_fetch(*[mx.zeros((1, 1, tokens.shape[1], 1))] * 2)
        following = mx.array(self.text[start + 1 : start + 1 + tokens.shape[1]])
        return 9.0 * (following[None, :, None] == mx.arange(VOCAB))

    def make_cache(self):
        return [KVCache()]


class Prompter:
    """A drafter that knows the text, and is wrong as often as it is told to be."""

    taps, cache, num_forwards = (), [], 0

    def __init__(self, text: list[int], alpha: float, seed: int = 0):
        self.text, self.alpha, self.seed = text, alpha, seed
        self.dice, self.position, self.last = random.Random(seed), 0, None

    def begin(self, cache=None) -> "Prompter":
        return Prompter(self.text, self.alpha, self.seed)

    def make_cache(self) -> list:
        return []

    def modules(self) -> list:
        return []

    def hold(self, features) -> None:
        pass

    def pending(self) -> list:
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
        return Draft(mx.array([(t + w) % VOCAB for t, w in zip(right, wrong)], mx.int32))


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


@pytest.mark.parametrize("factor", [1.6, 1 / 1.6])
def test_figures_wrong_by_a_factor_are_right_from_the_third_text_on(file, monkeypatch, factor):
    """Costs of rounds in the file, 1.6 times what they are: put there by hand."""
    dice, length = random.Random(1), 160
    text = [dice.randrange(VOCAB) for _ in range(length + 20)]
    model, drafter = Recital(text), Prompter(text, 0.6)
    clock = Clock(monkeypatch, FLAT)

    def seconds_per_token() -> float:
        new_process(file)
        start = clock.now
        tokens, _ = speculative(model, drafter, text[:3], length, **AUTO)
        assert tokens == text[3 : length + 3]
        return (clock.now - start) / length

    monkeypatch.setattr(calibrate, "measure", lambda *_: FLAT)
    speculative(model, drafter, text[:3], 1, **AUTO, recalibrate=True)
    (key,) = json.loads(file.read_text())
    right = seconds_per_token()
    entry = {"plain": FLAT.plain, "date": remembered.time.time()}
    entry["rounds"] = {str(shape): factor * cost for shape, cost in FLAT.rounds.items()}
    entry["versions"] = remembered.versions()
    file.write_text(json.dumps({key: entry}))
    speeds = [seconds_per_token() for _ in range(4)]
    assert max(speeds[2:]) < 1.05 * right, speeds
    (corrected,) = json.loads(file.read_text()).values()
    used = DraftShape(3)
    assert corrected["rounds"][str(used)] == pytest.approx(FLAT.rounds[used], rel=0.05)
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
    steps = [costs.rounds[b] - costs.rounds[a] for a, b in zip(CHAINS, CHAINS[1:])]
    assert steps.index(max(steps)) == 3, "from 4 drafts to 5 the sixth row comes"
    assert costs.guessed == {PLAIN, *CHAINS} and min(steps) > 0
