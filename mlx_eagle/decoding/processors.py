"""Logits processors of one text, including grammars, for the rows of a verify pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, cast

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_sampler

from ..drafters.base import Draft

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class GrammarText(Protocol):
    """A grammar's state in one text; it learns tokens once they are decided.

    A logits processor's ``begin_text()`` makes one, if the text by itself decides which tokens may
    come next.
    """

    def start(self, prompt: list[int]) -> None:
        """Begin after ``prompt``."""

    def follow(self, tokens: list[int]) -> None:
        """Advance over tokens that are now part of the text."""

    def forced(self, most: int) -> list[int]:
        """Tokens that must come next, at most ``most``."""

    def masks(self, asked: "Sequence[RowsAsked]") -> list[Any]:
        """Tokens allowed after each row of each of ``asked``: arrays (R, V / 32) of bits.

        ``asked`` may be other texts, by grammars of this class.
        """


@dataclass(frozen=True)
class RowsAsked:
    """The rows of one text's verify pass: the root's, and one for each draft token.

    ``parents`` are as in ``Draft.known_parents``.
    """

    text: GrammarText
    drafts: list[int]
    parents: Sequence[int] | None


def allowed_of(bits: mx.array, size: int) -> mx.array:
    """Booleans (R, size) from bits (R, W), 32 tokens in each; tokens beyond are not allowed."""
    spread = (bits[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = spread.reshape(bits.shape[0], -1)[:, :size].astype(mx.bool_)
    missing = size - allowed.shape[1]
    return mx.pad(allowed, [(0, 0), (0, missing)]) if missing > 0 else allowed


Pass = tuple["LogitsProcessors", list[int], Sequence[int] | None]
"""One text's rows of a verify pass: draft tokens, and parents as in ``RowsAsked``."""


def ask_grammars(passes: Sequence[Pass], size: int) -> None:
    """Ask all grammars of all texts at once which of ``size`` tokens may follow each row.

    The processors of each text keep the answer for the pass.
    """
    asked = [
        RowsAsked(text, drafts, parents)
        for processors, drafts, parents in passes
        for text in processors.grammars
    ]
    bits = asked[0].text.masks(asked)
    allowed = allowed_of(mx.array(np.concatenate(bits)), size)
    start = 0
    for processors, drafts, _ in passes:
        processors.allowed = []
        for _ in processors.grammars:
            processors.allowed.append(allowed[start : start + 1 + len(drafts)])
            start += 1 + len(drafts)


