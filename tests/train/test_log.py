"""Table of a run: it has the rows that were reported, and none twice after a resume.

Services such as wandb get what mlx-lm's trainer gives them.
"""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import byte_tokenizer, tiny_llama
from mlx.optimizers import SGD
from mlx_lm.tuner import callbacks
from mlx_lm.tuner.datasets import CacheDataset, TextDataset
from mlx_lm.tuner.trainer import TrainingArgs
from mlx_lm.tuner.trainer import train as train_by_mlx_lm

from mlx_eagle.train import train
from mlx_eagle.train.evaluation import Evaluation
from mlx_eagle.train.log import TrainingLog, check_services
from mlx_eagle.train.settings import TrainSettings

FOUND = Evaluation(match=(0.5, 0.25), lengths=(1.5, 1.75), num_slots=8, num_sequences=2)

SETTINGS = TrainSettings("", "", "", iters=9, steps_per_report=1)
FIGURES = {"learning_rate": 1e-3, "grad_norm": 2.0}


def write(folder: Path, first: int, last: int, **changes: str) -> None:
    """Report batches ``first`` to ``last``, like a run that resumes after the batch before."""
    log = TrainingLog(folder, 2, replace(SETTINGS, **changes), first - 1)
    for number in range(first, last + 1):
        losses = np.array([number + 0.5, number + 0.25])
        log.learnt(number, losses, 10, 0.1, **FIGURES, trained_tokens=10 * number)
    log.evaluation(last, FOUND)
    log.close()


def rows_in(folder: Path) -> list[dict[str, str]]:
    with (folder / "training.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_has_what_was_reported(tmp_path, capsys):
    write(tmp_path, 1, 3)
    training, evaluation = rows_in(tmp_path)[2:]
    assert (training["iteration"], training["trained_tokens"]) == ("3", "30")
    losses = [float(training[name]) for name in ("loss", "loss_1", "loss_2")]
    assert losses == [6.75, 3.5, 3.25]
    assert not training["match_1"] and not evaluation["loss"]
    names = ("match_1", "match_2", "mean_acceptance_length_1", "mean_acceptance_length_2")
    assert [float(evaluation[name]) for name in names] == [0.5, 0.25, 1.5, 1.75]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Iter 1: Train loss 2.750, first step 1.500, ")
    assert said[-1].startswith("Iter 3: Val on 2 sequences: match by depth 0.500 0.250; ")


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint(tmp_path):
    """Later rows come again, and a line that a full disk has cut short is removed."""
    write(tmp_path, 1, 5)
    table = tmp_path / "training.csv"
    kept = table.read_text().splitlines()[:4]
    table.write_text(table.read_text() + "3,1.0")
    write(tmp_path, 4, 6)
    assert table.read_text().splitlines()[:4] == kept
    assert [row["iteration"] for row in rows_in(tmp_path)] == ["1", "2", "3", "4", "5", "6", "6"]
    assert not list(tmp_path.glob(".*"))


def test_a_run_that_begins_again_begins_its_table_again(tmp_path):
    """The evaluation before the first batch is removed too."""
    write(tmp_path, 1, 0)
    assert [row["iteration"] for row in rows_in(tmp_path)] == ["0"]
    write(tmp_path, 1, 2)
    assert [row["iteration"] for row in rows_in(tmp_path)] == ["1", "2", "2"]


def test_the_log_of_another_rank_says_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mlx_eagle.train.log.is_first", lambda: False)
    log = TrainingLog(tmp_path, 2, replace(SETTINGS, report_to="wandb"), 0)
    log.learnt(1, np.ones(2), 10, 0.1, **FIGURES, trained_tokens=10)
    log.evaluation(1, FOUND)
    log.close()
    assert capsys.readouterr() == ("", "") and not list(tmp_path.iterdir())


class Service:
    """A module in place of wandb's or swanlab's, which keeps what it is told."""

    def __init__(self):
        self.began: dict = {}
        self.told: list[tuple[int, dict]] = []

    def init(self, **options):
        self.began = options

    def log(self, figures: dict, step: int):
        self.told.append((step, figures))


def test_a_service_is_told_what_mlx_lm_tells_it(tmp_path, monkeypatch):
    wandb = Service()
    monkeypatch.setattr(callbacks, "wandb", wandb)
    reported = callbacks.get_reporting_callbacks("wandb", "theirs", str(tmp_path), {})
    dataset = CacheDataset(TextDataset([{"text": "abcdef"}], byte_tokenizer()))
    args = TrainingArgs(batch_size=1, iters=1, adapter_file=str(tmp_path / "a.safetensors"))
    model = tiny_llama(vocab_size=258)
    train_by_mlx_lm(model, SGD(0.0), dataset, args=args, training_callback=reported)
    ((step, theirs),) = wandb.told
    assert step == 1 and wandb.began["project"] == "theirs"
    wandb.told = []
    write(tmp_path, 3, 4, report_to="wandb", project_name="ours")
    assert wandb.began["project"] == "ours" and wandb.began["config"]["iters"] == 9
    (third, first), (fourth, second), (last, found) = wandb.told
    assert (third, fourth, last) == (3, 4, 4) and first.keys() == second.keys()
    assert theirs.keys() <= first.keys()
    assert (second["train_loss"], second["trained_tokens"]) == (8.75, 40)
    assert (second["loss_1"], second["tokens_per_second"]) == (4.5, 100.0)
    assert (found["match_2"], found["mean_acceptance_length_1"]) == (0.25, 1.5)


def test_both_services_are_told(tmp_path, monkeypatch):
    modules = {name: Service() for name in ("wandb", "swanlab")}
    for name, module in modules.items():
        monkeypatch.setattr(callbacks, name, module)
    check_services("wandb, SwanLab")
    write(tmp_path, 1, 1, report_to="wandb,swanlab")
    assert [len(module.told) for module in modules.values()] == [2, 2]


def test_services_that_are_unknown_or_missing_are_refused_first(tmp_path, monkeypatch):
    """Before anything is read, and none is opened."""
    wandb = Service()
    monkeypatch.setattr(callbacks, "wandb", wandb)
    monkeypatch.setattr(callbacks, "swanlab", None)
    where = {"model": "nowhere", "data": "nowhere", "output": str(tmp_path / "head")}
    with pytest.raises(ValueError, match="names tensorboard: give wandb or swanlab, or both"):
        train(**where, report_to="wandb,tensorboard")
    with pytest.raises(ValueError, match="swanlab takes a package: pip install swanlab"):
        train(**where, report_to="wandb,swanlab")
    assert not wandb.began and not (tmp_path / "head").exists()
