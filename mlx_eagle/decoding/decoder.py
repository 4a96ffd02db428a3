"""One request being decoded: the steps of a round, on the target's caches and the drafter's.

This module builds, commits and undoes rounds; ``loop.py`` decides when.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import mlx.core as mx
import numpy as np

from ..drafters.acceptance_stats import CopySeen
from ..drafters.base import Draft, Drafter, PendingPairs
from ..drafters.copies import Copies
from ..drafters.tree import NO_PRICES, PLAIN, DraftPlan, DraftShape
from ..target_model.cache_view import CacheView, close_windows, open_windows
from ..target_model.kernels import KernelOptions
from ..target_model.rollback import CacheQuantization, Checkpoint
from ..target_model.row_by_row import checkpoint_of_rows, run_rows
from ..target_model.target import Target
from .accept import Choice, Match, Outcome, ProcessedRows, Rule, Verification
from .draft import propose
from .processors import LogitsProcessors, ask_grammars
from .stats import Stats

MOST_BEHIND = 256  # tokens that a drafter may fall behind during copies: features take memory


@dataclass(frozen=True)
class Limits:
    """Limits of a generation; ``max_tokens`` -1 means no limit."""

    max_tokens: int
    stop_tokens: Collection[int]

    def cut(self, run: list[int], num_emitted: int) -> list[int]:
        """``run`` up to and including its first stop token, and to ``max_tokens`` in all."""
        if self.max_tokens >= 0:
            run = run[: self.max_tokens - num_emitted]
        for i, token in enumerate(run):
            if token in self.stop_tokens:
                return run[: i + 1]
        return run

    def at_most(self, shape: DraftShape, num_emitted: int) -> DraftShape:
        """Cut ``shape`` to what fits after ``num_emitted`` tokens."""
        if self.max_tokens < 0:
            return shape
        # A verify pass emits one token more than it keeps.
        return shape.at_most(self.max_tokens - num_emitted - 1)

    def has_room_after(self, num_emitted: int, last: int | None = None) -> bool:
        """Whether another token may come after ``num_emitted``, of which ``last`` is the last."""
        return not 0 <= self.max_tokens <= num_emitted and last not in self.stop_tokens


@dataclass
class Round:
    """A verify pass in flight, later its result: row 0 is the root, row i + 1 draft token i."""

    position: int
    shape: DraftShape
    draft: Draft
    verification: Verification
    features: mx.array | None  # (R, F)
    target_rows: Checkpoint
    draft_checkpoint: Checkpoint
    num_head_forwards: int = 0  # of the drafter since prefill, this round included
    absorbed: bool = False  # by the drafter; if not, its pairs are kept until it catches up
    committed: bool = False
    is_forced: bool = False  # the draft begins with tokens that a grammar forces
    copy_seen: CopySeen | None = None  # once read: what a copy in its place would have come to
    _outcome: Outcome | None = None
    run: list[int] = field(default_factory=list)  # the tokens emitted, once read and committed
    num_taken: int = 0  # tokens of ``run`` that the caller has taken

    @property
    def num_drafted(self) -> int:
        return len(self.draft)

    @property
    def is_copied(self) -> bool:
        """Whether the draft was copied from the text."""
        return self.shape.copy > 0

    def read(self) -> Outcome:
        """Wait for the device; return the kept part of the draft and the token after it."""
        self._outcome = self.verification.read()
        return self._outcome

    @property
    def outcome(self) -> Outcome:
        """Result of the rule, once the round has been read."""
        if self._outcome is None:
            raise RuntimeError("the round has not been read yet")
        return self._outcome

    @property
    def tried_shape(self) -> DraftShape | None:
        """The drafted shape, for the controller to learn from; None if no draft was asked for.

        A drafter that proposed nothing counts as one whose first token was not accepted. Tokens
        that a grammar forces say nothing about a drafter.
        """
        if self.is_forced or self.shape.is_plain:
            return None
        if self.is_copied or self.shape.tree is not None:
            return self.shape
        return self.shape._replace(size=max(self.num_drafted, 1))

    @property
    def ranks(self) -> list[int]:
        """Rank of each kept token of a tree among its siblings, 0 for the likeliest, once read.

        Ends with -1 if the last kept token had children, but none was kept. [] for a chain.
        """
        branch = list(self.outcome.kept_rows)
        parents = self.draft.known_parents()
        if parents is None:
            return []
        children = [[row for row, of in enumerate(parents, 1) if of == node] for node in branch]
        pairs = zip(children, branch[1:], strict=False)
        return [rows.index(row) for rows, row in pairs] + [-1] * bool(children[-1])

    def count(self, stats: Stats) -> None:
        """Add the round to ``stats``; if its run was cut, only the part that is left."""
        num_accepted = min(self.outcome.num_kept, len(self.run))
        stats.record(
            self.num_drafted,
            self.draft.num_levels,
            num_accepted,
            len(self.run),
            self.num_head_forwards,
            self.is_copied,
        )

    def end_of(self, length: int) -> tuple[int, list[int]]:
        """The row that the last of ``length`` tokens follows, and these tokens; [] if not read."""
        if self._outcome is None:
            return length - 1, []
        return self._outcome.kept_rows[length - 1], self._outcome.run[:length]

    def keep_run(self, length: int) -> None:
        """Cut the caches, except recurrent states, to the rows that led to ``length`` tokens."""
        if self._outcome is None or self._outcome.rows is None:
            if length <= self.num_drafted:
                self._cut_drafter(length)
                self.target_rows.cut(length)
            return
        self.target_rows.rollback_to_branch(self._outcome.rows[:length])
        self._cut_drafter(length)

    def rollback(self, num_rows: int, num_pairs: int) -> None:
        """Cut to the first rows of the target and the first pairs of the drafter."""
        if num_rows <= self.num_drafted:
            self.target_rows.rollback(num_rows)
        if num_pairs <= self.num_drafted:
            self._cut_drafter(num_pairs)

    def _cut_drafter(self, num_pairs: int) -> None:
        """Cut the drafter's caches to its first pairs, if it has absorbed any of the round."""
        if self.absorbed:
            self.draft_checkpoint.rollback(num_pairs)


