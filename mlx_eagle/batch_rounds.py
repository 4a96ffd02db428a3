"""The rounds of a batch: one verify pass of the target for all texts, ragged in what is kept.

How many rows each text keeps is its own affair. Drafting goes text by text: a head's pass is
short, its caches are one text's. Knows the steps of a text by ``decoder.py``, the shared caches
by ``batch_cache.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from .accept import LogitsProcessor, Sampler
from .batch_cache import BatchCache
from .cache import CacheQuantization, Window
from .decoder import Decoder, Round
from .drafter import Draft, Drafter, empty_draft
from .loop import (
    Limits,
    begin_drafter,
    open_decoder,
    speculative_generate_step,
    split_cache,
)
from .pace import Plan
from .stats import Stats
from .target import Target


@dataclass(frozen=True)
class Options:
    """What holds for every text of a batch."""

    stream: mx.Stream | mx.ThreadLocalStream = generation_stream
    num_draft_tokens: int | str = 3
    sampler: Sampler | None = None
    logits_processors: list[LogitsProcessor] | None = None
    acceptance: str | None = None
    prefill_step_size: int = 2048


@dataclass
class Text:
    """One prompt and what became of it."""

    prompt: list[int]
    limits: Limits
    cache: list  # the target's, then the drafter's where there are any
    decoder: Decoder | None = None
    stats: Stats = field(default_factory=Stats)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None  # of the tokens, where they are asked for

    @property
    def ended(self) -> bool:
        full = 0 <= self.limits.max_tokens <= len(self.tokens)
        return full or bool(self.tokens) and self.limits.end(self.tokens[-1])

    def add(self, done: Round, num_kept: int, run: list[int]) -> None:
        """Count a round and take over what it emitted."""
        self.stats.record(
            done.num_drafted,
            done.num_levels,
            min(num_kept, len(run)),
            len(run),
            done.num_head_forwards,
        )
        self.tokens += run
        if self.logprobs is not None:
            rows = mx.arange(len(run))
            self.logprobs += done.verdict.logprobs[rows, mx.array(run)].tolist()


class RowCount:
    """A text's part in a shared window: how many of its rows stay."""

    def __init__(self, num_rows: int):
        self.kept = num_rows

    def keep(self, num_rows: int) -> None:
        self.kept = num_rows


def prefill(model: nn.Module, draft_model: Drafter, text: Text, options: Options) -> None:
    """Run the prompt but its last token, alone."""
    text.stats.start()
    cache, draft_cache = split_cache(text.cache, model, None)
    text.decoder = open_decoder(
        model,
        begin_drafter(draft_model, draft_cache),
        cache,
        CacheQuantization(None, 64, 0),
        options.stream,
        sampler=options.sampler,
        logits_processors=options.logits_processors,
        acceptance=options.acceptance,
    )
    text.decoder.prefill(mx.array(text.prompt), options.prefill_step_size, lambda *_: None)


def generate_together(
    model: nn.Module,
    draft_model: Drafter,
    texts: list[Text],
    size: int,
    options: Options,
    keep_caches: bool,
) -> None:
    """All texts to their ends, round by round in one pass."""
    for text in texts:
        prefill(model, draft_model, text, options)
        first = text.decoder.launch_first()
        num_kept, following = first.read()
        text.decoder.commit(first, 1)
        text.add(first, num_kept, following[:1])
        if text.ended and keep_caches:
            _leave(text, first, following[:1])
    running = [text for text in texts if not text.ended]
    if not running:
        return
    with mx.stream(options.stream):
        target = Target(model, running[0].decoder.drafter.taps)
        cache = BatchCache([text.decoder.cache for text in running])
        while running:
            rounds = _launch(target, cache, running, size)
            runs = list(_finish(rounds, running))
            cache.cut(_width(rounds), [done.target_window.kept for done in rounds])
            for b, (text, done, run) in enumerate(zip(running, rounds, runs)):
                if text.ended and keep_caches:
                    text.decoder.cache[:] = cache.extract(b)
                    _leave(text, done, run)
            left = [b for b, text in enumerate(running) if not text.ended]
            if left and len(left) < len(running):
                cache.keep_texts(left)
            running = [running[b] for b in left]


