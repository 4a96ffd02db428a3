"""Cut a head's draft vocabulary: fewer rows of its lm_head make a draft step cheaper.

This file chooses the rows that stay, and changes everything that depends on them. A text that is
given is only counted.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import tokenizer_utils

from .checkpoint import DraftCheckpoint, TargetFolder
from .head_config import Resolved, is_output
from .stored import LazyTensor

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

    @property
    def stored(self) -> int | list[int]:
        """The entry ``draft_vocab`` of drafters that score with their target's output matrix."""
        return self.size if self.ids is None else list(self.ids)


@dataclass(frozen=True)
class Counts:
    """The number of times each token id is in a text, the tokenizer's stops, the file's sha256."""

    tokens: Mapping[int, int]
    stops: frozenset[int]
    sha256: str

    def share(self, ids: Collection[int]) -> float:
        """The share of the text's tokens that are among ``ids``."""
        return sum(self.tokens.get(i, 0) for i in ids) / sum(self.tokens.values())


def _tokenizer_place(
    checkpoint: DraftCheckpoint, target: TargetFolder | None
) -> tuple[Path, Mapping]:
    """The folder with the target's tokenizer, and its config; ValueError if there is none."""
    places = [] if target is None else [(target.folder, target.config)]
    places.append((checkpoint.files[0].parent, checkpoint.config))
    for folder, config in places:
        if any(any(folder.glob(pattern)) for pattern in VOCABULARY_FILES):
            return folder, config
    where = checkpoint.source if target is None else f"{target.name} and {checkpoint.source}"
    raise ValueError(
        f"--draft-vocab-text needs the target's tokenizer, and there is none in {where}; name "
        "the target with --target"
    )


def count_tokens(text: str, folder: Path, config: Mapping[str, Any]) -> Counts:
    """Count the tokens of the file ``text`` with the tokenizer in ``folder``."""
    try:
        data = Path(text).expanduser().read_bytes()
        lines = data.decode("utf-8").splitlines(keepends=True)
    except OSError as err:
        raise ValueError(f"--draft-vocab-text {text} cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise ValueError(f"--draft-vocab-text {text} is no UTF-8 text ({err})") from err
    try:
        tokenizer = tokenizer_utils.load(folder, eos_token_ids=config.get("eos_token_id"))
    except (KeyError, OSError, ValueError) as err:
        reason = str(err).strip().splitlines()[0]
        raise ValueError(f"the tokenizer in {folder} cannot be loaded: {reason}") from err
    tokens: Counter[int] = Counter()
    for line in lines:
        tokens.update(tokenizer.encode(line, add_special_tokens=False))
    if not tokens:
        raise ValueError(f"--draft-vocab-text {text} is empty; give a text like the target's own")
    return Counts(tokens, frozenset(tokenizer.eos_token_ids), hashlib.sha256(data).hexdigest())


def choose(ids: np.ndarray, size: int, counts: Counts | None) -> np.ndarray:
    """The draft ids to keep, (size,) ascending; ``ids`` (Vd,) are their target ids."""
    if counts is None:
        return np.arange(size)
    tokens = ids.tolist()

    def place(i: int) -> tuple[bool, int, int]:
        return tokens[i] not in counts.stops, -counts.tokens.get(tokens[i], 0), i

    return np.array(sorted(sorted(range(len(ids)), key=place)[:size]))


def trim(
    head: Resolved, wanted: Trim, checkpoint: DraftCheckpoint, target: TargetFolder | None
) -> Resolved:
    """The head with a smaller draft vocabulary, described in its ``trimmed``.

    Raises ValueError for a size out of range, a text that cannot be read, and a text without a
    tokenizer to read it with.
    """
    config = head.config
    num = config.draft_vocab_size
    if wanted.ids is None and not 1 <= wanted.size <= num:
        raise ValueError(
            f"--draft-vocab {wanted.size}: the head drafts {num} tokens; give a number from 1 to "
            f"{num}"
        )
    ids = np.arange(num) if head.target_ids is None else head.target_ids
    counts = None
    if wanted.text is not None:
        counts = count_tokens(wanted.text, *_tokenizer_place(checkpoint, target))
    kept = choose(ids, wanted.size, counts)
    if wanted.ids is not None:
        kept = np.flatnonzero(np.isin(ids, wanted.ids))
        if not len(kept):
            raise ValueError("--draft-vocab names no token that the head drafts; give others")
    tensors = dict(head.tensors)
    rows = mx.array(kept)
    for name in filter(is_output, head.tensors):
        shape = (len(kept), *tensors[name].shape[1:])
        tensors[name] = LazyTensor(tensors[name], lambda w: w[rows], shape)
    if "lm_head.weight" not in tensors and config.lm_head_source == "target":
        config = replace(config, lm_head_source="target_rows")
    config = replace(config, draft_vocab_size=len(kept), has_d2t=True)
    entry = {"from": len(ids), "by": "d2t order" if wanted.ids is None else "a list of ids"}
    if counts is not None:
        entry |= {
            "by": "frequency",
            "text": Path(wanted.text).name,
            "sha256": counts.sha256,
            "tokens": sum(counts.tokens.values()),
            "covered": round(counts.share(ids[kept].tolist()), 4),
            "covered_before": round(counts.share(ids.tolist()), 4),
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
