"""Several prompts with one drafter: mlx-lm's ``batch_generate`` with speculative decoding.

This module decides whether and how a batch is drafted for; the rounds are in ``rounds.py``.
"""

import time
import warnings
from collections.abc import Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, Unpack

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import BatchGenerator, BatchStats, wired_limit
from mlx_lm.generate import BatchResponse as MlxBatchResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.auto import FixedController
from ..decoding.decoder import Limits
from ..decoding.generate_step import speculative_generate_step
from ..decoding.loop import Controller
from ..decoding.round_costs import costs_of
from ..decoding.rules import make_rule
from ..decoding.setup import (
    AUTO,
    check_max_tokens,
    check_num_draft_tokens,
    check_prompt,
    split_cache,
)
from ..decoding.stats import Stats
from ..drafters.base import Drafter, NullDrafter, is_drafter
from ..drafters.copies import Tokens
from ..drafters.tree import PLAIN
from .requests import (
    BatchOptions,
    Options,
    Request,
    first_token,
    mlx_lm_can_batch,
    prefill,
    reason_not_batchable,
    restore_caches,
)
from .rounds import Batch, shared_controller


class RequestStats(list[Stats], BatchStats):  # type: ignore[misc]  # both have __iadd__
    """One ``Stats`` per prompt, in order, and mlx-lm's figures of the whole batch by its names.

    ``stats[0].mean_acceptance_length`` belongs to the first prompt, ``stats.total`` has the counts
    of all, and ``stats.generation_tps``, ``stats.prompt_tokens``, ``stats.peak_memory`` and so on
    are as in ``mlx_lm.batch_generate``.
    """

    def __init__(self, each: Sequence[Stats], whole: BatchStats):
        list.__init__(self, each)
        vars(self).update(vars(whole))

    @property
    def total(self) -> Stats:
        """The counts of all requests together; their times are added up, although they overlap."""
        return reduce(add, self, Stats())


@dataclass
class BatchResponse(MlxBatchResponse):
    """mlx-lm's response; its ``stats`` are also a list with the counts of each request.

    ``batch_stats`` are mlx-lm's own for the whole batch, if it was decoded plainly.
    """

    stats: RequestStats
    batch_stats: BatchStats | None = None


def response_of(
    requests: list[Request],
    tokenizer: TokenizerWrapper,
    options: Options,
    seconds: float,
    plain: BatchStats | None = None,
) -> BatchResponse:
    """The response to requests that ran for ``seconds``, stop tokens in neither texts nor ids.

    ``plain`` are mlx-lm's figures, if its batch ran them.
    """
    ends = [len(t.tokens) - (t.tokens[-1] in t.limits.stop_tokens) for t in requests]
    ids = [request.tokens[:end] for request, end in zip(requests, ends, strict=True)]
    stats = [request.stats for request in requests]
    prompt_time = sum(counts.prompt_time for counts in stats)
    whole = plain or BatchStats(
        prompt_tokens=sum(len(request.prompt) for request in requests),
        prompt_time=prompt_time,
        generation_tokens=sum(len(request.tokens) for request in requests),
        generation_steps=max(counts.num_target_forwards for counts in stats),
        decode_time=seconds - prompt_time,
        wall_time=seconds,
        peak_memory=mx.get_peak_memory() / 1e9,
    )
    if options.verbose:
        for i, counts in enumerate(stats):
            print(f"[batch_generate] Prompt {i}: " + "; ".join(counts.lines()))
        print(
            f"[batch_generate] Prompt: {whole.prompt_tps:.3f} tokens-per-sec, generation: "
            f"{whole.generation_tps:.3f}; peak memory: {whole.peak_memory:.3f} GB"
        )
    logprobs = None
    if options.return_logprobs:
        logprobs = [(t.logprobs or [])[:end] for t, end in zip(requests, ends, strict=True)]
    return BatchResponse(
        [tokenizer.decode(tokens) for tokens in ids],
        RequestStats(stats, whole),
        [request.cache for request in requests] if options.return_prompt_caches else None,
        ids if options.return_token_ids else None,
        logprobs,
        plain,
    )


