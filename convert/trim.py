"""Cut a head's draft vocabulary: fewer rows of its lm_head make a draft step cheaper.

This file chooses the rows that stay, and changes everything that depends on them. A text that is
given is only counted.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm import tokenizer_utils

from .checkpoint import TargetFolder
from .head_config import Resolved, keep_outputs

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken")


@dataclass(frozen=True)
class Trim:
    """Keep ``size`` draft tokens: the most frequent ones of the file ``text``.

    The tokenizer's stop tokens stay too, which no plain text holds. Tokens that are equally
    frequent in the text, most of them absent, are taken in the order of d2t; without a text all
    are. That order is by ascending target id, for trainers sort the map, and not by frequency. In
    vocabularies of byte pairs low ids are early merges, which roughly stand for frequent tokens.
    """

    size: int
    text: str | None = None
    ids: tuple[int, ...] | None = None
    """Target ids to keep, in the place of the first ``size``."""

    @classmethod
    def of(cls, read: int | np.ndarray, text: str | None = None) -> "Trim":
        """Make it of what ``read_draft_vocab`` has read."""
        if isinstance(read, int):
            return cls(read, text)
        return cls(len(read), ids=tuple(map(int, read)))


def count_tokens(text: str, target: TargetFolder) -> tuple[Counter[int], set[int]]:
    """The number of times that the file ``text`` has each token of a target, and its stops."""
    if not any(any(target.folder.glob(pattern)) for pattern in VOCABULARY_FILES):
        raise ValueError(
            f"--draft-vocab-text needs the target's tokenizer, and there is none in {target.name}"
        )
    try:
        lines = Path(text).expanduser().read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as err:
        raise ValueError(f"--draft-vocab-text {text} cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise ValueError(f"--draft-vocab-text {text} is no UTF-8 text ({err})") from err
    try:
        stops = target.config.get("eos_token_id")
        tokenizer = tokenizer_utils.load(target.folder, eos_token_ids=stops)
    except (KeyError, OSError, ValueError) as err:
        reason = str(err).strip().splitlines()[0]
        raise ValueError(f"the tokenizer in {target.folder} cannot be loaded: {reason}") from err
    tokens: Counter[int] = Counter()
    for line in lines:
        tokens.update(tokenizer.encode(line, add_special_tokens=False))
    if not tokens:
        raise ValueError(f"--draft-vocab-text {text} is empty; give a text like the target's own")
    return tokens, set(tokenizer.eos_token_ids)


def choose(ids: np.ndarray, wanted: Trim, counts: Counter[int], stops: set[int]) -> np.ndarray:
    """The draft ids to keep, (n,) ascending; ``ids`` (Vd,) are their target ids."""
    if wanted.ids is not None:
        return np.flatnonzero(np.isin(ids, wanted.ids))
    if wanted.text is None:
        return np.arange(wanted.size)
    frequent = sorted(range(len(ids)), key=lambda i: (ids[i] not in stops, -counts[ids[i]], i))
    return np.array(sorted(frequent[: wanted.size]))


def trim(head: Resolved, wanted: Trim, target: TargetFolder | None) -> Resolved:
    """The head with a smaller draft vocabulary, described in its ``trimmed``.

    Raises ValueError for a size out of range, and for a text that cannot be read, or not without
    a ``target``.
    """
    config = head.config
    num = config.draft_vocab_size
    if wanted.ids is None and not 1 <= wanted.size <= num:
        raise ValueError(
            f"--draft-vocab {wanted.size}: the head drafts {num} tokens; give a number from 1 to "
            f"{num}"
        )
    ids = np.arange(num) if head.target_ids is None else head.target_ids
    counts: Counter[int] = Counter()
    stops: set[int] = set()
    if wanted.text is not None:
        if target is None:
            raise ValueError(
                "--draft-vocab-text needs the target's tokenizer; name the target with --target"
            )
        counts, stops = count_tokens(wanted.text, target)
    kept = choose(ids, wanted, counts, stops)
    if not len(kept):
        raise ValueError("--draft-vocab names no token that the head drafts; give others")
    tensors = dict(head.tensors)
    keep_outputs(tensors, kept, num)
    if "lm_head.weight" not in tensors and config.lm_head_source == "target":
        config = replace(config, lm_head_source="target_rows")
    config = replace(config, draft_vocab_size=len(kept), has_d2t=True)
    entry = {"from": len(ids), "by": "d2t order" if wanted.ids is None else "a list of ids"}
    if wanted.text is not None:
        text = Path(wanted.text).expanduser()
        total = sum(counts.values())
        entry |= {
            "by": "frequency",
            "text": text.name,
            "sha256": hashlib.sha256(text.read_bytes()).hexdigest(),
            "tokens": total,
            "covered": round(sum(counts[i] for i in ids[kept]) / total, 4),
            "covered_before": round(sum(counts[i] for i in ids) / total, 4),
        }
    return replace(head, config=config, tensors=tensors, target_ids=ids[kept], trimmed=entry)


def describe(entry: Mapping[str, Any]) -> str:
    """The entry ``draft_vocab_trim`` as one line for people."""
    said = f"trimmed from {entry['from']} by {entry['by']}"
    if "text" not in entry:
        return said
    return (
        f"{said} in {entry['text']}, of whose {entry['tokens']} tokens {entry['covered']:.1%} can "
        f"be drafted (before: {entry['covered_before']:.1%})"
    )
