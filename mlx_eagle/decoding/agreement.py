"""Agreement of the ranks that share a target on the shape of each round: rank 0 chooses it."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..drafters.acceptance_stats import CopySeen
from ..drafters.seen_text import TextMatch
from ..drafters.tree import LEAST_MATCHES, MOST_COPIED, PLAIN, TREES, DraftPlan, DraftShape
from ..system.ranks import Relay, is_first
from ..target_model.sharding import is_sharded
from ..target_model.target import Target
from .auto import AdaptiveController
from .stats import DraftingEvent

SIZES = range(MOST_COPIED + 1)
SHAPES = (*map(DraftShape, SIZES), *TREES, *(PLAIN._replace(copy=size) for size in SIZES))
"""Shapes that a controller may choose, which ranks name by their index."""


class AgreedController:
    """A ``Controller`` that decides alike in all ranks, whatever their clocks and chips say.

    Rank 0 chooses a round ahead: its choice travels while the round before is computed, and nobody
    waits for it. That is one exchange of a few numbers more than the passes need, or none where
    a pipeline's passes take it along: then rank 0 chooses two rounds ahead.
    """

    def __init__(self, own: AdaptiveController, stream: mx.Stream | mx.ThreadLocalStream):
        self._own = own
        self._relay = Relay(stream)
        first = Relay(stream).pass_on([own.drafting_off, own.never_pays])
        self.drafting_off = bool(first[0])
        self.never_pays = bool(first[1])

    def ride(self, target: Target) -> None:
        """Send choices with the activations that passes of ``target`` exchange, where they do."""
        if target.stage.to_fetch(target.taps):
            target.exchange = self._relay.ride
            self._relay.rides = True

    @property
    def events(self) -> list[DraftingEvent]:
        return self._own.events

    def next_plan(self, num_tokens: int, matches: Sequence[TextMatch] = ()) -> DraftPlan:
        """See ``Controller``."""
        plan = self._own.next_plan(num_tokens, matches) if is_first() else DraftPlan(PLAIN)
        is_off, *numbers = self._relay.pass_on([self._own.drafting_off, *to_numbers(plan)])
        self.drafting_off = bool(is_off)
        return from_numbers(numbers)

    def record(
        self, shape: DraftShape, kept: Sequence[int], seconds: float | None,
        ranks: Sequence[int] = (), copies: Sequence[CopySeen] = (),
    ) -> None:  # fmt: skip
        """See ``Controller``."""
        if is_first():
            self._own.record(shape, kept, seconds, ranks, copies)

    def disable_shape(self, shape: DraftShape, error: RuntimeError) -> bool:
        """It never can: the other ranks run this round."""
        return False

    def resize(self, num_requests: int) -> None:
        """See ``Controller``."""
        self._own.resize(num_requests)


def agreed(
    controller: AdaptiveController, model: nn.Module, stream: mx.Stream | mx.ThreadLocalStream
) -> AdaptiveController | AgreedController:
    """The controller itself, or for a target that other ranks share one that all agree with."""
    return AgreedController(controller, stream) if is_sharded(model) else controller


def to_numbers(plan: DraftPlan) -> list[int]:
    """A plan without prices as indices in ``SHAPES``, -1 for none; always as many numbers."""
    none = (None,) * len(LEAST_MATCHES)
    shapes = (plan.shape, *(plan.by_match or none), *(plan.by_answer or none))
    return [-1 if shape is None else SHAPES.index(shape) for shape in shapes]


def from_numbers(numbers: Sequence[int]) -> DraftPlan:
    """The plan that ``to_numbers`` gave these for."""
    first, *others = numbers
    half = len(LEAST_MATCHES)
    by_match, by_answer = (
        tuple(SHAPES[number] for number in part if number >= 0)
        for part in (others[:half], others[half:])
    )
    return DraftPlan(SHAPES[first], by_match, by_answer)
