"""Drafts of a round: the drafter's proposal, after tokens that a grammar forces."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..drafters.base import Draft, Drafter, empty_draft
from ..drafters.tree import DraftShape
from ..target_model.cache_view import CacheView
from .accept import Choice


@dataclass
class ForcedPicks:
    """Picks of a round whose first draft tokens are known; the drafter continues after them.

    A token outside the drafter's vocabulary is replaced by another for the drafter.
    """

    choice: Choice
    forced: Sequence[int]
    num_picked: int = 0

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        """See ``Choice.pick``."""
        self.num_picked += 1
        if self.num_picked > len(self.forced):
            return self.choice.pick(logits, ids)
        self.choice.skip()
        return index_in(ids, mx.array([self.forced[self.num_picked - 1]]))


def index_in(ids: mx.array | None, tokens: mx.array) -> mx.array:
    """Index of tokens (n,) in ``ids`` (Vd,); 0 for tokens that are not there."""
    return tokens if ids is None else mx.argmax(ids == tokens[:, None], axis=-1)


def propose(
    drafter: Drafter, caches: CacheView, shape: DraftShape, choice: Choice, forced: list[int]
) -> Draft:
    """A draft of that shape after the root, or a chain that begins with ``forced`` tokens.

    ``caches`` are the target's.
    """
    if shape.size <= len(forced):
        return Draft(mx.array(forced, mx.int32)) if forced else empty_draft()
    drafter.see_target(caches)
    if forced:
        behind = drafter.propose(shape.size, ForcedPicks(choice, forced).pick).tokens
        return Draft(mx.concatenate([mx.array(forced, mx.int32), behind[len(forced) :]]))
    if shape.tree is None:
        return drafter.propose(shape.size, choice.pick)
    return drafter.propose_tree(shape.tree.at_most(shape.size), choice.pick_children)
