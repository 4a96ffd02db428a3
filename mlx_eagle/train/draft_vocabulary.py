"""Draft vocabulary: the tokens that a head can draft, and heads changed to draft others."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters.output_rows import indices_in
from ..drafters.target_parts import find_embedding, rows_of_lm_head
from .data import Example
from .student import Student

RIDGE = 1e-6  # of the mean diagonal: heads may draft fewer tokens than a row has numbers


def resized_vocabulary(
    examples: Sequence[Example], ids: np.ndarray, size: int, vocab_size: int
) -> np.ndarray:
    """Choose ``size`` tokens for a head that can draft ``ids`` (Vd,): (size,), ascending.

    A larger vocabulary keeps all of them and adds the tokens that are most frequent in the
    answers; a smaller one keeps those of them that are. If the answers use too few tokens, the
    smallest remaining ids are added: in most vocabularies these are the most common tokens.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"the draft vocabulary is to have {size} tokens, but here it can have 1 to "
            f"{vocab_size}: give a --draft-vocab-size between them."
        )
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.tokens[example.num_prompt :])
    own = set(ids.tolist())
    kept: set[int] = set() if size < len(own) else own
    choice = own if size < len(own) else set(range(vocab_size)) - own
    order = sorted(choice, key=lambda token: (-counts[token], token))
    return np.array(sorted([*kept, *order[: size - len(kept)]]), np.int32)


def coverage(examples: Sequence[Example], ids: mx.array) -> float:
    """Return the share of the answers' tokens that are among ``ids``."""
    known: set[Any] = {*ids.tolist()}
    answers = [token for x in examples for token in x.tokens[x.num_prompt :]]
    return sum(token in known for token in answers) / max(1, len(answers))


def resized(student: Student, model: nn.Module, ids: np.ndarray) -> Student:
    """Let a head draft ``ids`` (ascending): a part of what it can draft, or that and more.

    It has learnt nothing about new tokens. Their rows of the output matrix are made from the
    target's, by the affine map that best takes the target's rows of the old tokens to the head's.
    A head that uses the target's output matrix gets rows of its own, which are then trained.
    """
    head = student.head
    rows = rows_of_lm_head(model, find_embedding(model)[0], mx.array(ids))
    theirs = rows["lm_head.weight"].astype(mx.float32)
    if head.config.lm_head_source == "target":
        head.lm_head = nn.Linear(*theirs.shape[::-1], bias=False)
        head.lm_head.weight = theirs
    else:
        old = np.array(student.ids)
        known = np.isin(ids, old)
        own = np.array(head.lm_head.weight, np.float64)[indices_in(ids, old)]
        weight = own
        if not known.all():  # lstsq takes five times as long
            table = np.pad(np.array(theirs, np.float64), [(0, 0), (0, 1)], constant_values=1)
            seen = table[known].T @ table[known]
            seen += np.eye(len(seen)) * (RIDGE * np.trace(seen) / len(seen))
            weight = table @ np.linalg.solve(seen, table[known].T @ own)
            weight[known] = own
        head.lm_head.weight = mx.array(weight.astype(np.float32))
    sizes = {"draft_vocab_size": len(ids), "has_d2t": len(ids) < head.config.vocab_size}
    head.config = replace(head.config, **sizes, lm_head_source="file")
    return replace(student, ids=mx.array(ids))
