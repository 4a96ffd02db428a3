"""One round of a batch: what is in flight for several requests, and what became of it."""

from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from ..decoding.costs import DraftShape
from .acceptance import Verdicts
from .requests import Request


@dataclass
class SharedRound:
    """A round of several requests in flight, and then its result; lists have one entry for each.

    Rows as in ``decoding.round.Round``: row 0 of a request is its root, row i + 1 draft token i.
    """

    requests: list[Request]
    positions: list[int]  # how many tokens each had emitted before
    shape: DraftShape  # what was asked for
    room: list[int]  # as much of it as the limits of each let be kept
    num_drafted: list[int]
    verdicts: Verdicts
    packed: mx.array
    logits: mx.array  # (B, R, V), processed
    features: mx.array | None  # (B, R, F)
    absorbed: bool = False
    committed: bool = False
    kept: list[int] = field(default_factory=list)  # draft tokens, once read
    runs: list[list[int]] = field(default_factory=list)  # the tokens emitted, once read

    def of(self, index: list[int]) -> "SharedRound":
        """The same, before it was read, for some of its requests alone."""
        places = mx.array(index)
        return replace(
            self,
            requests=[self.requests[b] for b in index],
            positions=[self.positions[b] for b in index],
            room=[self.room[b] for b in index],
            num_drafted=[self.num_drafted[b] for b in index],
            verdicts=self.verdicts.of(places),
            packed=self.packed[places],
            logits=self.logits[places],
            features=None if self.features is None else self.features[places],
        )

    def read(self) -> None:
        """Wait for the device, and cut what was emitted to the limits of each request."""
        rows: Any = self.packed.tolist()
        self.kept = [num_kept for num_kept, *_ in rows]
        self.runs = [
            request.limits.cut(following[: num_kept + 1], position)
            for request, position, (num_kept, *following) in zip(
                self.requests, self.positions, rows, strict=True
            )
        ]


@dataclass(frozen=True)
class Unabsorbed:
    """What a plain step emitted, (B, 1), which the drafter has yet to absorb."""

    tokens: mx.array
    features: mx.array | None  # (B, 1, F)

    def of(self, index: mx.array) -> "Unabsorbed":
        """For some of the requests alone."""
        seen = None if self.features is None else self.features[index]
        return Unabsorbed(self.tokens[index], seen)
