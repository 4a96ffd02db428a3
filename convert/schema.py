"""What the keys of configs may hold that the converter reads: published ones, and targets'.

After ``json_schema.check`` with one of these tables no type needs to be asked for again. What a
config says that no table has is only looked at as text.
"""

from mlx_eagle.system.json_schema import (
    BOOL,
    COUNT,
    INT_LIST,
    LIST,
    OBJECT,
    TEXT,
    TEXTS,
    FieldType,
    Table,
    number_above,
    whole,
)

SIZE = whole(1, 2**24)
FRACTION = number_above(0, 1)
BASE = number_above(1, 1e15)
POSITIVE = number_above(1e-6, 1e9)
WEIGHT = number_above(-1e6, 1e6)
FACTORS = FieldType(
    "a list of numbers above 0", lambda v: isinstance(v, list) and all(map(POSITIVE.holds, v))
)
SCALING: Table = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": BASE,
    "factor": POSITIVE,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "original_max_position_embeddings": POSITIVE,
    "beta_fast": POSITIVE,
    "beta_slow": POSITIVE,
    "mscale": WEIGHT,
    "mscale_all_dim": WEIGHT,
    "attention_factor": POSITIVE,
    "short_factor": FACTORS,
    "partial_rotary_factor": FRACTION,
    "truncate": BOOL,
    "llama_4_scaling_beta": WEIGHT,
    "apply_yarn_scaling": BOOL,
}
LATENT: Table = dict.fromkeys(
    ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), COUNT
)
LAYER: Table = {
    **LATENT,
    "rope_interleave": BOOL,
    "llama_4_scaling": {"beta": WEIGHT, "original_max_position_embeddings": POSITIVE},
    "model_type": TEXT,
    "hidden_size": SIZE,
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE,
    "head_dim": SIZE,
    "vocab_size": SIZE,
    "max_position_embeddings": SIZE,
    "rms_norm_eps": number_above(0, 1),
    "hidden_act": TEXT,
    "hidden_activation": TEXT,
    "qk_norm": BOOL,
    "attention_bias": BOOL,
    "mlp_bias": BOOL,
    "layer_types": TEXTS,
    "sliding_window": COUNT,
    "use_sliding_window": BOOL,
    "rope_theta": BASE,
    "partial_rotary_factor": FRACTION,
    "rotary_dim": SIZE,
    "rope_scaling": SCALING,
    "rope_parameters": {
        **SCALING,
        "sliding_attention": SCALING,
        "full_attention": SCALING,
    },
}
HEAD: Table = {
    **LAYER,
    "target_hidden_size": COUNT,
    "draft_vocab_size": COUNT,
    "num_aux_hidden_states": COUNT,
    "num_target_layers": COUNT,
    "target_layer_ids": INT_LIST,
    "eagle_aux_hidden_state_layer_ids": INT_LIST,
    "norm_before_fc": BOOL,
    "norm_before_residual": BOOL,
    "norm_output": BOOL,
    "return_hidden_post_norm": BOOL,
    "fc_norm": BOOL,
    "use_aux_norm": BOOL,
    "use_input_layernorm_in_first_layer": BOOL,
    "use_last_layernorm": BOOL,
    "embed_requires_grad": BOOL,
    "parallel_drafting": BOOL,
    "parallel_draft_step": whole(1, 1024),
    "early_stop_method": TEXT,
    "attention_k_eq_v": BOOL,
    "num_global_key_value_heads": SIZE,
    "final_logit_softcapping": POSITIVE,
    "mask_token_id": COUNT,
    "pard_token": COUNT,
    "ptd_token_id": COUNT,
}
CONFIG: Table = {
    **HEAD,
    "architectures": TEXTS,
    "quantization_config": OBJECT,
    "compression_config": OBJECT,
    "eos_token_id": FieldType(
        "a token or a list of tokens",
        lambda value: COUNT.holds(value) or INT_LIST.holds(value),
    ),
    "eagle_config": HEAD,
    "transformer_layer_config": HEAD,
    "speculators_config": {"proposal_methods": LIST},
}
"""Of a published head."""

DEPTH = ("num_hidden_layers", "n_layer", "n_layers")
SIZES: Table = dict.fromkeys(("hidden_size", "n_embd", "d_model", "vocab_size", *DEPTH), SIZE)
TARGET: Table = {
    **SIZES,
    "text_config": SIZES,
    "quantization": OBJECT,
    "eos_token_id": CONFIG["eos_token_id"],
}
"""Of a target."""
PACKING: Table = {"group_size": whole(1, 4096), "bits": whole(1, 16), "mode": TEXT}
"""Of the way that a target's matrix is quantized."""
