"""Costs of rounds: estimated seconds for each shape of a pair, before and after timing it.

Before any round is timed, the estimate for shape s is c(s), a curve known for the chip. The time
of a round is modelled as

    log t(s) = log c(s) + f(s) + p + e

with the pace p of the machine, a random walk; the error f of the curve, a Gaussian process, part
of which is proportional to log c (Rasmussen and Williams 2006, equations 4.19 and 2.11); and e,
noise from other work. A Kalman filter estimates f and p, so each time also informs about other
shapes, and slow moments can be compared with fast ones. Estimates of a pair stay in memory.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from threading import Lock
from typing import NamedTuple

import mlx.nn as nn
import numpy as np

from ..drafters.acceptance_stats import Acceptance, CopyAcceptance
from ..drafters.base import Drafter
from ..drafters.tree import LONG_CHAINS, PLAIN, DraftShape
from ..system.device import product_cost, this_machine, weight_bytes
from ..target_model.kernels import KernelOptions
from ..target_model.per_model import PerModel
from .pass_costs import TargetWeights

PRIOR = 1 / 3  # share of first drafts accepted before any text has shown it: heads have .3 to .8
# Standard deviations of logarithms of seconds:
SPREAD = 0.25  # of a curve's error, before any time: 8 rows took .7 of it with OpenBLAS
STRETCH = 0.8  # of the factor on all its logarithms
NOISE = 0.035  # of a single time, at least
LEARN = 0.05  # weight of the latest time in the estimate of that noise
PACE = 0.03  # of the change of the pace in a round
TEXT = 0.2  # of its change between texts
KNOWN = 0.2  # of a cost relative to the one timed last, below which it counts as known
NEAR = 0.1  # rows squared; costs a row apart are correlated by (1 + 1 / NEAR)^-TAIL = .62,
TAIL = 0.2  # costs 8 rows apart by .27
APART = 3.0  # rows added between plain steps and drafts, which share only the weights
DRIFT = 1e-4  # times SPREAD^2, added to the variance of a cost per round: contexts grow
OUTLIER = 3.0  # standard deviations; a time further off gets so much variance that it is this far


Curve = Callable[[DraftShape, int], float]
"""A number for a round, given its shape and the number of requests."""


class Estimate(NamedTuple):
    """Seconds of a round, and the standard deviation of their logarithm less the latest one's."""

    seconds: float
    error: float

    @property
    def is_known(self) -> bool:
        return self.error <= KNOWN

    def off(self, deviations: float) -> float:
        """The seconds if the logarithm is off by ``deviations`` standard deviations."""
        return self.seconds * math.exp(deviations * self.error)


