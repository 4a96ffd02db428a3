"""From a recognised checkpoint to the head it describes: config, tensors, doubts.

Nothing of the weights is read here but the vocabulary map.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_eagle.drafters.config import Eagle3Config

from ..drafters.kind import Tensor
from ..system.fields import COUNT, shown
from .checkpoint import AnyTarget, DraftCheckpoint
from .families import Family, hidden_size, recognise
from .head_config import attention_fields, check_shapes, input_width, layer_fields, merge_settings
from .rope import DEFAULT_THETA, resolve_rope
from .stored import LazyTensor
from .vocabulary import (
    Vocabulary,
    check_sharing,
    check_vocabulary,
    feature_fields,
    final_state_fields,
    resolve_vocabulary,
    vocabulary_fields,
)

P_EAGLE = re.compile(r"P-?[Ee]agle")


@dataclass(frozen=True)
class Overrides:
    """What the user knows better than the checkpoint; None leaves it to the rules."""

    aux_layers: tuple[int, ...] | None = None
    aux_offset: int | None = None
    rope_theta: float | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    num_layers: int | None = None
    mask_token_id: int | None = None


NO_OVERRIDES = Overrides()


@dataclass(frozen=True)
class Resolved:
    """A head: its config, and its tensors, which are unread.

    ``notes`` are doubts, each a sentence for the user. ``trimmed`` says how the draft
    vocabulary was cut down, where it was (see ``trim.py``).
    """

    family: Family
    config: Eagle3Config
    tensors: dict[str, Tensor]
    vocabulary: Vocabulary
    notes: tuple[str, ...]
    trimmed: Mapping[str, Any] | None = None


def _num_layers(tensors: Mapping[str, Tensor]) -> int:
    """How many layers the checkpoint has; ValueError where one between them is missing."""
    numbers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    num_layers = len(numbers)
    if numbers != set(map(str, range(num_layers))):
        raise ValueError(
            f"the checkpoint's layers are {shown(sorted(numbers))}, expected numbers from 0 "
            "without a gap; it is incomplete"
        )
    return num_layers


def _cut_layers(
    tensors: dict[str, Tensor], num_layers: int, wanted: int | None
) -> tuple[dict[str, Tensor], int]:
    """The tensors of the first layers, and how many layers that are."""
    if wanted is None:
        return tensors, num_layers
    if not 1 <= wanted <= num_layers:
        raise ValueError(f"--num-layers {wanted}: the checkpoint has {num_layers}")
    surplus = tuple(f"layers.{i}." for i in range(wanted, num_layers))
    return {n: t for n, t in tensors.items() if not n.startswith(surplus)}, wanted


def _check_dimensions(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless all are vectors and matrices, those of vocabularies vectors."""
    for name, tensor in tensors.items():
        expected = (1,) if name in ("d2t", "t2d", "rope_freqs.weight") else (1, 2)
        dims = len(tensor.shape) if name != "mask_hidden" else min(len(tensor.shape), 1)
        if dims not in expected or 0 in tensor.shape:
            raise ValueError(
                f"{name} is of the shape {shown(tensor.shape)}, expected a "
                f"{'vector' if expected == (1,) else 'vector or a matrix'} that is not empty"
            )


def _name_norms(tensors: dict[str, Tensor], num_layers: int, h: int) -> dict[str, Tensor]:
    """Call the one norm of a layer without embedding ``hidden_norm``, whatever it came as."""
    tensors = dict(tensors)
    for i in range(num_layers):
        if input_width(tensors, i) == h:
            norm = tensors.pop(f"layers.{i}.input_layernorm.weight", None)
            if norm is not None:
                tensors.setdefault(f"layers.{i}.hidden_norm.weight", norm)
    return tensors


