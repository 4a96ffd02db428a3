"""The loop over rounds, the same for one request and for a batch: when what is launched."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from ..drafters.tree import PLAIN, DraftShape
from .auto import Controller

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

    def fit(self, shape: DraftShape) -> DraftShape:
        """As much of ``shape`` as there is room for."""

    def launch(self, shape: DraftShape) -> R:
        """Start a round without waiting for the device."""

    def can_run_ahead(self, done: R) -> bool:
        """Whether a round may follow before ``done`` is read.

        It may after a plain step, whose one token is known to the device, as long as the limits
        allow another.
        """

    def can_launch_before_read(self, shape: DraftShape) -> bool:
        """Whether it is this round that may follow before the one before it is read."""

    def commit_plain(self, done: R) -> None:
        """Commit a plain step before it is read."""

    def finish(self, done: R) -> None:
        """Read a round, and commit it where that is not done yet."""

    def acceptance_of(self, done: R) -> tuple[DraftShape, Sequence[int]] | None:
        """What was drafted and how much of it was accepted; None after a plain step."""

    def retire(self, done: R, upcoming: R | None, controller: Controller) -> R | None:
        """Let go of what ended with ``done``; returns what is in flight for the rest."""


class RoundClock:
    """Times rounds from the end of one to the end of the next, where that says what they cost.

    It does after a round of the same kind, drafted or plain: the first of a kind also waits for
    what the other has left to do. A plain step counts only among its like: launched before the
    one before it was read, and read after the next one was launched, as where drafting is off.
    The last one is done by the time when the one before it is read.
    """

    MOST_PAUSE = 0.2  # of a time, in which the caller kept the device waiting

    def __init__(self) -> None:
        self._before: DraftShape | None = None
        self._end = self._paused = 0.0

    def seconds(self, shape: DraftShape, between_plain_steps: bool) -> float | None:
        """What a round of that shape, which has just ended, has taken; None where nobody knows.

        ``between_plain_steps``: whether it is a plain step among others that ran ahead.
        """
        now = time.perf_counter()
        before, seconds, paused = self._before, now - self._end, self._paused
        self._before, self._end, self._paused = shape, now, 0.0
        if before is None or (before == PLAIN) != (shape == PLAIN):
            return None
        if (shape == PLAIN and not between_plain_steps) or paused > self.MOST_PAUSE * seconds:
            return None
        return seconds

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Within, others have the thread."""
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start


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
        if first is None:
            first = self._launch(controller.next_shape(runner.num_tokens))
        self.upcoming: R | None = first
        self._clock, self._was_ahead = RoundClock(), False

    def __iter__(self) -> Iterator[R]:
        runner, controller = self.runner, self.controller
        while self.upcoming is not None:
            done, self.upcoming = self.upcoming, None
            self.current = done
            was_ahead, self._was_ahead = self._was_ahead, False
            can_be_ahead = controller.drafting_off and runner.can_run_ahead(done)
            if can_be_ahead:
                runner.commit_plain(done)
            # Before the read, and recorded after the launch: the device waits for neither.
            shape = controller.next_shape(runner.num_tokens)
            if can_be_ahead and runner.can_launch_before_read(shape):
                self.upcoming, self._was_ahead = self._launch(shape), True
            runner.finish(done)
            drafted, num_accepted = runner.acceptance_of(done) or (PLAIN, ())
            between_plain_steps = was_ahead and self._was_ahead and shape == PLAIN
            seconds = self._clock.seconds(drafted, between_plain_steps)
            self.upcoming = runner.retire(done, self.upcoming, controller)
            if self.upcoming is None and runner.is_running:
                self.upcoming = self._launch(shape)
            controller.record(drafted, num_accepted, seconds)
            with self._clock.pausing():
                yield done
            if not runner.is_running:
                return

    def _launch(self, shape: DraftShape) -> R:
        """A round of that shape; a plain step in place of one that this device cannot run."""
        try:
            return self.runner.launch(shape)
        except RuntimeError as err:
            fitting = self.runner.fit(shape)
            if fitting.size == 0 or not self.controller.disable_shape(fitting, err):
                raise
        return self.runner.launch(PLAIN)
