"""Resolve a head's two vocabularies and the map between them.

``d2t`` is kept in offset form: draft id i is target id i + d2t[i] .
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .stored import Stored, Tensor


@dataclass(frozen=True)
class Vocabulary:
    """``target_ids`` (draft_size,) ascending; None where draft and target ids are the same."""

    size: int
    draft_size: int
    target_ids: np.ndarray | None

    @property
    def offsets(self) -> np.ndarray | None:
        """d2t, (draft_size,) int32."""
        if self.target_ids is None:
            return None
        return (self.target_ids - np.arange(self.draft_size)).astype(np.int32)

    @property
    def max_target_id(self) -> int:
        return self.draft_size - 1 if self.target_ids is None else int(self.target_ids[-1])


FLAGS = ("BOOL", "U8", "I8", "I32", "I64")
NUMBERS = ("I64", "I32", "I16", "I8", "U8")


def _read(tensors: Mapping[str, Stored], name: str, formats: tuple[str, ...]) -> np.ndarray | None:
    """The vector of that name, None where there is none; ValueError for a wrong format."""
    if name not in tensors:
        return None
    if tensors[name].format not in formats:
        raise ValueError(
            f"{name} is stored as {tensors[name].format}, expected {', '.join(formats)}; the "
            "checkpoint is damaged"
        )
    return tensors[name].numpy()


def _target_ids(tensors: Mapping[str, Stored], absolute: bool) -> np.ndarray | None:
    """Target id of each draft id, from d2t, or from t2d where d2t is missing."""
    marked, stored = _read(tensors, "t2d", FLAGS), _read(tensors, "d2t", NUMBERS)
    kept = None if marked is None else np.flatnonzero(marked)
    if stored is None:
        return kept
    stored = stored.astype(np.int64)
    ids = stored if absolute else stored + np.arange(len(stored))
    if kept is not None and not np.array_equal(kept, ids):
        raise ValueError(
            f"d2t and t2d disagree: {len(ids)} draft ids, {len(kept)} marked in t2d; "
            "the checkpoint is damaged"
        )
    return ids


def resolve_vocabulary(
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    absolute: bool,
    notes: list[str],
) -> Vocabulary:
    """Both sizes and the map between them; ``absolute``: d2t holds target ids themselves.

    Raises ValueError where tensors and config do not fit each other.
    """
    ids = _target_ids(tensors, absolute)
    embedding, output = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    size = settings.get("vocab_size")
    if embedding is not None:
        size = embedding.rows
    elif size is None and "t2d" in tensors:
        size = tensors["t2d"].rows
    if size is None:
        raise ValueError("config.json has no vocab_size, and no tensor tells it; add it")
    if ids is not None:
        draft_size = len(ids)
    elif output is not None:
        draft_size = output.rows
    else:
        draft_size = settings.get("draft_vocab_size") or size
    _check(ids, size, draft_size, settings.get("draft_vocab_size"))
    if output is not None and output.rows not in (draft_size, size):
        raise ValueError(
            f"lm_head has {output.rows} rows, expected one a draft token: {draft_size}"
        )
    if ids is not None and draft_size < size and ids[-1] == draft_size - 1:
        notes.append(
            f"d2t is all zeros: the draft vocabulary is taken to be the first {draft_size} ids; "
            "if acceptance is near zero the map was lost"
        )
    return Vocabulary(size, draft_size, ids if draft_size < size else None)


def _check(ids: np.ndarray | None, size: int, draft_size: int, stated: int | None) -> None:
    if stated is not None and stated != draft_size:
        raise ValueError(
            f"config.json says draft_vocab_size {stated}, and the tensors have {draft_size}"
        )
    if ids is None:
        if draft_size != size:
            raise ValueError(
                f"the draft vocabulary has {draft_size} of {size} tokens, and there is no d2t to "
                "map them; the checkpoint is incomplete"
            )
        return
    if not len(ids) or ids[0] < 0 or ids[-1] >= size or (np.diff(ids) <= 0).any():
        raise ValueError(
            f"d2t does not lead to ascending target ids below {size}; the checkpoint is damaged, "
            "or made for another target"
        )
