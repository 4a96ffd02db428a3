"""Losses and gradients of drafters of every kind, against the public trainers' own.

Frozen by ``tools/golden/make_training_*.py``, whose docstrings say what the files hold.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from assistants import golden_folder, golden_target
from drafter_pairs import tiny_qwen3_5
from golden import frozen
from helpers import tiny_qwen3
from mlx_lm.models import llama
from tolerances import tolerance
from trained_kinds import recipe_of
from training import write_model

from mlx_eagle.drafters.head_weights import split_weights
from mlx_eagle.train.batches import TokenBatch
from mlx_eagle.train.data import Examples
from mlx_eagle.train.given import open_given
from mlx_eagle.train.kinds import TRAINED, begin, filled
from mlx_eagle.train.optimizer import TrainStep
from mlx_eagle.train.recipe import Recipe
from mlx_eagle.train.settings import TrainSettings

BOUND = max(2e-5, tolerance())
ASSISTANTS = max(5e-5, tolerance())  # for rounding grows in them
SIZES = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def floats(path: Path) -> dict[str, mx.array]:
    """Read a safetensors file, with bfloat16 as float32."""
    arrays = dict(mx.load(str(path)))
    return {k: v.astype(mx.float32) if v.dtype == mx.bfloat16 else v for k, v in arrays.items()}


def llama_target() -> tuple[nn.Module, dict[str, Any]]:
    """Build the target of most examples."""
    model = llama.Model(llama.ModelArgs(model_type="llama", **SIZES))
    path = frozen.FOLDER / "training-ce" / "target.safetensors"
    model.load_weights(list(floats(path).items()))
    return model, {"model_type": "llama", **SIZES}


def qwen3_target() -> tuple[nn.Module, dict[str, Any]]:
    model = tiny_qwen3(**SIZES | {"intermediate_size": 24})
    return model, vars(model.args)


def gated_target() -> tuple[nn.Module, dict[str, Any]]:
    """Build a Qwen3.5, whose heads are gated and turned in part."""
    own = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    own |= {"intermediate_size": 24}
    rope = {"rope_theta": 100.0, "partial_rotary_factor": 0.25, "type": "default"}
    model = tiny_qwen3_5(**SIZES | own, rope_parameters=rope)
    return model, {"model_type": "qwen3_5", "text_config": vars(model.language_model.args)}


def gemma_target() -> tuple[nn.Module, dict[str, Any]]:
    model = golden_target("dense")
    return model, {"model_type": "gemma4_text", **vars(model.args)}


class Example:
    """A frozen batch with a drafter as published, and a trainer's loss and gradients."""

    def __init__(self, name: str, folder: Path, make: Callable[[], Any] = llama_target):
        own = frozen.FOLDER / f"training-{name}"
        self.given = golden_folder("dense") if name == "assistant" else own
        arrays = floats(own / "training.safetensors")
        self.arrays = {key: np.array(array) for key, array in arrays.items()}
        self.model, config = make()
        if "lm_head" in arrays:
            text = self.model.get("language_model", self.model)
            text.model.embed_tokens.weight = arrays["embed_tokens"]
            text.lm_head.weight = arrays["lm_head"]
        self.target = write_model(folder / "target", self.model, config)
        tokens = self.arrays["tokens"].astype(np.int32)
        numbers = tuple(range(len(tokens)))
        counts = self.arrays["counts"].astype(bool)
        self.batch = TokenBatch(tokens, counts, numbers)

    def recipe(self, kind: str, **options: Any) -> Any:
        return recipe_of(self, kind, **options)

    def gradients(self) -> dict[str, np.ndarray]:
        return {
            key.removeprefix("gradient."): array
            for key, array in self.arrays.items()
            if key.startswith("gradient.")
        }

    def compare(
        self,
        recipe: Recipe,
        features: mx.array,
        targets: tuple[Any, ...],
        bound: float = BOUND,
        frozen_too: tuple[str, ...] = (),
    ) -> None:
        """Compare losses, and gradients by the names that they are published under.

        There are others there of parts whose names begin with ``frozen_too``.
        """
        step = TrainStep(recipe)
        tokens = mx.array(self.batch.tokens)
        losses, gradients = step.gradients(tokens, features, targets)
        total = float((losses * recipe.weights).sum())
        assert total == pytest.approx(float(self.arrays["losses"].sum()), rel=bound)
        names = recipe.published_names(recipe.given.published)
        ours = {names[name]: np.array(gradient) for name, gradient in gradients.items()}
        theirs = self.gradients()
        assert ours.keys() == {x for x in theirs if not x.startswith(frozen_too)}
        for name, found in ours.items():
            assert np.abs(theirs[name]).max() > 0, name
            assert frozen.relative(found, theirs[name]) < bound, name