class StopPoint(Enum):
    """Point at which a generation stopped; it determines what its caches still need."""

    INSIDE_RUN = "the last round emitted more than was taken, or it failed: the rest is undone"
    NEXT_IN_FLIGHT = "all was taken; the next round has run the last token already"
    AT_ROOT = "all was taken; the last token has not been run yet"


def stop_point(last: Round, upcoming: Round | None) -> StopPoint:
    """The point at which a generation stops while the caller takes its ``last`` round."""
    if not last.run or last.num_taken < len(last.run):
        return StopPoint.INSIDE_RUN
    return StopPoint.AT_ROOT if upcoming is None else StopPoint.NEXT_IN_FLIGHT


@dataclass(eq=False, repr=False)
class Decoder:
    """The state of one generation, and the steps of a round.

    Between rounds, with N tokens committed (prompt and emitted), the target's cache holds N - 1
    positions, all but the root, and the drafter has absorbed N - 1 pairs.
    """

    target: Target
    drafter: Drafter
    cache: list[Any]
    rule: Rule
    processors: LogitsProcessors
    quantization: CacheQuantization
    stream: mx.Stream | mx.ThreadLocalStream
    copies: Copies | None = None
    is_exact: bool = False  # a row of a pass is a plain step: ``target_model/row_by_row.py``

    def __post_init__(self) -> None:
        self.root = mx.zeros((1,), mx.int32)
        self.root_embedding: mx.array | None = None  # (1, h), if embeddings were given
        self.history = mx.zeros((0,), mx.int32)  # for logits processors: up to the root
        self.prefill_time = 0.0  # seconds
        self.num_emitted = 0
        self.num_reruns = 0
        self.discards_features = False  # from now on no features are kept for the drafter
        self.options = KernelOptions()
        self.num_top: int | None = None  # log-probabilities to return beside a token's; None: none
        self._is_seeded = True  # the drafter has what its next draft starts from
        self._prefill_forwards = 0
        self._pending = PendingPairs()
        self._committed: Checkpoint | None = None  # the target's, before the last round

    @property
    def num_head_forwards(self) -> int:
        """The drafter's forward passes since prefill."""
        return self.drafter.num_forwards - self._prefill_forwards

    def use(self, options: KernelOptions) -> None:
        """Use these options for all rounds from now on."""
        self.options = options
        self.target.attention.use(options.splits_attention, options.forces_fused)
        self.drafter.use_overlay(options.uses_overlay)

    def prefill(
        self,
        prompt: mx.array,
        step_size: int,
        progress: Callable[[int, int], None],
        embeddings: mx.array | None = None,
    ) -> None:
        """Run all but the last token of prompt (n,), in chunks, through target and drafter.

        ``embeddings`` (n, h), if given, replace its tokens; the prompt may then be empty (0,).
        """
        total = (prompt if embeddings is None else embeddings).shape[0]
        begun = time.perf_counter()
        progress(0, total)
        for end in self.prefill_chunks(prompt, step_size, embeddings):
            progress(end, total)
        self.prefill_time = time.perf_counter() - begun

    def prefill_chunks(
        self, prompt: mx.array, step_size: int, embeddings: mx.array | None = None
    ) -> Iterator[int]:
        """``prefill`` as an iterator, so that other work can use the device between chunks.

        Yields the number of positions that are done.
        """
        last = (prompt if embeddings is None else embeddings).shape[0] - 1
        self.root = prompt[-1:]
        self.root_embedding = None if embeddings is None else embeddings[-1:]
        self.history = prompt
        self.processors.start(prompt)
        self.drafter.see_text(self._text)
        for start in range(0, last, step_size):
            end = min(start + step_size, last)
            chunk = None if embeddings is None else embeddings[start:end]
            self._prefill_chunk(prompt[start:end], chunk)
            yield end

    def _text(self) -> np.ndarray:
        """The tokens known so far; with copies, also the tokens of earlier turns."""
        return np.array(self.history) if self.copies is None else self.copies.text.tokens

    def _prefill_chunk(self, tokens: mx.array, embeddings: mx.array | None) -> None:
        """Run tokens (m,) or embeddings (m, h) through target and drafter.

        The last token's features wait for the next token, as between requests. A failure leaves
        the caches of both as they were.
        """
        seen = tokens if embeddings is None else embeddings
        with self._undone_on_failure(Checkpoint(self.cache), Checkpoint(self.drafter.cache)):
            with mx.stream(self.stream):
                _, features = self.target(tokens, self.cache, embeddings=embeddings)
                if features is None:
                    self.drafter.extend(seen, None)
                else:
                    self.drafter.extend(seen[:1], None)
                    if seen.shape[0] > 1:
                        self.drafter.extend(seen[1:], features[:-1])
                self.quantization.apply(self.cache)
            mx.eval([c.state for c in self.cache + self.drafter.cache if not c.empty()])
        if features is not None:
            # By an index array: a slice would keep the features of the whole chunk alive.
            self.drafter.save_last_features(features[mx.array([-1])])
        mx.clear_cache()

    @contextmanager
    def _undone_on_failure(self, *checkpoints: Checkpoint) -> Iterator[None]:
        """Roll back if the block fails: an error or Ctrl-C must leave no partial pass behind."""
        finished = False
        try:
            yield
            finished = True
        finally:
            if not finished:
                for checkpoint in checkpoints:
                    checkpoint.rollback(0)

    def launch(
        self, shape: DraftShape, absorb: bool = False, most_forced: int = 0,
        prices: Mapping[int, float] = NO_PRICES,
    ) -> Round:  # fmt: skip
        """Build one round that drafts ``shape``, and start it without waiting.

        A shape of size 0 is a step of plain decoding: unless ``absorb`` is set, the drafter falls
        behind, and catches up before it proposes again. After a round that failed it absorbs the
        step in any case, since it may have nothing to start from. Up to ``most_forced`` tokens
        that a grammar forces come before the drafted ones. If the shape is a copy, the drafter
        does not draft, and absorbs the round later. For ``prices`` see ``DraftPlan``.
        """
        if not self.is_exact:
            open_windows(self.cache)
        shape = self._verifiable(shape)
        most_forced = 0 if self.discards_features else most_forced
        forced = self.processors.forced(self.quantization.fit(most_forced, self.cache))
        copied = self.copy(shape.copy, forced)
        if shape.copy:
            shape = PLAIN._replace(copy=len(copied))
        is_drafted = shape.size > 0 or (bool(forced) and not copied)
        absorb |= is_drafted or not self._is_seeded
        if absorb:
            self.flush_pairs()
        before_draft = Checkpoint(self.drafter.cache)
        self._is_seeded = False
        # 1. Draft: tokens that may follow the root are proposed by the drafter, or copied.
        with self._undone_on_failure(before_draft), mx.stream(self.stream):
            choice = self.rule.open(self.num_emitted, shape.num_levels)
            draft = Draft(mx.array(copied, mx.int32)) if copied else None
            draft = draft or self._propose(shape, choice, forced, prices)
            if is_drafted:
                # The device drafts while the host builds the target's pass, the larger graph.
                mx.async_eval(draft.tokens)
            self.restore_states()  # the draft does not depend on them
            tree_mask = draft.tree_mask()
            tokens = self.root
            if len(draft) > 0:
                tokens = mx.concatenate([tokens, draft.tokens])
        before_pass = self._checkpoint(tokens, is_tree=tree_mask is not None)
        with self._undone_on_failure(before_pass, before_draft), mx.stream(self.stream):
            # 2. Verify: one pass of the target over the root and the draft.
            logits, features = self._verify(tokens, draft, tree_mask, before_pass)
            # 3. Accept: the rule keeps what the target agrees with; the drafter absorbs it.
            verification = self._accept(choice, draft, tree_mask, logits).asking(self.num_top)
            if verification.rows is not None and features is not None:
                features = features[verification.rows]
            launched = Round(
                self.num_emitted, shape, draft, verification, features, before_pass,
                before_draft, self.num_head_forwards, is_forced=bool(forced),
            )  # fmt: skip
            mx.async_eval(verification.pending)
            if absorb:
                self.extend_drafter(launched)
                mx.async_eval(self.drafter.pending())
        self._is_seeded = True
        return launched

    def _propose(
        self, shape: DraftShape, choice: Choice, forced: list[int], prices: Mapping[int, float]
    ) -> Draft:
        """A draft, cut to the tokens that are worth verifying at these ``prices``."""
        return propose(self.drafter, CacheView(self.cache), shape, choice, forced).worth(prices)

    def _checkpoint(self, tokens: mx.array, is_tree: bool) -> Checkpoint:
        """The target's caches as they are now, before a pass over tokens (R,)."""
        num_rows = tokens.shape[0]
        if self.is_exact and num_rows > 1:
            return checkpoint_of_rows(self.cache, is_tree)
        # The lambda must not refer to the checkpoint: both, and all caches, would stay alive.
        return Checkpoint(self.cache, lambda kept: self._rerun(tokens[:kept]), num_rows)

    def _verifiable(self, shape: DraftShape) -> DraftShape:
        """Cut ``shape`` to what fits before caches are quantized or attention's scale changes."""
        if shape.tree is not None and not self.target.can_verify_tree(self.cache, shape.num_rows):
            return PLAIN
        return shape.at_most(self.quantization.fit(shape.num_levels, self.cache))

    def choose(self, plan: DraftPlan) -> DraftShape:
        """The shape in ``plan`` for the text read so far."""
        if self.copies is None or not plan.by_match:
            return plan.shape
        return plan.behind(self.copies.match.length, self.copies.match.is_answer)

    def see(self, run: list[int]) -> CopySeen | None:
        """Show copies a round's tokens; return how far a copy was, or would have been, right."""
        return None if self.copies is None else self.copies.read(run)

    def copy(self, size: int, forced: list[int]) -> list[int]:
        """Copy at most ``size`` tokens; none unless they begin with the ``forced`` ones."""
        if self.copies is None or size == 0:
            return []
        copied = self.copies.tokens(size)
        return copied if copied[: len(forced)] == forced else []

    def _accept(
        self, choice: Choice, draft: Draft, tree_mask: mx.array | None, logits: mx.array
    ) -> Verification:
        """Apply the rule to logits that have been through the processors."""
        history = self.history
        # As in mlx-lm, processors do not run before any token is known (a prompt of embeddings).
        if len(self.processors) == 0 or history.size == 0:
            return choice.verify(draft, tree_mask, logits)
        if self.processors.grammars:
            mx.async_eval(logits)  # the device continues the pass while the draft is read
            drafts: Any = draft.tokens.tolist()
            ask_grammars([(self.processors, drafts, draft.known_parents())], logits.shape[-1])
        rows = ProcessedRows(self.processors, self.rule, history, draft, logits)
        choice = Match() if rows.are_drawn else choice
        while True:
            made = choice.verify(draft, tree_mask, rows.for_rule)
            if not rows.left or not rows.process_next(made.read().kept_rows):
                return replace(made, logits=rows.logits)

    def extend_drafter(self, launched: Round) -> None:
        """Let the drafter absorb a round before it is known how many tokens are kept.

        The pairs after the kept ones are cut when the round is read.
        """
        made = launched.verification
        self.drafter.extend(made.following, launched.features, last=made.num_kept)
        launched.absorbed = True
        launched.num_head_forwards = self.num_head_forwards

    def launch_first(self) -> Round:
        """Launch the round that ends prefill: the prompt's last token, without a draft."""
        with self._undone_on_failure(Checkpoint(self.drafter.cache)):
            with mx.stream(self.stream):
                given = self.root_embedding
                self.drafter.extend(self.root if given is None else given, None)
            first = self.launch(DraftShape(0), absorb=True)
        self._prefill_forwards = self.drafter.num_forwards
        return first

    def commit(self, done: Round, length: int) -> None:
        """Add the first ``length`` tokens of ``done`` to the sequence.

        A plain step has one token, which can be committed before the step is read.
        """
        with mx.stream(self.stream):
            done.keep_run(length)
            # Kept no longer than needed: it keeps all caches, and the decoder, alive.
            self._committed = done.target_rows if done.target_rows.is_open else None
            self.quantization.apply(self.cache)
            emitted = done.verification.following[:length]
            self.root = emitted[-1:]
            self.root_embedding = None
            self.follow(emitted, *done.end_of(length))
            done.committed = True
            if not done.absorbed and not self.discards_features:
                self._keep_pairs(done, length)
                if done.is_copied and len(self._pending) >= MOST_BEHIND:
                    self.flush_pairs()

    def _keep_pairs(self, done: Round, length: int) -> None:
        """Keep the first pairs of a round for the drafter, which has not absorbed them."""
        features = None if done.features is None else done.features[:length]
        self._pending.add(done.position, done.verification.following[:length], features)

    def restore_states(self) -> None:
        """Compute the recurrent states that the last commit deferred, before the next pass."""
        if self._committed is not None:
            self._committed.restore()
            self._committed = None

    def follow(self, emitted: mx.array, last_row: int, run: list[int]) -> None:
        """Count tokens (m,) as emitted, the last after ``last_row``; ``run`` has those read."""
        length = emitted.shape[0]
        self.num_emitted += length
        if len(self.processors) > 0:
            self.history = mx.concatenate([self.history, emitted.astype(self.history.dtype)])
            self.processors.commit(last_row, length, run)

    def stop(self, last: Round, upcoming: Round | None) -> None:
        """Leave the caches as plain decoding does: all taken tokens are run, and nothing else.

        ``last`` is the round whose tokens the caller was taking, ``upcoming`` the one in flight.
        """
        if self.copies is not None:
            self.copies.drop_last(len(last.run) - last.num_taken)
        with mx.stream(self.stream):
            match stop_point(last, upcoming):
                case StopPoint.INSIDE_RUN:
                    if upcoming is not None:
                        upcoming.rollback(0, 0)
                    last.rollback(last.num_taken + 1, last.num_taken)
                    self._pending.drop_from(last.position)
                    if last.num_taken and not last.absorbed and not self.discards_features:
                        self._keep_pairs(last, last.num_taken)
                    features = last.features
                    row = last.num_taken
                case StopPoint.NEXT_IN_FLIGHT if upcoming is not None:
                    upcoming.rollback(1, 0)
                    features = upcoming.features
                    row = 0
                case _:
                    return self.stop_at_root()
            self._finalize_caches(None if features is None else features[row : row + 1])

    def stop_at_root(self) -> None:
        """``stop`` for the case that all tokens were taken and no round is in flight."""
        with mx.stream(self.stream):
            _, features = self._run(self.root)
            self._finalize_caches(features)

    def _finalize_caches(self, features: mx.array | None) -> None:
        """Complete the drafter's caches; ``features`` (1, F) belong to the last position."""
        self.restore_states()
        self.flush_pairs()
        if features is not None:
            self.drafter.save_last_features(features)
        self.quantization.apply(self.cache)
        close_windows(self.cache)
        mx.eval([c.state for c in self.cache + self.drafter.cache if not c.empty()])

    def flush_pairs(self) -> None:
        """Let the drafter absorb the tokens that were decoded without it."""
        if len(self._pending) == 0:
            return
        with self._undone_on_failure(Checkpoint(self.drafter.cache)), mx.stream(self.stream):
            self._pending.flush(self.drafter.extend)

    def _run(self, tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        self.restore_states()
        given = self.root_embedding  # in the first round, whose one row is the root
        with self.target.matching_single_row(self.cache, tokens.shape[0] if given is None else 1):
            return self.target(tokens, self.cache, embeddings=given)

    def _verify(
        self, tokens: mx.array, draft: Draft, tree_mask: mx.array | None, checkpoint: Checkpoint
    ) -> tuple[mx.array, mx.array | None]:
        """Logits and features; the checkpoint records how recurrent states were updated."""
        if self.is_exact and len(draft) > 0:
            return run_rows(self._run, tokens, draft.known_parents(), checkpoint)
        if tree_mask is not None:
            return self.target(tokens, self.cache, tree_mask)
        if not checkpoint.recurrent or tokens.shape[0] <= 1:
            return self._run(tokens)
        with self.target.recording(self.cache, tokens.shape[0], checkpoint.keep_updates):
            return self._run(tokens)

    def _rerun(self, tokens: mx.array) -> None:
        """Advance every cache over the kept rows, tokens (m,), with a whole pass."""
        self.num_reruns += 1
        self._run(tokens)
