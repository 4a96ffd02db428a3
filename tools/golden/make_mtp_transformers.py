"""States that transformers computes from tiny MTP layers, for tests/drafters/test_mtp_families.py.

In an environment with transformers 5.24 and torch beside what the tests need, from the top of the
repository:

    PYTHONPATH=tests/support:. python tools/golden/make_mtp_transformers.py

These are the layers behind the last one of DeepSeek's and GLM's models, and one as speculators
trains it for Qwen3. Where they choose what
they attend to, they choose fewer slots than there are. The tensors and what enters them come from
NumPy's seeded generator, so that states are all there is to keep.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mtp_checkpoints import CHOOSING, FAMILIES, Published, entering, qwen3_by_speculators
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


def parts_of(module: str, prefix: str) -> tuple[Any, ...]:
    """The library's config, layer, norm and rotary embedding."""
    place = f"transformers.models.{module}"
    own = import_module(f"{place}.modeling_{module}")
    config = getattr(import_module(f"{place}.configuration_{module}"), f"{prefix}Config")
    names = ("DecoderLayer", "RMSNorm", "RotaryEmbedding")
    return (config, *(getattr(own, f"{prefix}{name}") for name in names))


SPECULATORS = {
    "token_layernorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "input_proj.": "eh_proj.",
    "final_layernorm.": "post_norm.",
}


def renamed_from_speculators(part: Published) -> dict[str, torch.Tensor]:
    """The same of speculators' names."""
    found = {}
    for name, array in part.tensors.items():
        bare = name.removeprefix("mtp_layers.0.")
        known = next((start for start in SPECULATORS if bare.startswith(start)), None)
        new = bare.replace(known, SPECULATORS[known]) if known else f"mtp_block.{bare}"
        found[new] = torch.tensor(array)
    return found


def renamed(part: Published, num_layers: int) -> dict[str, torch.Tensor]:
    """The published tensors under the library's names: experts in one, gate before up."""
    if "mtp_layers.0.input_proj.weight" in part.tensors:
        return renamed_from_speculators(part)
    prefix, found, experts = f"model.layers.{num_layers}.", {}, {}
    for name, array in part.tensors.items():
        bare = name.removeprefix(prefix)
        if match := re.match(r"mlp\.experts\.(\d+)\.(\w+)_proj\.", bare):
            experts[int(match[1]), match[2]] = torch.tensor(array)
        elif bare.startswith("shared_head.norm."):
            found[bare.replace("shared_head.norm.", "post_norm.")] = torch.tensor(array)
        elif bare.startswith(("enorm.", "hnorm.", "eh_proj.")):
            found[bare] = torch.tensor(array)
        elif not bare.startswith(("shared_head.head.", "embed_tokens.")):
            found[f"mtp_block.{bare}"] = torch.tensor(array)
    num_experts = 1 + max(index for index, _ in experts)
    both = [torch.cat([experts[i, "gate"], experts[i, "up"]]) for i in range(num_experts)]
    down = [experts[i, "down"] for i in range(num_experts)]
    own = "mtp_block.mlp.experts."
    return found | {f"{own}gate_up_proj": torch.stack(both), f"{own}down_proj": torch.stack(down)}


def states(name: str) -> np.ndarray:
    """The states (n, h) of the layer over what enters it."""
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
    # Layers of GLM-5 also say which slots they have chosen.
    model.mtp_block.register_forward_hook(lambda *a: a[2][0] if isinstance(a[2], tuple) else a[2])
    own, weights = model.state_dict(), renamed(part, num_layers)
    assert own.keys() == weights.keys(), own.keys() ^ weights.keys()
    model.load_state_dict(weights)
    embeddings, hidden = (torch.tensor(np.array(array))[None] for array in entering())
    places = torch.arange(embeddings.shape[1])[None]
    mask = torch.full((embeddings.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        ropes = rotary(config)(embeddings, places)
        found = model(embeddings, hidden, ropes, mask, places, None)
    return found[0].numpy()


if __name__ == "__main__":
    made = {name: states(name) for name in CLASSES}
    arrays = {name: mx.array(array) for name, array in made.items()}
    mx.save_safetensors(str(GOLDEN / "mtp-transformers.safetensors"), arrays)
    print({name: float(np.abs(array).max()) for name, array in made.items()})
