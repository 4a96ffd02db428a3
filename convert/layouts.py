"""Layouts that drafters are published in: z-lab's, speculators', the one that a head came in."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import mlx.core as mx

from mlx_eagle.drafters.block_config import BlockConfig
from mlx_eagle.drafters.config import Eagle3Config, VocabularyFields
from mlx_eagle.drafters.dflash2 import DFlash2Config
from mlx_eagle.drafters.dspark import DSparkConfig
from mlx_eagle.drafters.kind import Tensor

from .checkpoint import DraftCheckpoint
from .head_config import resolve
from .stored import LazyTensor
from .vocabulary import vocabulary_maps

HeadFiles = tuple[dict[str, Any], dict[str, mx.array]]
"""A ``config.json``, and the arrays beside it."""
MASKED_FEATURES = "mask_hidden"  # of slots that no features are known of
CUT = ("lm_head.weight", MASKED_FEATURES)  # read without rows or axes that mean nothing here
VERSION = "0.9.0"  # of speculators, whose layout it is
SPECULATIVE_TOKENS = 3  # that a head which does not say otherwise is used with, as there
OWN = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_output")
OF_BLOCKS = "hidden_size head_dim intermediate_size vocab_size rms_norm_eps rope_theta"
SAME = (
    "hidden_size", "intermediate_size", "head_dim", "hidden_act", "rms_norm_eps", "vocab_size",
    "max_position_embeddings", "attention_bias", "mlp_bias", "sliding_window",
)  # fmt: skip
"""Fields that layouts have under the same names: of blocks, of a head, and of its layers."""
SAID = {
    *OWN, *SAME, *(each.name for each in fields(VocabularyFields)), "num_layers", "num_heads",
    "num_kv_heads", "qk_norm", "rope", "full_attention_layers", "pre_fc_norm", "num_aux",
    "aux_boundary_ids", "aux_ids_source", "aux_nested_ids", "mask_token_id",
    "speculative_tokens_hint", "family", "model_type",
}  # fmt: skip
"""Fields that the layout says in one way or another; of all others it means the defaults."""


def layer_values(config: Any, same: Iterable[str] = OF_BLOCKS.split()) -> dict[str, Any]:
    """The part of a published config that says what the layers are.

    ``same`` are the fields that it calls as ours.
    """
    return {name: getattr(config, name) for name in same} | {
        "model_type": "qwen3",
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "layer_types": ["full_attention"] * config.num_layers,
    }


def dflash_values(c: BlockConfig, name: str = "DFlashDraftModel", **inside: Any) -> dict[str, Any]:
    """The ``config.json`` of a head of blocks as z-lab publishes it, for that architecture."""
    ids = [tap - 1 for tap in c.taps]
    inside |= {"mask_token_id": c.mask_token_id, "target_layer_ids": ids}
    values = {"architectures": [name], "block_size": c.block_size, "dflash_config": inside}
    return layer_values(c) | values


def dflash2_values(c: DFlash2Config) -> dict[str, Any]:
    """The ``config.json`` of a DFlash2 head as z-lab publishes it."""
    own = {
        "conv_kernel_size": c.kernel_size,
        "conv_group_size": c.group_size,
        "selector_rank": c.selector_rank,
        "selector_top_k": c.top_k,
    }
    return dflash_values(c, "DFlash2DraftModel", **own) | {"is_causal": False}


def dspark_values(c: DSparkConfig) -> dict[str, Any]:
    """The ``config.json`` of a DSpark head as speculators publish it."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": c.longest_draft}
    same = ("mask_token_id", "block_size", "draft_vocab_size", "markov_rank")
    return {name: getattr(c, name) for name in same} | {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_config": {"algorithm": "dspark", "proposal_methods": [proposal]},
        "transformer_layer_config": layer_values(c),
        "aux_hidden_state_layer_ids": list(c.taps),
        "sample_from_anchor": True,
        "markov_head_type": c.markov_kind,
        "confidence_head_with_markov": True,
    }


