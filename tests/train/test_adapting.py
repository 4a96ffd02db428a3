"""A drafter is adapted to a fine-tune of its target, which then keeps more of its drafts."""

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from helpers import plain, speculative
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from trained_kinds import CASES
from training import chats, write_data

import mlx_eagle
from mlx_eagle.train import train

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
PROMPTS = ("say 1", "say 2", "say 5", "say 6")  # of the data


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
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        found, stats = speculative(model, drafter, tokens, RUN["answer_tokens"])
        assert found == plain(model, tokens, RUN["answer_tokens"])
        num_tokens += len(found)
        num_rounds += stats.num_rounds
    return num_tokens / num_rounds


@pytest.mark.exhaustive
def test_a_drafter_is_adapted_to_a_fine_tune(tmp_path):
    """Asked is what it was adapted with: so small a target's texts have little in common."""
    case = CASES["dflash"](tmp_path)
    target = str(case.target)
    rows = chats(8)
    data = str(write_data(tmp_path / "data", train=rows, valid=rows[:4]))
    adapter = write_adapter(tmp_path / "adapter", case.target)
    first = tmp_path / "first"
    second = tmp_path / "second"
    train(target, data, str(first), init=str(case.given), iters=60, **RUN)
    train(target, data, str(second), init=str(first), iters=100, adapter_path=str(adapter), **RUN)
    base = length_of(target, None, first)
    before = length_of(target, str(adapter), first)
    assert base > before + 1
    assert length_of(target, str(adapter), second) > before + 1