class LogitsProcessors:
    """The logits processors of one generation, over the rows of its verify passes.

    Grammars are asked before which tokens may follow each row: see ``ask_grammars``.

    A row that is rejected must leave no trace in a processor that keeps a state. mlx-lm's own
    keep none, nor do those with a true ``is_pure``: they run over all rows of a pass. Others do
    so where each row can go on from a ``copy()`` after the row before, or, in chains, where
    ``rollback(n)`` takes the last n calls back. With any other, a row is processed only once the
    row before is known to be accepted (``ProcessedRows``): the host waits for each row kept.
    """

    def __init__(self, processors: Sequence[LogitsProcessor] = ()):
        self._processors = tuple(processors)
        texts = [p.begin_text() for p in self._processors if is_grammar(p)]
        self.grammars: list[GrammarText] = texts
        self.allowed: list[mx.array] = []  # (R, V) by each of them, in the pass under way
        self._after: list[tuple[LogitsProcessor, ...]] = []  # each row of the pass under way
        self._num_called = 0

    def __len__(self) -> int:
        return len(self._processors)

    def start(self, prompt: mx.array) -> None:
        """Begin a text after ``prompt`` (N,)."""
        for grammar in self.grammars:
            grammar.start(cast(list[int], prompt.tolist()))

    def forced(self, most: int) -> list[int]:
        """Tokens that a grammar forces to come next, at most ``most``; [] for none."""
        return next((found for g in self.grammars if (found := g.forced(most))), [])

    def run_at_once(self, draft: Draft) -> bool:
        """Whether all rows of a pass over ``draft`` may be processed before any is accepted."""
        return len(draft) == 0 or all(
            is_pure(p)
            or is_grammar(p)
            or is_copied(p)
            or (draft.parents is None and can_roll_back(p))
            for p in self._processors
        )

    def process(self, history: mx.array, draft: Draft, logits: mx.array) -> mx.array:
        """Run logits (k + 1, V) through the processors, each row with the tokens before it.

        ``history`` (N,) ends with the root; row r sees it with the draft tokens on its path
        behind. How long the paths in a tree are has to be known here: where the tree grew on the
        device, the draft is waited for, and the device goes on with the pass meanwhile.
        """
        if len(self.grammars) == len(self._processors):
            for allowed in self.allowed:
                logits = mx.where(allowed, logits, -mx.inf)
            return logits
        if draft.parents is not None and not draft.static_parents:
            mx.async_eval(logits)
        self._take_back(self._num_called)  # of a pass that was not committed
        parents = draft.known_parents()
        self._after = []
        rows = []
        for r in range(logits.shape[0]):
            before = self._processors
            if r > 0:
                before = self._after[r - 1 if parents is None else parents[r - 1]]
            self._after.append(tuple(p.copy() if is_copied(p) else p for p in before))
            row = logits[r : r + 1]
            rows.append(self.process_row(history, draft, row, r, self._after[r]))
        self._num_called = len(rows)
        return mx.concatenate(rows)

    def process_row(
        self,
        history: mx.array,
        draft: Draft,
        logits: mx.array,
        row: int,
        processors: Sequence[LogitsProcessor] | None = None,
    ) -> mx.array:
        """Run the logits (1, V) of one row through ``processors``, by default these."""
        path = draft.tokens[:row]
        parents = draft.known_parents()
        if parents is not None:
            above: list[int] = []
            at = row
            while at > 0:
                above.insert(0, at - 1)
                at = parents[at - 1]
            path = draft.tokens[mx.array(above, mx.int32)]
        tokens = mx.concatenate([history, path.astype(history.dtype)])
        allowed = iter(self.allowed)
        for processor in self._processors if processors is None else processors:
            if is_grammar(processor):
                logits = mx.where(next(allowed)[row], logits, -mx.inf)
            else:
                logits = processor(tokens, logits)
        return logits

    def commit(self, last_row: int, num_rows: int, run: list[int]) -> None:
        """Continue from the state after ``last_row``, the last of the ``num_rows`` kept rows.

        ``run`` are the tokens that follow these rows; grammars need them.
        """
        if self._after:
            self._processors = self._after[last_row]
            self._take_back(self._num_called - num_rows)
        for grammar in self.grammars:
            grammar.follow(run)

    def _take_back(self, num_calls: int) -> None:
        for processor in self._processors:
            if num_calls > 0 and can_roll_back(processor):
                processor.rollback(num_calls)
        self._after = []
        self._num_called = 0


def is_pure(processor: LogitsProcessor) -> bool:
    """Whether a processor keeps no state: mlx-lm's own, and any that says so."""
    is_of_mlx_lm = getattr(processor, "__module__", None) == make_sampler.__module__
    return is_of_mlx_lm or getattr(processor, "is_pure", False) is True


def is_grammar(processor: LogitsProcessor) -> TypeGuard[Any]:
    """Whether a processor has a ``GrammarText``."""
    return hasattr(processor, "begin_text")


def is_copied(processor: LogitsProcessor) -> TypeGuard[Any]:
    """Whether a processor can be copied with its state, to continue in several ways."""
    return hasattr(processor, "copy") and not is_pure(processor)


def can_roll_back(processor: LogitsProcessor) -> TypeGuard[Any]:
    """Whether a processor can undo its last calls."""
    is_copied_or_pure = hasattr(processor, "copy") or is_pure(processor)
    return hasattr(processor, "rollback") and not is_copied_or_pure
