"""Logits processors over the rows of a verify pass: each row with the tokens before it."""

from collections.abc import Callable

import mlx.core as mx

from ..drafters.base import Draft

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


def process_logits(
    processors: tuple[LogitsProcessor, ...],
    history: mx.array,
    draft: Draft,
    logits: mx.array,
) -> mx.array:
    """Run logits (k + 1, V) through the processors, each row with the tokens before it.

    ``history`` (N,) ends with the root; row r sees it with the draft tokens on its path behind.
    How long the paths in a tree are has to be known here: where the tree grew on the device, the
    draft is waited for, and the device goes on with the pass meanwhile.
    """
    if draft.parents is not None and not draft.form:
        mx.async_eval(logits)
    rows = []
    parents = draft.known_parents()
    for r in range(logits.shape[0]):
        if parents is None:
            path = draft.tokens[:r]
        else:
            above: list[int] = []
            at = r
            while at > 0:
                above.insert(0, at - 1)
                at = parents[at - 1]
            path = draft.tokens[mx.array(above, mx.int32)]
        tokens = mx.concatenate([history, path.astype(history.dtype)])
        row = logits[r : r + 1]
        for processor in processors:
            row = processor(tokens, row)
        rows.append(row)
    return mx.concatenate(rows)


def stand_in(tokens: mx.array, logits: mx.array) -> mx.array:
    """A processor that takes as long as a caller's may, for measuring: theirs may keep a state.

    It does what a penalty does: reads the logits (1, V) of the last token and writes them back.
    """
    last = tokens[-1:]
    return logits.at[:, last].add(mx.zeros_like(logits[:, last]))
