"""Acceptance rules, which decide on the device which draft tokens are kept.

Rejection sampling is in ``rejection.py``.

A rule opens each round. It tells the drafter how to pick tokens, and turns the target's logits
for the rows of the verify pass into the token that follows each row and the number of draft
tokens kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx

from ..drafters.base import Draft
from ..drafters.tree import top_k
from ..target_model.tree_rows import kept_path
from .processors import LogitsProcessors
from .sampling import Sampler, Sampling

FAR = 1e4  # nats, below anything that a filter leaves


@dataclass(frozen=True)
class Outcome:
    """Result of a verify pass of R rows, known to the host.

    ``num_kept`` draft tokens are kept; ``following`` (R) has the token after each row. In a tree,
    ``rows`` (R) are the rows of the pass in the order of ``following``, the kept branch first;
    for a chain it is None, since the order is that of the pass.
    """

    num_kept: int
    following: list[int]
    rows: list[int] | None = None

    @property
    def run(self) -> list[int]:
        """The emitted tokens: the kept ones, and the one that follows them."""
        return self.following[: self.num_kept + 1]

    @property
    def kept_rows(self) -> Sequence[int]:
        """The rows of the pass, from the root on, that the tokens of ``run`` follow."""
        return range(self.num_kept + 1) if self.rows is None else self.rows[: self.num_kept + 1]


TokenLogprobs = tuple[float, tuple[tuple[int, float], ...]]
"""A token's log-probability, and the likeliest tokens with theirs, the likeliest first."""


