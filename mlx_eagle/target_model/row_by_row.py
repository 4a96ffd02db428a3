"""Verify passes row by row: each row is a plain step, in one graph with the others.

A pass over several rows takes other kernels than one over a single row, and rounds otherwise. Here
the model is called with one row after the other, on the caches as plain decoding has them, so that
all of a row goes through what a plain step goes through: products, attention, experts, norms and
recurrent updates. Nothing is computed between the calls. MLX runs their graph breadth first, so
that the rows go through each weight matrix one behind the other, and the second finds it in the
processor's cache; for more than two rows only if the environment lets the graph be so wide, see
``prepare_device``.

A row of a tree sees its ancestors only, as if they had been all of the text: the caches are put
back to where its parent left them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache

from .rollback import RULES, Checkpoint

State = dict[str, Any]
"""Attributes of a cache."""


class StepRollback:
    """Restores a cache as it was after a row: all of its entries, not only the last ones.

    A full ring has lost what a row has overwritten, and a state has no rows to drop.
    """

    def __init__(self, cache: Any, num_rows: int | None = None):
        self.cache = cache
        self._states = [_copied(vars(cache))]

    def keep_row(self) -> None:
        """Save the cache after one more row of the pass."""
        self._states.append(_copied(vars(self.cache)))

    def rollback(self, num_rows: int) -> None:
        self.put(self._states[num_rows], num_rows)

    def take(self, rows: list[int]) -> State:
        """The cache as it was after the last of these rows of a tree, a branch from the root."""
        return self._states[rows[-1] + 1]

    def put(self, taken: State, num_rows: int) -> None:
        """Replace the cache's content by ``taken``."""
        vars(self.cache).update(_copied(taken))


def _copied(state: State) -> State:
    """A copy with new handles of arrays, since later rows are written into the cache's own."""
    copied: State = tree_map(lambda v: v[...] if isinstance(v, mx.array) else v, state)
    return copied


APPENDED = (KVCache, QuantizedKVCache, ConcatenateKVCache)
"""Caches to which a row only adds entries: chains are cut from them, not restored."""


def checkpoint_of_rows(caches: list[Any], is_tree: bool) -> Checkpoint:
    """A checkpoint before ``run_rows``; goes back to any of its rows without another pass."""
    cut = () if is_tree else APPENDED
    rules = {each: rule if each in cut else StepRollback for each, rule in RULES.items()}
    return Checkpoint(caches, rules=rules)


def run_rows(
    run: Callable[[mx.array], tuple[mx.array, mx.array | None]],
    tokens: mx.array,
    parents: Sequence[int] | None,
    checkpoint: Checkpoint,
) -> tuple[mx.array, mx.array | None]:
    """Logits (R, V) and features (R, F), if any, of tokens (R,), with ``run`` for each token.

    Token i + 1 of a tree continues row ``parents[i]``; None: a chain.
    """
    entries = [entry for entry in checkpoint.entries if isinstance(entry, StepRollback)]
    made = []
    for row in range(tokens.shape[0]):
        if parents is not None and row > 0:
            for entry in entries:
                entry.rollback(parents[row - 1] + 1)
        made.append(run(tokens[row : row + 1]))
        for entry in entries:
            entry.keep_row()
    features = [of_row for _, of_row in made if of_row is not None]
    logits = mx.concatenate([of_row for of_row, _ in made])
    return logits, mx.concatenate(features) if features else None
