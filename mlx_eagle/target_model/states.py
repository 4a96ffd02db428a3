"""Recurrent states: their updates are recorded in a pass, to be repeated on fewer of its rows.

A state says nothing of the rows that made it, so rows that are rejected cannot be taken out of it
again. But little of a layer makes its state: a short convolution keeps the last rows that entered
it, and one function of mlx-lm, such as ``gated_delta_update``, folds rows into a matrix. Its
arguments are recorded in the pass. To keep m rows, that function runs again on what it was given,
with later rows masked, and the convolution's rows are cut out of those it was run on. No weights
are read for it, and each text of a batch keeps a number of rows of its own.

What reads a state is known by the array itself: it must be handed the very object that the cache
held. Where a state is read in another way, the pass cannot be repeated so, and is run again. The
same holds for layers that are not mlx-lm's own, which are untested.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .cache_view import single_caches


@dataclass(frozen=True)
class KeptRows:
    """Numbers of a pass's rows that each of B texts keeps, one at least."""

    counts: tuple[int, ...]
    num_rows: int

    @property
    def same(self) -> int | None:
        """The number that all of them keep, if it is one."""
        return self.counts[0] if len(set(self.counts)) == 1 else None

    @cached_property
    def lengths(self) -> mx.array:
        """The counts, (B,)."""
        return mx.array(self.counts, mx.int32)

    @cached_property
    def mask(self) -> mx.array:
        """Whether a row is kept, (B, R)."""
        return mx.arange(self.num_rows) < self.lengths[:, None]

    def pick(self, states: dict[int, mx.array]) -> mx.array:
        """Pick each text's own from ``states``, (B, ...) by the number of rows that made them."""
        if self.same is not None:
            return states[self.same]
        rows = [states[count][b : b + 1] for b, count in enumerate(self.counts)]
        return mx.concatenate(rows)


Repeat = Callable[[KeptRows], mx.array]
"""Makes a state as it is after the rows that are kept."""


def _masked(call: Callable[..., Any], arguments: dict[str, Any], kept: KeptRows) -> mx.array:
    """Repeat with a mask (B, R), which ``call`` takes: other rows leave the state as it is."""
    return _state_in(call(**{**arguments, "mask": kept.mask}))


def _cut(
    names: tuple[str, ...],
    axis: int,
    call: Callable[..., Any],
    arguments: dict[str, Any],
    kept: KeptRows,
) -> mx.array:
    """Repeat over the first rows only, once for each number of them."""
    states = {}
    for count in set(kept.counts):
        rows = (slice(None),) * axis + (slice(count),)
        cut = {name: arguments[name][rows] for name in names}
        states[count] = _state_in(call(**{**arguments, **cut}))
    return kept.pick(states)


def _cut_or_masked(
    call: Callable[..., Any], arguments: dict[str, Any], kept: KeptRows
) -> mx.array:
    """Cut where all texts keep the same number: a single row has a kernel of its own."""
    if kept.same is None:
        return _masked(call, {**arguments, "lengths": kept.lengths}, kept)
    return _cut(("hidden_states", "B", "C", "dt"), 1, call, arguments, kept)


def _neutral(
    values: dict[str, float], call: Callable[..., Any], arguments: dict[str, Any], kept: KeptRows
) -> mx.array:
    """Repeat with ``values`` in other rows that leave the state as it is."""
    changed = {}
    for name, value in values.items():
        rows = arguments[name]  # (B, R, ...)
        mask = kept.mask.reshape(*kept.mask.shape, *[1] * (rows.ndim - 2))
        changed[name] = mx.where(mask, rows, value)
    return _state_in(call(**{**arguments, **changed}))


UPDATES: dict[str, Callable[[Callable[..., Any], dict[str, Any], KeptRows], mx.array]] = {
    "gated_delta_update": _masked,  # Qwen3-Next, Qwen3.5, Kimi, OLMo hybrid, Bailing
    "recurrent_gla": partial(_cut, ("q", "k", "v"), 2),  # Bailing's linear attention
    "ssm_update": _cut_or_masked,  # Mamba-2 in all its hybrids
    "rnn_scan": partial(_neutral, {"a": 1.0, "x": 0.0}),  # Griffin's RG-LRU
    "_wkv7": partial(_neutral, {"w": 1.0, "k": 0.0, "b": 0.0}),  # RWKV-7
}
"""Functions and methods of mlx-lm that bring a state over all rows, and how some are left out.

They return a pair, the state last.
"""

STEPS = ("ssm_step", "fma")
"""The same for one row at a time, of Mamba-1 and of Jamba: each call's state is kept instead."""


def _state_in(result: Any) -> mx.array:
    state: mx.array = result[-1] if isinstance(result, tuple) else result
    return state


def _repeated(
    rule: Callable[..., mx.array],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kept: KeptRows,
) -> mx.array:
    bound = signature(call).bind(*args, **kwargs)
    return rule(call, bound.arguments, kept)


@dataclass(frozen=True)
class Window:
    """A state that is the last of ``rows`` along ``axis``, the first of which it was before."""

    rows: mx.array
    axis: int
    before: int  # how many it was
    after: int  # how many it is after the pass: as many, or more while it grows

    def __call__(self, kept: KeptRows) -> mx.array:
        if kept.same is not None:
            end = self.before + kept.same
            cut = slice(max(0, end - self.after), end)
            # A copy, or all rows would be kept in memory.
            return mx.contiguous(self.rows[(slice(None),) * self.axis + (cut,)])
        index = kept.lengths[:, None] + mx.arange(self.after)
        shape = [1] * self.rows.ndim
        shape[0], shape[self.axis] = index.shape
        return mx.take_along_axis(self.rows, index.reshape(shape), axis=self.axis)


