"""Drafters of blocks against others: files that another library wrote, and public ones.

Those resolve at full size, without weights, as their cards say.

Block sizes, taps, windows, masks and slots are those of the published configs and cards; widths
of layers are the targets' where no page says them.
"""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from block_twin import TOLERANCE, drafted_logits, relative
from golden import frozen
from mlx.utils import tree_flatten

from mlx_eagle.convert import convert
from mlx_eagle.drafters import dflash, dflash2, dspark
from mlx_eagle.drafters.block_config import BlockConfig, check_fit
from mlx_eagle.drafters.folder import fill, read_weights
from mlx_eagle.drafters.kinds import KINDS, recognise
from mlx_eagle.drafters.pairs import PAIRS
from mlx_eagle.drafters.target_parts import TargetSizes

QWEN3_8B = (36, 4096, 12288, 32, 8, 128, 151936)
QWEN35_9B = (32, 4096, 12288, 32, 8, 128, 248320)
QWEN38_27B = (64, 5120, 17408, 40, 8, 128, 248320)
QWEN36_35B = (40, 2048, 6144, 32, 4, 128, 248320)
LFM_1B = (16, 2048, 6144, 32, 8, 64, 65536)


def layer(sizes: tuple[int, ...], num_layers: int = 5, **more: object) -> dict:
    _, h, mlp, heads, kv, dim, vocab = sizes
    return {
        "hidden_size": h,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "vocab_size": vocab,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        **more,
    }


