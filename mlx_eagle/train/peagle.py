"""Training of P-EAGLE heads, which draft all tokens in one pass (arXiv:2602.01469).

An element (a, d) is depth d behind slot a: at depth 0 it has the token and the target's features,
later a mask for both. It sees the slots up to a at depth 0, and (a, 1) ... (a, d); it is compared
with the target's distribution of slot a + d. Elements are dropped at random, as in the trainers of
speculators and SpecForge: only what is behind a kept one can be kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters.target_parts import find_embedding
from . import eagle3
from .batches import TokenBatch
from .chains import ChainTargets, chain_targets
from .chunks import Arrays
from .data import Examples
from .losses import TINY, compared, mixed_losses, picked
from .settings import TrainSettings
from .student import Student
from .unroll import unroll_masked


def make_student(
    settings: TrainSettings,
    student: Student | None,
    model: nn.Module,
    config: dict[str, Any],
    examples: Examples,
) -> Student:
    """Make a fresh head, or take that of --init; one that drafts step by step gets masked slots.

    Its embedding is its own, by default the target's table. Raises ValueError for heads that
    cannot draft in one pass.
    """
    student = eagle3.make_student(settings, student, model, config, examples)
    head = student.head
    c = head.config
    plain = c.fc_input == "features" and c.layer_input == "first" and c.embed_scale == 1
    if not plain or c.rope.get("type") == "dynamic":
        raise ValueError(
            f"{settings.init} cannot draft in one pass, for it is no EAGLE-3 head as speculators "
            "has them: name another with --init, or leave it out for a fresh one."
        )
    if c.mask_token_id is None:
        width = c.num_aux * c.target_hidden_size
        head.mask_hidden = mx.random.normal((width,), key=mx.random.key(settings.seed))
        hint = settings.depths
        c = replace(c, mask_token_id=settings.mask_token_id, speculative_tokens_hint=hint)
    if c.embed_source != "file":
        _, num_rows = find_embedding(model)
        table = student.embed(mx.arange(num_rows)).astype(mx.float32)
        head.embed_tokens = nn.Embedding(*table.shape)
        head.embed_tokens.weight = table
        c = replace(c, vocab_size=num_rows)
    head.config = replace(c, embed_source="file")
    mx.eval(head.parameters())
    return replace(student, embed=head.embed_tokens)


class ElementTargets(NamedTuple):
    """Elements of a batch of (B, T) slots, at D depths.

    ``rows`` (K,) and ``weights`` (K,) are the elements of depth 0, as in ``ChainTargets``. For
    each later depth, ``chosen`` (B, R_d) numbers its elements among those of the depth before (at
    depth 1, among all slots), and ``places`` (B, R_d) are the slots, numbered b * T + i, with
    whose distributions they are compared, -1 for those that do not count. ``counts`` (1,) is how
    many do, at all depths, averaged over all ranks; ``tokens`` (B, T) are the texts.
    """

    tokens: mx.array
    rows: mx.array
    weights: mx.array
    chosen: tuple[mx.array, ...]
    places: tuple[mx.array, ...]
    counts: mx.array


def kept_slots(batch: TokenBatch, settings: TrainSettings, epoch: int) -> list[list[np.ndarray]]:
    """Draw the slots a of each depth from 1, for each text: [text][depth - 1] (R,), ascending.

    They depend on the seed, the epoch and the number of the text alone. At depth d they are the
    counted slots less d, of which ``settings.share`` is kept.
    """
    drawn = []
    for row, number in enumerate(batch.numbers):
        dice = np.random.default_rng([settings.seed, epoch, number])
        (counted,) = batch.counts[row].nonzero()
        pool = counted
        own = []
        for depth in range(1, settings.num_steps):
            pool = pool[pool >= depth]
            size = max(0, int((len(counted) - depth) * settings.share(depth)))
            kept = np.sort(dice.permutation(pool)[:size])
            own.append(kept - depth)
            pool = np.intersect1d(kept + 1, counted)
        drawn.append(own)
    return drawn


class PEagleRecipe(eagle3.Eagle3Recipe):
    """A P-EAGLE head, whose elements are compared with the target's distributions."""

    def teach(self, batch: TokenBatch, epoch: int) -> tuple[mx.array, ElementTargets]:
        kept = kept_slots(batch, self.settings, epoch)
        return self.targets_of(batch, kept)

    def targets_of(
        self, batch: TokenBatch, kept: Sequence[Sequence[np.ndarray]]
    ) -> tuple[mx.array, ElementTargets]:
        """Return features and targets of these slots, by text and depth from 1."""
        features = self.teacher.read(batch)
        size, length = batch.tokens.shape
        rows = self.counted(batch, features)
        first = chain_targets(rows, rows, (size, length), 1)
        counts = np.isin(np.arange(size * length), rows)
        chosen = []
        places = []
        before = [np.arange(length)] * size
        for depth in range(1, self.depth):
            own = [text[depth - 1] for text in kept]
            num = max(1, *map(len, own))
            index = np.zeros((size, num), np.int32)
            place = np.full((size, num), -1, np.int32)
            for text, slots in enumerate(own):
                index[text, : len(slots)] = np.searchsorted(before[text], slots)
                later = text * length + slots + depth
                place[text, : len(slots)] = np.where(counts[later], later, -1)
            chosen.append(mx.array(index))
            places.append(mx.array(place))
            before = own
        num_elements = len(rows) + sum(int((x >= 0).sum()) for x in places)
        elements = (tuple(chosen), tuple(places), mx.array([float(num_elements)]))
        return features, ElementTargets(mx.array(batch.tokens), *first[:2], *elements)

    def context(self, tokens: np.ndarray, targets: ChainTargets) -> tuple[mx.array, Any]:
        every = mx.broadcast_to(mx.arange(tokens.shape[1]), tokens.shape)
        given = (mx.array(tokens), *targets[:2], (every,) * (self.depth - 1), (), targets.counts)
        return self.teacher.features(tokens), ElementTargets(*given)

    def steps(
        self, head: Any, embeddings: mx.array, features: mx.array, targets: Any
    ) -> Iterator[mx.array]:
        again = bool(self.settings.grad_checkpoint)
        given = features[..., : -self.teacher.width]
        return unroll_masked(head, targets.tokens, given, targets.chosen, again)

    def losses(
        self, head: Any, embeddings: mx.array, features: mx.array, targets: Any
    ) -> mx.array:
        states = iter(self.steps(head, embeddings, features, targets))
        (first,), (weights,) = picked([next(states)], targets.rows, targets.weights)
        hidden = [first, *(found.reshape(-1, found.shape[-1]) for found in states)]
        flat = [targets.rows, *(x.reshape(-1) for x in targets.places)]
        places = mx.maximum(mx.concatenate(flat), 0) + 1

        def compare(begin: int, logits: mx.array) -> Arrays:
            final = self.teacher.final(features, places[begin : begin + logits.shape[1]])
            return [mixed_losses(self.terms, logits[0], self.teacher.probs(final))]

        project = partial(self.logits, head)
        joined = [mx.concatenate(hidden)]
        (found,) = compared(head, self.output_parts(), project, joined, compare)
        parts = mx.split(found, np.cumsum([len(x) for x in flat])[:-1].tolist())
        counting = [weights, *(x >= 0 for x in flat[1:])]
        sums = [(x * w).sum() for x, w in zip(parts, counting, strict=True)]
        return mx.stack(sums) / mx.maximum(targets.counts, TINY)
