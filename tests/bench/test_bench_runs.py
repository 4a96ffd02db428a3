"""The benchmark run: costs, counts, whole reports, and mistakes of the user."""

import csv
import itertools
import json
import statistics
import sys
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from costs import FLAT
from helpers import PROMPT, byte_tokenizer, plain, tiny_head, tiny_llama
from mlx_lm.generate import generate_step
from test_bench import make_stats

from mlx_eagle.bench import __main__ as command
from mlx_eagle.bench import (
    batched,
    cost,
    graph,
    measure,
    parity,
    predict,
    questions,
    runner,
    tables,
)
from mlx_eagle.decoding.controller import BatchCosts
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.demo import compare as demo
from mlx_eagle.system import device


@pytest.fixture(scope="module")
def tiny():
    """Target, tokenizer, drafter, and a second model as mlx-lm's draft model."""
    model = tiny_llama(vocab_size=258)
    compared = tiny_llama(seed=3, vocab_size=258, num_hidden_layers=2)
    return runner.Models(model, byte_tokenizer(), tiny_head(model), compared)


# --- pure parts ---------------------------------------------------------------------------


def test_costs_leave_no_trace_and_cover_every_size(tiny):
    bench = cost.Bench(tiny.target, tiny.drafter, list(range(30)))
    first = bench.verify(3)[0].tolist()
    with bench.window():
        mx.eval(bench.verify(3), bench.accept(3))
    # The first pass was not cut: three rows more than the context's 29.
    assert bench.drafter.cache[0].offset == 29
    samples = cost.Samples()
    samples.measure(cost.Bench(tiny.target, tiny.drafter, list(range(30))), 4, [9], 2)
    assert sorted(samples.verify) == [1, 2, 3, 4, 9] and sorted(samples.accept) == [1, 2, 3, 4]
    assert all(len(t.run) == len(t.build) == 2 for t in samples.verify.values())
    assert len(first) == 3
    costs = predict.Costs.of(samples)
    assert costs.verify[2] == statistics.median(samples.verify[2].run)
    assert sorted(cost.verify_costs(tiny.target, tiny.drafter, [1, 2, 3], [1, 2], 1)) == [1, 2]
    accept, propose = cost.head_costs(tiny.target, tiny.drafter, [1, 2, 3], [1], [1, 3], 1)
    assert sorted(accept) == [1] and sorted(propose) == [1, 3]


def test_primitives_are_counted_without_side_effects(tiny):
    before = (mx.fast.rms_norm, mx.fast.rope)
    rows = graph.count_primitives(tiny.target, tiny.drafter, list(range(20)), [1, 3])
    by_part = {row["part"]: row for row in rows}
    assert (mx.fast.rms_norm, mx.fast.rope) == before
    short, long = by_part["verify pass, k = 1"], by_part["verify pass, k = 3"]
    assert short["primitives"] == long["primitives"]
    assert 1.0 <= long["ratio"] < 1.05
    # A dense matrix costs a transpose more than a quantized one, five times.
    assert by_part["draft step"]["primitives"] <= 35
    assert all(row["kernels"] < row["primitives"] <= row["primitives_here"] for row in rows)
    # Counting must not have changed what the model says.
    assert plain(tiny.target, PROMPT, 6) == plain(tiny_llama(vocab_size=258), PROMPT, 6)


def test_a_draft_step_of_a_quantized_head_is_thirty_primitives(tiny):
    drafter = tiny_head(tiny.target)
    nn.quantize(drafter.head, group_size=32, bits=4)
    rows = graph.count_primitives(tiny.target, drafter, list(range(20)), [1])
    by_part = {row["part"]: row for row in rows}
    assert by_part["draft step"]["primitives"] <= 30


