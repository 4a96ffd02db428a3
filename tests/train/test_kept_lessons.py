"""``--cache-features``: lessons are used again if this run would make the same ones."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers import tiny_llama
from mlx.utils import tree_map
from training import VOCAB, chats, weights_of, write_data, write_target

from mlx_eagle.train import train
from mlx_eagle.train.data import Example, Examples
from mlx_eagle.train.teacher import cache_name

RUN = {
    "iters": 4,
    "batch_size": 2,
    "ttt_steps": 2,
    "draft_vocab_size": 20,
    "steps_per_eval": 100,
    "learning_rate": 1e-3,
    "test_prompts": 0,
}
TAPS = (1, 2, 3)
EXAMPLES = Examples((Example((1, 2, 3, 4, 5), 2), Example((6, 7, 8), 1)), (), ())


def name_of(model=None, examples=EXAMPLES, taps=TAPS, bits=None) -> str:
    model = tiny_llama(0, vocab_size=VOCAB) if model is None else model
    return cache_name(examples, model, taps, bits)


def changed_in_one_layer():
    model = tiny_llama(0, vocab_size=VOCAB)
    weight = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = weight + 1e-3
    return model


def in_half_precision():
    model = tiny_llama(0, vocab_size=VOCAB)
    model.update(tree_map(lambda x: x.astype(mx.bfloat16), model.parameters()))
    return model


OTHERS = {
    "target": {"model": tiny_llama(1, vocab_size=VOCAB)},
    "one layer of the target": {"model": changed_in_one_layer()},
    "precision": {"model": in_half_precision()},
    "taps": {"taps": (0, 2, 3)},
    "bits": {"bits": 8},
    "prompt's length": {"examples": replace(EXAMPLES, train=(Example((1, 2, 3, 4, 5), 3),))},
    "order": {"examples": replace(EXAMPLES, train=EXAMPLES.train[::-1])},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_lessons_of_something_else_are_not_found(change):
    assert name_of(**change) != name_of()


def test_the_same_lessons_are_found_again():
    assert name_of() == name_of()


def files(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*.safe*")}


def test_two_targets_share_a_folder(tmp_path):
    """A target that replaces the first one, such as a fine-tune of it, has lessons of its own."""
    data = write_data(tmp_path / "data", train=chats(8))
    cached = {**RUN, "cache_features": str(tmp_path / "kept")}
    target = write_target(tmp_path / "target")
    train(str(target), str(data), str(tmp_path / "first"), **cached)
    kept = files(tmp_path / "kept")
    train(str(target), str(data), str(tmp_path / "again"), **cached)
    assert files(tmp_path / "kept") == kept  # nothing was said anew

    write_target(tmp_path / "target", seed=5)
    train(str(target), str(data), str(tmp_path / "plain"), **RUN)
    train(str(target), str(data), str(tmp_path / "second"), **cached)
    assert kept.items() < files(tmp_path / "kept").items()
    ours = weights_of(tmp_path / "plain")
    theirs = weights_of(tmp_path / "second")
    for name, wanted in ours.items():
        assert np.abs(theirs[name] - wanted).max() <= 1e-4 * np.abs(wanted).max(), name


@pytest.mark.parametrize("bits", [None, 8])
def test_what_was_kept_before_changes_nothing(tmp_path, bits):
    """A run that writes the lessons learns what one that reads them learns."""
    data = write_data(tmp_path / "data", train=chats(8))
    target = str(write_target(tmp_path / "target"))
    cached = {**RUN, "cache_features": str(tmp_path / "kept"), "cache_bits": bits}
    for name in ("writes", "reads"):
        train(target, str(data), str(tmp_path / name), **cached)
    written = weights_of(tmp_path / "writes")
    read = weights_of(tmp_path / "reads")
    assert all(np.array_equal(written[name], read[name]) for name in written)
