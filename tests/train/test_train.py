"""Whole training runs on a tiny target: learning by heart, stopping, resuming, refusing."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from ranks import run_ranks
from tolerances import tolerance
from training import chats, small_files, weights_of, write_data, write_target

import mlx_eagle
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.config import default_ids
from mlx_eagle.generate import stream_generate
from mlx_eagle.train import evaluation, train
from mlx_eagle.train.__main__ import main, settings_of
from mlx_eagle.train.data import read_data, read_examples
from mlx_eagle.train.resume import Checkpoints, kept_from_others, load_checkpoint
from mlx_eagle.train.student import fitting_taps

QUICK = {
    "iters": 6,
    "batch_size": 2,
    "ttt_steps": 3,
    "steps_per_eval": 100,
    "save_every": 3,
    "draft_vocab_size": 64,
    "learning_rate": 1e-3,
    "test_prompts": 0,
}
NUM_TOKENS = 33


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("training") / "target")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write_data(folder, train=chats(8), valid=chats(3, first=8))


def assert_same_weights(left: Path, right: Path) -> None:
    ours = weights_of(left)
    theirs = weights_of(right)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert np.array_equal(ours[name], theirs[name]), name


def test_a_run_ends_in_a_head_that_decodes(data, tmp_path, capsys):
    target = write_target(tmp_path / "target", num_hidden_layers=6)
    report = train(str(target), str(data), str(tmp_path / "head"), **QUICK)
    said = capsys.readouterr().out
    assert re.search(
        r"\nTraining takes about .*: target 1 MB, weights .*Activations are kept\.\n", said
    )
    assert re.search(r"\nIter 6: Train loss .* GB, 00:00 left\n", said)
    assert report.is_finished and report.iteration == 6
    assert report.evaluation.num_sequences == 3
    model, tokenizer = mlx_lm.load(str(target))
    drafter = mlx_eagle.load_drafter(tmp_path / "head", model)
    options = {"max_tokens": 20}
    plain = mlx_lm.generate(model, tokenizer, "say", **options)
    assert mlx_eagle.generate(model, tokenizer, "say", draft_model=drafter, **options) == plain
    rows = (tmp_path / "head" / "training.csv").read_text().splitlines()
    assert rows[0].startswith("iteration,loss,loss_1") and rows[-1].startswith("6,")
    card = (tmp_path / "head" / "README.md").read_text()
    assert "| Batches | 6 of 2 |" in card and str(tmp_path) not in card
    assert (tmp_path / "head" / "tokenizer.json").is_file()
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert str(tmp_path) not in json.dumps(config)


def test_stopped_and_gone_on_with_is_the_same_bit_for_bit(target, data, tmp_path):
    run = {**QUICK, "iters": 8, "grad_accumulation_steps": 2, "save_every": 4}
    run["steps_per_report"] = 4
    train(str(target), str(data), str(tmp_path / "whole"), **run)
    # Stopped after the first checkpoint, as if the machine were switched off.
    half = tmp_path / "half"
    late = tmp_path / "half" / "checkpoints" / "0000008"
    train(str(target), str(data), str(half), **run)
    (half / "model.safetensors").unlink()
    for file in late.iterdir():
        file.unlink()
    late.rmdir()
    train(str(target), str(data), str(half), resume=True, **run)
    assert_same_weights(tmp_path / "whole", half)
    last = [folder / "checkpoints" / "0000008" for folder in (tmp_path / "whole", half)]
    ours, theirs = (mx.load(str(folder / "state.safetensors")) for folder in last)
    assert mx.array_equal(ours["moments.step"], theirs["moments.step"])
    # Speed and memory differ from run to run, losses do not.
    tables = [(folder / "training.csv").read_text() for folder in (tmp_path / "whole", half)]
    first = [[line.split(",")[:5] for line in table.splitlines()] for table in tables]
    assert first[0] == first[1]


@pytest.mark.exhaustive
def test_ctrl_c_saves_and_says_how_to_go_on(target, data, tmp_path):
    output = tmp_path / "head"
    command = [sys.executable, "-m", "mlx_eagle.train", "--model", str(target)]
    command += ["--data", str(data), "--output", str(output), "--iters", "100000"]
    command += ["--batch-size", "2", "--ttt-steps", "2", "--steps-per-report", "1"]
    command += ["--steps-per-eval", "100000", "--save-every", "100000", "--test-prompts", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if line.startswith("Iter 2:"):
                break
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "with --resume goes on" in said
    assert Checkpoints(output).latest() is not None


@pytest.mark.exhaustive
def test_killed_while_saving_leaves_the_checkpoint_before(tmp_path):
    """A process is killed at random moments; the checkpoint that it leaves can always be read."""
    script = (
        "import sys, mlx.core as mx; from pathlib import Path\n"
        "from mlx_eagle.train.resume import Checkpoints\n"
        "kept = Checkpoints(Path(sys.argv[1]))\n"
        "for i in range(1, 100000):\n"
        "    arrays = {'a': mx.full((300, 1000), i), 'b': mx.full((7,), i)}\n"
        "    kept.save(i, arrays, {'number': i}, {'config': {}, 'weights': arrays})\n"
        "    print(i, flush=True)\n"
    )
    for pause in (0.0, 0.004, 0.011):
        command = [sys.executable, "-c", script, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            for _ in range(3):
                done = int(process.stdout.readline())
            time.sleep(pause)
        finally:
            process.kill()
            process.communicate(timeout=60)
        shapes = {"a": mx.zeros((300, 1000), mx.int32), "b": mx.zeros(7, mx.int32)}
        state, facts = load_checkpoint(Checkpoints(tmp_path).latest(), shapes, {"number": int})
        assert facts["number"] >= done
        assert (state["a"] == facts["number"]).all().item()
        assert (state["b"] == facts["number"]).all().item()
    left = [p for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")]
    Checkpoints(tmp_path).save(999999, {"a": mx.zeros(1)}, {}, {"config": {}, "weights": {}})
    assert not any(path.exists() for path in left)


def refused(capsys, *flags: object) -> str:
    """Run the command, which must fail; return the one sentence on standard error."""
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, flags)))
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


@pytest.mark.exhaustive
def test_a_full_disk_leaves_the_last_checkpoint_and_says_so(target, data, tmp_path, capsys):
    """While a checkpoint is saved, while the table is written, and at the very beginning."""
    output = tmp_path / "head"
    flags = []
    for name, value in {**QUICK, "iters": 3}.items():
        flags += [f"--{name.replace('_', '-')}", value]
    command = ["--model", target, "--data", data, "--output", output, *flags]
    with small_files(600):
        said = refused(capsys, *command, "--steps-per-report", 1)
    assert f"{output} cannot be written to (File too large): no checkpoint was saved yet" in said
    train(str(target), str(data), str(output), **{**QUICK, "iters": 3})
    good = output / "checkpoints" / "0000003"
    kept = weights_of(good)
    table = (output / "training.csv").read_text()
    places = (f"{output}/checkpoints/0000006 could not be", f"{output} cannot be written to")
    for room, where in zip((5000, len(table) + 50), places, strict=True):
        with small_files(room):
            said = refused(capsys, *command, "--resume", "--iters", 6, "--steps-per-report", 1)
        assert where in said
        assert f"the last good checkpoint is {good}; make room, and go on with --resume." in said
        assert (output / "training.csv").read_text().startswith(table)
    assert [path.name for path in (output / "checkpoints").iterdir()] == [good.name]
    assert not list(output.glob(".*"))
    for name, array in weights_of(good).items():
        assert np.array_equal(array, kept[name])
    train(str(target), str(data), str(output), resume=True, **QUICK)
    assert Checkpoints(output).latest().name == "0000006"


def test_a_cache_that_does_not_fit(target, data, tmp_path):
    run = {**QUICK, "cache_features": str(tmp_path / "cache")}
    with small_files(5000), pytest.raises(ValueError, match=r"cache/\S+ cannot be written to \("):
        train(str(target), str(data), str(tmp_path / "head"), **run)
    assert not any((tmp_path / "cache").rglob("*.safetensors"))


def test_a_loss_that_is_no_number_stops_the_run(target, data, tmp_path):
    run = {**QUICK, "save_every": 1, "iters": 50, "warmup": 0.0}
    with pytest.raises(
        ValueError, match=r"not a number any more at batch .*checkpoint is .*00000"
    ):
        train(str(target), str(data), str(tmp_path / "head"), **{**run, "learning_rate": 1e30})


@pytest.mark.exhaustive
def test_texts_are_learnt_by_heart_and_evaluated_as_decoding_has_them(target, tmp_path):
    """On the target's greedy answers, evaluation has the figures of decoding."""
    rows = chats(4)
    report = train(
        str(target),
        str(write_data(tmp_path / "data", train=rows, valid=rows)),
        str(tmp_path / "head"),
        regenerate=True,
        answer_temps=(0.0,),
        answer_tokens=NUM_TOKENS,
        iters=40,
        batch_size=4,
        learning_rate=6e-3,
        warmup=0.1,
        ttt_steps=4,
        save_every=1000,
        test_tokens=NUM_TOKENS,
    )
    assert report.evaluation.lengths[0] > 1.8 and report.evaluation.lengths[3] > 3
    model, tokenizer = mlx_lm.load(str(target))
    drafter = mlx_eagle.load_drafter(tmp_path / "head", model)
    for size in (1, 4):
        rounds = 0
        for row in rows:
            prompt = tokenizer.apply_chat_template(
                row["messages"][:-1], add_generation_prompt=True, return_dict=False
            )
            stats = Stats()
            options = {"max_tokens": NUM_TOKENS, "num_draft_tokens": size, "stats": stats}
            steps = mlx_eagle.speculative_generate_step(
                mx.array(prompt), model, drafter, **options
            )
            assert sum(1 for _ in steps) == NUM_TOKENS
            rounds += stats.num_target_forwards
        # The first token of each answer comes with the prompt.
        found = len(rows) * (NUM_TOKENS - 1) / rounds
        assert report.generated.lengths[size - 1] == pytest.approx(found)
        assert report.evaluation.lengths[size - 1] == pytest.approx(found, rel=0.03)
    card = (tmp_path / "head" / "README.md").read_text()
    assert f"Decoding 4 held-out prompts greedily, up to {NUM_TOKENS} tokens" in card
    assert f"| {report.generated.lengths[3]:.3f} |" in card
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["training"]["generated"]["lengths"] == list(report.generated.lengths)


