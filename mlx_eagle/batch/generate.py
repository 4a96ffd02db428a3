"""Several prompts with one drafter: mlx-lm's ``batch_generate``, speculatively.

Decides whether a batch is drafted for, and how; the rounds are in ``batch_rounds.py``.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import BatchResponse as MlxBatchResponse
from mlx_lm.generate import BatchStats, wired_limit
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.controller import (
    AdaptiveController,
    BatchCosts,
    Controller,
    DraftShape,
    FixedController,
)
from ..decoding.loop import AUTO, Limits, check_request, split_cache
from ..drafters.base import Drafter
from ..generate import is_drafter
from ..target.ropes import BY_LENGTH, find_ropes
from .cache import can_batch
from .costs import batch_costs
from .rounds import Options, Request, generate_in_turn, generate_together

MOST_REQUESTS = 8  # where what rounds of so many cost is not measured
MOST_MEASURED = 32  # as many as mlx-lm decodes together


@dataclass
class BatchResponse(MlxBatchResponse):
    """mlx-lm's response, but ``stats`` has the counts of every text, in order.

    ``batch_stats`` are mlx-lm's own of the whole batch, where it was decoded plainly.
    """

    batch_stats: BatchStats | None = None


def batch_generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: list[list[int]],
    prompt_caches: list[list] | None = None,
    max_tokens: int | list[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    draft_model: Drafter | None = None,
    max_speculative_batch: int | None = None,
    **kwargs: Any,
) -> MlxBatchResponse:
    """Generate for several prompts, as ``mlx_lm.batch_generate`` does, with a drafter.

    All texts are verified in one forward pass of the target a round, padded on the left in
    mlx-lm's batch caches; each keeps its own number of rows, ends by itself and is decoded as
    it would be alone. Drafts are made text by text, so the drafter's cost grows with the batch.
    A text that is done leaves; no other takes its place. Where the target's caches or ropes
    cannot share a pass (recurrent states, quantized caches, a base that follows the length),
    the texts are decoded one after the other, each speculatively.

    With ``num_draft_tokens`` "auto" each round has the draft length that pays, one for all
    texts, by what they accept and by what rounds of so many texts cost. That is measured with
    the texts of the batch (once, see ``batch_costs``); for fewer, when some have ended, it is
    taken from a line to the costs of one. Where no length pays, rounds are plain and pipelined
    until a probe finds otherwise, or the batch has shrunk enough. Where none could ever pay, all
    goes to ``mlx_lm.batch_generate`` from the start, and stays there.

    ``max_speculative_batch``: more prompts than that go to ``mlx_lm.batch_generate``, because a
    pass over so many rows costs more than drafts save. None: 8; with "auto" 32, the costs
    permitting, but 8 text by text.

    ``kwargs``: the fields of ``Options``, and mlx-lm's ``completion_batch_size`` and
    ``prefill_batch_size`` for a batch that goes to it. Without one of our drafters all goes
    to mlx-lm unchanged.

    Raises ValueError for an empty prompt, lists of unequal length, ``max_tokens`` below 1.
    """
    returns = {
        "return_prompt_caches": return_prompt_caches,
        "return_token_ids": return_token_ids,
        "return_logprobs": return_logprobs,
    }
    if not is_drafter(draft_model):
        return mlx_lm.batch_generate(
            model, tokenizer, prompts, prompt_caches, max_tokens, verbose, **returns, **kwargs
        )
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    sizes = ("completion_batch_size", "prefill_batch_size")
    plain = {name: kwargs.pop(name) for name in sizes if name in kwargs}
    options = Options(**kwargs)
    requests = _texts(model, tokenizer, prompts, prompt_caches, max_tokens, options)
    if return_logprobs:
        for request in requests:
            request.logprobs = []
    with wired_limit(model, [options.stream]):
        shares = _shares_passes(model, requests)
        most = MOST_MEASURED if shares and options.num_draft_tokens == AUTO else MOST_REQUESTS
        most = most if max_speculative_batch is None else max_speculative_batch
        if options.num_draft_tokens != 0 and 0 < len(requests) <= most:
            if not shares:
                generate_in_turn(model, draft_model, requests, options)
                return _response(tokenizer, requests, returns, verbose)
            controller, costs = _make_controller(model, draft_model, requests, options)
            if not controller.drafting_off:
                keep = return_prompt_caches
                generate_together(model, draft_model, requests, controller, costs, options, keep)
                return _response(tokenizer, requests, returns, verbose)
            for request in requests:
                request.stats.drafting_events = list(controller.events)
    plain |= {
        "sampler": options.sampler,
        "logits_processors": options.logits_processors,
        "prefill_step_size": options.prefill_step_size,
    }
    return _generate_plainly(model, tokenizer, requests, verbose, returns, plain)


def _texts(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompts: list[list[int]],
    prompt_caches: list[list] | None,
    max_tokens: int | list[int],
    options: Options,
) -> list[Request]:
    """Every prompt with its limits and caches of its own."""
    num = len(prompts)
    limits = [max_tokens] * num if isinstance(max_tokens, int) else max_tokens
    for what, values in (("max_tokens", limits), ("prompt_caches", prompt_caches)):
        if values is not None and len(values) != num:
            raise ValueError(f"{what} has {len(values)} entries for {num} prompts: give one each.")
    requests = []
    for i, (prompt, limit) in enumerate(zip(prompts, limits)):
        check_request(mx.array(prompt), options.num_draft_tokens)
        if limit < 1:
            raise ValueError(f"max_tokens of prompt {i} is {limit}: give 1 or more.")
        # As in mlx-lm's batch, the caches that were given stay as they are.
        cache = deepcopy(prompt_caches[i]) if prompt_caches else make_prompt_cache(model)
        requests.append(Request(prompt, Limits(limit, tokenizer.eos_token_ids), cache))
    return requests


def _make_controller(
    model: nn.Module, draft_model: Drafter, requests: list[Request], options: Options
) -> tuple[Controller, BatchCosts | None]:
    """The pace of all texts, and the costs it goes by; parked where no draft could ever pay."""
    if options.num_draft_tokens != AUTO:
        return FixedController(DraftShape(options.num_draft_tokens)), None
    costs = batch_costs(model, draft_model, requests, options)
    return AdaptiveController(costs.of(len(requests))), costs


def _shares_passes(model: nn.Module, requests: list[Request]) -> bool:
    batchable = all(can_batch(split_cache(request.cache, model, None)[0]) for request in requests)
    return batchable and not any(isinstance(rope, BY_LENGTH) for rope in find_ropes(model))


def _generate_plainly(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    requests: list[Request],
    verbose: bool,
    returns: dict[str, bool],
    plain: dict[str, Any],
) -> BatchResponse:
    """All texts by mlx-lm's own batch; the caches it returns are the target's alone."""
    response = mlx_lm.batch_generate(
        model,
        tokenizer,
        [request.prompt for request in requests],
        [split_cache(request.cache, model, None)[0] for request in requests],
        [request.limits.max_tokens for request in requests],
        verbose,
        **{**returns, "return_token_ids": True},
        **plain,
    )
    for request, ids in zip(requests, response.token_ids):
        num_steps = max(len(ids) - 1, 0)
        request.stats.num_plain_steps = request.stats.num_emitted = num_steps
    return BatchResponse(
        response.texts,
        [request.stats for request in requests],
        response.caches,
        response.token_ids if returns["return_token_ids"] else None,
        response.logprobs,
        batch_stats=response.stats,
    )


def _response(
    tokenizer: TokenizerWrapper, requests: list[Request], returns: dict[str, bool], verbose: bool
) -> BatchResponse:
    """What mlx-lm's batch returns: stop tokens are in neither texts nor ids."""
    lengths = [len(t.tokens) - t.limits.end(t.tokens[-1]) for t in requests]
    ids = [request.tokens[:n] for request, n in zip(requests, lengths)]
    stats = [request.stats for request in requests]
    if verbose:
        for i, counts in enumerate(stats):
            print(f"[batch_generate] Prompt {i}: " + "; ".join(counts.lines()))
    logprobs = None
    if returns["return_logprobs"]:
        logprobs = [request.logprobs[:n] for request, n in zip(requests, lengths)]
    return BatchResponse(
        [tokenizer.decode(tokens) for tokens in ids],
        stats,
        [request.cache for request in requests] if returns["return_prompt_caches"] else None,
        ids if returns["return_token_ids"] else None,
        logprobs,
    )
