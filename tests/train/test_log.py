"""Table of a run: it has the rows that were reported, and none twice after a resume."""

import csv
from pathlib import Path

import numpy as np

from mlx_eagle.train.evaluation import Evaluation
from mlx_eagle.train.log import TrainingLog, duration
from mlx_eagle.train.settings import TrainSettings

FOUND = Evaluation(match=(0.5, 0.25), lengths=(1.5, 1.75), num_slots=8, num_sequences=2)

SETTINGS = TrainSettings("", "", "", iters=9, steps_per_report=1)
FIGURES = {"learning_rate": 1e-3, "grad_norm": 2.0}


def write(folder: Path, first: int, last: int) -> None:
    """Report batches ``first`` to ``last``, like a run that resumes after the batch before."""
    log = TrainingLog(folder, 2, SETTINGS, first - 1)
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
    log = TrainingLog(tmp_path, 2, SETTINGS, 0)
    log.learnt(1, np.ones(2), 10, 0.1, **FIGURES, trained_tokens=10)
    log.evaluation(1, FOUND)
    log.close()
    assert capsys.readouterr() == ("", "") and not list(tmp_path.iterdir())


def test_durations_are_for_people():
    found = [duration(seconds) for seconds in (75, 150, 3599, 7500)]
    assert found == ["75 s", "2 min", "1 h 0 min", "2 h 5 min"]
