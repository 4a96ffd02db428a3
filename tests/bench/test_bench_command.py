"""The benchmark from end to end: reports, files, and mistakes of the user."""

import csv
import itertools
import json
import os
import re
import sys
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace

import mlx.core as mx
import pytest
from costs import FLAT, SettledCosts
from grids import thorough
from helpers import PROMPT, byte_tokenizer, plain, tiny_head, tiny_llama
from matplotlib import rc_params_from_file
from mlx.utils import tree_flatten
from mtp_checkpoints import qwen, tiny_qwen3_next, write_checkpoint
from test_bench import make_stats

import mlx_eagle
from mlx_eagle import draft_models
from mlx_eagle.bench import __main__ as command
from mlx_eagle.bench import (
    conditions,
    measure,
    plots,
    questions,
    report,
    runner,
    summary,
)
from mlx_eagle.bench.configurations import PLAIN, Cell, chain_of, num_runs
from mlx_eagle.bench.flags import Settings
from mlx_eagle.bench.parity import compare_texts
from mlx_eagle.demo import __main__ as demo
from mlx_eagle.drafters import pairs
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.system import device


def call(monkeypatch, capsys, tiny, *flags: str) -> tuple[str, str]:
    """Run the command on the tiny models; standard output and error."""
    names = {"model": "tiny", "head": "tiny head", "compared": "tiny draft"}
    monkeypatch.setattr(command, "load_models", lambda args: (tiny, names))
    command.main(list(flags))
    return capsys.readouterr()


def head_of(tiny: runner.Models):
    return tiny.drafters["tiny head"]


