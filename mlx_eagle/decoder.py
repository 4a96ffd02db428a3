"""One generation in progress: the steps of a round, on the target's caches and the drafter's.

Knows how a round is built, kept and undone; when to do which is decided in ``loop.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from .accept import LogitsProcessor, Rule, Verdict, process_logits
from .cache import CacheQuantization, Window
from .drafter import Draft, Drafter, Pick, empty_draft
from .target import LayerCall, Target
from .tree import Tree


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
        tree: Tree | None,
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
        with self.target.as_alone(self.cache, tokens.shape[0]):
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
        with self.target.as_alone(self.cache, tokens.shape[0]):
            logits, features, calls = self.target.record(tokens, self.cache)
        calls = [call for call in calls if any(call.uses(cache) for cache in recurrent)]
        # A model may use such a cache outside its layers, or pass layers something that grows;
        # then all of it has to run again.
        repeatable = all(call.is_repeatable for call in calls)
        window.reruns_layers = repeatable and len(calls) == len(recurrent)
        return logits, features, calls

    def _rerun(self, tokens: mx.array, calls: list[LayerCall], window: Window) -> None:
        """Bring recurrent states forward over the kept rows, tokens (m,)."""
        if window.reruns_layers:
            with self.target.as_alone(self.cache, tokens.shape[0]):
                for call in calls:
                    call.repeat(tokens.shape[0])
            return
        self.num_reruns += 1
        self._run(tokens)

    def _logprobs(self, draft: Draft, reach: mx.array | None, logits: mx.array) -> mx.array:
        if self.processors:
            logits = process_logits(self.processors, self.history, draft, reach, logits)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
