"""Places to write to: our cache, folders that appear whole or not at all, and files that are
tested before the work.
"""

import fcntl
import glob
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class AlreadyThere(ValueError):
    """Another process has made the folder in the meantime."""


class CannotWrite(ValueError):
    """The folder cannot be written: no permission, no space, no such place."""


def user_cache() -> Path:
    """This package's folder in the user's cache directory, by the platform's convention.

    For a user without a home it is ``temporary_cache``.
    """
    base = "Library/Caches" if sys.platform == "darwin" else ".cache"
    try:
        return Path.home() / base / "mlx-eagle"
    except RuntimeError:  # what pathlib raises where neither HOME nor the system names a home
        return temporary_cache()


def temporary_cache() -> Path:
    """A folder of this user's own that lasts until temporary files are cleared.

    Where its usual name belongs to another user, it is a fresh one.
    """
    folder = Path(tempfile.gettempdir()) / f"mlx-eagle-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if is_ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return folder
    return Path(tempfile.mkdtemp(prefix="mlx-eagle-"))


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the name ``path`` only when all of it is there.

    Each call fills a folder of its own, so that several may run at once: the first to end
    wins, and the others raise AlreadyThere. Whatever ends the block early, an interrupt too,
    leaves nothing behind; what a killed process has left, the next call removes. An OSError,
    of the block too, becomes CannotWrite.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_orphans(path.parent.glob(f".{glob.escape(path.name)}.*.part"))
        draft, lock = _make_draft(path)
        try:
            yield draft
            _rename(draft, path)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            os.close(lock)
    except OSError as err:
        raise CannotWrite(
            f"{path} could not be written: {err.strerror or err}; nothing of it was kept"
        ) from err


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file to fill, which takes the name ``path`` when it is whole; else nothing is left."""
    draft = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a folder, made if need be; ``on_wait`` is called before any waiting.

    Where there is no such folder, or no lock on its file system, the block runs without.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        if not try_lock(lock):
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _rename(draft: Path, path: Path) -> None:
    try:
        os.rename(draft, path)
    except OSError as err:
        if not path.exists():
            raise
        raise AlreadyThere(
            f"{path} is there by now: another process has made it in the meantime; use it, or "
            "remove it and start again"
        ) from err


def discard_folder(path: Path) -> None:
    """Remove a folder at once: no process sees half of it, and a second caller does not fail."""
    grave = _draft_name(path)
    try:
        os.rename(path, grave)
    except FileNotFoundError:
        return
    shutil.rmtree(grave, ignore_errors=True)


def _draft_name(path: Path) -> Path:
    return path.parent / f".{path.name}.{secrets.token_hex(4)}.part"


def _make_draft(path: Path) -> tuple[Path, int]:
    """Make a draft of that folder; also the descriptor that locks it as long as we live."""
    while True:
        draft = _draft_name(path)
        draft.mkdir()
        # Until it is locked another process may take it for an orphan, and remove it.
        try:
            lock = os.open(draft, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if try_lock(lock) and draft.exists():
            return draft, lock
        os.close(lock)


def try_lock(descriptor: int) -> bool:
    """Whether the lock is ours now; also true where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        return not isinstance(err, BlockingIOError)
    return True


def remove_orphans(drafts: Iterable[Path]) -> None:
    """Remove files and folders whose process is gone: those that no process has locked."""
    for draft in drafts:
        with suppress(OSError):  # locked, or no locks here: not known to be an orphan
            lock = os.open(draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                mode = os.fstat(lock).st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    continue  # a pipe, say, which nobody here has made
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if draft.is_dir():
                    shutil.rmtree(draft, ignore_errors=True)
                else:
                    draft.unlink()
            finally:
                os.close(lock)


def check_writable(path: Path, flag: str, otherwise: str = "") -> None:
    """Raise ValueError where the file that ``flag`` names cannot be written; it is left as it was.

    ``otherwise`` says, behind a comma, what else the flag takes.
    """
    was_there = os.path.lexists(path)
    try:
        path.open("a").close()
    except OSError as err:
        raise ValueError(
            f"{flag} {path} cannot be written ({err.strerror}): name a file in a folder that you "
            f"may write to{otherwise}."
        ) from err
    if not was_there:
        path.unlink()
