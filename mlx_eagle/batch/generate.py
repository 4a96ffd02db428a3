"""Several prompts with one drafter: mlx-lm's ``batch_generate``, speculatively.

Here it is decided whether a batch is drafted for, and how; the rounds are in ``rounds.py``.
"""

import time
import warnings
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import BatchResponse as MlxBatchResponse
from mlx_lm.generate import wired_limit
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.controller import AdaptiveController, Controller, FixedController
from ..decoding.costs import DraftShape
from ..decoding.limits import (
    AUTO,
    Limits,
    check_max_tokens,
    check_num_draft_tokens,
    check_prompt,
)
from ..decoding.live_costs import LiveBatchCosts
from ..decoding.setup import split_cache
from ..drafters.base import Drafter
from ..drafters.batch_drafter import SequentialDrafter, make_batch_drafter
from ..generate import is_drafter
from .costs import batch_costs
from .drafted import generate_in_turn, generate_together
from .plain import generate_plainly
from .requests import Options, Request, why_alone
from .response import BatchResponse, Returns, response_of

MOST_REQUESTS = 8  # where what rounds of so many cost is not measured
MOST_MEASURED = 32  # as many as mlx-lm decodes together


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

    All requests are verified in one forward pass of the target per round, on caches with a length
    for each; each keeps its own number of rows, ends by itself and is decoded as it would be
    alone. An EAGLE-3 head drafts for all in shared passes too, other drafters text by text. A
    request that has ended makes no room for another. Where the target's caches or ropes cannot
    share a pass (recurrent states, quantized caches, a base that follows the length), the
    requests are decoded one after the other, each speculatively. Either is said in a warning.

    With ``num_draft_tokens`` "auto" each round has the fastest draft length, one for all
    requests, by what they accept and by what rounds of so many cost. That is measured with the
    requests of the batch (once, see ``batch_costs``); for fewer, when some have ended, it is
    taken from a line to the costs of one. Where no length is faster than plain decoding, rounds
    are plain and pipelined until a probe finds otherwise, or the batch has shrunk enough. Where
    none could ever be faster, all goes to ``mlx_lm.batch_generate`` from the start.

    ``max_speculative_batch``: more prompts than that go to ``mlx_lm.batch_generate``, because a
    pass over so many rows costs more than drafts save. None: 8; with "auto" 32, the costs
    permitting, but 8 where requests are decoded one after the other.

    A ``Sampling`` gives every prompt noise of its own (see ``Sampling.row``).

    ``kwargs``: the fields of ``Options``, and mlx-lm's ``completion_batch_size`` and
    ``prefill_batch_size`` for a batch that goes to it. Without one of our drafters all goes
    to mlx-lm unchanged.

    Returns a ``BatchResponse``; its ``stats`` are a list of ``Stats``, one per prompt, with
    mlx-lm's figures of the whole batch as attributes.

    Raises ValueError for an empty prompt, lists of unequal length, ``max_tokens`` below 1.
    """
    returns = Returns(return_prompt_caches, return_token_ids, return_logprobs)
    if not is_drafter(draft_model):
        return mlx_lm.batch_generate(
            model,
            tokenizer,
            prompts,
            prompt_caches,
            max_tokens,
            verbose,
            **asdict(returns),
            **kwargs,
        )
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    names = ("completion_batch_size", "prefill_batch_size")
    sizes = {name: kwargs.pop(name) for name in names if name in kwargs}
    if kwargs.pop("input_embeddings", None) is not None:
        raise ValueError(
            "input_embeddings are for one prompt: give them to mlx_eagle.generate, one by one."
        )
    options = Options(**kwargs)
    requests = _requests(model, tokenizer, prompts, prompt_caches, max_tokens, options)
    if return_logprobs:
        for request in requests:
            request.logprobs = []
    with wired_limit(model, [options.stream]):
        return _generate(
            model,
            tokenizer,
            draft_model,
            requests,
            options,
            returns,
            max_speculative_batch,
            sizes=sizes,
            verbose=verbose,
        )


def _generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    draft_model: Drafter,
    requests: list[Request],
    options: Options,
    returns: Returns,
    max_speculative_batch: int | None,
    *,
    sizes: dict[str, int],
    verbose: bool,
) -> BatchResponse:
    """Together, one after the other or plainly, as fits the batch."""
    caches = [c for request in requests for c in split_cache(request.cache, model, None)[0]]
    reason = why_alone(model, caches)
    shares = reason is None
    most = MOST_MEASURED if shares and options.num_draft_tokens == AUTO else MOST_REQUESTS
    most = most if max_speculative_batch is None else max_speculative_batch
    is_drafted = options.num_draft_tokens != 0 and 0 < len(requests) <= most
    if is_drafted and not shares and options.num_draft_tokens == AUTO and len(requests) > 1:
        # Plain rows for all in one pass bring more than drafts for each in its turn.
        if why_alone(model, caches, plainly=True) is None:
            is_drafted = False
            warnings.warn(f"{reason}: they are decoded together, without drafts.", stacklevel=3)
    controller, costs, calibration_time = None, None, 0.0
    if is_drafted and shares:
        start = time.perf_counter()
        controller, costs = _make_controller(model, draft_model, requests, options)
        calibration_time = time.perf_counter() - start if costs is not None else 0.0
        if controller.drafting_off:
            is_drafted = False
            for request in requests:
                request.stats.drafting_events = list(controller.events)
    if not is_drafted:
        return generate_plainly(
            model,
            tokenizer,
            requests,
            options,
            returns,
            sizes=sizes,
            calibration_time=calibration_time,
            verbose=verbose,
        )
    _say_what_is_shared(draft_model, reason)
    start = time.perf_counter()
    if controller is None:
        generate_in_turn(model, draft_model, requests, options)
    else:
        keep = returns.return_prompt_caches
        generate_together(model, draft_model, requests, controller, costs, options, keep)
    return response_of(
        requests,
        tokenizer,
        returns,
        seconds=time.perf_counter() - start,
        calibration_time=calibration_time,
        verbose=verbose,
    )


def _requests(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompts: list[list[int]],
    prompt_caches: list[list] | None,
    max_tokens: int | list[int],
    options: Options,
) -> list[Request]:
    """Every prompt with its limits and caches of its own."""
    num = len(prompts)
    limits = max_tokens if isinstance(max_tokens, list | tuple) else [max_tokens] * num
    for what, values in (("max_tokens", limits), ("prompt_caches", prompt_caches)):
        if values is not None and len(values) != num:
            raise ValueError(f"{what} has {len(values)} entries for {num} prompts: give one each.")
    check_num_draft_tokens(options.num_draft_tokens)
    requests = []
    for i, (prompt, limit) in enumerate(zip(prompts, limits)):
        check_prompt(mx.array(prompt))
        check_max_tokens(limit, of=f" of prompt {i}", least=1)
        # As in mlx-lm's batch, the caches that were given stay as they are.
        cache = deepcopy(prompt_caches[i]) if prompt_caches else make_prompt_cache(model)
        requests.append(Request(prompt, Limits(limit, tokenizer.eos_token_ids), cache, row=i))
    return requests


def _make_controller(
    model: nn.Module, draft_model: Drafter, requests: list[Request], options: Options
) -> tuple[Controller, LiveBatchCosts | None]:
    """The controller of all requests, and the costs it goes by.

    Its drafting is off where no draft could ever be faster.
    """
    if options.num_draft_tokens != AUTO:
        return FixedController(DraftShape(options.num_draft_tokens)), None
    costs = batch_costs(model, draft_model, requests, options)
    return AdaptiveController(costs.of(len(requests))), costs


def _say_what_is_shared(draft_model: Drafter, reason: str | None) -> None:
    """Warn where less is shared than could be: it is slower, and nobody would see why."""
    if reason is not None:
        warnings.warn(
            f"{reason}: the prompts are decoded one after the other, each with drafts.",
            stacklevel=4,
        )
    elif draft_model.modules() and isinstance(make_batch_drafter(draft_model), SequentialDrafter):
        warnings.warn(
            "this drafter takes one text at a time: the prompts share the target's passes, but "
            "drafts are made prompt by prompt.",
            stacklevel=4,
        )
