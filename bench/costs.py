"""Costs of a round's parts on this machine, and the speedup that they predict.

Each part runs by itself, on caches of a typical length that are cut back afterwards. The
prediction is the expected number of tokens per round, over the time of a round in plain steps:
tau / (c(k + 1) + k d + overhead).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.drafters.acceptance_stats import expected_tokens
from mlx_eagle.drafters.base import Drafter
from mlx_eagle.drafters.tree import DraftShape
from mlx_eagle.target_model.rollback import Checkpoint
from mlx_eagle.target_model.target import Target

CHUNK = 512  # tokens per prefill step


class Timing(NamedTuple):
    """Seconds of one sample: the host builds the graph, then the device runs it."""

    build: float
    run: float


Timings = dict[str, dict[int, list[Timing]]]
"""Samples of every part by its size: rows of a pass, tokens of a draft."""


class Bench:
    """A target and a drafter that have absorbed ``context``, ready to repeat parts of a round."""

    def __init__(self, model: nn.Module, drafter: Drafter, context: list[int]):
        self._drafter = drafter
        self._target = Target(model, drafter.taps)
        self._context = mx.array(context, mx.int32)
        self._cache = make_prompt_cache(model)
        self._features = []
        with mx.stream(generation_stream):
            for start in range(0, len(context) - 1, CHUNK):
                tokens = self._context[start : min(start + CHUNK, len(context) - 1)]
                _, features = self._target(tokens, self._cache)
                mx.eval([c.state for c in self._cache], features)
                self._features.append(features)
        self.restart()

    def restart(self) -> None:
        """Begin anew with a drafter that has absorbed the context."""
        self.drafter = self._drafter.begin()
        with mx.stream(generation_stream):
            self.drafter.extend(self._context[:1], None)
            for start, features in zip(count(1, CHUNK), self._features, strict=False):
                self.drafter.extend(self._context[start : start + CHUNK], features)
            mx.eval(self.drafter.pending())

    @contextmanager
    def window(self) -> Iterator[None]:
        """Leave the caches at the end of the block as they were at its beginning."""
        windows = [Checkpoint(self._cache), Checkpoint(self.drafter.cache)]
        try:
            yield
        finally:
            for window in windows:
                window.rollback(0)

    def verify(self, num_rows: int) -> Any:
        """Verify R rows: the target's choices, and the features."""
        tokens = self._rows(num_rows)
        with self._target.matching_single_row(self._cache, num_rows):
            logits, features = self._target(tokens, self._cache)
        return [mx.argmax(logits, axis=-1), features]

    def accept(self, num_rows: int) -> Any:
        """Accept R rows: the arrays that the next draft starts from."""
        features = None
        if self.drafter.taps:
            last = self._features[-1]
            features = last[mx.arange(num_rows) % last.shape[0]]
            mx.eval(features)
        self.drafter.extend(self._rows(num_rows), features, last=mx.array(num_rows - 1))
        return self.drafter.pending()

    def propose(self, size: int) -> Any:
        """Draft ``size`` tokens greedily."""
        return self.drafter.propose(size, lambda logits, _: mx.argmax(logits, axis=-1)).tokens

    def time(self, part: str, size: int) -> Timing:
        """Time "verify", "accept" or "propose" once; the caches are left as they were."""
        with self.window(), mx.stream(generation_stream):
            mx.synchronize(generation_stream)
            start = time.perf_counter()
            arrays = getattr(self, part)(size)
            built = time.perf_counter()
            mx.eval(arrays)
            done = time.perf_counter()
        return Timing(built - start, done - built)

    def _rows(self, num_rows: int) -> mx.array:
        """Tokens (R,) of the context, computed before any clock starts."""
        tokens = self._context[mx.arange(num_rows) % self._context.shape[0]]
        mx.eval(tokens)
        return tokens


def time_parts(
    bench: Bench, timings: Timings, sizes: Mapping[str, Sequence[int]], samples: int
) -> None:
    """Add ``samples`` of every part at all its ``sizes``: rows of a pass, tokens of a draft.

    Sizes take turns, so that drift hits all alike. Each runs once unmeasured before its first
    sample, and later only the first size of a part.
    """
    for part, own in sizes.items():
        if part == "propose":
            bench.restart()
        found = timings.setdefault(part, {})
        for size in own[:1] if found else own:
            bench.time(part, size)
        for _ in range(samples):
            for size in own:
                found.setdefault(size, []).append(bench.time(part, size))


