"""Caches of several texts in one, each text with its own length.

Text b's entry of position p is in column p of its row buffer or, in a cache with a window, in
column p modulo the size of a ring. A pass of R rows writes them at ``length[b] + r``, and a mask
by length hides the columns after a text's end. So keeping some of the rows, or none, is
arithmetic on lengths: nothing is moved, and no text is padded for another.

A ring has a few more columns than the window, so that the rows of a pass overwrite nothing that
is visible from any row that may be the last one kept.

Rows cannot be removed from a recurrent state. If texts keep different numbers of rows of a pass,
states are recomputed from what was recorded of the pass (``states.py``).
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from .cache_view import STEP, CacheView, single_caches
from .states import KeptRows, StateUpdates, recurrent_caches


class RaggedStates:
    """One layer's states for B texts, each an array (B, ...), or None if there is none yet."""

    def __init__(self, size: int):
        self._states: Any = ArraysCache(size)
        self._restore: Callable[[], list[Any]] | None = None  # what makes those that are kept
        self._pass: Any = ArraysCache(0)

    def _kept(self) -> Any:
        """The states, computed on demand, so that other work can be started before."""
        if self._restore is not None:
            self._states.cache = self._restore()
            self._restore = None
        return self._states

    def begin(self) -> Any:
        """Begin a pass; return the cache for the model. Nothing that it writes is kept yet."""
        self._pass = copy(self._kept())
        self._pass.cache = list(self._pass.cache)
        return self._pass

    def advance(self, kept: KeptRows, updates: StateUpdates | None) -> None:
        """Keep the ``kept`` rows of the pass; all of them without ``updates``."""
        if updates is None or kept.same == updates.num_rows:
            self._states.cache = list(self._pass.cache)
            self._restore = None
        else:
            self._restore = partial(updates.states, self._pass, kept)

    def join(self, cache: ArraysCache, num_others: int) -> None:
        """Append the states of a text, which are not changed, after ``num_others``."""
        states = self._kept()
        states.left_padding = mx.zeros(num_others)  # by which mlx-lm counts texts without states
        states.extend(cache)
        states.left_padding = None
        self._pass = ArraysCache(0)

    def keep(self, index: mx.array) -> None:
        """Drop all other texts, also from the current pass."""
        self._kept().filter(index)
        self._pass.filter(index)

    def extract(self, index: int) -> Any:
        """One text's states."""
        states = copy(self._kept())
        states.filter(slice(index, index + 1))
        return states


SLACK = 16  # columns by which a ring is larger than its window, or as many as a pass needs


def can_share(caches: Sequence[Any]) -> bool:
    """Whether ``RaggedCaches`` can hold a text's caches exactly."""
    return all(
        type(c) in (KVCache, ArraysCache)
        or (type(c) is RotatingKVCache and c.keep == 0)
        # Lists of only keys and values belong to attention that depends on the order of slots.
        or (type(c) is CacheList and any(recurrent_caches([c])) and can_share(c.caches))
        for c in caches
    )


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


