"""The page of a run: the lines are those of its table."""

import csv
import re
from xml.etree import ElementTree

import numpy as np
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


def test_the_command_draws_what_was_learnt(tmp_path, capsys):
    """Every value of the table is a point of its line, at its height, without matplotlib."""
    target = write_target(tmp_path / "target")
    data = write_data(tmp_path / "data", train=chats(4), valid=chats(2, first=4))
    flags = f"--model {target} --data {data} --output {tmp_path / 'head'} --iters 4 --batch-size 2"
    flags += " --ttt-steps 2 --draft-vocab-size 64 --steps-per-report 1 --steps-per-eval 2"
    flags += " --test-prompts 0"
    command.main(flags.split())
    page = tmp_path / "head" / "training.html"
    assert f"Its curves are in {page}." in capsys.readouterr().out
    text = page.read_text()
    charts = [ElementTree.fromstring(found) for found in re.findall("<svg.*?</svg>", text)]
    assert len(charts) == 3 and "after 4 batches" in text
    assert "src=" not in text and str(tmp_path) not in text
    with (tmp_path / "head" / "training.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [(int(row["iteration"]), float(row["loss"])) for row in rows if row["loss"]]
    assert [batch for batch, _ in losses] == [1, 2, 3, 4]
    assert_points(charts[0], "all", losses)
    name = "mean_acceptance_length_2"
    lengths = [(int(row["iteration"]), float(row[name])) for row in rows if row["match_1"]]
    assert [batch for batch, _ in lengths] == [0, 2, 4]
    assert_points(charts[2], "k = 2", lengths)
    assert not list((tmp_path / "head").glob(".*"))


def assert_points(chart: ElementTree.Element, words: str, expected: list) -> None:
    """A chart's points of one line, read back by the ticks of its axes."""
    svg = "{http://www.w3.org/2000/svg}"
    ticks = {
        kind: [x for x in chart.iter(f"{svg}text") if x.get("class") == kind] for kind in "xy"
    }
    scales = []
    for kind, axis in (("x", "x"), ("y", "y")):
        marks = [mark for mark in ticks[kind] if mark.text[0].isdigit()]
        numbers = [(float(mark.get(axis)), float(mark.text)) for mark in marks]
        (a, low), (b, high) = numbers[0], numbers[-1]
        offset = a if kind == "x" else a - 4  # names of heights stand a little below their line
        scales.append(lambda at, o=offset, low=low, s=(high - low) / (b - a): low + (at - o) * s)
    points = [x for x in chart.iter(f"{svg}circle") if x[0].text.startswith(f"{words}, batch")]
    found = [(scales[0](float(x.get("cx"))), scales[1](float(x.get("cy")))) for x in points]
    assert np.allclose(found, expected, atol=0.02)
    (line,) = [x for x in chart.iter(f"{svg}polyline") if x.get("stroke") == points[0].get("fill")]
    corners = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    assert corners == [(float(x.get("cx")), float(x.get("cy"))) for x in points]


def test_what_cannot_be_drawn(tmp_path):
    with pytest.raises(ValueError, match=r"has no training.csv: name the --output"):
        log.write_page(tmp_path)
    write_table(tmp_path, [{"iteration": 1, "loss": 2.0, "loss_1": 2.0}])
    text = log.write_page(tmp_path).read_text()
    assert "Nothing was held out" in text and text.count("<svg") == 1
    for loss in ("nan", "inf", "0", "1e30", "-3"):
        write_table(tmp_path, [{"iteration": 0, "loss": loss, "loss_1": 2.0}])
        assert "<svg" in log.write_page(tmp_path).read_text()
    write_table(tmp_path, [{"iteration": 1, "loss": "x", "loss_1": 2.0}])
    with pytest.raises(ValueError, match=r"training.csv cannot be read"):
        log.write_page(tmp_path)


@pytest.mark.parametrize(
    ("span", "ticks"),
    [((0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]), ((0, 4), [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4])],
)
def test_ticks_are_round(span, ticks):
    assert log._ticks(*span) == ticks
