"""Progress bars: on a terminal where people wait, nowhere else, and gone when it is over."""

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import mlx.core as mx
import pytest
from checkpoints import CONFIG, as_midlayer, eagle3_tensors, write_safetensors
from grids import thorough
from helpers import PROMPT, byte_tokenizer, tiny_head, tiny_llama
from hub import running_hub, use_hub
from mlx_lm.generate import generate_step

import mlx_eagle
from mlx_eagle import chat
from mlx_eagle import draft_models as drafters
from mlx_eagle.commands import flags
from mlx_eagle.commands import generate as cli
from mlx_eagle.convert import convert
from mlx_eagle.convert.__main__ import main as convert_main
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.system import progress
from mlx_eagle.system.hub import fetch
from mlx_eagle.system.progress import Bar, prompt_bar, told_if_long

READING, CONVERTING = "Reading the prompt", "Converting"
MODEL = tiny_llama(vocab_size=258)
DRAFTER = tiny_head(MODEL)


class Terminal(io.StringIO):
    """Keeps everything that was ever drawn."""

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> str:
        """What stands in the line in the end: ``\\r`` begins it again."""
        line = ""
        for part in self.getvalue().split("\r"):
            line = part + line[len(part) :]
        return line.strip()


@contextmanager
def on_a_terminal() -> Iterator[Terminal]:
    with redirect_stderr(Terminal()) as terminal:
        yield terminal


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """An unconverted head; what is remembered of it is kept beside it."""
    monkeypatch.setattr(drafters, "user_cache", lambda: tmp_path / "cache")
    return write_safetensors(tmp_path / "source", CONFIG, as_midlayer(eagle3_tensors()))


# --- the bar --------------------------------------------------------------------------------


def test_a_bar_goes_on_and_is_gone():
    with on_a_terminal() as terminal:
        bar = Bar("Counting", "sheep")
        for done in range(4):
            bar(done, 3)
        drawn = terminal.getvalue()
        assert "Counting:   0%" in drawn and "0/3" in drawn and terminal.shown == ""
        bar(3, 3)
        assert terminal.getvalue() == drawn


def test_a_bar_that_is_left_early_is_gone_too():
    with on_a_terminal() as terminal:
        with pytest.raises(KeyError), Bar("Counting", "sheep") as bar:
            bar(0, 3)
            assert "0/3" in terminal.shown
            raise KeyError
        assert terminal.shown == ""


def test_small_totals_have_no_bar():
    with on_a_terminal() as terminal:
        Bar("Counting", "sheep", above=3)(0, 3)
        assert terminal.getvalue() == ""
        Bar("Counting", "sheep", above=3)(0, 4)
        assert "0/4" in terminal.getvalue()


@pytest.mark.parametrize("num_draft_tokens", [0, 2, "auto"])
def test_a_prompt_is_reported_as_mlx_lm_does(num_draft_tokens, monkeypatch, tmp_path):
    model = tiny_llama()
    ours, theirs = [], []
    options = {"max_tokens": 4, "prefill_step_size": 3}
    for _ in speculative_generate_step(
        mx.array(PROMPT),
        model,
        tiny_head(model),
        num_draft_tokens=num_draft_tokens,
        prompt_progress_callback=lambda *args: ours.append(args),
        **options,
    ):
        assert ours[-1] == (len(PROMPT), len(PROMPT))
    steps = generate_step(
        mx.array(PROMPT),
        model,
        prompt_progress_callback=lambda *args: theirs.append(args),
        **options,
    )
    assert list(steps) and ours == theirs


def test_a_prompts_bar_ends_before_the_first_round():
    """The last token is reported with the first round: with "auto", much later."""
    with on_a_terminal() as terminal:
        progress = prompt_bar(step_size=2)
        for done in (0, 2, 4, 5, 6):
            progress(done, 6)
            assert ("/5" in terminal.shown) == (done < 5)
        progress(0, 3)
        assert "/2" not in terminal.getvalue()


def test_without_a_terminal_there_is_nothing():
    with redirect_stderr(io.StringIO()) as file, Bar("Counting", "sheep") as bar:
        for done in range(4):
            bar(done, 3)
    assert file.getvalue() == ""


# --- who reports ----------------------------------------------------------------------------


def test_conversion_counts_its_tensors(checkpoint, tmp_path):
    seen = []
    convert(str(checkpoint), str(tmp_path / "out"), progress=lambda *args: seen.append(args))
    total = len(eagle3_tensors()) - 1  # t2d says what d2t says
    assert seen == [(done, total) for done in range(total + 1)]


# --- the commands, and the library ----------------------------------------------------------


@pytest.fixture
def generate(monkeypatch, checkpoint):
    """``mlx_eagle.generate`` or ``mlx_eagle.chat`` with some flags on a prompt of 20 letters."""
    pairs = {True: (MODEL, byte_tokenizer(), None), False: (MODEL, byte_tokenizer(), DRAFTER)}

    def command(module, *flags: str) -> None:
        load_pair = lambda *_: pairs["--model" in flags]  # noqa: E731
        monkeypatch.setattr(module, "load_pair", load_pair)
        prompt = [] if module is chat else ["--prompt", "a" * 20, "--ignore-chat-template"]
        monkeypatch.setattr(sys, "argv", ["command", "-m", "4", *prompt, *flags])
        monkeypatch.setattr(sys, "stdin", io.StringIO("a" * 20 + "\nq\n"))
        module.main()

    return command


