"""Freeze transformers' states of tiny MTP layers, for tests/drafters/test_mtp_families.py.

In an environment with transformers 5.24 and torch beside what the tests need, from the top of the
repository:

    PYTHONPATH=tests/support:. python tools/golden/make_mtp_transformers.py

These are the layers after the last one of DeepSeek's and GLM's models, one as speculators trains
it for Qwen3, and those of Step 3.5 and MiMo-V2-Flash, each of which predicts one token. Layers
that choose slots to attend to choose fewer than there are. The tensors and their inputs come from
NumPy's seeded generator, so that only the states have to be kept.
"""

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mtp_checkpoints import (
    CHOOSING,
    FAMILIES,
    STEPPED,
    Published,
    entering,
    qwen3_by_speculators,
)
from transformers.modeling_layers import MtpLayer

GOLDEN = Path(__file__).parents[2] / "tests" / "support" / "golden"
CLASSES = {
    "deepseek-v3": ("deepseek_v3", "DeepseekV3"),
    "deepseek-v3.2": ("deepseek_v32", "DeepseekV32"),
    "glm-4.5": ("glm4_moe", "Glm4Moe"),
    "glm-4.7-flash": ("glm4_moe_lite", "Glm4MoeLite"),
    "glm-5": ("glm_moe_dsa", "GlmMoeDsa"),
    "qwen3": ("qwen3", "Qwen3"),
}


STEPS = {
    "step-3.5": ("step3p7", "Step3p7", "Step3p7TextConfig"),
    "mimo-v2-flash": ("mimo_v2_flash", "MiMoV2Flash"),
}
NAMES = {
    "token_layernorm.": "enorm.",
    "enorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "hnorm.": "hnorm.",
    "input_proj.": "eh_proj.",
    "eh_proj.": "eh_proj.",
    "final_layernorm.": "post_norm.",
    "shared_head.norm.": "post_norm.",
    "transformer.shared_head.norm.": "post_norm.",
}
"""Beginnings of published names, and the library's; all other tensors are the inner layer's."""


def parts_of(module: str, prefix: str, config_name: str = "") -> tuple[Any, ...]:
    """Return the library's classes of config, layer, norm and rotary embedding."""
    place = f"transformers.models.{module}"
    own = import_module(f"{place}.modeling_{module}")
    configs = import_module(f"{place}.configuration_{module}")
    config = getattr(configs, config_name or f"{prefix}Config")
    names = ("DecoderLayer", "RMSNorm", "RotaryEmbedding")
    return (config, *(getattr(own, f"{prefix}{name}") for name in names))


def renamed(bare: str) -> str:
    known = next((start for start in NAMES if bare.startswith(start)), None)
    return bare.replace(known, NAMES[known]) if known else f"mtp_block.{bare}"


def weights_of(part: Published, num_layers: int) -> dict[str, torch.Tensor]:
    """Rename the published tensors as in the library: experts in one tensor, gate before up."""
    found = {}
    experts = {}
    for name, array in part.tensors.items():
        bare = name.removeprefix(f"model.layers.{num_layers}.").removeprefix("mtp_layers.0.")
        if match := re.match(r"mlp\.experts\.(\d+)\.(\w+)_proj\.", bare):
            experts[int(match[1]), match[2]] = torch.tensor(array)
        elif not bare.startswith(("shared_head.head.", "embed_tokens.")):
            found[renamed(bare)] = torch.tensor(array)
    if not experts:
        return found
    num_experts = 1 + max(index for index, _ in experts)
    both = [torch.cat([experts[i, "gate"], experts[i, "up"]]) for i in range(num_experts)]
    down = [experts[i, "down"] for i in range(num_experts)]
    own = "mtp_block.mlp.experts."
    return found | {f"{own}gate_up_proj": torch.stack(both), f"{own}down_proj": torch.stack(down)}


