"""Attention to a latent cache for a pass of few rows, computed in absorbed form.

Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) caches one latent row
for all heads. mlx-lm computes it in two forms. A single row takes the *absorbed* form: its queries
are projected to the latent, and the result back to the heads. Several rows take the *expanded*
form, which projects the whole cache to keys and values of every head. That is right for a prompt,
but for the few rows of a verify pass it is many times the necessary work.

The code of mlx-lm's method does not change. It makes keys with ``embed_q`` and values with
``unembed_out``; these two record their inputs and outputs. When attention gets both outputs, it
attends to the latent instead. Nothing reads the expanded arrays then, so they are never computed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .attention import find_attention

PROJECTIONS = ("embed_q", "unembed_out")
"""mlx-lm's names: queries to the latent, or the latent to keys; the latent to values."""


class Made(NamedTuple):
    """An array of a pass, its input, and the function that made it."""

    array: mx.array  # kept alive, so that its id is not reused
    source: Any
    by: Callable[..., mx.array]


class AbsorbedAttention:
    """Attention for methods that can absorb; while ``is_on`` it attends to the latent.

    It is the state of one generation, and of one call of such a method at a time.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._made: dict[int, Made] = {}
        self._picked: mx.array | None = None
        self._arrays = ModuleType(mx.__name__)
        self._arrays.__dict__.update(vars(mx))
        self._arrays.__dict__.update(
            concatenate=self._concatenate,
            broadcast_to=self._broadcast_to,
            put_along_axis=self._put_along_axis,
        )

    @contextmanager
    def absorbing(self) -> Iterator[None]:
        """Absorb in this block if that takes fewer multiplications."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            self._forget()

    def note(self, array: mx.array, source: Any, by: Callable[..., mx.array]) -> mx.array:
        """Record how ``array`` was made, until attention gets it, and return it."""
        if self.is_on:
            self._made[id(array)] = Made(array, source, by)
        return array

    def names_in(self, method: FunctionType) -> dict[str, Any]:
        """Globals to replace in a method that can absorb, by name."""
        used = set(method.__code__.co_names)
        # Methods that choose columns gather them for a single row, and mask others for several.
        chooses = {"put_along_axis", "take_along_axis"} <= used
        is_known = method.__globals__.get("mx") is mx
        return {"mx": self._arrays} if is_known and (chooses or "concatenate" in used) else {}

    def __call__(
        self,
        attend: Callable[..., mx.array],
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        **more: Any,
    ) -> mx.array:
        """``attend``, mlx-lm's function, for queries (B, H, R, D), or the same with the latent.

        Keys are made from the latent (B, 1, S, r), perhaps followed by the rotated keys
        (B, H, S, d), which all heads share; if these are separate, ``mask`` has their scores.
        """
        options = {"cache": cache, "scale": scale, **more}
        joined = self._made.get(id(keys))
        sources = joined.source if joined and joined.by is mx.concatenate else [keys]
        by_keys = self._made.get(id(sources[0]))
        found = (self._made.get(id(made)) for made in sources[1:])
        shared = [made.source for made in found if made and made.by is mx.broadcast_to]
        by_values = self._made.get(id(values))
        picked = self._picked
        self._forget()
        if (
            by_keys is None
            or by_values is None
            or by_keys.source is not by_values.source
            or len(shared) < len(sources) - 1
            or not _is_less(queries.shape[2], by_keys, values, picked)
        ):
            return attend(queries, keys, values, mask=mask, **options)
        for rotated_keys in shared:
            queries, rotated = mx.split(queries, [by_keys.array.shape[-1]], axis=-1)
            mask = _masked_scores(rotated * scale, rotated_keys, mask)
        rows = by_keys.by(queries)
        latent = by_keys.source
        if picked is None:
            out = attend(rows, latent, latent, mask=mask, **options)
        else:
            out = _attend_to_picked(attend, rows, latent, mask, picked, **options)
        return by_values.by(out)

    def _forget(self) -> None:
        self._made.clear()
        self._picked = None

    def _concatenate(self, arrays: list[mx.array], axis: int = 0, **more: Any) -> mx.array:
        """MLX's function of that name: the two parts of keys, or of queries, side by side."""
        joined = mx.concatenate(arrays, axis, **more)
        if len(arrays) != 2 or axis != -1:
            return joined
        return self.note(joined, arrays, mx.concatenate)

    def _broadcast_to(self, array: mx.array, shape: Any, **more: Any) -> mx.array:
        """MLX's function of that name: the rotated keys, for every head."""
        return self.note(mx.broadcast_to(array, shape, **more), array, mx.broadcast_to)

    def _put_along_axis(
        self, array: mx.array, indices: mx.array, values: mx.array, axis: int
    ) -> mx.array:
        """MLX's function of that name: a mask of the columns (B, 1, R, K) that a row chose."""
        if self.is_on and array.dtype == mx.bool_ and indices.ndim == 4 and axis == -1:
            self._picked = indices
        return mx.put_along_axis(array, indices, values, axis)