class RowLengths:
    """Lengths of all texts, and arrays derived from them for a pass.

    Arrays are made once per pass, for all layers.
    """

    def __init__(self, mask_axes: int = 4) -> None:
        self.slack = SLACK
        self._mask_axes = mask_axes
        self._made: dict[tuple[Any, ...], mx.array] = {}
        self.set([])

    def set(self, lengths: list[int]) -> None:
        """Set the lengths of the texts."""
        self.lengths = lengths
        self.longest = max(lengths, default=0)
        self.offset = mx.array(lengths, mx.int32)  # (B,)
        self._made.clear()

    def once(self, key: tuple[Any, ...], make: Callable[[], mx.array]) -> mx.array:
        """Return the result of ``make``, called once per ``key`` until lengths change."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def after(self, num_rows: int) -> mx.array:
        """The lengths (B,) with ``num_rows`` more rows."""
        return self.once(("after", num_rows), lambda: self.offset + num_rows)

    def positions(self, num_rows: int) -> mx.array:
        """The positions (B, R) of a pass's rows."""
        return self.once(("places", num_rows), lambda: self.offset[:, None] + mx.arange(num_rows))

    def width(self, num_rows: int, ring: int | None) -> int:
        """Columns in use after a pass of ``num_rows`` rows."""
        width = self.longest + num_rows
        return width if ring is None else min(width, ring)

    def flat_index(self, shape: tuple[int, ...], num_rows: int, ring: int | None) -> mx.array:
        """Flat indices, in order, of rows (B, H, R, D) in row buffers of ``shape`` (B, H, S, D).

        One index per number is what MLX writes fastest if the rows of several buffers are at
        different positions.
        """

        def make() -> mx.array:
            batch, num_heads, num_columns, size = shape
            columns = self.positions(num_rows) if ring is None else self.positions(num_rows) % ring
            large = batch * num_heads * num_columns * size >= 2**31
            dtype = mx.int64 if large else mx.int32
            buffers = mx.arange(batch * num_heads, dtype=dtype).reshape(batch, num_heads, 1)
            rows = buffers * num_columns + columns[:, None].astype(dtype)
            return (rows[..., None] * size + mx.arange(size, dtype=dtype)).reshape(-1)

        return self.once(("flat_index", shape, num_rows, ring), make)

    def mask(self, num_rows: int, ring: int | None, window: int | None) -> mx.array:
        """Mask of the columns that each row of a pass sees, (B, 1, R, S) or with one more axis.

        Without rows it is that of the last row before the pass.
        """

        def make() -> mx.array:
            rows = self.positions(num_rows) if num_rows else self.offset[:, None] - 1
            rows = rows[:, None, :, None]
            slots = mx.arange(self.width(num_rows, ring))
            wraps = ring is not None and self.longest + num_rows > ring
            if wraps:
                slots = _held(slots, self.after(num_rows)[:, None, None, None], ring)
            mask = slots <= rows
            if window is not None:
                mask = mask & (slots > rows - window)
            if wraps:
                mask = mask & (slots >= 0)
            return mask if self._mask_axes == 4 else mask[:, None]

        return self.once(("mask", num_rows, ring, window), make)


def _held(columns: mx.array, length: Any, ring: int | None) -> mx.array:
    """Positions that columns hold once ``length`` rows are written; below 0: none yet."""
    return columns if ring is None else length - 1 - (length - 1 - columns) % ring


