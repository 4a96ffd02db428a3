"""Damaged files of a target, and of a prompt cache, cost one sentence that names the file."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from helpers import byte_tokenizer, tiny_llama
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from mlx_lm.utils import save_model

from mlx_eagle.commands import generate as program
from mlx_eagle.system.loading import apply_template, check_target


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A tiny target as a folder, its weights in two files."""
    folder = tmp_path_factory.mktemp("models") / "target"
    model = tiny_llama(vocab_size=258)
    save_model(folder, model)
    weights = mx.load(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for name, keys in parts.items():
        mx.save_safetensors(str(folder / name), {key: weights[key] for key in keys})
    index = {key: name for name, keys in parts.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {k: v for k, v in vars(model.args).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def target(sound, tmp_path) -> Path:
    return shutil.copytree(sound, tmp_path / "target")


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Run ``mlx_eagle.generate`` without a drafter: (exit code, out, err)."""

    def command(*args: str) -> tuple[int, str, str]:
        flags = ["-p", "Hello", "-m", "4", "--num-draft-tokens", "0", "--verbose", "F"]
        monkeypatch.setattr(sys, "argv", ["mlx_eagle.generate", *flags, *args])
        code = 0
        try:
            program.main()
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return command


def sentence_of(result: tuple[int, str, str]) -> str:
    """The one sentence of a refusal; notes about this machine are left out."""
    code, out, err = result
    lines = [line for line in err.splitlines() if not line.startswith("Note: drafting cannot")]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: "), err
    assert "Traceback" not in out + err
    return lines[0]


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="only a CPU is slow in half precision")
def test_half_precision_becomes_float32_on_a_cpu(run, target):
    for path in target.glob("*.safetensors"):
        halves = {name: array.astype(mx.float16) for name, array in mx.load(str(path)).items()}
        mx.save_safetensors(str(path), halves)
    code, out, err = run("--model", str(target))
    assert code == 0 and out
    assert err.count("Note: on a CPU the target's weights are loaded as float32") == 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES = {
    "no config": ("config.json", lambda path: path.unlink(), "does not exist"),
    "empty config": ("config.json", lambda path: path.write_text(""), "is not JSON"),
    "nothing in config": ("config.json", lambda path: path.write_text("{}"), "no model_type"),
    "a list as config": ("config.json", lambda path: path.write_text("[]"), "no JSON object"),
    "bytes as config": ("config.json", lambda path: path.write_bytes(b"\xff\xfe"), "is not JSON"),
    "deep config": ("config.json", lambda p: p.write_text("[" * 100_000), "is not JSON"),
    "cut weights": ("model-1.safetensors", cut, "is cut off"),
    "garbage weights": ("model-2.safetensors", lambda p: p.write_text("x" * 99), "no safetensors"),
    "a missing file": ("model-2.safetensors", lambda path: path.unlink(), "is missing"),
    "an empty index": (
        "model.safetensors.index.json", lambda p: p.write_text("{}"), "has no weight_map",
    ),
    "empty tokenizer": ("tokenizer.json", lambda p: p.write_text("{}"), "holds no tokenizer"),
    "cut tokenizer": ("tokenizer.json", cut, "is not JSON"),
    "tokenizer settings": ("tokenizer_config.json", lambda p: p.write_text("[1]"), "no JSON"),
}  # fmt: skip


def test_a_sound_folder_is_opened(run, sound):
    check_target(sound)
    code, out, err = run("--model", str(sound))
    assert code == 0 and out.strip(), err


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_target(run, target, name):
    file, damage, words = DAMAGES[name]
    damage(target / file)
    sentence = sentence_of(run("--model", str(target)))
    assert str(target / file) in sentence and words in sentence


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages.nothing.there }}"])
def test_a_broken_chat_template(run, target, template):
    (target / "chat_template.jinja").write_text(template)
    sentence = sentence_of(run("--model", str(target)))
    assert f"the chat template of {target} fails" in sentence
    assert run("--model", str(target), "--ignore-chat-template")[0] == 0


def test_a_template_that_works_is_the_tokenizers_own():
    tokenizer, messages = byte_tokenizer(), [{"role": "user", "content": "Hello"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert apply_template(tokenizer, messages, add_generation_prompt=True) == expected


@pytest.mark.parametrize("name", ["somebody/no-such-model", "no/such/folder/here"])
def test_a_model_that_is_not_there_is_named(run, monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert name in sentence_of(run("--model", name))


@pytest.fixture
def cache_file(sound, tmp_path) -> Path:
    """A prompt cache of the tiny target, as ``mlx_lm.cache_prompt`` writes it."""
    cache = filled_cache(make_prompt_cache(tiny_llama(vocab_size=258)))
    path = tmp_path / "cache.safetensors"
    metadata = {"model": str(sound), "tokenizer_config": "{}"}
    save_prompt_cache(str(path), cache, metadata)
    return path


def filled_cache(cache: list) -> list:
    model = tiny_llama(vocab_size=258)
    model(mx.array([[1, 2, 3]]), cache=cache + make_prompt_cache(model)[len(cache) :])
    return cache


def test_a_prompt_cache_is_read(run, cache_file):
    code, out, err = run("--prompt-cache-file", str(cache_file))
    assert code == 0 and out.strip(), err


def test_a_prompt_cache_of_too_few_layers(run, sound, cache_file):
    few = filled_cache(make_prompt_cache(tiny_llama(vocab_size=258))[:1])
    save_prompt_cache(str(cache_file), few, {"model": str(sound), "tokenizer_config": "{}"})
    sentence = sentence_of(run("--prompt-cache-file", str(cache_file)))
    assert f"{cache_file} holds 1 caches, but this model has 2" in sentence


def without_metadata(sound: Path, file: Path) -> None:
    save_prompt_cache(str(file), filled_cache(make_prompt_cache(tiny_llama(vocab_size=258))))


def of_unknown_type(sound: Path, file: Path) -> None:
    arrays, metadata = mx.load(str(file), return_metadata=True)
    mx.save_safetensors(str(file), arrays, metadata | {"1.1": "load_prompt_cache"})


def of_another_state(sound: Path, file: Path) -> None:
    arrays, metadata = mx.load(str(file), return_metadata=True)
    mx.save_safetensors(str(file), arrays, metadata | {"1.1": "RotatingKVCache"})


def of_another_tokenizer(sound: Path, file: Path) -> None:
    arrays, metadata = mx.load(str(file), return_metadata=True)
    mx.save_safetensors(str(file), arrays, metadata | {"0.tokenizer_config": "[1]"})


WRONG_CACHES = {
    "garbage": (lambda sound, file: file.write_bytes(b"x" * 99), "no prompt cache ("),
    "cut short": (lambda sound, file: cut(file), "no prompt cache ("),
    "ordinary weights": (
        lambda sound, file: shutil.copy(sound / "model-1.safetensors", file), "no prompt cache (",
    ),
    "no metadata": (without_metadata, "does not say which model"),
    "an unknown type": (of_unknown_type, "no prompt cache ("),
    "no tokenizer": (of_another_tokenizer, "no prompt cache ("),
    "another type": (of_another_state, "no prompt cache ("),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_CACHES)
def test_a_wrong_prompt_cache(run, sound, cache_file, name):
    damage, words = WRONG_CACHES[name]
    damage(sound, cache_file)
    sentence = sentence_of(run("--prompt-cache-file", str(cache_file)))
    assert f"--prompt-cache-file {cache_file}" in sentence and words in sentence


def test_a_prompt_cache_of_a_target_without_a_known_head_is_gone_on_with_plainly(run, cache_file):
    plain = run("--prompt-cache-file", str(cache_file))[1]
    code, out, err = run("--prompt-cache-file", str(cache_file), "--num-draft-tokens", "3")
    assert code == 0 and out == plain
    assert err.startswith("Note: no public head is known here for ") and err.count("\n") == 1
    drafted = run(
        "--prompt-cache-file",
        str(cache_file),
        "--num-draft-tokens",
        "3",
        "--draft-model",
        "lookup",
    )
    assert drafted[1] == plain and "without a drafter" not in drafted[2]
