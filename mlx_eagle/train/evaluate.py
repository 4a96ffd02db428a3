"""How many drafts would be accepted on texts that are known, without generating any.

Chains of drafts are walked along texts that the target wrote.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..drafters.head import Eagle3Head
from .examples import Example, make_batch
from .teacher import Teacher
from .unroll import unroll


@dataclass(frozen=True)
class Evaluation:
    """``match`` (D,): the share of slots whose draft at that depth is the text's own token,
    the tokens before it given. ``lengths`` (D,): for drafts of 1 ... D tokens, the mean
    acceptance length (tau), the target's own token included, that decoding these texts would
    have. On the target's greedy texts that is what greedy decoding has.
    """

    match: tuple[float, ...]
    lengths: tuple[float, ...]
    num_slots: int
    num_sequences: int


def rounds_of(hits: np.ndarray, num_drafts: int) -> int:
    """Rounds that decoding a text with drafts of ``num_drafts`` tokens would take.

    ``hits`` (D, S): whether the draft of slot s at depth d is the text's token. A round at
    slot s accepts the hits up to the first miss, and the next one starts behind them and the
    target's own token.

    [[1, 0, 1, 1], [1, 0, 0, 0]], drafts of 2: rounds at slots 0 (two hits) and 3 (one): 2
    """
    kept = np.cumprod(hits[:num_drafts], axis=0).sum(axis=0)
    slot = rounds = 0
    while slot < len(kept):
        slot += int(kept[slot]) + 1
        rounds += 1
    return rounds


class Evaluator:
    """Evaluates heads on the same texts: ``batch_size`` at once, drafts of up to ``depth``."""

    def __init__(
        self, teacher: Teacher, examples: Sequence[Example], batch_size: int, depth: int = 7
    ):
        self._teacher = teacher
        # Of a like length side by side; a text needs a slot that drafts.
        usable = [x for x in examples if x.num_answer > 1]
        self._examples = sorted(usable, key=lambda example: len(example.tokens))
        self._batch_size = batch_size
        self._depth = depth

    def __call__(
        self,
        head: Eagle3Head,
        embed: Callable[[mx.array], mx.array],
        ids: mx.array,
    ) -> Evaluation:
        """Evaluate ``head``; ``ids`` (Vd,) are the target ids of what it drafts."""
        hits: list[np.ndarray] = []
        for start in range(0, len(self._examples), self._batch_size):
            hits += self._hits(head, embed, ids, self._examples[start : start + self._batch_size])
        depths = range(1, self._depth + 1)
        # A slot near the end has no token that its later drafts could be compared with.
        shares = [
            np.concatenate([text[depth - 1, : max(0, text.shape[1] - depth + 1)] for text in hits])
            for depth in depths
        ]
        match = tuple(float(share.mean()) if share.size else 0.0 for share in shares)
        # A slot emits the one token that its first draft is of, whichever round it falls to.
        num_slots = sum(text.shape[1] for text in hits)
        lengths = [num_slots / sum(rounds_of(text, depth) for text in hits) for depth in depths]
        return Evaluation(match, tuple(lengths), num_slots, len(hits))

    def _hits(
        self,
        head: Eagle3Head,
        embed: Callable[[mx.array], mx.array],
        ids: mx.array,
        examples: Sequence[Example],
    ) -> list[np.ndarray]:
        """(D, S) for each text: S slots, of which the first drafts the answer's second token."""
        batch = make_batch(examples, range(len(examples)))
        length = batch.tokens.shape[1]
        spans = [(max(0, x.num_prompt - 1), len(x.tokens) - 2) for x in examples]
        begin = min(first for first, _ in spans)
        places = [np.arange(*span) - begin + i * (length - begin) for i, span in enumerate(spans)]
        rows = mx.array(np.concatenate(places))
        features = self._teacher.features(batch.tokens)
        embeddings = embed(mx.array(batch.tokens))
        # The tokens after the last one are not known: no draft equals them.
        padded = np.pad(batch.tokens, [(0, 0), (0, self._depth + 2)], constant_values=-1)
        for i, example in enumerate(examples):
            padded[i, len(example.tokens) :] = -1
        drafts = []
        for states in unroll(head, embeddings, features, self._depth, first=begin):
            picked = states.reshape(-1, states.shape[-1])[rows]
            drafts.append(ids[mx.argmax(head.logits(picked), axis=-1)])
            mx.eval(drafts[-1], states)
        found, hits, start = np.array(mx.stack(drafts)), [], 0
        for i, (first, last) in enumerate(spans):
            text = found[:, start : start + last - first]
            truth = [padded[i, first + 2 + d : last + 2 + d] for d in range(self._depth)]
            hits.append(text == np.stack(truth))
            start += last - first
        return hits
