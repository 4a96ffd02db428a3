"""Part timing: what verify pass, accept pass and draft step cost on this machine.

Each part is run by itself, on caches of a typical length that are cut back afterwards. Times are
in seconds; what follows from them is in ``costs.py``.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.drafters.base import Drafter
from mlx_eagle.target.rollback import Checkpoint
from mlx_eagle.target.target import Target

SAMPLES = 15
CHUNK = 512  # tokens per prefill step


class Timing(NamedTuple):
    """One sample of a part: the host building the graph, then the device running it."""

    build: float
    run: float


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
                mx.eval([c.state for c in self._cache], *_present(features))
                self._features.append(features)
        self.restart()

    def restart(self) -> None:
        """A fresh drafter that has absorbed the context."""
        self.drafter = self._drafter.begin()
        with mx.stream(generation_stream):
            self.drafter.extend(self._context[:1], None)
            for start, features in zip(count(1, CHUNK), self._features, strict=False):
                self.drafter.extend(self._context[start : start + CHUNK], features)
            mx.eval(self.drafter.pending())

    @contextmanager
    def window(self) -> Iterator[None]:
        """What happens inside leaves the caches as they were."""
        windows = [Checkpoint(self._cache), Checkpoint(self.drafter.cache)]
        try:
            yield
        finally:
            for window in windows:
                window.rollback(0)

    def verify(self, num_rows: int) -> list[mx.array]:
        """A verify pass of R rows: the target's choices, and the features."""
        tokens = self._rows(num_rows)
        with self._target.matching_single_row(self._cache, num_rows):
            logits, features = self._target(tokens, self._cache)
        return [mx.argmax(logits, axis=-1), *_present(features)]

    def accept(self, num_rows: int) -> list[mx.array]:
        """An accept pass of R rows: the state that the next draft starts from."""
        features = None
        if self.drafter.taps:
            last = self._features[-1]
            features = last[mx.arange(num_rows) % last.shape[0]]
            mx.eval(features)
        self.drafter.extend(self._rows(num_rows), features, last=mx.array(num_rows - 1))
        return self.drafter.pending()

    def propose(self, size: int) -> list[mx.array]:
        """A greedy draft of ``size`` tokens."""
        return [self.drafter.propose(size, _greedy).tokens]

    def _rows(self, num_rows: int) -> mx.array:
        """Tokens (R,) of the context, computed before the clock starts."""
        tokens = self._context[mx.arange(num_rows) % self._context.shape[0]]
        mx.eval(tokens)
        return tokens


def _present(features: mx.array | None) -> list[mx.array]:
    return [] if features is None else [features]


def _greedy(logits: mx.array, ids: mx.array | None) -> mx.array:
    return mx.argmax(logits, axis=-1)


def _time(bench: Bench, part: Callable[[int], list[mx.array]], size: int) -> Timing:
    """One sample."""
    with bench.window(), mx.stream(generation_stream):
        mx.synchronize(generation_stream)
        start = time.perf_counter()
        arrays = part(size)
        built = time.perf_counter()
        mx.eval(arrays)
        done = time.perf_counter()
    return Timing(built - start, done - built)


@dataclass
class Samples:
    """All timings, gathered in one or more sittings: of passes by rows, of drafts by tokens."""

    verify: dict[int, list[Timing]] = field(default_factory=dict)
    accept: dict[int, list[Timing]] = field(default_factory=dict)
    propose: dict[int, list[Timing]] = field(default_factory=dict)

    def measure(
        self,
        bench: Bench,
        verified: Sequence[int],
        accepted: Sequence[int],
        drafted: Sequence[int],
        samples: int,
    ) -> None:
        """One more sitting: ``samples`` of verify and accept passes of so many rows, of drafts."""
        self._sample(bench, bench.verify, self.verify, verified, samples)
        self._sample(bench, bench.accept, self.accept, accepted, samples)
        bench.restart()
        self._sample(bench, bench.propose, self.propose, drafted, samples)

    @staticmethod
    def _sample(
        bench: Bench,
        part: Callable[[int], list[mx.array]],
        timings: dict[int, list[Timing]],
        sizes: Sequence[int],
        samples: int,
    ) -> None:
        """Time ``part`` at every size, sizes taking turns so that drift hits all alike.

        Each is run once unmeasured in the first sitting, then only the first of them.
        """
        for size in sizes[:1] if timings else sizes:
            _time(bench, part, size)
        for _ in range(samples):
            for size in sizes:
                timings.setdefault(size, []).append(_time(bench, part, size))