class RoundCosts:
    """Costs of a pair's rounds for any number of requests, from a curve and measured times.

    ``curve`` gives the cost of a round by shape and number of requests, in plain steps of one
    request, and ``doubt`` the standard deviation of its logarithm that it shares with rounds in
    doubt only: those by another kernel than the others.
    """

    def __init__(self, curve: Curve, doubt: Curve | None = None):
        self.acceptance = Acceptance(PRIOR, LONG_CHAINS[-1].size)  # what a new text expects
        self.copies = CopyAcceptance()  # likewise of copies
        self.failed: frozenset[DraftShape] = frozenset()
        self.options: KernelOptions | None = None  # None: others were not tried
        self._curve = curve
        self._doubt = doubt
        self._lock = Lock()
        self._run: set[DraftShape] = set()
        # The pace, of which nothing is known, then what the curve is off at each key: means,
        # covariances, and covariances before anything was timed.
        self._mean = np.zeros(1)
        self._cov = np.diag([100.0])
        self._prior = np.zeros((1, 1))
        self._columns: dict[tuple[int, DraftShape], int] = {}
        self._points = np.zeros((0, 7))  # where each key stands: see ``_point``
        self._latest = 0  # column of the key timed last
        self._noise = NOISE**2  # variance of times

    def record(self, num_requests: int, shape: DraftShape, seconds: float | None) -> None:
        """Record a finished round or plain step; ``seconds`` is None if it is unknown."""
        with self._lock:
            at = self._column(num_requests, shape)
            is_less = self._cov.diagonal() < self._prior.diagonal()  # no less known than at first
            self._cov += DRIFT * self._prior * np.outer(is_less, is_less)
            self._cov[0, 0] += PACE**2
            if seconds is None:
                return
            self._run.add(shape)
            cost = self._curve(shape, num_requests)
            shared = self._cov[0] + self._cov[at]
            off = math.log(seconds / cost) - self._mean[0] - self._mean[at]
            variance = max(shared[0] + shared[at] + self._noise, (off / OUTLIER) ** 2)
            self._mean += shared * (off / variance)
            self._cov -= np.outer(shared, shared) / variance
            noise = self._noise * (1 + LEARN * (off * off / variance - 1))
            self._noise = max(NOISE**2, noise)
            self._latest = at

    def begin(self) -> None:
        """Begin a text: the machine may have had other work since the last one."""
        with self._lock:
            self._cov[0, 0] += TEXT**2

    def has_run(self, shape: DraftShape) -> bool:
        """Whether a round of that shape was ever timed."""
        return shape in self._run

    def estimates(self, shapes: Sequence[DraftShape], num: int) -> dict[DraftShape, Estimate]:
        """Estimate ``shapes`` and plain steps for ``num`` requests, all at the same pace."""
        keys = PLAIN, *shapes
        seconds = np.array([self._curve(s, num) for s in keys])
        with self._lock:
            at = [self._column(num, shape) for shape in keys]
            last = self._latest
            seconds *= np.exp(self._mean[0] + self._mean[at])
            variance = self._cov.diagonal()[at]
            if last:
                variance += self._cov[last, last] - 2 * self._cov[last, at]
        errors = np.sqrt(np.maximum(0.0, variance))
        return dict(zip(keys, map(Estimate, seconds.tolist(), errors.tolist()), strict=True))

    def _column(self, num: int, shape: DraftShape) -> int:
        """Index of a key's numbers; a new key starts from its correlation with the others."""
        key = num, shape
        if key not in self._columns:
            self._points = np.vstack([self._points, self._point(num, shape)])
            apart = ((self._points - self._points[-1])[:, :-2] ** 2).sum(axis=1)
            shared_causes = self._points[:, -2:] @ self._points[-1, -2:]
            *others, own = SPREAD**2 * (1 + apart / NEAR) ** -TAIL + shared_causes
            alike = np.array([0.0, *others])
            weights = np.zeros(len(others) + 1)
            weights[1:] = np.linalg.solve(self._prior[1:, 1:], alike[1:])
            shared = self._cov @ weights
            variance = own - weights @ alike + weights @ shared
            self._mean = np.append(self._mean, weights @ self._mean)
            self._cov = np.block([[self._cov, shared[:, None]], [shared, variance]])
            self._prior = np.block([[self._prior, alike[:, None]], [alike, own]])
            self._columns[key] = len(self._columns) + 1
        return self._columns[key]

    def _point(self, num: int, shape: DraftShape) -> tuple[float, ...]:
        """Coordinates of a round among others, in rows, and deviations of what it shares."""
        stretch = STRETCH * math.log(self._curve(shape, num) / self._curve(PLAIN, num))
        doubt = 0.0 if self._doubt is None else self._doubt(shape, num)
        is_draft = not shape.is_plain
        is_tree = shape.width > 1
        is_copy = shape.copy > 0
        return shape.num_rows, APART * is_draft, is_tree, is_copy, math.log2(num), stretch, doubt


# Plain steps that a round of a chain, and one of a tree, whose nodes are chosen and moved, takes
# beside its passes, before one was timed. Two CPUs had 0 to 0.05 and 0.05 to 0.1.
CHAIN_OVERHEAD = 0.02
TREE_OVERHEAD = 0.08
_known: PerModel[RoundCosts] = PerModel()


def costs_of(
    model: nn.Module, drafter: Drafter, rule: object, is_exact: bool = False
) -> RoundCosts:
    """Costs of a pair's rounds under a rule: one object for the whole process.

    ``is_exact``: each row of a pass is computed as a plain step is.
    """

    def begin() -> RoundCosts:
        curve, doubt = _curves(model, drafter, is_exact)
        return RoundCosts(curve, doubt)

    settings = (drafter.cost_key, str(rule), is_exact)
    return _known.get(begin, model, *drafter.modules(), settings=settings)


def _curves(model: nn.Module, drafter: Drafter, is_exact: bool) -> tuple[Curve, Curve]:
    """Cost of a round in plain steps, and the doubt in it: see ``RoundCosts``."""
    machine = this_machine()
    weights = TargetWeights.of(model)
    share = min(1.0, sum(map(weight_bytes, drafter.modules())) / max(1, weights.row_bytes))

    def curve(shape: DraftShape, num_requests: int) -> float:
        num_rows = shape.num_rows * num_requests
        verify = num_rows if is_exact else weights.pass_cost(machine, num_rows)
        steps = shape.size * share * product_cost(machine, num_requests, weights.packing)
        overhead = CHAIN_OVERHEAD if shape.tree is None else TREE_OVERHEAD
        return verify + steps + overhead * (not shape.is_plain)

    def doubt(shape: DraftShape, num_requests: int) -> float:
        num_rows = shape.num_rows * num_requests
        return 0.0 if is_exact else weights.pass_doubt(machine, num_rows)

    return cache(curve), doubt
