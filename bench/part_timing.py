"""Part timing: seconds of a verify pass, an accept pass and a draft on this machine.

Each part runs by itself, on caches of a typical length that are cut back afterwards. ``costs.py``
has the medians and the figures that follow from them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.drafters.base import Drafter
from mlx_eagle.target_model.rollback import Checkpoint
from mlx_eagle.target_model.target import Target

CHUNK = 512  # tokens per prefill step
PARTS = ("verify", "accept", "propose")


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
                mx.eval([c.state for c in self._cache], *_present(features))
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

    def verify(self, num_rows: int) -> list[mx.array]:
        """Verify R rows: the target's choices, and the features."""
        tokens = self._rows(num_rows)
        with self._target.matching_single_row(self._cache, num_rows):
            logits, features = self._target(tokens, self._cache)
        return [mx.argmax(logits, axis=-1), *_present(features)]

    def accept(self, num_rows: int) -> list[mx.array]:
        """Accept R rows: the arrays that the next draft starts from."""
        features = None
        if self.drafter.taps:
            last = self._features[-1]
            features = last[mx.arange(num_rows) % last.shape[0]]
            mx.eval(features)
        self.drafter.extend(self._rows(num_rows), features, last=mx.array(num_rows - 1))
        return self.drafter.pending()

    def propose(self, size: int) -> list[mx.array]:
        """Draft ``size`` tokens greedily."""
        return [self.drafter.propose(size, lambda logits, _: mx.argmax(logits, axis=-1)).tokens]

    def time(self, part: str, size: int) -> Timing:
        """Time one of ``PARTS`` once; the caches are left as they were."""
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


def _present(features: mx.array | None) -> list[mx.array]:
    return [] if features is None else [features]


def time_parts(
    bench: Bench, timings: Timings, sizes: Mapping[str, Sequence[int]], samples: int
) -> None:
    """Add ``samples`` of every part at all its ``sizes``: rows of a pass, tokens of a draft.

    Sizes take turns, so that drift hits all alike. Each runs once unmeasured before its first
    sample, and later only the first size of a part.
    """
    for part in PARTS:
        if part == "propose":
            bench.restart()
        found = timings.setdefault(part, {})
        for size in sizes[part][:1] if found else sizes[part]:
            bench.time(part, size)
        for _ in range(samples):
            for size in sizes[part]:
                found.setdefault(size, []).append(bench.time(part, size))
