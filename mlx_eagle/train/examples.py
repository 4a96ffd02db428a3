"""Training data: mlx-lm's own data sets as token sequences, and batches of them.

What is read, which of its tokens count, and in which order batches come.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.datasets import load_dataset

from .losses import padded

PAD_TO = 64  # lengths of batches for compiled steps are multiples of it
MIN_ANSWER = 2
ANSWERED = {"completion", "messages", "text", "tokens"}  # what mlx-lm or we can learn from
HELD_OUT = 0.05
MOST_HELD_OUT = 128


@dataclass(frozen=True)
class Example:
    """A sequence; tokens from ``num_prompt`` on are the answer, whose slots count."""

    tokens: tuple[int, ...]
    num_prompt: int

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
    read by mlx-lm's data sets. Sequences are cut at ``max_length``. Without ``mask_prompt``, and
    in rows that are plain text, every token counts. Raises ValueError, one sentence, where there
    is nothing to learn from.
    """
    _check_folder(data)
    options = SimpleNamespace(data=data, train=True, test=False, mask_prompt=False)
    try:
        train, valid, _ = load_dataset(options, tokenizer)
    except (KeyError, IndexError, TypeError, AttributeError) as err:
        raise ValueError(f"{data} cannot be read as a data set ({err!r}): see --data.") from err
    notes: list[str] = []
    found = _encoded(train, tokenizer, mask_prompt, "train")
    sequences = _fitting(found, vocab_size, max_length, data, notes)
    held_out: list[Example] = []
    if len(valid):
        found = _encoded(valid, tokenizer, mask_prompt, "valid")
        held_out = _fitting(found, vocab_size, max_length, data, [])
    else:
        num = min(MOST_HELD_OUT, int(len(sequences) * HELD_OUT))
        sequences, held_out = sequences[: len(sequences) - num], sequences[len(sequences) - num :]
        what = f"the last {num} sequences of train.jsonl are held out" if num else "no evaluation"
        notes.append(f"There is no valid.jsonl: {what}.")
    return Examples(tuple(sequences), tuple(held_out), tuple(notes))


def _check_folder(data: str) -> None:
    """One sentence for what mlx-lm would answer with a traceback."""
    path = Path(data)
    if not path.exists():
        if find_spec("datasets") is None:
            raise ValueError(
                f"{data} is no folder here, and data sets of the hub need the package datasets: "
                "give a folder that holds train.jsonl, or pip install datasets."
            )
        return  # a hub data set, or mlx-lm says that it is none
    if not path.is_dir():
        raise ValueError(f"{data} is a file: give the folder that holds it as train.jsonl.")
    for name in ("train", "valid", "test"):
        file = path / f"{name}.jsonl"
        if not file.is_file():
            if name == "train":
                raise ValueError(f"{data} has no train.jsonl: put the training data there.")
            continue
        _check_rows(file)


def _check_rows(file: Path) -> None:
    number = 0
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as err:
                raise ValueError(f"{file}, line {number} is not JSON ({err}).") from err
            if not isinstance(row, dict):
                raise ValueError(f"{file}, line {number} is no JSON object: see --data.")
            if "prompt" in row and not ANSWERED & row.keys():
                raise ValueError(
                    f"{file}, line {number} has a prompt and no answer to learn from: give a "
                    '"completion" on every line, or have answers made with --regenerate.'
                )
    if number == 0:
        raise ValueError(f"{file} is empty: it needs a JSON object on each line.")


def _encoded(
    dataset: Any, tokenizer: TokenizerWrapper, mask_prompt: bool, name: str
) -> list[Example]:
    """Every row as tokens; ValueError naming the first row that has no answer or no tokens."""
    for part in getattr(dataset, "_data", []) if _is_joined(dataset) else [dataset]:
        if hasattr(part, "mask_prompt"):
            part.mask_prompt = mask_prompt
    examples = []
    for number in range(len(dataset)):
        row = dataset[number]
        where = f"{name}.jsonl, line {number + 1}"
        if "tokens" in row:
            _check_recorded(row, tokenizer, where)
            examples.append(Example(tuple(row["tokens"]), row["prompt_length"] * mask_prompt))
            continue
        if mask_prompt and not _has_answer(row):
            raise ValueError(
                f"{where} has no answer to learn from: let it end with the assistant's message, "
                "have answers made with --regenerate, or learn from all of it with "
                "--no-mask-prompt."
            )
        try:
            tokens, num_prompt = dataset.process(row)
        except (KeyError, IndexError, TypeError, AttributeError) as err:
            raise ValueError(
                f"{where} cannot be read ({err!r}): every row needs the same keys."
            ) from err
        examples.append(Example(tuple(tokens), num_prompt))
    return examples


def _is_joined(dataset: Any) -> bool:
    return all(hasattr(part, "process") for part in getattr(dataset, "_data", [None]))


def _has_answer(row: dict[str, Any]) -> bool:
    """Whether a conversation ends with an answer; other rows have one by their format."""
    messages = row.get("messages")
    return not messages or messages[-1].get("role") == "assistant"


def _check_recorded(row: dict[str, Any], tokenizer: TokenizerWrapper, where: str) -> None:
    """Raise ValueError unless the recorded tokens are of this tokenizer."""
    size, messages = row.get("prompt_length"), row.get("messages")
    if not isinstance(size, int) or not 0 <= size <= len(row["tokens"]):
        raise ValueError(f'{where} has "tokens" but no fitting "prompt_length".')
    if messages:
        prompt = tokenizer.apply_chat_template(
            messages[:-1],
            tools=row.get("tools"),
            add_generation_prompt=True,
            return_dict=False,
            **row.get("chat_template_kwargs", {}),
        )
        if list(prompt) != row["tokens"][:size]:
            raise ValueError(
                f"{where} holds tokens that this target's tokenizer would not give: they are "
                "another target's answers; have answers made with --regenerate."
            )


def _fitting(
    examples: Sequence[Example], vocab_size: int, max_length: int, data: str, notes: list[str]
) -> list[Example]:
    """The sequences cut to length, without those that have no answer within it."""
    kept, num_cut = [], 0
    for example in examples:
        largest = max(example.tokens, default=0)
        if largest >= vocab_size:
            raise ValueError(
                f"{data} holds token {largest}, but the target has {vocab_size} tokens: it was "
                "made for another vocabulary."
            )
        cut = Example(example.tokens[:max_length], example.num_prompt)
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
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def batch(self, number: int) -> list[int]:
        """The numbers of the sequences in batch ``number``, counted from 0 over all epochs."""
        epoch, place = divmod(number, self.num_batches)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._make_epoch(epoch))
        return self._epoch[1][place]

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


def make_batch(
    examples: Sequence[Example], numbers: Sequence[int], rank: int = 0, num_ranks: int = 1
) -> TokenBatch:
    """The sequences of those numbers, of which this rank takes every ``num_ranks``-th."""
    longest = max(len(examples[i].tokens) for i in numbers)
    own = tuple(numbers[rank::num_ranks])
    shape = len(own), padded(longest, PAD_TO)
    tokens, counts = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for row, number in enumerate(own):
        example = examples[number]
        tokens[row, : len(example.tokens)] = example.tokens
        counts[row, max(0, example.num_prompt - 1) : len(example.tokens) - 1] = True
    return TokenBatch(tokens, counts, longest, len(numbers), own)
