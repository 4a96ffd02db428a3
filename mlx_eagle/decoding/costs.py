"""What can be drafted, and what rounds of it cost beside plain steps: plain numbers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol


class TreeForm(Protocol):
    """What is asked of a tree here: its levels, the most children a node has, and its size."""

    depth: int
    width: int
    nodes: int


@dataclass(frozen=True)
class DraftShape:
    """What to draft next: a chain of ``size`` tokens, a tree of ``size`` levels, or nothing."""

    size: int
    tree: TreeForm | None = None

    def __str__(self) -> str:
        return str(self.size) if self.tree is None else str(self.tree)


PLAIN = DraftShape(0)


@dataclass(frozen=True)
class Ways:
    """How a round is computed where two ways lead to the same numbers: what is done, if true.

    ``splits_attention``: see ``target.attention_parts``; ``keeps_tail``: ``drafters.head_cache``.
    """

    splits_attention: bool = False
    keeps_tail: bool = False


@dataclass(frozen=True)
class RoundCosts:
    """Seconds: a step of pipelined plain decoding, and a round of each draft shape.

    ``failed`` are shapes that were asked for and cannot be run here. ``ways`` is how rounds were
    computed, and ``knows_ways`` whether others were tried. ``guessed``: nobody has timed these,
    PLAIN among them where that is so. ``acceptance`` is the share of first drafts that earlier
    texts accepted, where that is known.
    """

    plain: float
    rounds: Mapping[DraftShape, float]
    failed: tuple[DraftShape, ...] = ()
    ways: Ways = Ways()
    guessed: frozenset[DraftShape] = frozenset()
    knows_ways: bool = True
    acceptance: float | None = None

    @property
    def longest(self) -> int:
        return max((shape.size for shape in self.rounds if shape.tree is None), default=0)

    def speedup(self, shape: DraftShape, num_tokens: float) -> float:
        """Over plain decoding, where a round of ``shape`` emits so many tokens."""
        return num_tokens * self.plain / self.rounds[shape]

    def as_guess(self) -> "RoundCosts":
        """The same figures, with no more weight than that somebody has to begin with some."""
        return replace(self, guessed=frozenset((PLAIN, *self.rounds)))


def typical(times: Iterable[float]) -> float:
    """The lower median: what else the machine does can only add to a time.

    [3.0, 1.0, 2.0, 9.0] -> 2.0
    """
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 2]


def on_line(points: Mapping[int, float], x: int) -> float:
    """The value at ``x``, on the line between its neighbours among ``points``.

    {1: 1.0, 3: 2.0}, 2 -> 1.5
    """
    low = max(at for at in points if at <= x)
    high = min(at for at in points if at >= x)
    share = (x - low) / (high - low) if high > low else 0.0
    return points[low] + share * (points[high] - points[low])


@dataclass(frozen=True)
class BatchCosts:
    """What rounds cost for one request and for ``batch_size`` of them in shared passes.

    Fewer shapes may be known of those. Costs of batches between the two, and of lengths between
    two that were measured, lie on a line.
    """

    alone: RoundCosts
    together: RoundCosts
    batch_size: int

    def of(self, batch_size: int) -> RoundCosts:
        """The costs of a round for so many requests, at most ``batch_size``, per round of all."""
        measured = {shape.size: seconds for shape, seconds in self.together.rounds.items()}

        def cost(alone: float, together: float) -> float:
            return on_line({1: alone, self.batch_size: together}, batch_size)

        known = range(min(measured, default=1), self.together.longest + 1)
        rounds = {
            shape: cost(self.alone.rounds[shape], on_line(measured, shape.size))
            for shape in map(DraftShape, known)
            if shape in self.alone.rounds
        }
        plain = cost(self.alone.plain, self.together.plain)
        return RoundCosts(plain, rounds, acceptance=self.together.acceptance)