def _leave(text: Text, last: Round, run: list[int]) -> None:
    """Put into ``text.cache`` what a generation of its own would have left."""
    text.decoder.leave(last, None, len(run), run)
    text.cache = text.decoder.cache + text.decoder.drafter.cache


def _width(rounds: list[Round]) -> int:
    """Rows of the shared window: two at least (see ``BatchCache``)."""
    return max(2, *(done.num_drafted + 1 for done in rounds)) if rounds else 2


def _launch(target: Target, cache: BatchCache, texts: list[Text], size: int) -> list[Round]:
    """Draft for every text, verify them all in one pass, and absorb what it says."""
    opened = [_open(text, size) for text in texts]
    width = max(2, *(len(draft) + 1 for _, draft, _ in opened))
    windows = []
    for text, (_, draft, _) in zip(texts, opened):
        filler = mx.zeros((width - 1 - len(draft),), mx.int32)  # causal: seen by no row before
        root = text.decoder.root.astype(mx.int32)
        windows.append(mx.concatenate([root, draft.tokens, filler]))
    logits, features = target.batch(mx.stack(windows), cache.layers)
    rounds = []
    for b, (text, (choice, draft, draft_window)) in enumerate(zip(texts, opened)):
        num_rows = len(draft) + 1
        decoder = text.decoder
        seen = None if features is None else features[b, :num_rows]
        logprobs = decoder.logprobs(draft, None, logits[b, :num_rows])
        verdict = choice.judge(draft, None, logprobs)
        decoder.drafter.extend(verdict.following, seen, last=verdict.num_kept)
        rounds.append(
            Round(
                Plan(len(draft)),
                len(draft),
                draft.num_levels,
                verdict,
                seen,
                verdict.packed(),
                RowCount(num_rows),
                draft_window,
                decoder.num_head_forwards,
                absorbed=True,
            )
        )
    pending = [array for text in texts for array in text.decoder.drafter.pending()]
    mx.async_eval([done.packed for done in rounds], pending)
    return rounds


def _open(text: Text, size: int) -> tuple[Any, Draft, Window]:
    decoder = text.decoder
    window = Window(decoder.drafter.cache)
    choice = decoder.rule.open(decoder.num_emitted)
    plan = text.limits.at_most(Plan(size), decoder.num_emitted)
    size = plan.size if plan else 0
    draft = decoder.drafter.propose(size, choice.pick) if size else empty_draft()
    return choice, draft, window


def _finish(rounds: list[Round], texts: list[Text]) -> Iterator[list[int]]:
    """Read a round of every text and commit it; the tokens each emitted."""
    mx.eval([done.packed for done in rounds])
    for text, done in zip(texts, rounds):
        num_kept, following = done.read()
        run = text.limits.cut(following[: num_kept + 1], text.decoder.num_emitted)
        text.decoder.commit(done, len(run))
        text.add(done, num_kept, run)
        yield run


def generate_in_turn(
    model: nn.Module, draft_model: Drafter, texts: list[Text], size: int, options: Options
) -> None:
    """Each text alone, for targets that cannot share a pass."""
    for text in texts:
        cache, draft_cache = split_cache(text.cache, model, None)
        text.cache = cache + (draft_cache or draft_model.make_cache())
        steps = speculative_generate_step(
            mx.array(text.prompt),
            model,
            draft_model,
            options.stream,
            num_draft_tokens=size,
            max_tokens=text.limits.max_tokens,
            sampler=options.sampler,
            logits_processors=options.logits_processors,
            acceptance=options.acceptance,
            prompt_cache=text.cache,
            prefill_step_size=options.prefill_step_size,
            stop_tokens=text.limits.stop_tokens,
            stats=text.stats,
        )
        for token, logprobs, _ in steps:
            text.tokens.append(token)
            if text.logprobs is not None:
                text.logprobs.append(logprobs[token].item())
