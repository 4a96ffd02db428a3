"""How the numbers of tapped layers are read, which checkpoints write in two ways.

    boundary          2  16  29      what enters that layer
    output-of-layer   1  15  28      what leaves it: one less for the same tensor

We keep boundary ids: b = N is what leaves the last of N layers. Under ``eagle_config``
producers write either, and only the target's depth tells which.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """Boundary ids, which of the two ways they were read in, and whether that is beyond doubt."""

    ids: tuple[int, ...]
    source: str
    is_certain: bool = True


def default_ids(num_layers: int) -> tuple[int, ...]:
    """The boundary ids of the official code: 32 layers -> (2, 16, 29)."""
    return (2, num_layers // 2, num_layers - 3)


def is_default(ids: tuple[int, ...], num_layers: int | None) -> bool:
    """Whether they are the default of a target of that depth, or of any where it is unknown."""
    return ids == default_ids(num_layers or (ids[-1] + 3))


def read_nested(ids: tuple[int, ...], num_layers: int | None) -> Reading:
    """Ids under ``eagle_config``, for a target of that depth.

    (24, 30, 36) is as it stands with 36 layers, where nothing leaves a layer 36; (1, 15, 28)
    with 32 is the default, counted by outputs: (2, 16, 29).
    """
    outputs = tuple(i + 1 for i in ids)
    if num_layers is not None and num_layers in ids:
        return Reading(ids, "nested-as-is")
    if ids[0] == 1 or is_default(outputs, num_layers):
        return Reading(outputs, "nested+1")
    if is_default(ids, num_layers):
        return Reading(ids, "nested-as-is")
    return Reading(outputs, "nested+1", is_certain=False)
