"""Collecting chats in a file that ``mlx_eagle.train`` takes as data (``--collect``).

What becomes of a request never depends on it.
"""

import errno
import hashlib
import json
import logging
import os
import stat
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from mlx_lm.server import CompletionRequest
from mlx_lm.tokenizer_utils import TokenizerWrapper

COLLECT_BYTES = 256_000_000
MOST_KNOWN = 100_000  # rows that are not kept a second time


class Collector:
    """Appends rows to a JSONL file that its owner alone may read; each conversation once.

    It has to be a regular file of this user, with no other name: what a link leads to, a device
    or another's file is left as it is. A file that would grow beyond ``max_bytes`` is renamed,
    ``.1`` at its end, in place of the one that had this name; rows that follow begin a new file.
    """

    def __init__(self, path: Path, max_bytes: int = COLLECT_BYTES):
        """Raises ValueError where the file cannot be written."""
        self.path = path
        self.max_bytes = max_bytes
        self._lock = Lock()
        self._is_failing = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(b"")
            self._known = dict.fromkeys(self._kept())
        except OSError as err:
            raise ValueError(
                f"--collect {path} cannot be written ({err.strerror}): name a file in a folder "
                "that you may write to."
            ) from err

    def keep(self, row: Mapping[str, Any]) -> None:
        """Append a row, unless it was kept; where that fails, say so once until it works again."""
        line = json.dumps(row).encode() + b"\n"
        digest = _digest(row)
        with self._lock:
            if digest in self._known:
                return
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
                self._known[digest] = None
                if len(self._known) > MOST_KNOWN:
                    del self._known[next(iter(self._known))]

    def _kept(self) -> Iterator[bytes]:
        """The digests of the rows in the file; lines that are none of ours do not matter."""
        with self.path.open("rb") as file:
            for line in file:
                with suppress(ValueError, AttributeError, RecursionError):
                    yield _digest(json.loads(line))

    def _append(self, line: bytes) -> None:
        """The line whole or not at all. Whoever moves the file away gets all that is in it."""
        file = self._open()
        try:
            size = os.fstat(file).st_size
            if size and size + len(line) > self.max_bytes:
                os.replace(self.path, f"{self.path}.1")
                os.close(file)
                file = self._open()
                size = 0
            while line:
                try:
                    line = line[os.write(file, line) :]
                except OSError:
                    os.ftruncate(file, size)
                    raise
        finally:
            os.close(file)

    def _open(self) -> int:
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise OSError(errno.EINVAL, "it is no regular file")  # to open some has effects
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(self.path, flags, 0o600)
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink > 1:
            os.close(file)
            raise OSError(errno.EINVAL, "it is another user's, or has another name")
        os.fchmod(file, 0o600)  # also a file that was there
        return file


def _digest(row: Mapping[str, Any]) -> bytes:
    """Names a conversation with its answer, tools and arguments."""
    said = [row.get(name) for name in ("messages", "tools", "chat_template_kwargs")]
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).digest()


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
