"""The rounds of a batch: one verify pass of the target for all texts, ragged in what is kept.

How many rows each text keeps is its own affair; how many are drafted is one decision a round.
Drafting goes text by text: a head's pass is short, its caches are one text's. Knows the steps of
a text by ``decoder.py``, the shared caches by ``batch_cache.py``.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..decoding.accept import LogitsProcessor, Sampler
from ..decoding.controller import BatchCosts, Pace, Plan
from ..decoding.decoder import Decoder, Round
from ..decoding.loop import (
    Limits,
    begin_drafter,
    open_decoder,
    speculative_generate_step,
    split_cache,
)
from ..decoding.stats import Stats
from ..drafters.base import Draft, Drafter, empty_draft
from ..target.rollback import CacheQuantization, Window
from ..target.taps import Target
from .cache import BatchCache


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
        done.count(self.stats, num_kept, len(run))
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
    pace: Pace,
    costs: BatchCosts | None,
    options: Options,
    keep_caches: bool,
) -> None:
    """All texts to their ends, round by round in one pass.

    ``costs``, where ``pace`` goes by them, are looked up again for the texts that are left.
    """
    for text in texts:
        prefill(model, draft_model, text, options)
        first = text.decoder.launch_first()
        num_kept, following = first.read()
        text.decoder.commit(first, 1)
        text.add(first, num_kept, following[:1])
        if text.ended and keep_caches:
            _leave(text, first, None, following[:1])
    running = [text for text in texts if not text.ended]
    if not running:
        return
    with mx.stream(options.stream):
        _rounds(Batch(model, running), pace, costs, keep_caches)


def _rounds(batch: "Batch", pace: Pace, costs: BatchCosts | None, keep_caches: bool) -> None:
    """Round after round until every text has ended."""
    num_texts = len(batch.texts)
    if costs is not None and num_texts < costs.num_texts:
        pace.recost(costs.of(num_texts))
    upcoming, plan = None, None
    while batch.texts:
        rounds = upcoming or batch.launch(plan or pace.next_plan(batch.num_tokens))
        upcoming, plan = None, None
        if pace.parked and _width(rounds) == 1 and batch.goes_on:
            # Plain decoding is pipelined. A draft waits, because a text may be found to have
            # ended, and of its window no more than one row could stay.
            batch.commit_plain(rounds)
            plan = pace.next_plan(batch.num_tokens)
            upcoming = batch.launch(plan) if plan.size == 0 else None
        runs = batch.finish(rounds)
        _record(pace, rounds)
        for b, text in enumerate(batch.texts):
            if text.ended:
                text.stats.pace_events = list(pace.events)
                if keep_caches:
                    text.decoder.cache[:] = batch.cache.extract(b)
                    _leave(text, rounds[b], upcoming and upcoming[b], runs[b])
        left = [b for b, text in enumerate(batch.texts) if not text.ended]
        if len(left) < len(batch.texts):
            upcoming = upcoming and [upcoming[b] for b in left]
            batch.keep_texts(left)
            if costs is not None and left:
                pace.recost(costs.of(len(left)))


def _record(pace: Pace, rounds: list[Round]) -> None:
    """Tell what became of the drafts; those that were cut short at a text's end tell little."""
    if not any(done.num_drafted for done in rounds):
        return
    plan = max((done.plan for done in rounds), key=lambda plan: plan.size)
    pace.record(plan, *(done.read()[0] for done in rounds if done.plan == plan))


def _leave(text: Text, last: Round, upcoming: Round | None, run: list[int]) -> None:
    """Put into ``text.cache`` what a generation of its own would have left."""
    text.decoder.leave(last, upcoming, len(run), run)
    text.cache = text.decoder.cache + text.decoder.drafter.cache


def _width(rounds: list[Round]) -> int:
    """Rows of the shared window."""
    return max(done.num_drafted for done in rounds) + 1


