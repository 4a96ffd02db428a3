"""One request of a batch: its prompt, its limits, how it is decoded, and what became of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..decoding.accept import LogitsProcessor, Sampler
from ..decoding.decoder import Decoder
from ..decoding.limits import Limits
from ..decoding.sampling import Sampling
from ..decoding.setup import begin_drafter, open_decoder, split_cache
from ..decoding.stats import Stats
from ..drafters.base import Drafter
from ..target.rollback import CacheQuantization


@dataclass
class Request:
    """One prompt and what became of it; ``row`` tells it from others that have the same seed.

    ``cache`` is the target's, then the drafter's where there are any; once the request has left
    its batch, and caches are kept, it is what a generation of its own would have left.
    """

    prompt: list[int]
    limits: Limits
    cache: list[Any]
    row: int = 0
    decoder: Decoder | None = None
    stats: Stats = field(default_factory=Stats)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None  # of the tokens, where they are asked for
    has_left: bool = False

    @property
    def ended(self) -> bool:
        """Whether nothing is left to generate for it."""
        full = not self.limits.has_room_after(len(self.tokens))
        return self.has_left or full or bool(self.tokens) and self.limits.end(self.tokens[-1])


@dataclass(frozen=True)
class Options:
    """How requests are decoded; those of one batch may have several."""

    stream: mx.Stream | mx.ThreadLocalStream = generation_stream
    num_draft_tokens: int | str = 3
    sampler: Sampler | None = None
    logits_processors: list[LogitsProcessor] | None = None
    acceptance: str | None = None
    prefill_step_size: int = 2048

    def sampler_of(self, request: Request) -> Sampler | None:
        """The sampler, for one request: a ``Sampling`` has noise of its own for each row."""
        if isinstance(self.sampler, Sampling):
            return self.sampler.begin(request.row)
        return self.sampler


def prefill(
    model: nn.Module, draft_model: Drafter, request: Request, options: Options
) -> Iterator[int]:
    """Run the prompt but its last token, alone, a chunk at each step; yields how much is done.

    Rounds of a batch may be run between the steps.
    """
    request.stats.start()
    cache, draft_cache = split_cache(request.cache, model, None)
    request.decoder = open_decoder(
        model,
        begin_drafter(draft_model, draft_cache),
        cache,
        CacheQuantization(None, 64, 0),
        options.stream,
        sampler=options.sampler_of(request),
        logits_processors=options.logits_processors,
        acceptance=options.acceptance,
    )
    prompt = mx.array(request.prompt)
    yield from request.decoder.prefill_chunks(prompt, options.prefill_step_size)


def first_token(request: Request) -> None:
    """Run the prompt's last token, which ends prefill: the request may then join a batch."""
    first = request.decoder.launch_first()
    first.run = first.read().run
    request.decoder.commit(first, 1)
    first.num_taken = 1
    first.count(request.stats)
    request.tokens += first.run
    if request.logprobs is not None:
        request.logprobs.append(first.verification.logprobs[0, first.run[0]].item())


def put_back(request: Request) -> None:
    """Put into ``request.cache`` what a generation of its own would have left."""
    request.decoder.stop_at_root()
    request.cache = request.decoder.cache + request.decoder.drafter.cache
