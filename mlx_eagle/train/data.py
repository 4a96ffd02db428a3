"""Training data: mlx-lm's own formats as token sequences, and batches of them.

What is read, which of its tokens count, what is held out, and in which order batches come.
"""

import hashlib
import json
import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset, TextDataset, load_hf_dataset

from ..system.json_schema import shown
from .compiled import padded

PAD_TO = 64  # lengths of batches for compiled steps are multiples of it, or more
MIN_ANSWER = 2
HELD_OUT = 0.05  # of the prompts
MOST_HELD_OUT = 128  # prompts
ALIKE = 0.8  # prompts that share so much of their words (Jaccard's index) count as the same
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+")  # a character where words are not spaced
FORMATS = {
    "completion": {"prompt", "completion"},
    "messages": {"messages"},
    "text": {"text"},
    "tokens": {"tokens"},
}
"""The formats of mlx-lm, and of recorded tokens, by the fields that each has."""
UNREADABLE = (
    TemplateError, KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError,
)  # fmt: skip
"""What tokenizers and chat templates raise for rows that they were not written for."""


@dataclass(frozen=True)
class DataRow:
    """The fields of one row of data, and ``where`` it stands, for messages."""

    where: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A sequence; tokens from ``num_prompt`` on are the answer, whose slots count.

    ``words`` are those of what is asked: sequences are alike where they ask in the same.
    """

    tokens: tuple[int, ...]
    num_prompt: int
    words: frozenset[str] = frozenset()

    @property
    def num_answer(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True)
class Examples:
    """What was read. ``notes`` are sentences for the user: what was cut, dropped, held out."""

    train: tuple[Example, ...]
    valid: tuple[Example, ...]
    notes: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(example.tokens) for example in self.train)

    def fingerprint(self) -> str:
        """Names the training sequences and their order, so that a run goes on with the same."""
        digest = hashlib.sha256()
        for example in self.train:
            digest.update(np.array([example.num_prompt, *example.tokens], np.int32).tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class TokenBatch:
    """Sequences padded to one length: ``tokens`` (B, T) int32, ``counts`` (B, T) bool.

    A slot counts where the token that it takes, the one after its own, is of the answer: from
    each of these slots decoding drafts, the first time from the prompt's last one.
    ``longest`` is the length of the longest sequence of the batch on all ranks, ``size`` the
    number of sequences on all of them; ``numbers`` are those of the examples on this one.
    """

    tokens: np.ndarray
    counts: np.ndarray
    longest: int
    size: int
    numbers: tuple[int, ...]


def read_examples(
    data: str,
    tokenizer: TokenizerWrapper,
    vocab_size: int,
    max_length: int,
    mask_prompt: bool = True,
) -> Examples:
    """Read what ``mlx_lm.lora --data`` takes: a folder of JSONL files, or a hub data set.

    Rows that ``mlx_eagle.train.answers`` or a server wrote carry the very tokens; all others are
    encoded by mlx-lm's data sets. Sequences are cut at ``max_length``. Without ``mask_prompt``,
    and in rows that are plain text, every token counts. Where there is nothing to evaluate on,
    sequences are held out whose prompts are not among those to learn from. Raises ValueError, one
    sentence, where there is nothing to learn from.
    """
    train, valid = _load(data)
    notes: list[str] = []
    found = _encoded(train, tokenizer, vocab_size, mask_prompt)
    sequences = _fitting(found, max_length, data, notes)
    if valid:
        found = _encoded(valid, tokenizer, vocab_size, mask_prompt)
        held_out = _fitting(found, max_length, data, [])
        alike = _likeness(list(dict.fromkeys(x.words for x in sequences)))
        num_known = sum(bool(alike(x.words)) for x in held_out)
        if num_known:
            notes.append(
                f"{num_known} of {len(held_out)} sequences of valid.jsonl ask what train.jsonl "
                "asks, in these words or almost: of them the figures say little."
            )
        return Examples(tuple(sequences), tuple(held_out), tuple(notes))
    chosen = _choose_held_out(sequences)
    what = "the prompts are too few or too much alike to hold any out"
    if chosen:
        what = f"{len(chosen)} of {len(sequences)} sequences are held out, and none like them is"
        what += " learnt from"
    notes.append(f"There is no valid.jsonl: {what}.")
    held_out = [sequences[i] for i in sorted(chosen)]
    sequences = [x for i, x in enumerate(sequences) if i not in chosen]
    return Examples(tuple(sequences), tuple(held_out), tuple(notes))


def _likeness(asked: Sequence[frozenset[str]]) -> Callable[[frozenset[str]], set[int]]:
    """A function from words to the numbers of those of ``asked`` that are alike."""
    sizes = np.array([len(words) for words in asked])
    places: dict[str, list[int]] = {}
    for i, words in enumerate(asked):
        for word in words:
            places.setdefault(word, []).append(i)

    def alike(words: frozenset[str]) -> set[int]:
        found = [places[word] for word in words if word in places]
        shared = np.bincount(np.concatenate(found or [[]]).astype(int), minlength=len(asked))
        return set(np.flatnonzero(shared >= ALIKE * (sizes + len(words) - shared)).tolist())

    return alike


def _choose_held_out(sequences: Sequence[Example]) -> set[int]:
    """The numbers of the sequences to hold out: the last prompts, and all that are alike.

    What is like one that is held out is held out as well, and what is like that. A prompt that
    would take more with it than the share of all prompts is learnt from.
    """
    asked = list(dict.fromkeys(x.words for x in sequences))
    alike = _likeness(asked)
    num = min(MOST_HELD_OUT, int(len(asked) * HELD_OUT))
    held: set[int] = set()
    looked_at: set[int] = set()
    for last in reversed(range(len(asked))):
        if last in looked_at or len(held) == num:
            continue
        group, waiting = {last}, [last]
        while waiting and len(held | group) <= num:
            new = alike(asked[waiting.pop()]) - group
            group |= new
            waiting += new
        looked_at |= group
        if len(held | group) <= num:
            held |= group
    chosen = {asked[i] for i in held}
    return {i for i, x in enumerate(sequences) if x.words in chosen}


def _words_of(fields: dict[str, Any]) -> frozenset[str]:
    """The words of what a row asks; of a conversation, of its first question.

    {"prompt": "What's 2 + 3?", ...} -> what, s, 2, 3
    """
    asked = fields.get("prompt", fields.get("text", fields.get("tokens")))
    if "messages" in fields:
        messages = fields["messages"]
        asked = next((m.get("content") for m in messages if m["role"] == "user"), messages)
    plain = unicodedata.normalize("NFKC", asked if isinstance(asked, str) else str(asked))
    return frozenset(WORD.findall(plain.casefold())) or frozenset([plain.strip()])


def _load(data: str) -> tuple[list[DataRow], list[DataRow]]:
    """The rows to learn from and those to evaluate on, each with its place in ``data``."""
    path = Path(data)
    if path.exists():
        if not path.is_dir():
            raise ValueError(f"{data} is a file: give the folder that holds it as train.jsonl.")
        if not (path / "train.jsonl").is_file():
            raise ValueError(f"{data} has no train.jsonl: put the training data there.")
        files = [path / f"{name}.jsonl" for name in ("train", "valid")]
        train, valid = (read_rows(file) if file.is_file() else [] for file in files)
        return train, valid
    if find_spec("datasets") is None:
        raise ValueError(
            f"{data} is no folder here, and data sets of the hub need the package datasets: "
            "give a folder that holds train.jsonl, or pip install datasets."
        )
    parts = load_hf_dataset(data, None, SimpleNamespace())
    train, valid = (
        [
            DataRow(
                f"{data}, row {i + 1} of {name}",
                {k: v for k, v in part[i].items() if v is not None},
            )
            for i in range(len(part))
        ]
        for name, part in zip(("train", "valid"), parts[:2], strict=True)
    )
    if not train:
        raise ValueError(f"{data} has no part named train: give another data set.")
    return train, valid


def read_rows(file: Path) -> list[DataRow]:
    """The objects of a JSONL file; ValueError naming the line that holds something else."""
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
    """The row's conversation; ValueError for what is no list of at least one message."""
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
    """Which of mlx-lm's formats a row has; ValueError where it has none, or other fields."""
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
    """Every row as tokens; ValueError naming the first that cannot be read."""
    makers: dict[str, Any] = {
        "completion": CompletionsDataset([], tokenizer, "prompt", "completion", mask_prompt),
        "messages": ChatDataset([], tokenizer, mask_prompt=mask_prompt),
        "text": TextDataset([], tokenizer),
    }
    examples = []
    for row in rows:
        kind, fields = _check_row(row, mask_prompt), row.fields
        if "tokens" in fields:
            _check_recorded(row, tokenizer)
            tokens, num_prompt = fields["tokens"], fields["prompt_length"] * mask_prompt
        else:
            with reading(row):
                tokens, num_prompt = makers[kind].process(fields)
        largest = max(tokens, default=0)
        if largest >= vocab_size:
            raise ValueError(
                f"{row.where} holds token {shown(largest)}, but the target has {vocab_size} "
                "tokens: it was made for another vocabulary."
            )
        examples.append(Example(tuple(tokens), num_prompt, _words_of(fields)))
    return examples


