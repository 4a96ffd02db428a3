"""One request as the loop sees it: its decoder, and how far it may go."""

from collections.abc import Callable, Sequence

from ..drafters.tree import DraftShape
from .auto import Controller
from .decoder import Decoder, Limits, Round


class Generation:
    """A request that runs by itself: a ``pipeline.Runner`` of single rounds.

    ``when_prefilled`` is called when the first round is read, which ends prefill.
    """

    def __init__(
        self, decoder: Decoder, limits: Limits, when_prefilled: Callable[[], None] = lambda: None
    ):
        self.decoder = decoder
        self.limits = limits
        self._when_prefilled = when_prefilled
        self._has_ended = False

    @property
    def num_tokens(self) -> int:
        return self.decoder.num_emitted

    @property
    def is_running(self) -> bool:
        return not self._has_ended

    def fit(self, shape: DraftShape) -> DraftShape:
        return self.limits.at_most(shape, self.num_tokens)

    def launch(self, shape: DraftShape) -> Round:
        return self.decoder.launch(self.fit(shape))

    def can_run_ahead(self, done: Round) -> bool:
        return done.num_drafted == 0 and self.limits.has_room_after(done.position + 1)

    def can_launch_before_read(self, shape: DraftShape) -> bool:
        """Any shape: a draft too may follow a token that only the device knows."""
        return True

    def commit_plain(self, done: Round) -> None:
        self.decoder.commit(done, 1)

    def finish(self, done: Round) -> None:
        outcome = done.read()
        if done.position == 0:
            self._when_prefilled()
        run = self.limits.cut(outcome.run, done.position)
        if not done.committed:
            self.decoder.commit(done, len(run))
        done.run = run
        self._has_ended = self.limits.end(run[-1]) or not self.limits.has_room_after(
            done.position + len(run)
        )

    def acceptance_of(self, done: Round) -> tuple[DraftShape, Sequence[int]] | None:
        shape = done.tried_shape
        return None if shape is None else (shape, (done.outcome.num_kept,))

    def retire(self, done: Round, upcoming: Round | None, controller: Controller) -> Round | None:
        return upcoming
