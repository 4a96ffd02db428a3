"""Mistral's own way to write a head's config, ``params.json``, in the usual keys.

As vLLM reads it; the names of the tensors are in ``families.py``.
"""

from collections.abc import Mapping
from typing import Any

MARK = "mistral_params"
"""Set in what is made of a params.json: rows of q and k are in Mistral's order then."""
KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "max_seq_len": "max_position_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "llama_4_scaling": "llama_4_scaling",
}
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
    "apply_scale": "apply_yarn_scaling",
}


def usual_keys(params: Mapping[str, Any]) -> dict[str, Any]:
    """The config that a ``params.json`` stands for."""
    config = {new: params[old] for old, new in KEYS.items() if params.get(old) is not None}
    yarn = params.get("yarn")
    if isinstance(yarn, Mapping):
        scaling = {new: yarn[old] for old, new in YARN.items() if yarn.get(old) is not None}
        # With apply_scale queries and keys grow; latent attention puts that into its scores.
        in_rope = scaling.get("apply_yarn_scaling", True) and "kv_lora_rank" not in config
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "mscale": 1.0,
            "mscale_all_dim": 0.0 if in_rope else 1.0,
            **scaling,
        }
    return config | {MARK: True}
