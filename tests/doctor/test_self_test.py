"""The self-test: parts that fail are lines of a report without private things, and parts can fail.

All of it on the demo pair takes minutes: that is one exhaustive test.
"""

import json
import platform
import re
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import pytest
from grids import thorough
from helpers import byte_tokenizer, tiny_head, tiny_llama

from mlx_eagle.bench.parity import next_scores
from mlx_eagle.bench.report_file import read_report
from mlx_eagle.doctor import __main__ as program
from mlx_eagle.doctor import self_test
from mlx_eagle.doctor.self_test import Line, Part, Section


def raises(error: Exception):
    def run() -> list[Line]:
        raise error

    return run


KERNEL = RuntimeError(
    "Maximum threads per threadgroup is 896\nbut requested 1024 | in /opt/a/b.metal"
)
GOOD = Part("good", lambda: [("one", "1.0", "fine")])
BAD = Part("bad", lambda: [("two", "2.0", "FAILED")])
BROKEN = Part("broken", raises(KERNEL))
WAYS = self_test.WAYS


def section(*parts: Part) -> Section:
    fresh = [Part(part.name, part.run, part.until) for part in parts]
    return Section("A section", ("what", "number", ""), fresh, "A remark.")


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """The command on a few parts of ours: the exit code, the report and what was said."""

    def run(*parts: Part, flags: tuple[str, ...] = (), out: str = "report.md"):
        monkeypatch.setattr(program, "sections", lambda file: [section(*parts)])
        monkeypatch.setenv(self_test.TF32, "0")
        code = 0
        file = tmp_path / out
        try:
            program.main(["--self-test", "--out", str(file), *flags])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, file.read_text() if file.is_file() else None, capsys.readouterr()

    return run


def test_all_is_well(run):
    code, report, said = run(GOOD)
    assert code == 0 and "All parts passed." in said.out and "report.md" in said.out
    assert report.startswith("## mlx-eagle ") and "self-test: all parts passed" in report
    table = "| what | number |  |\n|---|---|---|\n| one | 1.0 | fine |"
    assert f"### A section\n\nA remark.\n\n{table}" in report
    assert "[1/1] good: ok" in said.err


def test_what_fails_is_a_line_and_the_rest_goes_on(run):
    code, report, said = run(BROKEN, BAD, GOOD)
    assert code == 1 and "2 parts failed." in said.out
    assert "2 of 3 parts failed" in report and "Failed: broken; bad" in report
    (line,) = [line for line in report.splitlines() if "RuntimeError" in line]
    assert line.startswith("| broken | RuntimeError: Maximum threads") and line.endswith(
        "| FAILED |"
    )
    assert r"1024 \| in .../b.metal" in line, "the table and a user's path are not left open"
    assert "| two | 2.0 | FAILED |" in report and "| one | 1.0 | fine |" in report
    assert [line.split()[0] for line in said.err.splitlines()[-3:]] == ["[1/3]", "[2/3]", "[3/3]"]


def test_a_part_that_ends_the_process_is_named(run, monkeypatch, tmp_path):
    """Not every crash is an exception: what was found until then, and where, is on the disk."""
    with pytest.raises(ZeroDivisionError):
        run(GOOD, Part("the end of it", raises(ZeroDivisionError())), BAD)
    report = (tmp_path / "report.md").read_text()
    assert 'self-test: ended in the part "the end of it"' in report and "| one |" in report


