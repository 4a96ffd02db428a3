"""Types of the keys that the converter reads in the configs of published heads and of targets.

After ``fields.check`` with one of these tables nothing has to check a type again. A key that
is in no table is read as text only.
"""

from mlx_eagle.drafters.config import LATENT
from mlx_eagle.drafters.folder import SIZE
from mlx_eagle.system.fields import (
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


def _keys(kind: FieldType, names: str) -> Table:
    """A table with one type for all of these names."""
    return dict.fromkeys(names.split(), kind)


SCALING: Table = {
    **_keys(TEXT, "rope_type type"),
    "rope_theta": BASE,
    **_keys(POSITIVE, "factor low_freq_factor high_freq_factor beta_fast beta_slow"),
    **_keys(POSITIVE, "original_max_position_embeddings attention_factor"),
    **_keys(WEIGHT, "mscale mscale_all_dim llama_4_scaling_beta"),
    "short_factor": list_of(POSITIVE, "numbers above 0"),
    "partial_rotary_factor": FRACTION,
    **_keys(BOOL, "truncate apply_yarn_scaling"),
}
HEAD: Table = {
    **dict.fromkeys(LATENT, COUNT),
    "llama_4_scaling": {"beta": WEIGHT, "original_max_position_embeddings": POSITIVE},
    **_keys(TEXT, "model_type hidden_act hidden_activation"),
    **_keys(SIZE, "hidden_size num_attention_heads num_key_value_heads head_dim rotary_dim"),
    **_keys(SIZE, "vocab_size max_position_embeddings"),
    **_keys(FRACTION, "rms_norm_eps partial_rotary_factor"),
    **_keys(BOOL, "qk_norm attention_bias mlp_bias use_sliding_window rope_interleave"),
    "layer_types": TEXTS,
    "sliding_window": COUNT,
    "rope_theta": BASE,
    "rope_scaling": SCALING,
    "rope_parameters": {**SCALING, "sliding_attention": SCALING, "full_attention": SCALING},
    **_keys(COUNT, "target_hidden_size draft_vocab_size num_target_layers num_aux_hidden_states"),
    **_keys(COUNT, "mask_token_id pard_token ptd_token_id"),
    **_keys(INT_LIST, "target_layer_ids eagle_aux_hidden_state_layer_ids"),
    **_keys(BOOL, "norm_before_fc norm_before_residual norm_output return_hidden_post_norm"),
    **_keys(BOOL, "fc_norm use_aux_norm use_input_layernorm_in_first_layer use_last_layernorm"),
    **_keys(BOOL, "embed_requires_grad parallel_drafting attention_k_eq_v"),
    "parallel_draft_step": whole(1, 1024),
    "early_stop_method": TEXT,
    "num_global_key_value_heads": SIZE,
    "final_logit_softcapping": POSITIVE,
}
STOP_TOKENS = FieldType(
    "a token or a list of tokens", lambda value: COUNT.holds(value) or INT_LIST.holds(value)
)
CONFIG: Table = {
    **HEAD,
    "architectures": TEXTS,
    **_keys(OBJECT, "quantization_config compression_config"),
    "eos_token_id": STOP_TOKENS,
    "eagle_config": HEAD,
    "transformer_layer_config": HEAD,
    "speculators_config": {"proposal_methods": LIST},
}
"""The config of a published head."""

SIZES = _keys(SIZE, "hidden_size n_embd d_model vocab_size num_hidden_layers n_layer n_layers")
TARGET: Table = {
    **SIZES,
    "text_config": SIZES,
    "quantization": OBJECT,
    "eos_token_id": STOP_TOKENS,
}
"""The config of a target."""
PACKING: Table = {"group_size": whole(1, 4096), "bits": whole(1, 16), "mode": TEXT}
"""The entry that says how a target's matrix is quantized."""
