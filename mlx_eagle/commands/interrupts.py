"""Ctrl-C while an answer is written: asks it to end, where the caches are whole.

An exception in the middle of a forward pass would leave some layers a token ahead of others. So a
first Ctrl-C is only noted, and whoever writes the answer looks at the note between tokens. A
second one is Python's own KeyboardInterrupt.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..system.device import settle_compiling


class Interrupt:
    """Whether Ctrl-C was pressed since ``listening`` began."""

    def __init__(self) -> None:
        self.is_wanted = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, a first Ctrl-C sets ``is_wanted``; afterwards it does what it did before."""
        self.is_wanted = False
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
            return
        settle_compiling()
        before = signal.signal(signal.SIGINT, self._receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.is_wanted:
            raise KeyboardInterrupt
        self.is_wanted = True
