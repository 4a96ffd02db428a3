"""The speculative loop: draft, verify in one target forward, keep, and again.

The one place that decides when the host waits for the device. It knows drafters, acceptance
rules and caches by their interfaces alone.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    DEFAULT_QUANTIZED_KV_START,
    generate_step,
    generation_stream,
)
from mlx_lm.models.cache import make_prompt_cache

from .accept import LogitsProcessor, Rule, Sampler, Verdict, make_rule, process_logits
from .cache import CacheQuantization, Window, check_supported, exact_masks
from .drafter import Draft, Drafter, Pick, TreeDrafter, empty_draft
from .sampling import Sampling
from .stats import Stats
from .target import LayerCall, Target
from .tree import TreeShape
from .tree_attention import check_trees

CLEAR_CACHE_EVERY = 256  # tokens, as in mlx_lm.generate.generate_step


@dataclass
class Round:
    """A verify pass in flight: row 0 is the root, row i + 1 draft token i."""

    num_drafted: int
    num_levels: int
    verdict: Verdict
    features: mx.array | None  # (R, F)
    packed: mx.array  # num_kept, following (R,), and a tree's rows (R,): for one blocking read
    target_window: Window
    draft_window: Window
    num_head_forwards: int  # of the drafter since prefill, once this round is done
    rows: list[int] | None = None  # of a tree, once read: window rows, the kept branch first

    def read(self) -> tuple[int, list[int]]:
        """Wait for the device: how many draft tokens stay, and the token after each row."""
        mx.eval(self.packed)
        num_kept, *following = self.packed.tolist()
        if self.verdict.rows is not None:
            num_rows = self.num_drafted + 1
            following, self.rows = following[:num_rows], following[num_rows:]
        return num_kept, following

    def keep_run(self, length: int) -> None:
        """Cut to the rows that led to the first ``length`` tokens that were emitted."""
        if self.rows is None:
            self.keep(length, length)
            return
        self.target_window.keep_branch(self.rows[:length])
        self.draft_window.keep(length)

    def keep(self, num_rows: int, num_pairs: int) -> None:
        """Cut to the first rows of the target and pairs of the drafter."""
        if num_rows <= self.num_drafted:
            self.target_window.keep(num_rows)
        if num_pairs <= self.num_drafted:
            self.draft_window.keep(num_pairs)


class Decoder:
    """Everything one generation holds, and the steps of a round.

    At every round boundary, with N tokens committed (prompt and emitted), the target's cache
    holds N - 1 positions, all but the root, and the drafter has absorbed N - 1 pairs.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        cache: list,
        rule: Rule,
        processors: tuple[LogitsProcessor, ...],
        quantization: CacheQuantization,
        tree: TreeShape | None,
        stream: mx.Stream | mx.ThreadLocalStream,
    ):
        self.target = target
        self.drafter = drafter
        self.cache = cache
        self.rule = rule
        self.processors = processors
        self.quantization = quantization
        self.tree = tree
        self.stream = stream
        self.root = mx.zeros((1,), mx.int32)
        self.history = mx.zeros((0,), mx.int32)  # for logits processors: up to the root
        self.num_emitted = 0
        self.num_reruns = 0
        self._prefill_forwards = 0

    def prefill(
        self, prompt: mx.array, step_size: int, progress: Callable[[int, int], None]
    ) -> None:
        """Run prompt (n,) but its last token, chunk by chunk, through target and drafter."""
        total = prompt.shape[0]
        progress(0, total)
        with mx.stream(self.stream):
            self.drafter.extend(prompt[:1], None)
        for start in range(0, total - 1, step_size):
            end = min(start + step_size, total - 1)
            with mx.stream(self.stream):
                _, features = self.target(prompt[start:end], self.cache)
                self.drafter.extend(prompt[start + 1 : end + 1], features)
                self.quantization.apply(self.cache)
            mx.eval([c.state for c in self.cache + self.drafter.cache])
            mx.clear_cache()
            progress(end, total)
        self.root = prompt[-1:]
        self.history = prompt

    def launch(self, size: int, absorb: bool = True) -> Round:
        """Build one round that drafts ``size`` levels, and start it without waiting.

        ``absorb`` False leaves out the accept pass, for a round that is known to be the last.
        """
        max_rows = self.quantization.max_rows(self.cache)
        if max_rows is not None:
            size = min(size, max_rows - 1)
        draft_window = Window(self.drafter.cache)
        target_window = Window(
            self.cache, lambda num_rows: self._rerun(tokens[:num_rows], calls, target_window)
        )
        launched = False
        try:
            with mx.stream(self.stream):
                choice = self.rule.open(self.num_emitted)
                draft = self._propose(size, choice.pick)
                reach = draft.reach()
                tokens = mx.concatenate([self.root, draft.tokens])
                logits, features, calls = self._verify(tokens, reach, target_window)
                verdict = choice.judge(draft, reach, self._logprobs(draft, reach, logits))
                if verdict.rows is not None and features is not None:
                    features = features[verdict.rows]
                packed = verdict.packed()
                mx.async_eval(packed)
                if absorb:
                    # Needs no count: rows after the kept ones are cut once it is read.
                    self.drafter.extend(verdict.following, features, last=verdict.num_kept)
                    mx.async_eval(self.drafter.pending())
            launched = True
        finally:
            if not launched:  # an error or a Ctrl-C must not leave half a window behind
                target_window.keep(0)
                draft_window.keep(0)
        forwards = self.drafter.num_forwards - self._prefill_forwards
        return Round(
            len(draft),
            draft.num_levels,
            verdict,
            features,
            packed,
            target_window,
            draft_window,
            forwards,
        )

    def launch_first(self) -> Round:
        """The round that ends prefill: the prompt's last token, no draft."""
        first = self.launch(0)
        self._prefill_forwards = self.drafter.num_forwards
        return first

    def commit(self, done: Round, run: list[int]) -> None:
        """Make ``run``, the first tokens of done's following, part of the text."""
        with mx.stream(self.stream):
            done.keep_run(len(run))
            self.quantization.apply(self.cache)
            emitted = done.verdict.following[: len(run)]
            self.root = emitted[-1:]
            self.num_emitted += len(run)
            if self.processors:
                tokens = emitted.astype(self.history.dtype)
                self.history = mx.concatenate([self.history, tokens])

    def leave(self, done: Round, upcoming: Round | None, num_yielded: int, run: list[int]) -> None:
        """Leave the caches as plain decoding would: all yielded tokens run, nothing after.

        ``run`` is what ``done`` emitted, of which the caller took ``num_yielded``; empty where
        the round failed before that was known.
        """
        took_all = bool(run) and num_yielded == len(run)
        with mx.stream(self.stream):
            if upcoming is not None:
                upcoming.keep(int(took_all), 0)
            if not took_all:
                done.keep(num_yielded + 1, num_yielded)
                features, row = done.features, num_yielded
            elif upcoming is not None:
                features, row = upcoming.features, 0
            else:
                (_, features), row = self._run(self.root), 0
            if features is not None:
                self.drafter.hold(features[row : row + 1])
            self.quantization.apply(self.cache)
            mx.eval([c.state for c in self.cache + self.drafter.cache if not c.empty()])

    def _run(self, tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        with exact_masks(self.cache, tokens.shape[0]):
            return self.target(tokens, self.cache)

    def _propose(self, size: int, pick: Pick) -> Draft:
        if size == 0:
            return empty_draft()
        if self.tree is None:
            return self.drafter.propose(size, pick)
        return self.drafter.propose_tree(self.tree.at_most(size))

    def _verify(
        self, tokens: mx.array, reach: mx.array | None, window: Window
    ) -> tuple[mx.array, mx.array | None, list[LayerCall]]:
        """Logits, features, and the calls to repeat where the window is to be cut."""
        if reach is not None:
            return *self.target(tokens, self.cache, reach), []
        recurrent = window.recurrent
        if not recurrent or tokens.shape[0] == 1:
            return *self._run(tokens), []
        with exact_masks(self.cache, tokens.shape[0]):
            logits, features, calls = self.target.record(tokens, self.cache)
        calls = [call for call in calls if any(call.uses(cache) for cache in recurrent)]
        # A model may use such a cache outside its layers; then all of it has to run again.
        window.reruns_layers = len(calls) == len(recurrent)
        return logits, features, calls

    def _rerun(self, tokens: mx.array, calls: list[LayerCall], window: Window) -> None:
        """Bring recurrent states forward over the kept rows, tokens (m,)."""
        if window.reruns_layers:
            for call in calls:
                call.repeat(tokens.shape[0])
            return
        self.num_reruns += 1
        self._run(tokens)

    def _logprobs(self, draft: Draft, reach: mx.array | None, logits: mx.array) -> mx.array:
        if self.processors:
            logits = process_logits(self.processors, self.history, draft, reach, logits)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@dataclass(frozen=True)
class Limits:
    """How far a round and the whole generation may go; ``max_tokens`` < 0 is no limit."""

    num_draft_tokens: int
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

    def next_size(self, run: list[int], num_emitted: int) -> int | None:
        """The length of the next draft after ``run``; None where the text ends."""
        num_left = self.max_tokens - num_emitted
        if num_left == 0 or run[-1] in self.stop_tokens:
            return None
        # A verify pass emits one token more than it keeps.
        return self.num_draft_tokens if num_left < 0 else min(self.num_draft_tokens, num_left - 1)


def _split_cache(
    prompt_cache: list | None, model: nn.Module, max_kv_size: int | None
) -> tuple[list, list | None]:
    """The target's caches, and the drafter's where ``prompt_cache`` holds them behind."""
    fresh = make_prompt_cache(model, max_kv_size)
    if prompt_cache is None:
        return fresh, None
    # Not len(model.layers): models that share keys and values have fewer caches than layers.
    num_caches = len(fresh)
    return prompt_cache[:num_caches], prompt_cache[num_caches:] or None


def speculative_generate_step(
    prompt: mx.array,
    model: nn.Module,
    draft_model: Drafter,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    *,
    num_draft_tokens: int = 3,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    acceptance: str | None = None,
    tree: TreeShape | None = None,
    prompt_cache: list | None = None,
    max_kv_size: int | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    stop_tokens: Collection[int] = (),
    stats: Stats | None = None,
) -> Iterator[tuple[int, mx.array, bool]]:
    """Generate tokens from ``prompt`` (n,), drafting with ``draft_model``.

    mlx-lm's contract for a function of that name: yields (token, logprobs (V,), from_draft).
    ``num_draft_tokens`` is the length of a draft, 0 for plain decoding; ``max_tokens`` -1 means
    no limit. ``acceptance`` is "match" (any sampler), "coupled" or "reject" (with a
    ``Sampling``; coupled is then the default). ``tree`` drafts trees of that shape instead of
    chains, where target and drafter can. ``stop_tokens`` end the generation once
    yielded. ``stats`` is filled in as it goes.

    Wherever the caller stops, ``prompt_cache`` then holds the prompt and every token yielded,
    as ``mlx_lm.generate.generate_step`` leaves it. ``prompt_cache`` may hold the drafter's
    caches after the target's; without them the drafter starts cold.

    Raises ValueError for an empty prompt, a batch of prompts, a negative ``num_draft_tokens``,
    an acceptance rule that does not fit the sampler, or a cache type that cannot be rolled
    back exactly.
    """
    _check_request(prompt, num_draft_tokens)
    if isinstance(sampler, Sampling):
        sampler.restart()
    stats = Stats() if stats is None else stats
    cache, draft_cache = _split_cache(prompt_cache, model, max_kv_size)
    if num_draft_tokens == 0:
        yield from _plain(
            prompt,
            model,
            stream,
            stats,
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
        return
    num_needed = len(draft_model.make_cache())
    if draft_cache is not None and len(draft_cache) != num_needed:
        raise ValueError(
            f"prompt_cache holds {len(draft_cache)} caches behind the target's {len(cache)}, but "
            f"this drafter has {num_needed}: make it with this drafter's make_cache()."
        )
    drafter = draft_model.begin(draft_cache)
    check_supported(cache, "target")
    check_supported(drafter.cache, "draft model")
    quantization = CacheQuantization(kv_bits, kv_group_size, quantized_kv_start)
    quantization.check(cache)
    if tree is not None:
        _check_tree_request(model, drafter, cache, acceptance)
    decoder = Decoder(
        Target(model, drafter.taps),
        drafter,
        cache,
        make_rule(acceptance, sampler),
        tuple(logits_processors or ()),
        quantization,
        tree,
        stream,
    )
    limits = Limits(tree.depth if tree else num_draft_tokens, max_tokens, stop_tokens)
    stats.start()
    try:
        decoder.prefill(prompt, prefill_step_size, prompt_progress_callback or (lambda *_: None))
        yield from _rounds(decoder, limits, stats, keep_caches=prompt_cache is not None)
    finally:
        if prompt_cache is not None:
            prompt_cache[: len(cache)] = cache  # some may have been replaced by quantized ones


def _rounds(
    decoder: Decoder, limits: Limits, stats: Stats, keep_caches: bool
) -> Iterator[tuple[int, mx.array, bool]]:
    """Round after round until a limit; the first, without a draft, ends prefill."""
    done, run, num_yielded = None, [], 0
    upcoming = decoder.launch_first()
    try:
        while upcoming is not None:
            done, upcoming, run, num_yielded = upcoming, None, [], 0
            num_kept, following = done.read()
            run = limits.cut(following[: num_kept + 1], decoder.num_emitted)
            decoder.commit(done, run)
            size = limits.next_size(run, decoder.num_emitted)
            if size is not None:
                # The next round is on the device before the caller sees this one's tokens.
                upcoming = decoder.launch(size, absorb=size > 0 or keep_caches)
            stats.num_reruns = decoder.num_reruns
            stats.record(
                done.num_drafted,
                done.num_levels,
                min(num_kept, len(run)),
                len(run),
                done.num_head_forwards,
            )
            if decoder.num_emitted % CLEAR_CACHE_EVERY < len(run):
                mx.clear_cache()
            for i, token in enumerate(run):
                num_yielded += 1
                yield token, done.verdict.logprobs[i], i < num_kept
    finally:
        if keep_caches and done is not None:
            decoder.leave(done, upcoming, num_yielded, run)


def _check_request(prompt: mx.array, num_draft_tokens: int) -> None:
    if prompt.ndim != 1:
        raise ValueError(
            f"the prompt has shape {tuple(prompt.shape)}: speculative decoding takes one prompt "
            "(n,) at a time; use mlx_lm.batch_generate for several."
        )
    if prompt.size == 0:
        raise ValueError("the prompt is empty: give at least one token.")
    if num_draft_tokens < 0:
        raise ValueError(
            f"num_draft_tokens is {num_draft_tokens}: give 0 (plain decoding) or more."
        )


def _check_tree_request(
    model: nn.Module, drafter: Drafter, cache: list, acceptance: str | None
) -> None:
    if not isinstance(drafter, TreeDrafter):
        raise ValueError("this drafter proposes chains only: leave the tree out.")
    if acceptance == "reject":
        raise ValueError(
            "acceptance 'reject' is for chains: use 'coupled' or 'match' with a tree."
        )
    check_trees(model, cache)


def _plain(prompt, model, stream, stats: Stats, **kwargs) -> Iterator[tuple[int, mx.array, bool]]:
    """mlx-lm's own pipelined decoding, counted."""
    stats.start()
    for token, logprobs in generate_step(prompt, model, stream, **kwargs):
        stats.record(0, 0, 0, 1, 0)
        yield token, logprobs, False