def results_in(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("program", thorough(["demo", "bench"], "demo"))
def test_a_note_says_how_to_get_openblas(monkeypatch, capsys, tmp_path, tiny, program):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    flags = "--prompts gsm8k --limit 1 --max-tokens 4 --num-draft-tokens 1 --repeats 1 --out"

    def errors(has_openblas: bool) -> list[str]:
        monkeypatch.setattr(device, "openblas", lambda: object() if has_openblas else None)
        if program == "bench":
            monkeypatch.setattr(conditions, "blas_name", lambda: "a BLAS")
            return call(monkeypatch, capsys, tiny, *flags.split(), str(tmp_path))[1].splitlines()
        monkeypatch.setattr(
            demo, "load_demo", lambda: (tiny.target, tiny.tokenizer, head_of(tiny))
        )
        demo.run("Hello", 4, 1)
        return capsys.readouterr().err.splitlines()

    monkeypatch.setattr(device, "slow_because", lambda: "get OpenBLAS on Tuesday")
    notes = [line for line in errors(False) if line.endswith("get OpenBLAS on Tuesday.")]
    assert len(notes) == 1 and notes[0].startswith("Note: ")
    assert not any("openblas" in line.lower() for line in errors(True))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not any("openblas" in line.lower() for line in errors(False))


def tables_in(text: str) -> list[list[dict[str, str]]]:
    """The tables of a Markdown text: their rows by heading."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, _, *rows = [line[2:-2].split(" | ") for line in block.splitlines()]
        found.append([dict(zip(header, row, strict=True)) for row in rows])
    return found


def naive_speed(runs: list[dict[str, str]]) -> float:
    """Tokens of all prompts over the sum of their median times, from rows of the CSV."""
    tokens = 0.0
    seconds = 0.0
    for name in {(run["set"], run["id"]) for run in runs}:
        own = [run for run in runs if (run["set"], run["id"]) == name]
        number = median(int(run["timed_tokens"]) for run in own)
        tokens += number
        seconds += number * median(float(r["seconds"]) / int(r["timed_tokens"]) for r in own)
    return tokens / seconds


def spread_words(values: list[float], middle: float | None = None) -> str:
    low, half, high = quantiles(values, n=4, method="inclusive")
    return f"{half if middle is None else middle:.2f} [{low:.2f}-{high:.2f}]"


def test_the_tables_show_what_the_runs_were(monkeypatch, capsys, tmp_path, tiny):
    """Every table on single prompts, made again with the standard library from the CSV's rows."""
    lone = runner.Models(tiny.target, tiny.tokenizer, tiny.drafters)
    for name in ("a", "b"):
        lines = [f'{{"prompt": "{name} so?"}}', f'{{"prompt": "Who is {name}?"}}']
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(command, "has_matplotlib", lambda: False)
    flags = f"--prompts {tmp_path}/a.jsonl,{tmp_path}/b.jsonl --max-tokens 6 --repeats 2"
    out, _ = call(
        monkeypatch, capsys, lone, *flags.split(), "--num-draft-tokens", "1,2",
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    runs = list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    prompts = results_in(tmp_path / "out")["scenarios"][0]["prompts"]
    text = (tmp_path / "out" / "report.md").read_text()
    speed, start, acceptance, counts, _, _, _, parity, each, *_ = tables_in(text)
    assert tables_in(out) == [speed, acceptance, parity]
    names = [(name, k) for name in ("a", "b", "overall") for k in ("k=1", "k=2")]
    for rows in (speed, start, acceptance, counts):
        assert [(row["set"], row["configuration"]) for row in rows] == names
    for (name, label), *rows in zip(names, speed, start, acceptance, counts, strict=True):
        sets = ("a", "b") if name == "overall" else (name,)
        own = [run for run in runs if run["set"] in sets and run["configuration"] == label]
        plain, drafted = ([r for r in own if r["role"] == x] for x in ("plain", "speculative"))
        speeds = [naive_speed(those) for those in (plain, drafted)]
        pairs = [(r["set"], r["id"], float(d["tokens_per_second"]) / float(r["tokens_per_second"]))
                 for r, d in zip(plain, drafted, strict=True)]  # fmt: skip
        ratios = [median(x for *at, x in pairs if at == list(prompt))
                  for prompt in dict.fromkeys((s, i) for s, i, _ in pairs)]  # fmt: skip
        rates = [[float(r["tokens_per_second"]) for r in those] for those in (plain, drafted)]
        waits = [median(float(r["ttft"]) for r in those) for those in (plain, drafted)]
        peaks = [max(int(r["peak_bytes"]) for r in those) for those in (plain, drafted)]
        stats = [row["stats"] for row in prompts
                 if row["set"] in sets and row["configuration"] == label]  # fmt: skip
        total = {key: sum(s[key] for s in stats) for key in stats[0] if key.startswith("num_")}
        kept = [sum(s["accepted_histogram"][n : n + 1] != [] and s["accepted_histogram"][n]
                    for s in stats) for n in range(3)]  # fmt: skip
        while kept and not kept[-1]:
            kept.pop()
        forwards = total["num_rounds"] + total["num_plain_steps"]
        expected = {
            "plain tok/s": spread_words(rates[0], speeds[0]),
            "speculative tok/s": spread_words(rates[1], speeds[1]),
            "ratio": f"{speeds[1] / speeds[0]:.2f}x",
            "ratio by prompt": spread_words(ratios),
            "worst prompt": f"{min(ratios):.2f}x",
            "runs": str(len(sets) * 2 * 4),
            "TTFT plain ms": f"{1e3 * waits[0]:.0f}",
            "TTFT ms": f"{1e3 * waits[1]:.0f}",
            "peak plain": device.megabytes(peaks[0]),
            "peak": device.megabytes(peaks[1]),
            "mean acceptance length (tau)": f"{total['num_emitted'] / forwards:.2f}",
            "acceptance": f"{total['num_accepted'] / total['num_drafted']:.2f}",
            "accepted lengths": " ".join(f"{n}:{4 * x}" for n, x in enumerate(kept)),
            "target forwards/token": f"{forwards / total['num_emitted']:.3f}",
            "head forwards/round": f"{total['num_head_forwards'] / total['num_rounds']:.2f}",
            "evals/round": f"{total['num_evals'] / forwards:.2f}",
        }
        found = {key: value for row in rows for key, value in row.items()}
        assert {key: found[key] for key in expected} == expected
    for row, prompt in zip(each, prompts, strict=True):
        own = [r for r in runs if all(r[k] == prompt[k] for k in ("set", "id", "configuration"))]
        speeds = [
            naive_speed([r for r in own if r["role"] == x]) for x in ("plain", "speculative")
        ]
        shown = (row["prompt"], row["plain tok/s"], row["speculative tok/s"], row["parity"])
        at = f"{prompt['set']}/{prompt['id']}"
        assert shown == (at, *(f"{x:.2f}" for x in speeds), "identical")
    assert [row["outputs identical to plain"] for row in parity] == ["4 of 4"] * 2


@pytest.mark.exhaustive
def test_end_to_end(monkeypatch, capsys, tmp_path, tiny):
    folder = tmp_path / "out"
    flags = "--prompts gsm8k,mt_bench --limit 1 --max-tokens 8 --num-draft-tokens 1,2 --repeats 1"
    drawn = tmp_path / "picture.png"
    flags += f" --with-lookup 2 --json --picture {drawn}"
    out, err = call(monkeypatch, capsys, tiny, *flags.split(), "--out", str(folder))
    brief = json.loads(out.splitlines()[-1])
    document = results_in(folder)
    scenario = document["scenarios"][0]
    assert brief["scenarios"][0]["configurations"] == scenario["configurations"]
    assert scenario["configurations"][0]["overall"]["mean_acceptance_length"] >= 1
    assert drawn.stat().st_size > 10_000
    labels = ["k=1", "k=2", "k=2 + lookup", "mlx-lm draft k=1", "mlx-lm draft k=2"]
    assert [configuration["label"] for configuration in scenario["configurations"]] == labels
    assert brief["scenarios"][0]["identical"] == brief["scenarios"][0]["batch_size"] == 10
    names = {"chip", "os", "mlx", "mlx-lm", "mlx-eagle", "blas", "model_precision", "head"}
    assert names <= document["conditions"].keys()
    assert sorted(map(int, scenario["drafters"][0]["costs"]["verify_cost"])) == list(range(1, 9))

    rows = list(csv.DictReader((folder / "results.csv").open()))
    assert len(rows) == 2 * 5 * 4
    assert {row["role"] for row in rows} == {"plain", "speculative"}
    for row in rows:
        rate = float(row["timed_tokens"]) / float(row["seconds"])
        assert float(row["tokens_per_second"]) == pytest.approx(rate)

    text = (folder / "report.md").read_text()
    printed = out[: out.index("Written to ")]
    tables = re.findall(r"(?:\|.*\n)+", printed)
    assert len(tables) == 3 and all(table in text for table in tables)
    # Results come first, and conditions are folded.
    assert text.index("## Results") < text.index("## Conditions") < text.index("<summary>Machine")
    conditions = re.sub(r"(?s)<details>.*?</details>", "", text.split("## Conditions")[1])
    assert conditions.strip() == ""
    for word in ("tok/s", "tau", "TTFT", "bound", "c(R)", "identical", "peak", "evals/round"):
        assert word in text
    configuration = scenario["configurations"][1]
    assert f"{configuration['sets']['gsm8k']['speedup']:.2f}x" in text
    assert text.count("](plots/") == 5
    names = {"speedup", "verify_cost", "acceptance", "round_time", "tokens_per_second"}
    for suffix in ("png", "svg"):
        assert {path.stem for path in (folder / "plots").glob(f"*.{suffix}")} == names
    # The bar is for terminals: elsewhere it is a line now and then.
    assert "%" not in err and "bench: 40 of 40 runs, " in err


@pytest.mark.exhaustive
def test_any_drafter_can_be_measured(monkeypatch, capsys, tmp_path, tiny):
    """Here the one without weights, opened as ``mlx_eagle.generate`` opens it."""
    loaded = tiny.target, tiny.tokenizer, head_of(tiny)
    monkeypatch.setattr(command, "load_demo", lambda **_: loaded)
    flags = "--draft-model lookup --prompts gsm8k --limit 1 --max-tokens 6 --repeats 1"
    command.main([*flags.split(), "--out", str(tmp_path)])
    assert "{" not in capsys.readouterr().out, "JSON is printed on demand"
    found = results_in(tmp_path)
    assert found["conditions"]["head"] == "lookup"
    assert [row["parity"]["identical"] for row in found["scenarios"][0]["prompts"]] == [True]
    args = command.build_parser().parse_args(["--draft-model", "auto"])
    models, names = command.load_models(args)
    assert (
        models.drafters["demo head"] is head_of(tiny)
        and names["head"] == command.DEMO_NAMES["head"]
    )
    args = command.build_parser().parse_args(["--draft-model", "auto+lookup"])
    models, names = command.load_models(args)
    copying = models.drafters["demo head+lookup"]
    assert copying.copies is not None and copying.head is head_of(tiny).head
    assert names["head"] == command.DEMO_NAMES["head"] + "+lookup"


@pytest.mark.exhaustive
def test_several_drafters_are_shown_side_by_side(monkeypatch, capsys, tmp_path, tiny):
    """Against sums over the CSV's rows, and each drafter as it is measured by itself."""
    drafters = {"tiny head": head_of(tiny), "lookup": LookupDrafter()}
    several = runner.Models(tiny.target, tiny.tokenizer, drafters)
    flags = "--prompts gsm8k --limit 2 --max-tokens 8 --num-draft-tokens 1,2 --repeats 1 --json"
    flags += f" --tree 2x2:4 --order mirror --batch 2 --out {tmp_path}"
    out, err = call(monkeypatch, capsys, several, *flags.split())
    scenario = json.loads(out.splitlines()[-1])["scenarios"][0]
    ways = {"tiny head": ["k=1", "k=2", "tree 2x2:4"], "lookup": ["k=1", "k=2"]}
    labels = [f"{name}, {way}" for name in ways for way in ways[name]]
    assert [c["label"] for c in scenario["configurations"]] == labels
    assert [drafter["name"] for drafter in scenario["drafters"]] == list(ways)
    assert "bench: 34 of 34 runs, " in err, "2 prompts in 12 turns, and a batch in 10"

    best = scenario["side_by_side"]
    assert sorted(row["drafter"] for row in best) == sorted(ways)
    assert best[0]["speedup"] >= best[1]["speedup"]
    runs = list(csv.DictReader((tmp_path / "results.csv").open()))
    for row in best:
        own = [c for c in scenario["configurations"] if c["drafter"] == row["drafter"]]
        assert row["speedup"] == max(c["overall"]["speedup"] for c in own)
        mine = [run for run in runs if run["configuration"] == row["configuration"]]
        assert {run["drafter"] for run in mine} == {row["drafter"]}
        peak = max(int(run["peak_bytes"]) for run in mine if run["role"] == "speculative")
        weight = sum(a.nbytes for _, a in tree_flatten(head_of(tiny).head.parameters()))
        is_head = row["drafter"] == "tiny head"
        assert row["weight_bytes"] == (weight if is_head else 0)
        assert row["peak_bytes"] == peak - (0 if is_head else weight)
        assert row["identical"] == row["num_prompts"] == 2
        line = f"| {row['drafter']} | {row['configuration'].partition(', ')[2]} | "
        assert line in out and line in (tmp_path / "report.md").read_text()
    assert (tmp_path / "plots" / "side_by_side.png").stat().st_size > 10_000
    assert (tmp_path / "plots" / "verify_cost-drafter2.svg").is_file()
    batches = json.loads(out.splitlines()[-1])["batches"]
    assert [row["configuration"] for row in batches] == [x for x in labels if "tree" not in x]
    assert "| drafter lookup | no weights |" in (tmp_path / "report.md").read_text()


@pytest.mark.exhaustive
def test_an_eagle_head_beside_mtp_layers(monkeypatch, capsys, tmp_path):
    part = qwen(tiny_qwen3_next(vocab_size=264))
    folder = write_checkpoint(tmp_path / "target", part)
    layers = mlx_eagle.open_drafter("mtp", part.target, target=folder)
    drafters = {"head": tiny_head(part.target), "mtp": layers}
    models = runner.Models(part.target, byte_tokenizer(), drafters)
    flags = "--prompts gsm8k --limit 1 --max-tokens 8 --num-draft-tokens 1,2 --repeats 1 --json"
    out, _ = call(monkeypatch, capsys, models, *flags.split(), "--out", str(tmp_path / "out"))
    scenario = json.loads(out.splitlines()[-1])["scenarios"][0]
    labels = ["head, k=1", "head, k=2", "mtp, k=1", "mtp, k=2"]
    assert [c["label"] for c in scenario["configurations"]] == labels
    assert [row["identical"] for row in scenario["side_by_side"]] == [1, 1]
    assert {row["drafter"] for row in scenario["side_by_side"]} == {"head", "mtp"}


def test_weights_that_drafters_share_are_counted_for_both(tiny):
    """Three drafters, two with one head: a peak leaves out only what the others need."""
    head = head_of(tiny)
    other = tiny_head(tiny.target, seed=5)
    shared = {"head": head, "head+lookup": head.with_copies(), "other": other}
    models = runner.Models(tiny.target, tiny.tokenizer, shared)
    overall = {"speedup": 1.5, "tps": 3.0, "plain_tps": 2.0, "mean_acceptance_length": 2.0,
               "peak_bytes": 10**9, "speedup_by_prompt": {"min": 1.0}}  # fmt: skip
    results = [{"drafter": name, "label": name, "overall": overall} for name in shared]
    scenario = {"configurations": results, "prompts": []}
    rows = {row["drafter"]: row for row in summary.side_by_side(models, scenario)}
    weight = sum(array.nbytes for _, array in tree_flatten(head.head.parameters()))
    assert [rows[name]["weight_bytes"] for name in shared] == [weight] * 3
    assert [rows[name]["peak_bytes"] for name in shared] == [10**9 - weight] * 3


TABLE = """
a/Tiny
    b/odd    eagle3   1  MIT
        2.0x  M4 Pro  4 bit  somewhere
    b/head   eagle3   1  MIT
    c/head   eagle3   1  CC-BY-NC-4.0
"""


def test_all_known_drafters_of_a_target(monkeypatch, capsys, tiny):
    """But those that their licence keeps from "auto", and those that cannot be opened."""
    monkeypatch.setattr(pairs, "PAIRS", pairs.read_table(TABLE))
    monkeypatch.setattr(draft_models, "own_kind", lambda target: "mtp")
    monkeypatch.setattr(command, "load", lambda *_, **__: (tiny.target, tiny.tokenizer))
    opened = {"b/head": tiny_head(tiny.target), "mtp": head_of(tiny), "lookup": LookupDrafter()}

    def open_one(name, *_):
        if name not in opened:
            raise ValueError(f"{name}\nis odd")
        return opened[name]

    monkeypatch.setattr(draft_models, "_open", open_one)

    def load(*flags: str):
        return command.load_models(command.build_parser().parse_args(flags))

    models, _ = load("--model", "a/Tiny", "--draft-model", "auto:all,lookup")
    assert models.drafters == {"head": opened["b/head"]} | {
        k: opened[k] for k in ("mtp", "lookup")
    }
    assert "b/odd is left out: b/odd is odd\n" in capsys.readouterr().err
    opened.clear()
    with pytest.raises(ValueError, match="no known drafter of a/Tiny can be opened"):
        load("--model", "a/Tiny", "--draft-model", "auto:all")
    with pytest.raises(ValueError, match="auto:all needs --model"):
        load("--draft-model", "auto:all")
    monkeypatch.setattr(draft_models, "own_kind", lambda target: None)
    with pytest.raises(ValueError, match="no public head is known here for some/model"):
        load("--model", "some/model", "--draft-model", "auto:all")


def test_the_report_says_which_to_take():
    rows = [
        {"drafter": name, "configuration": "auto", "speedup": x}
        for name, x in (("a", 1.42), ("b", 0.9))
    ]
    assert report.advice(rows).startswith("Take a, auto: 1.42x")
    assert report.advice(rows[1:]).startswith("Take none: the fastest, b")


def test_names_of_several_draft_models(monkeypatch, tmp_path, tiny):
    loaded = tiny.target, tiny.tokenizer, head_of(tiny)
    monkeypatch.setattr(command, "load_demo", lambda **_: loaded)

    def load(names: str):
        return command.load_models(command.build_parser().parse_args(["--draft-model", names]))

    models, names = load("auto, lookup,auto+lookup")
    assert list(models.drafters) == ["demo head", "lookup", "demo head+lookup"]
    assert names["head"] == "demo head, lookup, demo head+lookup"
    assert models.drafters["demo head"] is head_of(tiny)
    assert command.with_short_names({"a/head": 1, "b/other": 2}) == {"head": 1, "other": 2}
    assert list(command.with_short_names({"a/head": 1, "b/head": 2})) == ["a/head", "b/head"]
    with monkeypatch.context() as before:
        before.setattr(command, "load_demo", lambda **_: pytest.fail("the target was loaded"))
        with pytest.raises(ValueError, match="gone does not exist"):
            load(f"lookup,{tmp_path / 'gone'}")
    named = tmp_path / "heads, old"
    named.mkdir()
    args = command.build_parser().parse_args(["--draft-model", str(named)])
    assert command.draft_names(args) == (str(named),)


@pytest.mark.exhaustive
def test_scenarios_share_one_report(monkeypatch, capsys, tmp_path, tiny):
    lone = runner.Models(tiny.target, tiny.tokenizer, tiny.drafters)
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "one?"}\n')
    flags = "--max-tokens 6 --num-draft-tokens 2 --tree 2x2:4 --repeats 1 --temp 0,0.7"
    flags += f" --context 40 --order mirror --prompts {prompts} --out {tmp_path}"
    out, _ = call(monkeypatch, capsys, lone, *flags.split(), "--json")
    scenarios = json.loads(out.splitlines()[-1])["scenarios"]
    assert [(s["context"], s["temp"]) for s in scenarios] == [(40, 0.0), (40, 0.7)]
    assert all(s["prompt_tokens"]["median"] == 40 for s in scenarios)
    # Our sampler draws the same text with and without drafts.
    assert all(s["identical"] == s["batch_size"] == 2 for s in scenarios)
    assert (tmp_path / "plots" / "speedup-2.png").is_file()


@pytest.mark.exhaustive
def test_batches_beside_mlx_lms_own(monkeypatch, capsys, tmp_path, tiny):
    lone = runner.Models(tiny.target, tiny.tokenizer, tiny.drafters)
    for module in ("batch.generate", "decoding.generate_step"):
        monkeypatch.setattr(f"mlx_eagle.{module}.costs_of", lambda *_: SettledCosts(FLAT))
    (tmp_path / "mine.jsonl").write_text('{"prompt": "so?"}\n{"prompt": "Who is it?"}\n')
    flags = f"--prompts {tmp_path}/mine.jsonl --max-tokens 9 --repeats 1"
    flags += f" --order mirror --num-draft-tokens 2,auto --batch 2,1 --out {tmp_path}"
    out, _ = call(monkeypatch, capsys, lone, *flags.split(), "--json")
    document = results_in(tmp_path)
    rows = document["batches"]
    keys = [(row["batch"], row["set"], row["configuration"]) for row in rows]
    assert keys == [
        (n, "mine", configuration) for n in (2, 1) for configuration in ("k=2", "auto")
    ]
    for row in rows:
        assert [verification["identical"] for verification in row["parity"]] == [True] * row[
            "batch"
        ]
        assert row["output_tokens"] == 9 * row["batch"]  # none of the tiny texts ends before
        # Two runs; what prefill emits is not counted, as everywhere.
        passes = row["num_rounds"] + row["num_plain_steps"]
        assert row["mean_acceptance_length"] == pytest.approx(2 * 8 * row["batch"] / passes)
        assert row["speedup"] == pytest.approx(row["tps"] / row["plain_tps"])
        after = row["tps_after_prefill"] / row["plain_tps_after_prefill"]
        assert row["speedup_after_prefill"] == pytest.approx(after)
        assert row["tps_after_prefill"] > 0  # how it is computed is seen by a stopped clock
        assert row["num_rounds"] > 0 and row["num_runs"] == 2
    assert json.loads(out.splitlines()[-1])["batches"] == rows
    text = (tmp_path / "report.md").read_text()
    section = text.split("## Batches")[1].split("## Conditions")[0]
    assert section.count("\n| 2 |") == section.count("\n| 1 |") == 2
    assert "2 of 2" in section and "| batches | 2, 1 |" in text


def cells_of_batches(rows: list[dict]) -> list[list[str]]:
    """The cells of the report's table of batches."""
    document = {"conditions": {"load_average": 0.0}, "scenarios": [], "batches": rows}
    (table,) = tables_in(report.report(document))
    return [list(row.values()) for row in table]


def test_batches_are_made_set_by_set(tiny):
    asked = [questions.Question(name, str(i), "so?") for i in range(2) for name in ("a", "b")]
    settings = Settings(batches=(2,), sizes=(1,), max_tokens=3, repeats=2)
    runs = itertools.count()
    measurement = measure.Measurement(tiny, {}, asked, settings)
    rows = measurement.run_batches(lambda: next(runs))
    assert [(row["set"], row["batch"]) for row in rows] == [("a", 2), ("b", 2)]
    assert next(runs) == 2 * 2 * 4
    of_mlx_lm = 4 * 2 * 4
    assert num_runs(measurement.groups(), settings) == 16 + 4 * 2 * 4 + of_mlx_lm
    (line, _) = cells_of_batches(rows)
    assert line[9] == f"{rows[0]['mean_acceptance_length']:.2f}"


def test_the_clock_of_a_batch_runs_over_the_whole_call(tiny, monkeypatch):
    ticks = iter([10.0, 12.5])
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(runner, "time", clock)
    prompts = [PROMPT, PROMPT[:3]]
    run = runner.run_batch(tiny, prompts, 6, PLAIN)
    assert run.call_tps == pytest.approx(sum(map(len, run.texts)) / 2.5)
    assert run.texts == [plain(tiny.target, prompt, 6) for prompt in prompts]
    run = runner.Run([[1, 2, 3], [4]], 2, 1.0, call_seconds=2.5)
    assert (run.call_tps, run.tps) == (4 / 2.5, 2 / 1.0)


def test_a_text_that_differs_in_a_batch_is_shown_with_its_margin(tiny):
    texts = [plain(tiny.target, PROMPT, 8), plain(tiny.target, PROMPT[:3], 8)]
    other = [texts[0], [*texts[1][:5], (texts[1][5] + 1) % 258, *texts[1][6:]]]
    asked = (questions.Question("mine", "0", ""),)
    cell = Cell(chain_of("auto"), asked, [PROMPT, PROMPT[:3]], at_once=2)
    cell.plain.append(runner.Run(texts, 16, 2.0, call_seconds=4.0))
    cell.runs.append(runner.Run(other, 14, 1.0, make_stats([1, 0, 1, 0], 2), call_seconds=4.0))
    compare_texts(tiny.target, [cell])
    row = summary.batch_figures(cell)
    assert (row["speedup"], row["speedup_after_prefill"]) == (1.0, (16 - 2) / 1.0 / (16 / 2.0))
    assert [verification["index"] for verification in row["parity"]] == [None, 5]
    (line,) = cells_of_batches([row])
    cell.runs[0] = runner.Run([[1], [2]], 0, 0.0, make_stats([], 2), call_seconds=4.0)
    assert summary.batch_figures(cell)["speedup_after_prefill"] is None  # nothing to be timed
    margin = row["parity"][1]["margin"]
    assert line[:3] == ["2", "mine", "auto"]
    assert line[-3:] == ["1 of 2", f"{margin:.2g}", "-"] and margin > 0


@pytest.mark.exhaustive
def test_results_are_printed_before_they_are_written(monkeypatch, capsys, tmp_path, tiny):
    lone = runner.Models(tiny.target, tiny.tokenizer, tiny.drafters)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "write_all", full)
    flags = f"--prompts gsm8k --limit 1 --max-tokens 4 --repeats 1 --out {tmp_path}"
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, capsys, lone, *flags.split())
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and "No space left" in err
    assert "| gsm8k | k=3 |" in out and "mean acceptance length (tau)" in out


