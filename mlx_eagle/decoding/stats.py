"""Counts of a generation, and figures derived from them: rates, times, the footer.

Plain numbers only.
"""

import time
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

OFF = "drafting off"
PROBE = "probe"
ON = "drafting on"


@dataclass(frozen=True)
class DraftingEvent:
    """Drafting was turned off, tried again or turned on again, after ``num_tokens`` tokens."""

    num_tokens: int
    what: str  # drafting off | probe | drafting on
    reason: str


IN_ORDER = ("draft_lengths", "drafting_events")  # fields that are not counted by position
FIGURES = (
    "num_target_forwards", "num_rejected", "mean_acceptance_length", "tau", "acceptance_rate",
    "acceptance_by_position", "cumulative_acceptance_by_position", "generation_tps",
)  # fmt: skip
"""Properties of ``Stats`` that belong to what is written."""


@dataclass
class Stats:
    """Counts of one generation. Prefill and its first token are counted separately.

    ``num_target_forwards`` counts verify passes and plain steps, ``num_evals`` the times the host
    waited for the device in them; ``num_reruns`` the passes that ran kept rows again because a
    recurrent state cannot be made again. ``accepted_histogram[n]`` is the number of rounds that
    kept n draft tokens; ``drafted_by_position[i]`` the rounds that drafted more than i;
    ``draft_lengths`` how far each target forward had drafted, in order (0 for a plain step).
    ``num_drafted`` and ``num_accepted`` also count what was copied from the text, ``num_copied``
    and ``num_accepted_copied`` that alone. Times are in seconds; ``prompt_time`` ends with the
    first token.
    """

    num_rounds: int = 0
    num_plain_steps: int = 0
    num_reruns: int = 0
    num_head_forwards: int = 0
    num_evals: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_copied: int = 0
    num_accepted_copied: int = 0
    num_emitted: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    drafting_events: list[DraftingEvent] = field(default_factory=list)
    prompt_time: float = 0.0
    generation_time: float = 0.0
    _start: float = field(default_factory=time.perf_counter, repr=False)
    _first_token: float = field(default_factory=time.perf_counter, repr=False)
    _last_accepted: int | None = field(default=None, repr=False)
    _last_was_copied: bool = field(default=False, repr=False)

    def start(self) -> None:
        """Start the clock: prefill begins."""
        self._start = time.perf_counter()

    def end_prefill(self) -> None:
        """Stop the clock of prefill: the first token was read."""
        self._first_token = time.perf_counter()
        self.prompt_time = self._first_token - self._start

    def record(
        self,
        num_drafted: int,
        num_levels: int,
        num_accepted: int,
        num_emitted: int,
        num_head_forwards: int,
        is_copied: bool = False,
    ) -> None:
        """Count one target forward after prefill.

        A chain of k tokens has k levels, a tree as many as its longest branch.
        ``num_head_forwards`` is the total so far. ``is_copied``: the draft was copied.
        """
        self.generation_time = time.perf_counter() - self._first_token
        self.num_head_forwards = num_head_forwards
        self.num_evals += 1
        self.num_emitted += num_emitted
        self._last_accepted = num_accepted
        self._last_was_copied = is_copied
        self.draft_lengths.append(num_levels)
        if num_drafted == 0:
            self.num_plain_steps += 1
            return
        self.num_rounds += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        if is_copied:
            self.num_copied += num_drafted
            self.num_accepted_copied += num_accepted
        missing = num_levels - len(self.drafted_by_position)
        self.drafted_by_position += [0] * missing
        for i in range(num_levels):
            self.drafted_by_position[i] += 1
        self.accepted_histogram += [0] * (num_accepted + 1 - len(self.accepted_histogram))
        self.accepted_histogram[num_accepted] += 1

    def take_back(self, num_unread: int, num_read: int) -> None:
        """Count the last round as if it had been cut to the tokens that the caller took."""
        last = self._last_accepted
        if num_unread == 0 or last is None:
            return
        self.num_emitted -= num_unread
        kept = min(last, num_read)
        if kept < last:
            self.num_accepted -= last - kept
            if self._last_was_copied:
                self.num_accepted_copied -= last - kept
            self.accepted_histogram[last] -= 1
            self.accepted_histogram[kept] += 1
            while self.accepted_histogram[-1] == 0:
                self.accepted_histogram.pop()

    def __add__(self, other: "Stats") -> "Stats":
        """Add up the counts and times of both, for rates over all."""
        total = Stats()
        for name, value in self._counts.items():
            theirs = getattr(other, name)
            if isinstance(value, list) and name not in IN_ORDER:
                value = [a + b for a, b in zip_longest(value, theirs, fillvalue=0)]
            else:
                value = value + theirs
            setattr(total, name, value)
        return total

    @property
    def _counts(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @property
    def num_target_forwards(self) -> int:
        return self.num_rounds + self.num_plain_steps

    @property
    def num_rejected(self) -> int:
        return self.num_drafted - self.num_accepted

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per target forward, the new root included (plain decoding: 1)."""
        return self.num_emitted / self.num_target_forwards if self.num_target_forwards else 0.0

    @property
    def tau(self) -> float:
        """The mean acceptance length, by the letter that papers give it."""
        return self.mean_acceptance_length

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens divided by drafted ones."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def accepted_by_position(self) -> list[int]:
        """Number of rounds that kept the draft token at each position."""
        histogram = self.accepted_histogram
        return [sum(histogram[i + 1 :]) for i in range(len(self.drafted_by_position))]

    @property
    def acceptance_by_position(self) -> list[float]:
        """alpha_i: share kept at position i if position i - 1 was kept and i was drafted."""
        return _shares(self.accepted_by_position, self._reached_by_position)

    @property
    def cumulative_acceptance_by_position(self) -> list[float]:
        """Share kept at position i, among all rounds that drafted that far."""
        return _shares(self.accepted_by_position, self.drafted_by_position)

    @property
    def _reached_by_position(self) -> list[int]:
        accepted = self.accepted_by_position
        drafted = self.drafted_by_position
        return [min(a, d) for a, d in zip([self.num_rounds, *accepted], drafted, strict=False)]

    @property
    def acceptance_words(self) -> str:
        """The acceptance at the positions that a round reached: "0.74 0.69", or "-" for none."""
        pairs = zip(self.acceptance_by_position, self._reached_by_position, strict=True)
        return " ".join(f"{share:.2f}" for share, reached in pairs if reached) or "-"

    @property
    def _undrafted_words(self) -> str:
        """Reason why no round drafted, if ``auto`` gave one; rates would look like failures."""
        words = f"{self.num_plain_steps} plain steps"
        if self.drafting_events:
            return f"auto did not draft: {self.drafting_events[-1].reason} ({words})"
        return f"Nothing was drafted ({words})"

    @property
    def generation_tps(self) -> float:
        """Tokens per second, without the first token, which prefill yields."""
        return self.num_emitted / self.generation_time if self.generation_time else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Every count and every figure derived from them, ready for JSON."""
        events = [asdict(event) for event in self.drafting_events]
        figures = {name: getattr(self, name) for name in FIGURES}
        return self._counts | figures | {"drafting_events": events}

    def lines(self) -> list[str]:
        """The footer, line by line."""
        if self.num_rounds == 0:
            return [self._undrafted_words]
        histogram = " ".join(f"{n}:{c}" for n, c in enumerate(self.accepted_histogram))
        lines = [
            f"Rounds: {self.num_rounds}, forwards: {self.num_target_forwards} target, "
            f"{self.num_head_forwards} head",
            f"Mean acceptance length (tau): {self.mean_acceptance_length:.3f}",
            f"Draft: {self.num_drafted} drafted, {self.num_accepted} accepted, "
            f"{self.num_rejected} rejected, acceptance rate {self.acceptance_rate:.3f}",
            f"Acceptance by position: {self.acceptance_words}; "
            f"accepted lengths: {histogram or '-'}",
        ]
        if self.num_copied:
            lines.append(
                f"Of these copied: {self.num_copied} drafted, {self.num_accepted_copied} accepted"
            )
        events = self.drafting_events
        return [*lines, *(f"After {e.num_tokens} tokens: {e.what}, {e.reason}" for e in events)]


def _shares(parts: list[int], wholes: list[int]) -> list[float]:
    return [part / whole if whole else 0.0 for part, whole in zip(parts, wholes, strict=True)]
