"""What ties a head to its target: the taps, the width of the features, the vocabularies.

Taps end as boundary ids: id b is the residual stream entering layer b, and b = N the one
after the last layer, before the final norm. Checkpoints number them in two ways (see
``read_nested``). ``d2t`` is kept in offset form: draft id i is target id i + d2t[i] .
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlx_eagle.drafters.config import Eagle3Config, default_ids, is_default, read_nested

from ..drafters.kind import Tensor
from ..system.fields import shown
from .checkpoint import AnyTarget
from .stored import Stored

KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Taps:
    """The fields of ``Eagle3Config`` about taps."""

    aux_boundary_ids: tuple[int, ...] | None
    aux_ids_source: str
    aux_nested_ids: tuple[int, ...] | None = None


def _shift(ids: tuple[int, ...], by: int) -> tuple[int, ...]:
    return tuple(i + by for i in ids)


def found_ids(config: Mapping[str, Any]) -> tuple[tuple[int, ...], str] | None:
    """The ids that the config names, and where: nested, at the top, as target_layer_ids."""
    nested = (config.get("eagle_config") or {}).get(KEY)
    for ids, place in (
        (config.get("target_layer_ids"), "target_layer_ids"),
        (config.get(KEY), "top-level"),
        (nested, "nested"),
    ):
        if ids:
            return tuple(int(i) for i in ids), place
    return None


def _nested(ids: tuple[int, ...], num_layers: int | None, notes: list[str]) -> Taps:
    """Ids under ``eagle_config`` (``read_nested``); without a depth they are kept as written."""
    reading = read_nested(ids, num_layers)
    if num_layers is None:
        if not reading.is_certain:
            notes.append(
                f"what the taps {shown(ids)} mean depends on the target's depth, so it is settled "
                "when the head meets its target; give --target to settle it now"
            )
        return Taps(reading.ids, reading.source, ids)
    if not reading.is_certain:
        notes.append(
            f"the taps {shown(ids)} fit neither numbering; read as outputs of these layers, so "
            f"{shown(reading.ids)}; if acceptance is low try --aux-layers "
            f"{shown(ids)[1:-1].replace(' ', '')}"
        )
    return Taps(reading.ids, reading.source)


def _read_ids(
    found: tuple[tuple[int, ...], str], num_layers: int | None, notes: list[str]
) -> Taps:
    ids, place = found
    if place == "target_layer_ids":
        return Taps(_shift(ids, 1), "target_layer_ids+1")
    if place == "nested":
        return _nested(ids, num_layers, notes)
    if ids[0] == 1 and is_default(_shift(ids, 1), num_layers):
        notes.append(
            f"the taps {shown(ids)} look like numbers of layer outputs that a converter copied; "
            f"taken as written; if acceptance is low try --aux-offset 1"
        )
    return Taps(ids, "top-level")


def resolve_taps(
    config: Mapping[str, Any],
    num_aux: int,
    num_layers: int | None,
    aux_layers: tuple[int, ...] | None,
    aux_offset: int | None,
    notes: list[str],
) -> Taps:
    """The taps of a head that fuses ``num_aux`` features of a target of ``num_layers``.

    ``aux_layers`` (boundary ids) or ``aux_offset`` (added to the config's numbers) override
    the rules. Doubts go to ``notes``. Raises ValueError for ids that cannot be.
    """
    found = found_ids(config)
    if aux_layers is not None and aux_offset is not None:
        raise ValueError("give --aux-layers or --aux-offset, not both")
    if aux_layers is not None:
        taps = Taps(tuple(aux_layers), "override")
    elif aux_offset is not None:
        base = found[0] if found else default_ids(num_layers) if num_layers else None
        if base is None:
            raise ValueError(
                "--aux-offset needs ids to shift, and the config names none: give --target too"
            )
        taps = Taps(_shift(base, aux_offset), "override")
    elif found is not None:
        taps = _read_ids(found, num_layers, notes)
    else:
        taps = Taps(default_ids(num_layers) if num_layers else None, "default")
    _check_taps(taps, num_aux, num_layers)
    return taps


def _check_taps(taps: Taps, num_aux: int, num_layers: int | None) -> None:
    if taps.aux_boundary_ids is None:
        if num_aux != 3:
            raise ValueError(
                f"fc fuses {num_aux} features and the config names no taps; give --aux-layers"
            )
        return
    ids, source = list(taps.aux_boundary_ids), taps.aux_ids_source
    if len(ids) != num_aux:
        raise ValueError(
            f"{len(ids)} taps {shown(ids)} ({source}), but fc fuses {num_aux} features; "
            "give --aux-layers with as many"
        )
    # The default of a target of a few layers names one of them twice, as the official code does.
    in_order = sorted(ids) if source == "default" else sorted(set(ids))
    if min(ids) < 0 or ids != in_order:
        raise ValueError(
            f"the taps {shown(ids)} ({source}) are not ascending numbers from 0; give --aux-layers"
        )
    if num_layers is not None and ids[-1] > num_layers:
        raise ValueError(
            f"the taps {shown(ids)} ({source}) go beyond the target's {num_layers} layers; "
            "this head belongs to another target, or give --aux-layers"
        )


@dataclass(frozen=True)
class Vocabulary:
    """``target_ids`` (draft_size,) ascending; None where draft and target ids are the same."""

    size: int
    draft_size: int
    target_ids: np.ndarray | None

    @property
    def offsets(self) -> np.ndarray | None:
        """d2t, (draft_size,) int32."""
        if self.target_ids is None:
            return None
        return (self.target_ids - np.arange(self.draft_size)).astype(np.int32)

    @property
    def max_target_id(self) -> int:
        return self.draft_size - 1 if self.target_ids is None else int(self.target_ids[-1])


FLAGS = ("BOOL", "U8", "I8", "I32", "I64")
NUMBERS = ("I64", "I32", "I16", "I8", "U8")


def _read_vector(
    tensors: Mapping[str, Stored], name: str, formats: tuple[str, ...]
) -> np.ndarray | None:
    """The vector of that name, None where there is none; ValueError for a wrong format."""
    if name not in tensors:
        return None
    if tensors[name].format not in formats:
        raise ValueError(
            f"{name} is stored as {tensors[name].format}, expected {', '.join(formats)}; the "
            "checkpoint is damaged"
        )
    return tensors[name].numpy()


def _target_ids(tensors: Mapping[str, Stored], absolute: bool) -> np.ndarray | None:
    """Target id of each draft id, from d2t, or from t2d where d2t is missing."""
    marked, stored = _read_vector(tensors, "t2d", FLAGS), _read_vector(tensors, "d2t", NUMBERS)
    kept = None if marked is None else np.flatnonzero(marked)
    if stored is None:
        return kept
    stored = stored.astype(np.int64)
    ids = stored if absolute else stored + np.arange(len(stored))
    if kept is not None and not np.array_equal(kept, ids):
        raise ValueError(
            f"d2t and t2d disagree: {len(ids)} draft ids, {len(kept)} marked in t2d; "
            "the checkpoint is damaged"
        )
    return ids


def resolve_vocabulary(
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    absolute: bool,
    notes: list[str],
) -> Vocabulary:
    """Both sizes and the map between them; ``absolute``: d2t holds target ids themselves.

    Raises ValueError where tensors and config do not fit each other.
    """
    ids = _target_ids(tensors, absolute)
    embedding, output = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    size = settings.get("vocab_size")
    if embedding is not None:
        size = embedding.rows
    elif size is None and "t2d" in tensors:
        size = tensors["t2d"].rows
    if size is None:
        raise ValueError("config.json has no vocab_size, and no tensor tells it; add it")
    if ids is not None:
        draft_size = len(ids)
    elif output is not None:
        draft_size = output.rows
    else:
        draft_size = settings.get("draft_vocab_size") or size
    _check_map(ids, size, draft_size, settings.get("draft_vocab_size"))
    if output is not None and output.rows not in (draft_size, size):
        raise ValueError(
            f"lm_head has {output.rows} rows, expected one a draft token: {draft_size}"
        )
    if ids is not None and draft_size < size and ids[-1] == draft_size - 1:
        notes.append(
            f"d2t is all zeros: the draft vocabulary is taken to be the first {draft_size} ids; "
            "if acceptance is near zero the map was lost"
        )
    return Vocabulary(size, draft_size, ids if draft_size < size else None)


def _check_map(ids: np.ndarray | None, size: int, draft_size: int, stated: int | None) -> None:
    if stated is not None and stated != draft_size:
        raise ValueError(
            f"config.json says draft_vocab_size {stated}, and the tensors have {draft_size}"
        )
    if ids is None:
        if draft_size != size:
            raise ValueError(
                f"the draft vocabulary has {draft_size} of {size} tokens, and there is no d2t to "
                "map them; the checkpoint is incomplete"
            )
        return
    if not len(ids) or ids[0] < 0 or ids[-1] >= size or (np.diff(ids) <= 0).any():
        raise ValueError(
            f"d2t does not lead to ascending target ids below {size}; the checkpoint is damaged, "
            "or made for another target"
        )


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


def final_state_fields(h: int, target: AnyTarget | None) -> dict[str, Any]:
    """The fields about features of a head that takes only the target's final state."""
    _check_width(h, target)
    return {"num_aux": 1, "target_hidden_size": h, "aux_ids_source": "final norm"}


def feature_fields(
    h: int,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    target: AnyTarget | None,
    aux_layers: tuple[int, ...] | None,
    aux_offset: int | None,
    notes: list[str],
) -> dict[str, Any]:
    """The fields about the features that a head of width ``h`` fuses."""
    found = found_ids(config)
    ids = aux_layers or (found[0] if found else ())
    num_aux, size = _features(tensors, settings, len(ids), h, target)
    _check_width(size, target)
    num_layers = target.num_layers if target else settings.get("num_target_layers")
    taps = resolve_taps(config, num_aux, num_layers, aux_layers, aux_offset, notes)
    return {
        "num_aux": num_aux,
        "target_hidden_size": size,
        **asdict(taps),
    }


def vocabulary_fields(tensors: Mapping[str, Tensor], vocabulary: Vocabulary) -> dict[str, Any]:
    """The fields about vocabularies and what is taken from the target for want of an own."""
    same = vocabulary.target_ids is None
    output = "file" if "lm_head.weight" in tensors else "target" if same else "target_rows"
    return {
        "vocab_size": vocabulary.size,
        "draft_vocab_size": vocabulary.draft_size,
        "has_d2t": not same,
        "embed_source": "file" if "embed_tokens.weight" in tensors else "target",
        "lm_head_source": output,
    }


def check_sharing(config: Eagle3Config, settings: Mapping[str, Any]) -> None:
    if settings.get("embed_requires_grad") and config.embed_source != "file":
        raise ValueError(
            "the head was trained with an embedding of its own (embed_requires_grad), "
            "which the checkpoint lacks"
        )
    if config.hidden_size == config.target_hidden_size:
        return
    for part in ("embed", "lm_head"):
        if getattr(config, f"{part}_source") != "file":
            raise ValueError(
                f"the head is {config.hidden_size} wide and its target "
                f"{config.target_hidden_size}, so it needs "
                f"{'an embed_tokens' if part == 'embed' else 'an lm_head'} of its own, "
                "which the checkpoint lacks"
            )


def check_vocabulary(vocabulary: Vocabulary, target: AnyTarget) -> None:
    if vocabulary.max_target_id >= target.vocab_size:
        raise ValueError(
            f"the head drafts token {vocabulary.max_target_id}, and {target.name} has only "
            f"{target.vocab_size} tokens; give the target it was trained for"
        )
