"""What rounds of a batch cost here: a few of them run on copies of its texts, and timed.

Measured with as many texts as the batch begins with, and with one; between the two a line.
Remembered by ``calibrate.py``, under the same key and the number of texts.
"""

import time
from copy import deepcopy
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from ..decoding.calibrate import CHAINS, make_key, measure, on_trial, remembered_or, shortest
from ..decoding.controller import BatchCosts, DraftShape, RoundCosts
from ..decoding.loop import Limits, split_cache
from ..drafters.base import Drafter
from .rounds import Batch, Options, Request, prefill

MEASURED = (DraftShape(1), DraftShape(3), DraftShape(7))  # verify passes of 2, 4 and 8 rows a text
PLAIN_STEPS = 4
ROUNDS = 2  # of each length, in each repeat
REPEATS = 3  # of all of it, for the reason given in ``calibrate.py``


def batch_costs(
    model: nn.Module, draft_model: Drafter, requests: list[Request], options: Options
) -> BatchCosts:
    """Costs behind the prompts of ``texts``, which stay untouched: remembered, or measured now.

    Measuring takes a prefill of copies, some thirty rounds, and a second set of caches for as
    long.
    """
    lengths = [len(request.prompt) - 1 + _num_cached(request) for request in requests]
    longest = lengths.index(max(lengths))

    @cache
    def copies() -> list[Request]:
        trials = [Request(request.prompt, Limits(-1, ()), deepcopy(request.cache)) for request in requests]
        for trial in trials:
            prefill(model, draft_model, trial, options)
        return trials

    def key(what: str) -> str:
        caches, _ = split_cache(requests[longest].cache, model, None)
        return make_key(model, draft_model, caches, len(requests[longest].prompt) - 1, what)

    with mx.stream(options.stream):
        alone = remembered_or(
            model, key("chains"), CHAINS, lambda: measure(copies()[longest].decoder, CHAINS)
        )
        together = remembered_or(
            model,
            key(f"chains, {len(requests)} texts"),
            MEASURED,
            lambda: measure_together(model, copies()),
        )
    return BatchCosts(alone, together, len(requests))


def _num_cached(request: Request) -> int:
    return max((getattr(c, "offset", 0) for c in request.cache), default=0)


def measure_together(model: nn.Module, trials: list[Request]) -> RoundCosts:
    """Time real rounds of a batch from where the prefilled ``trials`` stand, greedily.

    Their own caches stay as they are, because a batch copies them.
    """
    for trial in trials:
        trial.decoder = on_trial(trial.decoder)
    batch = Batch(model, trials)
    batch.finish(batch.launch(DraftShape(0), absorb=True))  # gives the drafters something to start from
    plain: list[float] = []
    rounds: dict[DraftShape, list[float]] = {shape: [] for shape in MEASURED}
    for _ in range(REPEATS):
        plain += _time_plain(batch)
        for shape in MEASURED:
            rounds[shape] += _time_rounds(batch, shape)
    return shortest(plain, rounds)


def _time_rounds(batch: Batch, shape: DraftShape) -> list[float]:
    """Seconds of such rounds, one after the other; the first, which catches up, is left out."""
    ends = []
    for _ in range(ROUNDS + 1):
        batch.finish(batch.launch(shape))
        ends.append(time.perf_counter())
    return [after - before for before, after in zip(ends, ends[1:])]


def _time_plain(batch: Batch) -> list[float]:
    """Seconds from read to read of pipelined plain steps."""
    rounds, reads = batch.launch(DraftShape(0)), []
    for _ in range(PLAIN_STEPS + 1):
        batch.commit_plain(rounds)
        upcoming = batch.launch(DraftShape(0))
        batch.finish(rounds)
        reads.append(time.perf_counter())
        rounds = upcoming
    batch.finish(rounds)
    return [after - before for before, after in zip(reads, reads[1:])]
