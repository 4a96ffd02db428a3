"""All prompts of a call to their ends, with drafts: together, or one after the other."""

import mlx.core as mx
import mlx.nn as nn

from ..decoding.controller import Controller
from ..decoding.costs import Ways
from ..decoding.live_costs import LiveBatchCosts
from ..decoding.loop import speculative_generate_step
from ..decoding.setup import split_cache
from ..drafters.base import Drafter
from .requests import Options, Request, first_token, prefill, put_back
from .rounds import Batch


def generate_together(
    model: nn.Module,
    draft_model: Drafter,
    requests: list[Request],
    controller: Controller,
    costs: LiveBatchCosts | None,
    options: Options,
    keep_caches: bool,
) -> None:
    """All requests to their ends, round by round in shared passes.

    ``costs``, where ``controller`` goes by them, are looked up again for the requests that are
    left.
    """
    batch = Batch(
        model,
        draft_model,
        controller,
        costs,
        ways=Ways() if costs is None else costs.ways,
        keep_caches=keep_caches,
        stream=options.stream,
    )
    for request in requests:
        for _ in prefill(model, draft_model, request, options):
            pass
        first_token(request)
        batch.join(request)
    while batch.round() is not None:
        pass  # what each round emitted is in the requests
    controller.close()
    if keep_caches:
        for request in requests:
            put_back(request)


def generate_in_turn(
    model: nn.Module, draft_model: Drafter, requests: list[Request], options: Options
) -> None:
    """Each request alone, for targets that cannot share a pass."""
    for request in requests:
        cache, draft_cache = split_cache(request.cache, model, None)
        request.cache = cache + (draft_cache or draft_model.make_cache())
        steps = speculative_generate_step(
            mx.array(request.prompt),
            model,
            draft_model,
            options.stream,
            num_draft_tokens=options.num_draft_tokens,
            max_tokens=request.limits.max_tokens,
            sampler=options.sampler_of(request),
            logits_processors=options.logits_processors,
            acceptance=options.acceptance,
            prompt_cache=request.cache,
            prefill_step_size=options.prefill_step_size,
            stop_tokens=request.limits.stop_tokens,
            stats=request.stats,
        )
        for token, logprobs, _ in steps:
            request.tokens.append(token)
            if request.logprobs is not None:
                request.logprobs.append(logprobs[token].item())
