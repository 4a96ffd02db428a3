"""Training data: rows in mlx-lm's own formats, read, checked and encoded as token sequences."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset, TextDataset, load_hf_dataset

from ..system.fields import COUNT, LIST, OBJECT, TEXT, FieldType, check, list_of, whole
from .held_out import choose_held_out, likeness, words_of

MIN_ANSWER = 2  # tokens: the first is the prompt's own prediction, the second can be drafted
FORMATS = {
    "tokens": {"tokens"},
    "completion": {"prompt", "completion"},
    "messages": {"messages"},
    "text": {"text"},
}
"""Formats of recorded tokens, and of mlx-lm, by the fields that each has."""
MESSAGES = FieldType(
    "a list of at least one message, each with a role and a text",
    lambda value: (
        LIST.holds(value)
        and len(value) > 0
        and all(isinstance(x, dict) and TEXT.holds(x.get("role")) for x in value)
        and all(isinstance(x.get("content"), str | list | None) for x in value)
    ),
)
TYPES = {
    "prompt": TEXT, "completion": TEXT, "text": TEXT, "messages": MESSAGES, "tools": LIST,
    "chat_template_kwargs": OBJECT, "tokens": list_of(whole(high=10**9), "token ids"),
    "prompt_length": COUNT,
}  # fmt: skip
"""Types of the fields of a row."""
UNREADABLE = (
    TemplateError, KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError,
)  # fmt: skip
"""Errors that tokenizers and chat templates raise for rows that they were not written for."""


Fields = dict[str, Any]
Rows = dict[str, Fields]
"""Rows of data, each by the place where it is, for messages."""


@dataclass(frozen=True)
class Example:
    """One sequence; its tokens from ``num_prompt`` on are the answer, whose slots count.

    ``words`` are those of the question: sequences are alike if they ask in the same words.
    """

    tokens: tuple[int, ...]
    num_prompt: int
    words: frozenset[str] = frozenset()

    @property
    def num_answer(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True)
class Examples:
    """Sequences to learn from and to evaluate on.

    ``notes`` are sentences for the user: what was cut, left out or held out.
    """

    train: tuple[Example, ...]
    valid: tuple[Example, ...]
    notes: tuple[str, ...]

    def fingerprint(self) -> str:
        """Name the training sequences and their order, so that a run resumes with the same."""
        digest = hashlib.sha256()
        for example in self.train:
            digest.update(np.array([example.num_prompt, *example.tokens], np.int32).tobytes())
        return digest.hexdigest()[:16]


def read_data(data: str) -> tuple[Rows, Rows]:
    """Read what ``mlx_lm.lora --data`` takes: a folder of JSONL files, or a hub data set.

    Returns the rows to learn from and those to evaluate on. Raises ValueError, one sentence, if
    they cannot be read.
    """
    path = Path(data)
    if path.is_file():
        raise ValueError(f"{data} is a file: give the folder that holds it as train.jsonl.")
    if path.is_dir():
        if not (path / "train.jsonl").is_file():
            raise ValueError(f"{data} has no train.jsonl: put the training data there.")
        held_out = path / "valid.jsonl"
        return read_rows(path / "train.jsonl"), read_rows(held_out) if held_out.is_file() else {}
    if find_spec("datasets") is None:
        raise ValueError(
            f"{data} is no folder here, and data sets of the hub need the package datasets: "
            "give a folder that holds train.jsonl, or pip install datasets."
        )
    train, valid, _ = load_hf_dataset(data, None, SimpleNamespace())
    if not train:
        raise ValueError(f"{data} has no part named train: give another data set.")
    return _hub_rows(f"{data}, train", train), _hub_rows(f"{data}, valid", valid)


def _hub_rows(part: str, rows: Any) -> Rows:
    places = {f"{part}, row {i + 1}": rows[i] for i in range(len(rows))}
    return {where: _checked(where, fields) for where, fields in places.items()}


def read_rows(file: Path) -> Rows:
    """Read the objects of a JSONL file; ValueError names a line that holds something else."""
    rows = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as err:
                raise ValueError(f"{where} is not JSON ({err}).") from err
            rows[where] = _checked(where, fields)
    if not rows:
        raise ValueError(f"{file} is empty: it needs a JSON object on each line.")
    return rows


def _checked(where: str, fields: Any) -> Fields:
    """Return the fields of a row that are not empty; ValueError for those of wrong types."""
    if not isinstance(fields, dict):
        raise ValueError(f"{where} is no JSON object: see --data.")
    check(fields, TYPES, where)
    return {name: value for name, value in fields.items() if value is not None}


def read_examples(
    data: tuple[Rows, Rows],
    tokenizer: TokenizerWrapper,
    vocab_size: int,
    max_length: int,
    mask_prompt: bool = True,
) -> Examples:
    """Make sequences of rows to learn from and to evaluate on.

    Rows written by ``--regenerate`` or by a server carry the very tokens; all others
    are encoded by mlx-lm's data sets. Sequences are cut at ``max_length`` tokens. Without
    ``mask_prompt``, and in rows of plain text, every token counts. If there is no data for
    evaluation, sequences are held out whose prompts do not occur among those to learn from.
    Raises ValueError, one sentence, if there is nothing to learn from.
    """
    train, valid = data
    how = (tokenizer, vocab_size, max_length, mask_prompt)
    learnt, notes = _sequences(train, *how)
    if valid:
        held_out, _ = _sequences(valid, *how)
        alike = likeness(list(dict.fromkeys(x.words for x in learnt)))
        if num_known := sum(bool(alike(x.words)) for x in held_out):
            notes.append(
                f"{num_known} of {len(held_out)} sequences of valid.jsonl ask what train.jsonl "
                "asks, in these words or almost: of them the figures say little."
            )
    else:
        chosen = choose_held_out([x.words for x in learnt])
        what = f"{len(chosen)} of {len(learnt)} sequences are held out, and all that are like them"
        if not chosen:
            what = "the prompts are too few or too much alike to hold any out"
        notes.append(f"There is no valid.jsonl: {what}.")
        held_out = [learnt[i] for i in sorted(chosen)]
        learnt = [x for i, x in enumerate(learnt) if i not in chosen]
    return Examples(tuple(learnt), tuple(held_out), tuple(notes))


def _format_of(where: str, fields: Fields, mask_prompt: bool) -> str:
    """Return the name of the row's format; ValueError if it has none, or nothing to learn from."""
    kind = next((name for name, own in FORMATS.items() if fields.keys() >= own), None)
    if kind is None:
        found = "no data format that is known: give messages, prompt and completion, or text"
        if "prompt" in fields:
            found = 'a prompt and no answer to learn from: give a "completion" on every line, or '
            found += "have answers made with --regenerate"
        raise ValueError(f"{where} has {found}.")
    if kind == "text" and not fields["text"]:
        raise ValueError(f'{where} has an empty "text": leave that line out.')
    if kind == "messages" and mask_prompt and fields["messages"][-1]["role"] != "assistant":
        raise ValueError(
            f"{where} has no answer to learn from: let it end with the assistant's "
            "message, have answers made with --regenerate, or learn from all of it with "
            "--no-mask-prompt."
        )
    return kind