def test_the_margin_is_that_of_the_two_best_logits(tiny):
    text = plain(tiny.target, PROMPT, 8)
    assert parity.verification(tiny.target, PROMPT, text, text)["identical"]
    other = [*text[:5], (text[5] + 1) % 258, *text[6:]]
    found = parity.verification(tiny.target, PROMPT, text, other)
    assert found["index"] == 5 and not found["identical"]
    steps = list(generate_step(mx.array(PROMPT), tiny.target, max_tokens=6))
    best = sorted(steps[5][1].tolist())[-2:]
    assert found["margin"] == pytest.approx(best[1] - best[0], rel=1e-3, abs=1e-5)
    assert "token 5" in parity.verdict_text(found)


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_a_run_counts_the_tokens_after_the_first(tiny, temp):
    configurations = [runner.PLAIN, *runner.make_configurations([2], compares=True)]
    prompt = tiny.tokenizer.encode("Hello there")
    runs = [runner.run_once(tiny, configuration, prompt, 12, temp) for configuration in configurations]
    assert runs[0].num_timed == len(runs[0].tokens) - 1
    assert runs[0].tokens == runs[1].tokens
    assert runs[1].num_timed == runs[1].stats.num_emitted
    assert runs[2].num_timed == runs[2].stats.num_emitted
    assert all(run.seconds > 0 and run.ttft > 0 and run.peak_bytes > 0 for run in runs)


def test_woven_runs_are_those_of_one_after_the_other(tiny):
    configurations = [runner.PLAIN, *runner.make_configurations([3, "auto"], ["2x2:3"], compares=True)]
    prompt = tiny.tokenizer.encode("Hello there")
    alone = [runner.run_once(tiny, configuration, prompt, 30) for configuration in configurations]
    woven = runner.run_woven(tiny, configurations, prompt, 7, max_tokens=30)
    for one, other, configuration in zip(alone, woven, configurations):
        assert one.tokens == other.tokens
        if configuration.kind in ("chain", "tree"):  # auto decides by the clock
            assert one.num_timed == other.num_timed
            assert one.stats.accepted_histogram == other.stats.accepted_histogram
            assert one.stats.num_evals == other.stats.num_evals
            assert other.stats.generation_tps == pytest.approx(other.tps)


def test_turns_are_short_and_go_forwards_and_backwards(monkeypatch):
    turns = []

    def responses(models, configuration, prompt, max_tokens, *_):
        for i in range(max_tokens):
            turns.append(configuration.label)
            yield SimpleNamespace(
                token=i, from_draft=False, finish_reason="length" if i + 1 == max_tokens else None
            )

    monkeypatch.setattr(runner, "responses", responses)
    configurations = [runner.PLAIN, runner.Configuration("b", "mlx-lm-draft", 1), runner.Configuration("c", "mlx-lm-draft", 1)]
    plain, b, c = runner.run_woven(SimpleNamespace(target=None), configurations, [1], 2, max_tokens=5)
    in_turns = [label for label, _ in itertools.groupby(turns)]
    assert in_turns == ["plain", "b", "c", "b", "plain", "b", "c"]
    assert [turns.count(configuration.label) for configuration in configurations] == [5, 5, 5]
    assert b.num_timed == 4 and b.seconds > 0 and plain.num_timed == 2  # 1, 1 of 2, 0 of 1


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
    configurations = [runner.PLAIN, *runner.make_configurations([2])]
    before = mx.get_active_memory()
    alone = [runner.run_once(tiny, configuration, prompt, 24).peak_bytes for configuration in configurations]
    woven = [run.peak_bytes for run in runner.run_woven(tiny, configurations, prompt, 6, max_tokens=24)]
    assert all(peak > before for peak in woven)
    for one, other in zip(alone, woven):
        assert other - before == pytest.approx(one - before, rel=0.1)


# --- from end to end ----------------------------------------------------------------------


def call(monkeypatch, capsys, tiny, *flags: str) -> tuple[str, str]:
    """Run the command on the tiny models; standard output and error."""
    names = {"model": "tiny", "head": "tiny head", "compared": "tiny draft"}
    monkeypatch.setattr(command, "load_models", lambda args: (tiny, names))
    command.main(list(flags))
    return capsys.readouterr()


