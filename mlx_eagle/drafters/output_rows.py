"""Output rows: the part of a vocabulary that is drafted from, whatever the kind of drafter.

A draft token multiplies a state with every row of the output matrix, which is most of its price.
Byte-level BPE gives its ids in the order of merges, so the first rows are those of frequent
tokens, and a view of the matrix. What a text ends with, and what its prompt holds, is added.
"""

import re
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer, TokenizerWrapper

from ..system.fields import FieldType, is_whole
from .base import Drafter
from .target_parts import find_embedding

WORTH_IT = 100_000
"""Tokens of a vocabulary from which on drafting from a part of it is proposed."""
USUAL_SHARE = 65_536
"""First ids that others have drafted from: half the time of a draft, 2 points of acceptance."""
STORED = FieldType(
    "a number of tokens or a list of their ids",
    lambda v: is_whole(v) or (isinstance(v, list) and len(v) > 0 and all(map(is_whole, v))),
)
"""The entry ``draft_vocab`` of a converted folder."""
MOST_OF_A_PROMPT = 1024
"""Tokens of a prompt that are drafted beyond the wanted ones: a row of each is copied.

Copying all once per text moves 2048 rows, a 32nd of what one token drafted from ``USUAL_SHARE``
reads, so it pays if a single draft is kept for it in a text.
"""
FULL = "full"
PARTS = ("weight", "scales", "biases", "bias")

DraftVocab = int | str | Path | Sequence[int] | None
"""A number of first ids, a file of ids, or ids; None or "full" for all of them."""
Project = Callable[[mx.array], mx.array]


class OutputRows:
    """Rows of output matrices: the first ``num_first`` as a view, then copies of ``others``."""

    def __init__(self, index: np.ndarray):
        """``index`` (n,) are different rows, in order; the view ends where they leave a gap."""
        first = np.flatnonzero(index != np.arange(len(index)))
        self.num_first = int(first[0]) if len(first) else len(index)
        self.index = mx.array(index.astype(np.int32))
        self._projections: dict[int, tuple[nn.Module, list[Project]]] = {}
        mx.eval(self.index)

    def __len__(self) -> int:
        return int(self.index.size)

    def project(self, output: Project, x: mx.array) -> mx.array:
        """Logits (..., n) of these rows from x (..., h); ``output`` multiplies with all rows."""
        module = module_of(output)
        if id(module) not in self._projections:
            rows: list[Any] = [slice(self.num_first), self.index[self.num_first :]]
            sizes = self.num_first, len(self) - self.num_first
            made = [subset_of(output, at) for at, size in zip(rows, sizes, strict=True) if size]
            # With the module, so that its id stays its own.
            self._projections[id(module)] = module, made
        logits = [multiply(x) for multiply in self._projections[id(module)][1]]
        return logits[0] if len(logits) == 1 else mx.concatenate(logits, axis=-1)


def module_of(output: Project) -> nn.Module:
    """The module behind an output projection: itself, or an embedding's ``as_linear``."""
    found: Any = output
    while not isinstance(found, nn.Module):
        found = found.func if hasattr(found, "func") else found.__self__
    module: nn.Module = found
    return module


def subset_of(output: Project, rows: slice | mx.array) -> Project:
    """Some rows of an output projection, packed as it is: (..., h) -> (..., n).

    Those of a slice are a view, those of an array (n,) are copied.
    """
    module = module_of(output)
    subset = copy(module)
    subset.update({name: module[name][rows] for name in PARTS if module.get(name) is not None})
    mx.eval(subset.parameters())  # another thread could not compute them
    project: Project = subset.as_linear if hasattr(subset, "as_linear") else subset
    return project


def read_draft_vocab(value: DraftVocab) -> int | np.ndarray | None:
    """Read a draft vocabulary: a number of first ids, the ids (n,) of a file, None for all.

    A file holds token ids, between white space or commas. Raises ValueError for anything else.
    """
    if value is None or value == FULL:
        return None
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value):
        value = int(value)
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"--draft-vocab is {value}: give 1 or more ids, a file, or {FULL}.")
        return value
    if not isinstance(value, str | Path):
        return np.unique(np.array(value, np.int64))
    try:
        found = re.findall(r"[^\s,\[\]]+", Path(value).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as err:
        reason = getattr(err, "strerror", None) or "it is no text"
        raise ValueError(
            f"--draft-vocab {value} cannot be read ({reason}): give a number of ids, a file of "
            f"token ids, or {FULL}."
        ) from err
    wrong = next((word for word in found if not re.fullmatch(r"\d{1,9}", word)), None)
    if wrong is not None or not found:
        has = f"holds {wrong[:40]!r}" if wrong is not None else "is empty"
        raise ValueError(f"--draft-vocab {value} {has}: give a file of token ids.")
    return np.unique(np.array(found, np.int64))


def wanted_ids(
    wanted: int | np.ndarray, tokenizer: TokenizerWrapper | None, vocab_size: int
) -> np.ndarray | None:
    """The ids (n,) of a draft vocabulary, in order, with those that end a text; None: all.

    Raises ValueError for ids that the target lacks, or where the first are not the frequent ones.
    """
    if isinstance(wanted, int):
        if wanted >= vocab_size:
            return None
        if tokenizer is not None and isinstance(tokenizer.detokenizer, SPMStreamingDetokenizer):
            raise ValueError(
                f"--draft-vocab is {wanted}, but the first ids of a SentencePiece tokenizer are "
                "not the frequent ones: give a file of ids."
            )
        wanted = np.arange(wanted)
    elif wanted[-1] >= vocab_size or wanted[0] < 0:
        raise ValueError(
            f"--draft-vocab names token {wanted[-1] if wanted[0] >= 0 else wanted[0]}, but the "
            f"target has {vocab_size}: give ids of this target."
        )
    ends = [] if tokenizer is None else sorted(tokenizer.eos_token_ids)
    return np.union1d(wanted, [end for end in ends if end < vocab_size]).astype(np.int64)


def with_draft_vocab(
    drafter: Drafter,
    wanted: DraftVocab,
    model: nn.Module,
    tokenizer: TokenizerWrapper | None = None,
) -> Drafter:
    """The drafter with a part of its vocabulary, or as it is; ValueError as in ``wanted_ids``."""
    read = read_draft_vocab(wanted)
    ids = None if read is None else wanted_ids(read, tokenizer, find_embedding(model)[1])
    return drafter if ids is None else drafter.with_draft_vocab(ids)


def newest_others(tokens: np.ndarray, known: np.ndarray, most: int) -> np.ndarray:
    """Different tokens of a text that are not among ``known``, at most the newest, in order."""
    found, last = np.unique(tokens[::-1], return_index=True)
    is_new = ~np.isin(found, known)
    newest = np.argsort(last[is_new])[:most]
    return np.sort(found[is_new][newest])


def indices_in(ids: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Where ids (n,) stand among a head's own (Vd,), in their order; those it lacks are left out.

    Where its ids are in order, its first places are those of the first ids.
    """
    order = np.argsort(own, kind="stable")
    nearest = np.minimum(np.searchsorted(own, ids, sorter=order), len(own) - 1)
    index: np.ndarray = order[nearest][own[order[nearest]] == ids]
    return index
