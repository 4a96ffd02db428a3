"""One round: a draft, the verify pass over it, and what became of both."""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import mlx.core as mx

from ..drafters.base import Draft
from ..target.rollback import Checkpoint
from .accept import Choice, Outcome, Verification
from .costs import DraftShape
from .stats import Stats


class Rows(Protocol):
    """The rows of a verify pass in the target's caches, as ``Checkpoint`` has them."""

    def rollback(self, num_rows: int) -> None:
        """Keep the first ``num_rows``."""

    def rollback_to_branch(self, rows: list[int]) -> None:
        """Keep these rows of a tree."""


@dataclass(frozen=True)
class OpenRound:
    """A round before its verify pass: what is drafted, and the rule's part in it.

    ``position`` is the number of tokens emitted before. ``shape`` is what the drafter was asked
    for; a draft may be shorter than that, or empty.
    """

    position: int
    shape: DraftShape
    choice: Choice
    draft: Draft
    draft_checkpoint: Checkpoint

    @property
    def num_drafted(self) -> int:
        return len(self.draft)


@dataclass
class Round:
    """A verify pass in flight, and then its result: row 0 is the root, row i + 1 draft token i."""

    position: int
    shape: DraftShape
    num_drafted: int
    num_levels: int
    verification: Verification
    features: mx.array | None  # (R, F)
    target_rows: Rows
    draft_checkpoint: Checkpoint
    num_head_forwards: int = 0  # of the drafter since prefill, this round included
    absorbed: bool = False  # by the drafter; otherwise kept until it catches up
    committed: bool = False
    outcome: Outcome | None = None  # once read
    run: list[int] = field(default_factory=list)  # the tokens emitted, once read and committed
    num_taken: int = 0  # of them, by the caller

    def read(self) -> Outcome:
        """Wait for the device: what stays of the draft, and what follows."""
        self.outcome = self.verification.read()
        return self.outcome

    @property
    def tried_shape(self) -> DraftShape | None:
        """What the controller learns from: what was drafted; None where no draft was asked for.

        A drafter that had nothing to propose counts as one whose first token was not accepted.
        """
        if self.shape.size == 0 or self.shape.tree is not None:
            return self.shape if self.shape.size > 0 else None
        return replace(self.shape, size=max(self.num_drafted, 1))

    def count(self, stats: Stats) -> None:
        """Add the round to ``stats``; of a run that was cut, what is left."""
        num_accepted = min(self.outcome.num_kept, len(self.run))
        stats.record(
            self.num_drafted, self.num_levels, num_accepted, len(self.run), self.num_head_forwards
        )

    def keep_run(self, length: int) -> None:
        """Cut the caches to the rows that led to the first ``length`` tokens emitted."""
        if self.outcome is None or self.outcome.rows is None:
            self.rollback(length, length)
            return
        self.target_rows.rollback_to_branch(self.outcome.rows[:length])
        self.draft_checkpoint.rollback(length)

    def rollback(self, num_rows: int, num_pairs: int) -> None:
        """Cut to the first rows of the target and the first pairs of the drafter."""
        if num_rows <= self.num_drafted:
            self.target_rows.rollback(num_rows)
        if num_pairs <= self.num_drafted:
            self.draft_checkpoint.rollback(num_pairs)


class StopPoint(Enum):
    """Where a generation stopped, by what is left to do to its caches."""

    INSIDE_RUN = "the last round emitted more than was taken, or it failed: the rest is undone"
    NEXT_IN_FLIGHT = "all was taken; the next round has run the last token already"
    AT_ROOT = "all was taken; the last token has not been run yet"


def stop_point(last: Round, upcoming: Round | None) -> StopPoint:
    """Where a generation stands whose ``last`` round was begun to be read."""
    if not last.run or last.num_taken < len(last.run):
        return StopPoint.INSIDE_RUN
    return StopPoint.AT_ROOT if upcoming is None else StopPoint.NEXT_IN_FLIGHT