def test_ctrl_c_while_generating_leaves_a_finished_head(target, data, tmp_path, monkeypatch):
    def generate(*args, **options):
        signal.raise_signal(signal.SIGINT)
        return stream_generate(*args, **options)

    monkeypatch.setattr(evaluation, "stream_generate", generate)
    run = {**QUICK, "iters": 2, "test_prompts": 1}
    report = train(str(target), str(data), str(tmp_path / "head"), **run)
    assert report.is_finished and report.generated is None
    assert "Decoding" not in (tmp_path / "head" / "README.md").read_text()
    mlx_eagle.load_drafter(tmp_path / "head", mlx_lm.load(str(target))[0])


@pytest.mark.exhaustive
def test_eight_sequences_are_learnt_by_heart(target, tmp_path):
    rows = chats(8)
    num_slots = 40
    report = train(
        str(target),
        str(write_data(tmp_path / "data", train=rows, valid=rows)),
        str(tmp_path / "head"),
        regenerate=True,
        answer_temps=(0.0,),
        answer_tokens=num_slots + 1,
        iters=300,
        batch_size=8,
        learning_rate=5e-3,
        save_every=1000,
    )
    for size, length in enumerate(report.evaluation.lengths, start=1):
        best = num_slots / -(-num_slots // (size + 1))  # the last round ends with the text
        assert length >= 0.95 * best


@pytest.mark.exhaustive
def test_two_ranks_learn_what_one_learns(target, data, tmp_path):
    run = {**QUICK, "iters": 3, "batch_size": 4, "loss": "lk-alpha"}
    train(str(target), str(data), str(tmp_path / "one"), **run)
    script = (
        "import json, sys; from mlx_eagle.train import train\n"
        "train(sys.argv[1], sys.argv[2], sys.argv[3], **json.loads(sys.argv[4]))\n"
    )
    command = [sys.executable, "-c", script, str(target), str(data), str(tmp_path / "two")]
    outputs = run_ranks([*command, json.dumps(run)], tmp_path)
    assert "Iter 3:" in outputs[0] and outputs[1] == ""
    ours = weights_of(tmp_path / "one")
    theirs = weights_of(tmp_path / "two")
    for name, wanted in ours.items():
        # By the norm: if a gradient is only rounding, AdamW makes a whole step in its direction,
        # and the order of sums differs between processors (6e-6 on one with AVX2). Ranks that
        # keep their own gradients end 2e-2 apart.
        change = np.linalg.norm(theirs[name] - wanted) / max(np.linalg.norm(wanted), 1)
        assert change <= 1e-5, name


def test_a_head_is_taken_further(target, data, tmp_path):
    """A quantized head is dequantized, and keeps its shape."""
    train(str(target), str(data), str(tmp_path / "first"), **{**QUICK, "quantize": True})
    shape = ("draft_vocab_size",)
    run = {key: value for key, value in QUICK.items() if key not in shape}
    report = train(
        str(target), str(data), str(tmp_path / "second"), init=str(tmp_path / "first"), **run
    )
    assert report.is_finished
    configs = [
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "second")
    ]
    assert configs[0]["quantization"]["lm_head"]["bits"] == 6
    assert "quantization" not in configs[1]
    assert configs[1]["draft_vocab_size"] == 64
    assert configs[1]["training"]["init"] == "first"
    run = {**run, "init": str(tmp_path / "first"), "aux_layers": (0, 1, 2)}
    with pytest.raises(ValueError, match="is of fresh drafters, and --init keeps"):
        train(str(target), str(data), str(tmp_path / "x"), **run)