class Clock:
    """A clock that stands still but while a part ``takes`` its seconds."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(self_test, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def takes(self, name: str, seconds: float, until: float = float("inf")) -> Part:
        def run() -> list[Line]:
            self.now += seconds
            return [(name, f"{seconds}", "ok")]

        return Part(name, run, until)


def test_parts_without_time_are_left_out_and_named(run, monkeypatch):
    """The second of a group does not begin where the longest so far would end too late."""
    clock = Clock(monkeypatch)
    slow = [clock.takes(f"slow {i}", 30.0, until=70.0) for i in range(4)]
    code, report, said = run(*slow, clock.takes("later", 5.0, until=90.0), flags=("--json",))
    assert code == 0 and clock.now == 165.0
    assert "self-test: all parts passed, 2 left out" in report and "65 seconds" in report
    assert "Left out, as there was no time: slow 2; slow 3" in report
    assert "| slow 1 |" in report and "| slow 2 |" not in report and "| later |" in report
    assert "[3/5] slow 2: left out" in said.err
    parts = json.loads(said.out)["parts"]
    assert [part["left_out"] for part in parts] == [False, False, True, True, False]


def test_a_group_that_took_too_long_leaves_time_for_the_next(run, monkeypatch):
    clock = Clock(monkeypatch)
    slow = [clock.takes("first", 80.0, until=70.0), clock.takes("second", 1.0, until=70.0)]
    _, report, _ = run(*slow, clock.takes("other", 9.0, until=95.0))
    assert "1 left out" in report and "time: second" in report and "| other |" in report


@pytest.mark.parametrize("pace", [0.5, 9.0, 14.0, 19.0])
def test_the_whole_ends_within_five_minutes(pace, monkeypatch, tmp_path):
    """However slow a machine is, all groups have their turn as long as a part takes 19 seconds."""
    clock = Clock(monkeypatch)
    tried = self_test.sections(tmp_path / "figures.json")
    for part in self_test.all_parts(tried):
        part.run = clock.takes(part.name, pace).run
    assert self_test.self_test(tried, tmp_path / "report.md") == []
    assert clock.now - 100.0 <= 300.0
    done = [part.name for part in self_test.all_parts(tried) if not part.is_left_out]
    assert (len(done) == 31) == (pace < 2)
    for name in ("attention, head dimension 128", "speed", *self_test.PARITY_UNTIL):
        assert any(name in part for part in done)


def test_json(run):
    code, _, said = run(BROKEN, GOOD, flags=("--json",))
    found = json.loads(said.out)
    assert code == 1 and found["ok"] is False
    assert [part["ok"] for part in found["parts"]] == [False, True]
    assert found["parts"][0]["error"].startswith("RuntimeError: Maximum")
    assert found["parts"][1]["lines"] == [["one", "1.0", "fine"]]


def test_a_report_that_cannot_be_written_costs_a_sentence_and_no_time(run):
    code, _, said = run(Part("never", raises(AssertionError())), out="no/such/folder/report.md")
    assert code == 2 and said.err.startswith("error: --out ") and said.err.count("\n") == 1


@pytest.mark.parametrize(
    "text, clean",
    [
        ("/home/ann/models/x.json cannot be read", ".../x.json cannot be read"),
        ("see ~/Library/Caches/mlx-eagle", "see .../mlx-eagle"),
        ("cannot open '/opt/lib/libmlx.so': no", "cannot open '.../libmlx.so': no"),
        ("10 tokens/s, 3/4 of it, a/b", "10 tokens/s, 3/4 of it, a/b"),
    ],
)
def test_paths_are_cut_to_their_last_part(text, clean):
    assert self_test.redact(text) == clean


def test_the_report_has_neither_the_host_nor_what_lies_at_home(run, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "anns-macbook")
    _, report, _ = run(Part("a", raises(ValueError("anns-macbook went away"))))
    assert "anns-macbook" not in report and "(host) went away" in report
    assert str(Path.home()) not in report


# --- the parts themselves ------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim, dtype", [(64, "float32"), (80, "bfloat16")])
def test_attention(head_dim, dtype):
    (line,) = self_test.try_attention(head_dim, dtype)
    assert line[:2] == (str(head_dim), dtype) and line[-1] == "ok"


@pytest.mark.parametrize("wrong", ["nan", "the mask"])
def test_attention_that_is_wrong_for_five_rows_is_found(monkeypatch, wrong):
    monkeypatch.setattr(self_test, "PREFIXES", (40,))
    attention = mx.fast.scaled_dot_product_attention

    def broken(queries, keys, values, scale, mask):
        if queries.shape[2] == 5 and wrong == "the mask":
            mask = None
        out = attention(queries, keys, values, scale=scale, mask=mask)
        return out * mx.nan if queries.shape[2] == 5 and wrong == "nan" else out

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", broken)
    (line,) = self_test.try_attention(64, "float32")
    assert line[-1] == "FAILED" and line[4].startswith("5 rows")


@pytest.fixture
def pair() -> self_test.DemoPair:
    """A tiny random pair in place of the demo pair."""
    model = tiny_llama(vocab_size=258)
    pair = self_test.DemoPair("float32", model, byte_tokenizer(), tiny_head(model))
    pair.num_tokens = 12
    return pair


@pytest.mark.parametrize("way", WAYS)
def test_parity(pair, way):
    lines = pair.attempt(way)
    assert len(lines) == (2 if way == "batch" else 1)
    assert set(lines) == {("float32", way, "12", "identical", "ok")}


def test_each_type_of_weights_is_loaded_once(pair, monkeypatch):
    loaded = []
    load = lambda name: loaded.append(name) or pair  # noqa: E731
    monkeypatch.setattr(self_test.DemoPair, "load", load)
    monkeypatch.setattr(pair, "name", "float16")
    parts = self_test.sections(Path())[-1].parts
    parts = [part for part in parts if ", float16," in part.name]
    lines = [line for part in parts for line in part.run()]
    assert loaded == ["float16"] and len(lines) == len(WAYS) + 1
    assert {line[-1] for line in lines} == {"ok"}


@pytest.mark.parametrize("way", thorough(WAYS, "chain", "sampled"))
def test_a_difference_has_its_margin(pair, monkeypatch, way):
    """mlx-lm's own text is changed, as if ours had gone another way there."""
    stream = mlx_lm.stream_generate
    batch = mlx_lm.batch_generate

    def wrong_stream(*args, **options):
        for i, response in enumerate(stream(*args, **options)):
            response.token += i == 3
            yield response

    def wrong_batch(*args, **options):
        found = batch(*args, **options)
        found.token_ids[1][3] += 1
        return found

    monkeypatch.setattr(mlx_lm, "stream_generate", wrong_stream)
    monkeypatch.setattr(mlx_lm, "batch_generate", wrong_batch)
    line = pair.attempt(way)[-1]
    assert line[-1] == "FAILED" and line[3].startswith("differs from token 3 on, margin ")