def run(
    model: MtpLayer,
    weights: dict[str, torch.Tensor],
    rotary: torch.nn.Module,
    kind: tuple[str, ...] = (),
    window: int = sys.maxsize,
) -> np.ndarray:
    """Compute the states (n, h) of a layer from its inputs; rows see each other in a ``window``.

    ``kind`` are further arguments of its rotary embedding.
    """
    own = model.state_dict()
    assert own.keys() == weights.keys(), own.keys() ^ weights.keys()
    model.load_state_dict(weights)
    embeddings, hidden = (torch.tensor(np.array(array))[None] for array in entering())
    places = torch.arange(embeddings.shape[1])[None]
    far = places[0][:, None] - places[0]
    mask = torch.zeros(far.shape).masked_fill((far < 0) | (far >= window), -torch.inf)[None, None]
    with torch.no_grad():
        ropes = rotary(embeddings, places, *kind)
        return model(embeddings, hidden, ropes, mask, places, None)[0].numpy()


def states(name: str) -> np.ndarray:
    """Compute the states (n, h) of the layer of this name from its inputs."""
    part = ({**FAMILIES, **CHOOSING, "qwen3": qwen3_by_speculators}[name])()
    num_layers = len(part.target.layers)
    make_config, layer, norm, rotary = parts_of(*CLASSES[name])
    values = {k: v for k, v in part.config.items() if v is not None and k != "model_type"}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if "partial_rotary_factor" in values:
        rope["partial_rotary_factor"] = values["partial_rotary_factor"]
    for key in ("rope_theta", "rope_scaling", "rope_parameters", "head_dim"):
        if key != "head_dim" or "kv_lora_rank" in values:
            values.pop(key, None)
    values["num_hidden_layers"] = num_layers + 1
    config = make_config(**values, rope_parameters=rope, attn_implementation="eager")
    model = MtpLayer(config, layer, norm, num_layers).eval()
    # Layers of GLM-5 also return the slots that they have chosen.
    model.mtp_block.register_forward_hook(lambda *a: a[2][0] if isinstance(a[2], tuple) else a[2])
    return run(model, weights_of(part, num_layers), rotary(config))


def step_config(name: str, make_config: Any, values: dict[str, Any], index: int) -> Any:
    """Make the library's config of a model whose only layer is layer ``index``."""
    common = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96}
    common |= {"num_attention_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-5}
    common |= {"mlp_layer_types": ["dense"], "attn_implementation": "eager"}
    if name == "step-3.5":
        kind = values["layer_types"][3 + index]
        return make_config(
            **common,
            layer_types=[kind],
            num_key_value_heads=2,
            sliding_window=values["sliding_window"],
            attention_other_setting=values["attention_other_setting"],
            rope_theta=[values["rope_theta"][3 + index]],
            partial_rotary_factors=[values["partial_rotary_factors"][3 + index]],
        )
    rope = {"rope_type": "default", "rope_theta": values["swa_rope_theta"]}
    rope["partial_rotary_factor"] = values["partial_rotary_factor"]
    return make_config(
        **common,
        layer_types=["sliding_attention"],
        num_key_value_heads=1,
        v_head_dim=12,
        sliding_window=values["sliding_window_size"],
        attention_value_scale=values["attention_value_scale"],
        rope_parameters={"sliding_attention": rope, "full_attention": rope},
    )


def step_states(name: str, index: int) -> np.ndarray:
    """Compute the states (n, h) of layer ``index``, after its norm."""
    part = STEPPED[name]()
    make_config, layer, norm, rotary = parts_of(*STEPS[name])
    config = step_config(name, make_config, part.config, index)
    start = part.naive.prefixes[index]
    weights = {}
    for full, array in part.tensors.items():
        bare = full.removeprefix(start)
        if bare == full or "shared_head.output" in bare:
            continue
        bare = bare.replace("attention_sink_bias", "sinks")
        bare = bare.replace("pre_mlp_layernorm", "post_attention_layernorm")
        weights[renamed(bare)] = torch.tensor(array)
    kind = config.layer_types[0]
    window = 6 if kind == "sliding_attention" else sys.maxsize
    model = MtpLayer(config, layer, norm, 0).eval()
    return run(model, weights, rotary(config), (kind,), window)


if __name__ == "__main__":
    made = {name: states(name) for name in CLASSES}
    made |= {f"{name}, {j}": step_states(name, j) for name in STEPS for j in range(3)}
    arrays = {name: mx.array(array) for name, array in made.items()}
    mx.save_safetensors(str(GOLDEN / "mtp-transformers.safetensors"), arrays)
    print({name: float(np.abs(array).max()) for name, array in made.items()})