@pytest.mark.exhaustive
def test_the_target_may_be_in_half_precision(target, data, tmp_path):
    run = {**QUICK, "iters": 2, "dtype": "bfloat16"}
    train(str(target), str(data), str(tmp_path / "head"), **run)
    head = mx.load(str(tmp_path / "head" / "model.safetensors"))
    assert {array.dtype for name, array in head.items() if name != "d2t"} == {mx.bfloat16}
    state = mx.load(str(tmp_path / "head" / "checkpoints" / "0000002" / "state.safetensors"))
    assert state["weights.fc.weight"].dtype == mx.float32


@pytest.mark.parametrize("options", [{"cache_features": "cache"}, {"grad_checkpoint": True}])
@pytest.mark.exhaustive
def test_the_same_is_learnt_with_less(target, data, tmp_path, options):
    """Lessons come from a cache, or activations are computed again."""
    if "cache_features" in options:
        options = {"cache_features": str(tmp_path / "cache")}
    train(str(target), str(data), str(tmp_path / "plain"), **QUICK)
    train(str(target), str(data), str(tmp_path / "other"), **QUICK, **options)
    ours = weights_of(tmp_path / "plain")
    theirs = weights_of(tmp_path / "other")
    for name, wanted in ours.items():
        assert np.abs(theirs[name] - wanted).max() <= 10 * tolerance() * np.abs(wanted).max(), name