def _mask_token(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], vocab_size: int
) -> int | None:
    """What a P-EAGLE head is given in place of a token; None for a head that is none."""
    keys = ("mask_token_id", "pard_token", "ptd_token_id")
    token = next((settings[key] for key in keys if key in settings), None)
    is_declared = (
        settings.get("speculators_model_type") == "peagle"
        or settings.get("parallel_drafting")
        or "pard_token" in settings
        or "ptd_token_id" in settings
        or any(P_EAGLE.match(name) for name in settings.get("architectures", ()))
    )
    if "mask_hidden" not in tensors:
        if is_declared:
            raise ValueError(
                "the head drafts in parallel (P-EAGLE), says its config, and the checkpoint lacks "
                "mask_hidden; it is incomplete"
            )
        return None
    if token is None:
        raise ValueError(
            "the head drafts in parallel (P-EAGLE), and its config names no mask_token_id (nor "
            "ptd_token_id or pard_token); give the one it was trained with as --mask-token-id"
        )
    if token >= vocab_size:
        raise ValueError(
            f"the head masks with token {token}, and its vocabulary has {vocab_size}; give the "
            "one it was trained with as --mask-token-id"
        )
    return token


def _norm_before_residual(settings: Mapping[str, Any], family: Family, notes: list[str]) -> bool:
    if family.residual_order_unknown and "norm_before_residual" not in settings:
        notes.append(
            "the config does not say norm_before_residual; taken as false, the class default; "
            "if acceptance is low try --norm-before-residual"
        )
    return bool(settings.get("norm_before_residual", False))


def _norm_output(
    settings: Mapping[str, Any],
    family: Family,
    pre_fc_norm: str,
    override: bool | None,
    notes: list[str],
) -> bool:
    if override is not None:
        return override
    value = settings.get("norm_output", settings.get("return_hidden_post_norm", False))
    if value and pre_fc_norm == "none" and family.norm_output_unknown:
        notes.append(
            "norm_output is set without fc_norm; SpecForge before September 2026 meant plain "
            "EAGLE-3 by that; if acceptance is low try --no-norm-output"
        )
    return bool(value)


def _rope_doubts(family: Family, config: Eagle3Config) -> list[str]:
    """A note about a base that the head was perhaps not trained with."""
    is_latent_yarn = config.latent is not None and config.rope["type"] == "yarn"
    if config.rope["theta"] == DEFAULT_THETA:
        return []
    if family.rope_base_unknown:
        who = "AngelSlim may have trained"
    elif is_latent_yarn and config.uses_aux:
        who = "a head with latent attention and yarn was probably trained (by TorchSpec)"
    else:
        return []
    return [
        f"{who} with rope base 10000 whatever its config says; if acceptance is low try "
        "--rope-theta 10000"
    ]


def _hint(config: Mapping[str, Any]) -> int | None:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    hint = methods[0].get("speculative_tokens") if isinstance(methods[0], Mapping) else None
    return hint if COUNT.holds(hint) else None


