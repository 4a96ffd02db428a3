"""Curves of a run: the lines of the picture are the columns of its table."""

import csv
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from training import chats, write_data, write_target

from mlx_eagle.train import curves, draw_curves
from mlx_eagle.train.__main__ import main

FLAGS = (
    "--iters 4 --batch-size 2 --ttt-steps 2 --draft-vocab-size 64 --steps-per-report 1 "
    "--steps-per-eval 2 --test-prompts 0"
)


def write_table(folder: Path, text: str) -> None:
    """Write ``training.csv`` from words: commas between columns, blanks between rows."""
    (folder / "training.csv").write_text("\n".join(text.split()) + "\n")


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """Every figure that is drawn; its file stays empty, which saves seconds."""
    figures: list[Figure] = []

    def savefig(figure: Figure, path: Path, **options) -> None:
        figures.append(figure)
        path.touch()

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def lines_in(figure: Figure) -> list[dict[str, list[tuple[float, float]]]]:
    """Read the points of every line of every chart, by the names in the legends."""
    return [
        {line.get_label(): list(map(tuple, line.get_xydata().tolist())) for line in axes.lines}
        for axes in figure.axes
    ]


def command(folder: Path) -> list[str]:
    """Write a target and data into ``folder``; return the flags of a run on them."""
    target = write_target(folder / "target")
    data = write_data(folder / "data", train=chats(4), valid=chats(2, first=4))
    output = folder / "head"
    return ["--model", str(target), "--data", str(data), "--output", str(output), *FLAGS.split()]


def test_lines_are_the_columns_that_have_values():
    rows = [
        {"iteration": "0", "loss": "", "loss_1": "", "match_1": "0.5", "loss_rate": "7"},
        {"iteration": "5", "loss": "2", "loss_1": "1.5", "match_1": "", "loss_rate": ""},
        {"iteration": "9", "loss": "1", "loss_1": "0.5", "match_1": "", "loss_rate": ""},
    ]
    assert curves.lines_of(rows, "loss") == {
        "all": ([5, 9], [2, 1]),
        "k = 1": ([5, 9], [1.5, 0.5]),
    }
    assert curves.lines_of(rows, "match") == {"k = 1": ([0], [0.5])}
    assert curves.lines_of([], "loss") == {}


def test_the_picture_has_a_line_for_each_column(tmp_path, drawn):
    write_table(
        tmp_path,
        "iteration,loss,loss_1,loss_2,match_1,match_2,mean_acceptance_length_1 "
        "0,,,,0.1,0.05,1.1 10,7.5,4,3.5,,, 20,5.5,3,2.5,0.3,0.2,1.3",
    )
    picture = draw_curves(str(tmp_path))
    assert picture == tmp_path / "training.png" and picture.is_file()
    (figure,) = drawn
    assert lines_in(figure) == [
        {
            "all": [(10, 7.5), (20, 5.5)],
            "k = 1": [(10, 4), (20, 3)],
            "k = 2": [(10, 3.5), (20, 2.5)],
        },
        {"k = 1": [(0, 0.1), (20, 0.3)], "k = 2": [(0, 0.05), (20, 0.2)]},
        {"k = 1": [(0, 1.1), (20, 1.3)]},
    ]
    words = [axes.get_title().split()[0] for axes in figure.axes]
    assert words == ["Loss:", "Acceptance", "Mean"]
    for axes in figure.axes:
        shades = [line.get_color() for line in axes.lines]
        assert len(set(shades)) == len(shades)


def test_the_command_draws_what_it_learnt(tmp_path, drawn, capsys):
    main(command(tmp_path))
    assert f"Its curves are in {tmp_path / 'head' / 'training.png'}." in capsys.readouterr().out
    with (tmp_path / "head" / "training.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    losses, _, lengths = lines_in(drawn[0])
    found = [(int(row["iteration"]), float(row["loss"])) for row in rows if row["loss"]]
    assert losses["all"] == found and [batch for batch, _ in found] == [1, 2, 3, 4]
    name = "mean_acceptance_length_2"
    found = [(int(row["iteration"]), float(row[name])) for row in rows if row["match_1"]]
    assert lengths["k = 2"] == found and [batch for batch, _ in found] == [0, 2, 4]


def test_without_matplotlib_a_run_keeps_its_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    main(command(tmp_path))
    table = tmp_path / "head" / "training.csv"
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == (
        f"Its figures are in {table}; curves of them need matplotlib: "
        "pip install 'mlx-eagle[plots]'."
    )
    assert len(table.read_text().splitlines()) == 1 + 4 + 3  # header, reports, evaluations
    with pytest.raises(ValueError, match=r"^curves of them need matplotlib: pip install"):
        draw_curves(tmp_path / "head")
    assert not (tmp_path / "head" / "training.png").exists()


def test_a_table_without_figures_is_drawn_too(tmp_path, drawn):
    """A run that was stopped before its first report leaves one."""
    write_table(tmp_path, "iteration,loss,match_1")
    draw_curves(tmp_path)
    assert lines_in(drawn[0]) == [{}, {}, {}]
    assert all(axes.get_title().endswith(": no figures") for axes in drawn[0].axes)


def test_any_number_is_drawn(tmp_path):
    write_table(tmp_path, "iteration,loss,match_1 0,nan,nan 1,inf,0.5 2,0,1e30 3,-3,1")
    pixels = imread(draw_curves(tmp_path))
    assert pixels.shape[:2] == (11 * 144, 8 * 144) and pixels.std() > 0
    assert not list(tmp_path.glob(".*"))


def test_tables_that_cannot_be_drawn(tmp_path):
    with pytest.raises(ValueError, match=r"has no training.csv: name the --output"):
        draw_curves(tmp_path)
    write_table(tmp_path, "iteration,loss 1,x")
    with pytest.raises(ValueError, match=r"training.csv cannot be read"):
        draw_curves(tmp_path)