SLIDING = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048}
# kind, sizes of the target, published config, and what it comes to
HEADS = {
    "z-lab/Qwen3-8B-DFlash-b16": (
        "dflash",
        QWEN3_8B,
        layer(QWEN3_8B)
        | {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "block_size": 16}
        | {"dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}},
        {"taps": (2, 10, 18, 26, 34), "longest_draft": 15, "windows": ()},
    ),
    "z-lab/Qwen3.5-9B-DFlash": (
        "dflash",
        QWEN35_9B,
        # The keys of a hybrid target are noise: the whole head is turned.
        layer(QWEN35_9B)
        | {"model_type": "qwen3", "block_size": 16, "partial_rotary_factor": 0.25}
        | {"rope_parameters": {"rope_theta": 1e7, "mrope_section": [11, 11, 10]}}
        | {"dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29]}},
        {"taps": (2, 9, 16, 23, 30), "longest_draft": 15, "rope_theta": 1e7},
    ),
    "incoai/Qwen3.8-27B-DFlash2": (
        "dflash2",
        QWEN38_27B,
        layer(QWEN38_27B, **SLIDING)
        | {"architectures": ["DFlash2DraftModel"], "is_causal": False}
        | {
            "dflash_config": {
                "block_size": 8,
                "mask_token_id": 248070,
                "target_layer_ids": [5, 19, 33, 47, 61],
                "selector_top_k": 16,
            }
        },
        {
            "taps": (6, 20, 34, 48, 62),
            "longest_draft": 7,
            "windows": (2048,) * 5,
            "causal_layers": (),
            "kernel_size": 2,
            "group_size": 16,
        },
    ),
    "RedHatAI/Qwen3.8-27B-speculator.dspark": (
        "dspark",
        QWEN38_27B,
        {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark",
            "transformer_layer_config": layer(QWEN38_27B, **SLIDING) | {"model_type": "qwen3"},
            "aux_hidden_state_layer_ids": [4, 12, 20, 28, 36, 44, 52, 60],
            "mask_token_id": 248070,
            "block_size": 8,
            "speculators_config": {"proposal_methods": [{"speculative_tokens": 8}]},
        },
        {
            "taps": (4, 12, 20, 28, 36, 44, 52, 60),
            "longest_draft": 8,
            "windows": (2048,) * 5,
            "window_from": "anchor",
            "causal_layers": (0, 1, 2, 3, 4),
        },
    ),
    "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark": (
        "dspark",
        QWEN36_35B,
        {
            "speculators_model_type": "dspark",
            "transformer_layer_config": layer(QWEN36_35B),
            "aux_hidden_state_layer_ids": [2, 11, 20, 29, 38],
            "mask_token_id": 248070,
            "block_size": 8,
            "sample_from_anchor": True,
        },
        {"longest_draft": 8, "first_slot": 0},
    ),
    "deepseek-ai/dspark_qwen3_8b_block7": (
        "dspark",
        QWEN3_8B,
        layer(QWEN3_8B)
        | {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "markov_rank": 256}
        | {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        {"longest_draft": 7, "embed_source": "file", "lm_head_source": "file"},
    ),
    "LiquidAI/LFM2.5-1.2B-Instruct-DSpark": (
        "dspark",
        LFM_1B,
        layer(LFM_1B)
        | {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}
        | {
            "block_size": 9,
            "dflash_config": {"mask_token_id": 17, "target_layer_ids": [1, 5, 9, 12, 14]},
        },
        {"longest_draft": 9, "rope_traditional": True},
    ),
}
MAKERS = {
    "dflash": (dflash.config_from, lambda: {}),
    "dflash2": (dflash2.config_from, lambda: {"selector_rank": 256}),
    "dspark": (dspark.config_from, lambda: {"markov_rank": 256}),
}
CLASSES = {
    "dflash": (BlockConfig, dflash.DFlashHead),
    "dflash2": (dflash2.DFlash2Config, dflash2.DFlash2Head),
    "dspark": (dspark.DSparkConfig, dspark.DSparkHead),
}


def tensors_of(kind: str, sizes: tuple[int, ...], num_taps: int, own_tables: bool) -> dict:
    """Arrays that are never computed, under published names."""
    _, h, mlp, heads, kv, dim, vocab = sizes
    source = "file" if own_tables else "target"
    make_config, make_head = CLASSES[kind]
    config = make_config(
        hidden_size=h,
        num_layers=5,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=dim,
        intermediate_size=mlp,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        taps=tuple(range(num_taps)),
        mask_token_id=0,
        block_size=8,
        embed_source=source,
        lm_head_source=source,
        **MAKERS[kind][1](),
    )
    return dict(tree_flatten(make_head(config).parameters()))


@pytest.mark.parametrize("name", HEADS)
def test_it_resolves(name):
    kind, sizes, config, wanted = HEADS[name]
    ids = config.get("aux_hidden_state_layer_ids") or config.get("target_layer_ids")
    ids = ids or config["dflash_config"]["target_layer_ids"]
    tensors = tensors_of(kind, sizes, len(ids), own_tables="embed_source" in wanted)
    assert recognise(tensors, config) == kind
    made = MAKERS[kind][0](tensors, config)
    dflash.check_tensors(CLASSES[kind][1](made), tensors)
    depth, h, *_, vocab = sizes
    check_fit(made, TargetSizes(h, depth, vocab))
    assert {key: getattr(made, key) for key in wanted} == wanted
    KINDS[kind].made_for(made.to_dict(), "config.json", TargetSizes(h, depth, vocab))


@pytest.mark.parametrize("name", HEADS)
def test_it_is_in_the_table_of_pairs(name):
    (pair,) = [pair for pair in PAIRS if pair.head == name]
    assert pair.kind == HEADS[name][0]


# What mlx-vlm makes of the same files

ROUNDS = ((9, 5), (1, 8), (4, 40), (2, 3))  # as in tools/golden/make_blocks.py


@pytest.mark.parametrize("name", ["dflash", "dflash-capped", "dflash2", "dspark"])
def test_four_rounds_are_those_of_another_library(tmp_path, name):
    """Its logits, or where tokens depend on each other the ones that it drafts greedily."""
    source = Path(frozen.FOLDER) / f"block-{name}"
    written = convert(str(source), str(tmp_path / "head"), quantize=False, dtype="float32")
    expected = mx.load(str(source / "expected.safetensors"))
    config, head, drafter = PARTS[written["kind"]]
    head = head(config.from_dict(written, "config.json"))
    fill(head, read_weights(tmp_path / "head"))
    embed, project = expected["embed"], expected["head"].T
    own = drafter(head, lambda t: embed[t], lambda x: x @ project).begin()
    start = 0
    for i, (num_rows, token) in enumerate(ROUNDS):
        tokens = mx.array([*[0] * (num_rows - 1), token])
        own.extend(tokens, expected["features"][start : start + num_rows])
        start += num_rows
        if f"logits.{i}" in expected:
            wanted = np.array(expected[f"logits.{i}"], np.float64)
            assert relative(drafted_logits(own, len(wanted)), wanted) < TOLERANCE
        else:
            wanted = expected[f"tokens.{i}"].tolist()
            drafted = own.propose(len(wanted), lambda logits, _: mx.argmax(logits, axis=-1))
            assert drafted.tokens.tolist() == wanted


PARTS = {
    "dflash": (BlockConfig, dflash.DFlashHead, dflash.DFlashDrafter),
    "dflash2": (dflash2.DFlash2Config, dflash2.DFlash2Head, dflash2.DFlash2Drafter),
    "dspark": (dspark.DSparkConfig, dspark.DSparkHead, dspark.DSparkDrafter),
}
