"""Draft trees, as arrays: who descends from whom, which branch was kept, how trees grow.

Pure arithmetic on arrays; knows neither model nor cache. A tree of k draft tokens comes with
``parents`` (k,): the window row that token i continues, where row 0 is the root and row i + 1
is token i, so ``parents[i] <= i``. A chain has parents [0, 1, 2, ...].
"""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class TreeShape:
    """How a draft tree grows: ``WIDTHxDEPTH:NODES``, as in EAGLE-2 (arXiv:2406.16858, 4.1).

    Every level keeps the ``width`` most likely paths so far, each of which gets ``width``
    children; of all candidates the ``nodes`` most likely are verified. ``depth`` is the number
    of levels, so the longest run that can be kept.
    """

    width: int
    depth: int
    nodes: int

    @classmethod
    def parse(cls, text: str) -> "TreeShape":
        """Read ``WIDTHxDEPTH:NODES``; raise ValueError for anything else."""
        try:
            shape, nodes = text.split(":")
            width, depth = shape.split("x")
            tree = cls(int(width), int(depth), int(nodes))
        except ValueError as err:
            raise ValueError(
                f"the tree is {text!r}: give WIDTHxDEPTH:NODES, such as 4x5:16."
            ) from err
        most = tree.width + (tree.depth - 1) * tree.width**2
        if tree.width < 1 or tree.depth < 1 or not tree.depth <= tree.nodes <= most:
            raise ValueError(
                f"the tree {text} is impossible: width and depth must be 1 or more, and nodes "
                f"between the depth and {most}, the number of candidates."
            )
        return tree

    def at_most(self, depth: int) -> "TreeShape":
        """The same tree with no more levels than ``depth``, and no more nodes than fit."""
        depth = min(depth, self.depth)
        most = self.width + (depth - 1) * self.width**2
        return TreeShape(self.width, depth, min(self.nodes, most))


def ancestors(parents: mx.array, depth: int) -> mx.array:
    """Whether row a lies on the path to row r, itself included: parents (k,) -> (k + 1, k + 1).

    ``depth`` is the greatest depth in the tree. Row r of the result belongs to window row r:
    parents [0, 0, 2] -> [[1,0,0,0], [1,1,0,0], [1,0,1,0], [1,0,1,1]].
    """
    size = parents.shape[0] + 1
    own = mx.eye(size, dtype=mx.bool_)
    up = mx.concatenate([mx.zeros((1,), parents.dtype), parents])
    reach = own
    for _ in range(depth):
        reach = own | reach[up]
    return reach


def kept_path(keep: mx.array, reach: mx.array) -> tuple[mx.array, mx.array]:
    """The kept branch: keep (k,) tokens, reach (R, R) -> (rows (R,), number kept ()).

    Rows of the branch come first, root before leaf; the others follow. At most one child of
    a row is kept, since siblings are different tokens, so the kept rows form one branch.
    """
    size = reach.shape[0]
    lost = mx.concatenate([mx.zeros((1,), mx.bool_), ~keep])
    on_branch = ~mx.any(reach & lost[None], axis=1)
    index = mx.arange(size)
    rows = mx.argsort(mx.where(on_branch, index, size + index))
    return rows, on_branch.sum() - 1


def top_k(scores: mx.array, k: int) -> mx.array:
    """Indices of the k greatest of scores (..., n), greatest first, ties by lower index."""
    return mx.argsort(-scores, axis=-1)[..., :k]


def rerank(
    scores: mx.array, origins: mx.array, nodes: int
) -> tuple[mx.array, mx.array]:
    """The ``nodes`` best candidates and their window parents (EAGLE-2, section 4.2).

    scores (c,) are cumulative log-probabilities, origins (c,) the candidate each one
    continues, -1 for the root; a candidate comes after its origin. Returns the chosen
    candidates in that order, (nodes,), and ``parents`` (nodes,). A child never scores above
    its origin and ties go to the lower index, so with every chosen candidate its origin is chosen.
    """
    chosen = mx.sort(top_k(scores, nodes))
    origin = origins[chosen]
    # The position of the origin among the chosen: how many of them come before it.
    position = (chosen[None] < origin[:, None]).sum(axis=1)
    return chosen, mx.where(origin < 0, 0, position + 1).astype(mx.int32)