def _is_less(num_rows: int, keys: Made, values: mx.array, picked: mx.array | None) -> bool:
    """Whether the absorbed form takes fewer multiplications, which are counted for one head."""
    num_columns, rank = keys.source.shape[2:]
    width = keys.array.shape[3] + values.shape[3]
    num_seen = num_columns if picked is None else picked.shape[3]
    absorbed: int = num_rows * rank * (width + 2 * num_seen)
    expanded: int = num_columns * width * (rank + num_rows)
    return absorbed < expanded


def _masked_scores(queries: mx.array, keys: mx.array, mask: Any) -> mx.array:
    """Scores (B, H, R, S) of queries (B, H, R, d), which are scaled, and keys (B, 1, S, d)."""
    scores: mx.array = queries @ keys.swapaxes(-1, -2)
    num_rows, num_columns = scores.shape[2:]
    if isinstance(mask, str):  # causal
        rows = mx.arange(num_columns - num_rows, num_columns)
        mask = rows[:, None] >= mx.arange(num_columns)
    if mask is None:
        return scores
    return mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))


def _attend_to_picked(
    attend: Callable[..., mx.array],
    rows: mx.array,
    latent: mx.array,
    scores: mx.array,
    picked: mx.array,
    **options: Any,
) -> mx.array:
    """Each of rows (B, H, R, r) to the columns (B, 1, R, K) that it chose, as a text of its own.

    ``scores`` (B, H, R, S) of the rotated parts are added.
    """
    batch, num_heads, num_rows, rank = rows.shape
    num_picked = picked.shape[3]
    index = picked.reshape(batch, 1, -1, 1)
    index = mx.broadcast_to(index, (*index.shape[:-1], rank))
    seen = mx.take_along_axis(latent, index, axis=2).reshape(-1, 1, num_picked, rank)
    index = mx.broadcast_to(picked, (batch, num_heads, num_rows, num_picked))
    scores = mx.take_along_axis(scores, index, axis=-1)

    def each_alone(array: mx.array) -> mx.array:
        """(B, H, R, N) -> (B * R, H, 1, N)."""
        return array.swapaxes(1, 2).reshape(-1, num_heads, 1, array.shape[-1])

    out = attend(each_alone(rows), seen, seen, mask=each_alone(scores), **options)
    return out.reshape(batch, num_rows, num_heads, rank).swapaxes(1, 2)


class NotedProjection(nn.Module):
    """Mixin in front of a projection's class: tells ``AbsorbedAttention`` what it made."""

    _absorbed: AbsorbedAttention

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """Project x, the latent (B, 1, S, r) or what heads have of their own (B, H, R, N)."""
        own = super().__call__
        return self._absorbed.note(own(x, *args, **kwargs), x, own)


def can_absorb(method: Any) -> bool:
    """Whether a method that attends makes keys and values of a latent by mlx-lm's modules."""
    return set(PROJECTIONS) <= set(method.__code__.co_names)


def find_projections(model: nn.Module) -> list[nn.Module]:
    """The two projections of every module of a model's layers that attends to a latent."""
    return [
        module[name]
        for module in find_attention(model)
        if can_absorb(type(module).__call__)
        for name in PROJECTIONS
    ]
