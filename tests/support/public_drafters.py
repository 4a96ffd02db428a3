"""Public drafters of blocks and Gemma assistants: their published configs, a row each.

Facts are those of configs and pages, some as other projects repeat them in their tests and notes.
What none says is in ``assumed``, with the figure that speaks for it. ``published`` is a figure of
the page: bytes of the file, or twice its parameters; what the shapes come to has to agree.
"""

from collections.abc import Mapping
from typing import Any

GIB = 2.0**30
# Of the target: layers, width, vocabulary
LLAMA_8B = (32, 4096, 128256)
QWEN3_4B, QWEN3_8B = (36, 2560, 151936), (36, 4096, 151936)
QWEN3_14B, QWEN3_32B = (40, 5120, 151936), (64, 5120, 151936)
CODER_30B, CODER_NEXT = (48, 2048, 151936), (48, 2048, 151936)
QWEN35_1B, QWEN35_4B, QWEN35_9B = (24, 1024, 248320), (32, 2560, 248320), (32, 4096, 248320)
QWEN35_35B, QWEN35_122B = (40, 2048, 248320), (48, 3072, 248320)
QWEN_27B = (64, 5120, 248320)  # 3.5, 3.6 and 3.8
GPT_20B, GPT_120B = (24, 2880, 201088), (36, 2880, 201088)
GEMMA_E2B, GEMMA_E4B, GEMMA_12B = (35, 1536, 262144), (42, 2560, 262144), (48, 3840, 262144)
GEMMA_26B, GEMMA_31B = (30, 2816, 262144), (60, 5376, 262144)
MINICPM_2B, MUSE = (42, 2048, 130560), (52, 6656, 202048)
LFM_1B, LFM_2B, LFM_8B = (16, 2048, 65536), (30, 2048, 128000), (24, 2048, 128000)

# Of the drafter's layers: MLP, heads, key heads, width of a head
OF_8B, OF_27B, OF_2048 = (12288, 32, 8, 128), (17408, 32, 8, 128), (6144, 32, 4, 128)
LIQUID = (6144, 32, 8, 64)


def row(
    kind: str,
    target: tuple[int, int, int],
    layer: tuple[int, int, int, int],
    config: Mapping[str, Any],
    wanted: Mapping[str, Any],
    **more: Any,
) -> dict[str, Any]:
    """One drafter: its kind, its target's sizes, those of a layer, its config, what is made of it.

    ``layers`` (5), ``rank`` of small matrices (256), ``draft`` (size of its vocabulary), ``own``
    (tables in its files), ``published`` and ``assumed`` as above, ``gguf`` (bytes of such a file).
    """
    _, h, vocab = target
    mlp, heads, kv, dim = layer
    num_layers = more.setdefault("layers", 5)
    sizes = {
        "hidden_size": h,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "vocab_size": vocab,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
    }
    if "transformer_layer_config" in config:
        inner = {**sizes, "model_type": "qwen3", **config["transformer_layer_config"]}
        config = {**config, "transformer_layer_config": inner}
    else:
        config = {**sizes, "model_type": "qwen3", **config}
    return {"kind": kind, "target": target, "config": config, "wanted": dict(wanted), **more}


def z_lab(ids: list[int], mask: int, block_size: int, **more: Any) -> dict[str, Any]:
    """As z-lab wrote them until June: the size of a block at the top."""
    inside = {"mask_token_id": mask, "target_layer_ids": ids}
    named = {"architectures": ["DFlashDraftModel"], "block_size": block_size}
    return named | {"dflash_config": inside} | more


def sliding(num_layers: int, window: int) -> dict[str, Any]:
    """All layers but the last."""
    kinds = ["sliding_attention"] * (num_layers - 1) + ["full_attention"]
    return {"layer_types": kinds, "sliding_window": window}


def newer(ids: list[int], window: int = 4096, **more: Any) -> dict[str, Any]:
    """As z-lab writes them since: six layers, and block and theta lie deeper."""
    inside = {"block_size": 16, "mask_token_id": 248077, "target_layer_ids": ids}
    ropes = {"rope_theta": 10000000, "rope_type": "default"}
    named = {"architectures": ["DFlashDraftModel"], "rope_theta": None, "rope_parameters": ropes}
    return named | {"dflash_config": inside} | sliding(6, window) | more


