"""Collecting chats in a file that ``mlx_eagle.train`` takes as data (``--collect``).

What becomes of a request never depends on it.
"""

import json
import logging
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from mlx_lm.server import CompletionRequest
from mlx_lm.tokenizer_utils import TokenizerWrapper

COLLECT_BYTES = 256_000_000


class Collector:
    """Appends rows to a JSONL file that its owner alone may read.

    A file that would grow beyond ``max_bytes`` is renamed, ``.1`` at its end, in place of the one
    that had this name; rows that follow begin a new file.
    """

    def __init__(self, path: Path, max_bytes: int = COLLECT_BYTES):
        """Raises ValueError where the file cannot be written."""
        self.path, self.max_bytes = path, max_bytes
        self._lock = Lock()
        self._is_failing = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(b"")
        except OSError as err:
            raise ValueError(
                f"--collect {path} cannot be written ({err.strerror}): name a file in a folder "
                "that you may write to."
            ) from err

    def keep(self, row: Mapping[str, Any]) -> None:
        """Append a row; where that fails, say so once until it works again."""
        line = json.dumps(row).encode() + b"\n"
        with self._lock:
            try:
                self._append(line)
            except OSError as err:
                if not self._is_failing:
                    logging.warning(
                        f"{self.path} cannot be written ({err.strerror}): answers are not kept "
                        "until it can."
                    )
                self._is_failing = True
            else:
                self._is_failing = False

    def _append(self, line: bytes) -> None:
        """The line whole or not at all. Whoever moves the file away gets all that is in it."""
        file = self._open()
        try:
            size = os.fstat(file).st_size
            if size and size + len(line) > self.max_bytes:
                os.replace(self.path, f"{self.path}.1")
                os.close(file)
                file, size = self._open(), 0
            while line:
                try:
                    line = line[os.write(file, line) :]
                except OSError:
                    os.ftruncate(file, size)
                    raise
        finally:
            os.close(file)

    def _open(self) -> int:
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.fchmod(file, 0o600)  # also a file that was there
        return file


def open_collector(args: Namespace) -> Collector | None:
    """The collector of the flags, if they ask for one; ValueError where it cannot write."""
    if args.collect is None:
        return None
    return Collector(Path(args.collect).expanduser(), args.collect_size)


def chat_row(
    request: CompletionRequest,
    prompt: Sequence[int],
    answer: Sequence[int],
    tokenizer: TokenizerWrapper,
    template_args: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """A conversation with its answer, as mlx-lm's data sets have it.

    With it go the very tokens, as ``mlx_eagle.train.answers`` writes them, where the tokenizer
    makes the same prompt of the messages once more; else its reader would refuse them. ``facts``
    are kept beside.
    """
    is_ended = bool(answer) and answer[-1] in tokenizer.eos_token_ids
    text = tokenizer.decode(list(answer[:-1] if is_ended else answer))
    row: dict[str, Any] = {**facts}
    row["messages"] = [*request.messages, {"role": "assistant", "content": text}]
    if request.tools:
        row["tools"] = request.tools
    if template_args:
        row["chat_template_kwargs"] = dict(template_args)
    if tokenizer.has_chat_template:
        again = tokenizer.apply_chat_template(
            request.messages,
            tools=request.tools,
            add_generation_prompt=True,
            return_dict=False,
            **template_args,
        )
        if list(again) == list(prompt):
            row |= {"prompt_length": len(prompt), "tokens": [*prompt, *answer]}
    return row
