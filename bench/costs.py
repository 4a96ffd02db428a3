"""Costs of a round's parts on this machine, and the speedup that they predict.

Each part runs by itself, on caches of a typical length that are cut back afterwards. The
prediction is the expected number of tokens per round, over the time of a round in plain steps:
tau / (c(k + 1) + k d + overhead).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        self.drafter = drafter.begin()
        self._target = Target(model, drafter.taps)
        self._context = mx.array(context, mx.int32)
        self._cache = make_prompt_cache(model)
        last = len(context) - 1
        with mx.stream(generation_stream):
            self.drafter.extend(self._context[:1], None)
            for start in range(0, last, CHUNK):
                end = min(start + CHUNK, last)
                _, self._features = self._target(self._context[start:end], self._cache)
                self.drafter.extend(self._context[start + 1 : end + 1], self._features)
                mx.eval([c.state for c in self._cache], self.drafter.pending())

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
        features = self._features
        if features is not None:
            features = features[mx.arange(num_rows) % features.shape[0]]
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
        """Tokens (R,) of the context, which the device has already."""
        tokens = self._context[mx.arange(num_rows) % self._context.shape[0]]
        mx.eval(tokens)
        return tokens


def time_parts(
    bench: Bench, timings: Timings, sizes: Mapping[str, Sequence[int]], samples: int
) -> None:
    """Add ``samples`` of every part at all its ``sizes``: rows of a pass, tokens of a draft.

    Sizes take turns, so that drift hits all alike. Each runs once unmeasured before its first
    sample, and later only the first size of a part. Accept passes come last: a draft begins with
    what the one before left.
    """
    for part, own in sizes.items():
        found = timings.setdefault(part, {})
        for size in own[:1] if found else own:
            bench.time(part, size)
        for _ in range(samples):
            for size in own:
                found.setdefault(size, []).append(bench.time(part, size))


Costs = Mapping[str, Any]
"""Figures of ``costs_of``, ready for JSON."""


def costs_of(timings: Timings) -> Costs:
    """Costs by the medians of all samples, in seconds or in plain steps, passes over one row.

    By rows R: ``verify_seconds`` T(R), ``verify_cost`` c(R) = T(R) / T(1), ``accept_seconds``. By
    draft length: ``draft_seconds``, ``host_seconds`` for which a round waits for the host, and
    ``overhead`` beyond c(k + 1) + k d in plain steps. ``d`` is one more draft token (head forward,
    logits, pick) in plain steps. ``*_build_seconds``: the host builds the graph of that part.
    """
    run = medians(timings, "run")
    build = medians(timings, "build")
    verify = run["verify"]
    step = verify[1]
    chain_step = slope(run["propose"])
    hosts = {0: 0.0}
    overheads = {0: 0.0}
    for rows in list(run["accept"])[1:]:
        size = rows - 1
        accept = run["accept"][rows]
        draft = draft_seconds(run["propose"][1], chain_step, size)
        # The host builds the draft while the device runs the accept pass before it, and the verify
        # pass while the device drafts.
        drafting = draft_seconds(build["propose"][1], slope(build["propose"]), size)
        drafted = max(drafting, accept) + draft
        hosts[size] = max(drafted, drafting + build["verify"][rows]) - (accept + draft)
        overheads[size] = (accept + draft - size * chain_step + hosts[size]) / step
    return {
        "verify_seconds": verify,
        "verify_cost": {rows: seconds / step for rows, seconds in verify.items()},
        "verify_build_seconds": build["verify"],
        "accept_seconds": run["accept"],
        "draft_seconds": run["propose"],
        "draft_build_seconds": build["propose"],
        "plain_step_seconds": step,
        "chain_step_seconds": chain_step,
        "d": chain_step / step,
        "host_seconds": hosts,
        "overhead": overheads,
    }


def medians(timings: Timings, name: str) -> dict[str, dict[int, float]]:
    """Median seconds of every part by its size, to build its graph or to run it."""
    return {
        part: {size: median(getattr(t, name) for t in each) for size, each in samples.items()}
        for part, samples in timings.items()
    }


def slope(seconds: Mapping[int, float]) -> float:
    """Seconds per token between the shortest and the longest draft, at least 0."""
    low = min(seconds)
    high = max(seconds)
    return max(0.0, (seconds[high] - seconds[low]) / (high - low))


def draft_seconds(first: float, step: float, size: int) -> float:
    """Seconds of a draft after the accept pass, which ran the head once."""
    return first + (size - 1) * step


def point(costs: Costs, tau: float, size: int) -> dict[str, float]:
    """Predicted speedup at a mean acceptance length of ``tau``, and its bound.

    The bound is the speedup without any overhead: tau / (c(k + 1) + k d).
    """
    least = costs["verify_cost"][size + 1] + size * costs["d"]
    speedup = tau / (least + costs["overhead"][size])
    return {"k": size, "mean_acceptance_length": tau, "speedup": speedup, "bound": tau / least}


def predict(costs: Costs, tau: float, size: int, measured: float | None) -> dict[str, Any]:
    """Predicted speedup beside the measured one, and the share of the bound reached."""
    found = point(costs, tau, size)
    return {
        "mean_acceptance_length": tau,
        "predicted": found["speedup"],
        "measured": measured,
        "error": None if measured is None else found["speedup"] / measured - 1.0,
        "bound": found["bound"],
        "fraction_of_bound": None if measured is None else measured / found["bound"],
    }


def curve(costs: Costs, alphas: Sequence[float]) -> list[dict[str, float]]:
    """The prediction at every k, from the acceptance by position."""
    sizes = range(1, max(costs["accept_seconds"]))
    return [point(costs, expected_tokens(alphas, DraftShape(size)), size) for size in sizes]


def time_split(costs: Costs, size: int, round_seconds: float) -> dict[str, float]:
    """Seconds of a measured round: its parts as timed by themselves, and the rest, ``host``.

    The rest is below zero if the parts were slower by themselves than in the run.
    """
    parts = {
        "verify": costs["verify_seconds"][size + 1],
        "draft": draft_seconds(costs["draft_seconds"][1], costs["chain_step_seconds"], size),
        "accept": costs["accept_seconds"][size + 1],
    }
    return {**parts, "host": round_seconds - sum(parts.values()), "round": round_seconds}
