"""Rows of a draft tree as arrays: who sees whom, and which branch is kept."""

import mlx.core as mx


def each_itself(num_rows: int) -> mx.array:
    """Identity mask (R, R): true where row and column are the same."""
    index = mx.arange(num_rows)  # comparing takes fewer operations than ``mx.eye``
    return index[:, None] == index


def ancestors(parents: mx.array, depth: int) -> mx.array:
    """Whether row a lies on the path to row r, itself included: parents (k,) -> (k + 1, k + 1).

    ``depth`` is the greatest depth in the tree. Row 0 is the root, row i + 1 is token i:
    parents [0, 0, 2] -> [[1,0,0,0], [1,1,0,0], [1,0,1,0], [1,0,1,1]].
    """
    size = parents.shape[0] + 1
    own = each_itself(size)
    up = mx.concatenate([mx.zeros((1,), parents.dtype), parents])
    tree_mask = own
    for _ in range(depth):
        tree_mask = own | tree_mask[up]
    return tree_mask


def kept_path(keep: mx.array, tree_mask: mx.array) -> tuple[mx.array, mx.array]:
    """The kept branch: keep (k,) tokens, tree_mask (R, R) -> (rows (R,), number kept ()).

    Rows of the branch come first, root before leaf; the others follow. At most one child of
    a row is kept, since siblings are different tokens, so the kept rows form one branch.
    """
    size = tree_mask.shape[0]
    lost = mx.concatenate([mx.zeros((1,), mx.bool_), ~keep])
    on_branch = ~mx.any(tree_mask & lost[None], axis=1)
    index = mx.arange(size)
    rows = mx.argsort(mx.where(on_branch, index, size + index))
    return rows, on_branch.sum() - 1


def families(parents: mx.array, width: int) -> tuple[mx.array, mx.array]:
    """Rank of each token among its siblings, (k,), and the rows of each row's children.

    The children (k + 1, ``width``) are in the order of rows, 0 stands for none:
    parents [0, 0, 2], width 2 -> [0, 1, 0] and [[1, 2], [0, 0], [3, 0], [0, 0]].
    """
    index = mx.arange(parents.shape[0])
    is_sibling = parents[:, None] == parents
    ranks = (is_sibling & (index < index[:, None])).sum(axis=1).astype(mx.int32)
    children = mx.zeros((parents.shape[0] + 1, width), mx.int32)
    return ranks, children.at[parents, ranks].add(index.astype(mx.int32) + 1)
