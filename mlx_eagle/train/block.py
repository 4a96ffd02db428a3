"""Training of drafters of blocks: many blocks of a text at once, each behind an anchor of its own.

Chen et al. 2026, DFlash. A block sees the target's features of the tokens before its anchor, and
itself. The drafter's own layers compute it, and its own choices are evaluated.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.losses import cross_entropy

from ..drafters.dflash import BlockAttention, seen_by
from ..drafters.target_parts import find_embedding
from .batches import TokenBatch
from .chunks import (
    CHUNK_BYTES,
    Arrays,
    chunk_rows,
    in_chunks,
    run_step,
    with_weights,
)
from .given import Given
from .losses import TINY
from .recipe import GivenRecipe
from .settings import TrainSettings
from .student import Student
from .teacher import Teacher

KEPT = 0.5  # of D-PACE: the least that a position passes on
GAMMAS = ((8, 4.0), (10, 5.0), (16, 7.0))  # of decay, for blocks of up to so many slots
AT_ONCE = 64  # blocks of a text in an evaluation, at most
FROZEN = ("embed_tokens.", "lm_head.", "attention_sink_bias", "layer_scalar")
"""Tables, output matrices and scalars, which are not trained."""


class BlockTargets(NamedTuple):
    """Blocks of a batch: N of each of B texts, with D slots that draft.

    ``anchors`` (B, N) are positions of the tokens before. Of each slot (B, N, D) ``rows`` is the
    place of the token before, numbered b * T + i, ``before`` that token, ``labels`` what is to be
    drafted, by its number among the tokens that can be, ``asked`` 1 where it counts. ``counts``
    (1,) is how many do, averaged over all ranks.
    """

    anchors: mx.array
    rows: mx.array
    before: mx.array
    labels: mx.array
    asked: mx.array
    counts: mx.array


def anchors_of(batch: TokenBatch, num_anchors: int, seed: int, epoch: int) -> np.ndarray:
    """Draw the anchors of each text, (B, N) ascending, filled up with -1.

    They are tokens of the answer whose successor is one too, and depend on the seed, the epoch
    and the number of the text alone.
    """
    drawn = []
    for row, number in enumerate(batch.numbers):
        (pool,) = (batch.counts[row, :-1] & batch.counts[row, 1:]).nonzero()
        dice = np.random.default_rng([seed, epoch, number])
        chosen = dice.permutation(pool + 1)[:num_anchors]
        drawn.append(np.sort(chosen))
    most = max(1, *map(len, drawn))
    return np.stack([np.pad(own, (0, most - len(own)), constant_values=-1) for own in drawn])


class BlockRecipe(GivenRecipe):
    """A drafter of blocks; as here a DFlash head, whose slots know nothing of each other."""

    parts: tuple[str, ...] = ()
    """Parts of the head that ``compare`` uses."""
    spread: int = 1
    """Arrays that ``compare`` makes where cross-entropy makes one."""

    def __init__(self, settings: TrainSettings, student: Student, model: nn.Module, given: Given):
        super().__init__(settings, student, model, given)
        self.config = config = student.head.config
        num_tokens = find_embedding(model)[1]
        ids = student.ids if len(student.ids) < num_tokens else None
        self.teacher = Teacher(model, student.taps, ids)
        self.depth = config.longest_draft
        self.weights = mx.ones(1)
        self.drafter = student.drafter
        if config.lm_head_source == "file":  # unpacked, it is another module than was loaded
            self.drafter._project = student.head.lm_head
        self._mask = student.embed(mx.array([config.mask_token_id]))
        self._width = int(config.hidden_size)
        self._numbers = np.full(num_tokens, -1)  # of tokens, among those that are drafted
        self._numbers[np.array(student.ids)] = np.arange(len(student.ids))

    def compare(
        self, states: mx.array, before: mx.array, labels: mx.array, final: mx.array
    ) -> Arrays:
        """Compute losses (m, D), in float32, of slots with states (m, D, h), to be added up.

        ``before`` and ``labels`` (m, D) are as in ``BlockTargets``, ``final`` (m, D, h) the states
        that enter the target's output. D-PACE weighs by the first losses.
        """
        return [cross_entropy(self.drafter.logits(states).astype(mx.float32), labels)]

    def teach(self, batch: TokenBatch, epoch: int) -> tuple[mx.array, BlockTargets]:
        settings = self.settings
        drawn = anchors_of(batch, settings.anchors, settings.seed, epoch)
        return self.targets_of(batch, drawn)

    def targets_of(self, batch: TokenBatch, drawn: np.ndarray) -> tuple[mx.array, BlockTargets]:
        """Return features and targets of the blocks with these anchors (B, N), -1: none."""
        features = self.teacher.features(batch.tokens)
        size, length = batch.tokens.shape
        places = np.maximum(drawn, 0)[..., None] + np.arange(self.depth)
        inside = np.minimum(places, length - 2)
        texts = np.arange(size)[:, None, None]
        # Token j belongs to the answer where slot j - 1 counts.
        is_asked = batch.counts[texts, inside] & (places < length - 1) & (drawn[..., None] >= 0)
        asked = np.cumprod(is_asked, axis=-1).astype(np.float32)
        rows = texts * length + inside
        if self.settings.labels == "text":
            known = self._numbers[batch.tokens[texts, inside + 1]]
            asked *= np.cumprod(known >= 0, axis=-1)
            labels = np.maximum(known, 0)
        else:
            used, back = np.unique(rows, return_inverse=True)
            final = self.teacher.final(features, mx.array(used, mx.int32))
            labels = self.teacher.choices(final, self.teacher.output)[back].reshape(rows.shape)
        whole = (drawn, rows, batch.tokens[texts, inside], labels)
        counts = mx.array([float(asked.sum())])
        return features, BlockTargets(
            *(mx.array(part, mx.int32) for part in whole), mx.array(asked), counts
        )

    @property
    def _at_once(self) -> int:
        """Number of blocks whose logits are a chunk."""
        return max(1, chunk_rows(self.spread * len(self.student.ids)) // self.depth)

    def losses(
        self, head: Any, embeddings: mx.array, features: mx.array, targets: BlockTargets
    ) -> mx.array:
        states = self.states(head, embeddings, features, targets.anchors)
        slots = [x.reshape(-1, self.depth) for x in (targets.before, targets.labels, targets.rows)]

        def compare(begin: int, rows: Arrays) -> Arrays:
            before, labels, places = (x[begin : begin + len(rows[0])] for x in slots)
            return self.compare(rows[0], before, labels, self.teacher.final(features, places))

        found = with_weights(head, self.parts, compare, [states], self._at_once, again=False)
        asked = targets.asked.reshape(-1, self.depth)
        weights = [mx.stop_gradient(self._position_weights(each, asked)) for each in found]
        total = sum((w * each * asked).sum() for w, each in zip(weights, found, strict=True))
        divisor = {
            "rows": targets.counts[0],
            "weights": (weights[0] * asked).sum(),
            "texts": mx.array(float(len(targets.anchors))),
        }
        return (total / mx.maximum(divisor[str(self.settings.loss_divisor)], TINY))[None]

    def _position_weights(self, entropies: mx.array, asked: mx.array) -> mx.array:
        """Return the weights (M, D): of D-PACE, or those of an exponential decay."""
        if self.settings.position_weights == "decay":
            block = self.config.block_size
            usual = next((g for most, g in GAMMAS if block <= most), GAMMAS[-1][1])
            gamma = self.settings.gamma or usual
            return mx.broadcast_to(mx.exp(-mx.arange(self.depth) / gamma), asked.shape)
        passed = mx.where(asked > 0, (1 - KEPT) * mx.exp(-entropies) + KEPT, 1.0)
        reached = mx.cumprod(passed, axis=-1) * asked
        return mx.cumsum(reached, axis=-1, reverse=True)

    def states(
        self, head: Any, embeddings: mx.array, features: mx.array, anchors: mx.array
    ) -> mx.array:
        """Return the states (B * N, D, h) of the slots that draft, behind each anchor (B, N)."""
        block = self.config.block_size
        width = self._width
        places = mx.maximum(anchors, 0)
        taps = features[..., : -self.teacher.width]
        context = head.hidden_norm(head.fc(taps.astype(embeddings.dtype)))
        first = mx.take_along_axis(embeddings, places[..., None], axis=1).reshape(-1, 1, width)
        masks = mx.broadcast_to(self._mask.astype(first.dtype), (len(first), block - 1, width))
        x = mx.concatenate([first, masks], axis=1)
        for number, layer in enumerate(head.layers):

            def run(
                x: mx.array, context: mx.array, _: Any, own: Any = layer, number: int = number
            ) -> Arrays:
                return [own(x, lambda u: self._attend(own.self_attn, number, u, context, places))]

            x = run_step(layer, (), run, [x, context], [], self.settings.grad_checkpoint)[0]
        return head.norm(x[:, self.config.first_slot :])

    def _attend(
        self, a: BlockAttention, number: int, x: mx.array, context: mx.array, places: mx.array
    ) -> mx.array:
        """Attend from blocks x (B * N, S, h) to the context (B, T, h) and to themselves."""
        size, num = places.shape
        block = x.shape[1]
        length = context.shape[1]
        starts = places.reshape(-1)
        keys, values = (y[:, None, :, None] for y in a.keys_and_values(context, 0))
        shape = (size, num, a.num_kv_heads, -1, block, a.head_dim)
        own = (a.queries(x, starts) * a.scale, *a.keys_and_values(x, starts))
        # The blocks come first: they are what is cut into chunks.
        rows = [y.reshape(shape).swapaxes(0, 1) for y in own]
        sinks = a.get("attention_sink_bias")

        def attend(begin: int, rows: Arrays, shared: Arrays) -> Arrays:
            q, own_k, own_v = rows
            start = places[:, begin : begin + len(q)].T[..., None, None]
            before = mx.arange(length)
            seen = seen_by(start, block, before, self.config, number) & (before < start)
            inside = seen_by(start, block, start + mx.arange(block), self.config, number)
            masks = [mx.where(m, 0.0, -mx.inf)[:, :, None, None] for m in (seen, inside)]
            keys, values = (array[:, 0] for array in shared)
            scores = [
                q @ keys.swapaxes(-1, -2) + masks[0].astype(q.dtype),
                q @ own_k.swapaxes(-1, -2) + masks[1].astype(q.dtype),
            ]
            if sinks is not None:
                each = sinks.reshape(a.num_kv_heads, -1, 1, 1).astype(q.dtype)
                scores.append(mx.broadcast_to(each, (*q.shape[:-1], 1)))
            shares = mx.softmax(mx.concatenate(scores, -1), axis=-1, precise=True)
            weights = mx.split(shares, [length, length + block], -1)
            return [weights[0] @ values + weights[1] @ own_v]

        width = size * a.num_heads * block * (length + block)  # numbers of a block
        at_once = max(1, CHUNK_BYTES // (4 * width))
        out = in_chunks(attend, rows, [keys, values], at_once, 0, again=True)[0]
        out = out.swapaxes(0, 1).reshape(size * num, a.num_heads, block, a.head_dim)
        return a.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))

    def drafts(self, tokens: np.ndarray, rows: mx.array) -> np.ndarray:
        head = self.student.head
        features = self.teacher.features(tokens)
        embeddings = self.student.embed(mx.array(tokens))
        texts, anchors = np.divmod(np.array(rows), tokens.shape[1])
        anchors += 1
        found = np.zeros((self.depth, len(anchors)), np.int32)
        at_once = min(AT_ONCE, self._at_once)
        for text in np.unique(texts).tolist():
            (own,) = (texts == text).nonzero()
            part = slice(text, text + 1)
            for start in range(0, len(own), at_once):
                some = anchors[own[start : start + at_once]]
                asked = mx.array(some[None], mx.int32)
                states = self.states(head, embeddings[part], features[part], asked)
                first = mx.array(tokens[text, some])
                chosen = self.drafter.read(states, first, lambda x, _: mx.argmax(x, axis=-1))
                found[:, own[start : start + at_once]] = np.array(mx.stack(chosen))
        return found
