"""Trimming the draft vocabulary: the rows that stay are the untrimmed head's own."""

import json
from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    CONFIG,
    as_midlayer,
    config_of,
    eagle1_tensors,
    eagle3_tensors,
    refused,
    weights_of,
    without,
    write_config,
    write_safetensors,
)
from helpers import PROMPT, plain, speculative, tiny_llama
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models, pre_tokenizers
from tolerances import tolerance

from mlx_eagle.convert import Trim, convert
from mlx_eagle.convert.__main__ import main
from mlx_eagle.drafters.kinds import load_drafter
from mlx_eagle.drafters.tree import parse_tree

VOCAB, DRAFT, STOP = 128, 48, 5
HEADS = {
    "own lm_head": eagle3_tensors(seed=3),
    "rows of the target's": without(eagle3_tensors(seed=3), "lm_head.weight"),
    "full vocabulary": eagle3_tensors(seed=3, draft=VOCAB),
    "the target's lm_head": without(eagle3_tensors(seed=3, draft=VOCAB), "lm_head.weight"),
    "EAGLE-1": eagle1_tensors(),
}


def write_head(folder: Path, name: str) -> Path:
    tensors = HEADS[name]
    size = DRAFT if "d2t" in tensors else VOCAB
    config = CONFIG | {"draft_vocab_size": size}
    if name == "EAGLE-1":
        config = {k: v for k, v in config.items() if k != "draft_vocab_size"}
        return write_safetensors(folder, config | {"architectures": ["LlamaForCausalLM"]}, tensors)
    return write_safetensors(folder, config, as_midlayer(tensors))


def target_ids(name: str) -> np.ndarray:
    """Of each draft id of the untrimmed head."""
    d2t = HEADS[name].get("d2t")
    return np.arange(VOCAB) if d2t is None else d2t + np.arange(DRAFT)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocab_size=VOCAB, num_hidden_layers=8)


@pytest.fixture(scope="module")
def target(model, tmp_path_factory) -> Path:
    """The model's folder, with a tokenizer in which the word wN is token N, and </s> the STOP."""
    folder = tmp_path_factory.mktemp("target")
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 8}
    write_config(folder, config | {"vocab_size": VOCAB, "eos_token_id": STOP})
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    words = {f"w{i}" if i != STOP else "</s>": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> tuple[Path, Counter]:
    """A file of words, and how often it has each token."""
    rng = np.random.default_rng(11)
    tokens = np.minimum(rng.geometric(0.03, 4000), VOCAB - 1)
    tokens = np.where(tokens == STOP, STOP + 1, tokens).tolist()
    path = tmp_path_factory.mktemp("text") / "words.txt"
    lines = [" ".join(f"w{t}" for t in tokens[i : i + 9]) for i in range(0, len(tokens), 9)]
    path.write_text("\n".join(lines) + "\n")
    return path, Counter(tokens)


def expected_ids(name: str, size: int, counts: Counter | None) -> list[int]:
    ids = target_ids(name).tolist()
    if counts is None:
        return ids[:size]
    best = sorted(ids, key=lambda t: (-(10**9 if t == STOP else counts[t]), t))
    return sorted(best[:size])


@pytest.mark.parametrize("by_text", [False, True], ids=["d2t order", "frequency"])
@pytest.mark.parametrize("name", HEADS)
def test_logits_are_rows_of_the_untrimmed_heads(tmp_path, model, target, text, name, by_text):
    source, size = write_head(tmp_path / "source", name), 20
    counts = text[1] if by_text else None
    options = {"quantize": False, "target": str(target)}
    convert(str(source), str(tmp_path / "whole"), **options)
    wanted = Trim(size, str(text[0])) if by_text else size
    config = convert(str(source), str(tmp_path / "cut"), **options, draft_vocab=wanted)
    whole, cut = (load_drafter(tmp_path / folder, model) for folder in ("whole", "cut"))
    assert cut.to_target.tolist() == expected_ids(name, size, counts)
    assert config["draft_vocab_size"] == size and config["has_d2t"]
    rows = mx.array(np.searchsorted(target_ids(name), cut.to_target))
    states = mx.random.normal((1, 7, 64), key=mx.random.key(2))
    ours, theirs = cut.head.logits(states), whole.head.logits(states)
    assert ours.shape == (1, 7, size)
    assert mx.allclose(ours, theirs[..., rows], atol=tolerance()).item()
    entry = config["draft_vocab_trim"]
    assert entry["from"] == len(target_ids(name))
    assert entry["by"] == ("frequency" if by_text else "d2t order")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HEADS)