def places_of(checkpoint: DraftCheckpoint, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The published names of those tensors that are published as they are, by their own."""
    names = {id(tensor): name for name, tensor in checkpoint.tensors.items()}
    return {own: names[id(tensor)] for own, tensor in tensors.items() if id(tensor) in names}


def as_it_came(
    checkpoint: DraftCheckpoint, own: Mapping[str, mx.array], ids: mx.array
) -> HeadFiles | None:
    """An EAGLE head as published, with these parameters in place, each in its stored type.

    ``own`` are by their names in a converted folder. None if they are not stored as they are, as
    in a head that drafted step by step, whose draft vocabulary (``ids``) has changed, or whose
    family is read otherwise than it is written.
    """
    read = {
        name: tensor.source if name in CUT and isinstance(tensor, LazyTensor) else tensor
        for name, tensor in resolve(checkpoint).tensors.items()
    }
    places = places_of(checkpoint, read)
    arrays = checkpoint.arrays()
    num_drafted = len(arrays.get("d2t", ()))
    is_alike = own.keys() <= places.keys() == read.keys()
    if not is_alike or num_drafted not in (0, len(ids)):
        return None
    for name, array in own.items():
        stored = arrays[places[name]]
        array = array.astype(stored.dtype)
        if name == "lm_head.weight" and num_drafted and len(stored) != num_drafted:
            stored[ids] = array  # a row for every token of the target
        elif array.size != stored.size:
            return None
        else:
            arrays[places[name]] = array.reshape(stored.shape)
    return dict(checkpoint.config), arrays


def as_speculators_do(
    c: Eagle3Config, own: Mapping[str, mx.array], taps: Sequence[int], ids: mx.array
) -> HeadFiles | None:
    """An EAGLE head of these parameters as speculators publish it.

    ``own`` are by their names in a converted folder, with the output matrix; ``ids`` (Vd,) are
    the target ids of its draft tokens. None for a head that the layout has no words for.
    """
    if c.unsaid(SAID):
        return None
    arrays = dict(own)
    for number in range(1, c.num_layers):
        norm = arrays.pop(f"layers.{number}.hidden_norm.weight")
        arrays[f"layers.{number}.input_layernorm.weight"] = norm
    if MASKED_FEATURES in arrays:
        arrays[MASKED_FEATURES] = arrays[MASKED_FEATURES][None, None]
    if c.has_d2t:
        arrays |= vocabulary_maps(ids, c.vocab_size)
    return eagle_values(c, taps), arrays


def eagle_values(c: Eagle3Config, taps: Sequence[int]) -> dict[str, Any]:
    """The ``config.json`` of an EAGLE-3 or P-EAGLE head as speculators publish it."""
    window = c.sliding_window
    full = range(c.num_layers) if window is None else c.full_attention_layers
    kinds = ["full" if i in full else "sliding" for i in range(c.num_layers)]
    scaling = c.rope.get("scaling") or {"type": "default"}
    rope = {**scaling, "rope_type": scaling["type"], "rope_theta": c.rope["theta"]}
    if c.rope.get("dims"):
        rope["partial_rotary_factor"] = c.rope["dims"] / c.head_dim
    layer = layer_values(c, SAME) | {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "use_sliding_window": window is not None,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": c.speculative_tokens_hint or SPECULATIVE_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    kind = "eagle3" if c.mask_token_id is None else "peagle"
    made = {name: getattr(c, name) for name in OWN} | {
        "architectures": ["Eagle3DraftModel" if kind == "eagle3" else "PEagleDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "embed_requires_grad": kind == "peagle",
        "fc_norm": c.pre_fc_norm == "per_feature",
        "norm_before_fc": c.pre_fc_norm == "concat",
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": [], "name_or_path": None},
        },
    }
    return made | ({"mask_token_id": c.mask_token_id} if kind == "peagle" else {})