@dataclass(frozen=True)
class Costs:
    """Medians in seconds: ``verify`` and ``accept`` by rows R, ``propose`` by draft length.

    ``verify`` may have more rows than ``accept``, for trees. ``*_build`` is the time in which the
    host builds the graph of that part.
    """

    verify: Mapping[int, float]
    accept: Mapping[int, float]
    propose: Mapping[int, float]
    verify_build: Mapping[int, float]
    propose_build: Mapping[int, float]

    @classmethod
    def of(cls, timings: Timings) -> "Costs":
        """Costs from the medians of all samples."""

        def medians(part: str, name: str) -> dict[int, float]:
            samples = timings[part].items()
            return {size: median(getattr(t, name) for t in each) for size, each in samples}

        runs = [medians(part, "run") for part in ("verify", "accept", "propose")]
        return cls(*runs, medians("verify", "build"), medians("propose", "build"))

    @property
    def plain_step(self) -> float:
        """Seconds of a pass over one row, T(1): the unit of c, d and the overhead."""
        return self.verify[1]

    def c(self, num_rows: int) -> float:
        """Verify cost c(R) = T(R) / T(1)."""
        return self.verify[num_rows] / self.plain_step

    @property
    def chain_step(self) -> float:
        """Seconds that one more draft token takes: head forward, logits, pick."""
        return max(0.0, _slope(self.propose))

    @property
    def d(self) -> float:
        """A chain step in plain steps."""
        return self.chain_step / self.plain_step

    def draft(self, size: int) -> float:
        """Seconds of a draft of ``size`` tokens after the accept pass, which ran the head once."""
        return self.propose[1] + (size - 1) * self.chain_step if size else 0.0

    def host(self, size: int) -> float:
        """Seconds that a round waits for the host.

        It builds the draft while the device runs the accept pass before it, and the verify pass
        while the device drafts.
        """
        if not size:
            return 0.0
        drafting = self.propose_build[1] + (size - 1) * max(0.0, _slope(self.propose_build))
        busy = self.accept[size + 1] + self.draft(size)
        drafted = max(drafting, self.accept[size + 1]) + self.draft(size)
        return max(drafted, drafting + self.verify_build[size + 1]) - busy

    def overhead(self, size: int) -> float:
        """Cost of a round beyond c(k + 1) + k d, in plain steps."""
        accept = self.accept[size + 1] if size else 0.0
        rest = accept + self.draft(size) - size * self.chain_step + self.host(size)
        return rest / self.plain_step

    def round(self, size: int) -> float:
        """Cost of a round with ``size`` drafts, in plain steps."""
        return self.c(size + 1) + size * self.d + self.overhead(size)

    def point(self, tau: float, size: int) -> dict[str, float]:
        """Predicted speedup at a mean acceptance length of ``tau``, and its bound.

        The bound is the speedup without any overhead: tau / (c(k + 1) + k d).
        """
        bound = tau / (self.c(size + 1) + size * self.d)
        speedup = tau / self.round(size)
        return {"k": size, "mean_acceptance_length": tau, "speedup": speedup, "bound": bound}

    def predict(self, tau: float, size: int, measured: float | None) -> dict[str, Any]:
        """Predicted speedup beside the measured one, and the share of the bound reached."""
        point = self.point(tau, size)
        return {
            "mean_acceptance_length": tau,
            "predicted": point["speedup"],
            "measured": measured,
            "error": None if measured is None else point["speedup"] / measured - 1.0,
            "bound": point["bound"],
            "fraction_of_bound": None if measured is None else measured / point["bound"],
        }

    def curve(self, alphas: Sequence[float]) -> list[dict[str, float]]:
        """The prediction at every k, from the acceptance by position."""
        sizes = range(1, max(self.accept))
        return [self.point(expected_tokens(alphas, DraftShape(size)), size) for size in sizes]

    def time_split(self, size: int, round_seconds: float) -> dict[str, float]:
        """Seconds of a measured round: its parts as timed by themselves, and the rest, ``host``.

        The rest is below zero if the parts were slower by themselves than in the run.
        """
        verify = self.verify[size + 1]
        draft = self.draft(size)
        accept = self.accept[size + 1]
        host = round_seconds - (verify + draft + accept)
        parts = {"verify": verify, "draft": draft, "accept": accept, "host": host}
        return parts | {"round": round_seconds}

    def to_dict(self) -> dict[str, Any]:
        """All measured costs and the figures that follow from them, ready for JSON."""
        return {
            "verify_seconds": dict(self.verify),
            "verify_cost": {rows: self.c(rows) for rows in self.verify},
            "verify_build_seconds": dict(self.verify_build),
            "accept_seconds": dict(self.accept),
            "draft_seconds": dict(self.propose),
            "draft_build_seconds": dict(self.propose_build),
            "plain_step_seconds": self.plain_step,
            "chain_step_seconds": self.chain_step,
            "d": self.d,
            "host_seconds": {rows - 1: self.host(rows - 1) for rows in self.accept},
            "overhead": {rows - 1: self.overhead(rows - 1) for rows in self.accept},
        }


def _slope(seconds: Mapping[int, float]) -> float:
    """Seconds per token between the shortest and the longest draft."""
    low = min(seconds)
    high = max(seconds)
    return (seconds[high] - seconds[low]) / (high - low)
