"""A stand-in for the user's model: the same weights, run by modules that we may change.

Looking into a model, or giving its rows other positions, takes modules that do more than their
own. The user's are never touched: another thread may be running them at the same time. What we
change is a copy of them, and of the modules that lead to them; all others, and every array, are
shared.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .attention_parts import (
    AttentionParts,
    PartedAttention,
    find_attention,
    no_kernel,
    with_parts,
)
from .masks_and_ropes import PositionedRope, RowPositions, find_ropes, tree_masks


class StandIn:
    """A copy of ``model`` whose rotary embeddings go by ``positions``, its attention by ``parts``.

    It belongs to one generation: it has the state of a pass under way, so no two passes may run
    on it at the same time. ``copies`` are those of ``changed``, in order: the caller may change
    them too. Weights that the user's model is given later are not seen.
    """

    def __init__(
        self,
        model: nn.Module,
        changed: Iterable[nn.Module] = (),
        most_rows: Callable[[int, int], int] = no_kernel,
    ):
        ropes, attention, changed = find_ropes(model), find_attention(model), list(changed)
        self.model, copies = copy_modules(model, [*changed, *ropes, *attention])
        self.copies, others = copies[: len(changed)], copies[len(changed) :]
        self.positions, self.parts = RowPositions(), AttentionParts(most_rows)
        for rope in others[: len(ropes)]:
            add_behaviour(rope, PositionedRope)
            rope._row_positions = self.positions
        for module, original in zip(others[len(ropes) :], attention, strict=True):
            add_behaviour(module, PartedAttention)
            module._with_parts = with_parts(type(original).__call__, self.parts)

    @contextmanager
    def tree_attention(self, caches: list[Any], tree_mask: mx.array) -> Iterator[None]:
        """Within, a forward pass over R rows is one over the tree of ``tree_mask`` (R, R).

        ``tree_mask[r, a]`` says whether row a is r itself or one of its ancestors.
        """
        depths = tree_mask.sum(axis=1) - 1
        with tree_masks(caches, tree_mask, depths), self.positions.of_tree(depths):
            yield


def copy_modules(model: nn.Module, changed: list[nn.Module]) -> tuple[nn.Module, list[nn.Module]]:
    """``model`` with copies of the modules ``changed`` in their places; the model and the copies.

    Copied are those modules and the ones that hold them, however deep; a module that stands in
    two places has one copy. Everything else is shared with ``model``, which stays as it is.
    """
    wanted = {id(module) for module in changed}
    done: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        """``value``, or a copy where something in it was copied."""
        if not isinstance(value, (dict, list, tuple)):
            return value
        if id(value) not in done:
            done[id(value)] = _with_members(value, copied, id(value) in wanted)
        return done[id(value)]

    new_model = copied(model)
    return new_model, [copied(module) for module in changed]


def _with_members(value: Any, copied: Any, must_copy: bool) -> Any:
    """A module or a plain container of modules, with every member put through ``copied``."""
    if not isinstance(value, dict):
        listed = [copied(member) for member in value]
        same = all(new is old for new, old in zip(listed, value, strict=True))
        return value if same else type(value)(listed)
    members = {key: copied(member) for key, member in value.items()}
    if not must_copy and all(members[key] is value[key] for key in value):
        return value
    new = type(value).__new__(type(value))
    dict.update(new, members)  # a module's own ``update`` takes parameters only
    if isinstance(value, nn.Module):  # a dict of its arrays and modules, and attributes beside
        new.__dict__.update(value.__dict__)
    return new


def add_behaviour(copy: nn.Module, behaviour: type) -> None:
    """Let the methods of ``behaviour`` come before those of the copy's own class."""
    original = type(copy)
    copy.__class__ = type(original.__name__, (behaviour, original), {})
