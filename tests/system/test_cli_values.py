"""Mistakes on the command line: one sentence each, with what was probably meant."""

import pytest

from mlx_eagle import chat
from mlx_eagle.bench import flags as bench
from mlx_eagle.commands import generate
from mlx_eagle.convert import __main__ as convert
from mlx_eagle.doctor import __main__ as doctor
from mlx_eagle.server import flags as server
from mlx_eagle.train import __main__ as train

PARSERS = {
    "generate": generate.build_parser,
    "chat": chat.build_parser,
    "server": server.build_parser,
    "convert": convert.make_parser,
    "bench": bench.build_parser,
    "train": train.make_parser,
    "doctor": doctor.build_parser,
}


def said(capsys, name: str, *flags: str) -> str:
    """What a command says of these flags, which is one sentence and its end."""
    with pytest.raises(SystemExit) as stop:
        PARSERS[name]().parse_args(list(flags))
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    sentence, found, end = err.removeprefix("error: ").partition(" More: ")
    assert found and end == f"{PARSERS[name]().prog} --help\n"
    assert sentence[-1] in ".?" and sentence[-2] not in ".?"
    return sentence.removesuffix(".")


@pytest.mark.parametrize("name", PARSERS)
def test_a_flag_that_there_is_not(capsys, name):
    found = said(capsys, name, "--nothing-like-it-xyz")
    assert found == "there is no flag --nothing-like-it-xyz"


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--promt Hello", "there is no flag --promt: did you mean --prompt?"),
        ("--draft_model=x", "there is no flag --draft_model: did you mean --draft-model?"),
        (
            "--prompt Why is the sky --temp 0",
            "'is' belongs to no flag: quote the prompt, --prompt 'Why is the sky'",
        ),
        ("-p Why now", "'now' belongs to no flag: quote the prompt, -p 'Why now'"),
        (
            "--system-prompt Be brief",
            "'brief' belongs to no flag: quote a value of several words, "
            "--system-prompt 'Be brief'",
        ),
        ("Hello", "'Hello' belongs to no flag"),
        ("--temp warm", "--temp: 'warm' is not a number"),
        ("--temp", "--temp: expected one argument"),
        (
            "--num-draft-tokens many",
            "--num-draft-tokens: 'many' is neither a whole number nor auto",
        ),
        (
            "--num-draft-tokens atuo",
            "--num-draft-tokens: 'atuo' is neither a whole number nor auto: did you mean auto?",
        ),
        ("--dtype flaot32", "--dtype: there is no 'flaot32': did you mean float32?"),
        ("--acceptance x", "--acceptance: there is no 'x': give match, coupled or reject"),
    ],
)
def test_what_was_meant(capsys, flags, sentence):
    assert said(capsys, "generate", *flags.split()) == sentence


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_help_is_in_groups(name):
    """Every flag is in one, but for help and version; the longest is read at a glance."""
    groups = PARSERS[name]()._action_groups
    shown = [{action.dest for action in group._group_actions} for group in groups]
    assert shown[1] == {"help", "version"} and len(shown) > 5
    assert all(0 < len(dests) <= 12 for dests in shown[1:])
    assert sum(map(len, shown)) == len(PARSERS[name]()._actions)


def test_what_is_right_is_read(capsys):
    args = PARSERS["generate"]().parse_args(["--prompt", "Why is the sky", "--draft-m", "x"])
    assert (args.prompt, args.draft_model) == ("Why is the sky", "x")
