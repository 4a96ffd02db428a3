"""Ctrl-C that is answered behind the batch at hand."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from ..system.device import settle_compiling


@dataclass
class Stop:
    """Whether somebody asked the run to stop."""

    is_asked: bool = False


@contextmanager
def stopping() -> Iterator[Stop]:
    """Within, the first Ctrl-C or SIGTERM only asks to stop; the second is as ever."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    settle_compiling()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def ask(number: int, frame: FrameType | None) -> None:
        stop.is_asked = True
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in numbers:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
