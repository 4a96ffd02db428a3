"""What ``--draft-model`` may name: local folders and hub ids, converted or not, and models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from architectures import ARCHITECTURES, build
from checkpoints import CONFIG, as_midlayer, eagle1_tensors, eagle3_tensors, write_safetensors
from helpers import PROMPT, byte_tokenizer, plain, speculative, tiny_llama
from hub import Hub, hub_settings, running_hub, use_hub
from mlx_lm.utils import save_model

import mlx_eagle
from mlx_eagle.commands import generate
from mlx_eagle.convert import convert
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.draft_models import find_drafter, open_beside
from mlx_eagle.drafters.eagle3 import Eagle3Drafter
from mlx_eagle.drafters.lookup import LookupDrafter

ON_THE_HUB = """
import sys
sys.path.insert(0, {tests!r})
from helpers import PROMPT, plain, speculative, tiny_llama
import mlx_eagle

model = tiny_llama(vocab_size=128, num_hidden_layers=6)
drafter = {opener}("some/head", model)
tokens, stats = speculative(model, drafter, PROMPT, 12, num_draft_tokens=2)
assert tokens == plain(model, PROMPT, 12)
assert stats.num_drafted > 0
print("fine")
"""


@pytest.fixture
def hub(tmp_path):
    with running_hub(tmp_path / "hub") as server:
        yield server


def run_with_hub(hub: Hub, home, opener: str) -> subprocess.CompletedProcess:
    code = ON_THE_HUB.format(tests=str(Path(__file__).parent / "support"), opener=opener)
    settings = {**os.environ, **hub_settings(hub.address, home)}
    return subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True
    )


@pytest.mark.exhaustive
def test_an_unconverted_head_of_the_hub_is_converted_aloud(hub, tmp_path):
    write_safetensors(hub.root / "some" / "head", CONFIG, as_midlayer(eagle3_tensors()))
    done = run_with_hub(hub, tmp_path, "mlx_eagle.open_drafter")
    assert done.returncode == 0, done.stderr
    assert "some/head is not converted yet" in done.stdout and "family" in done.stdout
    again = run_with_hub(hub, tmp_path, "mlx_eagle.open_drafter")
    assert again.stdout == "fine\n"


@pytest.mark.parametrize("opener", [mlx_eagle.open_drafter, mlx_eagle.load_drafter])
def test_a_converted_head_of_the_hub(hub, tmp_path, monkeypatch, opener):
    source = write_safetensors(tmp_path / "source", CONFIG, as_midlayer(eagle3_tensors()))
    convert(str(source), str(hub.root / "some" / "head"))
    use_hub(monkeypatch, hub.address, tmp_path)
    model = tiny_llama(vocab_size=128, num_hidden_layers=6)
    drafter = opener("some/head", model)
    tokens, stats = speculative(model, drafter, PROMPT, 12, num_draft_tokens=2)
    assert tokens == plain(model, PROMPT, 12) and stats.num_drafted > 0


def test_an_unreachable_hub_is_one_sentence(tmp_path, monkeypatch, capsys):
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)
    flags = ["--model", "no/model", "--draft-model", "no/such", "-m", "2"]
    monkeypatch.setattr(sys, "argv", ["mlx_eagle.generate", *flags])
    with pytest.raises(SystemExit) as stop:
        generate.main()
    assert stop.value.code == 2
    *notes, sentence = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: ")
    assert all(note.startswith("Note: drafting cannot be faster here") for note in notes)


def test_local_names(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    model = tiny_llama(vocab_size=128, num_hidden_layers=6)
    source = write_safetensors(tmp_path / "source", CONFIG, as_midlayer(eagle3_tensors()))
    assert isinstance(mlx_eagle.open_drafter("lookup", model), LookupDrafter)
    assert isinstance(mlx_eagle.open_drafter(str(source), model), Eagle3Drafter)
    assert len(list((tmp_path / ".cache" / "mlx-eagle" / "heads").iterdir())) == 1
    with pytest.raises(ValueError, match="does not exist"):
        mlx_eagle.open_drafter("no/such/thing/anywhere", model)


def test_a_head_that_copies(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    model = tiny_llama(vocab_size=128, num_hidden_layers=6)
    # A plus is part of a name that is there, and of one that lies in such a folder.
    for place in ("head", "with+lookup", "a+b/head"):
        source = write_safetensors(tmp_path / place, CONFIG, as_midlayer(eagle3_tensors()))
        assert isinstance(mlx_eagle.open_drafter(str(source), model), Eagle3Drafter)
        drafter = mlx_eagle.open_drafter(f"{source}+lookup", model)
        assert isinstance(drafter, Eagle3Drafter) and drafter.copies is not None
    tokens, _ = speculative(model, drafter, PROMPT, 12, num_draft_tokens=3)
    assert tokens == plain(model, PROMPT, 12)
    _, beside = open_beside(drafter, "auto+lookup", model)
    assert beside.head is drafter.head and beside.copies is not drafter.copies
    assert open_beside(drafter, None, model, copies=False) == ("auto", drafter)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("head+", "head\\+ does not exist, and behind a plus there may only be 'lookup'"),
        ("head+foo", "head\\+foo does not exist, and behind a plus"),
        ("my+folder/head", "my\\+folder/head does not exist"),
        ("+lookup", "'\\+lookup' has no draft head before the plus: give HEAD\\+lookup"),
        ("lookup+lookup", "has no draft head before the plus"),
        ("head+lookup+lookup", "has no draft head before the plus"),
        ("no/such/folder/thing+lookup", "no/such/folder/thing does not exist"),
    ],
)
def test_what_a_plus_may_not_be(name, message):
    with pytest.raises(ValueError, match=message) as error:
        mlx_eagle.open_drafter(name, tiny_llama(vocab_size=128, num_hidden_layers=6))
    assert "\n" not in str(error.value)


def test_a_refused_checkpoint_says_why(tmp_path):
    tensors = {**eagle3_tensors(), "mask_hidden": eagle3_tensors()["norm.weight"]}
    source = write_safetensors(tmp_path / "source", CONFIG, tensors)
    with pytest.raises(ValueError, match="P-EAGLE"):
        mlx_eagle.open_drafter(str(source), tiny_llama(vocab_size=128, num_hidden_layers=6))


@pytest.mark.parametrize("tied", [True, False])
def test_eagle_1_heads_run_through_the_same_loop(tmp_path, tied):
    model = tiny_llama(vocab_size=128, num_hidden_layers=6, tie_word_embeddings=tied)
    config = {k: v for k, v in CONFIG.items() if k != "draft_vocab_size"}
    source = write_safetensors(tmp_path / "source", config, eagle1_tensors())
    convert(str(source), str(tmp_path / "head"), quantize=False)
    drafter = mlx_eagle.load_drafter(tmp_path / "head", model)
    assert drafter.taps == (len(model.layers) + 1,)  # what leaves the final norm
    for k in (1, 3):
        tokens, stats = speculative(model, drafter, PROMPT, 30, num_draft_tokens=k)
        assert tokens == plain(model, PROMPT, 30)
        assert stats.num_head_forwards == stats.num_drafted
    assert isinstance(stats, Stats)


def test_a_folder_of_an_ordinary_model_is_a_drafter(tmp_path):
    model = tiny_llama(vocab_size=128, num_hidden_layers=6)
    save_model(tmp_path / "small", model)
    values = {k: v for k, v in vars(model.args).items() if v is not None}
    values |= {"time_step_limit": [0.0, float("inf")]}  # as Nemotron-H has it
    (tmp_path / "small" / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="not quantized while loading"):
        mlx_eagle.open_drafter(str(tmp_path / "small"), model, quantize_bits=4)


@pytest.mark.parametrize("name", ["gpt2", "starcoder2"])
def test_a_small_model_with_a_c_fc_is_no_head(tmp_path, name):
    """GPT-2, StarCoder2 and their likes call a matrix of their MLP mlp.c_fc.weight."""
    target, small = build(name), tmp_path / "small"
    save_model(small, target)
    (small / "config.json").write_text(json.dumps(ARCHITECTURES[name]))
    byte_tokenizer()._tokenizer.save_pretrained(small)
    drafter = mlx_eagle.open_drafter(str(small), target, byte_tokenizer())
    tokens, stats = speculative(target, drafter, PROMPT, 12, num_draft_tokens=3)
    assert tokens == plain(target, PROMPT, 12)
    assert stats.num_accepted == stats.num_drafted > 0


def test_subpackages_are_there_when_asked_for():
    assert mlx_eagle.convert.convert is convert
    assert callable(mlx_eagle.reference.eagle_draft_forward)
    with pytest.raises(AttributeError):
        _ = mlx_eagle.nothing_of_that_name


@pytest.mark.parametrize("name, sentence", [
    ("", "'' is no name of a model"), ("  ", "is no name of a model"), ("a\nb", "is no name of"),
    ("a" * 5000, "is no name of a model"), ("/dev/zero", "a device or a pipe"),
    ("~nobody-of-that-name/x", "does not exist"), ("x" * 300, "exist|reached|neither"),
    ("a/b\0c", "is no name of a model"),
])  # fmt: skip
def test_names_that_no_drafter_can_have(name, sentence):
    """Neither an errno, nor all of a long name."""
    with pytest.raises(ValueError, match=sentence) as found:
        find_drafter(name)
    assert len(str(found.value)) < 600 and "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("name", "meant"), [("lokup", "lookup"), ("atuo", "auto"), ("mtpp", "mtp")]
)
def test_a_name_that_is_nearly_a_word(name, meant):
    with pytest.raises(
        ValueError, match=f"^there is no draft model '{name}': did you mean {meant}"
    ):
        find_drafter(name)