def generate_plainly(
    model: nn.Module, tokenizer: TokenizerWrapper, requests: list[Request], options: Options
) -> BatchResponse:
    """Generate all requests by mlx-lm's batch; the caches it leaves are only the target's.

    Unlike mlx-lm's function it gives each request its own sampler and processors.
    """
    names = ("prefill_step_size", "completion_batch_size", "prefill_batch_size")
    given = {name: getattr(options, name) for name in names}
    settings: dict[str, Any] = {name: size for name, size in given.items() if size is not None}
    generator = BatchGenerator(
        model, stop_tokens=[[token] for token in tokenizer.eos_token_ids], **settings
    )
    with closing(generator):
        samplers: Any = [options.sampler_of(request) for request in requests]
        uids = generator.insert(
            [request.prompt for request in requests],
            [request.limits.max_tokens for request in requests],
            caches=[split_cache(request.cache, model, None)[0] for request in requests],
            samplers=samplers,
            logits_processors=[options.own_processors() for _ in requests],
        )
        requests_by_uid = dict(zip(uids, requests, strict=True))
        with generator.stats() as stats:
            while responses := generator.next_generated():
                for made in responses:
                    request = requests_by_uid[made.uid]
                    request.tokens.append(made.token)
                    if made.finish_reason is not None:
                        request.cache = made.prompt_cache
                    if request.logprobs is not None:
                        request.logprobs.append(made.logprobs[made.token].item())
    for request in requests:
        num_steps = len(request.tokens) - 1
        request.stats.num_plain_steps = request.stats.num_emitted = num_steps
    return response_of(requests, tokenizer, options, stats.wall_time, stats)


def generate_together(
    model: nn.Module,
    draft_model: Drafter,
    requests: list[Request],
    controller: Controller,
    options: Options,
) -> None:
    """All requests to their ends, round by round in shared passes."""
    for request in requests:
        for _ in prefill(model, draft_model, request, options):
            pass
        first_token(request)
    kernel_options = None
    if isinstance(options.num_draft_tokens, str):  # auto
        kernel_options = costs_of(model, draft_model, requests[0].decoder.rule).options
    batch = Batch(
        model,
        draft_model,
        controller,
        options=kernel_options,
        keep_caches=options.return_prompt_caches,
        stream=options.stream,
    )
    for request in requests:
        batch.join(request)
    while batch.round() is not None:
        pass  # what each round emitted is in the requests
    if options.return_prompt_caches:
        for request in requests:
            restore_caches(request)
            if draft_model.copies is not None and request.decoder.copies is not None:
                draft_model.copies.remember(request.cache, request.decoder.copies.text)


def generate_in_turn(
    model: nn.Module, draft_model: Drafter, requests: list[Request], options: Options
) -> None:
    """Generate one request after the other, for targets that cannot share a pass."""
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
            logits_processors=options.own_processors(),
            acceptance=options.acceptance,
            exact=options.exact,
            prompt_cache=request.cache,
            prefill_step_size=options.prefill_step_size,
            known_tokens=request.known_tokens,
            stop_tokens=request.limits.stop_tokens,
            stats=request.stats,
        )
        for token, logprobs, _ in steps:
            request.tokens.append(token)
            if request.logprobs is not None:
                logprob: Any = logprobs[token].item()
                request.logprobs.append(logprob)


MOST_REQUESTS = 8  # with a fixed length, or one after the other
MOST_WITH_AUTO = 32  # as many as mlx-lm decodes together


