"""Writes golden/block-*: drafters of blocks with what mlx-vlm makes of them, over four rounds.

``pip install --no-deps mlx-vlm==0.7.10`` first, beside what this package needs. Weights and
features are random; embedding and output projection stand for a target's.
"""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_vlm.speculative.drafters.qwen3_dflash import DFlashDraftModel
from mlx_vlm.speculative.drafters.qwen3_dflash.config import DFlashConfig

FOLDER = Path(__file__).parents[2] / "tests" / "support" / "golden"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "block_size": 6,
    "num_target_layers": 4,
    "layer_types": ["full_attention"] * 2,
}
INSIDE = {"mask_token_id": 7, "target_layer_ids": [0, 1, 3]}
ROUNDS = ((9, 5), (1, 8), (4, 40), (2, 3))  # context rows that are new, and the newest token


class Target(nn.Module):
    """What a drafter takes from its target."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(SIZES["vocab_size"], SIZES["hidden_size"])
        self.lm_head = nn.Linear(SIZES["hidden_size"], SIZES["vocab_size"], bias=False)


def randomized(module: nn.Module, seed: int) -> nn.Module:
    mx.random.seed(seed)
    module.update(
        tree_map(
            lambda w: (1.0 if w.ndim == 1 else 0.0) + 0.25 * mx.random.normal(w.shape),
            module.parameters(),
        )
    )
    return module


def save(name: str, config: dict, weights: dict, target: Target, seen: mx.array, logits: list):
    folder = FOLDER / f"block-{name}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    found = {f"logits.{i}": rows for i, rows in enumerate(logits)}
    found |= {"features": seen, "embed": target.embed_tokens.weight, "head": target.lm_head.weight}
    mx.save_safetensors(str(folder / "expected.safetensors"), found)


def dflash(name: str, **changes: object) -> None:
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dflash_config": INSIDE,
        **SIZES,
        **changes,
    }
    model = randomized(DFlashDraftModel(DFlashConfig.from_dict(config)), 3)
    weights = dict(tree_flatten(model.parameters()))
    target = randomized(Target(), 4)
    caches, logits, start = model.reset(target), [], 0
    seen = mx.random.normal((sum(n for n, _ in ROUNDS), 3 * SIZES["hidden_size"]))
    for num_rows, token in ROUNDS:
        block = mx.array([[token, *[INSIDE["mask_token_id"]] * 5]])
        rows = seen[None, start : start + num_rows]
        logits.append(model(block, rows, caches)[0, 1:])
        start += num_rows
    save(name, config, weights, target, seen, logits)


def main() -> None:
    dflash("dflash")
    dflash("dflash-capped", final_logit_softcapping=3.0)


if __name__ == "__main__":
    main()