@pytest.mark.parametrize("margin, verdict", [(0.0009, "near-tie"), (0.0011, "FAILED")])
def test_near_ties_are_no_failures(pair, margin, verdict):
    result = {"identical": False, "index": 3, "margin": margin}
    assert pair.line("chain", result, 12)[-1] == verdict


def test_a_sampled_token_is_the_best_of_the_noisy_scores(pair):
    """The margin is that of these scores."""
    sampling = self_test.Sampling(temp=1.0, seed=3)
    model = pair.models.target
    tokens = [5, 6]
    logits = model(mx.array(tokens)[None])[0, -1:]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    scores = next_scores(model, tokens, sampling, 0).flatten()
    assert mx.argmax(scores).item() == sampling(logprobs).item()


@pytest.mark.parametrize("pace, num_tokens", [(1.0, 8), (0.01, 96), (9.0, 4)])
def test_answers_are_as_long_as_there_is_time_for(monkeypatch, pace, num_tokens):
    """A prompt takes 1 second, a step 1/4, a pass over a tree 1/2: (8 - 2 * 1) / (1/4 + 1/2)."""
    ticks = (pace * tick for tick in (0.0, 1.0, 1.0, 1.25, 1.25, 1.75))
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(self_test, "time", clock)
    assert self_test.num_tokens_within(8.0, tiny_llama(), [1, 2, 3]) == num_tokens


def test_speed_is_a_table_and_a_report_file(monkeypatch, tmp_path):
    model = tiny_llama(vocab_size=2000)
    pair = (model, byte_tokenizer(), tiny_head(model))
    monkeypatch.setattr(self_test, "load_demo", lambda: pair)
    monkeypatch.setattr(self_test, "SPEED_TOKENS", (6, 6))
    monkeypatch.setattr(self_test, "NUM_PROMPTS", 1)
    file = tmp_path / "figures.json"
    lines = self_test.measure_speed(1, file)
    assert [line[0] for line in lines[:8]] == [f"pass of {r} rows, c({r})" for r in range(1, 9)]
    assert lines[0][2] == "1.00" and lines[9][0] == "draft step of the head"
    found = read_report(file)
    assert found["by"] == "mlx_eagle.doctor --self-test" and found["machine"]["cores"] >= 1
    assert [run["drafts"] for run in found["runs"]] == ["k=4", "auto"]
    for line, run in zip(lines[-2:], found["runs"], strict=True):
        assert run["identical"] == run["texts"] == 1
        assert float(line[1]) == pytest.approx(1e3 / run["tps"], abs=0.02)


@pytest.mark.parametrize("num_tokens, expected", [(40, (5, 2, 40)), (4, (1, 1, 16))])
def test_a_slow_machine_is_asked_for_less(monkeypatch, tmp_path, num_tokens, expected):
    model = tiny_llama(vocab_size=2000)
    asked = []

    class Noted(self_test.Measurement):
        def __init__(self, models, names, questions, settings):
            asked.append((settings.samples, len(questions), settings.max_tokens))
            raise ValueError("noted")

    monkeypatch.setattr(
        self_test, "load_demo", lambda: (model, byte_tokenizer(), tiny_head(model))
    )
    monkeypatch.setattr(self_test, "num_tokens_within", lambda *_: num_tokens)
    monkeypatch.setattr(self_test, "Measurement", Noted)
    with pytest.raises(ValueError, match="noted"):
        self_test.measure_speed(5, tmp_path / "figures.json")
    assert asked == [expected]


def test_figures_of_an_earlier_run_are_not_taken_for_new_ones(run, tmp_path):
    (tmp_path / "report-measured.json").write_text("{}")
    _, _, said = run(GOOD)
    assert not (tmp_path / "report-measured.json").exists() and "measured" not in said.out


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_all_of_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(self_test.TF32, "0")
    program.main(["--self-test", "--out", str(tmp_path / "report.md")])
    report = (tmp_path / "report.md").read_text()
    assert "all parts passed" in report and "c(8)" in report
    assert read_report(tmp_path / "report-measured.json")["runs"]
    left_out = " ".join(re.findall("Left out.*", report))
    for name in self_test.NEAR_TIES:
        for way in WAYS:
            assert f"| {name} | {way} |" in report or f"parity, {name}, {way}" in left_out
    for size in self_test.HEAD_DIMS:
        assert f"| {size} | float16 |" in report or f"dimension {size}, float16" in left_out
