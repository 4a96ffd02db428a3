"""The calls of a model's layers in one pass, recorded so that their first rows can be run again.

A recurrent state cannot be cut to the rows that were kept. It is restored, and the layers that
own such states run the kept rows once more, on the arguments they were given.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from inspect import Signature, signature
from types import FunctionType
from typing import Any

import mlx.core as mx

ROWS = ("v_first",)
"""Layer arguments, beside the first, with one entry per row: (1, R, ...)."""

MASKS = ("mask", "attn_mask", "mamba_mask")
"""Layer arguments that say what each row sees: (..., R, S), the last R columns the rows."""


@dataclass(frozen=True)
class LayerCall:
    """One layer's call in a pass over R rows; ``run`` does what the layer's own class does."""

    run: Any  # a bound method
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def uses(self, cache: Any) -> bool:
        return any(value is cache for value in (*self.args, *self.kwargs.values()))

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Every argument by its name in the layer's signature; the residual stream is first."""
        bound = _signature(self.run.__func__).bind(self.run.__self__, *self.args, **self.kwargs)
        _, *arguments = bound.arguments.items()
        return dict(arguments)

    def is_repeatable(self, cache_types: tuple[type, ...]) -> bool:
        """Whether it is known how to cut each argument: nothing that grew, no unknown arrays."""
        stream, *others = self.arguments.items()
        return isinstance(stream[1], mx.array) and all(
            isinstance(value, (str, int, float, type(None), *cache_types))
            or (isinstance(value, mx.array) and name in (*ROWS, *MASKS))
            for name, value in others
        )

    def repeat(self, num_rows: int) -> None:
        """Run the layer on its first ``num_rows`` again, for what that does to its cache."""
        (name, stream), *others = self.arguments.items()
        cut = {name: stream[:, :num_rows]}
        for name, value in others:
            if isinstance(value, mx.array):
                value = _first_rows(name, value, num_rows, stream.shape[1])
            cut[name] = value
        self.run(**cut)


@lru_cache
def _signature(function: FunctionType) -> Signature:
    return signature(function)


def _first_rows(name: str, value: mx.array, num_rows: int, total: int) -> mx.array:
    """What the first ``num_rows`` of ``total`` have of an argument of that name."""
    if name in ROWS:
        return value[:, :num_rows]
    return value[..., :num_rows, : value.shape[-1] - total + num_rows]


@dataclass(frozen=True)
class LayerCalls:
    """The calls of every layer in one pass, in order.

    ``matching_single_row(m)`` is entered around m rows that are run again: they take the positions
    and the masks that the pass had (see ``Target.matching_single_row``).
    """

    calls: tuple[LayerCall, ...]
    matching_single_row: Callable[[int], AbstractContextManager[None]]

    def of(self, caches: list[Any], cache_types: tuple[type, ...]) -> "LayerCalls | None":
        """The calls that bring ``caches`` forward; None where only the whole model can.

        A model may use a cache outside its layers, or give layers something that grows.
        """
        calls = tuple(call for call in self.calls if any(call.uses(cache) for cache in caches))
        suffice = len(calls) == len(caches) and all(c.is_repeatable(cache_types) for c in calls)
        return replace(self, calls=calls) if suffice else None

    def repeat(self, num_rows: int) -> None:
        """Run the first ``num_rows`` through these layers again."""
        with self.matching_single_row(num_rows):
            for call in self.calls:
                call.repeat(num_rows)