def rows_of(*contents: str) -> list[dict]:
    return [{"messages": [{"role": "user", "content": text}]} for text in contents]


BAD = {
    "no train.jsonl": (lambda f: f.mkdir(), "has no train.jsonl"),
    "empty file": (lambda f: write_data(f, train=[]), "train.jsonl is empty"),
    "no answers": (lambda f: write_data(f, train=rows_of("a", "b")), "line 1 has no answer"),
    "prompts alone": (
        lambda f: write_data(f, train=[{"prompt": "a"}]),
        "line 1 has a prompt and no answer to learn from",
    ),
    "no JSON": (
        lambda f: (write_data(f, train=[]) / "train.jsonl").write_text("{\n"),
        "line 1 is not JSON",
    ),
    "no known keys": (lambda f: write_data(f, train=[{"a": 1}]), "data format"),
    "other vocabulary": (
        lambda f: write_data(
            f, train=[{"text": "", "tokens": [1, 2, 9999, 4], "prompt_length": 1}] * 4
        ),
        "holds token 9999, but the target has 258",
    ),
    "another target's answers": (
        lambda f: write_data(
            f, train=[{**chats(1)[0], "tokens": [1, 2, 3, 4], "prompt_length": 2}]
        ),
        "another target's answers",
    ),
    "too few": (lambda f: write_data(f, train=chats(1)), "fewer than the batch size"),
    "too long": (
        lambda f: write_data(
            f,
            train=[
                {
                    "messages": [
                        {"role": "user", "content": "x" * 3000},
                        {"role": "assistant", "content": "y"},
                    ]
                }
            ],
        ),
        "--max-seq-length",
    ),
}