class RaggedCache:
    """One layer's keys and values for B texts, with the interface of a cache.

    ``max_size`` is the window, None if everything is kept. Row buffers (B, H, S, D) are None
    until they have entries, and stay None in a layer that does not attend.
    """

    def __init__(self, rows: RowLengths, max_size: int | None = None):
        self.keys: Any = None
        self.values: Any = None
        self.max_size = max_size
        self.offset = rows.offset
        self._rows = rows
        self._ring: int | None = None if max_size is None else max_size + SLACK
        self._num_rows = 0  # of the pass under way

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """See ``RowLengths.mask``; parameters as in mlx-lm."""
        sizes = [size for size in (window_size, self.max_size) if size is not None]
        return self._rows.mask(N, self._ring_for(N), min(sizes, default=None))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the rows of a pass, (B, H, R, D), and return all columns in use."""
        num_rows = keys.shape[2]
        self._make_room(num_rows)
        self.keys = self._written(self.keys, keys)
        self.values = self._written(self.values, values)
        self.offset = self._rows.after(num_rows)
        self._num_rows = num_rows
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The columns in use, including the current pass."""
        width = self._rows.width(self._num_rows, self._ring)
        return self.keys[..., :width, :], self.values[..., :width, :]

    def kept(self) -> tuple[mx.array, mx.array, mx.array]:
        """Keys and values (B, H, S, D), unordered, and a mask (B, 1, 1, S) of the valid ones.

        Valid are all positions, or the ones in the window.
        """
        width = self._rows.width(0, self._ring)
        mask = self._rows.mask(0, self._ring, self.max_size).reshape(-1, 1, 1, width)
        return self.keys[..., :width, :], self.values[..., :width, :], mask

    @property
    def state(self) -> list[mx.array]:
        """The arrays to compute."""
        return [] if self.keys is None else [self.keys, self.values]

    def empty(self) -> bool:
        return self.keys is None

    def begin(self) -> "RaggedCache":
        """Begin a pass at the texts' ends; return the cache for the model."""
        self.offset = self._rows.offset
        self._num_rows = 0
        return self

    def advance(self, kept: KeptRows, updates: StateUpdates | None) -> None:
        """Do nothing: the lengths say which written rows count."""

    def join(self, cache: KVCache | RotatingKVCache, num_others: int) -> None:
        """Append the cache of a text, which is not changed, after ``num_others``."""
        is_empty = cache.keys is None or cache.offset == 0
        if is_empty and self.keys is None:
            return
        need = max(cache.offset, self._rows.longest)
        num_columns = self._columns(max(need, self._num_columns))
        arrays = [self.keys, self.values]
        # Of an empty text any entries do: no row of it sees them.
        no_rows = [mx.zeros_like(array[:1, :, :1]) for array in arrays] if is_empty else None
        for i, theirs in enumerate(no_rows or CacheView([cache]).rows(0)):
            if arrays[i] is None:
                arrays[i] = mx.zeros((num_others, *theirs.shape[1:]), theirs.dtype)
            buffer = self._row_buffer(theirs, cache.offset, num_columns)
            arrays[i] = mx.concatenate([_pad_columns(arrays[i], num_columns), buffer])
        self.keys, self.values = arrays

    def keep(self, index: mx.array) -> None:
        """Drop all other texts."""
        if self.keys is not None:
            self.keys = self.keys[index]
            self.values = self.values[index]

    def extract(self, index: int) -> KVCache | RotatingKVCache:
        """One text's cache, as if it had been decoded by itself."""
        cache = KVCache() if self.max_size is None else RotatingKVCache(self.max_size)
        length = self._rows.lengths[index]
        if self.keys is None or length == 0:
            return cache
        num_kept = min(length, self.max_size or length)
        columns = mx.arange(length - num_kept, length)
        if self._ring is not None:
            columns = columns % self._ring
        cache.keys = mx.take(self.keys[index : index + 1], columns, axis=2)
        cache.values = mx.take(self.values[index : index + 1], columns, axis=2)
        cache.offset = length
        if isinstance(cache, RotatingKVCache):
            cache._idx = num_kept
        return cache

    @property
    def _num_columns(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def _columns(self, length: int) -> int:
        """Columns of row buffers for texts of that length."""
        columns = _round_up(length, STEP)
        return columns if self._ring is None else min(columns, self._ring)

    def _ring_for(self, num_rows: int) -> int | None:
        """The ring for passes of ``num_rows``: large enough for the largest so far."""
        if self.max_size is None:
            return None
        self._rows.slack = max(self._rows.slack, _round_up(num_rows - 1, SLACK))
        return self.max_size + self._rows.slack

    def _make_room(self, num_rows: int) -> None:
        """Enlarge the row buffers, and their ring, so that ``num_rows`` more fit."""
        before: Any = self._ring
        self._ring = self._ring_for(num_rows)
        if self.keys is None:
            return
        if self._ring != before:
            columns = mx.arange(self._columns(self._rows.longest))
            positions = _held(columns, self._rows.offset[:, None], self._ring)
            slots = mx.minimum(mx.maximum(positions, 0) % before, self._num_columns - 1)
            index = slots[:, None, :, None]
            self.keys = mx.take_along_axis(self.keys, index, axis=2)
            self.values = mx.take_along_axis(self.values, index, axis=2)
        num_columns = self._columns(self._rows.longest + num_rows)
        self.keys = _pad_columns(self.keys, num_columns)
        self.values = _pad_columns(self.values, num_columns)

    def _row_buffer(self, entries: mx.array, length: int, num_columns: int) -> mx.array:
        """The last entries (1, H, n, D) of a text of that length, each in its column."""
        num_kept = entries.shape[2]
        positions = _held(mx.arange(num_columns), length, self._ring)
        return mx.take(entries, mx.clip(positions - length + num_kept, 0, num_kept - 1), axis=2)

    def _written(self, buffers: mx.array | None, rows: mx.array) -> mx.array:
        """Write rows (B, H, R, D) at their columns into the row buffers (B, H, S, D), in place."""
        num_rows = rows.shape[2]
        if buffers is None:
            columns = self._columns(self._rows.longest + num_rows)
            buffers = mx.zeros((*rows.shape[:2], columns, rows.shape[3]), rows.dtype)
        index = self._rows.flat_index(buffers.shape, num_rows, self._ring)
        flat = mx.put_along_axis(buffers.reshape(-1), index, rows.reshape(-1), axis=0)
        return flat.reshape(buffers.shape)


def _pad_columns(buffers: mx.array, num_columns: int) -> mx.array:
    """Row buffers with empty columns added at the end, ``num_columns`` in all."""
    missing = num_columns - buffers.shape[2]
    return buffers if missing <= 0 else mx.pad(buffers, [(0, 0), (0, 0), (0, missing), (0, 0)])


class RaggedCaches:
    """Caches of B texts for all layers of a model.

    Each text's caches must pass ``can_share``. ``mask_axes`` is the number of axes of the model's
    masks: see ``batch_mask_axes``.
    """

    def __init__(self, mask_axes: int = 4) -> None:
        self.rows = RowLengths(mask_axes)
        self.layers: list[Any] = []  # RaggedCache, RaggedStates, or a CacheList of them
        self._updates: StateUpdates | None = None

    def open(self) -> list[Any]:
        """The layers' caches for a pass at the texts' ends; its rows are not kept yet.

        An earlier pass of which nothing was kept is forgotten.
        """
        self._updates = None
        return _each(self.layers, lambda layer: layer.begin())

    def keep_updates(self, updates: StateUpdates | None) -> None:
        """Keep the pass's record of its state updates, for ``advance``."""
        if updates is None:
            raise ValueError("the target updates a recurrent state in a way that was not seen")
        self._updates = updates

    def advance(self, num_rows: Sequence[int]) -> None:
        """Add ``num_rows[b]`` of the rows after its end to text b; a negative number drops rows.

        Without updates of the pass, a recurrent state keeps all of its rows.
        """
        updates = self._updates
        kept = KeptRows(tuple(num_rows), 1 if updates is None else updates.num_rows)
        for layer in single_caches(self.layers):
            layer.advance(kept, updates)
        self.rows.set([n + more for n, more in zip(self.rows.lengths, num_rows, strict=True)])

    def join(self, caches: list[Any]) -> None:
        """Append a text; its own ``caches`` are not changed."""
        others = self.rows.lengths
        if not others:
            self.rows.slack = SLACK
            self.layers = _each(caches, self._make)
        single = list(single_caches(caches))
        for layer, cache in zip(single_caches(self.layers), single, strict=True):
            layer.join(cache, len(others))
        # Layers without keys and values do not count tokens.
        self.rows.set([*others, max((getattr(c, "offset", 0) for c in single), default=0)])

    def keep(self, index: list[int]) -> None:
        """Drop all texts but these, in this order."""
        self.layers = self.layers if index else []
        for layer in single_caches(self.layers):
            layer.keep(mx.array(index, mx.int32))
        self.rows.set([self.rows.lengths[b] for b in index])

    def extract(self, index: int) -> list[Any]:
        """One text's caches."""
        return _each(self.layers, lambda layer: layer.extract(index))

    def view(self, index: int) -> CacheView:
        """One text's caches, each extracted when it is read."""
        return CacheView(self.layers, lambda layer: layer.extract(index))

    def kept(self, index: int) -> tuple[mx.array, mx.array, mx.array]:
        """``RaggedCache.kept`` of a layer; ValueError where it holds no keys and values."""
        layer = self.layers[index]
        if not isinstance(layer, RaggedCache):
            raise ValueError(f"cache {index} of the target holds no keys and values to read.")
        return layer.kept()

    def _make(self, cache: Any) -> RaggedCache | RaggedStates:
        """Make the cache that holds several texts' caches like this one."""
        if isinstance(cache, ArraysCache):
            return RaggedStates(len(cache.cache))
        return RaggedCache(self.rows, getattr(cache, "max_size", None))


def _each(caches: Sequence[Any], make: Callable[[Any], Any]) -> list[Any]:
    """Results of ``make`` for each cache; of a ``CacheList``, one with those of its members."""
    return [CacheList(*_each(c.caches, make)) if type(c) is CacheList else make(c) for c in caches]
