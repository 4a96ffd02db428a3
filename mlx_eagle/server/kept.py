"""Documents kept in memory for clients that come back to them: the oldest leave first."""

import json
import time
from collections.abc import Callable
from threading import Lock
from typing import Any

KEPT_SECONDS = 3600.0  # for a client to come back
KEPT_BYTES = 100_000_000  # of JSON: a thousand turns of 100 kB


class Kept:
    """Documents by name, each for ``seconds`` and all in ``max_bytes``; any thread may ask."""

    def __init__(
        self,
        seconds: float = KEPT_SECONDS,
        max_bytes: int = KEPT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: dict[str, tuple[float, bytes]] = {}
        self._lock = Lock()

    @property
    def terms(self) -> str:
        """Time for which a document is kept, in words."""
        return f"for {self._seconds / 60:.0f} minutes, until the server stops"

    def put(self, name: str, document: Any) -> None:
        """Keep a document, which is JSON."""
        content = json.dumps(document).encode()
        with self._lock:
            self._kept[name] = (self._clock(), content)
            self._drop()

    def get(self, name: str) -> Any:
        """Return a copy of a document; None if it is not kept."""
        with self._lock:
            self._drop()
            found = self._kept.get(name)
        return None if found is None else json.loads(found[1])

    def remove(self, name: str) -> None:
        """Keep a document no longer."""
        with self._lock:
            self._kept.pop(name, None)

    def _drop(self) -> None:
        size = sum(len(content) for _, content in self._kept.values())
        oldest = self._clock() - self._seconds
        for name, (since, content) in list(self._kept.items()):
            if since > oldest and size <= self._max_bytes:
                return
            size -= len(content)
            del self._kept[name]
