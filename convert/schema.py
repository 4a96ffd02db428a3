"""What the keys of configs may hold that the converter reads: published ones, and targets'.

After ``json_schema.check`` with one of these tables no type needs to be asked for again. What a
config says that no table has is only looked at as text.
"""

from mlx_eagle.drafters.config import LATENT
from mlx_eagle.drafters.folder import SIZE

from ..system.fields import (
    BOOL,
    COUNT,
    INT_LIST,
    LIST,
    OBJECT,
    TEXT,
    TEXTS,
    FieldType,
    Table,
    list_of,
    number_above,
    whole,
)

FRACTION = number_above(0, 1)
BASE = number_above(1, 1e15)
POSITIVE = number_above(1e-6, 1e9)
WEIGHT = number_above(-1e6, 1e6)
FACTORS = list_of(POSITIVE, "numbers above 0")
SCALING: Table = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    "rope_theta": BASE,
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), POSITIVE),
    **dict.fromkeys(("original_max_position_embeddings", "attention_factor"), POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow"), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), WEIGHT),
    "short_factor": FACTORS,
    "partial_rotary_factor": FRACTION,
    **dict.fromkeys(("truncate", "apply_yarn_scaling"), BOOL),
}
LAYER: Table = {
    **dict.fromkeys(LATENT, COUNT),
    "llama_4_scaling": {"beta": WEIGHT, "original_max_position_embeddings": POSITIVE},
    **dict.fromkeys(("model_type", "hidden_act", "hidden_activation"), TEXT),
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads"), SIZE),
    **dict.fromkeys(("head_dim", "rotary_dim", "vocab_size", "max_position_embeddings"), SIZE),
    "rms_norm_eps": number_above(0, 1),
    **dict.fromkeys(("qk_norm", "attention_bias", "mlp_bias"), BOOL),
    **dict.fromkeys(("use_sliding_window", "rope_interleave"), BOOL),
    "layer_types": TEXTS,
    "sliding_window": COUNT,
    "rope_theta": BASE,
    "partial_rotary_factor": FRACTION,
    "rope_scaling": SCALING,
    "rope_parameters": {**SCALING, "sliding_attention": SCALING, "full_attention": SCALING},
}
HEAD: Table = {
    **LAYER,
    **dict.fromkeys(("target_hidden_size", "draft_vocab_size", "num_target_layers"), COUNT),
    **dict.fromkeys(("num_aux_hidden_states", "mask_token_id"), COUNT),
    **dict.fromkeys(("pard_token", "ptd_token_id"), COUNT),
    **dict.fromkeys(("target_layer_ids", "eagle_aux_hidden_state_layer_ids"), INT_LIST),
    **dict.fromkeys(("norm_before_fc", "norm_before_residual", "norm_output"), BOOL),
    **dict.fromkeys(("return_hidden_post_norm", "fc_norm", "use_aux_norm"), BOOL),
    **dict.fromkeys(("use_input_layernorm_in_first_layer", "use_last_layernorm"), BOOL),
    **dict.fromkeys(("embed_requires_grad", "parallel_drafting", "attention_k_eq_v"), BOOL),
    "parallel_draft_step": whole(1, 1024),
    "early_stop_method": TEXT,
    "num_global_key_value_heads": SIZE,
    "final_logit_softcapping": POSITIVE,
}
CONFIG: Table = {
    **HEAD,
    "architectures": TEXTS,
    "quantization_config": OBJECT,
    "compression_config": OBJECT,
    "eos_token_id": FieldType(
        "a token or a list of tokens", lambda value: COUNT.holds(value) or INT_LIST.holds(value)
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