def batch_generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: list[list[int]],
    prompt_caches: list[list[Any]] | None = None,
    max_tokens: int | list[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    draft_model: Drafter | None = None,
    max_speculative_batch: int | None = None,
    known_tokens: Sequence[Tokens] | None = None,
    **kwargs: Unpack[BatchOptions],
) -> MlxBatchResponse:
    """Generate for several prompts, as ``mlx_lm.batch_generate`` does, with a drafter.

    Each round verifies all requests in one forward pass of the target, on caches with a length per
    request. Each request keeps its own number of rows, ends on its own, and gets the same text as
    by itself. Heads, MTP layers and assistants also draft in shared passes; small models draft
    text by text. A request that has ended makes no room for another. If the target's caches or
    ropes cannot share a pass (quantized caches, kept first tokens, a base that depends on length),
    the requests are decoded one after the other, each speculatively, with a warning.

    With ``num_draft_tokens`` "auto", the default, each round has the fastest draft length, the
    same for all requests, judged by what they accept and by the costs of such rounds (see
    ``decoding/auto.py``). If no length is faster than plain decoding, rounds are plain and
    pipelined until a probe finds otherwise, or the batch has shrunk enough. If earlier batches
    have shown that no length can ever be faster, mlx-lm's batch generator decodes the batch.

    ``max_speculative_batch``: more prompts than this go to mlx-lm's batch generator, because a
    pass over so many rows costs more than drafts save. None means 8; with "auto" 32, if the costs
    permit, but 8 if requests are decoded one after the other.

    With ``exact`` the requests are decoded one after the other, each as it would be by itself.

    A ``Sampling`` gives every prompt its own noise (see ``Sampling.row``).

    ``known_tokens``: for each prompt the tokens in its cache of ``prompt_caches``, for a drafter
    that copies; by default the ones that an earlier generation with this drafter left there.

    ``kwargs``: the other fields of ``Options``, of which mlx-lm's ``completion_batch_size`` and
    ``prefill_batch_size`` are for a batch that goes to it, and ``max_kv_size`` is for caches that
    are made here. Without one of our drafters all goes to mlx-lm unchanged.

    Returns a ``BatchResponse``; its ``stats`` are a list of ``Stats``, one per prompt, with
    mlx-lm's figures of the whole batch as attributes.

    Raises ValueError for an empty prompt, lists of unequal length, ``max_tokens`` below 1, and
    for what only a single prompt can have: a tree, caches quantized on the way, embeddings.
    """
    given: dict[str, Any] = {
        **kwargs,
        "return_prompt_caches": return_prompt_caches,
        "return_token_ids": return_token_ids,
        "return_logprobs": return_logprobs,
        "verbose": verbose,
    }
    if not is_drafter(draft_model):
        return mlx_lm.batch_generate(model, tokenizer, prompts, prompt_caches, max_tokens, **given)
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    options = Options.by_names(given)
    if prompt_caches is None:
        caches = [make_prompt_cache(model, options.max_kv_size) for _ in prompts]
    else:  # as in mlx-lm's batch, those that were given stay as they are
        caches = [deepcopy(cache) for cache in prompt_caches]
    if known_tokens is None and prompt_caches is not None and draft_model.copies is not None:
        known_tokens = [draft_model.copies.remembered(cache) for cache in prompt_caches]
    requests = _requests(tokenizer, prompts, caches, max_tokens, options, known_tokens)
    stream: Any = options.stream
    with wired_limit(model, [stream]):
        return _generate(model, tokenizer, draft_model, requests, options, max_speculative_batch)


