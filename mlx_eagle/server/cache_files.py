"""A folder of prompt caches that outlive a server: mlx-lm's own files, one per text.

Several servers may use one folder. A file appears whole or not at all and never changes, and what
is wrong with one costs no more than reading its text again.
"""

import base64
import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from ..system.atomic_folder import remove_orphans, try_lock
from ..system.safetensors import read_header, read_metadata
from ..target_model.rollback import check_supported
from .identity import digest

FOLDER_BYTES = 20_000_000_000
NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}\.safetensors")  # the last part is ``_checksum``
DRAFT = ".{}.{}.part.safetensors"
UNREADABLE = (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError)
"""Errors that mlx-lm, MLX and we raise for files that are damaged or of another version."""
IS_TRUE = {"True": True, "False": False}
Tokens = npt.NDArray[np.int32]


class Caches(list[Any]):
    """Caches of one sequence: the first ``num_target`` are the target's, the rest the drafter's.

    ``is_whole``: the drafter's part has all that it keeps of the last token.
    """

    def __init__(self, caches: list[Any], num_target: int | None = None, is_whole: bool = True):
        super().__init__(caches)
        self.num_target = len(caches) if num_target is None else num_target
        self.is_whole = is_whole

    @property
    def target(self) -> list[Any]:
        return list(self[: self.num_target])

    @property
    def draft(self) -> list[Any]:
        return list(self[self.num_target :])

    @property
    def nbytes(self) -> int:
        return sum(int(cache.nbytes) for cache in self)


@dataclass(eq=False)
class Snapshot:
    """Caches of one text: in memory, in a file, or in both.

    ``rank``: the lowest leave memory first. It is the number of tokens to read again, plus the
    rank of the last one that had left when this was last used, so that no text stays only for
    its length. Only requests with the same ``salt`` use it.
    """

    tokens: Tokens
    cache_type: str
    is_trimmable: bool
    salt: str = ""
    caches: Caches | None = None
    path: Path | None = None
    rank: int = 0
    is_unwritable: bool = False

    def num_usable(self, tokens: Tokens) -> int:
        """Count the first tokens of a text that need not be read."""
        size = min(len(self.tokens), len(tokens))
        differ = self.tokens[:size] != tokens[:size]
        num_common = int(differ.argmax()) if differ.any() else size
        return num_common if self.is_trimmable or num_common == len(self.tokens) else 0

    @classmethod
    def of(cls, path: Path, metadata: Mapping[str, str]) -> "Snapshot":
        """Make the snapshot of a file; its caches are read when they are needed.

        Raises ValueError or KeyError for other metadata.
        """
        tokens = np.frombuffer(base64.b64decode(metadata["tokens"]), "<i4").astype(np.int32)
        _as_caches([], metadata)  # which raises, too
        is_trimmable = IS_TRUE[metadata["is_trimmable"]]
        salt = metadata.get("salt", "")
        return cls(tokens, metadata["cache_type"], is_trimmable, salt, path=path)

    def metadata(self) -> dict[str, str]:
        """Return the metadata for its file; the caches have to be in memory."""
        assert self.caches is not None
        return {
            "tokens": base64.b64encode(self.tokens.astype("<i4").tobytes()).decode(),
            "cache_type": self.cache_type,
            "is_trimmable": str(self.is_trimmable),
            "num_target": str(self.caches.num_target),
            "is_whole": str(self.caches.is_whole),
            **({"salt": self.salt} if self.salt else {}),
        }


def _as_caches(caches: list[Any], metadata: Mapping[str, str]) -> Caches:
    """Wrap the caches of a file as its metadata says."""
    return Caches(caches, int(metadata["num_target"]), IS_TRUE[metadata["is_whole"]])


