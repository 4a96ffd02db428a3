"""Whole training runs on a tiny target: learning by heart, stopping, going on, and refusing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from training import chats, write_data, write_target

import mlx_eagle
from mlx_eagle.train import train
from mlx_eagle.train.__main__ import main
from mlx_eagle.train.checkpoints import Checkpoints, load_checkpoint

QUICK = {
    "iters": 6,
    "batch_size": 2,
    "ttt_steps": 3,
    "steps_per_eval": 100,
    "save_every": 3,
    "draft_vocab_size": 64,
    "learning_rate": 1e-3,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("training") / "target")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write_data(folder, train=chats(8), valid=chats(3, first=8))


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return {k: np.array(v) for k, v in mx.load(str(folder / "model.safetensors")).items()}


def assert_same_weights(left: Path, right: Path) -> None:
    ours, theirs = weights_of(left), weights_of(right)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert np.array_equal(ours[name], theirs[name]), name


def test_a_run_ends_in_a_head_that_decodes(target, data, tmp_path):
    report = train(str(target), str(data), str(tmp_path / "head"), **QUICK)
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
    # Stopped behind the first checkpoint, as a machine that is switched off stops.
    half, late = tmp_path / "half", tmp_path / "half" / "checkpoints" / "0000008"
    train(str(target), str(data), str(half), **run)
    (half / "model.safetensors").unlink()
    for file in late.iterdir():
        file.unlink()
    late.rmdir()
    train(str(target), str(data), str(half), resume=True, **run)
    assert_same_weights(tmp_path / "whole", half)
    last = [folder / "checkpoints" / "0000008" for folder in (tmp_path / "whole", half)]
    (ours, _), (theirs, _) = map(load_checkpoint, last)
    assert mx.array_equal(ours["moments"]["step"], theirs["moments"]["step"])
    # Speed and memory differ from run to run, losses do not.
    tables = [(folder / "training.csv").read_text() for folder in (tmp_path / "whole", half)]
    first = [[line.split(",")[:5] for line in table.splitlines()] for table in tables]
    assert first[0] == first[1]


def test_ctrl_c_saves_and_says_how_to_go_on(target, data, tmp_path):
    output = tmp_path / "head"
    command = [sys.executable, "-m", "mlx_eagle.train", "--model", str(target)]
    command += ["--data", str(data), "--output", str(output), "--iters", "100000"]
    command += ["--batch-size", "2", "--ttt-steps", "2", "--steps-per-report", "1"]
    command += ["--steps-per-eval", "100000", "--save-every", "100000"]
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


def test_killed_while_saving_leaves_the_checkpoint_before(tmp_path):
    """A process of its own is killed at random moments; what it leaves can always be read."""
    script = (
        "import sys, mlx.core as mx; from pathlib import Path\n"
        "from mlx_eagle.train.checkpoints import Checkpoints\n"
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
        state, facts = load_checkpoint(Checkpoints(tmp_path).latest())
        assert facts["number"] >= done
        assert (state["a"] == facts["number"]).all().item()
        assert (state["b"] == facts["number"]).all().item()
    left = [p for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")]
    Checkpoints(tmp_path).save(999999, {"a": mx.zeros(1)}, {}, {"config": {}, "weights": {}})
    assert not any(path.exists() for path in left)


def test_a_loss_that_is_no_number_stops_the_run(target, data, tmp_path):
    run = {**QUICK, "save_every": 1, "iters": 50, "warmup": 0.0}
    with pytest.raises(ValueError, match="not a number any more at batch .*checkpoint is .*00000"):
        train(str(target), str(data), str(tmp_path / "head"), **{**run, "learning_rate": 1e30})


@pytest.mark.exhaustive
def test_eight_sequences_are_learnt_by_heart(target, tmp_path):
    rows = chats(8, length=5)
    data = write_data(tmp_path / "data", train=rows, valid=rows)
    report = train(
        str(target),
        str(data),
        str(tmp_path / "head"),
        iters=400,
        batch_size=8,
        learning_rate=3e-3,
        ttt_steps=7,
        steps_per_eval=1000,
        save_every=1000,
    )
    for size, length in enumerate(report.evaluation.lengths, start=1):
        assert length >= 0.95 * (size + 1)
