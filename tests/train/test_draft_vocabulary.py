"""Heads that are made to draft more or fewer tokens: ``--init`` with ``--draft-vocab-size``."""

import json
from collections import Counter
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from training import VOCAB, chats, write_data, write_target

import mlx_eagle
from mlx_eagle.train import train
from mlx_eagle.train.__main__ import main
from mlx_eagle.train.data import Examples
from mlx_eagle.train.draft_vocabulary import resized
from mlx_eagle.train.given import open_given
from mlx_eagle.train.kinds import begin, filled
from mlx_eagle.train.settings import TrainSettings
from mlx_eagle.train.student import Student

RUN = {
    "iters": 1,
    "batch_size": 2,
    "ttt_steps": 3,
    "steps_per_eval": 100,
    "learning_rate": 1e-3,
    "test_prompts": 0,
}
SOME = 20  # of the 27 that the answers use


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, data, and a head that can draft only a few letters."""
    folder = tmp_path_factory.mktemp("widening")
    target = write_target(folder / "target")
    data = write_data(folder / "data", train=chats(8))
    few = {**RUN, "draft_vocab_size": SOME, "iters": 4}
    train(str(target), str(data), str(folder / "few"), **few)
    return target, data, folder / "few"


def student_from(folder: Path, model, target: Path) -> Student:
    """The student of a run that begins with the head in that folder."""
    settings = filled(TrainSettings(str(target), "", "", init=str(folder)), "eagle3")
    given = open_given(str(folder), str(target))
    return begin(settings, given, model, {}, Examples((), (), ()))[0]


def test_rows_of_new_tokens(folders):
    """Old tokens keep their rows; those of new ones are made of the target's by least squares."""
    target, _, few = folders
    model, _ = mlx_lm.load(str(target))
    before = student_from(few, model, target)
    ids = np.array(before.ids)
    rows = np.array(before.head.lm_head.weight)
    new = np.setdiff1d(np.arange(0, VOCAB, 2), ids)
    after = resized(before, model, np.sort(np.concatenate([ids, new])).astype(np.int32))
    found = dict(
        zip(np.array(after.ids).tolist(), np.array(after.head.lm_head.weight), strict=True)
    )
    for token, row in zip(ids.tolist(), rows, strict=True):
        assert np.array_equal(found[token], row)
    output = model.lm_head if "lm_head" in model else model.model.embed_tokens
    table = np.array(output.weight)
    ones = np.ones((VOCAB, 1))
    inputs = np.concatenate([table, ones], axis=1)
    best = np.linalg.lstsq(inputs[ids], rows, rcond=None)[0]
    wanted = inputs[new] @ best
    error = np.abs(np.stack([found[token] for token in new.tolist()]) - wanted).max()
    assert error <= 1e-3 * np.abs(wanted).max()
    config = after.head.config
    assert config.draft_vocab_size == len(ids) + len(new) and config.has_d2t


def test_a_widened_head_decodes(folders, tmp_path):
    """The head gets the most frequent tokens that it lacked, and drafts for its target."""
    target, data, few = folders
    kept = {**RUN, "init": str(few)}
    train(str(target), str(data), str(tmp_path / "same"), **{**kept, "draft_vocab_size": SOME})
    train(str(target), str(data), str(tmp_path / "more"), **{**kept, "draft_vocab_size": SOME + 3})
    own, wide = (set(ids_of(folder)) for folder in (few, tmp_path / "more"))
    assert set(ids_of(tmp_path / "same")) == own and own < wide and len(wide) == SOME + 3
    model, tokenizer = mlx_lm.load(str(target))
    answers = "".join(row["messages"][-1]["content"] for row in chats(8))
    counts = Counter(tokenizer.encode(answers, add_special_tokens=False))
    missed = [num for token, num in counts.items() if token not in wide]
    assert missed and min(counts[token] for token in wide - own) >= max(missed)
    drafter = mlx_eagle.load_drafter(tmp_path / "more", model)
    options = {"max_tokens": 24}
    plain = mlx_lm.generate(model, tokenizer, "say 1", **options)
    assert mlx_eagle.generate(model, tokenizer, "say 1", draft_model=drafter, **options) == plain


