"""The page of a run: the lines are those of its table."""

import csv

import matplotlib
import pytest
from training import chats, write_data, write_target

from mlx_eagle.train import __main__ as command
from mlx_eagle.train import log


def write_table(folder, rows):
    with (folder / log.CSV).open("w", newline="") as file:
        writer = csv.DictWriter(file, ["iteration", "loss", *(k for k in rows[-1] if "_" in k)])
        writer.writeheader()
        writer.writerows(rows)


def test_lines_are_the_columns_that_have_values():
    rows = [
        {"iteration": "0", "loss": "", "loss_1": "", "match_1": "0.5", "loss_rate": "7"},
        {"iteration": "5", "loss": "2", "loss_1": "1.5", "match_1": "", "loss_rate": ""},
        {"iteration": "9", "loss": "1", "loss_1": "0.5", "match_1": "", "loss_rate": ""},
    ]
    assert log.lines_of(rows, "loss") == {"loss": ([5, 9], [2, 1]), "1": ([5, 9], [1.5, 0.5])}
    assert log.lines_of(rows, "match") == {"1": ([0], [0.5])}
    assert log.lines_of([], "loss") == {}


def test_the_command_draws_what_was_learnt(tmp_path, capsys, monkeypatch):
    target = write_target(tmp_path / "target")
    data = write_data(tmp_path / "data", train=chats(4), valid=chats(2, first=4))
    flags = f"--model {target} --data {data} --output {tmp_path / 'head'} --iters 4 --batch-size 2"
    flags += " --ttt-steps 2 --draft-vocab-size 64 --steps-per-report 1 --steps-per-eval 2"
    flags += " --test-prompts 0"
    drawn = {}
    monkeypatch.setattr(
        log,
        "_draw",
        lambda name, lines, path, draw=log._draw: (
            drawn.update({name: lines}),
            draw(name, lines, path),
        )[1],
    )
    command.main(flags.split())
    page = tmp_path / "head" / "training.html"
    assert f"Its curves are in {page}." in capsys.readouterr().out
    text = page.read_text()
    assert text.count("data:image/svg+xml;base64,") == 3 and "after 4 batches" in text
    assert 'src="http' not in text and str(tmp_path) not in text
    with (tmp_path / "head" / "training.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["loss"]) for row in rows if row["loss"]]
    assert drawn["loss"]["loss"] == ([1, 2, 3, 4], losses) and len(losses) == 4
    lengths = [float(row["mean_acceptance_length_2"]) for row in rows if row["match_1"]]
    assert drawn["length"]["2"] == ([0, 2, 4], lengths)
    assert not list((tmp_path / "head").glob(".*"))


def test_without_matplotlib_or_a_table(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"has no training.csv: name the --output"):
        log.write_page(tmp_path)
    write_table(tmp_path, [{"iteration": 1, "loss": 2.0, "loss_1": 2.0}])
    before = dict(matplotlib.rcParams)
    text = log.write_page(tmp_path).read_text()
    assert "Nothing was held out" in text and text.count("<img") == 1
    assert dict(matplotlib.rcParams) == before
    monkeypatch.setattr(log, "has_matplotlib", lambda: False)
    with pytest.raises(ValueError, match=r"training.html needs matplotlib: pip install"):
        log.write_page(tmp_path)