def _unpermute(rows: mx.array, num_heads: int) -> mx.array:
    """Undo llama.cpp's row order: each head's pairs (0, 1), (2, 3) ... -> its two halves."""
    width = rows.shape[0] // num_heads
    return rows.reshape(num_heads, width // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def is_output(name: str) -> bool:
    """Whether it is a matrix with a row for every draft token."""
    return name == "lm_head.weight" or name.startswith("parallel_outputs.")


def _drop_early_stop(
    tensors: dict[str, Tensor], settings: Mapping[str, Any], family: Family, notes: list[str]
) -> dict[str, Tensor]:
    """Without the rows of AngelSlim's fc that say when to stop thinking, not what to draft.

    Its trainer takes them from a flag, so that the config may not speak of them.
    """
    h, matrix = hidden_size(tensors), tensors.get("fc.weight")
    if matrix is None or matrix.rows <= h:
        return tensors
    if not settings.get("early_stop_method") and matrix.rows > h + family.num_stop_rows:
        return tensors
    notes.append(
        f"{matrix.rows - h} rows of fc that estimate when to stop thinking are left out: drafts "
        "do not depend on them"
    )
    cut = {name: tensors[name] for name in ("fc.weight", "fc.bias") if name in tensors}
    return tensors | {
        name: LazyTensor(tensor, lambda w: w[:h], (h, *tensor.shape[1:]))
        for name, tensor in cut.items()
    }


def _derive(
    tensors: dict[str, Tensor], config: Eagle3Config, family: Family, vocabulary: Vocabulary
) -> dict[str, Tensor]:
    """Put rows in the order they are used in: heads un-permuted, lm_head cut to the draft's."""
    tensors = dict(tensors)
    if family.has_interleaved_heads and config.latent is None:
        for i in range(config.num_layers):
            for part, count in (("q", config.num_heads), ("k", config.num_kv_heads)):
                name = f"layers.{i}.self_attn.{part}_proj.weight"
                if name in tensors:
                    tensors[name] = LazyTensor(tensors[name], lambda w, n=count: _unpermute(w, n))
    ids = vocabulary.target_ids
    for name in filter(is_output, tensors):
        output = tensors[name]
        if ids is not None and output.rows == vocabulary.size:
            rows = mx.array(ids)
            tensors[name] = LazyTensor(
                output, lambda w, rows=rows: w[rows], (len(ids), *output.shape[1:])
            )
    if "mask_hidden" in tensors:  # (1, 1, F) in most files
        mask = tensors["mask_hidden"]
        tensors["mask_hidden"] = LazyTensor(mask, lambda w: w.reshape(-1), (mask.size,))
    return tensors


def resolve(
    checkpoint: DraftCheckpoint,
    target: AnyTarget | None = None,
    overrides: Overrides = NO_OVERRIDES,
) -> Resolved:
    """Work out what head the checkpoint holds.

    With ``target`` the taps become definite and both are checked against each other. Raises
    ValueError, one sentence, for whatever is refused, missing or contradictory.
    """
    notes: list[str] = []
    family, tensors = recognise(checkpoint)
    _check_dimensions(tensors)
    num_stored = _num_layers(tensors)
    settings = merge_settings(checkpoint.config, family, num_stored)
    known = {key: getattr(overrides, key) for key in ("norm_before_residual", "mask_token_id")}
    settings |= {key: value for key, value in known.items() if value is not None}
    tensors, num_layers = _cut_layers(tensors, num_stored, overrides.num_layers)
    h = hidden_size(tensors)
    tensors = _name_norms(tensors, num_layers, h)
    tensors = _drop_early_stop(tensors, settings, family, notes)
    vocabulary = resolve_vocabulary(tensors, settings, family.has_absolute_d2t, notes)
    factors = tensors.get("rope_freqs.weight")
    used_up = {"d2t", "t2d", "rope_freqs.weight"}
    if not family.owns_embedding:
        used_up.add("embed_tokens.weight")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in used_up}
    layers = layer_fields(tensors, settings, family, num_layers)
    attention = attention_fields(tensors, settings, family, num_layers)
    if family.fixed.get("uses_aux", True):
        aux = overrides.aux_layers, overrides.aux_offset
        features = feature_fields(h, tensors, checkpoint.config, settings, target, *aux, notes)
    else:
        features = final_state_fields(h, target)
    fields = {
        **layers,
        **attention,
        **features,
        **vocabulary_fields(tensors, vocabulary),
        "rope": resolve_rope(settings, attention, overrides.rope_theta, factors),
        "norm_before_residual": _norm_before_residual(settings, family, notes),
        "norm_output": layers["final_norm"]
        and _norm_output(settings, family, layers["pre_fc_norm"], overrides.norm_output, notes),
        "mask_token_id": _mask_token(tensors, settings, vocabulary.size),
        "family": family.name,
        "speculative_tokens_hint": _hint(checkpoint.config),
    }
    config = Eagle3Config(**(fields | dict(family.fixed)))
    notes += _rope_doubts(family, config)
    tensors = _derive(tensors, config, family, vocabulary)
    check_shapes(tensors, config)
    check_sharing(config, settings)
    if target is not None and config.lm_head_source != "target":
        check_vocabulary(vocabulary, target)
    return Resolved(family, config, tensors, vocabulary, tuple(notes))
