"""``speculative_generate_step``: one text from a prompt, token by token, with mlx-lm's contract.

It checks and opens what the caller gives (``setup.py``), and runs the loop (``loop.py``).
"""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, TypedDict

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, generate_step, generation_stream

from ..drafters.base import Drafter, is_drafter
from ..drafters.copies import Copies, Tokens
from ..drafters.tree import DraftShape, Tree, chains_for
from ..system.progress import Progress, silent
from ..target_model.cache_view import close_windows
from ..target_model.kernels import KernelOptions, OptionTrial
from ..target_model.rollback import CacheQuantization
from .agreement import AgreedController, agreed
from .auto import AdaptiveController, FixedController, fixed_controller
from .decoder import Decoder, Limits
from .loop import Controller, Pipeline, SingleRunner
from .processors import LogitsProcessor
from .round_costs import costs_of
from .sampling import Sampler, Sampling
from .setup import (
    begin_copies,
    begin_drafter,
    check_embeddings,
    check_max_tokens,
    check_num_draft_tokens,
    check_prompt,
    drawable_trees,
    kernel_options,
    open_decoder,
    read_tree,
    split_cache,
    verifies_trees,
)
from .stats import Stats

LONG_PREFILL = 1.0  # seconds for a prompt, from which on kernel options may matter
CLEAR_CACHE_EVERY = 256  # tokens, as in mlx_lm.generate.generate_step


class StepOptions(TypedDict, total=False):
    """Options of ``speculative_generate_step`` that ``stream_generate`` and ``generate`` take."""

    num_draft_tokens: int | str
    sampler: Sampler | None
    logits_processors: list[LogitsProcessor] | None
    acceptance: str | None
    tree: Tree | str | None
    exact: bool
    prompt_cache: list[Any] | None
    max_kv_size: int | None
    prefill_step_size: int
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    prompt_progress_callback: Progress | None
    input_embeddings: mx.array | None
    known_tokens: Tokens | None
    stats: Stats | None


def speculative_generate_step(
    prompt: mx.array,
    model: nn.Module,
    draft_model: Drafter,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    *,
    num_draft_tokens: int | str = 3,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    acceptance: str | None = None,
    tree: Tree | str | None = None,
    prompt_cache: list[Any] | None = None,
    max_kv_size: int | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    prompt_progress_callback: Progress | None = None,
    input_embeddings: mx.array | None = None,
    known_tokens: Tokens | None = None,
    exact: bool = False,
    stop_tokens: Collection[int] = (),
    stats: Stats | None = None,
) -> Iterator[tuple[int, mx.array, bool]]:
    """Generate tokens from ``prompt`` (n,), drafting with ``draft_model``.

    It has the contract of mlx-lm's function of the same name: it yields (token, logprobs (V,),
    from_draft). ``num_draft_tokens`` is the length of a draft, 0 for plain decoding, or "auto" for
    the fastest of chains, trees and plain decoding, judged by the rounds so far, including earlier
    texts of the pair in this process: see ``decoding/auto.py``.
    ``max_tokens`` -1 means no limit. ``acceptance`` is "match" (any sampler), "coupled" or
    "reject" (with a ``Sampling``; coupled is then the default). ``tree`` drafts trees of that
    shape ("4x5:16" or a ``Tree``) instead of chains, if target and drafter support them; "auto"
    is that of ``num_draft_tokens``, with trees if they are supported. ``stop_tokens`` end the
    generation after they are yielded. ``stats`` is updated after every round.
    ``input_embeddings`` (n, h) replace the embeddings of the prompt in the target and in the
    drafter's head; the prompt may then be empty. ``known_tokens`` are the tokens in
    ``prompt_cache``, for a drafter that copies (see ``Drafter.with_copies``); by default the ones
    that an earlier generation with this drafter left there. They are a hint: wrong ones cost
    speed, but never change the text.
    ``exact`` computes every row of a verify pass as a plain step does, bit for bit; a row then
    costs about as much as a plain step: see ``target_model/row_by_row.py``.
    The progress callback gets the number of prompt tokens done, and their total.

    Wherever the caller stops, ``prompt_cache`` then holds the prompt and every token yielded,
    as ``mlx_lm.generate.generate_step`` leaves it. It may have the drafter's caches after the
    target's; without them the drafter starts cold.

    A generation changes only its own objects (it copies a ``Sampling``), so several threads may
    generate with one model and one drafter.

    Raises ValueError for an empty prompt, a batch of prompts, an invalid ``num_draft_tokens`` or
    ``max_tokens``, an acceptance rule that does not fit the sampler, a cache type that cannot be
    rolled back exactly, or embeddings that target or drafter cannot take.
    """
    if not is_drafter(draft_model):
        raise ValueError(
            f"draft_model is a {type(draft_model).__name__}: give a drafter that mlx_eagle has "
            "opened."
        )
    check_prompt(prompt, can_be_empty=input_embeddings is not None)
    check_num_draft_tokens(num_draft_tokens)
    tree = read_tree(tree)
    check_max_tokens(max_tokens)
    if isinstance(sampler, Sampling):
        sampler = sampler.begin()
    if input_embeddings is not None and num_draft_tokens != 0:
        check_embeddings(input_embeddings, prompt, model, draft_model)
        prompt = prompt.astype(mx.int32)  # an empty array has another type by default
    stats = Stats() if stats is None else stats
    cache, draft_cache = split_cache(prompt_cache, model, max_kv_size)
    copies = begin_copies(draft_model, cache, prompt, known_tokens, input_embeddings is not None)
    stats.start()
    try:
        if num_draft_tokens == 0:
            steps: Any = generate_step(
                prompt,
                model,
                stream,
                max_tokens=max_tokens,
                sampler=sampler,
                logits_processors=logits_processors,
                prompt_cache=cache,
                prefill_step_size=prefill_step_size,
                kv_bits=kv_bits,
                kv_group_size=kv_group_size,
                quantized_kv_start=quantized_kv_start,
                prompt_progress_callback=prompt_progress_callback,
                input_embeddings=input_embeddings,
            )
            yield from _plain(steps, stop_tokens, stats, copies)
            return
        decoder = open_decoder(
            model,
            begin_drafter(draft_model, draft_cache),
            cache,
            CacheQuantization(kv_bits, kv_group_size, quantized_kv_start),
            stream,
            sampler=sampler,
            logits_processors=logits_processors,
            acceptance=acceptance,
            tree=tree,
            copies=copies,
            exact=exact,
        )
        progress = prompt_progress_callback or silent
        decoder.prefill(prompt, prefill_step_size, progress, input_embeddings)
        with mx.stream(stream):
            controller = make_controller(decoder, num_draft_tokens, tree, stats)
        total = prompt.size if input_embeddings is None else input_embeddings.shape[0]

        def when_prefilled() -> None:
            stats.end_prefill()  # before the first round is launched, which takes a CPU long
            progress(total, total)

        runner = SingleRunner(decoder, Limits(max_tokens, stop_tokens), when_prefilled)
        yield from _tokens(runner, controller, stats, keep_caches=prompt_cache is not None)
    finally:
        if prompt_cache is not None:
            close_windows(cache)
            prompt_cache[: len(cache)] = cache  # some may have been replaced by quantized ones
            if copies is not None and draft_model.copies is not None:
                draft_model.copies.remember(cache, copies.text)


