"""Batches that are decoded plainly, by mlx-lm's own batch generation."""

from dataclasses import asdict
from typing import Any

import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import BatchGenerator
from mlx_lm.generate import BatchResponse as MlxBatchResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.sampling import Sampling
from ..decoding.setup import split_cache
from .requests import Options, Request
from .response import BatchResponse, RequestStats, Returns


def generate_plainly(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    requests: list[Request],
    options: Options,
    returns: Returns,
    *,
    sizes: dict[str, int],
    calibration_time: float,
    verbose: bool,
) -> BatchResponse:
    """All requests by mlx-lm's batch; the caches it returns are the target's alone.

    ``sizes`` are mlx-lm's ``completion_batch_size`` and ``prefill_batch_size``, where given.
    """
    settings = sizes | {
        "logits_processors": options.logits_processors,
        "prefill_step_size": options.prefill_step_size,
    }
    if isinstance(options.sampler, Sampling):
        response = _sampled_by_row(model, tokenizer, requests, options, returns, settings)
    else:
        caches = [split_cache(request.cache, model, None)[0] for request in requests]
        response = mlx_lm.batch_generate(
            model,
            tokenizer,
            [request.prompt for request in requests],
            caches,
            [request.limits.max_tokens for request in requests],
            verbose,
            **asdict(returns) | {"return_token_ids": True},
            sampler=options.sampler,
            **settings,
        )
    for request, ids in zip(requests, response.token_ids):
        num_steps = max(len(ids) - 1, 0)
        request.stats.num_plain_steps = request.stats.num_emitted = num_steps
    return BatchResponse(
        response.texts,
        RequestStats([request.stats for request in requests], response.stats, calibration_time),
        response.caches,
        response.token_ids if returns.return_token_ids else None,
        response.logprobs,
        batch_stats=response.stats,
    )


def _sampled_by_row(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    requests: list[Request],
    options: Options,
    returns: Returns,
    settings: dict[str, Any],
) -> MlxBatchResponse:
    """The same with a sampler per request, which ``mlx_lm.batch_generate`` does not take."""
    generator = BatchGenerator(
        model, stop_tokens=[[token] for token in tokenizer.eos_token_ids], **settings
    )
    try:
        uids = generator.insert(
            [request.prompt for request in requests],
            [request.limits.max_tokens for request in requests],
            caches=[split_cache(request.cache, model, None)[0] for request in requests],
            samplers=[options.sampler_of(request) for request in requests],
        )
        requests_by_uid = dict(zip(uids, requests))
        caches = {}
        with generator.stats() as stats:
            while responses := generator.next_generated():
                for made in responses:
                    request = requests_by_uid[made.uid]
                    if made.finish_reason is not None:
                        caches[made.uid] = made.prompt_cache
                    if made.finish_reason != "stop":
                        request.tokens.append(made.token)
                        if request.logprobs is not None:
                            request.logprobs.append(made.logprobs[made.token].item())
    finally:
        generator.close()
    ids = [request.tokens for request in requests]
    return MlxBatchResponse(
        [tokenizer.decode(tokens) for tokens in ids],
        stats,
        [caches[uid] for uid in uids] if returns.return_prompt_caches else None,
        ids,
        [request.logprobs for request in requests] if returns.return_logprobs else None,
    )
