"""The shapes of draft trees, and how trees grow from a draft model's probabilities.

A tree of k draft tokens comes with ``parents`` (k,): the row that token i continues,
where row 0 is the root and row i + 1 is token i, so ``parents[i] <= i``. A chain has parents
[0, 1, 2, ...].
"""

from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import mlx.core as mx

Branch = Callable[[mx.array, int], tuple[mx.array, mx.array]]
"""Children of nodes: logits (m, Vd) and n -> draft ids (m, n), and log-probabilities (m, n) that
each is kept, the likeliest first."""

Step = Callable[[mx.array, mx.array], mx.array]
"""One more level: draft ids (m,) after rows (m,) of the last level -> logits (m, Vd)."""


@dataclass(frozen=True)
class TreeNodes:
    """The nodes of a tree: draft ids (k,), and the ``parents`` (k,) that they continue.

    ``draw_index`` (k,) is the index of each node among all children that were asked for, level by
    level, node by node.
    """

    ids: mx.array
    parents: mx.array
    draw_index: mx.array


MAX_NODES = 1024  # of a static tree: they are verified in one pass
ONE_BLOCK = 2048  # scores that Metal sorts in one kernel
MOST_PICKS = 10  # one after the other, instead of sorting


class TreeShape(NamedTuple):
    """Limits of a dynamic tree: ``WIDTHxDEPTH:NODES``, as in EAGLE-2 (arXiv:2406.16858, 4.1).

    Every level keeps the ``width`` most likely paths so far, each of which gets ``width``
    children; of all candidates the ``nodes`` most likely are verified. ``depth`` is the number
    of levels, so the longest run that can be kept.
    """

    width: int
    depth: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.width}x{self.depth}:{self.nodes}"

    @classmethod
    def parse(cls, text: str) -> "TreeShape":
        """Read ``WIDTHxDEPTH:NODES``; raise ValueError for anything else."""
        try:
            shape, nodes = text.split(":")
            width, depth = shape.split("x")
            tree = cls(int(width), int(depth), int(nodes))
        except ValueError as err:
            raise ValueError(
                f"the tree is {text!r}: give WIDTHxDEPTH:NODES, such as 3x3:7, or a static tree: "
                "eagle1, root2:5 (two chains), or the children of each node, such as 3/2+1."
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

    def grow(self, logits: mx.array, step: Step, branch: Branch) -> TreeNodes:
        """The tree, from logits (1, Vd) after the root.

        ``step`` is called for every level but the last, with ``width`` nodes. The choice of
        children depends only on their probabilities: ``rejection.Reject`` needs that.
        """
        beam = mx.array([-1])
        reached = mx.zeros((1,))  # the root
        picked = []
        scores = []
        origins = []
        num_before = 0
        for level in range(self.depth):
            children, likely = branch(logits, self.width)
            here = reached[:, None] + likely
            picked.append(children.flatten())
            scores.append(here.flatten())
            origins.append(mx.repeat(beam, self.width).astype(mx.int32))
            if level == self.depth - 1:
                break
            mx.async_eval(scores[-1])  # the device goes on while the next level is built
            best = top_k(scores[-1], self.width)
            beam = num_before + best
            reached = scores[-1][best]
            num_before += len(scores[-1])
            logits = step(picked[-1][best], best // self.width)
        chosen, parents = rerank(mx.concatenate(scores), mx.concatenate(origins), self.nodes)
        return TreeNodes(mx.concatenate(picked)[chosen], parents, chosen)


@dataclass(frozen=True)
class StaticTree:
    """A tree of fixed shape, for any probabilities of the draft (EAGLE-1, arXiv:2401.15077).

    ``children[d][i]`` is the number of children of the i-th node of depth d, its likeliest
    continuations; a missing entry means none. Nodes of one depth are in the order of their
    parents, likeliest first: ((2,), (2, 1)) has the ranks 0, 1, 00, 01, 10.
    """

    children: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        num_parents = 1
        total = 0
        for depth, counts in enumerate(self.children):
            total += sum(counts)
            if not sum(counts) or min(counts) < 0 or len(counts) > num_parents:
                raise ValueError(
                    f"the tree says {'+'.join(map(str, counts))} of the children of its "
                    f"{num_parents} nodes of depth {depth}: give at most one number a node, and "
                    "one child or more."
                )
            if total > MAX_NODES:
                raise ValueError(f"the tree has more than {MAX_NODES} nodes: give a smaller one.")
            num_parents = sum(counts)
        if not self.children:
            raise ValueError("the tree has no levels: give the root a child or more.")

    @classmethod
    def parse(cls, text: str) -> "StaticTree":
        """Read ``eagle1``, ``rootWIDTH:DEPTH`` or children by level; ValueError for anything else.

        Levels are separated by slashes, the nodes of a level by plus signs: 2/2+1 is the tree
        of the example above. rootW:D is W chains of D tokens side by side.
        """
        if text == "eagle1":
            return EAGLE1
        try:
            if text.startswith("root"):
                width, depth = map(int, text.removeprefix("root").split(":"))
                most = min(depth, MAX_NODES + 1)
                levels = ((width,), *[(1,) * min(width, MAX_NODES)] * (most - 1))[:most]
            else:
                levels = tuple(tuple(map(int, level.split("+"))) for level in text.split("/"))
        except ValueError as err:
            raise ValueError(
                f"the tree is {text!r}: give eagle1, rootWIDTH:DEPTH such as root2:5, or the "
                "children of each node, such as 3/2+1."
            ) from err
        return cls(levels)

    @property
    def depth(self) -> int:
        return len(self.children)

    @cached_property
    def nodes(self) -> int:
        return sum(map(sum, self.children))

    @cached_property
    def width(self) -> int:
        """The greatest number of children of one node."""
        return max(map(max, self.children))

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The row of the verify pass that each node continues."""
        found: list[int] = []
        first = 0
        for counts in self.children:
            here = [first + i for i, count in enumerate(counts) for _ in range(count)]
            first = len(found) + 1
            found += here
        return tuple(found)

    def at_most(self, depth: int) -> "StaticTree":
        """The same tree without the levels below ``depth``."""
        return StaticTree(self.children[:depth])

    def grow(self, logits: mx.array, step: Step, branch: Branch) -> TreeNodes:
        """See ``TreeShape.grow``; ``step`` is called with the nodes that have children."""
        picked = []
        draw_index = []
        num_asked = 0
        inner = [0]  # of this level's parents, those with children: rows of the logits
        for level, counts in enumerate(self.children):
            branches = [counts[i] for i in inner]
            most = max(branches)
            rows = [row for row, count in enumerate(branches) for _ in range(count)]
            ranks = [rank for count in branches for rank in range(count)]
            best, _ = branch(logits, most)
            picked.append(best[mx.array(rows), mx.array(ranks)])
            draw_index += [
                num_asked + row * most + rank for row, rank in zip(rows, ranks, strict=True)
            ]
            num_asked += len(branches) * most
            if level == self.depth - 1:
                break
            mx.async_eval(picked[-1])  # the device goes on while the next level is built
            inner = [i for i, count in enumerate(self.children[level + 1]) if count]
            logits = step(picked[-1][mx.array(inner)], mx.array([rows[i] for i in inner]))
        parents = mx.array(self.parents, dtype=mx.int32)
        return TreeNodes(mx.concatenate(picked), parents, mx.array(draw_index))


EAGLE1 = StaticTree(((4,), (3, 2, 2, 1), (3, 2, 2, 1), (3,), (2,)))
"""The tree of EAGLE-1, 25 nodes: ``mc_sim_7b_63`` in eagle/model/choices.py of SafeAILab/EAGLE."""

Tree = TreeShape | StaticTree


def check_tree_width(shape: Tree, num_tokens: int) -> None:
    """Raise ValueError if a node has more children than there are tokens to draft."""
    if shape.width > num_tokens:
        raise ValueError(
            f"the tree gives a node {shape.width} children, but the head drafts only "
            f"{num_tokens} different tokens: give a narrower tree."
        )


def parse_tree(text: str) -> Tree:
    """Read a tree as ``--tree`` takes it: ``TreeShape.parse`` and ``StaticTree.parse``."""
    is_static = text.startswith(("root", "eagle")) or (text and set(text) <= set("0123456789+/"))
    return StaticTree.parse(text) if is_static else TreeShape.parse(text)


def top_k(scores: mx.array, k: int) -> mx.array:
    """Indices of the k greatest of scores (..., n), greatest first, ties by lower index.

    Scores are finite. A few of a vocabulary are picked one after the other: to sort more than one
    block Metal takes ten kernels or more, and a CPU takes three to ten times as long.
    """
    size = scores.shape[-1]
    if k > MOST_PICKS or (k > 1 and size <= ONE_BLOCK):
        return mx.argsort(-scores, axis=-1)[..., :k]
    picked = [mx.argmax(scores, axis=-1, keepdims=True)]
    index = mx.arange(size, dtype=mx.uint32)  # as argmax gives it: nothing to convert
    while len(picked) < k:
        scores = mx.where(index == picked[-1], -mx.inf, scores)
        picked.append(mx.argmax(scores, axis=-1, keepdims=True))
    return mx.concatenate(picked, axis=-1)


def rerank(scores: mx.array, origins: mx.array, nodes: int) -> tuple[mx.array, mx.array]:
    """The ``nodes`` best candidates and the rows they continue (EAGLE-2, section 4.2).

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


class DraftShape(NamedTuple):
    """The shape of a draft: a chain of ``size`` tokens, a tree of ``size`` levels, or a copy.

    ``copy`` tokens are copied from the text instead of drafted. With neither, the round is a
    plain step.
    """

    size: int
    tree: Tree | None = None
    copy: int = 0

    def __str__(self) -> str:
        if self.copy:
            return f"copies of {self.copy}"
        return str(self.size) if self.tree is None else str(self.tree)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted or copied."""
        return self.size == 0 and self.copy == 0

    @property
    def num_levels(self) -> int:
        """The greatest number of tokens that can be kept."""
        return max(self.size, self.copy)

    def at_most(self, num_levels: int) -> "DraftShape":
        """The same shape with at most ``num_levels`` levels; 0 or less makes a plain step."""
        most = max(0, num_levels)
        return self._replace(size=min(self.size, most), copy=min(self.copy, most))

    @property
    def num_rows(self) -> int:
        """Rows of the verify pass."""
        return 1 + self.copy + (self.size if self.tree is None else self.tree.nodes)

    @property
    def width(self) -> int:
        """The greatest number of children of a node."""
        return 1 if self.tree is None else self.tree.width


PLAIN = DraftShape(0)
CHAINS = tuple(DraftShape(size) for size in range(1, 8))
LONG_CHAINS = tuple(DraftShape(size) for size in (9, 11, 13, 15))  # of drafters of whole blocks
# With the root they fill what kernels do at once: passes of 4, 8, 16 and 32 rows.
_TREES = map(TreeShape.parse, ("2x2:3", "3x3:7", "4x5:15", "6x5:31"))
TREES = tuple(DraftShape(tree.depth, tree) for tree in _TREES)
# Likewise; a copy costs no forward of a drafter.
COPIES = tuple(DraftShape(0, copy=size) for size in (3, 7, 15, 31))
MOST_COPIED = COPIES[-1].copy

LEAST_MATCHES = (1, 2, 3, 5, 9, 17)
"""Least number of matching tokens in each class for which a length is chosen ahead."""


NO_PRICES: Mapping[int, float] = MappingProxyType({})


class DraftPlan(NamedTuple):
    """Shapes chosen before the text that they follow is known.

    ``shape`` is for a text without a match, ``by_match[i]`` for a match of ``LEAST_MATCHES[i]``
    tokens or more, ``by_answer[i]`` for one in another answer. ``prices`` are the tokens that a
    round of each shorter length must emit to be worth its time; {}: do not cut the draft.
    """

    shape: DraftShape
    by_match: tuple[DraftShape, ...] = ()
    by_answer: tuple[DraftShape, ...] = ()
    prices: Mapping[int, float] = NO_PRICES

    def behind(self, match_length: int, is_answer: bool = False) -> DraftShape:
        """The shape for a text whose end matches that many tokens elsewhere."""
        shapes = self.by_answer if is_answer else self.by_match
        if match_length == 0 or not shapes:
            return self.shape
        return shapes[bisect(LEAST_MATCHES, match_length) - 1]


def chains_for(longest: int | None) -> tuple[DraftShape, ...]:
    """The chains to choose from for a drafter of at most ``longest`` tokens; None: no limit."""
    if longest is None:
        return CHAINS
    return tuple(shape for shape in CHAINS + LONG_CHAINS if shape.size <= longest)
