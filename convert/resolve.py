"""Resolve a published checkpoint into the head that it describes: config, tensors, doubts.

Nothing of the weights is read here but the vocabulary map.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.kind import Tensor
from mlx_eagle.system.fields import shown

from .checkpoint import AnyTarget, DraftCheckpoint
from .families import Family, find_family
from .head_config import build_config, check_shapes, check_tables
from .published_head import NO_OVERRIDES, Overrides, PublishedHead, count_layers, merge_settings
from .rope import DEFAULT_THETA
from .stored import LazyTensor
from .vocabulary import Vocabulary, resolve_vocabulary


@dataclass(frozen=True)
class Resolved:
    """A head: its config, and its tensors, which are unread.

    ``notes`` are doubts, each a sentence for the user. ``trimmed`` says how the draft
    vocabulary was cut down, if it was (see ``trim.py``).
    """

    family: Family
    config: Eagle3Config
    tensors: dict[str, Tensor]
    vocabulary: Vocabulary
    notes: tuple[str, ...]
    trimmed: Mapping[str, Any] | None = None


def _cut_layers(tensors: dict[str, Tensor], wanted: int | None) -> dict[str, Tensor]:
    """All tensors but those of layers beyond the ``wanted`` number; None keeps every layer."""
    num_layers = count_layers(tensors)
    if wanted is None:
        return tensors
    if not 1 <= wanted <= num_layers:
        raise ValueError(f"--num-layers {wanted}: the checkpoint has {num_layers}")
    surplus = tuple(f"layers.{i}." for i in range(wanted, num_layers))
    return {n: t for n, t in tensors.items() if not n.startswith(surplus)}


def _check_dimensions(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless all are vectors and matrices, and vocabulary maps are vectors."""
    for name, tensor in tensors.items():
        expected = (1,) if name in ("d2t", "t2d", "rope_freqs.weight") else (1, 2)
        dims = len(tensor.shape) if name != "mask_hidden" else min(len(tensor.shape), 1)
        if dims not in expected or 0 in tensor.shape:
            raise ValueError(
                f"{name} is of the shape {shown(tensor.shape)}, expected a "
                f"{'vector' if expected == (1,) else 'vector or a matrix'} that is not empty"
            )


def _name_norms(head: PublishedHead) -> PublishedHead:
    """Call the one norm of a layer without embedding ``hidden_norm``, whatever it came as."""
    tensors = dict(head.tensors)
    for i in range(head.num_layers):
        if head.input_width(i) == head.hidden_size:
            norm = tensors.pop(f"layers.{i}.input_layernorm.weight", None)
            if norm is not None:
                tensors.setdefault(f"layers.{i}.hidden_norm.weight", norm)
    return replace(head, tensors=tensors)


def _drop_early_stop(head: PublishedHead) -> PublishedHead:
    """Drop the rows of AngelSlim's fc that say when to stop thinking, not what to draft.

    Its trainer takes them from a flag, so the config may not mention them.
    """
    h = head.hidden_size
    matrix = head.tensors.get("fc.weight")
    surplus = 0 if matrix is None else matrix.rows - h
    is_known = head.settings.get("early_stop_method") or surplus <= head.family.num_stop_rows
    if surplus <= 0 or not is_known:
        return head
    head.notes.append(
        f"{surplus} rows of fc that estimate when to stop thinking are left out: drafts do not "
        "depend on them"
    )
    tensors = dict(head.tensors)
    for name in tensors.keys() & {"fc.weight", "fc.bias"}:
        shape = (h, *tensors[name].shape[1:])
        tensors[name] = LazyTensor(tensors[name], lambda w: w[:h], shape)
    return replace(head, tensors=tensors)


def is_output(name: str) -> bool:
    """True for a matrix with a row for every draft token."""
    return name == "lm_head.weight" or name.startswith("parallel_outputs.")


