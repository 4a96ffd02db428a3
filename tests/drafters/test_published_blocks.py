"""Drafters of blocks against others: files that another library wrote, and public ones.

Those resolve at full size, without weights, as their cards say.

Block sizes, taps, windows, masks and slots are those of the published configs and cards, some as
other projects' tests repeat them: mlx-vlm, oMLX, Splash, Osaurus. Widths of layers are the
targets' where no page says them.
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
QWEN38_27B = (64, 5120, 17408, 32, 8, 128, 248320)
QWEN36_35B = (40, 2048, 6144, 32, 4, 128, 248320)
LFM_1B = (16, 2048, 6144, 32, 8, 64, 65536)
# The depth of the target, and what its drafter says of itself.
QWEN3_4B = (36, 2560, 9728, 32, 8, 128, 151936)
QWEN35_27B = (64, 5120, 17408, 32, 8, 128, 248320)
QWEN35_35B = (40, 2048, 6144, 32, 4, 128, 248320)
QWEN36_35B_NEW = (40, 2048, 6144, 32, 8, 128, 248320)
GPT_20B = (24, 2880, 7680, 64, 8, 64, 201088)
GEMMA_12B = (48, 3840, 15360, 16, 1, 512, 262144)
MINICPM_2B = (42, 2048, 6144, 16, 2, 128, 130560)
LFM_2B = (30, 2048, 6144, 32, 8, 64, 128000)
LFM_8B = (24, 2048, 6144, 32, 8, 64, 128000)


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
    "z-lab/Qwen3-4B-DFlash-b16": (
        "dflash",
        QWEN3_4B,
        layer(QWEN3_4B)
        | {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "block_size": 16}
        | {"dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}},
        {"taps": (2, 10, 18, 26, 34), "longest_draft": 15},
    ),
    "z-lab/gpt-oss-20b-DFlash": (
        "dflash",
        GPT_20B,
        layer(GPT_20B, 8, rope_theta=150000, attention_bias=True)
        | {"model_type": "gpt_oss", "block_size": 8, "architectures": ["DFlashDraftModel"]}
        | {"dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]}},
        {"taps": (2, 7, 12, 17, 22), "longest_draft": 7, "attention_bias": True},
    ),
    "z-lab/Qwen3.5-27B-DFlash": (
        "dflash",
        QWEN35_27B,
        layer(QWEN35_27B, rope_theta=5e6)
        | {"model_type": "qwen3", "block_size": 16}
        | {"dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]}},
        {"taps": (2, 17, 32, 47, 62), "longest_draft": 15, "windows": ()},
    ),
    "z-lab/Qwen3.6-27B-DFlash": (
        "dflash",
        QWEN35_27B,
        layer(QWEN35_27B, sliding_window=2048)
        | {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "block_size": 16}
        | {"dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]}},
        {"longest_draft": 15, "windows": (2048,) * 4 + (0,), "causal_layers": (0, 1, 2, 3)},
    ),
    "z-lab/Qwen3.5-35B-A3B-DFlash": (
        "dflash",
        QWEN35_35B,
        layer(QWEN35_35B, 8, layer_types=["full_attention"] * 8)
        | {"architectures": ["DFlashDraftModel"], "block_size": 16, "sliding_window": None}
        | {"dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]}},
        {"taps": (2, 11, 20, 29, 38), "longest_draft": 15, "windows": ()},
    ),
    "z-lab/Qwen3.6-35B-A3B-DFlash": (
        "dflash",
        QWEN36_35B_NEW,
        # As published since June: the size of a block and theta lie deeper.
        layer(QWEN36_35B_NEW, 6, sliding_window=4096, rope_theta=None)
        | {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
        | {"rope_parameters": {"rope_theta": 10000000, "rope_type": "default"}}
        | {
            "dflash_config": {
                "block_size": 16,
                "mask_token_id": 248077,
                "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
            }
        },
        {"longest_draft": 15, "windows": (4096,) * 5 + (0,), "rope_theta": 1e7},
    ),
    "incoai/Qwen3.6-35B-A3B-DFlash2": (
        "dflash2",
        QWEN36_35B_NEW,
        layer(QWEN36_35B_NEW, 6, sliding_window=2048)
        | {"architectures": ["DFlash2DraftModel"], "is_causal": False}
        | {"layer_types": ["sliding_attention"] * 6}
        | {
            "dflash_config": {
                "block_size": 8,
                "mask_token_id": 248077,
                "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
                "selector_top_k": 16,
                "conv_kernel_size": 2,
                "conv_group_size": 16,
            }
        },
        {"longest_draft": 7, "kernel_size": 2, "group_size": 16, "causal_layers": ()},
    ),
    "openbmb/MiniCPM5-2B-DSpark": (
        "dspark",
        MINICPM_2B,
        layer(MINICPM_2B)
        | {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "markov_rank": 256}
        | {"mask_token_id": 75982, "target_layer_ids": [1, 10, 20, 30, 39]}
        | {"projector_type": "dspark", "num_target_layers": 42},
        {"taps": (2, 11, 21, 31, 40), "longest_draft": 7, "lm_head_source": "target"},
    ),
    "LiquidAI/LFM2.5-2.6B-DSpark": (
        "dspark",
        LFM_2B,
        layer(LFM_2B)
        | {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}
        | {
            "block_size": 9,
            "dflash_config": {"mask_token_id": 125017, "target_layer_ids": [2, 9, 17, 21, 27]},
        },
        {"taps": (3, 10, 18, 22, 28), "longest_draft": 9, "rope_traditional": True},
    ),
    "LiquidAI/LFM2.5-8B-A1B-DSpark": (
        "dspark",
        LFM_8B,
        layer(LFM_8B, rope_theta=5e6)
        | {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}
        | {
            "block_size": 9,
            "dflash_config": {"mask_token_id": 125017, "target_layer_ids": [2, 6, 10, 14, 18]},
        },
        {"taps": (3, 7, 11, 15, 19), "longest_draft": 9, "rope_theta": 5e6},
    ),
    "deepseek-ai/dspark_gemma4_12b_block7": (
        "dspark",
        GEMMA_12B,
        layer(GEMMA_12B, head_dim=256, global_head_dim=512, num_key_value_heads=8)
        | {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"}
        | {"block_size": 7, "mask_token_id": 4, "target_layer_ids": [5, 17, 29, 41, 46]}
        | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "markov_rank": 256}
        | {"final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh"}
        | {
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                }
            }
        },
        {
            "taps": (6, 18, 30, 42, 47),
            "longest_draft": 7,
            "embed_source": "file",
            "is_gemma": True,
            "values_are_keys": True,
            "num_kv_heads": 1,
            "head_dim": 512,
        },
    ),
}
MAKERS = {
    "dflash": (dflash.config_from, lambda: {}),
    "dflash2": (dflash2.config_from, lambda: {"selector_rank": 256}),
    "dspark": (dspark.config_from, lambda: {"markov_rank": 256}),
}
GEMMA = {"is_gemma": True, "values_are_keys": True}
CLASSES = {
    "dflash": (BlockConfig, dflash.DFlashHead),
    "dflash2": (dflash2.DFlash2Config, dflash2.DFlash2Head),
    "dspark": (dspark.DSparkConfig, dspark.DSparkHead),
}


def tensors_of(
    kind: str, sizes: tuple[int, ...], num_taps: int, own_tables: bool, published: dict
) -> dict:
    """Arrays that are never computed, under published names."""
    _, h, mlp, heads, kv, dim, vocab = sizes
    source = "file" if own_tables else "target"
    make_config, make_head = CLASSES[kind]
    config = make_config(
        hidden_size=h,
        num_layers=published.get("num_hidden_layers", 5),
        attention_bias=published.get("attention_bias", False),
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
        **(GEMMA if published.get("model_type") == "gemma4_text" else {}),
    )
    return dict(tree_flatten(make_head(config).parameters()))


@pytest.mark.parametrize("name", HEADS)
def test_it_resolves(name):
    kind, sizes, config, wanted = HEADS[name]
    ids = config.get("aux_hidden_state_layer_ids") or config.get("target_layer_ids")
    ids = ids or config["dflash_config"]["target_layer_ids"]
    tensors = tensors_of(kind, sizes, len(ids), "embed_source" in wanted, config)
    assert recognise(tensors, config) == kind
    made = MAKERS[kind][0](tensors, config)
    dflash.check_tensors(CLASSES[kind][1](made), tensors)
    depth, h, *_, vocab = sizes
    check_fit(made, TargetSizes(h, depth, vocab))
    assert {key: getattr(made, key) for key in wanted} == wanted
    KINDS[kind].made_for(made.to_dict(), "config.json", TargetSizes(h, depth, vocab))

    (pair,) = [pair for pair in PAIRS if pair.head == name]
    assert pair.kind == kind
    if pair.megabytes is not None:  # where the widths of its layers are published
        size = sum(array.size for array in tensors.values())
        assert pair.megabytes == round(2 * size / 1e6)


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
