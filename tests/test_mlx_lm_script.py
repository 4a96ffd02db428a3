"""Somebody else's mlx-lm script, as it is, with our loop installed."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import mlx_lm
import pytest
from helpers import tiny_head
from serving import write_model, write_tokenizer

import mlx_eagle

SCRIPT = Path(__file__).parent / "data" / "mlx_lm_pipeline.py"
BEFORE = runpy.run_path(str(SCRIPT))  # its names of mlx-lm are bound before we are installed
# As a user would put install() before a script that is not theirs.
INSTALLED = "import mlx_eagle, runpy, sys; mlx_eagle.install(); sys.argv.pop(0); "
INSTALLED += "runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two tiny models of one mind, nearly, as mlx-lm loads them."""
    folder = tmp_path_factory.mktemp("models")
    for name, blur in (("target", 0.0), ("small", 0.01)):
        (folder / name).mkdir()
        write_model(folder / name, write_tokenizer(folder / name), blur)
    return folder


def run_script(folder: Path, *command: str) -> dict:
    """The texts of the whole script, in a process of its own."""
    out = folder / f"out-{len(list(folder.iterdir()))}"
    out.mkdir()
    line = [sys.executable, *command, "--model", str(folder / "target"), "--out", str(out)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    texts = json.loads((out / "texts.json").read_text())
    assert f"{texts['answer']}\n==========" in done.stdout  # verbose
    return texts


@pytest.fixture(scope="module")
def expected(folder) -> dict:
    """What it answers where nobody has heard of us."""
    texts = run_script(folder, str(SCRIPT))
    assert len(set(texts["converse"] + [texts["answer"], texts["stream"]])) == 4
    assert all(texts["converse"] + texts["answer_all"])
    return texts


@pytest.mark.exhaustive
def test_without_a_draft_model_nothing_changes(folder, expected):
    assert run_script(folder, "-c", INSTALLED, str(SCRIPT)) == expected


@pytest.mark.exhaustive
def test_an_ordinary_draft_model_is_mlx_lms(folder, expected):
    flags = (str(SCRIPT), "--draft-model", str(folder / "small"))
    assert run_script(folder, "-c", INSTALLED, *flags) == run_script(folder, *flags)


@pytest.mark.parametrize("imported", ["before", "after"])
@pytest.mark.exhaustive
def test_one_of_our_drafters_runs_our_loop(folder, expected, imported, tmp_path, capsys):
    model, tokenizer = mlx_lm.load(str(folder / "target"))
    drafters = {
        "head": tiny_head(model),
        "model": mlx_eagle.open_drafter(str(folder / "small"), model, tokenizer),
        "lookup": mlx_eagle.open_drafter("lookup", model),
    }
    with mlx_eagle.installed() as installation:
        script = BEFORE if imported == "before" else runpy.run_path(str(SCRIPT))
        for name, drafter in drafters.items():
            for part in ("answer", "stream", "converse"):
                installation.stats = None
                file = [tmp_path / f"{name}.safetensors"] if part == "converse" else []
                found = script[part](model, tokenizer, *file, draft_model=drafter)
                assert found == expected[part], (name, part)
                stats = installation.stats
                assert stats.num_target_forwards > 0
                if name != "lookup":  # which may have found nothing to copy
                    assert stats.num_drafted > 0
                if name == "model":
                    assert stats.num_accepted > 0 and stats.tau > 1
        assert script["answer_all"](model, tokenizer) == expected["answer_all"]
    capsys.readouterr()
