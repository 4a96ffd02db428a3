"""What the parts of a round cost in a batch: verify pass, accept pass, draft step.

As ``mlx_eagle.bench.part_timing`` has them for one text, with the same names and units: rows R are
those of each of B texts, so that a pass has B R.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.batch.acceptance import Judges
from mlx_eagle.batch.requests import Options, Request, first_token, prefill
from mlx_eagle.decoding.accept import Match
from mlx_eagle.decoding.decoder import Limits
from mlx_eagle.drafters.base import Drafter
from mlx_eagle.drafters.batch_drafter import make_batch_drafter
from mlx_eagle.target.ragged import RaggedCaches
from mlx_eagle.target.taps import Target


class BatchBench:
    """A target and a drafter that have absorbed B texts, ready to repeat parts of a round."""

    def __init__(self, model: nn.Module, drafter: Drafter, contexts: Sequence[list[int]]):
        """``contexts`` are the B texts; each must be one that a batch can take."""
        self.drafter = drafter
        self._target = Target(model, drafter.taps)
        self._requests = [Request(c, Limits(-1, ()), make_prompt_cache(model)) for c in contexts]
        self._caches = RaggedCaches()
        self._contexts = contexts
        self._was_extended = False
        for request in self._requests:
            for _ in prefill(model, drafter, request, Options()):
                pass
            first_token(request)
            with mx.stream(generation_stream):
                self._caches.join(request.decoder.cache)
        self._judges = Judges([Match()] * len(self._requests))
        with mx.stream(generation_stream):
            _, features = self._target.batch(self._rows(1), self._caches.open())
        self._width = 0 if features is None else features.shape[-1]
        self.restart()

    def restart(self) -> None:
        """A fresh drafter that has absorbed the texts."""
        with mx.stream(generation_stream):
            self._drafts = make_batch_drafter(self.drafter)
            for request in self._requests:
                self._drafts.join(request.decoder.drafter)
            mx.eval(self._drafts.pending())

    @contextmanager
    def window(self) -> Iterator[None]:
        """What happens inside leaves the caches as they were."""
        try:
            yield
        finally:
            if self._was_extended:
                self._drafts.advance([0] * len(self._requests))
            self._was_extended = False

    def verify(self, num_rows: int) -> list[mx.array]:
        """A verify pass of R rows per text: the target's choices, and the features."""
        tokens = self._rows(num_rows)
        with mx.stream(generation_stream):
            logits, features = self._target.batch(tokens, self._caches.open())
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            return [mx.argmax(logprobs, axis=-1), *([] if features is None else [features])]

    def accept(self, num_rows: int) -> list[mx.array]:
        """An accept pass of R rows per text: the state that the next draft starts from."""
        batch, features = len(self._requests), None
        tokens, last = self._rows(num_rows), mx.full((batch,), num_rows - 1)
        if self._width:
            features = mx.zeros((batch, num_rows, self._width))
            mx.eval(features)
        with mx.stream(generation_stream):
            self._drafts.extend(tokens, features, last)
            self._was_extended = True
            return self._drafts.pending()

    def propose(self, size: int) -> list[mx.array]:
        """A greedy draft of ``size`` tokens for every text."""
        with mx.stream(generation_stream):
            batch = len(self._requests)
            choice = self._judges.open([0] * batch, [size] * batch)
            return [self._drafts.propose(size, choice)[0]]

    def _rows(self, num_rows: int) -> mx.array:
        """Tokens (B, R) of the texts, computed: they are no part of what is timed."""
        rows = [(context * num_rows)[:num_rows] for context in self._contexts]
        tokens = mx.array(rows, mx.int32)
        mx.eval(tokens)
        return tokens