GOOD = json.dumps(chats(1)[0]).encode()
MALFORMED = {
    b'{"messages": 5}': "messages is 5, expected a list of at least one message",
    b'["x"]': "no JSON object",
    b"[" * 10**5: "not JSON",
    b'{"messages": ' + b"[" * 10**5: "not JSON",
    b'{"text": "\xff"}': "not JSON ('utf-8'",
    b'{"messages": []}': "expected a list of at least one message",
    b'{"messages": [5]}': "messages is [5], expected",
    b'{"messages": [{"role": "assistant", "content": {"a": 1}}]}': "each with a role and a text",
    b'{"text": 5}': "text is 5, expected a string",
    b'{"prompt": ["a"], "completion": "b"}': 'prompt is ["a"], expected a string',
    b'{"question": "a"}': "no data format that is known",
    b'{"prompt": "a"}': "a prompt and no answer",
    b'{"text": "a", "tokens": "abc", "prompt_length": 1}': "expected a list of token ids",
    b'{"text": "a", "tokens": [1, -2], "prompt_length": 1}': "expected a list of token ids",
    b'{"text": "a", "tokens": [1, 2], "prompt_length": true}': "prompt_length is true",
    b'{"text": "a", "tokens": [1, 2], "prompt_length": 3}': "no fitting",
    b'{"text": "a", "tokens": [1, 99999], "prompt_length": 1}': "holds token 99999, but",
    b'{"text": "a", "tokens": [1, '
    + b"9" * 4000
    + b'], "prompt_length": 1}': "expected a list of token ids",
    b'{"text": ""}': 'an empty "text"',
    b'{"text": "\\ud800"}': "cannot be made into tokens",
    b'{"text": ' + b"9" * 5000 + b"}": "not JSON",
    json.dumps({**chats(1)[0], "tools": 3}).encode(): "tools is 3, expected a list",
}


