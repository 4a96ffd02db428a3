"""The speculative loop: draft, verify in one target forward, keep, and again.

The one place that decides when the host waits for the device. It knows drafters, acceptance
rules and caches by their interfaces alone.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..drafters.base import Drafter, TreeDrafter
from ..drafters.tree import Tree
from ..system.progress import Progress, silent
from ..target.rollback import CacheQuantization, Checkpoint, check_supported
from ..target.sharding import in_any_process, is_pipelined
from ..target.taps import Target
from ..target.tree_attention import check_trees
from .accept import LogitsProcessor, Sampler, check_rule_for_trees, make_rule
from .calibrate import TREES, round_costs
from .controller import AdaptiveController, Controller, DraftShape, FixedController
from .decoder import Decoder, Round
from .sampling import Sampling
from .stats import Stats

AUTO = "auto"
CLEAR_CACHE_EVERY = 256  # tokens, as in mlx_lm.generate.generate_step


@dataclass(frozen=True)
class Limits:
    """How far the generation may go; ``max_tokens`` < 0 is no limit."""

    max_tokens: int
    stop_tokens: Collection[int]

    def cut(self, run: list[int], num_emitted: int) -> list[int]:
        """``run`` up to its first stop token, included, and to max_tokens in all."""
        if self.max_tokens >= 0:
            run = run[: self.max_tokens - num_emitted]
        for i, token in enumerate(run):
            if token in self.stop_tokens:
                return run[: i + 1]
        return run

    def at_most(self, shape: DraftShape, num_emitted: int) -> DraftShape | None:
        """As much of ``plan`` as fits after ``num_emitted`` tokens; None if the text ends."""
        if self.max_tokens < 0:
            return shape
        num_left = self.max_tokens - num_emitted
        # A verify pass emits one token more than it keeps.
        return replace(shape, size=min(shape.size, num_left - 1)) if num_left > 0 else None

    def end(self, token: int) -> bool:
        """Whether the text ends with this token."""
        return token in self.stop_tokens


def split_cache(
    prompt_cache: list | None, model: nn.Module, max_kv_size: int | None
) -> tuple[list, list | None]:
    """The target's caches, and the drafter's where ``prompt_cache`` holds them behind."""
    fresh = make_prompt_cache(model, max_kv_size)
    if prompt_cache is None:
        return fresh, None
    # Not len(model.layers): models that share keys and values have fewer caches than layers.
    num_caches = len(fresh)
    return prompt_cache[:num_caches], prompt_cache[num_caches:] or None


def begin_drafter(draft_model: Drafter, draft_cache: list | None) -> Drafter:
    """A drafter for one text on its part of a prompt cache; ValueError where that is not its."""
    num_needed = len(draft_model.make_cache())
    if draft_cache is not None and len(draft_cache) != num_needed:
        raise ValueError(
            f"prompt_cache holds {len(draft_cache)} caches behind the target's, but this drafter "
            f"has {num_needed}: make it with this drafter's make_cache()."
        )
    drafter = draft_model.begin(draft_cache)
    check_supported(drafter.cache, "draft model")
    return drafter


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
    prompt_cache: list | None = None,
    max_kv_size: int | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    prompt_progress_callback: Progress | None = None,
    calibration_progress_callback: Progress | None = None,
    stop_tokens: Collection[int] = (),
    stats: Stats | None = None,
) -> Iterator[tuple[int, mx.array, bool]]:
    """Generate tokens from ``prompt`` (n,), drafting with ``draft_model``.

    mlx-lm's contract for a function of that name: yields (token, logprobs (V,), from_draft).
    ``num_draft_tokens`` is the length of a draft, 0 for plain decoding, "auto" for what pays
    (see ``pace``; what rounds cost is measured once and remembered). ``max_tokens`` -1 means
    no limit. ``acceptance`` is "match" (any sampler), "coupled" or "reject" (with a
    ``Sampling``; coupled is then the default). ``tree`` drafts trees of that shape instead of
    chains of any length, where target and drafter can; "auto" chooses among chains, trees and
    plain decoding what pays. ``stop_tokens`` end the generation once yielded. ``stats`` is filled
    in as it goes. Both progress callbacks are given how much is done and how much there is, of
    the prompt in tokens and of "auto"'s measurement in groups of rounds.

    Wherever the caller stops, ``prompt_cache`` then holds the prompt and every token yielded,
    as ``mlx_lm.generate.generate_step`` leaves it. ``prompt_cache`` may hold the drafter's
    caches after the target's; without them the drafter starts cold.

    Raises ValueError for an empty prompt, a batch of prompts, a negative ``num_draft_tokens``,
    an acceptance rule that does not fit the sampler, or a cache type that cannot be rolled
    back exactly.
    """
    check_request(prompt, num_draft_tokens)
    if isinstance(sampler, Sampling):
        sampler.restart()
    stats = Stats() if stats is None else stats
    cache, draft_cache = split_cache(prompt_cache, model, max_kv_size)
    stats.start()
    try:
        if num_draft_tokens == 0:
            steps = generate_step(
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
            )
            yield from _plain(steps, stop_tokens, stats)
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
        )
        progress = prompt_progress_callback or silent
        decoder.prefill(prompt, prefill_step_size, progress)
        with mx.stream(stream):
            calibrating = calibration_progress_callback or silent
            controller = _make_controller(decoder, num_draft_tokens, tree, stats, calibrating)
        limits, keeps = Limits(max_tokens, stop_tokens), prompt_cache is not None
        yield from _rounds(
            decoder, controller, limits, stats, keeps, lambda: progress(prompt.size, prompt.size)
        )
    finally:
        if prompt_cache is not None:
            prompt_cache[: len(cache)] = cache  # some may have been replaced by quantized ones


def open_decoder(
    model: nn.Module,
    drafter: Drafter,
    cache: list,
    quantization: CacheQuantization,
    stream: mx.Stream | mx.ThreadLocalStream,
    *,
    sampler: Sampler | None,
    logits_processors: list[LogitsProcessor] | None,
    acceptance: str | None,
    tree: Tree | str | None = None,
) -> Decoder:
    """Target and drafter, checked against each other and what is asked of them, for one text."""
    # What processes exchange must be on one stream: an earlier pass may still be under way.
    with mx.stream(stream):
        _check_target(model, drafter, cache, quantization, tree, acceptance)
        target = Target(model, drafter.taps)
    rule, processors = make_rule(acceptance, sampler), tuple(logits_processors or ())
    return Decoder(target, drafter, cache, rule, processors, quantization, stream)


def _rounds(
    decoder: Decoder,
    controller: Controller,
    limits: Limits,
    stats: Stats,
    keep_caches: bool,
    when_prefilled: Callable[[], None],
) -> Iterator[tuple[int, mx.array, bool]]:
    """Round after round until a limit; the first, without a draft, ends prefill."""
    done, run, num_yielded = None, [], 0
    upcoming = decoder.launch_first()
    try:
        while upcoming is not None:
            done, upcoming, run, num_yielded = upcoming, None, [], 0
            if controller.drafting_off and done.num_drafted == 0:
                # Plain decoding is pipelined: its next step needs no look at this one's token.
                decoder.commit(done, 1)
                upcoming = _launch_next(decoder, controller, limits)
            num_kept, following = done.read()
            num_before = decoder.num_emitted - done.committed
            if num_before == 0:
                when_prefilled()
            run = limits.cut(following[: num_kept + 1], num_before)
            if not done.committed:
                decoder.commit(done, len(run))
            if done.num_drafted:
                controller.record(done.shape, num_kept)
            if upcoming is None and not limits.end(run[-1]):
                # The next round is on the device before the caller sees this one's tokens.
                upcoming = _launch_next(decoder, controller, limits)
            stats.num_reruns = decoder.num_reruns
            done.count(stats, num_kept, len(run))
            if decoder.num_emitted % CLEAR_CACHE_EVERY < len(run):
                mx.clear_cache()
            for i, token in enumerate(run):
                num_yielded += 1
                yield token, done.verification.logprobs[i], i < num_kept
            if limits.end(run[-1]):
                return
    finally:
        if num_yielded:
            stats.take_back(len(run) - num_yielded, num_yielded)
        if keep_caches and done is not None:
            decoder.leave(done, upcoming, num_yielded, run)


def _make_controller(
    decoder: Decoder,
    num_draft_tokens: int | str,
    tree: Tree | str | None,
    stats: Stats,
    progress: Progress,
) -> Controller:
    if tree not in (None, AUTO):
        return FixedController(DraftShape(tree.depth, tree))
    if AUTO not in (num_draft_tokens, tree):
        return FixedController(DraftShape(num_draft_tokens))
    controller = AdaptiveController(round_costs(decoder, tree == AUTO, progress))
    stats.drafting_events = controller.events
    decoder.leaves_drafter = controller.never_pays
    return controller


def _launch_next(decoder: Decoder, controller: Controller, limits: Limits) -> Round | None:
    """The round after the one just committed; None where the text must end."""
    shape = limits.at_most(controller.next_shape(decoder.num_emitted), decoder.num_emitted)
    return None if shape is None else decoder.launch(shape)


def check_request(prompt: mx.array, num_draft_tokens: int | str) -> None:
    if prompt.ndim != 1:
        raise ValueError(
            f"the prompt has shape {tuple(prompt.shape)}: speculative decoding takes one prompt "
            "(n,) at a time; use mlx_eagle.batch_generate for several."
        )
    if prompt.size == 0:
        raise ValueError("the prompt is empty: give at least one token.")
    if num_draft_tokens != AUTO and (isinstance(num_draft_tokens, str) or num_draft_tokens < 0):
        raise ValueError(
            f"num_draft_tokens is {num_draft_tokens}: give 0 (plain decoding) or more, or 'auto'."
        )


def _check_target(
    model: nn.Module,
    drafter: Drafter,
    cache: list,
    quantization: CacheQuantization,
    tree: Tree | str | None,
    acceptance: str | None,
) -> None:
    """Raise ValueError for a target, or a wish about it, that could not be met exactly."""
    check_supported(cache, "target")
    quantization.check(cache)
    if is_pipelined(model) and in_any_process(bool(Checkpoint(cache).recurrent)):
        raise ValueError(
            "this target is split in a pipeline and has recurrent layers, whose rows cannot be run "
            "again by one process alone: use tensor parallelism, or leave the draft model out."
        )
    if tree is not None:
        check_rule_for_trees(acceptance)
        check_tree_drafter(drafter, tree)
        check_trees(model, cache)


def check_tree_drafter(drafter: Drafter, tree: Tree | str) -> None:
    """Raise ValueError where ``drafter`` cannot draft ``tree``; "auto" stands for several."""
    if not isinstance(drafter, TreeDrafter):
        raise ValueError("this drafter proposes chains only: leave the tree out.")
    for shape in [shape.tree for shape in TREES] if tree == AUTO else [tree]:
        drafter.check_tree(shape)


def _plain(
    steps: Iterator[tuple[int, mx.array]], stop_tokens: Collection[int], stats: Stats
) -> Iterator[tuple[int, mx.array, bool]]:
    """mlx-lm's own pipelined decoding, counted."""
    for token, logprobs in steps:
        stats.record(0, 0, 0, 1, 0)
        yield token, logprobs, False
        if token in stop_tokens:
            return
