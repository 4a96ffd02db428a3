"""From a recognised checkpoint to the head it describes: config, tensors, doubts.

Nothing of the weights is read here but the vocabulary map.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_eagle.system.json_schema import COUNT, shown

from .attention import input_width, position_scale, softmax_scale
from .checkpoint import AnyTarget, Checkpoint
from .families import Family, hidden_size, recognise
from .fields import (
    activation,
    from_shapes,
    mask_token,
    merge_settings,
    norm_before_residual,
    norm_output,
    window,
)
from .rope import DEFAULT_THETA, resolve_rope, rope_scaling
from .shapes import check_shapes
from .stored import Derived, Tensor
from .target_link import found_ids, resolve_taps
from .vocabulary import Vocabulary, resolve_vocabulary


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
    """A head: ``config`` holds every field of ``Eagle3Config``, ``tensors`` are unread.

    ``notes`` are doubts, each a sentence for the user. ``trimmed`` says how the draft
    vocabulary was cut down, where it was (see ``trim.py``).
    """

    family: Family
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    vocabulary: Vocabulary
    notes: tuple[str, ...]
    trimmed: Mapping[str, Any] | None = None


def _cut_layers(tensors: dict[str, Tensor], wanted: int | None) -> tuple[dict[str, Tensor], int]:
    """The tensors of the first layers, and how many layers that are."""
    numbers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    num_layers = len(numbers)
    if numbers != set(map(str, range(num_layers))):
        raise ValueError(
            f"the checkpoint's layers are {shown(sorted(numbers))}, expected numbers from 0 "
            "without a gap; it is incomplete"
        )
    if wanted is not None:
        if not 1 <= wanted <= num_layers:
            raise ValueError(f"--num-layers {wanted}: the checkpoint has {num_layers}")
        surplus = tuple(f"layers.{i}." for i in range(wanted, num_layers))
        tensors = {n: t for n, t in tensors.items() if not surplus or not n.startswith(surplus)}
        num_layers = wanted
    return tensors, num_layers


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


def _features(
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    num_taps: int | None,
    h: int,
    target: AnyTarget | None,
) -> tuple[int, int]:
    """How many features fc fuses and how wide each is."""
    width = tensors["fc.weight"].shape[-1]
    num_taps = num_taps or settings.get("num_aux_hidden_states")
    # Without a table of its own the head uses the target's, so their widths are the same.
    shares_embedding = "embed_tokens.weight" not in tensors
    if settings.get("target_hidden_size"):
        size = settings["target_hidden_size"]
    elif shares_embedding or (num_taps and width % h == 0):
        size = h
    elif target is not None:
        size = target.hidden_size
    else:
        size = max(width // (num_taps or 3), 1)
    if width % size:
        raise ValueError(
            f"fc takes {width} channels, which are no whole number of features of width {size}; "
            "the head belongs to another target, or its target_hidden_size is wrong"
        )
    return width // size, size


def _check_width(size: int, target: AnyTarget | None) -> None:
    if target is not None and target.hidden_size != size:
        raise ValueError(
            f"the head takes features of width {size}, and {target.name} has hidden size "
            f"{target.hidden_size}; give the target it was trained for"
        )


def _tapped(
    fields: dict[str, Any],
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    target: AnyTarget | None,
    overrides: Overrides,
    notes: list[str],
) -> dict[str, Any]:
    """The fields about what the head takes from the target."""
    h = fields["hidden_size"]
    if not fields["uses_aux"]:
        _check_width(h, target)
        return {
            "num_aux": 1,
            "target_hidden_size": h,
            "aux_boundary_ids": None,
            "aux_ids_source": "final norm",
            "aux_nested_ids": None,
        }
    found = found_ids(config)
    ids = overrides.aux_layers or (found[0] if found else ())
    num_aux, size = _features(tensors, settings, len(ids), h, target)
    _check_width(size, target)
    num_layers = target.num_layers if target else settings.get("num_target_layers")
    taps = resolve_taps(
        config, num_aux, num_layers, overrides.aux_layers, overrides.aux_offset, notes
    )
    return {
        "num_aux": num_aux,
        "target_hidden_size": size,
        "aux_boundary_ids": taps.ids,
        "aux_ids_source": taps.source,
        "aux_nested_ids": taps.nested,
    }


def _shared(tensors: Mapping[str, Tensor], vocabulary: Vocabulary) -> dict[str, Any]:
    """The fields about vocabularies and what is taken from the target for want of an own."""
    same = vocabulary.target_ids is None
    if "lm_head.weight" in tensors:
        output = "file"
    else:
        output = "target" if same else "target_rows"
    return {
        "vocab_size": vocabulary.size,
        "draft_vocab_size": vocabulary.draft_size,
        "has_d2t": not same,
        "embed_source": "file" if "embed_tokens.weight" in tensors else "target",
        "lm_head_source": output,
    }


def _check_sharing(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    if settings.get("embed_requires_grad") and fields["embed_source"] != "file":
        raise ValueError(
            "the head was trained with an embedding of its own (embed_requires_grad), "
            "which the checkpoint lacks"
        )
    if fields["hidden_size"] == fields["target_hidden_size"]:
        return
    for part in ("embed", "lm_head"):
        if fields[f"{part}_source"] != "file":
            raise ValueError(
                f"the head is {fields['hidden_size']} wide and its target "
                f"{fields['target_hidden_size']}, so it needs "
                f"{'an embed_tokens' if part == 'embed' else 'an lm_head'} of its own, "
                "which the checkpoint lacks"
            )


def _check_vocabulary(vocabulary: Vocabulary, target: AnyTarget) -> None:
    if vocabulary.max_target_id >= target.vocab_size:
        raise ValueError(
            f"the head drafts token {vocabulary.max_target_id}, and {target.name} has only "
            f"{target.vocab_size} tokens; give the target it was trained for"
        )


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
    tensors: dict[str, Tensor], settings: Mapping[str, Any], notes: list[str]
) -> dict[str, Tensor]:
    """Without the rows of AngelSlim's fc that say when to stop thinking, not what to draft."""
    h, matrix = hidden_size(tensors), tensors.get("fc.weight")
    if not settings.get("early_stop_method") or matrix is None or matrix.rows <= h:
        return tensors
    notes.append(
        f"{matrix.rows - h} rows of fc that estimate when to stop thinking are left out: drafts "
        "do not depend on them"
    )
    cut = {name: tensors[name] for name in ("fc.weight", "fc.bias") if name in tensors}
    return tensors | {
        name: Derived(tensor, lambda w: w[:h], (h, *tensor.shape[1:]))
        for name, tensor in cut.items()
    }