class Batch:
    """The texts that still run, on shared caches, and the steps of their rounds.

    A list of rounds has one for each of ``texts``, in order.
    """

    def __init__(self, model: nn.Module, texts: list[Text]):
        self.texts = texts
        self.cache = BatchCache([text.decoder.cache for text in texts])
        self._target = Target(model, texts[0].decoder.drafter.taps)
        self._began_with = texts

    @property
    def num_tokens(self) -> int:
        """Of the text that has come furthest, whether it still runs or not."""
        return max(text.decoder.num_emitted for text in self._began_with)

    @property
    def goes_on(self) -> bool:
        """Whether one token more leaves every text room for another."""
        plans = [text.limits.at_most(Plan(0), text.decoder.num_emitted + 1) for text in self.texts]
        return None not in plans

    def launch(self, plan: Plan, absorb: bool = False) -> list[Round]:
        """Draft for every text and start one pass that verifies them all, without waiting.

        Of size 0, the drafters are left behind unless they are to ``absorb`` the step.
        """
        opened = [_open(text, plan) for text in self.texts]
        width = max(len(draft) for _, _, draft, _ in opened) + 1
        windows = []
        for text, (_, _, draft, _) in zip(self.texts, opened):
            filler = mx.zeros((width - 1 - len(draft),), mx.int32)  # causal: seen by no row before
            root = text.decoder.root.astype(mx.int32)
            windows.append(mx.concatenate([root, draft.tokens, filler]))
        self.cache.open(width)
        logits, features = self._target.batch(mx.stack(windows), self.cache.layers)
        rounds = []
        for b, (text, (own, choice, draft, draft_window)) in enumerate(zip(self.texts, opened)):
            num_rows = len(draft) + 1
            decoder = text.decoder
            seen = None if features is None else features[b, :num_rows]
            logprobs = decoder.logprobs(draft, None, logits[b, :num_rows])
            verdict = choice.judge(draft, None, logprobs)
            absorbed = absorb or own.size > 0
            if absorbed:
                decoder.drafter.extend(verdict.following, seen, last=verdict.num_kept)
            rounds.append(
                Round(
                    own,
                    len(draft),
                    draft.num_levels,
                    verdict,
                    seen,
                    verdict.packed(),
                    RowCount(num_rows),
                    draft_window,
                    decoder.num_head_forwards,
                    absorbed,
                )
            )
        pending = [array for text in self.texts for array in text.decoder.drafter.pending()]
        mx.async_eval([done.packed for done in rounds], pending)
        return rounds

    def commit_plain(self, rounds: list[Round]) -> None:
        """Commit rounds without drafts, whose one token need not be read for that."""
        for text, done in zip(self.texts, rounds):
            text.decoder.commit(done, 1)
        self.cache.cut(1, [1] * len(rounds))

    def finish(self, rounds: list[Round]) -> list[list[int]]:
        """Read rounds, and commit what is not committed yet; the tokens each text emitted."""
        mx.eval([done.packed for done in rounds])
        is_committed, runs = rounds[0].committed, []
        for text, done in zip(self.texts, rounds):
            num_kept, following = done.read()
            num_before = text.decoder.num_emitted - is_committed
            run = text.limits.cut(following[: num_kept + 1], num_before)
            if not is_committed:
                text.decoder.commit(done, len(run))
            text.add(done, num_kept, run)
            runs.append(run)
        if not is_committed:
            self.cache.cut(_width(rounds), [done.target_window.kept for done in rounds])
        return runs

    def keep_texts(self, index: list[int]) -> None:
        """Drop all texts but these."""
        if index:
            self.cache.keep_texts(index)
        self.texts = [self.texts[b] for b in index]


def _open(text: Text, plan: Plan) -> tuple[Plan, Any, Draft, Window]:
    """As much of ``plan`` as the text has room for, drafted."""
    decoder = text.decoder
    plan = text.limits.at_most(plan, decoder.num_emitted) or Plan(0)
    if plan.size > 0:
        decoder.catch_up()
    window = Window(decoder.drafter.cache)
    choice = decoder.rule.open(decoder.num_emitted)
    draft = decoder.drafter.propose(plan.size, choice.pick) if plan.size > 0 else empty_draft()
    return plan, choice, draft, window


def generate_in_turn(
    model: nn.Module, draft_model: Drafter, texts: list[Text], options: Options
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
            num_draft_tokens=options.num_draft_tokens,
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
