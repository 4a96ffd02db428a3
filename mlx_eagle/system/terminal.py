"""The terminal: progress bars, marked drafts, how commands end, and signals.

Bars are drawn on standard error, where that is a terminal, and gone when done. The code that
makes people wait draws nothing by itself: it calls a callback ``(done, total)``, as mlx-lm's
``prompt_progress_callback`` is. The codes of marks are ECMA-48's "select graphic rendition";
https://no-color.org explains ``NO_COLOR``.

A user's mistake costs one sentence; Ctrl-C and SIGTERM end where all is whole. An exception in
the middle of a forward pass would leave some layers a token ahead of others, and one in the middle
of a batch a checkpoint half written. So ``StopSignals`` notes a first signal, and the worker looks
at the note between tokens or batches, or waits for it.
"""

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TextIO

from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from .device import settle_compiling

UNDERLINE, COLOUR = "4", "36"  # cyan, which can be read on light and dark backgrounds
END = "\x1b[24;39m"


@dataclass
class Marker:
    """Marks the pieces of one text, in order.

    ``codes`` are those of a marked piece; without any the text stays as it is.
    """

    codes: tuple[str, ...] = ()
    _is_begun: bool = False  # a letter has begun with a drafted token that has no text of its own

    @classmethod
    def of(cls, stream: TextIO, is_wanted: bool = True) -> "Marker":
        """For a terminal colour and underline, without colour where ``NO_COLOR`` is set."""
        is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        if not (is_wanted and is_terminal):
            return cls()
        return cls((UNDERLINE,) if os.environ.get("NO_COLOR") else (UNDERLINE, COLOUR))

    def __call__(self, text: str, is_drafted: bool) -> str:
        """The next piece. A letter of several tokens is marked if one of them was drafted."""
        is_drafted = is_drafted or self._is_begun
        self._is_begun = is_drafted and not text
        return self._marked(text) if is_drafted and self.codes else text

    @property
    def legend(self) -> str:
        """A line that says what the marks mean; empty where there are none."""
        if not self.codes:
            return ""
        how = "underlined" if self.codes == (UNDERLINE,) else "coloured and underlined"
        return f"Drafted tokens are {self._marked(how)}; the others are the target's own.\n"

    def _marked(self, text: str) -> str:
        begin = f"\x1b[{';'.join(self.codes)}m"
        # Line by line: some terminals underline the rest of a line that ends within a mark.
        return "\n".join(f"{begin}{line}{END}" if line else "" for line in text.split("\n"))


USER_ERRORS = (ValueError, OSError, HfHubHTTPError, LocalEntryNotFoundError)
"""What a user's mistake raises, here and in the libraries that load models."""
INTERRUPTED = 130  # exit codes as a shell has them: 128 and the number of the signal
PIPE_CLOSED = 141
STOPPING = (signal.SIGINT, signal.SIGTERM)


def run_command(command: Callable[[], None], interrupted: str = "interrupted") -> None:
    """Run a command so that a user's mistake costs them one sentence, not a traceback.

    ``interrupted`` is what Ctrl-C leaves on standard error. A reader of standard output that
    went away, as ``| head`` does, ends the command without a word.
    """
    try:
        command()
        sys.stdout.flush()  # here, where a reader that is gone can still be handled
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # What Python writes when it ends goes nowhere instead of complaining once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(PIPE_CLOSED)
    except USER_ERRORS as err:
        sentence = " ".join(str(err).split())
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(2)


class StopSignals:
    """Within, these signals are noted and waited for; afterwards they do what they did before.

    With ``once`` only the first one is noted: a second one is as ever, for Ctrl-C Python's own
    KeyboardInterrupt. In another thread than the main one, which signals belong to, nothing
    happens.

    The system hands a signal to any thread. Python then runs its handler in the main thread,
    once that has a moment; but a byte is written to a socket where the signal arrives, so that
    whoever waits for the socket knows at once, whatever the main thread is at.
    """

    def __init__(self, numbers: tuple[signal.Signals, ...] = STOPPING, once: bool = False):
        self.is_asked = False
        self._numbers, self._once = numbers, once

    def __enter__(self) -> "StopSignals":
        self.is_asked = False
        self._before = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        settle_compiling()
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
        """Whether one came, waiting at most so long for it; each counts once."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        return bool(ready) and self._reader.recv(1) != b""
