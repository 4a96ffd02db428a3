"""What rounds of a batch cost here: a few of them run on copies of its requests, and timed.

Measured with as many requests as the batch begins with, and with one; between the two a line.
Kept in the same file as the costs of single requests, under the number of requests.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial

import mlx.core as mx
import mlx.nn as nn

from ..decoding.calibrate import (
    CHAINS,
    TIME_LIMIT,
    cost_file,
    measure,
    on_trial,
    remembered_or,
    trust_in,
    without_failed,
)
from ..decoding.controller import FixedController
from ..decoding.cost_keys import context_bucket, make_key
from ..decoding.costs import PLAIN, BatchCosts, DraftShape, RoundCosts, Ways
from ..decoding.decoder import Limits
from ..decoding.live_costs import LiveBatchCosts
from ..decoding.setup import make_rule, split_cache
from ..decoding.timing import Amount, late_after, time_in_turn
from ..drafters.base import Drafter
from ..system.machines import first_look, this_machine
from .requests import UNQUANTIZED, Options, Request, prefill
from .rounds import Batch

AMOUNT = Amount(plain_steps=4, rounds=2, repeats=3)


def batch_costs(
    model: nn.Module, draft_model: Drafter, requests: list[Request], options: Options
) -> LiveBatchCosts:
    """Costs after the prompts of ``requests``, which stay as they are: remembered or measured now.

    They are then corrected by the rounds themselves, but where a model is shared by processes,
    which must all decide alike. Measuring takes a prefill of copies, some thirty rounds, and a
    second set of caches for as long.
    """
    lengths = [len(request.prompt) - 1 + _num_cached(request) for request in requests]
    longest = lengths.index(max(lengths))

    @cache
    def copies() -> list[Request]:
        trials = [
            Request(request.prompt, Limits(-1, ()), deepcopy(request.cache))
            for request in requests
        ]
        for trial in trials:
            for _ in prefill(model, draft_model, trial, options):
                pass
        return trials

    def key(what: str) -> str:
        caches, _ = split_cache(requests[longest].cache, model, None)
        rule = make_rule(options.acceptance, options.sampler)
        processors = options.logits_processors or []
        bucket = context_bucket(caches, len(requests[longest].prompt) - 1)
        return make_key(model, draft_model, caches, UNQUANTIZED, rule, processors, bucket, what)

    together_key = key(f"chains of {len(requests)} texts")
    with mx.stream(options.stream):
        alone = remembered_or(
            model, key("chains"), CHAINS, lambda: measure(copies()[longest].decoder, CHAINS)
        )
        together = remembered_or(
            model,
            together_key,
            lengths_to_measure(len(requests)),
            lambda: measure_together(model, draft_model, copies(), alone.ways),
        )
    known = BatchCosts(alone, together, len(requests))
    keep = partial(cost_file().correct, together_key)
    return LiveBatchCosts(known, trust_in(model, together_key), keep)


def lengths_to_measure(num_texts: int) -> tuple[DraftShape, ...]:
    """Between these drafts of every request a line is near what rounds cost on this machine."""
    return tuple(DraftShape(size) for size in first_look(this_machine(), num_texts))


def _num_cached(request: Request) -> int:
    return max((getattr(c, "offset", 0) for c in request.cache), default=0)


def measure_together(
    model: nn.Module, draft_model: Drafter, trials: list[Request], ways: Ways = Ways()
) -> RoundCosts:
    """Time real rounds of a batch from where the prefilled ``trials`` stand, greedily.

    Their own caches stay as they are, because a batch copies them.
    """

    def measure_all(shapes: Sequence[DraftShape]) -> RoundCosts:
        batch = Batch(model, draft_model, FixedController(PLAIN), ways=ways)
        for trial in trials:
            batch.join(replace(trial, _decoder=on_trial(trial.decoder)))
        batch.admit()
        # Gives the drafters something to start from.
        batch.finish(batch.launch(PLAIN, absorb=True))
        return time_in_turn(batch, shapes, (), AMOUNT, late_after(TIME_LIMIT, model))

    return without_failed(lengths_to_measure(len(trials)), measure_all)