def _generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    draft_model: Drafter,
    requests: list[Request],
    options: Options,
    max_speculative_batch: int | None,
) -> BatchResponse:
    """Together, one after the other or plainly, as fits the batch."""
    start = time.perf_counter()
    if options.exact:  # a pass that texts share rounds otherwise than each of them does
        generate_in_turn(model, draft_model, requests, options)
        return response_of(requests, tokenizer, options, time.perf_counter() - start)
    caches = [c for request in requests for c in split_cache(request.cache, model, None)[0]]
    reason = reason_not_batchable(model, caches)
    shares = reason is None
    most = MOST_WITH_AUTO if shares and options.num_draft_tokens == AUTO else MOST_REQUESTS
    most = most if max_speculative_batch is None else max_speculative_batch
    is_drafted = options.num_draft_tokens != 0 and 0 < len(requests) <= most
    is_slow = is_drafted and not shares and options.num_draft_tokens == AUTO and len(requests) > 1
    # Plain rows for all in one pass bring more than drafts for each in its turn.
    if is_slow and reason_not_batchable(model, caches, plainly=True) is None:
        is_drafted = False
        warnings.warn(f"{reason}: they are decoded together, without drafts.", stacklevel=3)
    controller: Controller | None = None
    if is_drafted and shares:
        rule = make_rule(options.acceptance, options.sampler)
        controller = shared_controller(
            model, draft_model, rule, options.num_draft_tokens, len(requests), options.stream
        )
        if controller.drafting_off and draft_model.copies is None:
            is_drafted = False
            for request in requests:
                request.stats.drafting_events = list(controller.events)
    if not is_drafted and len(requests) > 1 and not mlx_lm_can_batch(model, requests):
        draft_model = NullDrafter()
        options = replace(options, num_draft_tokens=0)
        shares = reason_not_batchable(model, caches, plainly=True) is None
        controller = FixedController(PLAIN) if shares else None
    elif not is_drafted:
        return generate_plainly(model, tokenizer, requests, options)
    if controller is None or is_drafted:
        _say_what_is_shared(draft_model, options, reason)
    if controller is None:
        generate_in_turn(model, draft_model, requests, options)
    else:
        generate_together(model, draft_model, requests, controller, options)
    return response_of(requests, tokenizer, options, time.perf_counter() - start)


def _requests(
    tokenizer: TokenizerWrapper,
    prompts: list[list[int]],
    prompt_caches: list[list[Any]],
    max_tokens: int | list[int],
    options: Options,
    known_tokens: Sequence[Tokens] | None,
) -> list[Request]:
    """Every prompt with its limits and caches of its own."""
    num = len(prompts)
    most = max_tokens if isinstance(max_tokens, list | tuple) else [max_tokens] * num
    known: Sequence[Tokens | None] = known_tokens or [None] * num
    given: dict[str, Sequence[Any]] = {
        "max_tokens": most,
        "prompt_caches": prompt_caches,
        "known_tokens": known,
    }
    for what, values in given.items():
        if len(values) != num:
            raise ValueError(f"{what} has {len(values)} entries for {num} prompts: give one each.")
    check_num_draft_tokens(options.num_draft_tokens)
    requests = []
    for i, (prompt, limit) in enumerate(zip(prompts, most, strict=True)):
        check_prompt(mx.array(prompt))
        check_max_tokens(limit, of=f" of prompt {i}", least=1)
        limits = Limits(limit, tokenizer.eos_token_ids)
        logprobs: list[float] | None = [] if options.return_logprobs else None
        request = Request(prompt, limits, prompt_caches[i], i, known[i], logprobs=logprobs)
        requests.append(request)
    return requests


def _say_what_is_shared(draft_model: Drafter, options: Options, reason: str | None) -> None:
    """Warn where less is shared than could be: it is slower, and users would not see why."""
    if options.num_draft_tokens == 0:
        said = (
            "mlx-lm's batch gives other texts with this target: the prompts are decoded one after "
            "the other, without drafts."
        )
    elif reason is not None:
        said = f"{reason}: the prompts are decoded one after the other, each with drafts."
    elif draft_model.modules() and draft_model.batch_drafter() is None:
        said = (
            "this drafter takes one text at a time: the prompts share the target's passes, but "
            "drafts are made prompt by prompt."
        )
    else:
        return
    warnings.warn(said, stacklevel=4)
