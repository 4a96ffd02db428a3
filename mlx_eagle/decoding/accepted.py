"""How much of what was drafted was accepted lately, and what a draft brings by that."""

from collections.abc import Iterable, Sequence

from .costs import DraftShape

PRIOR = 1 / 3  # acceptance of first drafts, where no text has shown any
PRIOR_WEIGHT = 8.0  # of what is expected of a text before it is seen, in rounds
MEMORY = 0.98  # what a round's evidence weighs, one round later


def expected_tokens(alphas: Sequence[float], size: int) -> float:
    """E of a chain of ``size`` drafts: 1 + a1 + a1 a2 + ...; the last alpha is repeated.

    [0.8, 0.5], 3 -> 1 + 0.8 + 0.4 + 0.2
    """
    total, chance = 1.0, 1.0
    for i in range(size):
        chance *= alphas[min(i, len(alphas) - 1)] if alphas else 0.0
        total += chance
    return total


class Accepted:
    """Acceptance in chains by position, given that the position before was accepted; of trees as
    tokens per round. Both fade, so that they follow the text.
    """

    def __init__(self, shapes: Iterable[DraftShape], prior: float = PRIOR):
        """``prior``: the acceptance that is expected of first drafts."""
        self._prior = prior
        shapes = list(shapes)
        longest = max((shape.size for shape in shapes if shape.tree is None), default=0)
        self._accepted = [0.0] * longest
        self._reached = [0.0] * longest
        # Tokens emitted in so many rounds.
        self._of_trees = {shape: (0.0, 0.0) for shape in shapes if shape.tree is not None}

    @property
    def alphas(self) -> list[float]:
        """Acceptance by position, given that the position before was accepted.

        What is little known leans on the position before: with EAGLE-3 they differ little.
        """
        alphas, before = [], self._prior
        for accepted, reached in zip(self._accepted, self._reached):
            before = (accepted + PRIOR_WEIGHT * before) / (reached + PRIOR_WEIGHT)
            alphas.append(before)
        return alphas

    def observe(self, shape: DraftShape, num_accepted: int) -> None:
        """So much of a draft of that shape was accepted."""
        if shape.tree is None:
            for i in range(min(num_accepted + 1, shape.size)):
                self._reached[i] += 1
                self._accepted[i] += i < num_accepted
        elif shape in self._of_trees:
            tokens, rounds = self._of_trees[shape]
            self._of_trees[shape] = tokens + num_accepted + 1, rounds + 1

    def fade(self, factor: float) -> None:
        """Let all that was observed so far weigh less."""
        self._accepted = [factor * n for n in self._accepted]
        self._reached = [factor * n for n in self._reached]
        self._of_trees = {
            shape: (factor * tokens, factor * rounds)
            for shape, (tokens, rounds) in self._of_trees.items()
        }

    def expected(self, shape: DraftShape, alphas: Sequence[float]) -> float:
        """Tokens that a round of ``shape`` emits at these acceptance rates of chains."""
        if shape.tree is None:
            return expected_tokens(alphas, shape.size)
        # Before a shape was tried: some child of w is right more often than the first one.
        power = 1 + (shape.tree.width - 1) / 4
        expected = expected_tokens([1 - (1 - a) ** power for a in alphas], shape.size)
        tokens, rounds = self._of_trees[shape]
        return (tokens + PRIOR_WEIGHT * expected) / (rounds + PRIOR_WEIGHT)