@pytest.mark.parametrize("program", ["demo", "bench"])
def test_a_note_says_how_to_get_openblas(monkeypatch, capsys, tmp_path, tiny, program):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    flags = "--prompts gsm8k --limit 1 --max-tokens 4 --num-draft-tokens 1 --repeats 1 --out"

    def errors(has_openblas: bool) -> list[str]:
        monkeypatch.setattr(device, "is_openblas_in_front", lambda: has_openblas)
        if program == "bench":
            return call(monkeypatch, capsys, tiny, *flags.split(), str(tmp_path))[1].splitlines()
        monkeypatch.setattr(demo, "load_demo", lambda: (tiny.target, tiny.tokenizer, tiny.drafter))
        demo.run("Hello", 4, 1)
        return capsys.readouterr().err.splitlines()

    notes = [line for line in errors(False) if "apt install libopenblas0-pthread" in line]
    assert len(notes) == 1 and f"make {program}" in notes[0]
    assert not any("openblas" in line.lower() for line in errors(True))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not any("openblas" in line.lower() for line in errors(False))


def test_end_to_end(monkeypatch, capsys, tmp_path, tiny):
    folder = tmp_path / "out"
    flags = "--prompts gsm8k,mt_bench --limit 1 --max-tokens 8 --num-draft-tokens 1,2 --repeats 1"
    out, err = call(monkeypatch, capsys, tiny, *flags.split(), "--out", str(folder))
    brief = json.loads(out.splitlines()[-1])
    document = json.loads((folder / "results.json").read_text())
    scenario = document["scenarios"][0]
    assert brief["scenarios"][0]["arms"] == scenario["arms"]
    labels = ["k=1", "k=2", "mlx-lm draft k=1", "mlx-lm draft k=2"]
    assert [configuration["label"] for configuration in scenario["arms"]] == labels
    assert brief["scenarios"][0]["identical"] == brief["scenarios"][0]["batch_size"] == 8
    names = {"chip", "os", "mlx", "mlx-lm", "mlx-eagle", "blas", "model_precision", "head"}
    assert names <= document["conditions"].keys()
    assert sorted(map(int, scenario["calibration"]["verify_cost"])) == list(range(1, 9))

    rows = list(csv.DictReader((folder / "results.csv").open()))
    assert len(rows) == 2 * 4 * 4
    assert {row["role"] for row in rows} == {"plain", "speculative"}
    for row in rows:
        rate = float(row["timed_tokens"]) / float(row["seconds"])
        assert float(row["tokens_per_second"]) == pytest.approx(rate)

    text = (folder / "report.md").read_text()
    assert text in out
    for word in ("tok/s", "tau", "TTFT", "bound", "c(R)", "identical", "peak", "evals/round"):
        assert word in text
    configuration = scenario["arms"][1]
    assert f"{configuration['sets']['gsm8k']['speedup']:.2f}x" in text
    page = (folder / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 5
    assert 'src="http' not in page and "<link" not in page and "<script" not in page
    names = {"speedup", "verify_cost", "acceptance", "round_time", "tokens_per_second"}
    for suffix in ("png", "svg"):
        assert {path.stem for path in (folder / "plots").glob(f"*.{suffix}")} == names
    assert "%" not in err  # its bar is for terminals


def test_any_drafter_can_be_measured(monkeypatch, capsys, tmp_path, tiny):
    """Here the one without weights, opened as ``mlx_eagle.generate`` opens it."""
    loaded = tiny.target, tiny.tokenizer, tiny.drafter
    monkeypatch.setattr(command, "load_demo", lambda: loaded)
    flags = "--draft-model lookup --prompts gsm8k --limit 1 --max-tokens 6 --repeats 1"
    command.main([*flags.split(), "--out", str(tmp_path)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["conditions"]["head"] == "lookup"
    assert found["scenarios"][0]["identical"] == 1
    args = command.build_parser().parse_args(["--draft-model", "auto"])
    models, names = command.load_models(args)
    assert models.drafter is tiny.drafter and names["head"] == command.DEMO_NAMES["head"]


def test_scenarios_share_one_report(monkeypatch, capsys, tmp_path, tiny):
    lone = runner.Models(tiny.target, tiny.tokenizer, tiny.drafter)
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "one?"}\n')
    flags = "--max-tokens 6 --num-draft-tokens 2 --tree 2x2:4 --repeats 1 --temp 0,0.7"
    flags += f" --context 40 --order mirror --prompts {prompts} --out {tmp_path}"
    out, _ = call(monkeypatch, capsys, lone, *flags.split())
    scenarios = json.loads(out.splitlines()[-1])["scenarios"]
    assert [(s["context"], s["temp"]) for s in scenarios] == [(40, 0.0), (40, 0.7)]
    assert all(s["prompt_tokens"]["median"] == 40 for s in scenarios)
    # Our sampler draws the same text with and without drafts.
    assert all(s["identical"] == s["batch_size"] == 2 for s in scenarios)
    assert (tmp_path / "plots" / "speedup-2.png").is_file()


def test_batches_beside_mlx_lms_own(monkeypatch, capsys, tmp_path, tiny):
    lone = runner.Models(tiny.target, tiny.tokenizer, tiny.drafter)
    costs = BatchCosts(FLAT, FLAT, 2)
    monkeypatch.setattr("mlx_eagle.batch.generate.batch_costs", lambda *args: costs)
    monkeypatch.setattr("mlx_eagle.decoding.loop.round_costs", lambda *args: FLAT)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "so?"}\n{"prompt": "Who is it?"}\n')
    flags = f"--prompts {tmp_path}/mine.jsonl --max-tokens 9 --repeats 1"
    flags += f" --order mirror --num-draft-tokens 2,auto --batch 2,1 --out {tmp_path}"
    out, _ = call(monkeypatch, capsys, lone, *flags.split())
    document = json.loads((tmp_path / "results.json").read_text())
    rows = document["batches"]
    keys = [(row["batch"], row["set"], row["arm"]) for row in rows]
    assert keys == [(n, "mine", configuration) for n in (2, 1) for configuration in ("k=2", "auto")]
    for row in rows:
        assert [verification["identical"] for verification in row["parity"]] == [True] * row["batch"]
        assert row["output_tokens"] == 9 * row["batch"]  # none of the tiny texts ends before
        # Two runs; what prefill emits is not counted, as everywhere.
        passes = row["num_rounds"] + row["num_plain_steps"]
        assert row["tau"] == pytest.approx(2 * 8 * row["batch"] / passes)
        assert row["speedup"] == pytest.approx(row["tps"] / row["plain_tps"])
        after = row["tps_after_prefill"] / row["plain_tps_after_prefill"]
        assert row["speedup_after_prefill"] == pytest.approx(after)
        assert row["tps_after_prefill"] > row["tps"]
        assert row["num_rounds"] > 0 and row["num_runs"] == 2
    assert json.loads(out.splitlines()[-1])["batches"] == rows
    text = (tmp_path / "report.md").read_text()
    section = text.split("## Batches")[1].split("## Words")[0]
    assert section.count("\n| 2 |") == section.count("\n| 1 |") == 2
    assert "2 of 2" in section and "| batches | 2, 1 |" in text
    assert "<h2>Batches</h2>" in (tmp_path / "report.html").read_text()


def test_batches_are_made_set_by_set(tiny):
    asked = [questions.Question(name, str(i), "so?") for i in range(2) for name in ("a", "b")]
    settings = measure.Settings(batches=(2,), sizes=(1,), max_tokens=3, repeats=2)
    runs = []
    rows = batched.measure_batches(tiny, asked, settings, runs.append)
    assert [(row["set"], row["batch"]) for row in rows] == [("a", 2), ("b", 2)]
    assert len(runs) == batched.num_batch_runs(settings, asked) == 2 * 2 * 4
    assert measure.num_runs(settings, asked, runner.make_configurations([1])) == 16 + 4 * 2 * 4


def test_the_clock_of_a_batch_runs_over_the_whole_call(tiny, monkeypatch):
    ticks = iter([10.0, 12.5])
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(batched, "time", clock)
    prompts = [PROMPT, PROMPT[:3]]
    run = batched.run_batch(tiny, runner.PLAIN, prompts, 6)
    assert run.seconds == 2.5 and run.tps == pytest.approx(sum(map(len, run.tokens)) / 2.5)
    assert run.tokens == [plain(tiny.target, prompt, 6) for prompt in prompts]
    stats = [Stats(prompt_time=1.0), Stats(prompt_time=0.5)]
    run = batched.BatchRun([[1, 2, 3], [4]], 2.5, 1.5, 2, stats)
    assert (run.tps, run.tps_after_prefill) == (4 / 2.5, 2 / 1.0)


def test_a_text_that_differs_in_a_batch_is_shown_with_its_margin(tiny):
    texts = [plain(tiny.target, PROMPT, 8), plain(tiny.target, PROMPT[:3], 8)]
    other = [texts[0], [*texts[1][:5], (texts[1][5] + 1) % 258, *texts[1][6:]]]
    cell = batched.BatchCell("mine", [PROMPT, PROMPT[:3]], runner.make_configurations(["auto"])[0])
    cell.plain.append(batched.BatchRun(texts, 4.0, 2.0, 0, []))
    cell.runs.append(batched.BatchRun(other, 4.0, 3.0, 2, [make_stats([1, 0], 2)] * 2))
    row = batched.batch_result(tiny, cell)
    assert (row["speedup"], row["speedup_after_prefill"]) == (1.0, (16 - 2) / 1.0 / (16 / 2.0))
    assert [verification["index"] for verification in row["parity"]] == [None, 5]
    (line,) = tables.batch_table([row]).rows
    margin = row["parity"][1]["margin"]
    assert line[:3] == ["2", "mine", "auto"]
    assert line[-3:] == ["1 of 2", f"{margin:.2g}", "-"] and margin > 0


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--prompts poems", "--prompts poems is neither one of mt_bench, humaneval, gsm8k"),
        ("--num-draft-tokens=-1", "--num-draft-tokens holds '-1'"),
        ("--num-draft-tokens 1,x", "--num-draft-tokens holds 'x'"),
        ("--num-draft-tokens 2,2", "give every value once"),
        ("--temp=-0.5", "--temp holds '-0.5'"),
        ("--context 0", "--context holds '0'"),
        ("--tree 2y4", "--tree holds '2y4'"),
        ("--max-tokens 1", "--max-tokens is 1"),
        ("--repeats 0", "--repeats is 0"),
        ("--batch 0", "--batch holds '0'"),
        ("--batch 4 --limit 2", "--batch holds 4, but 2 prompts of mt_bench are taken"),
        ("--limit=-1", "--limit is -1"),
        ("--model somewhere", "--model needs --draft-model"),
        ("--compare eagle x", "--compare is 'eagle'"),
    ],
)
def test_mistakes_cost_one_sentence(flags, sentence, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        command.main([*flags.split(), "--out", str(tmp_path)])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert sentence in err and err.count("\n") == 1 and err.startswith("error: ")


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("", "holds no questions"),
        ('{"prompt": "x"}\n{"turns"', "line 2 is not JSON"),
        ('{"turns": []}', "line 1 has no question"),
        ("[1]", "line 1 has no question"),
    ],
)
def test_bad_prompt_files(content, sentence, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(SystemExit) as stop:
        command.main(["--prompts", str(path), "--out", str(tmp_path)])
    assert stop.value.code == 2 and sentence in capsys.readouterr().err


def test_an_output_folder_that_cannot_be(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        command.main(["--limit", "1", "--out", str(tmp_path / "file")])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "cannot be written" in err and "matplotlib" not in err
