"""The speculative loop: draft, verify, accept, commit, tell, repeat.

1. Draft: the drafter proposes a chain or a tree behind the root, the last token emitted.
2. Verify: one forward pass of the target runs over the root and the draft.
3. Accept: the rule keeps the tokens that the target agrees with, and the drafter absorbs them.
4. Commit: the host reads which were kept, cuts the caches to them, and emits them.
5. Tell: the controller learns how many tokens the round kept and how long it took.

The first three are one launch, which the host does not wait for: ``Decoder.launch`` for one
request, ``Batch.launch`` for several. The next round is launched between 4 and 5, so the device
stays busy while the controller computes and while the caller uses the tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..drafters.acceptance_stats import CopySeen
from ..drafters.seen_text import TextMatch
from ..drafters.tree import PLAIN, DraftPlan, DraftShape
from .decoder import Decoder, Limits, Round
from .stats import DraftingEvent


class Launched(Protocol):
    """A round in flight, for one request or for a batch."""

    @property
    def shape(self) -> DraftShape:
        """The shape that is drafted or copied."""


R = TypeVar("R", bound=Launched)
"""A runner's type of round: for one request, or for all requests of a batch."""


class Controller(Protocol):
    """Chooses the shape of each round; both implementations are in ``auto.py``."""

    @property
    def drafting_off(self) -> bool:
        """Whether decoding is plain for now, so that the drafter may fall behind."""

    @property
    def events(self) -> list[DraftingEvent]:
        """When drafting was turned off and on, and why."""

    def next_plan(self, num_tokens: int, matches: Sequence[TextMatch]) -> DraftPlan:
        """Plan the round after the current one, before which ``num_tokens`` were emitted.

        ``matches`` are the known text matches of a batch's requests.
        """

    def record(
        self,
        shape: DraftShape,
        kept: Sequence[int],
        seconds: float | None,
        ranks: Sequence[int],
        copies: Sequence[CopySeen],
    ) -> None:
        """Record a finished round: tokens kept per request (none: a plain step), and seconds.

        ``ranks`` belong to a tree: see ``Round.ranks``. ``copies`` say how far copies of the text
        were right in this round, whether they were used or only watched.
        """

    def disable_shape(self, shape: DraftShape, error: RuntimeError) -> bool:
        """Whether generation can continue without ``shape``, which has failed."""

    def resize(self, num_requests: int) -> None:
        """Let ``num_requests`` share rounds from now on."""


class Runner(Protocol[R]):
    """Runs rounds, for one request or for several that share the target's passes."""

    @property
    def num_tokens(self) -> int:
        """Tokens emitted so far, committed rounds included; in a batch, of the longest request."""

    @property
    def is_running(self) -> bool:
        """Whether anything is left to generate after the finished rounds."""

    @property
    def matches(self) -> Sequence[TextMatch]:
        """For each request, what the end of its text, as read so far, matches."""

    def choose(self, plan: DraftPlan) -> DraftShape:
        """Pick the shape in ``plan`` for the text read so far, cut to the room that is left."""

    def launch(self, plan: DraftPlan) -> R:
        """Start a round without waiting for the device."""

    def can_run_ahead(self, done: R) -> bool:
        """Whether a round may follow before ``done`` is read.

        It may after a plain step, since the device knows its only token, if the limits allow one
        more token.
        """

    def can_launch_before_read(self, plan: DraftPlan) -> bool:
        """Whether a round of that plan may start before the previous one is read."""

    def commit_plain(self, done: R) -> None:
        """Commit a plain step before it is read."""

    def finish(self, done: R) -> None:
        """Read a round, and commit it if that has not been done."""

    def acceptance_of(self, done: R) -> tuple[DraftShape, Sequence[int]] | None:
        """The drafted shape and the number of tokens kept per request; None after a plain step."""

    def ranks_of(self, done: R) -> Sequence[int]:
        """Ranks of a tree's kept children, as in ``Round.ranks``; () for chains."""

    def copies_of(self, done: R) -> Sequence[CopySeen]:
        """Results of copies in ``done``, whether they were used or only watched."""

    def retire(self, done: R, upcoming: R | None, controller: Controller) -> R | None:
        """Release requests that ended with ``done``; return the round in flight for the rest."""


