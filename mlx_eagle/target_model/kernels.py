"""Kernel options: ways to compute a round with the same result, to be chosen by time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

MOST_TIME = 0.98  # of the ordinary way's, that another may take to be chosen
UNCOUNTED = 2  # rounds after a change: one was under way, the next one compiles kernels
COUNTED = 3  # rounds of each way, of which the fastest counts: other work only adds to a time


@dataclass(frozen=True)
class KernelOptions:
    """Switches; see ``target_model/stand_in.py`` and ``drafters/head_cache.py``."""

    splits_attention: bool = False
    uses_overlay: bool = False
    forces_fused: bool = False


class OptionTrial:
    """Tries the options by ``names`` one after the other, each against the best so far.

    ``use`` sets the options for all rounds from the next one on. Only consecutive rounds of one
    shape are compared: after another shape, the block of rounds that is being timed begins again.
    """

    def __init__(self, names: Sequence[str], use: Callable[[KernelOptions], None]):
        self.best = KernelOptions()
        self._left = list(names)
        self._use = use
        self._now = self.best
        self._shape: object = None
        self._times: list[float] = []
        self._num_rounds = 0
        self._to_beat = 0.0

    @property
    def has_ended(self) -> bool:
        return not self._left

    def record(self, shape: object, seconds: float | None) -> None:
        """Record the time of a round of ``shape``; None, if it is unknown, does not count."""
        if self.has_ended or seconds is None:
            return
        if shape != self._shape:
            self._begin(shape, self.best)
        self._num_rounds += 1
        if self._num_rounds > UNCOUNTED:
            self._times.append(seconds)
        if len(self._times) < COUNTED:
            return
        fastest = min(self._times)
        if self._now == self.best:
            self._to_beat = fastest
            self._begin(shape, replace(self.best, **{self._left[0]: True}))
            return
        del self._left[0]
        if fastest < MOST_TIME * self._to_beat:
            self.best = self._now
        self._begin(shape, self.best)

    def _begin(self, shape: object, options: KernelOptions) -> None:
        self._shape = shape
        self._times = []
        self._num_rounds = 0
        if options != self._now:
            self._now = options
            self._use(options)
