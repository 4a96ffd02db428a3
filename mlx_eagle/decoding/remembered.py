"""Costs that were measured once, in a file that several processes share.

A home that cannot be written costs a warning and nothing else: what was measured is then
remembered until the process ends.
"""

import fcntl
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

from ..system.documents import number_above, parse_object, read_bytes
from .costs import DraftShape, RoundCosts, Ways

SECONDS = number_above(1e-9, 1e6)
LONGEST_KEY = 4096
LOCK_TIMEOUT = 10.0  # seconds; the lock is held for a few milliseconds
POLL = 0.01
WAYS = {field.name for field in fields(Ways)}

Entry = dict[str, Any]
"""{"plain": seconds, "rounds": {shape: seconds}}, with "failed": [shape] and "ways": [name of what
is done] where there are any."""


@cache
def open_cost_file(path: Path) -> "CostFile":
    """The file at ``path``, the same object for all who ask."""
    return CostFile(path)


class CostFile:
    """What rounds cost, by key. Usable by several threads, and by several processes at once."""

    def __init__(self, path: Path):
        self._path = path
        self._unsaved: dict[str, Entry] = {}
        self._recent: set[str] = set()
        self._has_warned = False
        self._mutex = threading.Lock()

    def get(self, key: str, shapes: Sequence[DraftShape]) -> RoundCosts | None:
        """The costs of exactly these ``shapes``; None where they are not known."""
        with self._mutex:
            entry = self._unsaved.get(key)
        if entry is None:
            entry = read_entries(self._path).get(key)
        return None if entry is None else _costs_in(entry, shapes)

    def is_recent(self, key: str) -> bool:
        """Whether this process has put something there."""
        with self._mutex:
            return key in self._recent

    def put(self, key: str, costs: RoundCosts) -> None:
        """Remember ``costs``: beside what others have written, or where that fails, in memory."""
        with self._mutex:
            self._recent.add(key)
            self._unsaved[key] = _entry_of(costs)
            try:
                _merge(self._path, self._unsaved)
            except OSError as err:
                self._warn(err)
            else:
                self._unsaved.clear()

    def _warn(self, err: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        print(
            f"Warning: what rounds cost could not be saved in {self._path.parent} "
            f"({err.strerror or err}); it is measured again by the next process.",
            file=sys.stderr,
        )


def _entry_of(costs: RoundCosts) -> Entry:
    rounds = {str(shape): seconds for shape, seconds in costs.rounds.items()}
    entry: Entry = {"plain": costs.plain, "rounds": rounds}
    if costs.failed:
        entry["failed"] = [str(shape) for shape in costs.failed]
    if any(asdict(costs.ways).values()):
        entry["ways"] = [name for name, is_done in asdict(costs.ways).items() if is_done]
    return entry


def _costs_in(entry: Entry, shapes: Sequence[DraftShape]) -> RoundCosts | None:
    """The costs of exactly these shapes; None where the entry is of others."""
    rounds, failed = entry["rounds"], entry.get("failed") or ()
    if {*rounds, *failed} != {str(shape) for shape in shapes}:
        return None
    return RoundCosts(
        entry["plain"],
        {shape: rounds[str(shape)] for shape in shapes if str(shape) in rounds},
        tuple(shape for shape in shapes if str(shape) in failed),
        Ways(**dict.fromkeys(entry.get("ways") or (), True)),
    )


def read_entries(path: Path) -> dict[str, Entry]:
    """The well-formed entries of a file; none where it is missing, damaged or not a file."""
    try:
        if not path.is_file():
            return {}
        known = parse_object(read_bytes(path), path)
    except (OSError, ValueError):
        return {}
    return {key: entry for key, entry in known.items() if _is_entry(key, entry)}


def _is_entry(key: str, entry: Any) -> bool:
    if len(key) > LONGEST_KEY or not isinstance(entry, dict):
        return False
    rounds, failed, ways = (entry.get(name) for name in ("rounds", "failed", "ways"))
    if not SECONDS.holds(entry.get("plain")) or not isinstance(rounds, dict):
        return False
    if not _are_texts(failed) or not _are_texts(ways) or not {*(ways or ())} <= WAYS:
        return False
    return bool(rounds or failed) and all(map(SECONDS.holds, rounds.values()))


def _are_texts(value: Any) -> bool:
    return value is None or isinstance(value, list) and all(isinstance(v, str) for v in value)


def _merge(path: Path, entries: dict[str, Entry]) -> None:
    """Put ``entries`` into the file; OSError where that is impossible, and nothing has changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        # Whoever writes holds the lock, so these are of processes that were ended meanwhile.
        for left in path.parent.glob(f"{path.stem}.*.new"):
            left.unlink(missing_ok=True)
        document = json.dumps(read_entries(path) | entries, indent=1)
        handle, name = tempfile.mkstemp(".new", f"{path.stem}.", path.parent)
        fresh = Path(name)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(document)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Within, no other process or thread holds the lock; OSError where it cannot be had."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        end = time.monotonic() + LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(POLL)
        yield
    finally:
        os.close(handle)  # which ends the lock
