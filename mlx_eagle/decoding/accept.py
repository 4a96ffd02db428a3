"""Which draft tokens are kept: the acceptance rules, on arrays alone (and ``rejection.py``).

A rule opens each round. It tells the drafter how to pick tokens, and turns the target's logits
for the rows of the verify pass into the token that follows each row and the number of draft
tokens kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import mlx.core as mx

from ..drafters.base import Draft
from ..drafters.tree import top_k
from ..target.tree_rows import kept_path
from .sampling import Sampling

FAR = 1e4  # nats, below whatever a filter leaves

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Outcome:
    """What a verify pass of R rows decided, known to the host.

    ``num_kept`` draft tokens are kept; ``following`` (R) is the token after each row. ``rows`` (R)
    are, for a tree, the rows of the pass that these stand for, the kept branch first; None for a
    chain, where they are in the order of the pass.
    """

    num_kept: int
    following: list[int]
    rows: list[int] | None = None

    @property
    def run(self) -> list[int]:
        """The tokens that it emits: what was kept, and the one that follows."""
        return self.following[: self.num_kept + 1]


@dataclass(frozen=True)
class Verification:
    """The same on the device, and the target's log-probabilities (R, V) after each row.

    ``following`` (R,), ``num_kept`` () and ``rows`` (R,) are those of ``Outcome``.
    """

    following: mx.array
    num_kept: mx.array
    logprobs: mx.array
    rows: mx.array | None = None

    @cached_property
    def packed(self) -> mx.array:
        """All that ``read`` takes to the host in one array, so that it waits once."""
        parts = [self.num_kept.reshape(1), self.following, self.rows]
        return mx.concatenate([part.astype(mx.int32) for part in parts if part is not None])

    def read(self) -> Outcome:
        """Wait for the device. The one place that takes ``packed`` apart."""
        mx.eval(self.packed)
        num_kept, *numbers = self.packed.tolist()
        num_rows = self.following.shape[0]
        rows = None if self.rows is None else numbers[num_rows:]
        return Outcome(num_kept, numbers[:num_rows], rows)


class Choice(Protocol):
    """One round of a rule."""

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        """The next draft token from a draft model's logits (1, Vd): an index (1,) into them.

        Called once per position, in order. ``ids`` (Vd,) are the tokens that the logits stand
        for (None: all of the target's, in order). A drafter that has no logits does not call it.
        """

    def pick_children(
        self, logits: mx.array, ids: mx.array | None, count: int
    ) -> tuple[mx.array, mx.array]:
        """The same for a tree: from logits (m, Vd) ``count`` children of each of m nodes.

        Different indices (m, count), and the log of how likely each is kept, (m, count),
        the likeliest first. Called once per level, in order.
        """

    def verify(self, draft: Draft, tree_mask: mx.array | None, logprobs: mx.array) -> Verification:
        """Verify a draft of k tokens against the target's log-probabilities (k + 1, V).

        ``tree_mask`` (k + 1, k + 1) says which rows are ancestors of a tree's row; None for a
        chain.
        """


class Rule(Protocol):
    """How draft tokens are picked and kept, for one generation."""

    def open(self, position: int) -> Choice:
        """The round whose row 0 decides the ``position``-th generated token (from 0)."""


def kept_in_chain(keep: mx.array) -> mx.array:
    """Length of the run of kept tokens at the front: [T, T, F, T] -> 2."""
    return mx.cumprod(keep.astype(mx.int32)).sum()


def keep_branch(
    draft: Draft,
    tree_mask: mx.array | None,
    keep: mx.array,
    following: mx.array,
    logprobs: mx.array,
) -> Verification:
    """Keep the branch of the tokens that ``keep`` (k,) says; ``following`` (R,) is after rows."""
    following = following.astype(mx.int32)
    if tree_mask is None:
        return Verification(following, kept_in_chain(keep), logprobs)
    rows, num_kept = kept_path(keep, tree_mask)
    return Verification(following[rows], num_kept, logprobs[rows], rows)


def match(
    draft: Draft, tree_mask: mx.array | None, following: mx.array, logprobs: mx.array
) -> Verification:
    """Keep what equals the choice ``following`` (R,) made after its parent."""
    after_parent = following[:-1] if draft.parents is None else following[draft.parents]
    return keep_branch(draft, tree_mask, draft.tokens == after_parent, following, logprobs)


@dataclass(frozen=True)
class Match:
    """Keep a draft token iff it equals the target's own choice after its parent.

    The choice is drawn row by row with the caller's sampler, so the output distribution is the
    target's whatever was drafted; without a sampler (greedy) the text is the target's own.
    """

    sampler: Sampler | None = None

    def open(self, position: int) -> "Match":
        return self

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        return mx.argmax(logits, axis=-1)

    def pick_children(
        self, logits: mx.array, ids: mx.array | None, count: int
    ) -> tuple[mx.array, mx.array]:
        return likeliest(normalized(logits), count)

    def verify(self, draft: Draft, tree_mask: mx.array | None, logprobs: mx.array) -> Verification:
        if self.sampler is None:
            following = mx.argmax(logprobs, axis=-1)
        else:
            # A sampler is an opaque closure: it gets the (1, V) rows it gets in plain decoding.
            rows = range(logprobs.shape[0])
            following = mx.concatenate([self.sampler(logprobs[r : r + 1]) for r in rows])
        return match(draft, tree_mask, following, logprobs)


@dataclass
class Coupled:
    """The target draws with the Gumbel noise of the position; keep a draft token iff it agrees.

    The text is that of ``sampling`` alone, whatever was drafted: same seed, same text. The draft
    draws with the same noise, which makes it agree more often; ``drafts_greedily`` ("match")
    drafts the most probable token instead.
    """

    sampling: Sampling
    drafts_greedily: bool = False
    vocab_size: int = 0  # the target's, known from the first round, which has no draft

    def open(self, position: int) -> "CoupledChoice":
        return CoupledChoice(self, position)


@dataclass
class CoupledChoice:
    """One round of ``Coupled``: row r and the r-th draft token share the noise of a position."""

    rule: Coupled
    position: int
    noises: list[mx.array] = field(default_factory=list)

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        if self.rule.drafts_greedily:
            return mx.argmax(logits, axis=-1)
        noise = self._add_noise()
        log_q = self.rule.sampling.log_probabilities(normalized(logits))
        return mx.argmax(log_q + (noise if ids is None else noise[ids]), axis=-1)

    def pick_children(
        self, logits: mx.array, ids: mx.array | None, count: int
    ) -> tuple[mx.array, mx.array]:
        logits = normalized(logits)
        if self.rule.drafts_greedily:
            return likeliest(logits, count)
        noise = self._add_noise()
        log_q = self.rule.sampling.log_probabilities(logits)
        return drawn(log_q, logits, noise if ids is None else noise[ids], count)

    def verify(self, draft: Draft, tree_mask: mx.array | None, logprobs: mx.array) -> Verification:
        self.rule.vocab_size = logprobs.shape[-1]
        while len(self.noises) <= draft.num_levels:
            self._add_noise()
        noise = mx.stack(self.noises)
        if tree_mask is not None:
            noise = noise[tree_mask.sum(axis=1) - 1]  # rows of one depth stand for one position
        log_p = self.rule.sampling.log_probabilities(logprobs)
        return match(draft, tree_mask, mx.argmax(log_p + noise, axis=-1), logprobs)

    def _add_noise(self) -> mx.array:
        position = self.position + len(self.noises)
        self.noises.append(self.rule.sampling.noise(position, self.rule.vocab_size))
        return self.noises[-1]


def normalized(logits: mx.array) -> mx.array:
    """Log-probabilities of logits (m, V), in float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def likeliest(log_q: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The greatest of log q (m, Vd), (m, count): where they stand, and they themselves."""
    best = top_k(log_q, count)
    return best, mx.take_along_axis(log_q, best, axis=1)


def drawn(
    log_q: mx.array, unfiltered: mx.array, noise: mx.array, count: int
) -> tuple[mx.array, mx.array]:
    """``count`` of each row of log q (m, Vd), drawn without replacement by Gumbel noise (m, Vd).

    Kool et al. 2019, arXiv:1903.06059. The likeliest of ``unfiltered`` log q follow where a filter
    left fewer. Returns indices (m, count), as drawn, and (m, count) the log of what the
    first, second and so on of all tokens have in q, whichever were drawn.
    """
    unfiltered = unfiltered - FAR
    is_left = log_q > -mx.inf
    index = top_k(mx.where(is_left, log_q + noise, unfiltered), count)
    return index, likeliest(mx.where(is_left, log_q, unfiltered), count)[1]


def process_logits(
    processors: tuple[LogitsProcessor, ...],
    history: mx.array,
    draft: Draft,
    logits: mx.array,
) -> mx.array:
    """Run logits (k + 1, V) through the processors, each row with the tokens before it.

    ``history`` (N,) ends with the root; row r sees it with the draft tokens on its path behind.
    How long the paths in a tree are has to be known here: where the tree grew on the device, the
    draft is waited for.
    """
    rows = []
    parents = draft.known_parents()
    for r in range(logits.shape[0]):
        if parents is None:
            path = draft.tokens[:r]
        else:
            above, row = [], r
            while row > 0:
                above.insert(0, row - 1)
                row = parents[row - 1]
            path = draft.tokens[mx.array(above, mx.int32)]
        tokens = mx.concatenate([history, path.astype(history.dtype)])
        row = logits[r : r + 1]
        for processor in processors:
            row = processor(tokens, row)
        rows.append(row)
    return mx.concatenate(rows)