def test_drafted_tokens_and_the_text(tmp_path, model, target, text, name):
    """A trimmed head drafts the best of what it kept, and the text stays plain mlx-lm's."""
    source = write_head(tmp_path / "source", name)
    options = {"quantize": False, "target": str(target)}
    convert(str(source), str(tmp_path / "whole"), **options)
    convert(str(source), str(tmp_path / "cut"), **options, draft_vocab=Trim(16, str(text[0])))
    whole, cut = (load_drafter(tmp_path / f, model).begin() for f in ("whole", "cut"))
    width = whole.head.config.num_aux * 64
    for seed in range(8):
        tokens = mx.random.randint(0, VOCAB, (6,), key=mx.random.key(seed))
        features = mx.random.normal((6, width), key=mx.random.key(90 + seed))
        begun = [drafter.begin() for drafter in (whole, cut)]
        for drafter in begun:
            drafter.extend(tokens, features)
        logits = whole.head.logits(begun[0]._seed)[-1].tolist()
        by_token = dict(zip(target_ids(name).tolist(), logits, strict=True))
        kept = expected_ids(name, 16, text[1])
        drafted = begun[1].propose(1, lambda logits, ids: mx.argmax(logits, axis=-1))
        assert drafted.tokens.tolist() == [max(kept, key=lambda token: by_token[token])]
    expected = plain(model, PROMPT, 32)
    trees = [{"tree": parse_tree(shape)} for shape in ("3x3:9", "root2:3")]
    for way in ({"num_draft_tokens": 3}, *trees):
        assert speculative(model, cut, PROMPT, 32, **way)[0] == expected


def test_quantized_rows_are_cut_exactly(tmp_path):
    source = write_head(tmp_path / "source", "own lm_head")
    for folder, size in (("whole", None), ("cut", 20)):
        convert(str(source), str(tmp_path / folder), draft_vocab=size)
    whole, cut = weights_of(tmp_path / "whole"), weights_of(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    for key, array in whole.items():
        cut_here = key.startswith("lm_head") or key == "d2t"
        assert mx.array_equal(array[:20] if cut_here else array, cut[key]).item()


def test_the_command_and_what_is_recorded(tmp_path, target, text, capsys):
    path, counts = text
    source = write_head(tmp_path / "source", "own lm_head")
    out = tmp_path / "out"
    flags = ["--hf-path", source, "--mlx-path", out, "--draft-vocab", 30, "--target", target]
    main([str(flag) for flag in (*flags, "--draft-vocab-text", path)])
    ids = weights_of(out)["d2t"] + mx.arange(30)
    assert ids.tolist() == expected_ids("own lm_head", 30, counts)
    entry = config_of(out)["draft_vocab_trim"]
    total = sum(counts.values())
    share = sum(counts[i] for i in ids.tolist()) / total
    assert (entry["text"], entry["tokens"]) == ("words.txt", total)
    assert entry["covered"] == round(share, 4) < entry["covered_before"] < 1
    said = capsys.readouterr().out
    assert f"30 of 128, trimmed from 48 by frequency in words.txt, of whose {total} tokens" in said
    assert f"{share:.1%}" in said


def test_a_text_that_lacks_most_tokens_is_filled_up_in_order(tmp_path, target):
    path = tmp_path / "one.txt"
    ids = target_ids("own lm_head").tolist()
    path.write_text(f"w{ids[40]} " * 3)
    source, out = write_head(tmp_path / "source", "own lm_head"), tmp_path / "out"
    options = {"target": str(target), "draft_vocab": Trim(10, str(path))}
    convert(str(source), str(out), **options)
    stops = [STOP] if STOP in ids else []
    first = [i for i in ids if i not in stops][: 9 - len(stops)]
    assert (weights_of(out)["d2t"] + mx.arange(10)).tolist() == sorted([*first, *stops, ids[40]])


BAD = {
    "none": (("--draft-vocab", 0), "--draft-vocab is 0: give 1 or more"),
    "negative": (("--draft-vocab", -3), "--draft-vocab is -3: give 1 or more"),
    "too many": (("--draft-vocab", 49), "from 1 to 48"),
    "no size": (("--draft-vocab-text", "x"), "say how many with --draft-vocab"),
    "no tokenizer": (("--draft-vocab", 9, "--draft-vocab-text", "FILE"), "name the target"),
    "no file": (("--draft-vocab", 9, "--draft-vocab-text", "/none", "TARGET"), "cannot be read"),
    "a folder": (("--draft-vocab", 9, "--draft-vocab-text", "/", "TARGET"), "cannot be read"),
    "empty": (("--draft-vocab", 9, "--draft-vocab-text", "EMPTY", "TARGET"), "is empty"),
    "binary": (("--draft-vocab", 9, "--draft-vocab-text", "BINARY", "TARGET"), "no UTF-8"),
    "broken": (("--draft-vocab", 9, "--draft-vocab-text", "FILE", "BROKEN"), "cannot be loaded"),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_cost_a_sentence(tmp_path, out, capsys, target, text, case):
    args, words = BAD[case]
    source = write_head(tmp_path / "source", "own lm_head")
    files = {"FILE": text[0], "EMPTY": tmp_path / "empty", "BINARY": tmp_path / "binary"}
    files["EMPTY"].write_text("")
    files["BINARY"].write_bytes(b"\xff\xfe\x00")
    broken = tmp_path / "broken"
    write_config(broken, json.loads((target / "config.json").read_text()))
    (broken / "tokenizer.json").write_text("{}")
    folders = {"TARGET": target, "BROKEN": broken}
    flags = []
    for arg in args:
        flags += ["--target", folders[arg]] if arg in folders else [files.get(arg, arg)]
    assert words in refused(capsys, source, out, *flags)