class CacheFolder:
    """Prompt-cache files of any number of servers, which share ``max_bytes``.

    The least recently used files go first. ``pair`` says what caches depend on: files that
    another pair has written are not touched.
    """

    def __init__(self, path: Path, max_bytes: int = FOLDER_BYTES):
        """Raises ValueError if files cannot be written."""
        self.path = path
        self.max_bytes = max_bytes
        self.pair: dict[str, str] = {}
        self._known: dict[Path, Snapshot | None] = {}  # None: of another pair, or broken
        self._is_failing = False
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        except OSError as err:
            raise ValueError(
                f"--prompt-cache-dir {path} cannot be written ({err.strerror}): name a folder "
                "that you may write to."
            ) from err
        remove_orphans(path.glob(DRAFT.format("*", "*")))  # of servers that were killed
        self._make_room()

    def files(self) -> dict[Path, Snapshot]:
        """Return new snapshots of this pair's files that exist now, by path."""
        there = [path for path, _ in self._entries()]
        known = {path: self._known[path] for path in there if path in self._known}
        self._known = known | {path: self._read(path) for path in there if path not in known}
        return {path: replace(text) for path, text in self._known.items() if text is not None}

    def save(self, text: Snapshot) -> Path | None:
        """Write a file, and remove others if there are too many; None if it cannot be written.

        The log says so once, until it works again.
        """
        try:
            path = self._write(text)
        except (OSError, ValueError, RuntimeError) as err:
            if not self._is_failing:
                reason = getattr(err, "strerror", None) or str(err).rstrip(".")
                logging.warning(
                    f"A prompt cache could not be written to {self.path} ({reason}): it is kept "
                    "in memory only, as are others until they can be written."
                )
            self._is_failing = True
            return None
        self._is_failing = False
        self._make_room(path)
        return path

    def load(self, path: Path) -> Caches | None:
        """Load the caches of a file; None if it is gone, or broken and now removed."""
        try:
            if _checksum(path) != path.stem[-8:]:
                raise ValueError("it is not what was written")
            caches, metadata = load_prompt_cache(str(path), return_metadata=True)
            mx.eval([cache.state for cache in caches])
            return _as_caches(caches, metadata)
        except UNREADABLE as err:
            self._discard(path, err)
            return None

    def use(self, path: Path) -> None:
        """Mark a file as used, so that others go first."""
        with suppress(OSError):
            os.utime(path)

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove files."""
        for path in paths:
            with suppress(OSError):
                path.unlink()

    def measure(self) -> tuple[int, int]:
        """Count the files of all pairs, and their bytes."""
        sizes = [found.st_size for _, found in self._entries()]
        return len(sizes), sum(sizes)

    def _entries(self) -> list[tuple[Path, os.stat_result]]:
        """List the files that may be read: regular ones of this user, with our kind of name."""
        entries = []
        with suppress(OSError):
            for path in self.path.iterdir():
                with suppress(FileNotFoundError):
                    found = path.lstat()
                    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
                    if is_ours and NAME.fullmatch(path.name):
                        entries.append((path, found))
        return entries

    def _read(self, path: Path) -> Snapshot | None:
        """Read the metadata of a file; None if it is of another pair, or broken."""
        try:
            metadata = {
                name.removeprefix("0."): value for name, value in read_metadata(path).items()
            }
            is_ours = all(metadata.get(name) == value for name, value in self.pair.items())
            is_ours = is_ours and bool(self.pair)  # of nobody known, none is
            return Snapshot.of(path, metadata) if is_ours else None
        except UNREADABLE as err:
            self._discard(path, err)
            return None

    def _discard(self, path: Path, err: Exception) -> None:
        self._known[path] = None
        if not path.exists():  # another server has let go of it
            return
        cause = err if isinstance(err, OSError) else err.__cause__
        if isinstance(cause, OSError):  # which may pass
            logging.warning(f"The prompt cache {path} cannot be read ({cause.strerror}).")
            return
        logging.warning(f"The prompt cache {path} is damaged: it is removed, not used.")
        with suppress(OSError):
            path.unlink()

    def _write(self, text: Snapshot) -> Path:
        """Write the file under a temporary name that is locked, then rename it."""
        caches = text.caches or []
        check_supported(caches, "pair")
        size = sum(cache.nbytes for cache in caches)
        if size > self.max_bytes:
            raise OSError(errno.EFBIG, f"{size} bytes are more than --prompt-cache-bytes")
        metadata = text.metadata() | self.pair
        name = digest(repr(sorted(metadata.items())))
        draft = self.path / DRAFT.format(name, secrets.token_hex(4))
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try_lock(file)
            try:
                save_prompt_cache(str(draft), caches, metadata)
            except RuntimeError as err:  # MLX says that it could not write, and not why
                if shutil.disk_usage(self.path).free < size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from err
                raise
            os.fsync(file)
            read_header(draft)
            path = self.path / f"{name}-{_checksum(draft)}.safetensors"
            os.rename(draft, path)
        finally:
            with suppress(FileNotFoundError):
                draft.unlink()
            os.close(file)
        return path

    def _make_room(self, newest: Path | None = None) -> None:
        """Remove the least recently used files until the rest fit ``max_bytes``."""
        entries = sorted(self._entries(), key=lambda entry: entry[1].st_mtime_ns)
        total = sum(found.st_size for _, found in entries)
        for path, found in entries:
            if total > self.max_bytes and path != newest:
                self.remove([path])
                total -= found.st_size


def _checksum(path: Path) -> str:
    """Checksum of all bytes of a file, in eight digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:8]