def _tokens(
    runner: SingleRunner, controller: Controller, stats: Stats, *, keep_caches: bool
) -> Iterator[tuple[int, mx.array, bool]]:
    """Tokens of all rounds, one by one; the first round, without a draft, ends prefill."""
    decoder = runner.decoder
    pipeline = Pipeline(runner, controller, decoder.launch_first())
    try:
        for done in pipeline:
            stats.num_reruns = decoder.num_reruns
            if done.position > 0:
                done.count(stats)
            if decoder.num_emitted % CLEAR_CACHE_EVERY < len(done.run):
                mx.clear_cache()
            for i, token in enumerate(done.run):
                done.num_taken += 1
                yield token, done.verification.logprobs[i], i < done.outcome.num_kept
    finally:
        last = pipeline.current
        if last is not None:
            if last.num_taken > 0:
                stats.take_back(len(last.run) - last.num_taken, last.num_taken)
            if keep_caches:
                decoder.stop(last, pipeline.upcoming)


def make_controller(
    decoder: Decoder, num_draft_tokens: int | str, tree: Tree | str | None, stats: Stats
) -> Controller:
    """Make the controller for one text; ``decoder`` has read its prompt."""
    drafter = decoder.drafter
    copies = decoder.copies is not None
    if tree is not None and not isinstance(tree, str):
        return FixedController(DraftShape(tree.depth, tree), copy_size=tree.depth * copies)
    if tree is None and not isinstance(num_draft_tokens, str):
        return fixed_controller(num_draft_tokens, drafter.longest_draft != 0, copies)
    costs = costs_of(decoder.target.model, drafter, decoder.rule, decoder.is_exact)
    decoder.use(costs.options or KernelOptions())
    trial = None
    options = kernel_options(decoder) if decoder.prefill_time > LONG_PREFILL else []
    if costs.options is None and options:
        trial = OptionTrial(options, decoder.use)
    drafts = () if decoder.discards_features else chains_for(drafter.longest_draft)
    own = AdaptiveController(
        costs,
        drafts + (drawable_trees(decoder) if drafts else ()),
        can_draw=partial(verifies_trees, decoder),
        trial=trial,
        copies=copies,
    )
    controller = agreed(own, decoder.target.model, decoder.stream)
    if isinstance(controller, AgreedController):
        controller.ride(decoder.target)
    stats.drafting_events = controller.events
    decoder.discards_features |= controller.never_pays
    return controller


def _plain(
    steps: Iterator[tuple[int, mx.array]],
    stop_tokens: Collection[int],
    stats: Stats,
    copies: Copies | None,
) -> Iterator[tuple[int, mx.array, bool]]:
    """Tokens of mlx-lm's own pipelined decoding, counted in ``stats``."""
    for n, (token, logprobs) in enumerate(steps):
        if n == 0:
            stats.end_prefill()
        else:
            stats.record(0, 0, 0, 1, 0)
        if copies is not None:
            copies.text.extend([token])
        yield token, logprobs, False
        if token in stop_tokens:
            return
