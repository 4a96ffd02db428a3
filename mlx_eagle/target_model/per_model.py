"""Memo of values that are computed once for a model, and forgotten with it."""

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerModel(Generic[T]):
    """Values by objects, such as a model and a drafter's modules, while all of them are alive."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], T] = {}

    def get(self, measure: Callable[[], T], *owners: object, settings: object = None) -> T:
        """The value of ``measure()`` for ``owners`` and hashable ``settings``, computed once."""
        key = (settings, *map(id, owners))
        if key not in self._found:
            self._found[key] = measure()
            for owner in owners:
                weakref.finalize(owner, self._found.pop, key, None)
        return self._found[key]
