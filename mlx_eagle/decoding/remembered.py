"""What rounds cost, in a file that several processes share.

Costs carry the date when they were first timed and the versions of what was timed. After two
weeks, or under other versions, they are no more than a guess to begin with; after two months
they are dropped.

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
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..system.json_schema import FieldType, is_number, number_above, parse_object, read_bytes
from .costs import PLAIN, DraftShape, RoundCosts, Ways

SECONDS = number_above(1e-9, 1e6)
DATES = number_above(0, 1e12)
SHARES = FieldType("a number from 0 to 1", lambda v: is_number(v) and 0 <= v <= 1)
LONGEST_KEY = 4096
LOCK_TIMEOUT = 10.0  # seconds; the lock is held for a few milliseconds
POLL = 0.01
DAY = 24 * 3600.0
FRESH, LONGEST = 14 * DAY, 60 * DAY
MOST_ENTRIES = 500
PACKAGES = ("mlx", "mlx-lm", "mlx-eagle")
WAYS = {field.name for field in fields(Ways)}

Entry = dict[str, Any]
"""{"plain": seconds, "rounds": {shape: seconds}, "date": seconds since 1970, "versions": text},
with "failed": [shape] and "guessed": [shape] where there are any, and where ways were tried
"ways": [name of what is done], and where drafts were seen "acceptance": share of first ones."""


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
        """The costs of exactly these ``shapes``; None where they are not known.

        They are guesses where they have to be refreshed; what failed is then to be tried again.
        """
        entry = self._entry(key)
        if entry is None:
            return None
        costs = _costs_in(entry, shapes)
        if costs is None or is_fresh(entry):
            return costs
        return None if costs.failed else costs.as_guess()

    def _entry(self, key: str) -> Entry | None:
        with self._mutex:
            entry = self._unsaved.get(key)
        return read_entries(self._path).get(key) if entry is None else entry

    def is_recent(self, key: str) -> bool:
        """Whether this process has put something there."""
        with self._mutex:
            return key in self._recent

    def put(self, key: str, costs: RoundCosts) -> None:
        """Remember ``costs``, all timed anew."""
        self._put(key, _entry_of(costs, time.time()))

    def correct(self, key: str, costs: RoundCosts) -> None:
        """Remember ``costs``, some of them timed anew, unless more of them were known before."""
        before = self._entry(key)
        if before is None or not is_fresh(before):
            self.put(key, costs)
        elif len(costs.guessed) <= len(before.get("guessed") or ()):
            self._put(key, _entry_of(costs, before["date"]))

    def _put(self, key: str, entry: Entry) -> None:
        """Beside what others have written; where that cannot be, in memory."""
        with self._mutex:
            self._recent.add(key)
            self._unsaved[key] = entry
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
            f"({err.strerror or err}); it is learned again by the next process.",
            file=sys.stderr,
        )


def is_fresh(entry: Entry) -> bool:
    """Whether the costs of an entry may be relied on."""
    return age_of(entry) < FRESH and entry.get("versions") == versions()


def age_of(entry: Entry) -> float:
    """Seconds since an entry's costs were first timed; of a date to come, until then."""
    return abs(time.time() - (entry.get("date") or 0.0))


def versions() -> str:
    """Those of all that a round's time depends on."""
    return ", ".join(f"{name} {version(name)}" for name in PACKAGES)


def _entry_of(costs: RoundCosts, date: float) -> Entry:
    rounds = {str(shape): seconds for shape, seconds in costs.rounds.items()}
    entry: Entry = {"plain": costs.plain, "rounds": rounds}
    entry |= {"date": round(date), "versions": versions()}
    for name, shapes in (("failed", costs.failed), ("guessed", costs.guessed)):
        if shapes:
            entry[name] = sorted(map(str, shapes))
    if costs.acceptance is not None:
        entry["acceptance"] = round(costs.acceptance, 4)
    if costs.knows_ways:
        entry["ways"] = [name for name, is_done in asdict(costs.ways).items() if is_done]
    return entry


def _costs_in(entry: Entry, shapes: Sequence[DraftShape]) -> RoundCosts | None:
    """The costs of exactly these shapes; None where the entry is of others."""
    rounds: dict[str, float] = entry["rounds"]
    failed, guessed = (entry.get(name) or () for name in ("failed", "guessed"))
    if {*rounds, *failed} != {str(shape) for shape in shapes}:
        return None
    return RoundCosts(
        entry["plain"],
        {shape: rounds[str(shape)] for shape in shapes if str(shape) in rounds},
        tuple(shape for shape in shapes if str(shape) in failed),
        Ways(**dict.fromkeys(entry.get("ways") or (), True)),
        frozenset(shape for shape in (PLAIN, *shapes) if str(shape) in guessed),
        "ways" in entry,
        entry.get("acceptance"),
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
    if not all(map(_are_texts, (failed, ways, entry.get("guessed")))):
        return False
    if not {*(ways or ())} <= WAYS or not DATES.holds(entry.get("date", 1.0)):
        return False
    if not SHARES.holds(entry.get("acceptance", 1.0)):
        return False
    return bool(rounds or failed) and all(map(SECONDS.holds, rounds.values()))


def _are_texts(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(v, str) for v in value))


def _merge(path: Path, entries: dict[str, Entry]) -> None:
    """Put ``entries`` into the file; OSError where that is impossible, and nothing has changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        # Whoever writes holds the lock, so these are of processes that were ended meanwhile.
        for left in path.parent.glob(f"{path.stem}.*.new"):
            left.unlink(missing_ok=True)
        document = json.dumps(_worth_keeping(read_entries(path) | entries), indent=1)
        handle, name = tempfile.mkstemp(".new", f"{path.stem}.", path.parent)
        fresh = Path(name)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(document)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)


def _worth_keeping(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The newest, but none that is so old that nobody can have used it for weeks."""
    by_age = sorted(entries, key=lambda key: age_of(entries[key]))
    kept = {key for key in by_age[:MOST_ENTRIES] if age_of(entries[key]) < LONGEST}
    return {key: entry for key, entry in entries.items() if key in kept}


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