def _derive(
    tensors: dict[str, Tensor], fields: Mapping[str, Any], family: Family, vocabulary: Vocabulary
) -> dict[str, Tensor]:
    """Put rows in the order they are used in: heads un-permuted, lm_head cut to the draft's."""
    tensors = dict(tensors)
    if family.has_interleaved_heads and fields["latent"] is None:
        for i in range(fields["num_layers"]):
            for part, count in (("q", fields["num_heads"]), ("k", fields["num_kv_heads"])):
                name = f"layers.{i}.self_attn.{part}_proj.weight"
                if name in tensors:
                    tensors[name] = Derived(tensors[name], lambda w, n=count: _unpermute(w, n))
    ids = vocabulary.target_ids
    for name in filter(is_output, tensors):
        output = tensors[name]
        if ids is not None and output.rows == vocabulary.size:
            rows = mx.array(ids)
            tensors[name] = Derived(output, lambda w: w[rows], (len(ids), *output.shape[1:]))
    if "mask_hidden" in tensors:  # (1, 1, F) in most files
        mask = tensors["mask_hidden"]
        tensors["mask_hidden"] = Derived(mask, lambda w: w.reshape(-1), (mask.size,))
    return tensors


def resolve(
    checkpoint: Checkpoint, target: AnyTarget | None = None, overrides: Overrides = NO_OVERRIDES
) -> Resolved:
    """Work out what head the checkpoint holds.

    With ``target`` the taps become definite and both are checked against each other. Raises
    ValueError, one sentence, for whatever is refused, missing or contradictory.
    """
    notes: list[str] = []
    family, tensors = recognise(checkpoint)
    _check_dimensions(tensors)
    settings = merge_settings(checkpoint.config, family)
    tensors, num_layers = _cut_layers(tensors, overrides.num_layers)
    tensors = _name_norms(tensors, num_layers, hidden_size(tensors))
    tensors = _drop_early_stop(tensors, settings, notes)
    vocabulary = resolve_vocabulary(tensors, settings, family.has_absolute_d2t, notes)
    factors = tensors.get("rope_freqs.weight")
    used_up = {"d2t", "t2d", "rope_freqs.weight"}
    if not family.owns_embedding:
        used_up.add("embed_tokens.weight")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in used_up}
    fields = from_shapes(tensors, settings, family, num_layers)
    fields |= _tapped(fields, tensors, checkpoint.config, settings, target, overrides, notes)
    fields |= _shared(tensors, vocabulary)
    scaling = rope_scaling(settings)
    fields |= {
        "rms_norm_eps": settings["rms_norm_eps"],
        "hidden_act": activation(settings),
        "max_position_embeddings": settings["max_position_embeddings"],
        "norm_before_residual": norm_before_residual(
            settings, family, overrides.norm_before_residual, notes
        ),
        "norm_output": fields["final_norm"]
        and norm_output(settings, family, fields["pre_fc_norm"], overrides.norm_output, notes),
        **window(settings, family, num_layers),
        "rope": resolve_rope(settings, fields, overrides.rope_theta, factors),
        "softmax_scale": fields.get("softmax_scale", softmax_scale(fields["latent"], scaling)),
        "position_scale": position_scale(settings, scaling),
        "mask_token_id": mask_token(tensors, settings, overrides.mask_token_id),
        "model_type": "eagle3",
        "family": family.name,
        "speculative_tokens_hint": _hint(checkpoint.config),
    }
    if family.doubts_rope_base and fields["rope"]["theta"] != DEFAULT_THETA:
        notes.append(
            "AngelSlim may have trained with rope base 10000 whatever its config says; if "
            "acceptance is low try --rope-theta 10000"
        )
    tensors = _derive(tensors, fields, family, vocabulary)
    check_shapes(tensors, fields)
    _check_sharing(fields, settings)
    if target is not None and fields["lm_head_source"] != "target":
        _check_vocabulary(vocabulary, target)
    return Resolved(family, fields, tensors, vocabulary, tuple(notes))