def _unpermute(rows: mx.array, num_heads: int) -> mx.array:
    """Undo llama.cpp's row order: each head's pairs (0, 1), (2, 3) ... -> its two halves."""
    width = rows.shape[0] // num_heads
    return rows.reshape(num_heads, width // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _reorder(
    head: PublishedHead, config: Eagle3Config, vocabulary: Vocabulary
) -> dict[str, Tensor]:
    """Put rows in the order of their use: heads in halves, outputs of the draft's tokens only."""
    tensors = dict(head.tensors)
    tensors.pop("rope_freqs.weight", None)  # which the config holds by now
    if head.family.has_interleaved_heads and config.latent is None:
        for i in range(config.num_layers):
            for part, count in (("q", config.num_heads), ("k", config.num_kv_heads)):
                name = f"layers.{i}.self_attn.{part}_proj.weight"
                if name in tensors:
                    tensors[name] = LazyTensor(tensors[name], lambda w, n=count: _unpermute(w, n))
    if vocabulary.target_ids is not None:
        rows = mx.array(vocabulary.target_ids)
        for name in filter(is_output, tensors):
            output = tensors[name]
            if output.rows == vocabulary.size:
                shape = (vocabulary.draft_size, *output.shape[1:])
                tensors[name] = LazyTensor(output, lambda w: w[rows], shape)
    if "mask_hidden" in tensors:  # (1, 1, F) in most files
        mask = tensors["mask_hidden"]
        tensors["mask_hidden"] = LazyTensor(mask, lambda w: w.reshape(-1), (mask.size,))
    return tensors


def _doubts(head: PublishedHead, config: Eagle3Config) -> list[str]:
    """Notes about what the published config leaves open or may say wrongly."""
    family = head.family
    found = []
    if family.residual_order_unknown and "norm_before_residual" not in head.settings:
        found.append(
            "the config does not say norm_before_residual; taken as false, the class default; "
            "if acceptance is low try --norm-before-residual"
        )
    is_plain = config.norm_output and config.pre_fc_norm == "none"
    if is_plain and family.norm_output_unknown and head.overrides.norm_output is None:
        found.append(
            "norm_output is set without fc_norm; SpecForge before September 2026 meant plain "
            "EAGLE-3 by that; if acceptance is low try --no-norm-output"
        )
    trained = None
    if family.rope_base_unknown:
        trained = "AngelSlim may have trained"
    elif config.latent is not None and config.rope["type"] == "yarn" and config.uses_aux:
        trained = "a head with latent attention and yarn was probably trained (by TorchSpec)"
    if trained is not None and config.rope["theta"] != DEFAULT_THETA:
        found.append(
            f"{trained} with rope base 10000 whatever its config says; if acceptance is low try "
            "--rope-theta 10000"
        )
    return found


def resolve(
    checkpoint: DraftCheckpoint,
    target: AnyTarget | None = None,
    overrides: Overrides = NO_OVERRIDES,
) -> Resolved:
    """Work out which head the checkpoint holds.

    With ``target`` the taps become definite and both are checked against each other. Raises
    ValueError, one sentence, for whatever is refused, missing or contradictory.
    """
    family, tensors = find_family(checkpoint)
    _check_dimensions(tensors)
    settings = merge_settings(checkpoint.config, family, count_layers(tensors))
    for key in ("norm_before_residual", "norm_output", "mask_token_id"):
        if getattr(overrides, key) is not None:
            settings[key] = getattr(overrides, key)
    tensors = _cut_layers(tensors, overrides.num_layers)
    head = PublishedHead(family, checkpoint.config, settings, tensors, target, overrides)
    head = _drop_early_stop(_name_norms(head))
    vocabulary = resolve_vocabulary(head)
    used_up = {"d2t", "t2d"} | (set() if family.owns_embedding else {"embed_tokens.weight"})
    head = replace(head, tensors={n: t for n, t in head.tensors.items() if n not in used_up})
    config = build_config(head, vocabulary)
    tensors = _reorder(head, config, vocabulary)
    check_shapes(tensors, config)
    check_tables(config, settings)
    if target is not None and config.lm_head_source != "target":
        vocabulary.check_target(target)
    notes = (*head.notes, *_doubts(head, config))
    return Resolved(family, config, tensors, vocabulary, notes)
