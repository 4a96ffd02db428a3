"""``mlx_eagle.with``: programs that know nothing of us draft, and write what they write alone."""

import importlib
import runpy
import sys

import mlx_lm
import pytest
from serving import write_pair

from mlx_eagle import installation
from mlx_eagle.programs import __main__ as command

PROGRAM = """
import sys
from mlx_lm import batch_generate, load
from mlx_lm.generate import stream_generate
assert __name__ == "__main__"
model, tokenizer = load(sys.argv[1])
texts = [r.text for r in stream_generate(model, tokenizer, "Once upon", max_tokens=30)]
prompts = [tokenizer.encode(text) for text in ("ab", "cde")]
batch = batch_generate(model, tokenizer, prompts, max_tokens=9)
print("".join(texts), *batch.texts, *sys.argv[2:], sep="|")
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def program(tmp_path, monkeypatch) -> str:
    (tmp_path / "a_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    return "a_program"


@pytest.fixture
def counts(monkeypatch) -> list:
    """What was drafted, by the time the loop was taken out again."""
    seen = []
    leave = installation.uninstall

    def watch() -> None:
        seen.append(installation.install().stats)
        leave()

    monkeypatch.setattr(installation, "uninstall", watch)
    return seen


def test_a_program_drafts_and_writes_the_same(pair, program, counts, capsys, monkeypatch):
    before = mlx_lm.stream_generate
    sys.argv = [program, pair["target"], "--flag"]
    runpy.run_module(program, run_name="__main__")
    plain = capsys.readouterr().out
    words = ["--draft-model", pair["model"], "-m", program, pair["target"], "--flag"]
    command.main(words)
    assert capsys.readouterr().out == plain and plain.endswith("|--flag\n")
    assert counts[0].num_emitted > 0  # of the batch, which came last
    assert mlx_lm.stream_generate is before


def test_a_command_of_mlx_lm_drafts(pair, counts, capsys, monkeypatch):
    """Though it was imported before, and has the functions that are replaced itself."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    words = [
        "mlx_lm.generate",
        "--model",
        pair["target"],
        "--prompt",
        "Once",
        "--max-tokens",
        "20",
    ]
    sys.argv = words
    importlib.import_module("mlx_lm.generate").main()
    plain = capsys.readouterr().out.split("==========")[1]
    command.main(["--draft-model", pair["model"], "-m", *words])
    assert capsys.readouterr().out.split("==========")[1] == plain
    assert counts[0].num_drafted > 0


@pytest.mark.parametrize("words, sentence", [
    ([], "no program is named"), (["-m"], "no program is named"),
    (["-m", "no_such.module"], "there is no module no_such.module"),
    (["--draft-model", "./nowhere", "-m", "mlx_lm.generate"], "nowhere"),
])  # fmt: skip
def test_mistakes_are_said(words, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(words)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and sentence in error and error.count("\n") == 1


def test_an_error_of_the_program_is_its_own(tmp_path, monkeypatch):
    (tmp_path / "fails_here.py").write_text("raise ValueError('its own')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    with pytest.raises(ValueError, match="its own"):
        command.main(["--draft-model", "lookup", "-m", "fails_here"])
