"""The vocabularies of a head, the draft's and the target's, and the map between them.

``d2t`` is kept in offset form: draft id i is target id i + d2t[i].
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_eagle.drafters.config import VocabularyFields
from mlx_eagle.drafters.kind import Tensor

INTEGERS = ("BOOL", "U8", "I8", "I16", "I32", "I64")


def vocabulary_maps(ids: mx.array, size: int) -> dict[str, mx.array]:
    """The maps d2t (Vd,) int64 and t2d (``size``,) of draft tokens ``ids`` (Vd,), as published."""
    ids = ids.astype(mx.int64)
    drafted = mx.zeros(size, mx.bool_)
    drafted[ids] = True
    return {"d2t": ids - mx.arange(len(ids), dtype=mx.int64), "t2d": drafted}


def _target_ids(tensors: Mapping[str, Tensor]) -> np.ndarray | None:
    """The target id of each draft id, by d2t or t2d; ValueError if these are no whole numbers."""
    stored: dict[str, np.ndarray] = {}
    for name in tensors.keys() & {"d2t", "t2d"}:
        if tensors[name].format not in INTEGERS:
            raise ValueError(
                f"{name} is stored as {tensors[name].format}, expected {', '.join(INTEGERS)}; "
                "the checkpoint is damaged"
            )
        stored[name] = np.array(tensors[name].read())
    kept = np.flatnonzero(stored["t2d"]) if "t2d" in stored else None
    if "d2t" not in stored:
        return kept
    ids = stored["d2t"].astype(np.int64) + np.arange(len(stored["d2t"]))
    if kept is not None and not np.array_equal(kept, ids):
        raise ValueError(
            f"d2t and t2d disagree: {len(ids)} draft ids, {len(kept)} marked in t2d; "
            "the checkpoint is damaged"
        )
    return ids


def read_vocabulary(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[VocabularyFields, np.ndarray | None]:
    """The fields about vocabularies and tables, and the target id of each draft id, (Vd,).

    These are ascending; None if draft and target ids are the same. Raises ValueError if tensors
    and config disagree.
    """
    ids = _target_ids(tensors)
    output = tensors.get("lm_head.weight")
    stated = settings.get("draft_vocab_size")
    size = settings.get("vocab_size")
    if "embed_tokens.weight" in tensors:
        size = tensors["embed_tokens.weight"].rows
    elif size is None and "t2d" in tensors:
        size = tensors["t2d"].rows
    if size is None:
        raise ValueError("config.json has no vocab_size, and no tensor tells it; add it")
    draft_size = stated or size
    if ids is not None:
        draft_size = len(ids)
    elif output is not None:
        draft_size = output.rows
    _check_map(ids, size, draft_size, stated)
    if output is not None and output.rows not in (draft_size, size):
        raise ValueError(
            f"lm_head has {output.rows} rows, expected one a draft token: {draft_size}"
        )
    is_part = draft_size < size
    theirs = "target_rows" if is_part else "target"
    fields = VocabularyFields(
        vocab_size=size,
        draft_vocab_size=draft_size,
        has_d2t=is_part,
        embed_source="file" if "embed_tokens.weight" in tensors else "target",
        lm_head_source=theirs if output is None else "file",
    )
    return fields, ids if is_part else None


def _check_map(ids: np.ndarray | None, size: int, draft_size: int, stated: int | None) -> None:
    if stated is not None and stated != draft_size:
        raise ValueError(
            f"config.json says draft_vocab_size {stated}, and the tensors have {draft_size}"
        )
    if ids is None and draft_size != size:
        raise ValueError(
            f"the draft vocabulary has {draft_size} of {size} tokens, and there is no d2t to "
            "map them; the checkpoint is incomplete"
        )
    if ids is None:
        return
    if not len(ids) or ids[0] < 0 or ids[-1] >= size or (np.diff(ids) <= 0).any():
        raise ValueError(
            f"d2t does not lead to ascending target ids below {size}; the checkpoint is damaged, "
            "or made for another target"
        )