@dataclass(frozen=True)
class StateUpdates:
    """Functions that make the states of each recurrent cache in a pass again."""

    num_rows: int
    by_cache: dict[int, list[Repeat]]  # by the id of a cache
    caches: list[ArraysCache]  # which must live, so that no other has the same id

    def states(self, cache: ArraysCache, kept: KeptRows) -> list[mx.array]:
        """The states of ``cache`` after the rows that are kept."""
        return [repeat(kept) for repeat in self.by_cache[id(cache)]]


def is_recurrent(method: FunctionType) -> bool:
    """Whether a method of a module may be one that reads states: mlx-lm's, in a file with some."""
    has_states = method.__globals__.get(ArraysCache.__name__) is ArraysCache
    return has_states and method.__module__.startswith("mlx_lm.models.")


def recurrent_caches(caches: Sequence[Any]) -> Iterator[ArraysCache]:
    """Yield the caches that hold states, members of lists included."""
    return (cache for cache in single_caches(caches) if isinstance(cache, ArraysCache))


class StateRecorder:
    """Notes what reads the states of the caches in a pass; of one pass at a time."""

    def __init__(self) -> None:
        self._arrays = ModuleType(mx.__name__)
        self._arrays.__dict__.update({**vars(mx), "concatenate": self._concatenate})
        self.begin([], 0)

    def begin(self, caches: Sequence[Any], num_rows: int) -> None:
        """Begin a pass of ``num_rows``; after it, begin one without caches, to note nothing."""
        self._num_rows = num_rows
        self._caches = list(recurrent_caches(caches))
        self._before = [list(cache.cache) for cache in self._caches]  # alive, or ids are reused
        self._slots = {
            id(state): (i, slot)
            for i, states in enumerate(self._before)
            for slot, state in enumerate(states)
            if state is not None
        }
        self._found: dict[tuple[int, int], Any] = {}

    def end(self) -> StateUpdates | None:
        """The updates noted; None where they do not say how every state comes about."""
        by_cache: dict[int, list[Any]] = {
            id(cache): [self._repeat((i, slot), state) for slot, state in enumerate(cache.cache)]
            for i, cache in enumerate(self._caches)
        }
        padded = any(c.lengths is not None or c.left_padding is not None for c in self._caches)
        updates = StateUpdates(self._num_rows, by_cache, self._caches)
        return None if padded or any(None in made for made in by_cache.values()) else updates

    def _repeat(self, slot: tuple[int, int], state: Any) -> Repeat | None:
        """Function that makes the state at ``slot``, now ``state``, again; None if unknown."""
        found = self._found.get(slot)
        if isinstance(found, list):
            is_whole = len(found) == self._num_rows
            states = dict(enumerate(found, 1))
            return partial(KeptRows.pick, states=states) if is_whole else None
        if not isinstance(found, tuple):
            return found
        rows, axis, before = found
        after = state.shape[axis]
        if rows.shape[axis] == before + self._num_rows - 1:  # all that the last row looks back at
            last = mx.take(state, mx.array([after - 1]), axis)
            rows = mx.concatenate([rows, last], axis)
        of_pass = rows.shape[axis] == before + self._num_rows
        is_alike = after == before or rows.shape[0] == 1  # several texts do not grow alike
        return Window(rows, axis, before, after) if of_pass and is_alike else None

    def names_in(self, method: FunctionType) -> dict[str, Any]:
        """Globals to replace in ``method``, which ``is_recurrent``, by name."""
        known = method.__globals__
        used = method.__code__.co_names
        names: dict[str, Any] = {
            name: self.noting(name, known[name])
            for name in used
            if name in known and (name in UPDATES or name in STEPS)
        }
        if "concatenate" in used and known.get("mx") is mx:
            names["mx"] = self._arrays
        return names

    def noting(self, name: str, call: Callable[..., Any]) -> Any:
        """``call``, recorded if ``name`` is a function that updates states."""
        if name in UPDATES:
            return self._noting_call(UPDATES[name], call)
        return self._noting_steps(call) if name in STEPS else call

    def _noting_call(self, rule: Callable[..., mx.array], call: Callable[..., Any]) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            slot = self._slot_in(args, kwargs)
            if slot is not None:
                self._found[slot] = partial(_repeated, rule, call, args, kwargs)
            return call(*args, **kwargs)

        return noted

    def _noting_steps(self, call: Callable[..., Any]) -> Any:
        """Record calls for one row each: the first is given the state, others the last result."""
        steps: list[mx.array] = []

        def noted(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            slot = self._slot_in(args, kwargs)
            if slot is not None:
                self._found[slot] = steps = []
            result = call(*args, **kwargs)
            if self._slots:
                steps.append(_state_in(result))
            return result

        return noted

    def _slot_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
        """Cache and slot of the state among the arguments; None if there is none."""
        slots = self._slots
        if slots:
            for value in (*args, *kwargs.values()):
                if id(value) in slots:
                    return slots[id(value)]
        return None

    def _concatenate(self, arrays: list[mx.array], axis: int = 0, **kwargs: Any) -> mx.array:
        """MLX's function of that name: a state with the rows of the pass behind is a window."""
        rows = mx.concatenate(arrays, axis, **kwargs)
        slot = self._slots.get(id(arrays[0]))
        if slot is not None:
            self._found[slot] = rows, axis % rows.ndim, arrays[0].shape[axis]
        return rows