def test_without_matplotlib_there_are_tables(monkeypatch, capsys, tmp_path, tiny):
    lone = runner.Models(tiny.target, tiny.tokenizer, tiny.drafters)
    monkeypatch.setattr(command, "has_matplotlib", lambda: False)
    flags = f"--prompts gsm8k --limit 1 --max-tokens 4 --repeats 1 --out {tmp_path}"
    out, _ = call(monkeypatch, capsys, lone, *flags.split())
    hint = "Without plots, which need matplotlib: pip install 'mlx-eagle[bench]'."
    assert out.splitlines()[-1] == hint
    text = (tmp_path / "report.md").read_text()
    assert "| gsm8k | k=3 |" in text and "![" not in text
    with pytest.raises(SystemExit):
        call(monkeypatch, capsys, lone, *flags.split(), "--picture", str(tmp_path / "a.png"))
    assert "--picture needs matplotlib: pip install" in capsys.readouterr().err


def test_a_context_beyond_the_targets_is_refused(monkeypatch, capsys, tmp_path):
    model = tiny_llama(vocab_size=258, max_position_embeddings=64)
    small = runner.Models(model, byte_tokenizer(), {"head": tiny_head(model)})
    with pytest.raises(SystemExit) as stop:
        flags = f"--limit 1 --max-tokens 8 --context 32,57 --out {tmp_path}"
        call(monkeypatch, capsys, small, *flags.split())
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "--context holds 57, but the target takes 64" in err
    assert "give at most 56" in err
    settings = Settings(contexts=(56, None), max_tokens=8)
    command.check_contexts(settings, 64)