STEP = ("--prefill-step-size", "8")
LENGTH = "--num-draft-tokens"
FLAGS = {
    "short": ((LENGTH, "3"), set()),
    "long": ((*STEP, LENGTH, "3"), {READING}),
    "long, undrafted": ((*STEP, LENGTH, "0"), {READING}),
    "long, without a drafter": ((*STEP, "--model", "some", LENGTH, "0"), {READING}),
    "auto": ((LENGTH, "auto"), set()),
    "short, by default": ((), set()),
    "long, by default": (STEP, {READING}),
}


@pytest.mark.parametrize("module", [cli, chat], ids=["generate", "chat"])
@pytest.mark.parametrize("name", thorough(FLAGS, "long", "long, without a drafter", "auto"))
def test_generation_on_a_terminal(generate, module, name, capsys):
    flags, expected = FLAGS[name]
    with on_a_terminal() as terminal:
        generate(module, *flags)
    drawn = terminal.getvalue()
    assert (READING in drawn) == (READING in expected)
    assert terminal.shown == "" and bool(drawn) == bool(expected)
    assert READING not in capsys.readouterr().out


@pytest.mark.parametrize("module", [cli, chat], ids=["generate", "chat"])
@pytest.mark.parametrize("name", thorough(FLAGS, "long, by default"))
def test_generation_without_a_terminal(generate, capsys, module, name):
    generate(module, *FLAGS[name][0])
    assert capsys.readouterr().err == ""


def test_conversion_on_a_terminal_and_without(checkpoint, tmp_path, monkeypatch, capsys):
    flags = ["--hf-path", str(checkpoint), "--mlx-path"]
    convert_main([*flags, str(tmp_path / "a")])
    drafters.open_drafter(
        str(checkpoint), tiny_llama(vocab_size=128, num_hidden_layers=6), quantize_bits=8
    )
    assert capsys.readouterr().err == ""
    for run in (
        lambda: convert_main([*flags, str(tmp_path / "b")]),
        lambda: drafters.open_drafter(
            str(checkpoint), tiny_llama(vocab_size=128, num_hidden_layers=6)
        ),
    ):
        with on_a_terminal() as terminal:
            run()
        assert CONVERTING in terminal.getvalue() and terminal.shown == ""


def test_a_mistake_found_on_the_way_stands_alone(checkpoint, tmp_path, monkeypatch):
    def pack(*_):
        raise ValueError("the fourth wall is missing")

    monkeypatch.setattr("mlx_eagle.convert.pipeline.pack", pack)
    flags = ["--hf-path", str(checkpoint), "--mlx-path", str(tmp_path / "out")]
    with on_a_terminal() as terminal, pytest.raises(SystemExit):
        convert_main(flags)
    assert CONVERTING in terminal.getvalue()
    assert terminal.shown == "error: the fourth wall is missing"


def test_the_library_draws_nothing(checkpoint, tmp_path):
    options = {"max_tokens": 4, "draft_model": DRAFTER, "num_draft_tokens": "auto"}
    with on_a_terminal() as terminal:
        mlx_eagle.generate(MODEL, byte_tokenizer(), PROMPT, prefill_step_size=2, **options)
        convert(str(checkpoint), str(tmp_path / "out"))
    assert terminal.getvalue() == ""


def test_downloads_have_the_hubs_own_bars(tmp_path, monkeypatch):
    with running_hub(tmp_path / "hub") as hub, on_a_terminal() as terminal:
        write_safetensors(hub.root / "some" / "head", CONFIG, eagle3_tensors())
        use_hub(monkeypatch, hub.address, tmp_path)
        fetch("some/head", ["*.json", "*.safetensors"])
    assert "Fetching" in terminal.getvalue()


def test_only_long_silence_is_explained(monkeypatch, capsys):
    """On standard error, once; nothing where it was over before."""
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    with told_if_long("Loading a."):
        time.sleep(0.5)
    monkeypatch.setattr(progress, "PATIENCE", 0.5)
    with told_if_long("Loading b."):
        pass
    time.sleep(0.6)
    assert capsys.readouterr() == ("", "Loading a.\n")


def test_loading_is_explained(monkeypatch, capsys):
    """The target's by the name that was given, and the draft model's."""
    monkeypatch.setattr(progress, "PATIENCE", 0.01)

    def slow(*args, **options):
        time.sleep(0.1)
        return (MODEL, byte_tokenizer()) if args[0] == "a/target" else (None, DRAFTER)

    monkeypatch.setattr(flags, "load", slow)
    monkeypatch.setattr(flags, "open_beside", slow)
    args = cli.build_parser().parse_args(["--model", "a/target", "--draft-model", "lookup"])
    assert flags.load_pair(args, {})[2] is DRAFTER
    said = capsys.readouterr().err.splitlines()
    expected = ["Loading a/target.", "Opening the draft model."]
    assert [sentence for sentence in said if sentence in expected] == expected
