"""Training data: rows in mlx-lm's own formats, read, checked and encoded as token sequences."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset, TextDataset, load_hf_dataset

from ..system.fields import shown
from .held_out import choose_held_out, likeness, words_of

MIN_ANSWER = 2  # tokens: the first is the prompt's own prediction, the second can be drafted
FORMATS = {
    "completion": {"prompt", "completion"},
    "messages": {"messages"},
    "text": {"text"},
    "tokens": {"tokens"},
}
"""Formats of mlx-lm, and of recorded tokens, by the fields that each has."""
UNREADABLE = (
    TemplateError, KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError,
)  # fmt: skip
"""Errors that tokenizers and chat templates raise for rows that they were not written for."""


@dataclass(frozen=True)
class DataRow:
    """Fields of one row of data, and ``where`` it is, for messages."""

    where: str
    fields: dict[str, Any]


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

    @property
    def num_tokens(self) -> int:
        return sum(len(example.tokens) for example in self.train)

    def fingerprint(self) -> str:
        """Name the training sequences and their order, so that a run resumes with the same."""
        digest = hashlib.sha256()
        for example in self.train:
            digest.update(np.array([example.num_prompt, *example.tokens], np.int32).tobytes())
        return digest.hexdigest()[:16]


def read_examples(
    data: str,
    tokenizer: TokenizerWrapper,
    vocab_size: int,
    max_length: int,
    mask_prompt: bool = True,
) -> Examples:
    """Read what ``mlx_lm.lora --data`` takes: a folder of JSONL files, or a hub data set.

    Rows written by ``mlx_eagle.train.answers`` or by a server carry the very tokens; all others
    are encoded by mlx-lm's data sets. Sequences are cut at ``max_length`` tokens. Without
    ``mask_prompt``, and in rows of plain text, every token counts. If there is no data for
    evaluation, sequences are held out whose prompts do not occur among those to learn from.
    Raises ValueError, one sentence, if there is nothing to learn from.
    """
    train, valid = _load(data)
    notes: list[str] = []
    found = _encoded(train, tokenizer, vocab_size, mask_prompt)
    sequences = _fitting(found, max_length, data, notes)
    if valid:
        found = _encoded(valid, tokenizer, vocab_size, mask_prompt)
        held_out = _fitting(found, max_length, data, [])
        alike = likeness(list(dict.fromkeys(x.words for x in sequences)))
        num_known = sum(bool(alike(x.words)) for x in held_out)
        if num_known:
            notes.append(
                f"{num_known} of {len(held_out)} sequences of valid.jsonl ask what train.jsonl "
                "asks, in these words or almost: of them the figures say little."
            )
        return Examples(tuple(sequences), tuple(held_out), tuple(notes))
    chosen = choose_held_out([x.words for x in sequences])
    what = "the prompts are too few or too much alike to hold any out"
    if chosen:
        what = f"{len(chosen)} of {len(sequences)} sequences are held out, and none like them is"
        what += " learnt from"
    notes.append(f"There is no valid.jsonl: {what}.")
    held_out = [sequences[i] for i in sorted(chosen)]
    sequences = [x for i, x in enumerate(sequences) if i not in chosen]
    return Examples(tuple(sequences), tuple(held_out), tuple(notes))


def check_data(data: str) -> None:
    """Raise ValueError unless there is a folder with data, or the hub can be asked for them."""
    path = Path(data)
    if path.exists():
        if not path.is_dir():
            raise ValueError(f"{data} is a file: give the folder that holds it as train.jsonl.")
        if not (path / "train.jsonl").is_file():
            raise ValueError(f"{data} has no train.jsonl: put the training data there.")
    elif find_spec("datasets") is None:
        raise ValueError(
            f"{data} is no folder here, and data sets of the hub need the package datasets: "
            "give a folder that holds train.jsonl, or pip install datasets."
        )


def _load(data: str) -> tuple[list[DataRow], list[DataRow]]:
    """Read the rows to learn from and those to evaluate on, from a folder or from the hub."""
    check_data(data)
    path = Path(data)
    if path.exists():
        valid = path / "valid.jsonl"
        return read_rows(path / "train.jsonl"), read_rows(valid) if valid.is_file() else []
    train, valid, _ = load_hf_dataset(data, None, SimpleNamespace())
    if not train:
        raise ValueError(f"{data} has no part named train: give another data set.")
    return _hub_rows(data, "train", train), _hub_rows(data, "valid", valid)


def _hub_rows(data: str, name: str, part: Any) -> list[DataRow]:
    """Return the rows of one part of a hub data set, without the fields that are empty."""
    rows = enumerate((part[i] for i in range(len(part))), start=1)
    return [
        DataRow(f"{data}, row {i} of {name}", {k: v for k, v in row.items() if v is not None})
        for i, row in rows
    ]


def read_rows(file: Path) -> list[DataRow]:
    """Read the objects of a JSONL file; ValueError names a line that holds something else."""
    rows = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                fields = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as err:
                raise ValueError(f"{where} is not UTF-8 text ({err.reason}).") from err
            except RecursionError as err:
                raise ValueError(f"{where} is nested too deeply.") from err
            except ValueError as err:
                raise ValueError(f"{where} is not JSON ({err}).") from err
            if not isinstance(fields, dict):
                raise ValueError(f"{where} is no JSON object: see --data.")
            rows.append(DataRow(where, fields))
    if not rows:
        raise ValueError(f"{file} is empty: it needs a JSON object on each line.")
    return rows


def check_messages(row: DataRow) -> list[dict[str, Any]]:
    """Return the row's conversation; ValueError unless it is a list of at least one message."""
    messages = row.fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{row.where} has "messages" that are no list of at least one message.')
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{row.where} has a message that is no object with a role.")
        if not isinstance(message.get("content"), str | list | None):
            raise ValueError(f"{row.where} has a message whose content is no text.")
    return messages


