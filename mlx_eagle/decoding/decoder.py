"""One generation in progress: the steps of a round, on the target's caches and the drafter's.

Knows how a round is built, kept and undone; when to do which is decided in ``loop.py``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from ..drafters.base import Draft, Drafter, Pick, empty_draft
from ..drafters.tree import Tree
from ..target.rollback import RULES, CacheQuantization, Checkpoint
from ..target.taps import LayerCall, Target
from .accept import LogitsProcessor, Rule, Verification, process_logits
from .controller import DraftShape
from .stats import Stats


@dataclass
class Round:
    """A verify pass in flight: row 0 is the root, row i + 1 draft token i."""

    shape: DraftShape
    num_drafted: int
    num_levels: int
    verification: Verification
    features: mx.array | None  # (R, F)
    packed: mx.array  # num_kept, following (R,), and a tree's rows (R,): for one blocking read
    target_checkpoint: Checkpoint
    draft_checkpoint: Checkpoint
    num_head_forwards: int  # of the drafter since prefill, once this round is done
    absorbed: bool  # by the drafter; or left to its backlog
    committed: bool = False
    rows: list[int] | None = None  # of a tree, once read: window rows, the kept branch first

    def read(self) -> tuple[int, list[int]]:
        """Wait for the device: how many draft tokens stay, and the token after each row."""
        mx.eval(self.packed)
        num_kept, *following = self.packed.tolist()
        if self.verification.rows is not None:
            num_rows = self.num_drafted + 1
            following, self.rows = following[:num_rows], following[num_rows:]
        return num_kept, following

    def count(self, stats: Stats, num_kept: int, num_emitted: int) -> None:
        """Add to ``stats`` that it kept and emitted so many; of a run that was cut, what is left."""
        num_accepted = min(num_kept, num_emitted)
        stats.record(
            self.num_drafted, self.num_levels, num_accepted, num_emitted, self.num_head_forwards
        )

    def keep_run(self, length: int) -> None:
        """Cut to the rows that led to the first ``length`` tokens that were emitted."""
        if self.rows is None:
            self.rollback(length, length)
            return
        self.target_checkpoint.rollback_to_branch(self.rows[:length])
        self.draft_checkpoint.rollback(length)

    def rollback(self, num_rows: int, num_pairs: int) -> None:
        """Cut to the first rows of the target and pairs of the drafter."""
        if num_rows <= self.num_drafted:
            self.target_checkpoint.rollback(num_rows)
        if num_pairs <= self.num_drafted:
            self.draft_checkpoint.rollback(num_pairs)


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
        stream: mx.Stream | mx.ThreadLocalStream,
    ):
        self.target = target
        self.drafter = drafter
        self.cache = cache
        self.rule = rule
        self.processors = processors
        self.quantization = quantization
        self.stream = stream
        self.root = mx.zeros((1,), mx.int32)
        self.history = mx.zeros((0,), mx.int32)  # for logits processors: up to the root
        self.num_emitted = 0
        self.num_reruns = 0
        self.leaves_drafter = False  # for good: nothing is kept that it could absorb
        self._prefill_forwards = 0
        self._backlog: list[tuple[mx.array, mx.array | None]] = []  # pairs not absorbed yet

    @property
    def num_head_forwards(self) -> int:
        """Of the drafter, since prefill."""
        return self.drafter.num_forwards - self._prefill_forwards

    def prefill(
        self, prompt: mx.array, step_size: int, progress: Callable[[int, int], None]
    ) -> None:
        """Run prompt (n,) but its last token, chunk by chunk, through target and drafter."""
        total = prompt.shape[0]
        progress(0, total)
        for start in range(0, total - 1, step_size):
            end = min(start + step_size, total - 1)
            self._prefill_chunk(prompt[start:end])
            progress(end, total)
        self.root = prompt[-1:]
        self.history = prompt

    def _prefill_chunk(self, tokens: mx.array) -> None:
        """Bring target and drafter over tokens (m,), or leave both as they were.

        The last token's features wait for the token that comes next, as between requests.
        """
        with self._undone_on_failure(Checkpoint(self.cache), Checkpoint(self.drafter.cache)):
            with mx.stream(self.stream):
                _, features = self.target(tokens, self.cache)
                if features is None:
                    self.drafter.extend(tokens, None)
                else:
                    self.drafter.extend(tokens[:1], None)
                    if tokens.size > 1:
                        self.drafter.extend(tokens[1:], features[:-1])
                self.quantization.apply(self.cache)
            mx.eval([c.state for c in self.cache + self.drafter.cache if not c.empty()])
        if features is not None:
            # By an index array: a slice would keep the features of the whole chunk alive.
            self.drafter.hold(features[mx.array([-1])])
        mx.clear_cache()

    @contextmanager
    def _undone_on_failure(self, *windows: Checkpoint) -> Iterator[None]:
        """An error or a Ctrl-C within must not leave half a window behind."""
        finished = False
        try:
            yield
            finished = True
        finally:
            if not finished:
                for window in windows:
                    window.rollback(0)

    def launch(self, shape: DraftShape, absorb: bool = False) -> Round:
        """Build one round that drafts what ``plan`` says, and start it without waiting.

        A plan of size 0 is a step of plain decoding: unless it is to ``absorb`` the step, the drafter is
        left behind, and catches up before it proposes again.
        """
        size = shape.size
        absorb = absorb or size > 0
        if size > 0:
            self.catch_up()
        max_rows = self.quantization.max_rows(self.cache)
        if max_rows is not None:
            size = min(size, max_rows - 1)
        draft_checkpoint = Checkpoint(self.drafter.cache)
        # The window is not named in there: it would keep itself and all caches alive.
        target_checkpoint = Checkpoint(
            self.cache, lambda num_rows: self._rerun(tokens[:num_rows], calls)
        )
        with self._undone_on_failure(target_checkpoint, draft_checkpoint), mx.stream(self.stream):
            choice = self.rule.open(self.num_emitted)
            draft = self._propose(size, shape.tree, choice.pick)
            tree_mask = draft.tree_mask()
            tokens = mx.concatenate([self.root, draft.tokens])
            logits, features, calls = self._verify(tokens, tree_mask, target_checkpoint)
            verification = choice.verify(draft, tree_mask, self.logprobs(draft, tree_mask, logits))
            if verification.rows is not None and features is not None:
                features = features[verification.rows]
            packed = verification.packed()
            mx.async_eval(packed)
            if absorb:
                # Needs no count: rows after the kept ones are cut once it is read.
                self.drafter.extend(verification.following, features, last=verification.num_kept)
                mx.async_eval(self.drafter.pending())
        return Round(
            shape,
            len(draft),
            draft.num_levels,
            verification,
            features,
            packed,
            target_checkpoint,
            draft_checkpoint,
            self.num_head_forwards,
            absorb,
        )

    def launch_first(self) -> Round:
        """The round that ends prefill: the prompt's last token, no draft."""
        with self._undone_on_failure(Checkpoint(self.drafter.cache)):
            with mx.stream(self.stream):
                self.drafter.extend(self.root, None)
            first = self.launch(DraftShape(0), absorb=True)
        self._prefill_forwards = self.drafter.num_forwards
        return first

    def commit(self, done: Round, length: int) -> None:
        """Make the first ``length`` tokens of done's following part of the text.

        Of a plain step that is one token, known before the step was read.
        """
        with mx.stream(self.stream):
            done.keep_run(length)
            self.quantization.apply(self.cache)
            emitted = done.verification.following[:length]
            self.root = emitted[-1:]
            self.num_emitted += length
            done.committed = True
            if not done.absorbed and not self.leaves_drafter:
                self._backlog.append((emitted, done.features))
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
                upcoming.rollback(int(took_all), 0)
            if not took_all:
                done.rollback(num_yielded + 1, num_yielded)
                if done.committed and not done.absorbed and self._backlog:
                    self._backlog.pop()
                features, row = done.features, num_yielded
            elif upcoming is not None:
                features, row = upcoming.features, 0
            else:
                (_, features), row = self._run(self.root), 0
            self.catch_up()
            if features is not None:
                self.drafter.hold(features[row : row + 1])
            self.quantization.apply(self.cache)
            mx.eval([c.state for c in self.cache + self.drafter.cache if not c.empty()])

    def catch_up(self) -> None:
        """Let the drafter absorb what was decoded plainly."""
        if not self._backlog:
            return
        tokens, features = zip(*self._backlog)
        with self._undone_on_failure(Checkpoint(self.drafter.cache)), mx.stream(self.stream):
            seen = None if features[0] is None else mx.concatenate(features)
            self.drafter.extend(mx.concatenate(tokens), seen)
        self._backlog.clear()

    def _run(self, tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        with self.target.as_alone(self.cache, tokens.shape[0]):
            return self.target(tokens, self.cache)

    def _propose(self, size: int, tree: Tree | None, pick: Pick) -> Draft:
        if size == 0:
            return empty_draft()
        if tree is None:
            draft = self.drafter.propose(size, pick)
        else:
            draft = self.drafter.propose_tree(tree.at_most(size))
        # The device drafts while the host builds the target's pass, the greater graph.
        mx.async_eval(draft.tokens)
        return draft

    def _verify(
        self, tokens: mx.array, tree_mask: mx.array | None, window: Checkpoint
    ) -> tuple[mx.array, mx.array | None, list[LayerCall]]:
        """Logits, features, and the calls that ``_rerun`` needs where the window is cut."""
        if tree_mask is not None:
            return *self.target(tokens, self.cache, tree_mask), []
        recurrent = window.recurrent
        if not recurrent or tokens.shape[0] == 1:
            return *self._run(tokens), []
        with self.target.as_alone(self.cache, tokens.shape[0]):
            logits, features, calls = self.target.record(tokens, self.cache)
        calls = [call for call in calls if any(call.uses(cache) for cache in recurrent)]
        # A model may use such a cache outside its layers, or pass layers something that grows;
        # then all of it has to run again.
        repeatable = all(call.is_repeatable(tuple(RULES)) for call in calls)
        window.reruns_layers = repeatable and len(calls) == len(recurrent)
        return logits, features, calls if window.reruns_layers else []

    def _rerun(self, tokens: mx.array, calls: list[LayerCall]) -> None:
        """Bring recurrent states forward over the kept rows, tokens (m,).

        By ``calls``, those of the layers that have such states; without any, by a whole pass.
        """
        if calls:
            with self.target.as_alone(self.cache, tokens.shape[0]):
                for call in calls:
                    call.repeat(tokens.shape[0])
            return
        self.num_reruns += 1
        self._run(tokens)

    def logprobs(self, draft: Draft, tree_mask: mx.array | None, logits: mx.array) -> mx.array:
        """Log-probabilities (k + 1, V) after each row, logits processors applied."""
        if self.processors:
            logits = process_logits(self.processors, self.history, draft, tree_mask, logits)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
