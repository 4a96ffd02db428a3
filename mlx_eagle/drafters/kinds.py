"""What the fields of a converted head's ``config.json`` may hold."""

from mlx_eagle.system.json_schema import (
    COUNT,
    COUNTS,
    NUMBER,
    OBJECT,
    TEXT,
    TRUTH,
    Kind,
    Table,
    is_whole,
    number_above,
    one_of,
    whole,
)

SIZE = whole(1, 2**24)
FEW = whole(1, 1024)
BITS = Kind("2, 3, 4, 5, 6 or 8", lambda v: is_whole(v) and v in (2, 3, 4, 5, 6, 8))
GROUP = Kind("32, 64 or 128", lambda v: is_whole(v) and v in (32, 64, 128))
PACKING: Table = {"bits": BITS, "group_size": GROUP}
LATENT: Table = dict.fromkeys(
    ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), SIZE
)
"""Sizes of multi-head latent attention; q_lora_rank is None where queries are not compressed."""
POSITION_SCALE: Table = {
    "beta": NUMBER,
    "original_max_position_embeddings": number_above(0),
}
HEAD: Table = {
    **dict.fromkeys(
        ("hidden_size", "target_hidden_size", "head_dim", "intermediate_size", "vocab_size"), SIZE
    ),
    **dict.fromkeys(("draft_vocab_size", "max_position_embeddings", "sliding_window"), SIZE),
    **dict.fromkeys(("num_layers", "num_heads", "num_kv_heads", "num_aux"), FEW),
    **dict.fromkeys(("parallel_head_layers", "parallel_outputs"), FEW),
    "num_parallel_heads": whole(0, 1024),
    "mask_token_id": whole(0, 2**24),
    "latent": LATENT,
    **dict.fromkeys(("softmax_scale", "embed_scale", "logit_softcap"), number_above(0)),
    "position_scale": POSITION_SCALE,
    "values": one_of("projected", "keys"),
    **dict.fromkeys(
        (
            "fc_bias",
            "norm_before_residual",
            "norm_output",
            "qk_norm",
            "attention_bias",
            "attention_out_bias",
            "mlp_bias",
            "uses_aux",
            "embedding_norm",
            "state_norm",
            "final_norm",
            "has_d2t",
            "fusion_norm",
            "value_norm",
            "branch_norms",
            "layer_scalar",
            "parallel_head_bias",
        ),
        TRUTH,
    ),
    "rms_norm_eps": number_above(0, 1),
    "aux_boundary_ids": COUNTS,
    "aux_nested_ids": COUNTS,
    "full_attention_layers": COUNTS,
    "aux_ids_source": TEXT,
    "model_type": TEXT,
    "family": TEXT,
    "speculative_tokens_hint": COUNT,
    "hidden_act": one_of("silu", "gelu", "gelu_pytorch_tanh"),
    "pre_fc_norm": one_of("none", "concat", "per_feature"),
    "layer_input": one_of("first", "every", "none"),
    "fc_input": one_of("features", "embedding_and_state", "none"),
    "embed_source": one_of("file", "target"),
    "lm_head_source": one_of("file", "target", "target_rows"),
    "rope": {
        "type": TEXT,
        "theta": number_above(1, 1e15),
        "dims": SIZE,
        "traditional": TRUTH,
        "scaling": {
            "type": one_of("linear", "dynamic", "llama3", "yarn", "longrope", "proportional"),
            **dict.fromkeys(
                (
                    "factor",
                    "low_freq_factor",
                    "high_freq_factor",
                    "original_max_position_embeddings",
                    "beta_fast",
                    "beta_slow",
                    "partial_rotary_factor",
                ),
                number_above(0),
            ),
            **dict.fromkeys(("mscale", "mscale_all_dim"), NUMBER),
            **dict.fromkeys(
                ("short_factor", "long_factor"),
                Kind(
                    "a list of numbers above 0",
                    lambda v: isinstance(v, list | tuple) and all(map(number_above(0).holds, v)),
                ),
            ),
        },
    },
    "quantization": PACKING,
    "source": {"path": TEXT, "files": OBJECT},
}
REQUIRED = (
    "hidden_size",
    "target_hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "draft_vocab_size",
)
