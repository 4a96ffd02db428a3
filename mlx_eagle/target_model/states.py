"""Recurrent states: a pass records their updates, which can be repeated on fewer of its rows.

Rejected rows cannot be removed from a state. But only little of a layer makes its state: a short
convolution keeps the last rows that entered it, and one function of mlx-lm, such as
``gated_delta_update``, folds rows into a matrix. The pass records its arguments. To keep m rows,
that function runs again on the same arguments with later rows masked, and the convolution's state
is cut out of the rows that it was run on. This reads no weights, and each text of a batch can keep
its own number of rows.

The recorder recognises a state by the array itself: a function must be given the very object that
the cache held. If a state is read in another way, the whole pass is run again. The same is true
of layers that are not mlx-lm's own, which are untested.
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
    """Numbers of rows, at least one, that each of B texts keeps of a pass."""

    counts: tuple[int, ...]
    num_rows: int

    @property
    def same(self) -> int | None:
        """The number of rows if all texts keep the same; else None."""
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
        """Pick each text's state from ``states``: (B, ...) by number of rows kept."""
        if self.same is not None:
            return states[self.same]
        rows = [states[count][b : b + 1] for b, count in enumerate(self.counts)]
        return mx.concatenate(rows)


Repeat = Callable[[KeptRows], mx.array]
"""Computes a state as it is after the kept rows."""


def _masked(call: Callable[..., Any], arguments: dict[str, Any], kept: KeptRows) -> mx.array:
    """Repeat with a mask (B, R), which ``call`` takes: other rows do not change the state."""
    return _state_in(call(**{**arguments, "mask": kept.mask}))


def _cut(
    names: tuple[str, ...],
    axis: int,
    call: Callable[..., Any],
    arguments: dict[str, Any],
    kept: KeptRows,
) -> mx.array:
    """Repeat over the first rows only, once for each number of rows kept."""
    states = {}
    for count in set(kept.counts):
        rows = (slice(None),) * axis + (slice(count),)
        cut = {name: arguments[name][rows] for name in names}
        states[count] = _state_in(call(**{**arguments, **cut}))
    return kept.pick(states)


def _cut_or_masked(
    call: Callable[..., Any], arguments: dict[str, Any], kept: KeptRows
) -> mx.array:
    """Cut if all texts keep the same number of rows: a single row has its own kernel."""
    if kept.same is None:
        return _masked(call, {**arguments, "lengths": kept.lengths}, kept)
    return _cut(("hidden_states", "B", "C", "dt"), 1, call, arguments, kept)


def _neutral(
    values: dict[str, float], call: Callable[..., Any], arguments: dict[str, Any], kept: KeptRows
) -> mx.array:
    """Repeat with ``values`` in the other rows, which then do not change the state."""
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
"""Functions and methods of mlx-lm that advance a state over rows, and how to leave rows out.

They return a pair, the state last.
"""

STEPS = ("ssm_step", "fma")
"""Functions of Mamba-1 and Jamba that advance a state by one row: each result is kept."""


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
    """A state: the last of ``rows`` along ``axis``; the first of them are the state before."""

    rows: mx.array
    axis: int
    before: int  # rows of the old state
    after: int  # rows of the state after the pass: the same number, or more while it grows

    def __call__(self, kept: KeptRows) -> mx.array:
        if kept.same is not None:
            end = self.before + kept.same
            cut = slice(max(0, end - self.after), end)
            # A copy, since a view would keep all rows in memory.
            return mx.contiguous(self.rows[(slice(None),) * self.axis + (cut,)])
        index = kept.lengths[:, None] + mx.arange(self.after)
        shape = [1] * self.rows.ndim
        shape[0], shape[self.axis] = index.shape
        return mx.take_along_axis(self.rows, index.reshape(shape), axis=self.axis)


@dataclass(frozen=True)
class StateUpdates:
    """Functions that recompute the states of each recurrent cache in a pass."""

    num_rows: int
    by_cache: dict[int, list[Repeat]]  # by the id of a cache
    caches: list[ArraysCache]  # kept alive, so that their ids are not reused

    def states(self, cache: ArraysCache, kept: KeptRows) -> list[mx.array]:
        """The states of ``cache`` after the kept rows."""
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
