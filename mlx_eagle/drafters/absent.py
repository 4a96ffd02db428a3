"""The drafter of requests that are decoded plainly, beside others that are drafted for."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .base import Draft, NoModel, Pick, empty_draft


class NoDrafter(NoModel):
    """A ``Drafter`` that absorbs nothing and proposes nothing.

    ``num_forwards`` are those of a drafter in whose place it comes.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, num_forwards: int = 0):
        self.cache: list[Any] = []
        self.num_forwards = num_forwards

    def begin(self, cache: list | None = None) -> "NoDrafter":
        """See ``Drafter.begin``."""
        return NoDrafter()

    def make_cache(self) -> list:
        """See ``Drafter.make_cache``: it needs none."""
        return []

    def extend(
        self, tokens: mx.array, features: mx.array | None, last: mx.array | None = None
    ) -> None:
        """See ``Drafter.extend``."""

    def propose(self, size: int, pick: Pick) -> Draft:
        """See ``Drafter.propose``."""
        return empty_draft()

    def modules(self) -> list[nn.Module]:
        """See ``Drafter.modules``."""
        return []

    def hold(self, features: mx.array) -> None:
        """See ``Drafter.hold``."""

    def pending(self) -> list[mx.array]:
        """See ``Drafter.pending``."""
        return []