def deep_spec(ids: list[int], mask: int, block_size: int, **more: Any) -> dict[str, Any]:
    """As DeepSpec writes them, and who trains with it."""
    named = {"architectures": ["Qwen3DSparkModel"], "block_size": block_size, "markov_rank": 256}
    return named | {"mask_token_id": mask, "target_layer_ids": ids} | more


def liquid(ids: list[int], mask: int, **more: Any) -> dict[str, Any]:
    named = {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}
    inside = {"mask_token_id": mask, "target_layer_ids": ids}
    return named | {"block_size": 9, "dflash_config": inside} | more


def nested(kind: str, ids: list[int], mask: int, size: int, layer: dict, **more: Any) -> dict:
    """As speculators writes them; ids are taps."""
    named = {"speculators_model_type": kind, "transformer_layer_config": layer}
    named |= {"aux_hidden_state_layer_ids": ids, "mask_token_id": mask}
    return named | {"block_size": size} | more


def drafts(number: int) -> dict[str, Any]:
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": number}]}}


ALL_SLIDE = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048}
# Keys of a hybrid target that its drafter's config repeats: the whole head is turned.
NOISE = {
    "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "mrope_section": [11, 11, 10]},
    "attn_output_gate": True,
}
EIGHT_OF_32 = [1, 5, 9, 13, 17, 21, 25, 29]
EIGHT_OF_40 = [1, 6, 11, 16, 22, 27, 32, 37]
LATEST = {"longest_draft": 15, "windows": (4096,) * 5 + (0,), "rope_theta": 1e7}
WITH_LAST_FULL = {
    "longest_draft": 15,
    "windows": (2048,) * 4 + (0,),
    "causal_layers": (0, 1, 2, 3),
}
TWO = {"kernel_size": 2, "group_size": 16}
KERNELS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_top_k": 16}
QWEN38_TWO = {"block_size": 8, "mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61]}
GEMMA_ROPE = {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"}
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 10000000,
    "rope_type": "yarn",
}

BLOCKS: dict[str, dict[str, Any]] = {
    # z-lab, DFlash
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": row(
        "dflash",
        LLAMA_8B,
        OF_8B,
        z_lab([1, 8, 15, 22, 29], 128002, 10, rope_theta=5e5),
        {"taps": (2, 9, 16, 23, 30), "longest_draft": 9, "windows": ()},
        published=1.95 * GIB,
        assumed="the mask token, a special one of Llama's; theta, the target's",
    ),
    "z-lab/Qwen3-4B-DFlash-b16": row(
        "dflash",
        QWEN3_4B,
        (9728, 32, 8, 128),
        z_lab([1, 9, 17, 25, 33], 151669, 16),
        {"taps": (2, 10, 18, 26, 34), "longest_draft": 15},
        published=1.00 * GIB,
    ),
    "z-lab/Qwen3-8B-DFlash-b16": row(
        "dflash",
        QWEN3_8B,
        OF_8B,
        z_lab([1, 9, 17, 25, 33], 151669, 16),
        {"taps": (2, 10, 18, 26, 34), "longest_draft": 15, "windows": ()},
        published=1.95 * GIB,
    ),
    "z-lab/Qwen3-Coder-30B-A3B-DFlash": row(
        "dflash",
        CODER_30B,
        OF_2048,
        z_lab([1, 12, 23, 34, 45], 151669, 16),
        {"taps": (2, 13, 24, 35, 46), "longest_draft": 15, "windows": (), "num_kv_heads": 4},
        layers=8,
        published=0.88 * GIB,
        assumed="the mask token, that of its smaller siblings",
    ),
    "z-lab/Qwen3-Coder-Next-DFlash": row(
        "dflash",
        CODER_NEXT,
        OF_2048,
        z_lab([3, 11, 23, 35, 43], 151669, 16),
        {"taps": (4, 12, 24, 36, 44), "longest_draft": 15, "windows": ()},
        layers=8,
        published=0.88 * GIB,
        assumed="the mask token, that of its smaller siblings",
    ),
    "z-lab/gpt-oss-20b-DFlash": row(
        "dflash",
        GPT_20B,
        (7680, 64, 8, 64),
        z_lab([1, 6, 11, 16, 21], 200000, 8, rope_theta=150000, attention_bias=True),
        {"taps": (2, 7, 12, 17, 22), "longest_draft": 7, "attention_bias": True},
        layers=8,
        published=1.46 * GIB,
    ),
    "z-lab/gpt-oss-120b-DFlash": row(
        "dflash",
        GPT_120B,
        (7680, 64, 8, 64),
        z_lab([1, 9, 17, 25, 33], 200000, 10, rope_theta=150000, attention_bias=True),
        {"taps": (2, 10, 18, 26, 34), "longest_draft": 9, "attention_bias": True},
        layers=8,
        published=1.46 * GIB,
        assumed="mask token and biases, those of the 20b's: the file has the same size",
    ),
    "z-lab/Qwen3.5-4B-DFlash": row(
        "dflash",
        QWEN35_4B,
        (9216, 32, 8, 128),
        newer(EIGHT_OF_32),
        LATEST | {"taps": (2, 6, 10, 14, 18, 22, 26, 30), "causal_layers": (0, 1, 2, 3, 4)},
        layers=6,
        published=1.18 * GIB,
        assumed="the mask token, that of the newer Qwen3.6 heads",
    ),
    "z-lab/Qwen3.5-9B-DFlash": row(
        "dflash",
        QWEN35_9B,
        OF_8B,
        newer(EIGHT_OF_32),
        LATEST | {"taps": (2, 6, 10, 14, 18, 22, 26, 30)},
        layers=6,
        published=2.41 * GIB,
        assumed="the mask token, that of the newer Qwen3.6 heads",
    ),
    "z-lab/Qwen3.5-9B-DFlash, of April": row(
        "dflash",
        QWEN35_9B,
        OF_8B,
        z_lab([1, 8, 15, 22, 29], 248070, 16, **NOISE),
        {"taps": (2, 9, 16, 23, 30), "longest_draft": 15, "rope_theta": 1e7},
    ),
    "z-lab/Qwen3.5-27B-DFlash": row(
        "dflash",
        QWEN_27B,
        OF_27B,
        newer([1, 10, 18, 27, 35, 44, 52, 61]),
        LATEST | {"taps": (2, 11, 19, 28, 36, 45, 53, 62)},
        layers=6,
        published=3.96 * GIB,
        assumed="the mask token, that of the newer Qwen3.6 heads",
    ),
    "z-lab/Qwen3.5-27B-DFlash, of April": row(
        "dflash",
        QWEN_27B,
        OF_27B,
        z_lab([1, 16, 31, 46, 61], 248070, 16, rope_theta=5e6),
        {"taps": (2, 17, 32, 47, 62), "longest_draft": 15, "windows": ()},
    ),
    "z-lab/Qwen3.5-35B-A3B-DFlash": row(
        "dflash",
        QWEN35_35B,
        (6144, 32, 8, 128),
        newer(EIGHT_OF_40),
        LATEST | {"taps": (2, 7, 12, 17, 23, 28, 33, 38)},
        layers=6,
        published=0.72 * GIB,
        assumed="the mask token, that of the newer Qwen3.6 heads",
    ),
    "z-lab/Qwen3.5-35B-A3B-DFlash, of April": row(
        "dflash",
        QWEN35_35B,
        OF_2048,
        z_lab(
            [1, 10, 19, 28, 37],
            248070,
            16,
            layer_types=["full_attention"] * 8,
            sliding_window=None,
        ),
        {"taps": (2, 11, 20, 29, 38), "longest_draft": 15, "windows": ()},
        layers=8,
    ),
    "z-lab/Qwen3.5-122B-A10B-DFlash": row(
        "dflash",
        QWEN35_122B,
        (9216, 32, 8, 128),
        newer([1, 7, 14, 20, 26, 32, 39, 45]),
        LATEST | {"taps": (2, 8, 15, 21, 27, 33, 40, 46)},
        layers=6,
        published=1.44 * GIB,
        assumed="the mask token, that of the newer Qwen3.6 heads",
    ),
    "z-lab/Qwen3.6-27B-DFlash": row(
        "dflash",
        QWEN_27B,
        OF_27B,
        z_lab([1, 16, 31, 46, 61], 248070, 16, **sliding(5, 2048)),
        WITH_LAST_FULL,
        published=3.22 * GIB,
    ),
    "z-lab/Qwen3.6-35B-A3B-DFlash": row(
        "dflash",
        QWEN35_35B,
        (6144, 32, 8, 128),
        newer(EIGHT_OF_40),
        LATEST,
        layers=6,
        published=0.72 * GIB,
    ),
    "z-lab/gemma4-12B-it-DFlash": row(
        "dflash",
        GEMMA_12B,
        (7680, 32, 8, 128),
        z_lab([1, 10, 19, 27, 36, 45], 4, 16, final_logit_softcapping=30.0, **sliding(5, 2048)),
        WITH_LAST_FULL | {"taps": (2, 11, 20, 28, 37, 46), "logit_softcap": 30.0},
        published=2 * 0.73e9,
        assumed="sizes and ids, by the rule of the 26B's and 31B's: they come to the .73 billion "
        "parameters that its page counts",
    ),
    "z-lab/gemma-4-26B-A4B-it-DFlash": row(
        "dflash",
        GEMMA_26B,
        (5632, 32, 8, 128),
        z_lab([1, 6, 11, 17, 22, 27], 4, 16, final_logit_softcapping=30.0, **sliding(5, 2048)),
        WITH_LAST_FULL | {"taps": (2, 7, 12, 18, 23, 28)},
        published=0.80 * GIB,
    ),
    "z-lab/gemma-4-31B-it-DFlash": row(
        "dflash",
        GEMMA_31B,
        (10752, 64, 8, 128),
        z_lab([1, 12, 23, 35, 46, 57], 4, 16, final_logit_softcapping=30.0, **sliding(5, 2048)),
        WITH_LAST_FULL | {"taps": (2, 13, 24, 36, 47, 58)},
        published=2.86 * GIB,
    ),
    "meta-models/Muse-Glimmer-30B-assistant": row(
        "dflash",
        MUSE,
        (19968, 32, 8, 128),
        {
            "model_type": "muse_glimmer_assistant",
            "target_layer_ids": [1, 13, 25, 37, 49],
            "block_size": 16,
            "mask_token_id": 201818,
            "rope_theta": None,
        },
        {
            "taps": (2, 14, 26, 38, 50),
            "longest_draft": 15,
            "windows": (2049,) * 5,  # it counts the query apart
            "causal_layers": (),
            "rope_theta": 5e5,
            "scales_as_target": False,
        },
    ),
    # DFlash2
    "incoai/Qwen3.8-27B-DFlash2": row(
        "dflash2",
        QWEN_27B,
        OF_27B,
        {"architectures": ["DFlash2DraftModel"], "is_causal": False, **ALL_SLIDE}
        | {"dflash_config": QWEN38_TWO | {"selector_top_k": 16}},
        TWO
        | {"taps": (6, 20, 34, 48, 62), "longest_draft": 7}
        | {"windows": (2048,) * 5, "causal_layers": ()},
        published=3.85e9,
    ),
    "z-lab/Qwen3.8-27B-DFlash2": row(
        "dflash2",
        QWEN_27B,
        OF_27B,
        {"architectures": ["DFlash2DraftModel"], "is_causal": False, **ALL_SLIDE}
        | {"dflash_config": QWEN38_TWO | KERNELS},
        TWO | {"taps": (6, 20, 34, 48, 62), "longest_draft": 7},
        published=3.85e9,  # the same bytes as incoai's, by who compared them
    ),
    "incoai/Qwen3.6-35B-A3B-DFlash2": row(
        "dflash2",
        QWEN35_35B,
        (6144, 32, 8, 128),
        {
            "architectures": ["DFlash2DraftModel"],
            "is_causal": False,
            "layer_types": ["sliding_attention"] * 6,
            "sliding_window": 2048,
            "dflash_config": {
                "block_size": 8,
                "mask_token_id": 248077,
                "target_layer_ids": EIGHT_OF_40,
                **KERNELS,
            },
        },
        TWO | {"longest_draft": 7, "causal_layers": ()},
        layers=6,
    ),
    "z-lab/Muse-Glimmer-30B-DFlash2": row(
        "dflash2",
        MUSE,
        (19968, 32, 8, 128),
        {
            "architectures": ["DFlash2DraftModel"],
            "is_causal": False,
            **ALL_SLIDE,
            "dflash_config": {
                "block_size": 16,
                "mask_token_id": 201818,
                "target_layer_ids": [1, 13, 25, 37, 49],
                "output_multiplier": 0.196,
                "final_logit_softcapping": 20.0,
                **KERNELS,
            },
        },
        TWO
        | {"taps": (2, 14, 26, 38, 50), "longest_draft": 15}
        | {"output_multiplier": 0.196, "logit_softcap": 20.0},
        published=2 * 2.77e9,
        assumed="the widths of its layers, those of the assistant",
    ),
    "RedHatAI/gemma-4-31B-it-speculator.dflash2": row(
        "dflash2",
        GEMMA_31B,
        (10752, 64, 8, 128),
        nested(
            "dflash2",
            [2, 16, 30, 44, 57],
            4,
            8,
            ALL_SLIDE,
            draft_vocab_size=32000,
            sliding_window_non_causal=True,
            **KERNELS,
        ),
        TWO
        | {"longest_draft": 7, "taps": (2, 16, 30, 44, 57), "scales_as_target": False}
        | {"draft_vocab_size": 32000, "window_from": "anchor"},
        draft=32000,
        assumed="all sizes, z-lab's for this target, and ids: no page of it was found, only those "
        "of its .eagle3, .dflash and .dspark siblings",
    ),
    # DSpark
    "deepseek-ai/dspark_qwen3_4b_block7": row(
        "dspark",
        QWEN3_4B,
        (9728, 32, 8, 128),
        deep_spec([1, 9, 17, 25, 33], 151669, 7),
        {"taps": (2, 10, 18, 26, 34), "longest_draft": 7, "embed_source": "file"},
        own=True,
        published=2.79e9,
    ),
    "deepseek-ai/dspark_qwen3_8b_block7": row(
        "dspark",
        QWEN3_8B,
        OF_8B,
        deep_spec([1, 9, 17, 25, 33], 151669, 7),
        {"longest_draft": 7, "embed_source": "file", "lm_head_source": "file"},
        own=True,
        published=4.74e9,
    ),
    "deepseek-ai/dspark_qwen3_14b_block7": row(
        "dspark",
        QWEN3_14B,
        (17408, 40, 8, 128),
        deep_spec([1, 10, 19, 28, 37], 151669, 7),
        {"taps": (2, 11, 20, 29, 38), "longest_draft": 7, "lm_head_source": "file"},
        own=True,
        published=2 * 3.42e9,
    ),
    "deepseek-ai/dspark_qwen3_32b_block7": row(
        "dspark",
        QWEN3_32B,
        (25600, 64, 8, 128),
        deep_spec([1, 16, 31, 46, 61], 151669, 7),
        {"taps": (2, 17, 32, 47, 62), "longest_draft": 7, "num_heads": 64},
        own=True,
        assumed="all of it: layers as the target's, by the rule of its smaller siblings, and "
        "the ids of a fork of the trainer. DeepSpec's own list ends with the 14B",
    ),
    "satgeze/Qwen3.5-0.8B-DSpark": row(
        "dspark",
        QWEN35_1B,
        (3584, 16, 8, 128),
        deep_spec([1, 6, 11, 16, 21], 248070, 7, **NOISE) | {"model_type": "qwen3_5_text"},
        {"longest_draft": 7, "rope_theta": 1e7, "embed_source": "target"},
        gguf=438.3e6,
        assumed="ids and mask; heads, what the bytes of its GGUF in 16 bits leave room for; and "
        "whether its other file has tables of its own",
    ),
    "satgeze/Qwen3.6-27B-DSpark": row(
        "dspark",
        QWEN_27B,
        OF_27B,
        deep_spec([1, 16, 31, 46, 61], 248070, 15, **NOISE),
        {"longest_draft": 15, "rope_theta": 1e7, "embed_source": "file", "first_slot": 0},
        own=True,
        published=8.80e9,  # no room for the gated queries that attn_output_gate would mean
        assumed="ids and mask, DeepSpec's for 64 layers",
    ),
    "DimInfer/Qwen3.8-27B-Dspark-v1": row(
        "dspark",
        QWEN_27B,
        OF_27B,
        deep_spec([1, 16, 31, 46, 61], 248200, 15) | {"model_type": "qwen3_5_text"},
        {"taps": (2, 17, 32, 47, 62), "longest_draft": 15, "embed_source": "target"},
        published=3.71e9,
    ),
    "RadixArk/Qwen3.8-27B-DSpark": row(
        "dspark",
        QWEN_27B,
        OF_27B,
        {
            "architectures": ["DSparkDraftModel"],
            "block_size": 7,
            "layer_types": ["full_attention"] * 5,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_position_embeddings": 262144,
            "rope_parameters": YARN,
            "dflash_config": {
                "mask_token_id": 248070,
                "projector_type": "dspark",
                "target_layer_ids": [5, 19, 33, 47, 61],
                "markov_rank": 256,
            },
        },
        {
            "taps": (6, 20, 34, 48, 62),
            "longest_draft": 7,
            "windows": (),
            "rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"},
        },
        published=2 * 1.86e9,
    ),
    "RedHatAI/Qwen3.8-27B-speculator.dspark": row(
        "dspark",
        QWEN_27B,
        (17408, 40, 8, 128),
        nested("dspark", [4, 12, 20, 28, 36, 44, 52, 60], 248070, 8, ALL_SLIDE, **drafts(8)),
        {
            "taps": (4, 12, 20, 28, 36, 44, 52, 60),
            "longest_draft": 8,
            "windows": (2048,) * 5,
            "window_from": "anchor",
            "causal_layers": (0, 1, 2, 3, 4),
        },
        published=3.98e9,
        assumed="number of heads: 40 come to the bytes of its file, 32 do not",
    ),
    "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark": row(
        "dspark",
        QWEN35_35B,
        OF_2048,
        nested(
            "dspark",
            [2, 11, 20, 29, 38],
            248070,
            8,
            ALL_SLIDE,
            sample_from_anchor=True,
            draft_vocab_size=32000,
        ),
        {"longest_draft": 8, "first_slot": 0, "draft_vocab_size": 32000},
        draft=32000,
        own=True,
        published=1.90e9,
        assumed="ids; widths of its layers and a table of its own come to the bytes of its file",
    ),
    "makora-ai/gemma4-26b-a4b-dspark": row(
        "dspark",
        GEMMA_26B,
        (2112, 16, 8, 256),
        nested("dspark", [3, 10, 18, 25, 28], 4, 7, {}, draft_vocab_size=32000, **drafts(6)),
        {
            "taps": (3, 10, 18, 25, 28),
            "longest_draft": 6,
            "first_slot": 1,
            "draft_vocab_size": 32000,
            "embed_source": "file",
        },
        draft=32000,
        own=True,
        published=2.4116e9,
        assumed="MLP and number of heads, the target's: they come to the bytes of its file",
    ),
    "deepseek-ai/dspark_gemma4_12b_block7": row(
        "dspark",
        GEMMA_12B,
        (15360, 16, 1, 512),
        {
            "architectures": ["Gemma4DSparkModel"],
            "model_type": "gemma4_text",
            "head_dim": 256,
            "global_head_dim": 512,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "block_size": 7,
            "mask_token_id": 4,
            "target_layer_ids": [5, 17, 29, 41, 46],
            "markov_rank": 256,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_parameters": {"full_attention": GEMMA_ROPE},
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
        own=True,
        published=6.86e9,
    ),
    "rasyosef/gemma-4-E2B-it-dspark": row(
        "dspark",
        GEMMA_E2B,
        (6144, 12, 4, 128),
        nested(
            "dspark",
            [2, 12, 22, 32],
            4,
            5,
            {},
            sample_from_anchor=True,
            draft_vocab_size=50000,
        ),
        {"taps": (2, 12, 22, 32), "longest_draft": 5, "draft_vocab_size": 50000},
        layers=3,
        draft=50000,
        rank=192,
        published=2 * 249838849,
        assumed="widths, those of its .dflash2 sibling; the rank, what the parameters leave",
    ),
    "rasyosef/gemma-4-E4B-it-dspark": row(
        "dspark",
        GEMMA_E4B,
        (10240, 16, 4, 128),
        nested(
            "dspark",
            [2, 15, 28, 39],
            4,
            5,
            {},
            sample_from_anchor=True,
            draft_vocab_size=50000,
        ),
        {"longest_draft": 5, "draft_vocab_size": 50000, "scales_as_target": False},
        layers=3,
        draft=50000,
        rank=192,
        assumed="all sizes and ids, by the rule of the E2B's: no page with them was found",
    ),
    "DaoCloud/Muse-Glimmer-30B-DSpark": row(
        "dspark",
        MUSE,
        (19968, 32, 8, 128),
        nested(
            "dspark",
            [2, 14, 26, 38, 50],
            201818,
            15,
            {**ALL_SLIDE, "use_sliding_window": True, "rms_norm_eps": 1e-5}
            | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            sample_from_anchor=True,
            sliding_window_non_causal=False,
            draft_vocab_size=202048,
            **drafts(15),
        ),
        {
            "taps": (2, 14, 26, 38, 50),
            "longest_draft": 15,
            "windows": (2048,) * 5,
            "causal_layers": (0, 1, 2, 3, 4),
            "rope_theta": 5e5,
            "embed_source": "target",
        },
        assumed="widths, those of the assistant that it was trained from",
    ),
    "LiquidAI/LFM2.5-1.2B-Instruct-DSpark": row(
        "dspark",
        LFM_1B,
        LIQUID,
        liquid([1, 5, 9, 12, 14], 17),
        {"longest_draft": 9, "rope_traditional": True},
        assumed="ids and mask",
    ),
    "LiquidAI/LFM2.5-2.6B-DSpark": row(
        "dspark",
        LFM_2B,
        LIQUID,
        liquid([2, 9, 17, 21, 27], 125017),
        {"taps": (3, 10, 18, 22, 28), "longest_draft": 9, "rope_traditional": True},
        published=2 * 327.7e6,
    ),
    "LiquidAI/LFM2.5-8B-A1B-DSpark": row(
        "dspark",
        LFM_8B,
        LIQUID,
        liquid([2, 6, 10, 14, 18], 125017, rope_theta=5e6),
        {"taps": (3, 7, 11, 15, 19), "longest_draft": 9, "rope_theta": 5e6},
    ),
    "openbmb/MiniCPM5-2B-DSpark": row(
        "dspark",
        MINICPM_2B,
        (6144, 16, 2, 128),
        deep_spec([1, 10, 20, 30, 39], 75982, 7, projector_type="dspark"),
        {"taps": (2, 11, 21, 31, 40), "longest_draft": 7, "lm_head_source": "target"},
        published=2 * 324e6,
    ),
}