def luminance(colour: str) -> float:
    """WCAG's relative luminance of "#rrggbb"."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(
        weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
    )


@pytest.mark.parametrize("background", ["#ffffff", "#0d1117"])
def test_the_picture_is_readable_on_light_and_dark_pages(background):
    style = rc_params_from_file(plots.PICTURE_STYLE, use_default_template=False)
    bars = style["axes.prop_cycle"].by_key()["color"]
    lines = [value for key, value in style.items() if key.endswith("color")]
    assert len(bars) == 3 and len(lines) == 6
    for colour in (*bars, *lines):
        found = luminance(f"#{colour.removeprefix('#')}")
        light, dark = sorted([found, luminance(background)], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3  # WCAG for large text and for graphics


def test_the_picture_shows_auto_without_copies_and_with_them():
    def timed(kind, size, speedup):
        return {"kind": kind, "num_draft_tokens": size, "overall": {"speedup": speedup}}

    k1 = timed("chain", 1, 1.3)
    k2 = timed("chain", 2, 1.4)
    auto = timed("auto", None, 1.2)
    tree = timed("tree", None, 1.5)
    copied = timed("copies", 3, 1.1)
    copied_auto = timed("copies", None, 1.0)
    assert plots.shown([k1, auto, k2, tree]) == [auto]
    assert plots.shown([k1, copied, tree, auto, copied_auto]) == [auto, copied_auto]
    assert plots.shown([k1, k2, copied]) == [k2, copied]
    assert plots.shown([]) == []


def test_progress_is_lines_where_there_is_no_terminal(capsys):
    with command.counting(100) as count:
        for _ in range(100):
            count()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 20
    assert lines[0].startswith("bench: 5 of 100 runs, ") and lines[-1].startswith("bench: 100 of")


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--picture here.jpg", "--picture is here.jpg: give the name of a .png or .svg file"),
        ("--seed=-1", "--seed is -1: give a whole number from 0"),
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
        ("--compare eagle x", "--compare is 'eagle'"),
        ("--with-lookup 0", "--with-lookup holds '0'"),
        ("--with-lookup 3 --draft-model lookup", "copies from the text, which --draft-model look"),
        ("--with-lookup 3 --draft-model a+lookup", "makes already: leave one of them out"),
        ("--with-lookup 3 --draft-model auto,lookup", "which --draft-model lookup makes already"),
        ("--draft-model auto,auto", "--draft-model is auto,auto: give every value once."),
        ("--draft-model auto,", "--draft-model holds '': give names of draft models."),
        ("--draft-model auto,lookup --serve", "--serve measures one draft model, but"),
        ("--with-lookup 3 --serve", "--with-lookup does not go with --serve"),
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


def test_a_target_without_a_known_head_is_not_loaded(capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        command.main(["--model", "some/Model", "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert "error: no public head is known here for some/Model" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["demo", "bench"])
@pytest.mark.parametrize("load", [1.9, 2.1])
def test_a_load_above_the_cores_is_said(monkeypatch, capsys, tmp_path, tiny, program, load):
    lone = runner.Models(tiny.target, tiny.tokenizer, tiny.drafters)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(command, "has_matplotlib", lambda: False)
    monkeypatch.setattr(demo, "load_demo", lambda: (tiny.target, tiny.tokenizer, head_of(tiny)))
    if program == "demo":
        demo.run("Hello", 4, 1)
        texts = [capsys.readouterr().out]
    else:
        flags = "--prompts gsm8k --limit 1 --max-tokens 4 --repeats 1 --order weave --out"
        texts = [call(monkeypatch, capsys, lone, *flags.split(), str(tmp_path))[0]]
        texts.append((tmp_path / "report.md").read_text())
    for text in texts:
        assert text.count("the load of this machine is 2.1 on 2 cores") == (load > 2)
