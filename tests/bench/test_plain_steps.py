"""Plain steps on full rotating caches: mlx-lm's beside ours while drafting is off."""

from types import SimpleNamespace

import pytest
from helpers import plain

from mlx_eagle.bench import flags, measure, plain_steps, questions


def test_both_write_the_same_text_on_a_cache_that_is_full(tiny, monkeypatch):
    monkeypatch.setattr(plain_steps, "TURNS", 2)
    settings, turns = measure.Settings(max_kv_sizes=(16, 24), repeats=1), []
    asked = questions.Question("a", "1", "so?")
    rows = plain_steps.measure_plain_steps(tiny, asked, settings, turns.append)
    assert len(turns) == plain_steps.num_turns(settings) == 2 * plain_steps.TURNS
    assert [(row["max_kv_size"], row["context"]) for row in rows] == [(16, 80), (24, 88)]
    for row in rows:
        assert row["identical"] and row["ratio"]["n"] == plain_steps.TURNS
        assert row["plain_step_seconds"]["median"] > 0 < row["step_seconds"]["median"]
    prompt = questions.prompt_tokens(asked, tiny.tokenizer, 80)
    text = plain(tiny.target, prompt, 2 * plain_steps.TURN_STEPS, max_kv_size=16)
    assert turns[0].tokens == text[plain_steps.TURN_STEPS :]
    lines = plain_steps.plain_steps_table(rows).rows
    assert [line[:2] + line[-1:] for line in lines] == [["16", "80", "yes"], ["24", "88", "yes"]]


def test_a_turn_is_timed_from_its_first_step_to_its_last(monkeypatch):
    now = 100.0

    def tokens():
        nonlocal now
        while True:
            now += 7.0 if now == 100.0 else 2.0  # the first one waits for what came before
            yield int(now)

    monkeypatch.setattr(plain_steps, "time", SimpleNamespace(perf_counter=lambda: now))
    turn = plain_steps.take_turn(tokens())
    assert turn.seconds == 2.0 and turn.tokens == [107 + 2 * i for i in range(16)]
    pairs = [(plain_steps.Turn([1], p), plain_steps.Turn([1], o)) for p, o in ((2, 1), (3, 3))]
    row = plain_steps.plain_steps_result(8, 72, pairs)
    assert row["ratio"]["median"] == 1.5 and row["identical"]
    pairs.append((plain_steps.Turn([1], 1.0), plain_steps.Turn([2], 1.0)))
    assert not plain_steps.plain_steps_result(8, 72, pairs)["identical"]


def test_a_cache_beyond_the_targets_context_is_refused():
    settings = measure.Settings(max_kv_sizes=(512, 4096), repeats=1)
    flags.check_contexts(settings, 4096 + 64 + 9 * 16)
    with pytest.raises(ValueError, match=r"--max-kv-size holds 4096, .* of 4304 tokens, but the"):
        flags.check_contexts(settings, 4303)
