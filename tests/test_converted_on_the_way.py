"""Heads that ``--draft-model`` converts into the cache: with the target at hand, and for good."""

import json
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
from checkpoints import CONFIG, as_midlayer, eagle3_tensors, write_safetensors
from helpers import PROMPT, plain, speculative, tiny_llama

from mlx_eagle import draft_models
from mlx_eagle.convert import convert
from mlx_eagle.drafters.kinds import load_drafter
from mlx_eagle.system.atomic_folder import CannotWrite


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(draft_models, "user_cache", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "heads"


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocab_size=128, num_hidden_layers=6)


def nvidia(tmp_path: Path) -> Path:
    """A head whose last tap is what leaves the last of the target's 6 layers."""
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}}
    return write_safetensors(tmp_path / "source", CONFIG | ids, as_midlayer(eagle3_tensors()))


def test_taps_are_settled_with_the_target_at_hand(model, tmp_path, cache):
    drafter = draft_models.open_drafter(str(nvidia(tmp_path)), model)
    assert drafter.taps == (2, 4, 6)
    tokens, _ = speculative(model, drafter, PROMPT, 12, num_draft_tokens=2)
    assert tokens == plain(model, PROMPT, 12)


def test_taps_are_settled_when_the_head_meets_its_target(model, tmp_path, capsys):
    """Converted without a target; one of 6 layers and one of 8 read the same head otherwise."""
    convert(str(nvidia(tmp_path)), str(tmp_path / "head"))
    assert "settled" in capsys.readouterr().out
    assert load_drafter(tmp_path / "head", model).taps == (2, 4, 6)
    deeper = tiny_llama(vocab_size=128, num_hidden_layers=8)
    assert load_drafter(tmp_path / "head", deeper).taps == (3, 5, 7)


def test_targets_of_other_sizes_have_folders_of_their_own(model, source, cache):
    draft_models.open_drafter(str(source), model)
    draft_models.open_drafter(str(source), tiny_llama(vocab_size=128, num_hidden_layers=8))
    draft_models.open_drafter(str(source), model)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", ["config", "weights", "no weights", "no config", "other"])
def test_an_unusable_folder_is_made_anew(model, source, cache, capsys, damage):
    draft_models.open_drafter(str(source), model)
    (folder,) = cache.iterdir()
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "config":
        config.write_text("{")
    elif damage == "other":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": 3}))
    else:
        (weights if damage == "no weights" else config).unlink()
    assert draft_models.head_lines()
    capsys.readouterr()
    drafter = draft_models.open_drafter(str(source), model)
    assert "converted again" in capsys.readouterr().err
    tokens, _ = speculative(model, drafter, PROMPT, 8, num_draft_tokens=2)
    assert tokens == plain(model, PROMPT, 8) and list(cache.iterdir()) == [folder]
    draft_models.open_drafter(str(source), model)
    assert capsys.readouterr().err == ""


OPEN = """
import sys
from helpers import tiny_llama
from mlx_eagle.draft_models import open_drafter

model = tiny_llama(vocab_size=128, num_hidden_layers=6)
print("ready", flush=True)
sys.stdin.readline()
open_drafter(sys.argv[1], model)
"""


@pytest.mark.exhaustive
def test_of_several_processes_one_converts(source, tmp_path):
    support = Path(__file__).parent / "support"
    environment = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(support)}
    command = [sys.executable, "-c", OPEN, str(source)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    run = [subprocess.Popen(command, text=True, env=environment, **pipes) for _ in range(2)]
    assert {process.stdout.readline() for process in run} == {"ready\n"}
    for process in run:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=120) for process in run]
    assert [process.returncode for process in run] == [0] * 2, said
    assert sum("is not converted yet" in out for out, _ in said) == 1
    assert len([path for path in tmp_path.rglob("*") if path.name == "model.safetensors"]) == 2


def test_a_folder_that_appears_before_the_conversion_is_used(model, source, cache, monkeypatch):
    """As on a file system without locks: the other is done while the converter is imported."""
    convert_one, sizes = draft_models._convert, draft_models.sizes_of(model)

    def after_another(*args: object) -> Path:
        monkeypatch.setattr(draft_models, "_convert", convert_one)
        convert_one(*args)
        return convert_one(*args)

    monkeypatch.setattr(draft_models, "_convert", after_another)
    folder = draft_models.converted(source, "head", None, sizes)
    assert list(cache.iterdir()) == [folder]


def test_several_at_once_use_what_the_first_has_made(model, source, cache, monkeypatch):
    """Each converts, for want of locks; one wins, and the others take its folder."""
    monkeypatch.setattr(draft_models, "locked", lambda *_: nullcontext())
    wait, converted = threading.Barrier(2, timeout=60), draft_models.converted
    sizes = draft_models.sizes_of(model)
    rename, found = os.rename, []
    monkeypatch.setattr(os, "rename", lambda *names: (wait.wait(), rename(*names)))
    run = [
        threading.Thread(target=lambda: found.append(converted(source, "head", None, sizes)))
        for _ in range(2)
    ]
    for thread in run:
        thread.start()
    for thread in run:
        thread.join(timeout=60)
    assert len(found) == 2 and found[0] == found[1]
    assert list(cache.iterdir()) == [found[0]]


def test_a_cache_that_cannot_be_written(model, source, cache, capsys):
    cache.parent.write_text("a file where the cache should be")
    drafter = draft_models.open_drafter(str(source), model)
    assert capsys.readouterr().err.count("warning: the converted head is not kept") == 1
    tokens, _ = speculative(model, drafter, PROMPT, 8, num_draft_tokens=2)
    assert tokens == plain(model, PROMPT, 8)
    with pytest.raises(CannotWrite):
        draft_models.converted(source, "head", None, draft_models.sizes_of(model))