@contextmanager
def reading(row: DataRow) -> Iterator[None]:
    """Within, what a library raises for a row is a ValueError that says where it stands."""
    try:
        yield
    except UNREADABLE as err:
        reason = " ".join(str(err).split())[:200]
        raise ValueError(
            f"{row.where} cannot be made into tokens ({type(err).__name__}: {reason})."
        ) from err


def _check_recorded(row: DataRow, tokenizer: TokenizerWrapper) -> None:
    """Raise ValueError unless the recorded tokens are of this tokenizer."""
    fields = row.fields
    tokens, size, messages = (fields.get(x) for x in ("tokens", "prompt_length", "messages"))
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
    """The sequences cut to length, without those that have no answer within it."""
    kept, num_cut = [], 0
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


class BatchOrder:
    """Which sequences make up which batch, by the batch's number alone.

    Within an epoch every sequence is used at most once; batches hold sequences of a like
    length, in random order. What is left over of an epoch, fewer than a batch, is other
    sequences every time.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int):
        if len(lengths) < batch_size:
            raise ValueError(
                f"there are {len(lengths)} sequences to learn from, fewer than the batch size "
                f"of {batch_size}: give more data, or a smaller --batch-size."
            )
        self.num_batches = len(lengths) // batch_size
        self._lengths = lengths
        self._batch_size = batch_size
        self._seed = seed
        self._batches = lru_cache(1)(self._make_epoch)

    def batch(self, number: int) -> list[int]:
        """The numbers of the sequences in batch ``number``, counted from 0 over all epochs."""
        epoch, place = divmod(number, self.num_batches)
        return self._batches(epoch)[place]

    def _make_epoch(self, epoch: int) -> list[list[int]]:
        rng = random.Random(f"{self._seed}:{epoch}")
        order = list(range(len(self._lengths)))
        rng.shuffle(order)
        order = order[: self.num_batches * self._batch_size]
        order.sort(key=lambda i: -(-self._lengths[i] // PAD_TO))
        size = self._batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        rng.shuffle(batches)
        return batches


def padded_length(length: int) -> int:
    """What texts of that length are padded to: for compiled steps one of few lengths.

    Sixteen up to 2048, and four in every doubling from there.
    """
    return padded(length, max(PAD_TO, 2 ** ((length - 1).bit_length() - 3)))


def make_batch(
    examples: Sequence[Example], numbers: Sequence[int], rank: int = 0, num_ranks: int = 1
) -> TokenBatch:
    """The sequences of those numbers, of which this rank takes every ``num_ranks``-th."""
    longest = max(len(examples[i].tokens) for i in numbers)
    own = tuple(numbers[rank::num_ranks])
    shape = len(own), padded_length(longest)
    tokens, counts = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for row, number in enumerate(own):
        example = examples[number]
        tokens[row, : len(example.tokens)] = example.tokens
        counts[row, max(0, example.num_prompt - 1) : len(example.tokens) - 1] = True
    return TokenBatch(tokens, counts, longest, len(numbers), own)
