"""The flags of ``mlx_eagle.convert``: what makes no sense costs one sentence."""

from pathlib import Path

import pytest

from mlx_eagle.convert import __main__ as convert

SENTENCES = {
    "negative base": (("--rope-theta", "-5"), "--rope-theta is -5.0: give a number from 1 to"),
    "no number": (("--rope-theta", "nan"), "--rope-theta is nan: give a number"),
    "no layers": (("--num-layers", "0"), "--num-layers is 0: give 1 or more"),
    "no vocabulary": (("--draft-vocab", "0"), "--draft-vocab is 0: give 1 or more"),
    "many layers": (("--num-layers", str(2**70)), "--num-layers is 1180591620717411303424: give"),
    "text alone": (("--draft-vocab-text", "x"), "say how many with --draft-vocab"),
}


def refused(capsys, *flags: str) -> str:
    """What the command says of these flags on standard error."""
    with pytest.raises(SystemExit) as stop:
        convert.main(["--hf-path", "no/such/head/here", *flags])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", SENTENCES)
def test_a_mistake_costs_one_sentence(capsys, name):
    flags, words = SENTENCES[name]
    err = refused(capsys, *flags)
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


@pytest.mark.parametrize("text", ["a,b,c", "2,,16", "-1,2,3", "2.5", "٢", "1" * 5000])
def test_layers_are_numbers(capsys, text):
    err = refused(capsys, f"--aux-layers={text}")
    assert "is not a list of layers: give numbers from 0 on with commas, as in 2,16,29" in err
    assert "layer_numbers" not in err and "Traceback" not in err


def test_layers_are_read():
    assert convert.layer_numbers("2, 16,29") == (2, 16, 29)


def test_a_link_to_nowhere(capsys, tmp_path: Path):
    link = tmp_path / "out"
    link.symlink_to(tmp_path / "nowhere")
    err = refused(capsys, "--mlx-path", str(link))
    assert f"--mlx-path {link} is a link to {tmp_path / 'nowhere'}, which does not exist" in err
    assert err.count("\n") == 1 and link.is_symlink() and not link.exists()


def test_ctrl_c_says_that_nothing_was_written(monkeypatch, capsys):
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "convert", interrupted)
    with pytest.raises(SystemExit) as stop:
        convert.main(["--hf-path", "x"])
    assert stop.value.code == 130
    assert capsys.readouterr().err == "\ninterrupted; nothing was written\n"
