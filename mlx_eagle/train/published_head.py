"""Published layouts of EAGLE-3 and P-EAGLE heads: the one that a head came in, or speculators'."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..convert.checkpoint import DraftCheckpoint
from ..convert.families import canonical
from ..convert.head_config import resolve
from ..convert.vocabulary import vocabulary_maps
from ..drafters.config import Eagle3Config, VocabularyFields
from ..drafters.target_parts import find_embedding, rows_of_lm_head
from .block import layer_values
from .given import stored_arrays
from .student import HeadFiles, Student

MASKED_FEATURES = "mask_hidden"  # of slots that no features are known of
CUT = ("lm_head.weight", MASKED_FEATURES)  # read without rows or axes that mean nothing here
VERSION = "0.9.0"  # of speculators, whose layout it is
SPECULATIVE_TOKENS = 3  # that a head which does not say otherwise is used with, as there
OWN = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_output")
SAME = (
    "hidden_size", "intermediate_size", "head_dim", "hidden_act", "rms_norm_eps", "vocab_size",
    "max_position_embeddings", "attention_bias", "mlp_bias", "sliding_window",
)  # fmt: skip
"""Fields that the layout has under the same names: of the head, and of its layers."""
SAID = {
    *OWN, *SAME, *(each.name for each in fields(VocabularyFields)), "num_layers", "num_heads",
    "num_kv_heads", "qk_norm", "rope", "full_attention_layers", "pre_fc_norm", "num_aux",
    "aux_boundary_ids", "aux_ids_source", "aux_nested_ids", "mask_token_id",
    "speculative_tokens_hint", "family", "model_type",
}  # fmt: skip
"""Fields that the layout says in one way or another; of all others it means the defaults."""


def published_files(
    student: Student, own: Mapping[str, mx.array], model: nn.Module, came: DraftCheckpoint | None
) -> HeadFiles | None:
    """Return config and tensors of a head as it ``came``, or else as speculators publish it.

    ``own`` are its parameters, by their names in a converted folder. None for an EAGLE head that
    their layout has no words for.
    """
    found = None if came is None else as_it_came(came, own, student.ids)
    if came is not None and found is not None:
        return dict(came.config), found
    c = student.head.config
    if c.unsaid(SAID):
        return None
    arrays = {name: array.astype(student.dtype) for name, array in own.items()}
    if c.lm_head_source != "file":
        table, _ = find_embedding(model)
        arrays |= rows_of_lm_head(model, table, student.ids)
    for number in range(1, c.num_layers):
        norm = arrays.pop(f"layers.{number}.hidden_norm.weight")
        arrays[f"layers.{number}.input_layernorm.weight"] = norm
    if MASKED_FEATURES in arrays:
        arrays[MASKED_FEATURES] = arrays[MASKED_FEATURES][None, None]
    if c.has_d2t:
        arrays |= vocabulary_maps(student.ids, c.vocab_size)
    return published_config(c, student.taps), arrays


def as_it_came(
    checkpoint: DraftCheckpoint, own: Mapping[str, mx.array], ids: mx.array
) -> dict[str, mx.array] | None:
    """Return a checkpoint's tensors with a head's parameters in place, each in its stored type.

    None if they are not stored as they are, as in a head that drafted step by step, whose draft
    vocabulary (``ids``) has changed, or whose family is read otherwise than it is written.
    """
    whole = {id(tensor) for tensor in checkpoint.tensors.values()}
    read = resolve(checkpoint).tensors
    if any(id(x) not in whole for name, x in read.items() if name not in CUT):
        return None
    arrays = stored_arrays(checkpoint)
    named = {canonical(name): name for name in arrays}
    num_drafted = len(arrays.get("d2t", ()))
    for name, array in own.items():
        there = named.get(name) or named.get(name.replace("hidden_norm", "input_layernorm"))
        stored = None if there is None else arrays[there]
        if stored is None or num_drafted not in (0, len(ids)):
            return None
        array = array.astype(stored.dtype)
        if name == "lm_head.weight" and num_drafted and len(stored) != num_drafted:
            stored[ids] = array  # a row for every token of the target
        elif array.size != stored.size:
            return None
        else:
            arrays[str(there)] = array.reshape(stored.shape)
    return arrays


def published_config(config: Eagle3Config, taps: Sequence[int]) -> dict[str, Any]:
    """Return the ``config.json`` of a head as speculators publish it."""
    c = config
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
