"""Drafted tokens in a terminal: marked for eyes, and left alone for programs."""

import io
import os
import re
import sys

import pytest
from helpers import byte_tokenizer, tiny_llama

from mlx_eagle import chat, stream_generate
from mlx_eagle.commands import generate
from mlx_eagle.demo import __main__ as demo
from mlx_eagle.drafters.model_drafter import ModelDrafter
from mlx_eagle.system.marks import Marker

MODEL = tiny_llama(vocab_size=258)
SMALL = tiny_llama(seed=0, vocab_size=258)
TOKENIZER = byte_tokenizer()
PAIR = (MODEL, TOKENIZER, ModelDrafter(SMALL))
CODES = re.compile(r"\x1b\[[0-9;]*m")
MARKED = re.compile(r"\x1b\[4(?:;36)?m(.*?)\x1b\[24;39m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    """A terminal with colours."""
    found = Terminal()
    for name, value in (("NO_COLOR", ""), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    return found


def test_colour_and_underline(terminal):
    mark = Marker.of(terminal)
    assert mark("Hello", is_drafted=False) == "Hello"
    assert mark(" you", is_drafted=True) == "\x1b[4;36m you\x1b[24;39m"
    assert "\x1b[4;36mcoloured and underlined\x1b[24;39m" in mark.legend


def test_no_color_leaves_the_underline(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    mark = Marker.of(terminal)
    assert mark("x", is_drafted=True) == "\x1b[4mx\x1b[24;39m"
    assert CODES.sub("", mark.legend).startswith("Drafted tokens are underlined;")


@pytest.mark.parametrize("reason", ["piped", "dumb", "unwanted"])
def test_nothing_is_marked(terminal, monkeypatch, reason):
    if reason == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    stream = io.StringIO() if reason == "piped" else terminal
    mark = Marker.of(stream, is_wanted=reason != "unwanted")
    assert mark.legend == "" and mark("x", is_drafted=True) == "x"


def test_a_letter_of_two_tokens_is_marked_if_one_was_drafted():
    mark = Marker(("4",))
    for halves, is_marked in (((True, False), True), ((False, True), True), ((False,) * 2, False)):
        first, second = halves
        assert mark("", first) == ""
        assert MARKED.findall(mark("é", second)) == (["é"] if is_marked else [])
        assert mark("x", is_drafted=False) == "x"


def test_marks_end_with_their_line():
    assert Marker(("4",))("a\n\nb", is_drafted=True).split("\n") == [
        "\x1b[4ma\x1b[24;39m", "", "\x1b[4mb\x1b[24;39m"
    ]  # fmt: skip


def said_by(module, monkeypatch, terminal, *flags: str) -> str:
    monkeypatch.setattr(module, "load_pair", lambda args, _: PAIR)
    monkeypatch.setattr(sys, "argv", ["command", "--num-draft-tokens", "3", "-m", "20", *flags])
    monkeypatch.setattr(sys, "stdout", terminal)
    module.main()
    return terminal.getvalue()


def drafted(prompt: list[int]) -> str:
    """What the Python API says was drafted, with the rest of letters that were begun so."""
    model, tokenizer, drafter = PAIR
    options = {"draft_model": drafter, "num_draft_tokens": 3}
    text, held = "", []
    for response in stream_generate(model, tokenizer, prompt, 20, **options):
        held.append(response.from_draft)
        if response.text:
            text += response.text if any(held) else ""
            held = []
    return text


def test_generate_marks_what_the_python_api_says(terminal, monkeypatch):
    flags = ("--prompt", "Once", "--ignore-chat-template", "--seed", "0")
    said = said_by(generate, monkeypatch, terminal, *flags, "--show-drafts")
    legend, _, text = said.partition("\n")[2].partition("\n")
    assert CODES.sub("", legend).startswith("Drafted tokens are")
    marked = MARKED.findall(text)
    assert "".join(marked) == drafted(TOKENIZER.encode("Once")).replace("\n", "")
    assert len(marked) > 3
    terminal.truncate(0)
    terminal.seek(0)
    plain = said_by(generate, monkeypatch, terminal, *flags)
    assert CODES.sub("", text).split("=" * 10)[0] in plain and "\x1b" not in plain


def test_chat_marks_too(terminal, monkeypatch):
    lines = iter(["Hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _="": next(lines))
    said = said_by(chat, monkeypatch, terminal, "--show-drafts")
    assert "Drafted tokens are" in CODES.sub("", said) and len(MARKED.findall(said)) > 3


def test_the_demo_marks_unasked(terminal, monkeypatch):
    monkeypatch.setattr(demo, "load_demo", lambda: PAIR)
    monkeypatch.setattr(sys, "stdout", terminal)
    demo.run("Hello", 12, 3)
    assert len(MARKED.findall(terminal.getvalue())) > 3
    assert "Drafted tokens are" in CODES.sub("", terminal.getvalue())


def test_no_color_may_be_empty(terminal):
    """As no-color.org has it: set and not empty."""
    assert os.environ["NO_COLOR"] == "" and len(Marker.of(terminal).codes) == 2
