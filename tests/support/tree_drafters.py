"""Drafters whose trees hold the true continuation where a script says."""

import mlx.core as mx
from helpers import VOCAB, ScriptedDrafter

from mlx_eagle.drafters.base import Draft, PickChildren
from mlx_eagle.drafters.tree import StaticTree, TreeShape

TREE_SCRIPTS = {
    "all": lambda r, depth: depth,
    "none": lambda r, depth: 0,
    "every length": lambda r, depth: r % (depth + 1),
}


class ScriptedTreeDrafter(ScriptedDrafter):
    """A tree in which the true continuation runs on from a branch the script picks.

    Level d holds ``width`` tokens that all continue one node of level d - 1, the true one
    as long as the script says; at which place among its siblings it stands changes by round.
    """

    supports_trees = True

    def check_tree(self, shape: TreeShape) -> None:
        pass

    def propose_tree(self, shape: TreeShape, pick: PickChildren) -> Draft:
        true = self.propose(shape.depth).tokens.tolist()
        right = self.script(self.num_rounds - 1, shape.depth)
        place = self.num_rounds % shape.width
        tokens, parents, parent = [], [], 0
        for level in range(shape.depth):
            wrong = [(true[level] + 2 + i) % VOCAB for i in range(shape.width)]
            wrong[place] = true[level] if level < right else (true[level] + 1) % VOCAB
            parents += [parent] * shape.width
            parent = len(tokens) + place + 1
            tokens += wrong
        return Draft(
            mx.array(tokens, dtype=mx.int32), mx.array(parents, dtype=mx.int32), shape.depth
        )


class ScriptedStaticDrafter(ScriptedDrafter):
    """The true continuation runs down to one of the deepest nodes, another one every round."""

    def check_tree(self, tree: StaticTree) -> None:
        pass

    def propose_tree(self, tree: StaticTree, pick: PickChildren) -> Draft:
        true = self.propose(tree.depth).tokens.tolist()
        right = self.script(self.num_rounds - 1, tree.depth)
        depths = [0]
        for parent in tree.parents:
            depths.append(depths[parent] + 1)
        deepest = [row for row, depth in enumerate(depths) if depth == tree.depth]
        row, branch = deepest[self.num_rounds % len(deepest)], set()
        while row:
            branch.add(row)
            row = tree.parents[row - 1]
        tokens = []
        for row in range(1, tree.nodes + 1):
            level = depths[row] - 1
            away = 2 + row if row not in branch else int(level >= right)
            tokens.append((true[level] + away) % VOCAB)
        parents = mx.array(tree.parents, dtype=mx.int32)
        return Draft(mx.array(tokens, dtype=mx.int32), parents, tree.depth)