def _sequences(
    rows: Rows, tokenizer: TokenizerWrapper, vocab_size: int, max_length: int, mask_prompt: bool
) -> tuple[list[Example], list[str]]:
    """Encode rows, cut to ``max_length`` tokens; return those with an answer in that, and notes.

    ValueError names the first row that cannot be read.
    """
    makers: dict[str, Any] = {
        "completion": CompletionsDataset([], tokenizer, "prompt", "completion", mask_prompt),
        "messages": ChatDataset([], tokenizer, mask_prompt=mask_prompt),
        "text": TextDataset([], tokenizer),
    }
    kept = []
    num_cut = 0
    for where, fields in rows.items():
        kind = _format_of(where, fields, mask_prompt)
        if kind == "tokens":
            _check_recorded(where, fields, tokenizer)
            tokens = fields["tokens"]
            num_prompt = fields["prompt_length"] * mask_prompt
        else:
            with reading(where):
                tokens, num_prompt = makers[kind].process(fields)
        largest = max(tokens, default=0)
        if largest >= vocab_size:
            raise ValueError(
                f"{where} holds token {largest}, but the target has {vocab_size} tokens: it was "
                "made for another vocabulary."
            )
        num_cut += len(tokens) > max_length
        example = Example(tuple(tokens[:max_length]), num_prompt, words_of(fields))
        if example.num_answer >= MIN_ANSWER:
            kept.append(example)
    if not kept:
        raise ValueError(
            f"the data have no sequence with {MIN_ANSWER} tokens of an answer among its first "
            f"{max_length}: give answers, or a greater --max-seq-length."
        )
    notes = []
    if num_cut:
        notes.append(f"{num_cut} of {len(rows)} sequences are cut at {max_length} tokens.")
    if len(kept) < len(rows):
        num = len(rows) - len(kept)
        notes.append(f"{num} of {len(rows)} sequences have no answer that long: left out.")
    return kept, notes


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn what a library raises for a row into a ValueError that says where it is."""
    try:
        yield
    except UNREADABLE as err:
        reason = " ".join(str(err).split())[:200]
        raise ValueError(
            f"{where} cannot be made into tokens ({type(err).__name__}: {reason})."
        ) from err


def prompt_of(
    where: str, messages: list[Fields], fields: Fields, tokenizer: TokenizerWrapper
) -> list[int]:
    """Encode ``messages`` as the prompt for the next answer, with the tools of a row."""
    with reading(where):
        return list(
            tokenizer.apply_chat_template(
                messages,
                tools=fields.get("tools"),
                add_generation_prompt=True,
                return_dict=False,
                **fields.get("chat_template_kwargs", {}),
            )
        )


def _check_recorded(where: str, fields: Fields, tokenizer: TokenizerWrapper) -> None:
    """Raise ValueError unless the recorded tokens are this tokenizer's."""
    tokens = fields["tokens"]
    size = fields.get("prompt_length", len(tokens) + 1)
    messages = fields.get("messages")
    if size > len(tokens):
        raise ValueError(f'{where} has "tokens" but no fitting "prompt_length".')
    if not messages:
        return
    if prompt_of(where, messages[:-1], fields, tokenizer) != tokens[:size]:
        raise ValueError(
            f"{where} holds tokens that this target's tokenizer would not give: they are "
            "another target's answers; have answers made with --regenerate."
        )
