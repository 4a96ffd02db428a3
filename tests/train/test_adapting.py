"""Drafters of every kind are adapted to a fine-tune, which then keeps more of their drafts."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from helpers import plain, speculative
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from trained_kinds import CASES
from training import chats, write_data, write_target

import mlx_eagle
from mlx_eagle.train import train
from mlx_eagle.train.kinds import TRAINED

RUN = {
    "batch_size": 4,
    "test_prompts": 0,
    "val_batches": 0,
    "regenerate": True,
    "answer_temps": (0.0,),
    "answer_tokens": 24,
    "steps_per_eval": 1000,
    "learning_rate": 5e-3,
}
LORA = {"rank": 4, "scale": 2.0, "dropout": 0.0}
FRESH = {
    "eagle3": {"draft_vocab_size": 128},
    "peagle": {"kind": "peagle", "mask_token_id": 7, "depths": 4, "draft_vocab_size": 128},
}
MORE = {
    "eagle3": {"ttt_steps": 3},
    "assistant": {"ttt_steps": 3, "learning_rate": 1e-2},  # only its layers are trained
}
SMALLER = {"mtp": {"num_hidden_layers": 2, "full_attention_interval": 2}}
PROMPTS = 8  # of the data, to be continued in the test
DRAFTED = 3  # tokens a round


def target_of(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A target, and the settings of a drafter of that kind to begin with: new, or as published."""
    if kind in FRESH:
        return write_target(folder / "target", num_hidden_layers=4), FRESH[kind]
    case = CASES[kind](folder, **SMALLER.get(kind, {}))
    return case.target, {"init": str(case.given)}


def write_adapter(folder: Path, target: Path) -> Path:
    """Write random adapters as ``mlx_lm.lora`` does."""
    model, _ = mlx_lm.load(str(target))
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), LORA)
    mx.random.seed(3)
    weights = {
        name: 0.1 * mx.random.normal(array.shape)
        for name, array in tree_flatten(model.trainable_parameters())
    }
    folder.mkdir()
    config = {"fine_tune_type": "lora", "num_layers": len(model.layers), "lora_parameters": LORA}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder


def length_of(target: str, adapter: str | None, drafter_path: Path) -> float:
    """Mean of tokens a round; the texts have to be those that mlx-lm gives."""
    model, tokenizer = mlx_lm.load(target, adapter_path=adapter)
    drafter = mlx_eagle.load_drafter(drafter_path, model)
    num_tokens = 0
    num_rounds = 0
    for row in chats(PROMPTS):
        tokens = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True)
        length = RUN["answer_tokens"]
        found, stats = speculative(model, drafter, tokens, length, num_draft_tokens=DRAFTED)
        assert found == plain(model, tokens, length)
        num_tokens += len(found)
        num_rounds += stats.num_rounds
    return num_tokens / num_rounds


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", TRAINED)
def test_a_drafter_is_adapted_to_a_fine_tune(kind, tmp_path):
    """Asked is what it was adapted with: so small a target's texts have little in common."""
    path, begin = target_of(kind, tmp_path)
    target = str(path)
    rows = chats(PROMPTS)
    data = str(write_data(tmp_path / "data", train=rows, valid=rows[:4]))
    adapter = str(write_adapter(tmp_path / "adapter", path))
    first = tmp_path / "first"
    second = tmp_path / "second"
    run = {**RUN, **MORE.get(kind, {})}
    train(target, data, str(first), iters=60, **begin, **run)
    train(target, data, str(second), init=str(first), iters=100, adapter_path=adapter, **run)
    base = length_of(target, None, first)
    before = length_of(target, adapter, first)
    assert base > before + 0.7
    assert length_of(target, adapter, second) > before + 0.7
