"""MTP layers: loading them from published checkpoints, and refusals."""

import mlx.core as mx
import pytest
from drafter_pairs import LLAMA, QWEN3_5_MOE, QWEN3_NEXT, tiny_mtp, tiny_qwen3_5, tiny_qwen3_next
from grids import thorough
from helpers import PROMPT, plain, speculative
from mlx.utils import tree_flatten

from mlx_eagle.drafters.mtp import MTPDrafter, load_mtp


def checkpoint(drafter: MTPDrafter, fused: bool) -> dict[str, mx.array]:
    """The layer's tensors under the names, and with the conventions, of a published file."""
    tensors = {"model.embed_tokens.weight": mx.zeros((2, 2))}
    for name, array in tree_flatten(drafter.head.parameters()):
        if array.ndim == 1:
            array = array - 1.0
        if "switch_mlp" not in name:
            tensors[f"mtp.{name}"] = array
            continue
        mlp, projection = name.removesuffix(".weight").split(".switch_mlp.")
        for i, expert in enumerate(array):
            tensors[f"mtp.{mlp}.experts.{i}.{projection}.weight"] = expert
    if fused:

        def experts(name):
            return mx.stack(
                [tensors.pop(f"mtp.layers.0.mlp.experts.{i}.{name}.weight") for i in range(4)]
            )

        gate_up = mx.concatenate([experts("gate_proj"), experts("up_proj")], axis=1)
        tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = gate_up
        tensors["mtp.layers.0.mlp.experts.down_proj"] = experts("down_proj")
    return tensors


@pytest.mark.parametrize("fused", thorough([True, False], True))
@pytest.mark.parametrize(
    "target",
    [
        QWEN3_NEXT,
        tiny_qwen3_next(num_experts=4),
        tiny_qwen3_5(),
        QWEN3_5_MOE,
    ],
    ids=["qwen3_next dense", "qwen3_next", "qwen3_5", "qwen3_5_moe"],
)
def test_loading_an_mtp_layer(target, fused):
    drafter = tiny_mtp(target)
    has_experts = "switch_mlp" in drafter.head.layers[0].mlp
    loaded = load_mtp(checkpoint(drafter, fused and has_experts), target)
    ours = dict(tree_flatten(loaded.head.parameters()))
    for name, array in tree_flatten(drafter.head.parameters()):
        assert mx.allclose(ours[name], array, atol=1e-6).item(), name
    tokens, stats = speculative(target, loaded, PROMPT, 12, num_draft_tokens=2)
    assert tokens == plain(target, PROMPT, 12)
    assert stats.num_head_forwards == stats.num_drafted


def test_the_dtype_of_a_loaded_mtp_layer_is_the_targets():
    target = tiny_qwen3_5()
    weights = checkpoint(tiny_mtp(target), fused=False)
    target.set_dtype(mx.bfloat16)
    loaded = load_mtp(weights, target)
    assert {a.dtype for _, a in tree_flatten(loaded.head.parameters())} == {mx.bfloat16}
    _, stats = speculative(target, loaded, PROMPT, 12, num_draft_tokens=2)
    assert stats.num_emitted == 11


def test_bad_mtp_layers_are_refused():
    weights = checkpoint(tiny_mtp(QWEN3_NEXT), fused=False)
    with pytest.raises(ValueError, match="a llama model: MTP layers are known for Qwen3-Next"):
        load_mtp(weights, LLAMA)
    with pytest.raises(ValueError, match=r"lacks fc.weight"):
        load_mtp({}, QWEN3_NEXT)
    with pytest.raises(ValueError, match=r"several MTP layers"):
        load_mtp({**weights, "mtp.layers.1.mlp.gate_proj.weight": mx.zeros(3)}, QWEN3_NEXT)
    wide = tiny_qwen3_next(hidden_size=96)
    with pytest.raises(ValueError, match=r"has .* of 64 x 128, expected 96 x 192"):
        load_mtp(weights, wide)
    with pytest.raises(ValueError, match="hidden size 64, but this target's is 96"):
        MTPDrafter(tiny_mtp(QWEN3_NEXT).head, wide)
