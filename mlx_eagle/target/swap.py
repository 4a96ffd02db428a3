"""Changing what an object does for a moment, by giving it a subclass of its class."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped_classes(pairs: list[tuple[Any, type]]) -> Iterator[None]:
    """Within, each object has the class beside it; afterwards, also by an error, its own."""
    originals = [(thing, type(thing)) for thing, _ in pairs]
    for thing, changed in pairs:
        thing.__class__ = changed
    try:
        yield
    finally:
        for thing, original in originals:
            thing.__class__ = original
