"""A converted head back in the official flat layout, as PyTorch engines read it.

Names and keys are those that vLLM, SGLang and SpecForge read of an EAGLE-3 head; what they cannot
say is refused.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.head_weights import read_head_config
from mlx_eagle.system.atomic_folder import new_folder
from mlx_eagle.system.safetensors import save_arrays

# What the flat layout has no key or name for, and the value that it stands for.
FIXED = {
    "latent": None,
    "softmax_scale": None,
    "position_scale": None,
    "values": "projected",
    "value_norm": False,
    "branch_norms": False,
    "layer_scalar": False,
    "embed_scale": 1.0,
    "logit_softcap": None,
    "mask_token_id": None,
    "num_parallel_heads": 0,
    "num_layers": 1,
    "uses_aux": True,
    "fc_input": "features",
    "layer_input": "first",
    "fc_bias": False,
    "norm_output": False,
    "qk_norm": False,
    "attention_bias": False,
    "attention_out_bias": False,
    "mlp_bias": False,
    "embedding_norm": True,
    "state_norm": True,
    "final_norm": True,
    "sliding_window": None,
    "num_aux": 3,
}


def to_pytorch(head: str, folder: str) -> dict[str, Any]:
    """Write the converted head in the folder ``head`` as a PyTorch one; its ``config.json``.

    ``folder`` must not exist; it gets ``config.json`` and ``model.safetensors`` with the names
    of SafeAILab's and SpecForge's checkpoints. Converting that again gives the same weights.
    Raises ValueError, one sentence, for a quantized head and for what the layout cannot say.
    """
    source, destination = Path(head).expanduser(), Path(folder).expanduser()
    if destination.exists():
        raise ValueError(f"{folder} is there already; remove it or choose another")
    values = read_head_config(source)
    if "quantization" in values:
        raise ValueError(
            f"{head} is quantized, and PyTorch engines read floats; convert its source again "
            "with --no-quantize, or train without --quantize"
        )
    config = Eagle3Config.from_dict(values, source / "config.json")
    _check(config, head)
    weights = dict(mx.load(str(source / "model.safetensors")))
    tensors = _tensors(config, weights, head)
    flat = _config(config, str(weights["fc.weight"].dtype).split(".")[-1])
    with new_folder(destination) as draft:
        save_arrays(draft / "model.safetensors", tensors, layout="pt")
        text = json.dumps(flat, indent=2) + "\n"
        (draft / "config.json").write_text(text, encoding="utf-8")
    return flat


def _check(config: Eagle3Config, head: str) -> None:
    for name, value in FIXED.items():
        found = getattr(config, name)
        if found != value:
            raise ValueError(
                f"{head} has {name} {found}, which the flat PyTorch layout cannot say (it means "
                f"{value}); it stays an MLX head"
            )
    if config.pre_fc_norm == "concat":
        raise ValueError(f"{head} norms its features as one, which the flat layout cannot say")
    if config.lm_head_source != "file":
        raise ValueError(
            f"{head} takes its output matrix from the target; convert its source again without "
            "--target"
        )


def _tensors(config: Eagle3Config, weights: dict[str, mx.array], head: str) -> dict[str, mx.array]:
    """The arrays under their official names, with both vocabulary maps."""
    offsets = weights.pop("d2t", None)
    size = config.draft_vocab_size
    if offsets is None:
        offsets = mx.zeros(size, mx.int32)
    ids = offsets.astype(mx.int64) + mx.arange(size, dtype=mx.int64)
    if ids.max().item() >= config.vocab_size:
        raise ValueError(f"{head} drafts token {ids.max().item()} of {config.vocab_size}")
    drafted = mx.zeros(config.vocab_size, mx.bool_)
    drafted[ids] = True
    named = {name.replace("layers.0.", "midlayer."): array for name, array in weights.items()}
    return {**named, "d2t": offsets.astype(mx.int64), "t2d": drafted}


def _config(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    c = config
    flat: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": c.hidden_act,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "rope_theta": c.rope["theta"],
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    if c.target_hidden_size != c.hidden_size:
        flat["target_hidden_size"] = c.target_hidden_size
    scaling = c.rope.get("scaling")
    if scaling:
        flat["rope_scaling"] = {"rope_type": scaling["type"], **scaling}
    dims = c.rope.get("dims")
    if dims and dims != c.head_dim:
        flat["partial_rotary_factor"] = dims / c.head_dim
    if c.pre_fc_norm == "per_feature":
        flat["fc_norm"] = True
    if c.norm_before_residual:
        flat["norm_before_residual"] = True
    key = "eagle_aux_hidden_state_layer_ids"
    if c.aux_nested_ids is not None:
        flat["eagle_config"] = {key: list(c.aux_nested_ids)}  # as they were found
    elif c.aux_boundary_ids is not None:
        # As vLLM numbers them: what enters these layers.
        flat[key] = list(c.aux_boundary_ids)
    return flat