DECAY = {"position_weights": "decay", "gamma": 3.0}
BLOCKS = {
    "dflash": ("dflash", {}),
    "dflash-narrow": ("dflash", {**DECAY, "loss_divisor": "rows"}),
    "dflash-text": ("dflash", {**DECAY, "labels": "text"}),
    "dflash2": ("dflash2", {}),
    "dspark": ("dspark", {}),
    "dspark-rnn": ("dspark", {}),
    "dspark-kl": ("dspark", {**DECAY, "loss": "kl", "loss_divisor": "rows"}),
}
"""Kinds of blocks, with options by which they are trained as there. By default ours is ``dflash``.

speculators' own default is KL instead of cross-entropy, and it counts rows behind a place that
does not count; SpecForge's labels are the text's, and its divisor with D-PACE is that of texts.
"""
MTP = {"mtp": qwen3_target, "mtp-gated": gated_target}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str, tmp_path: Path) -> None:
    example = Example(name, tmp_path)
    kind, options = BLOCKS[name]
    recipe = example.recipe(kind, anchors=4, **options)
    example.compare(recipe, *recipe.targets_of(example.batch, example.arrays["anchors"]))


@pytest.mark.parametrize("name", MTP)
def test_mtp(name: str, tmp_path: Path) -> None:
    """As FastMTP trains; by default, steps see what they see when drafting, and the loss is KL."""
    example = Example(name, tmp_path, MTP[name])
    recipe = example.recipe("mtp", loss="ce", labels="text", mtp_attention="step")
    states = mx.array(example.arrays["states"])
    example.compare(recipe, states, recipe.teach(example.batch, 0)[1])


def test_assistants(tmp_path: Path) -> None:
    """By transformers' model and the definition, for no public trainer drafts as they do."""
    example = Example("assistant", tmp_path, gemma_target)
    recipe = example.recipe("assistant", ttt_steps=3)
    table = ("model.embed_tokens.",)  # not trained
    example.compare(recipe, *recipe.teach(example.batch, 0), ASSISTANTS, table)


def test_peagle(tmp_path: Path) -> None:
    """speculators also counts slots where the target's choice cannot be drafted."""
    example = Example("peagle", tmp_path)
    values = {"model": str(example.target), "init": str(example.given), "depths": 4}
    settings = filled(TrainSettings(data="", output="", **values), "peagle")
    none = Examples([], [], [])
    given = open_given(str(example.given), str(example.target))
    student, given = begin(settings, given, example.model, {}, none)
    recipe = TRAINED["peagle"].recipe(settings, student, example.model, given)
    text, slot, depth = example.arrays["elements"].T
    kept = [[slot[(text == t) & (depth == d)] for d in (1, 2, 3)] for t in range(3)]
    step = TrainStep(recipe)
    tokens = mx.array(example.batch.tokens)
    losses, gradients = step.gradients(tokens, *recipe.targets_of(example.batch, kept))
    assert float(losses.sum()) == pytest.approx(float(example.arrays["losses"][0]), rel=BOUND)
    theirs = example.gradients()
    second = theirs.pop("layers.1.input_layernorm.weight")
    theirs["layers.1.hidden_norm.weight"] = second
    ours = split_weights(gradients, student.head.config)
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        found = np.array(ours[name]).reshape(wanted.shape)
        assert frozen.relative(found, wanted) < BOUND, name