class RoundClock:
    """Times rounds from the end of one to the end of the next, where that is what they cost.

    That needs two drafted rounds in a row, or two plain steps: the first after a change also
    waits for what the round before left on the device. A plain step counts only inside a run of
    them, launched before the previous one was read and read after the next one was launched, as
    when drafting is off. The last of a run has ended by the time the one before it is read.
    """

    MOST_PAUSE = 0.2  # share of a time in which the caller kept the device waiting

    def __init__(self) -> None:
        self._before: DraftShape | None = None
        self._end = self._paused = 0.0

    def seconds(self, shape: DraftShape, between_plain_steps: bool) -> float | None:
        """Seconds that the round which has just ended took; None if they are unknown.

        ``between_plain_steps``: whether it is a plain step between others that ran ahead.
        """
        now = time.perf_counter()
        before = self._before
        seconds = now - self._end
        paused = self._paused
        self._before = shape
        self._end = now
        self._paused = 0.0
        if before is None or (before == PLAIN) != (shape == PLAIN):
            return None
        if (shape == PLAIN and not between_plain_steps) or paused > self.MOST_PAUSE * seconds:
            return None
        return seconds

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Exclude the time of this block, in which other code has the thread."""
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start


class Pipeline(Generic[R]):
    """Rounds one after the other; iterating yields each one when it is finished.

    The next round is on the device before the caller sees the tokens of this one. While drafting
    is off, it is launched before this one is even read, as mlx-lm does. ``current`` and
    ``upcoming`` are the rounds that were begun, at any moment and after any error.
    """

    def __init__(self, runner: Runner[R], controller: Controller, first: R | None = None):
        self.runner = runner
        self.controller = controller
        self.current: R | None = None
        if first is None:
            first = self._launch(controller.next_plan(runner.num_tokens, runner.matches))
        self.upcoming: R | None = first
        self._clock = RoundClock()
        self._was_ahead = False

    def __iter__(self) -> Iterator[R]:
        runner = self.runner
        controller = self.controller
        while self.upcoming is not None:
            # 1. to 3. of this round, draft, verify and accept, are under way.
            done = self.upcoming
            self.upcoming = None
            self.current = done
            was_ahead = self._was_ahead
            self._was_ahead = False
            can_be_ahead = controller.drafting_off and runner.can_run_ahead(done)
            if can_be_ahead:
                runner.commit_plain(done)
            # Chosen before the read, from what the rounds before have shown. Once per pair this
            # also tests whether trees can be verified; that time is not counted for any round.
            with self._clock.pausing():
                plan = controller.next_plan(runner.num_tokens, runner.matches)
            if can_be_ahead and runner.can_launch_before_read(plan):
                self.upcoming = self._launch(plan)
                self._was_ahead = self.upcoming.shape.is_plain
            # 4. Commit.
            runner.finish(done)
            drafted, num_accepted = runner.acceptance_of(done) or (PLAIN, ())
            between_plain_steps = was_ahead and self._was_ahead
            seconds = self._clock.seconds(drafted, between_plain_steps)
            # 1. to 3. of the next round.
            self.upcoming = runner.retire(done, self.upcoming, controller)
            if self.upcoming is None and runner.is_running:
                self.upcoming = self._launch(plan)
            # 5. Tell.
            ranks = runner.ranks_of(done)
            controller.record(drafted, num_accepted, seconds, ranks, runner.copies_of(done))
            with self._clock.pausing():
                yield done
            if not runner.is_running:
                return

    def _launch(self, plan: DraftPlan) -> R:
        """Launch a round of that plan, or a plain step if this device cannot run it."""
        try:
            return self.runner.launch(plan)
        except RuntimeError as err:
            shape = self.runner.choose(plan)
            if shape.is_plain or not self.controller.disable_shape(shape, err):
                raise
        return self.runner.launch(DraftPlan(PLAIN))


MOST_FORCED = 15  # tokens of a grammar: with the root, as many rows as kernels take at once


@dataclass
class SingleRunner:
    """A request that runs by itself: a ``Runner`` of single rounds.

    ``when_prefilled`` is called when the first round is read, which ends prefill.
    """

    decoder: Decoder
    limits: Limits
    when_prefilled: Callable[[], None] = lambda: None
    is_running: bool = True

    @property
    def num_tokens(self) -> int:
        return self.decoder.num_emitted

    @property
    def matches(self) -> Sequence[TextMatch]:
        return ()

    def choose(self, plan: DraftPlan) -> DraftShape:
        return self.limits.at_most(self.decoder.choose(plan), self.num_tokens)

    def launch(self, plan: DraftPlan) -> Round:
        most_forced = self.limits.at_most(DraftShape(MOST_FORCED), self.num_tokens).size
        shape = self.choose(plan)
        return self.decoder.launch(shape, most_forced=most_forced, prices=plan.prices)

    def can_run_ahead(self, done: Round) -> bool:
        """See ``Runner``; never with a grammar: what it forces next depends on the token."""
        has_grammar = bool(self.decoder.processors.grammars)
        room = self.limits.has_room_after(done.position + 1)
        return done.num_drafted == 0 and room and not has_grammar

    def can_launch_before_read(self, plan: DraftPlan) -> bool:
        """True for any shape: drafts and copies may follow a token that only the device knows."""
        return True

    def commit_plain(self, done: Round) -> None:
        self.decoder.commit(done, 1)
        if self.decoder.copies is not None:
            self.decoder.copies.num_unread = 1

    def finish(self, done: Round) -> None:
        outcome = done.read()
        if done.position == 0:
            self.when_prefilled()
        run = self.limits.cut(outcome.run, done.position)
        if not done.committed:
            self.decoder.commit(done, len(run))
        done.run = run
        done.copy_seen = self.decoder.see(run)
        num_emitted = done.position + len(run)
        self.is_running = self.limits.has_room_after(num_emitted, run[-1])

    def acceptance_of(self, done: Round) -> tuple[DraftShape, Sequence[int]] | None:
        shape = done.tried_shape
        return None if shape is None else (shape, (done.outcome.num_kept,))

    def ranks_of(self, done: Round) -> Sequence[int]:
        return done.ranks

    def copies_of(self, done: Round) -> Sequence[CopySeen]:
        return () if done.copy_seen is None else (done.copy_seen,)

    def retire(self, done: Round, upcoming: Round | None, controller: Controller) -> Round | None:
        return upcoming
