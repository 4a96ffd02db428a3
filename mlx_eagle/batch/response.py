"""What ``batch_generate`` returns: mlx-lm's response, with the counts of every request."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from operator import add

import mlx.core as mx
from mlx_lm.generate import BatchResponse as MlxBatchResponse
from mlx_lm.generate import BatchStats
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.stats import Stats
from .requests import Request


class RequestStats(list[Stats], BatchStats):
    """One ``Stats`` per prompt, in order, and mlx-lm's figures of the whole batch by its names.

    ``stats[0].mean_acceptance_length`` is that of the first prompt, ``stats.total`` has the counts
    of all, and ``stats.generation_tps``, ``stats.prompt_tokens``, ``stats.peak_memory`` and so on
    are what code for ``mlx_lm.batch_generate`` expects. ``calibration_time`` is what "auto" took
    to measure the costs of rounds, in seconds; it is in none of the other times.
    """

    def __init__(self, each: Sequence[Stats], whole: BatchStats, calibration_time: float = 0.0):
        list.__init__(self, each)
        names = [field.name for field in fields(BatchStats)]
        BatchStats.__init__(self, **{name: getattr(whole, name) for name in names})
        self.calibration_time = calibration_time

    @property
    def total(self) -> Stats:
        """The counts of all requests together; their times overlap, and are sums all the same."""
        return reduce(add, self, Stats())


@dataclass
class BatchResponse(MlxBatchResponse):
    """mlx-lm's response, whose ``stats`` are also a list with the counts of every request.

    ``batch_stats`` are mlx-lm's own of the whole batch, where it was decoded plainly.
    """

    stats: RequestStats
    batch_stats: BatchStats | None = None


@dataclass(frozen=True)
class Returns:
    """What of the response is asked for, by the names of mlx-lm's arguments."""

    return_prompt_caches: bool
    return_token_ids: bool
    return_logprobs: bool


def response_of(
    requests: list[Request],
    tokenizer: TokenizerWrapper,
    returns: Returns,
    *,
    seconds: float,
    calibration_time: float,
    verbose: bool,
) -> BatchResponse:
    """The response to requests that ran for ``seconds``: stop tokens are in neither texts nor ids.

    ``calibration_time`` is what was measured before; what requests measured alone is added.
    """
    ends = [len(t.tokens) - t.limits.end(t.tokens[-1]) for t in requests]
    ids = [request.tokens[:end] for request, end in zip(requests, ends)]
    stats = [request.stats for request in requests]
    alone = sum(counts.calibration_time for counts in stats)
    prompt_time = sum(counts.prompt_time for counts in stats)
    whole = BatchStats(
        prompt_tokens=sum(len(request.prompt) for request in requests),
        prompt_time=prompt_time,
        generation_tokens=sum(len(request.tokens) for request in requests),
        generation_steps=max(counts.num_target_forwards for counts in stats),
        decode_time=seconds - alone - prompt_time,
        wall_time=seconds - alone,
        peak_memory=mx.get_peak_memory() / 1e9,
    )
    if verbose:
        for i, counts in enumerate(stats):
            print(f"[batch_generate] Prompt {i}: " + "; ".join(counts.lines()))
    logprobs = None
    if returns.return_logprobs:
        logprobs = [request.logprobs[:end] for request, end in zip(requests, ends)]
    return BatchResponse(
        [tokenizer.decode(tokens) for tokens in ids],
        RequestStats(stats, whole, calibration_time + alone),
        [request.cache for request in requests] if returns.return_prompt_caches else None,
        ids if returns.return_token_ids else None,
        logprobs,
    )
