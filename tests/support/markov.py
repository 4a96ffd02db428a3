"""A Markov chain in place of a language model, so that exact probabilities are a table."""

from copy import copy

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.sample_utils import make_sampler

from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.base import Draft, Drafter
from mlx_eagle.drafters.tree import StaticTree, parse_tree

VOCAB = 5
DRAFT_IDS = [0, 2, 3]  # 1 and 4 cannot be drafted
START = 2
QUANTILE_24 = 51.2  # chi-square, 24 degrees of freedom, 0.999


class MarkovModel(nn.Module):
    """Logits that depend on the last token alone; no layers, no cache."""

    def __init__(self, seed: int, size: int = VOCAB):
        super().__init__()
        self.table = 1.2 * mx.random.normal((VOCAB, size), key=mx.random.key(seed))
        self.layers = []

    def make_cache(self) -> list:
        return []

    def __call__(self, tokens: mx.array, cache: list | None = None) -> mx.array:
        return self.table[tokens]

    def probabilities(self, temp: float = 1.0) -> list[list[float]]:
        return mx.softmax(self.table / temp, axis=-1).tolist()


class MarkovDrafter(Drafter):
    """Drafts from a Markov chain of its own, over part of the vocabulary."""

    taps = ()
    supports_trees = True

    def __init__(self, seed: int):
        self.model = MarkovModel(seed, len(DRAFT_IDS))
        self.ids = mx.array(DRAFT_IDS)
        self.cache, self.num_forwards, self.last = [], 0, None

    def begin(self, cache=None):
        return copy(self)

    def make_cache(self):
        return []

    def extend(self, tokens, features, last=None):
        self.last = tokens[-1:] if last is None else tokens[last.reshape(1)]

    def propose(self, size, pick):
        tokens = [self.last]
        for _ in range(size):
            self.num_forwards += 1
            tokens.append(self.ids[pick(self.model(tokens[-1]), self.ids)].astype(mx.int32))
        return Draft(mx.concatenate(tokens[1:]))

    def check_tree(self, shape):
        pass

    def propose_tree(self, shape, pick):
        def step(picked, rows):
            self.num_forwards += 1
            return self.model(self.ids[picked])

        def branch(logits, count):
            return pick(logits, self.ids, count)

        grown = shape.grow(self.model(self.last), step, branch)
        tokens = self.ids[grown.ids].astype(mx.int32)
        form = shape.parents if isinstance(shape, StaticTree) else None
        return Draft(tokens, grown.parents, shape.depth, form, grown.draw_index)


TARGET, DRAFTER = MarkovModel(1), MarkovDrafter(2)


def run(sampler, acceptance, num_tokens, k=2, tree=None):
    """The tokens of one generation, and its counts; ``tree`` as ``--tree`` takes it."""
    stats = Stats()
    steps = speculative_generate_step(
        mx.array([START]),
        TARGET,
        DRAFTER,
        num_draft_tokens=k,
        tree=None if tree is None else parse_tree(tree),
        max_tokens=num_tokens,
        sampler=sampler,
        acceptance=acceptance,
        stats=stats,
    )
    return [token for token, _, _ in steps], stats


def pair_chi_square(acceptance, num_runs=1200, temp=1.0, tree=None):
    """Chi-square of (second, third token): both come out of a drafted round."""
    p = TARGET.probabilities(temp)
    exact = [
        sum(p[START][a] * p[a][b] * p[b][c] for a in range(VOCAB))
        for b in range(VOCAB)
        for c in range(VOCAB)
    ]
    counts, kept, drafted = [0] * VOCAB**2, 0, 0
    mx.random.seed(5)
    for seed in range(num_runs):
        sampler = make_sampler(temp) if acceptance == "match" else Sampling(temp, seed=seed)
        tokens, stats = run(sampler, acceptance, 4, tree=tree)
        counts[tokens[1] * VOCAB + tokens[2]] += 1
        kept += stats.num_accepted
        drafted += stats.num_drafted
    statistic = sum(
        (c - num_runs * e) ** 2 / (num_runs * e) for c, e in zip(counts, exact, strict=True)
    )
    return statistic, kept / drafted
