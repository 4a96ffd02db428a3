"""Which draft tokens stay: the acceptance rules, on arrays alone.

A rule turns the target's logits for one window into the tokens that follow each row and
the number of draft tokens kept. It knows neither model nor cache.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Verdict:
    """What a rule says of a window of R rows.

    ``following`` (R,): the token after each row; the run emitted is ``following[:num_kept + 1]``.
    ``num_kept`` (): how many draft tokens stay, still on the device.
    ``logprobs`` (R, V): the target's log-probabilities after each row.
    """

    following: mx.array
    num_kept: mx.array
    logprobs: mx.array


def greedy(logprobs: mx.array) -> mx.array:
    """The most likely token of each row, (R, V) -> (R,)."""
    return mx.argmax(logprobs, axis=-1)


def kept_in_chain(keep: mx.array) -> mx.array:
    """Length of the run of kept tokens at the front: [T, T, F, T] -> 2."""
    return mx.cumprod(keep.astype(mx.int32)).sum()


@dataclass(frozen=True)
class Match:
    """Keep a draft token iff it equals the target's own choice after its parent.

    The choice is drawn row by row with the caller's sampler and logits processors, so the
    emitted tokens follow the target's distribution whatever was drafted: with greedy choice
    the text is the target's own, with a random sampler it has the target's law. (The rule of
    Leviathan et al. 2023, arXiv:2211.17192, for a draft whose probabilities are unknown.)
    """

    sampler: Sampler | None = None
    processors: tuple[LogitsProcessor, ...] = ()

    def __call__(self, draft_tokens: mx.array, logits: mx.array, history: mx.array) -> Verdict:
        """Judge draft_tokens (k,) by logits (k + 1, V).

        ``history`` (N,) holds the tokens up to and including the root, which is what
        processors get to see, one row at a time, followed by the draft up to that row.
        """
        if self.processors:
            logits = self._processed(draft_tokens, logits, history)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self.sampler is None:
            following = greedy(logprobs)
        else:
            # A sampler is an opaque closure: it gets the (1, V) rows it gets in plain decoding.
            rows = range(logprobs.shape[0])
            following = mx.concatenate([self.sampler(logprobs[r : r + 1]) for r in rows])
        following = following.astype(mx.int32)
        keep = draft_tokens == following[:-1]
        return Verdict(following, kept_in_chain(keep), logprobs)

    def _processed(self, draft_tokens, logits, history) -> mx.array:
        rows = []
        for r in range(logits.shape[0]):
            tokens = mx.concatenate([history, draft_tokens[:r].astype(history.dtype)])
            row = logits[r : r + 1]
            for processor in self.processors:
                row = processor(tokens, row)
            rows.append(row)
        return mx.concatenate(rows)
