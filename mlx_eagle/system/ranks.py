"""Ranks: the processes that ``mlx.launch`` starts with one command, each with a part of a target.

All of them run the same program. Rank 0 reads, writes and decides; the others compute along, print
nothing, and end where it ends. MLX exchanges arrays between them; what else one has to know of
another goes through here.
"""

import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx

from .exit_codes import USER_ERRORS, run_command
from .stop_signals import STOPPING

BACKENDS = ("[ring]", "[jaccl]", "[mpi]", "[nccl]")
"""Beginnings of MLX's messages about an exchange that failed."""
LOST = (
    "another rank has ended or cannot be reached, or mlx.launch was told to end: what a rank "
    "said, if anything, stands above; start all of them again."
)
PATIENCE = 3.0  # seconds: by then mlx.launch has ended a rank whose rank 0 has the same complaint
GRACE = 60.0  # seconds for rank 0 to finish what it has begun, for which it needs the others
WATCH = 1.0  # seconds between looks at whether the launcher is still there


def num_ranks() -> int:
    """The number of processes with a part of the target; 1 without ``mlx.launch``."""
    return int(mx.distributed.init().size())


def is_first() -> bool:
    """Whether this process reads, writes and decides for all."""
    return int(mx.distributed.init().rank()) == 0


def share(value: Any) -> Any:
    """The value that rank 0 gives, in every rank; it must be picklable, and all must ask at once.

    None takes one exchange, anything else two, on MLX's default stream.
    """
    if num_ranks() == 1:
        return value
    is_sent = is_first() and value is not None
    data = mx.array(list(pickle.dumps(value)) if is_sent else [], dtype=mx.uint8)
    size = int(mx.distributed.all_sum(mx.array(data.size)))
    if size == 0:
        return None
    sent = mx.distributed.all_sum(data if is_first() else mx.zeros(size, dtype=mx.uint8))
    return pickle.loads(bytes(sent))


class Relay:
    """Numbers of rank 0 that all ranks learn one call later, so that nobody waits for them.

    Two calls later where they ``ride`` with what the passes exchange. The first call gives what
    it was given: by then all must know it.
    """

    def __init__(self, stream: Any) -> None:
        """``stream`` is that of the passes: what is exchanged must be so in one order."""
        self.rides = False
        self._stream = stream
        self._waiting: mx.array | None = None
        self._sent: deque[mx.array] = deque(maxlen=2)

    def pass_on(self, numbers: list[int]) -> list[int]:
        """Send ``numbers``, always as many and at most 256; return those sent before the last."""
        self._waiting = mx.array(numbers if is_first() else [0] * len(numbers), dtype=mx.int32)
        if not (self.rides and self._sent):
            with mx.stream(self._stream):
                self.ride(mx.zeros(0, dtype=mx.int32))
        found: list[int] = self._sent[0].tolist()
        return found

    def ride(self, carrier: mx.array) -> mx.array:
        """The sum of ``carrier`` over all ranks, sent with the numbers that wait for it."""
        if self._waiting is None:
            return mx.distributed.all_sum(carrier)
        num = self._waiting.size
        # Whole numbers up to 256 are the same in every type of activations.
        numbers = self._waiting.astype(carrier.dtype)
        both = mx.distributed.all_sum(mx.concatenate([numbers, carrier.flatten()]))
        sent = both[:num].astype(mx.int32)
        mx.async_eval(sent)
        self._waiting = None
        self._sent.append(sent)
        return both[num:].reshape(carrier.shape)


def run_on_ranks(command: Callable[[], None]) -> None:
    """Run a command as ``run_command`` does, on all ranks that there are.

    One that cannot go on ends with one sentence, of rank 0 where it knows the reason too, and all
    others end with it.
    """
    if num_ranks() == 1:
        run_command(command)
        return
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    threading.Thread(target=_watch_launcher, args=(os.getppid(), ends[0]), daemon=True).start()
    if is_first():
        signal.set_wakeup_fd(ends[1].fileno(), warn_on_full_buffer=False)
        for number in STOPPING:
            signal.signal(number, _end)
        run_command(lambda: _until_lost(command))
    else:
        _follow(command)


def _until_lost(command: Callable[[], None]) -> None:
    """Run ``command``; ValueError where another rank is gone."""
    try:
        command()
    except RuntimeError as err:
        if not is_lost(err):
            raise
        raise ValueError(LOST) from err


def is_lost(error: BaseException | None) -> bool:
    """Whether an error says that another rank is gone."""
    return isinstance(error, RuntimeError) and any(name in str(error) for name in BACKENDS)


def _follow(command: Callable[[], None]) -> None:
    """Run ``command`` without a word, unless this rank alone cannot go on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches all: rank 0 says when to stop
    errors = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    rank = mx.distributed.init().rank()
    try:
        command()
    except USER_ERRORS as err:
        time.sleep(PATIENCE)
        os.write(errors, f"error: rank {rank}: {' '.join(str(err).split())}\n".encode())
        sys.exit(2)
    except RuntimeError as err:
        if not is_lost(err):
            raise
        sys.exit(1)
    finally:
        os.dup2(errors, 2)


def _watch_launcher(parent: int, signals: socket.socket) -> None:
    """End this process with the one that started it, or when told to, whatever it waits for.

    mlx.launch tells all others to once a rank has ended.
    """
    while os.getppid() == parent:
        ready, _, _ = select.select([signals], [], [], WATCH)
        for number in signals.recv(64) if ready else b"":
            if number in STOPPING:
                _end(number)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):  # nobody reads them any more
        os.dup2(nowhere, number)
    if not is_first():
        time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGTERM)


def _end(number: int, frame: object = None) -> None:
    """Say why, and end at once: whatever else is exchanged now may never return."""
    was_user = number == signal.SIGINT
    if was_user:  # mlx.launch passes nothing on after a Ctrl-C
        with suppress(OSError):
            os.dup2(os.open("/dev/tty", os.O_WRONLY), 2)
    os.write(2, b"\ninterrupted\n" if was_user else f"error: {LOST}\n".encode())
    os._exit(128 + number)
