"""Resolve which activations of the target a head was trained on.

Everything ends as boundary ids: id b is the residual stream entering layer b, and b = N the
one after the last layer, before the final norm. Checkpoints number them in two ways (see
``numbering.py`` beside the head).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_eagle.drafters.config import default_ids, is_default, read_nested

KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Taps:
    """Boundary ids (None: the default of whatever target) and where they came from.

    ``nested`` are the ids as written where only the target's depth tells what they mean; then
    ``ids`` are the likelier reading.
    """

    ids: tuple[int, ...] | None
    source: str
    nested: tuple[int, ...] | None = None


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
                f"what the taps {list(ids)} mean depends on the target's depth, so it is settled "
                "when the head meets its target; give --target to settle it now"
            )
        return Taps(reading.ids, reading.source, ids)
    if not reading.is_certain:
        notes.append(
            f"the taps {list(ids)} fit neither numbering; read as outputs of these layers, so "
            f"{list(reading.ids)}; if acceptance is low try --aux-layers "
            f"{','.join(map(str, ids))}"
        )
    return Taps(reading.ids, reading.source)


def _read(found: tuple[tuple[int, ...], str], num_layers: int | None, notes: list[str]) -> Taps:
    ids, place = found
    if place == "target_layer_ids":
        return Taps(_shift(ids, 1), "target_layer_ids+1")
    if place == "nested":
        return _nested(ids, num_layers, notes)
    if ids[0] == 1 and is_default(_shift(ids, 1), num_layers):
        notes.append(
            f"the taps {list(ids)} look like numbers of layer outputs that a converter copied; "
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
        taps = _read(found, num_layers, notes)
    else:
        taps = Taps(default_ids(num_layers) if num_layers else None, "default")
    _check(taps, num_aux, num_layers)
    return taps


def _check(taps: Taps, num_aux: int, num_layers: int | None) -> None:
    if taps.ids is None:
        if num_aux != 3:
            raise ValueError(
                f"fc fuses {num_aux} features and the config names no taps; give --aux-layers"
            )
        return
    ids = list(taps.ids)
    if len(ids) != num_aux:
        raise ValueError(
            f"{len(ids)} taps {ids} ({taps.source}), but fc fuses {num_aux} features; "
            "give --aux-layers with as many"
        )
    # The default of a target of a few layers names one of them twice, as the official code does.
    in_order = sorted(ids) if taps.source == "default" else sorted(set(ids))
    if min(ids) < 0 or ids != in_order:
        raise ValueError(
            f"the taps {ids} ({taps.source}) are not ascending numbers from 0; give --aux-layers"
        )
    if num_layers is not None and ids[-1] > num_layers:
        raise ValueError(
            f"the taps {ids} ({taps.source}) go beyond the target's {num_layers} layers; "
            "this head belongs to another target, or give --aux-layers"
        )
