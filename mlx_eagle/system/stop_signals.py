"""Signals that end a command once what is being computed is whole.

An exception in the middle of a forward pass would leave some layers a token ahead of others, and
one in the middle of a batch a checkpoint half written. So ``StopSignals`` notes a first signal,
and the worker looks at the note between tokens or batches, or waits for it.
"""

import select
import signal
import socket
import threading
from types import FrameType

import mlx.core as mx

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A block in which signals are only noted and can be waited for; afterwards all is as before.

    With ``once`` only the first one is noted: a second one acts as usual, so Ctrl-C raises
    KeyboardInterrupt. Signals belong to the main thread: in any other nothing happens.

    The system hands a signal to any thread. Python then runs its handler in the main thread,
    once that has a moment; but a byte is written to a socket where the signal arrives, so that a
    thread that waits for the socket knows at once, whatever the main thread is doing.
    """

    def __init__(self, numbers: tuple[signal.Signals, ...] = STOPPING, once: bool = False):
        self.is_asked = False
        self._numbers = numbers
        self._once = once

    def __enter__(self) -> "StopSignals":
        self.is_asked = False
        self._before = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        # On a CPU MLX tries the compiler once, before the first compiled function; as long as the
        # process waits for that, in C's ``system``, Ctrl-C is lost to it.
        mx.compile(lambda: None)()
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        self._before = {number: signal.getsignal(number) for number in self._numbers}
        for number in self._numbers:
            signal.signal(number, self._receive)
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        self._restore()
        self._reader.close()
        self._writer.close()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
        if self._once:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float | None = None) -> bool:
        """Whether a signal came, waiting at most ``seconds`` for it; each counts once."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        return bool(ready) and self._reader.recv(1) != b""