@pytest.mark.parametrize("row", MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("name", ["train", "valid"])
def test_a_malformed_row_is_named_by_file_and_line(target, tmp_path, row, name):
    folder = write_data(tmp_path / "data", train=chats(2))
    (folder / f"{name}.jsonl").write_bytes(GOOD + b"\n\n" + row + b"\n")
    _, tokenizer = mlx_lm.load(str(target))
    with pytest.raises(ValueError, match=re.escape(MALFORMED[row])) as caught:
        read_examples(read_data(str(folder)), tokenizer, 258, 100)
    assert f"{name}.jsonl, line 3" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("what", BAD)
def test_bad_data_costs_one_sentence(target, tmp_path, capsys, what):
    make, sentence = BAD[what]
    make(tmp_path / "data")
    command = ["--model", target, "--data", tmp_path / "data", "--output", tmp_path / "head"]
    assert sentence in refused(capsys, *command, "--batch-size", 2)
    assert not (tmp_path / "head").exists()


def test_a_folder_that_is_not_there_costs_one_sentence(target, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mlx_eagle.train.data.find_spec", lambda name: None)
    command = ["--model", target, "--data", tmp_path / "nowhere", "--output", tmp_path / "head"]
    assert "is no folder here, and data sets of the hub need" in refused(capsys, *command)
    assert not (tmp_path / "head").exists()


def test_another_kind_of_drafter_is_not_taken_further(target, data, tmp_path):
    config = {"model_type": "llama", "kind": "model"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"is a draft model, and only eagle3, .* are trained"):
        train(str(target), str(data), str(tmp_path / "head"), init=str(tmp_path / "other"))
    assert not (tmp_path / "head").exists()


def test_taps_fit_a_shallow_target(data, tmp_path):
    """For four layers, the default of the official code would be 2, 2 and 1."""
    small = write_target(tmp_path / "small", num_hidden_layers=4)
    train(str(small), str(data), str(tmp_path / "head"), **QUICK)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["aux_boundary_ids"] == [1, 2, 4]
    for num_layers in range(2, 20):
        taps = fitting_taps(num_layers) or default_ids(num_layers)
        assert list(taps) == sorted({*taps}) and taps[0] >= 0 and taps[-1] <= num_layers
    assert [fitting_taps(n) for n in (2, 7, 32)] == [(0, 1, 2), None, None]


def test_a_target_too_shallow_for_the_taps(data, tmp_path):
    small = write_target(tmp_path / "small", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"has 1 layers, so it cannot be tapped at .*--aux-lay"):
        train(str(small), str(data), str(tmp_path / "head"), **QUICK)
    with pytest.raises(ValueError, match="cannot be tapped at"):
        run = {**QUICK, "aux_layers": (1, 1)}
        train(str(small), str(data), str(tmp_path / "head"), **run)
    assert not (tmp_path / "head").exists()


def test_two_runs_do_not_write_to_one_folder(target, data, tmp_path):
    """The second is refused; afterwards, and after a kill, nothing is in the way."""
    output = tmp_path / "head"
    train(str(target), str(data), str(output), **{**QUICK, "iters": 3})
    with kept_from_others(output), pytest.raises(ValueError, match="another run is writing to"):
        train(str(target), str(data), str(output), resume=True, **QUICK)
    report = train(str(target), str(data), str(output), resume=True, **QUICK)
    assert report.is_finished and report.iteration == 6


@pytest.fixture(scope="module")
def started(target, data, tmp_path_factory):
    """Folder of a run that was stopped, and the flags of its command."""
    output = tmp_path_factory.mktemp("started") / "head"
    run = {**QUICK, "iters": 3, "keep_checkpoints": 1}
    train(str(target), str(data), str(output), **run)
    flags = ["--model", target, "--data", data, "--output", output]
    names = ("batch_size", "ttt_steps", "draft_vocab_size", "learning_rate")
    return output, [*flags, *(x for n in names for x in (f"--{n.replace('_', '-')}", QUICK[n]))]


DAMAGED_FACTS = {
    "a list": "[]",
    "another type": '{"iteration": "3"}',
    "nested too deeply": "[" * 10**5,
}


@pytest.mark.parametrize("what", DAMAGED_FACTS)
def test_damaged_facts_of_a_checkpoint_cost_one_sentence(started, capsys, what):
    output, flags = started
    state = output / "checkpoints" / "0000003" / "state.json"
    whole = state.read_text()
    state.write_text(DAMAGED_FACTS[what])
    said = refused(capsys, *flags, "--resume")
    state.write_text(whole)
    assert "0000003 cannot be read (" in said and "remove it to go on" in said


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        # MLX would make a list of that length.
        (
            lambda arrays: arrays.update({"zz.3000000000.w": mx.zeros(1)}),
            "[1] named zz.3000000000.w",
        ),
        (
            lambda arrays: arrays.pop("weights.norm.weight"),
            "has nothing named weights.norm.weight",
        ),
        (lambda arrays: arrays.update({"moments.step": mx.zeros(3)}), "named moments.step"),
    ],
)
def test_damaged_arrays_of_a_checkpoint_cost_one_sentence(started, capsys, change, sentence):
    output, flags = started
    file = output / "checkpoints" / "0000003" / "state.safetensors"
    whole = file.read_bytes()
    arrays = dict(mx.load(str(file)))
    mx.eval(arrays)
    change(arrays)
    file.unlink()
    mx.save_safetensors(str(file), arrays)
    assert sentence in refused(capsys, *flags, "--resume")
    file.write_bytes(whole)


