"""Writes golden/block-*: drafters of blocks with what mlx-vlm makes of them, over four rounds.

``pip install --no-deps mlx-vlm==0.7.10`` first, beside what this package needs. Weights and
features are random; embedding and output projection stand for a target's.
"""

import json
from pathlib import Path

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
ROUNDS = ((9, 5), (1, 8), (4, 40), (2, 3))  # context rows that are new, and the newest token


class Target(nn.Module):
    """What a drafter takes from its target."""

    rollback_speculative_cache = None  # what mlx-vlm asks a target for

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


def save(
    name: str, config: dict, weights: dict, target: Target, seen: mx.array, found: dict
) -> None:
    folder = FOLDER / f"block-{name}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
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
    caches, logits, start = model.reset(target), {}, 0
    seen = mx.random.normal((sum(n for n, _ in ROUNDS), 3 * SIZES["hidden_size"]))
    for i, (num_rows, token) in enumerate(ROUNDS):
        block = mx.array([[token, *[INSIDE["mask_token_id"]] * 5]])
        rows = seen[None, start : start + num_rows]
        logits[f"logits.{i}"] = model(block, rows, caches)[0, 1:]
        start += num_rows
    save(name, config, weights, target, seen, logits)


def chosen(name: str, model_class: type, config_class: type, config: dict, size: int) -> None:
    """Greedy tokens, of drafters that choose slot by slot."""
    model = randomized(model_class(config_class.from_dict(config)), 5)
    weights = {
        key.removesuffix(".weight") if key.endswith("codebook.weight") else key: array
        for key, array in tree_flatten(model.parameters())
    }
    target = randomized(Target(), 6)
    caches, tokens, start = model.reset(target), {}, 0
    seen = mx.random.normal((sum(n for n, _ in ROUNDS), 3 * SIZES["hidden_size"]))

    def greedy(logits: mx.array) -> mx.array:
        return mx.argmax(logits, axis=-1)

    for i, (num_rows, token) in enumerate(ROUNDS):
        rows = seen[None, start : start + num_rows]
        tokens[f"tokens.{i}"] = model.draft_block(token, rows, caches, size + 1, greedy)[0]
        start += num_rows
    save(name, config, weights, target, seen, tokens)


def main() -> None:
    spark = {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        **SIZES,
        "dflash_config": INSIDE
        | {"projector_type": "dspark", "markov_rank": 8, "markov_head_type": "vanilla"},
    }
    chosen("dspark", DSparkDraftModel, DSparkConfig, spark, 6)
    two = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        **SIZES,
        "is_causal": False,
        "dflash_config": INSIDE
        | {
            "conv_kernel_size": 2,
            "conv_group_size": 8,
            "selector_rank": 8,
            "selector_top_k": 6,
            "output_multiplier": 0.5,
        },
    }
    chosen("dflash2", DFlash2DraftModel, DFlash2Config, two, 5)
    dflash("dflash")
    dflash("dflash-capped", final_logit_softcapping=3.0)


if __name__ == "__main__":
    main()
