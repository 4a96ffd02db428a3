"""Write golden/block-*: drafters of blocks, and mlx-vlm's drafts with them in four rounds.

Run ``pip install --no-deps mlx-vlm==0.7.10`` first, beside what this package needs. Weights and
features are random; embedding and output projection stand for a target's.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_vlm.speculative.drafters.dflash2 import DFlash2DraftModel
from mlx_vlm.speculative.drafters.dflash2.config import DFlash2Config
from mlx_vlm.speculative.drafters.dspark import DSparkDraftModel
from mlx_vlm.speculative.drafters.dspark.config import DSparkConfig
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
CLASSES: dict[str, tuple[type, type]] = {
    "dflash": (DFlashDraftModel, DFlashConfig),
    "dflash2": (DFlash2DraftModel, DFlash2Config),
    "dspark": (DSparkDraftModel, DSparkConfig),
}
ROUNDS = ((9, 5), (1, 8), (4, 40), (2, 3))  # number of new context rows, and the newest token


class Target(nn.Module):
    """Parts that a drafter takes from its target."""

    rollback_speculative_cache = None  # mlx-vlm asks a target for it

    def __init__(self) -> None:
        super().__init__()
        self.args = {**SIZES, "num_hidden_layers": SIZES["num_target_layers"]}
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


def greedy(rows: mx.array) -> mx.array:
    return mx.argmax(rows, axis=-1)


def published(model: nn.Module) -> dict[str, mx.array]:
    """Return a drafter's weights by the makers' names."""
    weights = tree_flatten(model.parameters())
    return {n.removesuffix(".weight") if "codebook" in n else n: a for n, a in weights}


def freeze(name: str, kind: str, config: dict, seed: int) -> None:
    """Write a drafter and its drafts of each round, with the same caches: see ``made``."""
    make_model, make_config = CLASSES[kind]
    model = randomized(make_model(make_config.from_dict(config)), seed)
    folder = FOLDER / f"block-{name}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    mx.save_safetensors(str(folder / "model.safetensors"), published(model))
    target = randomized(Target(), seed + 1)
    caches = model.reset(target)
    found = {}
    start = 0
    seen = mx.random.normal((sum(n for n, _ in ROUNDS), 3 * SIZES["hidden_size"]))
    for i, (num_rows, token) in enumerate(ROUNDS):
        what, array = made(kind, model, token, seen[None, start : start + num_rows], caches)
        found[f"{what}.{i}"] = array
        start += num_rows
    found |= {"features": seen, "embed": target.embed_tokens.weight, "head": target.lm_head.weight}
    mx.save_safetensors(str(folder / "expected.safetensors"), found)


def made(
    kind: str, model: nn.Module, token: int, rows: mx.array, caches: Any
) -> tuple[str, mx.array]:
    """Compute logits, or greedy tokens if a drafter chooses slot by slot, and say which."""
    if kind == "dflash":
        block = mx.array([[token, *[INSIDE["mask_token_id"]] * 5]])
        return "logits", model(block, rows, caches)[0, 1:]
    size = SIZES["block_size"] - (kind == "dflash2")  # whose first slot drafts nothing
    return "tokens", model.draft_block(token, rows, caches, size + 1, greedy)[0]


def main() -> None:
    start = {"model_type": "qwen3", **SIZES}
    spark = {"projector_type": "dspark", "markov_rank": 8, "markov_head_type": "vanilla"}
    config = {
        "architectures": ["DSparkDraftModel"],
        **start,
        "dflash_config": INSIDE | spark,
    }
    freeze("dspark", "dspark", config, 5)
    two = {
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 8,
        "selector_top_k": 6,
        "output_multiplier": 0.5,
    }
    config = {
        "architectures": ["DFlash2DraftModel"],
        **start,
        "is_causal": False,
        "dflash_config": INSIDE | two,
    }
    freeze("dflash2", "dflash2", config, 5)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dflash_config": INSIDE,
        **SIZES,
    }
    freeze("dflash", "dflash", config, 3)
    freeze("dflash-capped", "dflash", config | {"final_logit_softcapping": 3.0}, 3)


if __name__ == "__main__":
    main()