def test_what_lies_there_is_not_spoilt(target, data, tmp_path):
    train(str(target), str(data), str(tmp_path / "head"), **{**QUICK, "iters": 1})
    with pytest.raises(ValueError, match="go on with --resume, or give another"):
        train(str(target), str(data), str(tmp_path / "head"), **QUICK)
    with pytest.raises(ValueError, match="--batch-size is 4, but the run to go on with has 2"):
        run = {**QUICK, "batch_size": 4}
        train(str(target), str(data), str(tmp_path / "head"), resume=True, **run)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        train(str(target), str(data), str(tmp_path / "none"), resume=True, **QUICK)


def test_settings_come_from_flags_and_then_from_a_file(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text("model: a\ndata: b\noutput: c\niters: 7\nlearning_rate: 1e-3\n")
    found = settings_of(["-c", str(file), "--iters", "9", "--aux-layers", "1,2,3"])
    assert (found.model, found.iters, found.learning_rate) == ("a", 9, 1e-3)
    assert found.aux_layers == (1, 2, 3)
    assert found.dtype is None and settings_of(["-c", str(file), "--dtype", "float16"]).dtype
    with pytest.raises(ValueError, match="--cache-bits is about what --cache-features keeps"):
        settings_of(["-c", str(file), "--cache-bits", "8"])
    with pytest.raises(ValueError, match="--cache-bits is 4: give 8"):
        settings_of(["-c", str(file), "--cache-bits", "4"])
    with pytest.raises(SystemExit):
        settings_of(["--answer-temps", "0,warm"])
    assert "'warm' is not a number" in capsys.readouterr().err
    assert settings_of(["-c", str(file), "--from", "mtp"]).init == "mtp"


def test_lora_is_set_in_a_file_as_mlx_lm_has_it(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(NAMES + "lora_parameters:\n  rank: 4\n  scale: 2.0\n  dropout: 0.0\n")
    found = settings_of(["-c", str(file), "--lora-scale", "3"])
    assert (found.lora_rank, found.lora_scale) == (4, 3.0)


NAMES = "model: a\ndata: b\noutput: c\n"
REFUSED = {
    "iters: many": "--iters is 'many': give a number",
    "labels: texts": "--labels is texts: give text or argmax",
    "modle: a": "sets modle, which is no setting",
    "lora_parameters: 8": "sets lora_parameters to 8: give rank and scale",
    "lora_parameters: {rank: 0}": "--lora-rank is 0: give 1 or more",
    "lora_parameters: {rank: 4, scale: 2.0, dropout: 0.1}": "sets lora_dropout, which is no",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_setting_in_a_file_is_refused(line, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f"{NAMES}{line}\n")
    with pytest.raises(ValueError, match=REFUSED[line]):
        settings_of(["-c", str(file)])


@pytest.mark.exhaustive
def test_a_head_is_adapted_to_a_target_with_adapters(target, data, tmp_path):
    train(str(target), str(data), str(tmp_path / "first"), **QUICK)
    lora = [sys.executable, "-m", "mlx_lm", "lora", "--train", "--model", str(target)]
    lora += ["--data", str(data), "--adapter-path", str(tmp_path / "adapters"), "--iters", "2"]
    lora += ["--batch-size", "2", "--num-layers", "2", "--val-batches", "1"]
    done = subprocess.run(lora, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    run = {key: value for key, value in QUICK.items() if key != "draft_vocab_size"}
    report = train(
        str(target),
        str(data),
        str(tmp_path / "second"),
        init=str(tmp_path / "first"),
        adapter_path=str(tmp_path / "adapters"),
        **run,
    )
    assert report.is_finished
    assert mlx_eagle.load_drafter(tmp_path / "second", mlx_lm.load(str(target))[0])
