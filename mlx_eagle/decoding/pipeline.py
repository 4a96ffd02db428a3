"""The loop over rounds, the same for one request and for a batch: when what is launched."""

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from .controller import Controller, DraftShape

R = TypeVar("R")
"""What a runner launches: one round, or one round per request of a batch."""


class Runner(Protocol[R]):
    """What runs rounds: a request by itself, or several in shared passes of the target."""

    @property
    def num_tokens(self) -> int:
        """Emitted so far, committed rounds included; in a batch, by the longest request."""

    @property
    def is_running(self) -> bool:
        """Whether anything is left to generate after the rounds that are finished."""

    def launch(self, shape: DraftShape) -> R:
        """Start a round without waiting for the device."""

    def can_run_ahead(self, done: R) -> bool:
        """Whether a round may follow before ``done`` is read.

        It may after a plain step, whose one token is known to the device, as long as the limits
        allow another.
        """

    def can_launch_unread(self, shape: DraftShape) -> bool:
        """Whether it is this round that may follow before the one before it is read."""

    def commit_plain(self, done: R) -> None:
        """Commit a plain step before it is read."""

    def finish(self, done: R) -> None:
        """Read a round, and commit it where that is not done yet."""

    def learned(self, done: R) -> tuple[DraftShape, Sequence[int]] | None:
        """What was drafted and how much of it was accepted; None after a plain step."""

    def settle(self, done: R, upcoming: R | None, controller: Controller) -> R | None:
        """Let go of what ended with ``done``; returns what is in flight for the rest."""


class Pipeline(Generic[R]):
    """Rounds one after the other; iterating gives each when it is finished.

    The next round is on the device before the caller sees the tokens of this one. While drafting
    is off it is launched before this one is even read, as mlx-lm does. ``current`` and
    ``upcoming`` say, at any moment and after any error, what was begun.
    """

    def __init__(self, runner: Runner[R], controller: Controller, first: R | None = None):
        self.runner = runner
        self.controller = controller
        self.current: R | None = None
        self.upcoming = self._launch_next() if first is None else first

    def __iter__(self) -> Iterator[R]:
        runner, controller = self.runner, self.controller
        while self.upcoming is not None:
            done, self.upcoming = self.upcoming, None
            self.current = done
            shape = None  # of the next round, once it is decided
            if controller.drafting_off and runner.can_run_ahead(done):
                runner.commit_plain(done)
                shape = controller.next_shape(runner.num_tokens)
                if runner.can_launch_unread(shape):
                    self.upcoming = runner.launch(shape)
            runner.finish(done)
            if (learned := runner.learned(done)) is not None:
                drafted, num_accepted = learned
                controller.record(drafted, *num_accepted)
            self.upcoming = runner.settle(done, self.upcoming, controller)
            if self.upcoming is None and runner.is_running:
                self.upcoming = self._launch_next(shape)
            yield done
            if not runner.is_running:
                return

    def _launch_next(self, shape: DraftShape | None = None) -> R:
        """The next round, of the shape that was decided already or is now."""
        if shape is None:
            shape = self.controller.next_shape(self.runner.num_tokens)
        return self.runner.launch(shape)
