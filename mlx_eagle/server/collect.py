"""Collecting chats in a file that ``mlx_eagle.train`` takes as data (``--collect``).

No request fails because of it.
"""

import errno
import json
import logging
import os
import stat
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any

from .identity import digest

COLLECT_BYTES = 256_000_000


class Collector:
    """Appends rows to a JSONL file that only its owner may read, no conversation twice.

    It has to be a regular file of this user, with no other name: links, devices and files of
    other users are not touched. A file that would grow beyond ``max_bytes`` gets ``.1`` at the
    end of its name, replacing an older one; later rows begin a new file.
    """

    def __init__(self, path: Path, max_bytes: int = COLLECT_BYTES):
        """Raises ValueError if the file cannot be written."""
        self.path = path
        self.max_bytes = max_bytes
        self._lock = Lock()
        self._is_failing = False
        self._known: set[str] = set()  # digests of the rows in the file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(b"")
            self._known.update(self._kept())
        except OSError as err:
            raise ValueError(
                f"--collect {path} cannot be written ({err.strerror}): name a file in a folder "
                "that you may write to."
            ) from err

    def keep(self, row: Mapping[str, Any]) -> None:
        """Append a row unless it is there; log a failure once, until it works again."""
        line = json.dumps(row).encode() + b"\n"
        said = _digest(row)
        with self._lock:
            if said in self._known:
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
                self._known.add(said)

    def _kept(self) -> Iterator[str]:
        """Yield the digests of the rows in the file, skipping lines that are not ours."""
        with self.path.open("rb") as file:
            for line in file:
                with suppress(ValueError, AttributeError, RecursionError):
                    yield _digest(json.loads(line))

    def _append(self, line: bytes) -> None:
        """Append the line whole or not at all, also if somebody moves the file meanwhile."""
        with self._open() as file:
            size = os.fstat(file.fileno()).st_size
            is_full = size > 0 and size + len(line) > self.max_bytes
            while line and not is_full:
                try:
                    line = line[file.write(line) :]
                except OSError:
                    file.truncate(size)
                    raise
        if is_full:
            os.replace(self.path, f"{self.path}.1")
            self._known.clear()
            self._append(line)

    def _open(self) -> FileIO:
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise OSError(errno.EINVAL, "it is no regular file")  # to open some has effects
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(self.path, flags, 0o600)
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink > 1:
            os.close(file)
            raise OSError(errno.EINVAL, "it is another user's, or has another name")
        os.fchmod(file, 0o600)  # also a file that was there
        return FileIO(file, "a")


def _digest(row: Mapping[str, Any]) -> str:
    """Digest of a conversation with its answer, tools and arguments."""
    return digest(json.dumps([row.get(n) for n in ("messages", "tools", "chat_template_kwargs")]))


def open_collector(args: Namespace) -> Collector | None:
    """Open the collector that the flags ask for. Raises ValueError if it cannot write."""
    if args.collect is None:
        return None
    return Collector(Path(args.collect).expanduser(), args.collect_size)