@dataclass(frozen=True)
class AskedLogprobs:
    """Log-probabilities that the caller asked for, on the device, computed with the round.

    ``own`` (..., R) belong to the tokens that follow R rows, ``top`` (..., R, n) the n greatest of
    each row, unordered, and ``ids`` (..., R, n) are their tokens; n may be 0.
    """

    own: mx.array
    ids: mx.array
    top: mx.array

    @classmethod
    def of(cls, rows: mx.array, following: mx.array, num_top: int) -> "AskedLogprobs":
        """Look up tokens ``following`` (..., R) in the log-probabilities ``rows`` (..., R, V)."""
        own = mx.take_along_axis(rows, following[..., None], axis=-1)[..., 0]
        ids = top = mx.zeros((*following.shape, 0))
        if num_top > 0:
            ids = mx.argpartition(-rows, kth=num_top - 1, axis=-1)[..., :num_top]
            top = mx.take_along_axis(rows, ids, axis=-1)
        return cls(own, ids, top)

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays to compute."""
        return [self.own, self.ids, self.top]

    def of_texts(self, index: mx.array) -> "AskedLogprobs":
        """Select some of several texts, by index."""
        return AskedLogprobs(*(array[index] for array in self.arrays))

    @cached_property
    def _on_host(self) -> Any:
        """All arrays as lists: slicing one on the device would mean another wait."""
        return [array.tolist() for array in self.arrays]

    def read(
        self, length: int, num_top: int | None = None, text: int | None = None
    ) -> list[TokenLogprobs]:
        """Log-probabilities of the first ``length`` tokens; ``text``: which one of several."""
        arrays = self._on_host if text is None else [array[text] for array in self._on_host]
        own, ids, top = (array[:length] for array in arrays)
        rows = zip(own, ids, top, strict=True)
        return [(value, _likeliest_first(*others)[:num_top]) for value, *others in rows]


def _likeliest_first(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(zip(ids, values, strict=True), key=lambda pair: -pair[1]))


@dataclass(frozen=True)
class Verification:
    """An ``Outcome`` on the device, and the target's logits (R, V) after each row of the pass.

    ``following`` (R,) int32, ``num_kept`` () and ``rows`` (R,) are as in ``Outcome``.
    """

    following: mx.array
    num_kept: mx.array
    logits: mx.array
    rows: mx.array | None = None
    asked: AskedLogprobs | None = None

    def asking(self, num_top: int | None) -> "Verification":
        """Add the log-probabilities of ``following``, and the ``num_top`` greatest."""
        if num_top is None:
            return self
        return replace(self, asked=AskedLogprobs.of(self.logprobs, self.following, num_top))

    def read_logprobs(self, length: int) -> list[TokenLogprobs]:
        """Log-probabilities of the first tokens, once read; [] if none were asked for."""
        return [] if self.asked is None else self.asked.read(length)

    @cached_property
    def logprobs(self) -> mx.array:
        """Log-probabilities (R, V), in the order of ``following``.

        They are computed only if they are read; greedy decoding does not need them.
        """
        return log_softmax(self.logits if self.rows is None else self.logits[self.rows])

    @property
    def pending(self) -> list[mx.array]:
        """The arrays that ``read`` waits for; only the token if nothing was drafted."""
        asked = [] if self.asked is None else self.asked.arrays
        if self.following.size == 1:
            return [self.following, *asked]
        arrays = (self.following, self.num_kept, self.rows)
        return [*(array for array in arrays if array is not None), *asked]

    def read(self) -> Outcome:
        """Wait for the device."""
        mx.eval(self.pending)
        num_kept: Any = self.num_kept.item()
        following: Any = self.following.tolist()
        rows: Any = None if self.rows is None else self.rows.tolist()
        return Outcome(num_kept, following, rows)


class Choice(Protocol):
    """One round of a rule."""

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        """The next draft token from a draft model's logits (1, Vd): an index (1,) into them.

        Called once per position, in order. ``ids`` (Vd,) are the tokens that the logits stand
        for (None: the target's whole vocabulary). A drafter without logits does not call it.
        """

    def pick_children(
        self, logits: mx.array, ids: mx.array | None, count: int
    ) -> tuple[mx.array, mx.array]:
        """The same for a tree: from logits (m, Vd) ``count`` children of each of m nodes.

        Returns distinct indices (m, count) and the log-probability that each is kept, (m, count),
        the likeliest first. Called once per level, in order.
        """

    def skip(self) -> None:
        """Skip one pick, where the draft token is known without it."""

    def verify(self, draft: Draft, tree_mask: mx.array | None, logits: mx.array) -> Verification:
        """Verify a draft of k tokens against the target's logits (k + 1, V).

        ``tree_mask`` (k + 1, k + 1) says which rows are ancestors of a tree's row; None for a
        chain.
        """


class Rule(Protocol):
    """A way to pick and keep draft tokens, for one generation.

    Its ``str`` names everything about the rule that the cost of a round depends on.
    """

    def open(self, position: int, size: int) -> Choice:
        """The round whose row 0 decides the ``position``-th generated token (from 0).

        Up to ``size`` tokens are drafted one behind the other.
        """


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities (..., V) as mlx-lm computes them, in the dtype of the logits."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def keep_branch(
    tree_mask: mx.array | None, keep: mx.array, following: mx.array, logits: mx.array
) -> Verification:
    """Keep the branch whose tokens all pass ``keep`` (k,); ``following`` (R,) int32 are next."""
    if tree_mask is None:  # the run at the front: [T, T, F, T] -> 2
        return Verification(following, mx.cumprod(keep.astype(mx.int32)).sum(), logits)
    rows, num_kept = kept_path(keep, tree_mask)
    return Verification(following[rows], num_kept, logits, rows)


def match(
    draft: Draft, tree_mask: mx.array | None, following: mx.array, logits: mx.array
) -> Verification:
    """Keep each token that equals the choice ``following`` (R,) after its parent."""
    following = following.astype(mx.int32)  # the type of the draft's tokens
    if len(draft) == 0:
        return Verification(following, mx.array(0, mx.int32), logits)
    after_parent = following[:-1] if draft.parents is None else following[draft.parents]
    return keep_branch(tree_mask, draft.tokens == after_parent, following, logits)


@dataclass(frozen=True)
class Match:
    """Keep a draft token iff it equals the target's own choice after its parent.

    The choice is drawn row by row with the caller's sampler, so the output has the target's
    distribution for any draft; without a sampler (greedy) the text is the target's own.
    """

    sampler: Sampler | None = None

    def __str__(self) -> str:
        return "greedy" if self.sampler is None else "a sampler"

    def open(self, position: int, size: int) -> "Match":
        return self

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        return mx.argmax(logits, axis=-1)

    def pick_children(
        self, logits: mx.array, ids: mx.array | None, count: int
    ) -> tuple[mx.array, mx.array]:
        return likeliest(normalized(logits), count)

    def skip(self) -> None:
        """Do nothing: picks are not counted."""

    def verify(self, draft: Draft, tree_mask: mx.array | None, logits: mx.array) -> Verification:
        if self.sampler is None:
            return match(draft, tree_mask, mx.argmax(logits, axis=-1), logits)
        # A sampler is an opaque closure: it gets the (1, V) rows it gets in plain decoding.
        logprobs = log_softmax(logits)
        rows = range(logits.shape[0])
        following = mx.concatenate([self.sampler(logprobs[r : r + 1]) for r in rows])
        return match(draft, tree_mask, following, logits)


@dataclass
class Coupled:
    """The target draws with the Gumbel noise of the position; keep a draft token iff it agrees.

    The text depends only on ``sampling``, not on the draft: same seed, same text. The draft is
    drawn with the same noise, so it agrees more often; with ``drafts_greedily`` ("match") it is
    the most probable token instead.
    """

    sampling: Sampling
    drafts_greedily: bool = False
    vocab_size: int = 0  # the target's, known from the first round, which has no draft

    def __str__(self) -> str:
        return f"{'matched' if self.drafts_greedily else 'coupled'} {self.sampling.filters}"

    def open(self, position: int, size: int) -> "CoupledChoice":
        return CoupledChoice(self, position, size)


@dataclass
class CoupledChoice:
    """One round of ``Coupled``: row r and the r-th draft token share the noise of a position."""

    rule: Coupled
    position: int
    size: int
    num_picked: int = 0
    noise: mx.array | None = None  # (rows, V), for all positions at once
    of_draft: mx.array | None = None  # (rows, Vd), of the tokens that can be drafted

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        if self.rule.drafts_greedily:
            return mx.argmax(logits, axis=-1)
        return mx.argmax(self.rule.sampling.scores(logits) + self._next_noise(ids), axis=-1)

    def pick_children(
        self, logits: mx.array, ids: mx.array | None, count: int
    ) -> tuple[mx.array, mx.array]:
        logits = normalized(logits)
        if self.rule.drafts_greedily:
            return likeliest(logits, count)
        log_q = self.rule.sampling.log_probabilities(logits)
        return drawn(log_q, logits, self._next_noise(ids), count)

    def skip(self) -> None:
        self.num_picked += 1

    def verify(self, draft: Draft, tree_mask: mx.array | None, logits: mx.array) -> Verification:
        self.rule.vocab_size = logits.shape[-1]
        num_rows = draft.num_levels + 1
        noise = self._noise(num_rows)
        if tree_mask is not None:
            noise = noise[tree_mask.sum(axis=1) - 1]  # rows of one depth stand for one position
        elif noise.shape[0] > num_rows:
            noise = noise[:num_rows]
        scores = self.rule.sampling.scores(log_softmax(logits), is_normalized=True)
        return match(draft, tree_mask, mx.argmax(scores + noise, axis=-1), logits)

    def _next_noise(self, ids: mx.array | None) -> mx.array:
        """Noise (1, Vd) for the position that is drafted next."""
        if self.of_draft is None:
            noise = self._noise(self.size + 1)
            self.of_draft = noise if ids is None else mx.take(noise, ids, axis=1)
        self.num_picked += 1
        return self.of_draft[self.num_picked - 1 : self.num_picked]

    def _noise(self, num_rows: int) -> mx.array:
        """Noise (n, V) for the round's positions, n at least ``num_rows``."""
        if self.noise is None or self.noise.shape[0] < num_rows:
            self.noise = self.rule.sampling.noises(self.position, num_rows, self.rule.vocab_size)
        return self.noise


def normalized(logits: mx.array) -> mx.array:
    """Log-probabilities of logits (m, V), in float32."""
    return log_softmax(logits.astype(mx.float32))


def likeliest(log_q: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The ``count`` greatest of log q (m, Vd): indices and values, each (m, count)."""
    best = top_k(log_q, count)
    return best, mx.take_along_axis(log_q, best, axis=1)


def drawn(
    log_q: mx.array, unfiltered: mx.array, noise: mx.array, count: int
) -> tuple[mx.array, mx.array]:
    """``count`` of each row of log q (m, Vd), drawn without replacement by Gumbel noise (m, Vd).

    Kool et al. 2019, arXiv:1903.06059. If a filter left fewer, the likeliest of ``unfiltered``
    log q follow. Returns the indices (m, count) as drawn, and (m, count) the greatest
    log-probabilities in q, in order, independent of which tokens were drawn.
    """
    unfiltered = unfiltered - FAR
    is_left = log_q > -mx.inf
    index = top_k(mx.where(is_left, log_q + noise, unfiltered), count)
    return index, likeliest(mx.where(is_left, log_q, unfiltered), count)[1]


@dataclass(eq=False)
class ProcessedRows:
    """The rows of one text's verify pass, behind its logits processors.

    Where these must see no rejected row, row 0 is processed at once, every other row when the rule
    has accepted the path to it. If the caller has a sampler, the row's token is then drawn with it
    at once, as it must not be drawn twice.
    """

    processors: LogitsProcessors
    rule: Rule
    history: mx.array  # (N,) as for ``LogitsProcessors.process``
    draft: Draft
    unprocessed: mx.array  # logits (R, V)

    def __post_init__(self) -> None:
        self.left: set[int] = set()  # rows not processed yet
        self._sampler: Sampler | None = None
        if self.processors.run_at_once(self.draft):
            made = self.processors.process(self.history, self.draft, self.unprocessed)
            self._rows = self._for_rule = [made]
            return
        self._sampler = self.rule.sampler if isinstance(self.rule, Match) else None
        num_rows = self.unprocessed.shape[0]
        self.left = {*range(num_rows)}
        self._rows = [self.unprocessed[r : r + 1] for r in range(num_rows)]
        self._for_rule = list(self._rows)
        self.process_next([0])

    @property
    def are_drawn(self) -> bool:
        """Whether a sampler has drawn the tokens: each is its row's greatest logit."""
        return self._sampler is not None

    @property
    def logits(self) -> mx.array:
        """Logits (R, V), processed as far as the rule has accepted."""
        return mx.concatenate(self._rows)

    @property
    def for_rule(self) -> mx.array:
        """The logits to judge; a row whose token was drawn allows only that token."""
        return mx.concatenate(self._for_rule)

    def process_next(self, kept: Sequence[int]) -> bool:
        """Process the first row in ``kept`` that is not processed yet; False if there is none."""
        row = next((r for r in kept if r in self.left), None)
        if row is None:
            return False
        self.left.remove(row)
        made = self.processors.process_row(self.history, self.draft, self._rows[row], row)
        self._rows[row] = self._for_rule[row] = made
        if self._sampler is not None:
            token = self._sampler(log_softmax(made))
            is_drawn = mx.arange(made.shape[-1]) == token[:, None]
            self._for_rule[row] = mx.where(is_drawn, 0.0, -mx.inf).astype(made.dtype)
        return True
