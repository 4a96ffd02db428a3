"""A stand-in for the user's model: the same weights, run by modules that we may change.

Recording a model's activations, or giving its rows other positions, takes modules that do more
than the model's own. The user's modules are never touched, since another thread may be running
them. We change copies of them, and of the modules that contain them; all other modules, and all
arrays, are shared.

The copy's attention over a few rows can be split into groups of rows that Metal's vector kernel
takes: up to 8 rows, and 32 rows times query heads per key head (``fused_rows`` in
``attention.py``). A larger pass goes through plain operations, which read keys and values
once for every *query* head and put all scores into memory. Each group reads them once: with 8
query heads per key head, 8 rows in two groups read a quarter. A row's sum is the same in every
group, so at most rounding changes. MLX can also be told to use a fused kernel where it would
take plain operations. Whether either is faster is measured (``decoding/pass_costs.py``).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .absorbed import AbsorbedAttention, NotedProjection, can_absorb, find_projections
from .attention import NAME, AttentionOptions, attend_with_options, find_attention
from .masks_and_ropes import PositionedRope, RowPositions, find_ropes, named_modules, tree_masks
from .states import StateRecorder, is_recurrent


def with_names(method: FunctionType, names: dict[str, Any]) -> FunctionType:
    """``method`` with other values for some of the global names that it looks up.

    Its code, and everything else that it refers to, are the same; the module that defines it is
    not changed.
    """
    names = {**method.__globals__, **names}
    copy = FunctionType(
        method.__code__, names, method.__name__, method.__defaults__, method.__closure__
    )
    copy.__kwdefaults__ = method.__kwdefaults__
    return copy


def methods_of(module_type: type) -> dict[str, FunctionType]:
    """The methods of a module class that MLX's own classes do not define."""
    own = [base for base in reversed(module_type.__mro__) if issubclass(base, nn.Module)]
    return {
        name: method
        for base in own[1:]
        for name, method in vars(base).items()
        if isinstance(method, FunctionType)
    }


class StandIn:
    """A copy of ``model`` whose rotary embeddings use ``positions``.

    ``states`` can record the updates of its recurrent states.

    It belongs to one generation: it has the state of the pass that is running, so no two passes
    may run on it at the same time. ``copies`` are the copies of ``changed``, in order, which the
    caller may change further. It does not see weights that the user's model is given later.
    """

    def __init__(self, model: nn.Module, changed: Iterable[nn.Module] = ()):
        self.positions = RowPositions()
        self.attention = AttentionOptions()
        self.absorbed = AbsorbedAttention()
        self.states = StateRecorder()
        ropes = find_ropes(model)
        others = self._changed_methods(model, ropes)
        projections = find_projections(model)
        changed = list(changed)
        copied = module_copier([*changed, *ropes, *projections, *(module for module, _ in others)])
        self.model = copied(model)
        self.copies = [copied(module) for module in changed]
        for rope in ropes:
            add_behaviour(copied(rope), PositionedRope, _row_positions=self.positions)
        for projection in projections:
            add_behaviour(copied(projection), NotedProjection, _absorbed=self.absorbed)
        for module, methods in others:
            add_behaviour(copied(module), **methods)

    def _changed_methods(
        self, model: nn.Module, ropes: list[nn.Module]
    ) -> list[tuple[nn.Module, dict[str, Any]]]:
        """The modules of a model, except ``ropes``, that need other methods, and the methods."""
        attention = {id(module) for module in find_attention(model)}
        methods_by_type = cache(self._methods)
        found = {}
        for _, module in named_modules(model):
            methods = methods_by_type(type(module), id(module) in attention)
            if methods and not any(module is rope for rope in ropes):
                found[id(module)] = module, methods
        return list(found.values())

    def _methods(self, module_type: type, attends: bool) -> dict[str, Any]:
        """Replacements for the methods of a module class that have to do more here."""
        changed: dict[str, Any] = {}
        for name, method in methods_of(module_type).items():
            names = self.states.names_in(method) if is_recurrent(method) else {}
            if attends and name == "__call__":
                names[NAME] = partial(attend_with_options, self.attention)
                if can_absorb(method):
                    names = {**self.absorbed.names_in(method), **names}
                    names[NAME] = partial(self.absorbed, names[NAME])
            new: Any = with_names(method, names) if names else method
            new = self.states.noting(name, new) if is_recurrent(method) else new
            if new is not method:
                changed[name] = new
        return changed

    @contextmanager
    def tree_attention(self, caches: list[Any], tree_mask: mx.array) -> Iterator[None]:
        """Treat the R rows of a forward pass in this block as the tree ``tree_mask`` (R, R).

        ``tree_mask[r, a]`` says whether row a is r itself or one of its ancestors.
        """
        depths = tree_mask.sum(axis=1) - 1
        masks = tree_masks(caches, tree_mask, depths)
        with masks, self.positions.using(depths), self.absorbed.absorbing():
            yield


def module_copier(changed: list[nn.Module]) -> Callable[[Any], Any]:
    """Function of a model or a module: a copy with copies of ``changed``, wherever they are in it.

    These modules and all modules that contain them are copied, at any depth; a module that occurs
    twice has one copy. Everything else is shared with the model, which is not changed.
    """
    wanted = {id(module) for module in changed}
    done: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        """``value``, or a copy of it if something in it was copied."""
        if not isinstance(value, (dict, list, tuple)):
            return value
        if id(value) not in done:
            done[id(value)] = _with_members(value, copied, id(value) in wanted)
        return done[id(value)]

    return copied


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
    if isinstance(value, nn.Module):  # a dict of arrays and modules, with further attributes
        new.__dict__.update(value.__dict__)
    return new


def add_behaviour(copy: nn.Module, /, *behaviour: type, **members: Any) -> None:
    """Let ``members``, then the methods of ``behaviour``, override those of the copy's class."""
    original = type(copy)
    copy.__class__ = type(original.__name__, (*behaviour, original), members)
