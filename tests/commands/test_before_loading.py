"""Mistakes in names and files are told before a target is loaded, which may take minutes."""

import sys
from pathlib import Path

import pytest
from helpers import byte_tokenizer, tiny_llama
from mlx_lm.utils import save_model

from mlx_eagle import structured
from mlx_eagle.bench import __main__ as bench
from mlx_eagle.commands import flags
from mlx_eagle.commands import generate as program
from mlx_eagle.train import __main__ as training
from mlx_eagle.train import trainer


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_model(folder, tiny_llama(vocab_size=258))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def sentence(monkeypatch, capsys, tmp_path):
    """The sentence in which a command refuses its flags, without having loaded anything."""

    def load(*args, **options):
        raise AssertionError("loaded")

    for module, name in (
        (bench, "load"), (bench, "load_demo"), (bench, "ServerMeasurement"), (flags, "load"),
        (flags, "load_demo"), (trainer, "load_target"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, load)
    monkeypatch.chdir(tmp_path)

    def run(main, *given: str) -> str:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, given)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        (line,) = [s for s in capsys.readouterr().err.splitlines() if s.startswith("error: ")]
        return line

    return run


@pytest.mark.parametrize("more", [(), ("--serve", "1")], ids=["here", "served"])
def test_bench_finds_its_draft_models_first(sentence, target, more):
    said = sentence(bench.main, "--model", target, "--draft-model", "./nope", *more)
    assert "./nope" in said


def test_bench_finds_what_it_compares_with_first(sentence, target):
    given = ("--model", target, "--draft-model", "lookup", "--compare", "mlx-lm-draft", "./nope")
    assert "./nope is neither a folder here" in sentence(bench.main, *given)


def test_train_looks_for_its_data_and_its_head_first(sentence, target, tmp_path):
    given = ("--model", target, "--output", "head")
    assert "nope is no folder here" in sentence(training.main, *given, "--data", "nope")
    (tmp_path / "data").mkdir()
    assert "has no train.jsonl" in sentence(training.main, *given, "--data", "data")
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "a"}\n')
    given += ("--data", "data")
    assert "./nope is neither a folder here" in sentence(training.main, *given, "--init", "./nope")
    assert not (tmp_path / "head").exists()


def test_train_says_what_it_cannot_read_or_write(sentence, target):
    said = sentence(training.main, "-c", "nope.yaml")
    assert said.startswith("error: --config nope.yaml cannot be read (No such file")
    said = sentence(training.main, "--model", target, "--data", "a", "--output", "/proc/x")
    assert said.startswith("error: /proc/x cannot be written: name a folder")


@pytest.mark.parametrize("flags", [("--regex", "a+"), ("--json-schema", __file__)])
def test_generate_knows_first_that_llguidance_is_missing(sentence, monkeypatch, target, flags):
    monkeypatch.setattr(structured, "LLMatcher", None)
    said = sentence(program.main, "--model", target, *flags)
    assert "pip install 'mlx-eagle[structured]'" in said