def block_shapes(one: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a drafter of blocks, under the names of its files."""
    config, kind = one["config"], one["kind"]
    _, h, vocab = one["target"]
    layer = config.get("transformer_layer_config") or config
    mlp, heads = layer["intermediate_size"], layer["num_attention_heads"]
    is_gemma = "global_head_dim" in layer
    dim = layer["global_head_dim" if is_gemma else "head_dim"]
    kv = layer["num_global_key_value_heads" if is_gemma else "num_key_value_heads"]
    draft, rank = one.get("draft", vocab), one.get("rank", 256)
    ids = config.get("aux_hidden_state_layer_ids") or config.get("target_layer_ids")
    ids = ids or config["dflash_config"]["target_layer_ids"]
    inside: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads * dim, h),
        "self_attn.k_proj.weight": (kv * dim, h),
        "self_attn.v_proj.weight": (kv * dim, h),
        "self_attn.o_proj.weight": (h, heads * dim),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "mlp.gate_proj.weight": (mlp, h),
        "mlp.up_proj.weight": (mlp, h),
        "mlp.down_proj.weight": (h, mlp),
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
    }
    if layer.get("attention_bias"):
        for name in "qkvo":
            inside[f"self_attn.{name}_proj.bias"] = inside[f"self_attn.{name}_proj.weight"][:1]
    if kind == "dflash2":
        for name in ("attention_conv", "mlp_conv"):
            inside[f"{name}.base_kernel"] = (2, 2, h)
            inside[f"{name}.kernel_projection.weight"] = (4 * h // 16, h)
    if is_gemma:
        del inside["self_attn.v_proj.weight"]  # keys are values
        inside |= {"pre_feedforward_layernorm.weight": (h,), "layer_scalar": (1,)}
        inside["post_feedforward_layernorm.weight"] = (h,)
    found = {f"layers.{i}.{n}": s for i in range(one["layers"]) for n, s in inside.items()}
    found |= {"fc.weight": (h, len(ids) * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    if config.get("model_type") == "muse_glimmer_assistant":
        found["encoder.fc.weight"] = found.pop("fc.weight")
        found["encoder.output_norm_enc.weight"] = found.pop("hidden_norm.weight")
    if kind == "dflash2":
        found["candidate_selector.predecessor_codebook"] = (vocab, rank)
        found["candidate_selector.successor_codebook"] = (draft, rank)
        found["candidate_selector.hidden_projection.weight"] = (rank, h)
    if kind == "dspark":
        found["markov_head.markov_w1.weight"] = (vocab, rank)
        found["markov_head.markov_w2.weight"] = (draft, rank)
        found |= {"confidence_head.proj.weight": (1, h + rank), "confidence_head.proj.bias": (1,)}
    if one.get("own"):
        found["embed_tokens.weight"] = (vocab, h)
    if one.get("own") or draft < vocab:
        found["lm_head.weight"] = (draft, h)
    if draft < vocab:
        found |= {"d2t": (draft,), "t2d": (vocab,)}
    return found


def assistant(target: tuple[int, int, int], heads: int, is_small: bool = False) -> dict[str, Any]:
    """The config of google/gemma-4-*-it-assistant, as tests of vLLM, mlx-swift and others have it.

    With its target's sizes and the shape of each tensor; the small ones choose among clusters.
    """
    _, width, vocab = target
    h, mlp = (256, 2048) if is_small else (1024, 8192)
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    text = {"layer_types": kinds, "hidden_size": h, "num_attention_heads": heads, "head_dim": 256}
    config = {
        "model_type": "gemma4_unified_assistant" if target == GEMMA_12B else "gemma4_assistant",
        "backbone_hidden_size": width,
        "use_ordered_embeddings": is_small,
        "centroid_intermediate_top_k": 32,
        "text_config": text | {"global_head_dim": 512, "num_kv_shared_layers": 4},
    }
    found: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (h, 2 * width),
        "post_projection.weight": (width, h),
        "model.embed_tokens.weight": (vocab, h),
        "model.norm.weight": (h,),
    }
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for i, kind in enumerate(kinds):
        dim = 512 if kind == "full_attention" else 256
        layer: dict[str, tuple[int, ...]] = {f"{name}_layernorm.weight": (h,) for name in norms}
        layer |= {"self_attn.q_proj.weight": (heads * dim, h), "self_attn.q_norm.weight": (dim,)}
        layer |= {"self_attn.o_proj.weight": (h, heads * dim), "layer_scalar": (1,)}
        layer |= {f"mlp.{name}_proj.weight": (mlp, h) for name in ("gate", "up")}
        layer["mlp.down_proj.weight"] = (h, mlp)
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if is_small:
        found["masked_embedding.centroids.weight"] = (2048, h)
        found["masked_embedding.token_ordering"] = (vocab,)
    return {"target": target, "config": config, "shapes": found}


ASSISTANTS = {
    "google/gemma-4-E2B-it-assistant": assistant(GEMMA_E2B, 4, is_small=True),
    "google/gemma-4-E4B-it-assistant": assistant(GEMMA_E4B, 4, is_small=True),
    "google/gemma-4-12B-it-assistant": assistant(GEMMA_12B, 16),
    "google/gemma-4-26B-A4B-it-assistant": assistant(GEMMA_26B, 16),
    "google/gemma-4-31B-it-assistant": assistant(GEMMA_31B, 32),
}