def test_all_tokens(folders, tmp_path):
    """A head of the target's whole vocabulary needs no table of offsets."""
    target, data, few = folders
    every = {"init": str(few), **RUN, "draft_vocab_size": VOCAB}
    train(str(target), str(data), str(tmp_path / "all"), **every)
    config = json.loads((tmp_path / "all" / "config.json").read_text())
    assert config["draft_vocab_size"] == VOCAB and not config["has_d2t"]
    assert "d2t" not in mx.load(str(tmp_path / "all" / "model.safetensors"))


@pytest.mark.parametrize("shares", [False, True])
def test_a_narrowed_head_says_of_what_is_left_what_it_said(folders, tmp_path, shares):
    """Both with an output matrix of the head's own and with the target's."""
    target, _, few = folders
    model, _ = mlx_lm.load(str(target))
    before = student_from(shared(few, tmp_path) if shares else few, model, target)
    kept = np.sort(np.array(before.ids)[::3])
    states = mx.random.normal((5, before.head.config.hidden_size))
    said = np.array(before.head.logits(states))
    after = resized(before, model, kept)
    found = np.array(after.head.logits(states))
    assert np.array_equal(np.array(after.ids), kept) and found.shape == (5, len(kept))
    assert np.abs(found - said[:, np.searchsorted(np.array(before.ids), kept)]).max() <= 1e-5
    config = after.head.config
    assert config.draft_vocab_size == len(kept) and config.has_d2t
    assert config.lm_head_source == "file" and "lm_head" in after.head.trainable_parameters()


def test_a_narrowed_head_keeps_what_is_most_frequent(folders, tmp_path):
    target, data, few = folders
    options = {**RUN, "init": str(few), "draft_vocab_size": SOME - 6}
    train(str(target), str(data), str(tmp_path / "less"), **options)
    own = set(ids_of(few))
    left = set(ids_of(tmp_path / "less"))
    assert left < own and len(left) == SOME - 6
    model, tokenizer = mlx_lm.load(str(target))
    answers = "".join(row["messages"][-1]["content"] for row in chats(8))
    counts = Counter(tokenizer.encode(answers, add_special_tokens=False))
    counts[tokenizer.eos_token_id] = len(chats(8))  # which ends every answer
    assert min(counts[token] for token in left) >= max(counts[token] for token in own - left)
    drafter = mlx_eagle.load_drafter(tmp_path / "less", model)
    options = {"max_tokens": 24}
    plain = mlx_lm.generate(model, tokenizer, "say 1", **options)
    assert mlx_eagle.generate(model, tokenizer, "say 1", draft_model=drafter, **options) == plain


def shared(folder: Path, scratch: Path) -> Path:
    """Write the same head with the target's output matrix in place of its own."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"lm_head_source": "target", "draft_vocab_size": VOCAB, "has_d2t": False}
    config.pop("quantization", None)
    weights = mx.load(str(folder / "model.safetensors"))
    kept = {k: w for k, w in weights.items() if k != "d2t" and "lm_head" not in k}
    (scratch / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(scratch / "model.safetensors"), kept)
    return scratch


@pytest.mark.parametrize("size", [0, VOCAB + 1])
def test_no_such_width(folders, tmp_path, size, capsys):
    target, data, few = folders
    command = f"--model {target} --data {data} --init {few} --output {tmp_path / 'x'}"
    with pytest.raises(SystemExit) as err:
        main([*command.split(), "--draft-vocab-size", str(size)])
    said = capsys.readouterr().err
    assert err.value.code == 2 and "--draft-vocab-size" in said and str(size) in said
    assert "Traceback" not in said and not (tmp_path / "x").exists()


def ids_of(folder: Path) -> list[int]:
    """Return the target ids of the tokens that the head in that folder can draft."""
    offsets = np.array(mx.load(str(folder / "model.safetensors"))["d2t"])
    return (np.arange(len(offsets)) + offsets).tolist()