def _check_row(row: DataRow, mask_prompt: bool) -> str:
    """Return the name of the row's format; ValueError if it has none, or fields of wrong types."""
    fields = row.fields
    kind = next((name for name, own in FORMATS.items() if fields.keys() >= own), None)
    if kind is None and "prompt" in fields:
        raise ValueError(
            f"{row.where} has a prompt and no answer to learn from: give a "
            '"completion" on every line, or have answers made with --regenerate.'
        )
    if kind is None:
        raise ValueError(
            f"{row.where} has no data format that is known: give messages, prompt and "
            "completion, or text."
        )
    for name in ("prompt", "completion", "text"):
        if name in fields and not isinstance(fields[name], str):
            raise ValueError(f'{row.where} has a "{name}" that is no text.')
    if kind == "text" and not fields["text"] and "tokens" not in fields:
        raise ValueError(f'{row.where} has an empty "text": leave that line out.')
    for name, expected in (("tools", list), ("chat_template_kwargs", dict)):
        if not isinstance(fields.get(name), expected | None):
            raise ValueError(f'{row.where} has "{name}" that are no {expected.__name__}.')
    if "messages" in fields:
        is_answered = check_messages(row)[-1]["role"] == "assistant"
        if kind == "messages" and mask_prompt and not is_answered:
            raise ValueError(
                f"{row.where} has no answer to learn from: let it end with the assistant's "
                "message, have answers made with --regenerate, or learn from all of it with "
                "--no-mask-prompt."
            )
    return kind


def _encoded(
    rows: Sequence[DataRow], tokenizer: TokenizerWrapper, vocab_size: int, mask_prompt: bool
) -> list[Example]:
    """Encode every row as tokens; ValueError names the first row that cannot be read."""
    makers: dict[str, Any] = {
        "completion": CompletionsDataset([], tokenizer, "prompt", "completion", mask_prompt),
        "messages": ChatDataset([], tokenizer, mask_prompt=mask_prompt),
        "text": TextDataset([], tokenizer),
    }
    examples = []
    for row in rows:
        kind = _check_row(row, mask_prompt)
        fields = row.fields
        if "tokens" in fields:
            _check_recorded(row, tokenizer)
            tokens = fields["tokens"]
            num_prompt = fields["prompt_length"] * mask_prompt
        else:
            with reading(row):
                tokens, num_prompt = makers[kind].process(fields)
        largest = max(tokens, default=0)
        if largest >= vocab_size:
            raise ValueError(
                f"{row.where} holds token {shown(largest)}, but the target has {vocab_size} "
                "tokens: it was made for another vocabulary."
            )
        examples.append(Example(tuple(tokens), num_prompt, words_of(fields)))
    return examples


@contextmanager
def reading(row: DataRow) -> Iterator[None]:
    """Turn what a library raises for a row into a ValueError that says where the row is."""
    try:
        yield
    except UNREADABLE as err:
        reason = " ".join(str(err).split())[:200]
        raise ValueError(
            f"{row.where} cannot be made into tokens ({type(err).__name__}: {reason})."
        ) from err


def _check_recorded(row: DataRow, tokenizer: TokenizerWrapper) -> None:
    """Raise ValueError unless the recorded tokens are this tokenizer's."""
    fields = row.fields
    tokens = fields.get("tokens")
    size = fields.get("prompt_length")
    messages = fields.get("messages")
    if not isinstance(tokens, list) or not all(type(x) is int and x >= 0 for x in tokens):
        raise ValueError(f'{row.where} has "tokens" that are no list of token ids.')
    if type(size) is not int or not 0 <= size <= len(tokens):
        raise ValueError(f'{row.where} has "tokens" but no fitting "prompt_length".')
    if not messages:
        return
    with reading(row):
        prompt = tokenizer.apply_chat_template(
            messages[:-1],
            tools=fields.get("tools"),
            add_generation_prompt=True,
            return_dict=False,
            **(fields.get("chat_template_kwargs") or {}),
        )
    if list(prompt) != tokens[:size]:
        raise ValueError(
            f"{row.where} holds tokens that this target's tokenizer would not give: they are "
            "another target's answers; have answers made with --regenerate."
        )


def _fitting(
    examples: Sequence[Example], max_length: int, data: str, notes: list[str]
) -> list[Example]:
    """Cut the sequences to ``max_length``, and leave out those without an answer in that."""
    kept = []
    num_cut = 0
    for example in examples:
        cut = replace(example, tokens=example.tokens[:max_length])
        num_cut += len(cut.tokens) < len(example.tokens)
        if cut.num_answer >= MIN_ANSWER:
            kept.append(cut)
    if not kept:
        raise ValueError(
            f"{data} has no sequence with {MIN_ANSWER} tokens of an answer among its first "
            f"{max_length}: give answers, or a greater --max-seq-length."
        )
    if num_cut:
        notes.append(f"{num_cut} of {len(examples)} sequences are cut at {max_length} tokens.")
    if len(kept) < len(examples):
        num = len(examples) - len(kept)
        notes.append(f"{num} of {len(examples)} sequences have no answer that long: left out.")
    return kept
