"""Rejection sampling: chains, and trees whose children are tried in turn."""

from dataclasses import dataclass, field

import mlx.core as mx

from ..drafters.base import Draft
from ..target_model.tree_rows import families
from .accept import Verification, drawn, keep_branch, log_softmax, match, normalized
from .sampling import Sampling

TINY = 1e-30  # in place of a sum of probabilities that are all zero


@dataclass(frozen=True)
class Reject:
    """Keep x drawn from q with probability min(1, p(x) / q(x)), else draw from max(0, p - q).

    The children in a tree are drawn without replacement and tried in turn: see ``try_in_turn``.
    q is zero outside the draft vocabulary. A draft that was not drawn through the rule is
    verified as by ``match``.
    """

    sampling: Sampling

    def __str__(self) -> str:
        return f"reject {self.sampling.filters}"

    def open(self, position: int, size: int) -> "RejectChoice":
        return RejectChoice(self.sampling, position, size)


@dataclass(frozen=True)
class Drawn:
    """Indices (m, n), drawn without replacement from log q (m, Vd) over the tokens ``ids``."""

    index: mx.array
    log_q: mx.array
    ids: mx.array | None


@dataclass
class RejectChoice:
    """One round of ``Reject``; every random number belongs to a position and a use."""

    sampling: Sampling
    position: int
    size: int
    levels: list[Drawn] = field(default_factory=list)
    of_chain: mx.array | None = None  # noise (size, Vd) for the picks of a chain

    REST, DRAFT, COIN = range(3)

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        log_q = self.sampling.log_probabilities(normalized(logits))
        place = len(self.levels)
        if self.of_chain is None:
            size = log_q.shape[1]
            self.of_chain = self.sampling.noises(self.position, self.size, size, self.DRAFT)
        noise = self.of_chain[place : place + 1]
        index = mx.argmax(log_q + noise, axis=-1, keepdims=True)
        self.levels.append(Drawn(index, log_q, ids))
        return index[0]

    def pick_children(
        self, logits: mx.array, ids: mx.array | None, count: int
    ) -> tuple[mx.array, mx.array]:
        unfiltered = normalized(logits)
        log_q = self.sampling.log_probabilities(unfiltered)
        # Noise for each node: what one draws must not decide which siblings another one has.
        noise = self._noise(log_q.shape)
        index, likely = drawn(log_q, unfiltered, noise, count)
        self.levels.append(Drawn(index, log_q, ids))
        return index, likely

    def skip(self) -> None:
        """With fewer levels than tokens the draft was not drawn: it is verified by ``match``."""

    def verify(self, draft: Draft, tree_mask: mx.array | None, logits: mx.array) -> Verification:
        log_p = self.sampling.log_probabilities(log_softmax(logits))
        num_depths = draft.num_levels + 1
        noise = self.sampling.noises(self.position, num_depths, log_p.shape[1], self.REST)
        if tree_mask is None and len(self.levels) >= len(draft) > 0:
            return self._verify_chain(draft, log_p, noise, logits)
        if tree_mask is not None:
            # At each depth only one row can be reached: the others may have its random numbers.
            depths = tree_mask.sum(axis=1) - 1
            noise = noise[depths]
        if tree_mask is None or draft.parents is None or draft.draw_index is None:
            return match(draft, tree_mask, mx.argmax(log_p + noise, axis=-1), logits)
        width = max(level.index.shape[1] for level in self.levels)
        ranks, rows = families(draft.parents, width)
        q, children = self._tried(draft.draw_index, rows)
        coins = self._coins(num_depths, width)[depths]
        kept, left = try_in_turn(mx.exp(log_p), q, self.levels[0].ids, children, coins)
        child = mx.take_along_axis(rows, mx.maximum(kept, 0)[:, None], axis=1)[:, 0]
        following = _or_other(draft.tokens[child - 1], kept, left, noise)
        return keep_branch(tree_mask, kept[draft.parents] == ranks, following, logits)

    def _verify_chain(
        self, draft: Draft, log_p: mx.array, noise: mx.array, logits: mx.array
    ) -> Verification:
        """``verify`` a chain that was drawn here: a row has one child, the next, the last none.

        It may have been cut, by what was known before the next token was drawn.
        """
        levels = self.levels[: len(draft)]
        drawn_from = [level.log_q for level in levels]
        q = mx.exp(mx.concatenate([*drawn_from, drawn_from[-1]]))
        index = [level.index.astype(mx.int32) for level in levels]
        children = mx.concatenate([*index, mx.array([[-1]])])
        coins = self._coins(len(draft) + 1, 1)
        kept, left = try_in_turn(mx.exp(log_p), q, self.levels[0].ids, children, coins)
        tokens = mx.concatenate([draft.tokens, draft.tokens[-1:]])
        following = _or_other(tokens, kept, left, noise)
        return keep_branch(None, kept[:-1] == 0, following, logits)

    def _coins(self, num_depths: int, width: int) -> mx.array:
        """Uniform numbers (D, ``width``) below 1, of the round's positions."""
        keys = self.sampling.keys(self.position, num_depths, self.COIN)
        return mx.vmap(lambda key: mx.random.uniform(shape=(width,), key=key))(keys)

    def _tried(self, places: mx.array, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Arguments of ``try_in_turn`` for the tokens at ``places``: q (R, Vd), children (R, n).

        ``rows`` (R, n) are the children's rows, 0 for none.
        """
        q = mx.exp(mx.concatenate([level.log_q for level in self.levels]))
        index = mx.concatenate([level.index.flatten() for level in self.levels])
        counts = [level.index.shape[1] for level in self.levels for _ in level.index]
        of_place = mx.array([i for i, count in enumerate(counts) for _ in range(count)])
        drawn_as = places[rows - 1]  # of no child: any
        children = mx.where(rows > 0, index[drawn_as].astype(mx.int32), -1)
        return q[of_place[drawn_as[:, 0]]], children

    def _noise(self, shape: tuple[int, ...]) -> mx.array:
        """Gumbel noise for the nodes of the level that is drawn next."""
        key = self.sampling.key(self.position + len(self.levels), self.DRAFT)
        return mx.random.gumbel(shape, key=key)


def _or_other(tokens: mx.array, kept: mx.array, left: mx.array, noise: mx.array) -> mx.array:
    """Tokens (R,) of the children kept; where none was, one drawn from ``left`` (R, V)."""
    other = mx.argmax(mx.log(left) + noise, axis=-1)
    return mx.where(kept < 0, other.astype(mx.int32), tokens)


def try_in_turn(
    p: mx.array, q: mx.array, ids: mx.array | None, children: mx.array, coins: mx.array
) -> tuple[mx.array, mx.array]:
    """Try each row's children: returns the one kept, (R,), -1 for none, and the rest of p, (R, V).

    p (R, V) are the target's probabilities after the rows, q (R, Vd) those that the children were
    drawn from, over the tokens ``ids`` (Vd,) (None: all of the target's). ``children`` (R, n) are
    indices into q, as they were drawn without replacement, -1 where there is none; coins (R, n)
    are uniform below 1.

    A child x is kept with probability min(1, p(x) / q(x)). Else p becomes max(0, p - q) and q
    loses x, both normalized, for the next child: EAGLE (arXiv:2401.15077, appendix A.2) and
    SpecInfer (arXiv:2305.09781, algorithm 2), which draws with replacement. With one child that
    is Leviathan et al. 2023, arXiv:2211.17192, algorithm 1. What is drawn from is not normalized.
    """
    inside = p if ids is None else p[:, ids]
    # What cannot be drafted loses nothing: only its sum matters until the end.
    outside = mx.maximum(p.sum(axis=1, keepdims=True) - inside.sum(axis=1, keepdims=True), 0.0)
    index = mx.arange(q.shape[1])
    rest = inside
    kept = mx.full((p.shape[0], 1), -1)
    for i in range(children.shape[1]):
        child = children[:, i : i + 1]
        there = mx.maximum(child, 0)
        # Not p but q is scaled, by the sum of what is left of p.
        q_of_rest = q * (rest.sum(axis=1, keepdims=True) + outside)
        p_child = mx.take_along_axis(rest, there, axis=1)
        q_child = mx.take_along_axis(q_of_rest, there, axis=1)
        # A child that could not be drawn, as fewer were left, is no child.
        is_one = (child >= 0) & (q_child > 0)
        is_kept = is_one & (coins[:, i : i + 1] * q_child < p_child)
        kept = mx.where((kept < 0) & is_kept, i, kept)
        rest = mx.where(is_one, mx.maximum(rest - q_of_rest, 0.0), rest)
        q = mx.where(index == child, 0.0, q)
        q = q / mx.maximum(q.sum(axis=1, keepdims=True), TINY)
    left = rest if ids is None else p.at[:, ids].add(rest - inside)
    # Where rounding leaves nothing, p itself.
    return kept[:, 0], mx.where(left.sum(axis=1, keepdims=True) > 0, left, p)
