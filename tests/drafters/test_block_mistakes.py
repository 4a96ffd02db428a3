"""What is easily done wrong with drafters of blocks, and that the comparisons see each of it.

By the twin that ``compare_rounds`` holds them against; those of MTP layers and of assistants are
in their own files.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from block_twin import drafted_logits, features_of, relative, tiny_block, twin_logits
from grids import thorough
from helpers import PROMPT, tiny_llama
from mlx.utils import tree_flatten

from mlx_eagle.target_model.target import find_final_norm

LLAMA = tiny_llama(num_hidden_layers=6)
TEXT, SIZE = [*PROMPT, 5], 4
OWN: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark": {"markov_rank": 8, "first_slot": 0},
    "dflash2": {"group_size": 16, "selector_rank": 8, "top_k": 5},
}
Weights = dict[str, mx.array]


def changed(**changes: Any) -> Callable[[dict, Weights], tuple[dict, Weights]]:
    return lambda config, weights: (config | changes, weights)


def replaced(part: str, by: Callable[[mx.array], mx.array]) -> Callable:
    """All tensors with these words in their names."""

    def replace(config: dict, weights: Weights) -> tuple[dict, Weights]:
        assert any(part in name for name in weights)
        return config, {name: by(a) if part in name else a for name, a in weights.items()}

    return replace


COMMON = {
    "taps of the layer before": changed(taps=(0, 5)),
    "a norm of the context left out": replaced("hidden_norm", mx.ones_like),
    "another token for the mask": changed(mask_token_id=12),
    "causal": changed(causal_layers=(0, 1)),
    "a window": changed(windows=(4, 4)),
    "neighbouring channels turned": changed(rope_traditional=True),
}
MISTAKES = {
    "dflash": COMMON | {"the slot before": changed(first_slot=0)},
    "dspark": COMMON
    | {
        "the slot behind": changed(first_slot=1),
        "no correction": replaced("markov_w2", mx.zeros_like),
        "another rank's order": replaced("markov_w1", lambda a: a[:, ::-1]),
    },
    "dflash2": COMMON
    | {
        "the slot before": changed(first_slot=0),
        "no base": replaced("base_kernel", mx.zeros_like),
        "kernels turned round": replaced("base_kernel", lambda a: a[:, ::-1]),
        "before and behind exchanged": replaced("base_kernel", lambda a: a[::-1]),
        "one candidate less": changed(top_k=4),
        "codebooks exchanged": lambda config, weights: (config, exchanged(weights)),
    },
}
QUICK = [("dspark", "no correction"), ("dflash2", "no base")]
QUICK += [("dflash", mistake) for mistake in MISTAKES["dflash"]]
EVERY = [(kind, mistake) for kind, mistakes in MISTAKES.items() for mistake in mistakes]


def exchanged(weights: Weights) -> Weights:
    names = [f"candidate_selector.{which}_codebook" for which in ("predecessor", "successor")]
    return weights | dict(zip(names, [weights[name] for name in reversed(names)], strict=True))


def drafted(drafter, change: Callable | None = None, features=None) -> np.ndarray:
    """The logits of a draft; ``change`` is made between what is absorbed and the block."""
    begun = drafter.begin()
    if features is None:
        features = features_of(LLAMA, drafter.taps, TEXT)
    begun.extend(mx.array(TEXT[1:]), mx.array(features.astype(np.float32))[:-1])
    if change is not None:
        for layer in drafter.head.layers:
            layer.self_attn.rope = change(layer.self_attn.rope)
    return drafted_logits(begun, SIZE)


def wanted(kind: str) -> np.ndarray:
    return twin_logits(tiny_block(LLAMA, kind, **OWN[kind]), LLAMA, TEXT, SIZE)


@pytest.mark.parametrize("case", thorough(EVERY, *QUICK), ids=", ".join)
def test_a_mistake_in_the_head_is_seen(case):
    kind, mistake = case
    drafter = tiny_block(LLAMA, kind, **OWN[kind])
    weights = dict(tree_flatten(drafter.head.parameters()))
    config, weights = MISTAKES[kind][mistake](drafter.head.config.to_dict(), weights)
    other = tiny_block(LLAMA, kind, **config)
    other.head.load_weights(list(weights.items()))
    assert relative(drafted(drafter), wanted(kind)) < 1e-5
    assert relative(drafted(other), wanted(kind)) > 0.01


PLACES: dict[str, Callable] = {
    "a block one late": lambda rope: lambda x, offset: rope(x, offset=offset + 1),
    "a block that stays": lambda rope: (
        lambda x, offset: mx.concatenate(
            [rope(x[:, :, i : i + 1], offset=offset) for i in range(x.shape[2])], axis=2
        )
    ),
    "a block from the start": lambda rope: lambda x, offset: rope(x, offset=0),
}


@pytest.mark.parametrize("mistake", thorough(PLACES, "a block one late"))
@pytest.mark.parametrize("kind", OWN)
def test_a_mistake_in_the_positions_is_seen(kind, mistake):
    drafter = tiny_block(LLAMA, kind, **OWN[kind])
    assert relative(drafted(drafter, PLACES[mistake]), wanted(kind)) > 0.01


@pytest.mark.parametrize("kind", OWN)
def test_a_state_on_the_other_side_of_the_final_norm_is_seen(kind):
    drafter = tiny_block(LLAMA, kind, **OWN[kind])
    features = features_of(LLAMA, drafter.taps, TEXT)
    assert drafter.taps[-1] == len(LLAMA.layers)
    size = features.shape[1] // len(drafter.taps)
    last = mx.array(features[:, -size:].astype(np.float32))
    features[:, -size:] = np.array(find_final_norm(LLAMA)(last))
    assert relative(drafted(drafter, features=features), wanted(kind)) > 0.01
