"""Report files: what the benchmark writes is what the schema allows, and damage is a sentence."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest
from test_bench_command import call

from mlx_eagle.bench import __main__ as command
from mlx_eagle.bench import report_file
from mlx_eagle.bench.report_file import public_name, read_report

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads(report_file.SCHEMA.read_text())
FILES = sorted((ROOT / "measured").glob("*.json"))


def test_the_benchmark_writes_what_was_measured(monkeypatch, capsys, tmp_path, tiny):
    monkeypatch.setattr(command, "has_matplotlib", lambda: False)
    file = tmp_path / "mine.json"
    flags = "--prompts gsm8k --limit 1 --max-tokens 6 --num-draft-tokens 2,auto --repeats 1"
    flags += " --order weave"
    flags += f" --temp 0,1 --out {tmp_path / 'out'} --report {file}"
    said = call(monkeypatch, capsys, tiny, *flags.split(), "--notes", "on a test's tiny model")
    assert str(file) in said.out
    report = json.loads(file.read_text())
    jsonschema.validate(report, SCHEMA)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert report["notes"] == "on a test's tiny model"
    ways = [(run["drafts"], run["temperature"]) for run in report["runs"]]
    assert ways == [("k=2", 0.0), ("auto", 0.0), ("k=2", 1.0), ("auto", 1.0)]
    first = results["scenarios"][0]["configurations"][0]["overall"]
    for name, there in (("tps", "tps"), ("tau", "mean_acceptance_length")):
        assert report["runs"][0][name] == pytest.approx(first[there], abs=1e-3)
    assert {(run["identical"], run["texts"]) for run in report["runs"]} == {(1, 1)}
    assert report["drafters"][0]["c"]["1"] == 1.0 and len(report["drafters"][0]["c"]) == 8
    command.main(["--check-report", str(file)])
    assert "4 runs" in capsys.readouterr().out


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_reports_of_the_repository(file):
    jsonschema.validate(json.loads(file.read_text()), SCHEMA)
    assert read_report(file)["runs"]


def changed(report: dict, path: str, value: object) -> dict:
    """A copy with one value set, or removed for Ellipsis."""
    found = copy.deepcopy(report)
    *inside, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    place = found
    for key in inside:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return found


DAMAGE = {
    "format": 2,
    "date": "yesterday",
    "by": "me",
    "notes": "x" * 301,
    "machine/chip": "",
    "machine/memory_gb": 0,
    "machine/cores": True,
    "machine/user": "ann",
    "machine/backend": "vulkan",
    "machine": [],
    "versions/mlx": ...,
    "versions/torch": 2,
    "target/gigabytes": "4.5",
    "drafters": [],
    "drafters/0/c/2": 0,
    "drafters/0/d": -0.1,
    "runs": {},
    "runs/0/tps": None,
    "runs/0/context": "8k",
    "runs/0/exact": "no",
    "runs/0/texts": 0,
    "runs/0": 1,
}


@pytest.mark.parametrize("path", DAMAGE)
def test_damage_is_refused_in_a_sentence(path, tmp_path, capsys):
    report = changed(read_report(FILES[0]), path, DAMAGE[path])
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(report))
    with pytest.raises(SystemExit) as stop:
        command.main(["--check-report", str(file)])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert path.rpartition("/")[2].split("/")[0] in said or "runs[0]" in said


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("runs/0/identical", 99, "of runs.0. more texts are identical than there are"),
        ("runs/0/drafter", "another", "the drafter of runs.0. is none of"),
    ],
)
def test_figures_that_contradict_each_other(path, value, words, tmp_path):
    report = changed(read_report(FILES[0]), path, value)
    jsonschema.validate(report, SCHEMA)  # which cannot say it
    file = tmp_path / "x.json"
    file.write_text(json.dumps(report))
    with pytest.raises(ValueError, match=words):
        read_report(file)


@pytest.mark.parametrize("text", ["{", "[]", "\x00", '{"format": NaN}'])
def test_files_that_hold_no_report(text, tmp_path):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        read_report(file)


@pytest.mark.parametrize(
    "name, public",
    [
        ("/home/ann/models/secret-8b", "secret-8b"),
        ("~/models/x", "x"),
        ("../x", "x"),
        ("mlx-community/Qwen3-8B-4bit", "mlx-community/Qwen3-8B-4bit"),
        ("head+lookup", "head+lookup"),
    ],
)
def test_names_tell_no_folders(name, public):
    assert public_name(name) == public


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--report", "/no/such/folder/x.json"], "--report /no/such/folder/x.json"),
        (["--notes", "x"], "--report"),
        (["--report", "x.json", "--serve"], "--report does not go with --serve"),
    ],
)
def test_flags_are_refused_before_anything_is_loaded(flags, words, capsys):
    with pytest.raises(SystemExit):
        command.main(flags)
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
