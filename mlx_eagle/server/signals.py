"""SIGINT and SIGTERM, waited for in a way that misses none."""

import select
import signal
import socket
from types import TracebackType

from ..system.device import settle_compiling

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Within, these signals end nothing by themselves, but are waited for.

    The system hands a signal to any thread. Python then runs its handler in the main thread,
    once that has a moment; but a byte is written to a socket where the signal arrives, so that
    whoever waits for the socket knows at once, whatever the main thread is at.
    """

    def __enter__(self) -> "StopSignals":
        settle_compiling()
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._before = {number: signal.getsignal(number) for number in STOPPING}
        self._wakeup_before = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        for number in STOPPING:
            signal.signal(number, lambda number, frame: None)  # without one nothing is written
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether one came, waiting at most so long for it; each counts once."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        return bool(ready) and self._reader.recv(1) != b""
