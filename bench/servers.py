"""Servers as processes on this machine: started, waited for, and never left behind.

A server ends with the process that started it: this file, run as a script with the module whose
``main`` is the server and its flags, watches the end of standard input, a pipe that nothing is
written to. It ends when the other process closes it or is gone, however it went.
"""

import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType

HOST = "127.0.0.1"
START_LIMIT = 900.0  # seconds until a server answers: a large model may come over the network
STOP_LIMIT = 10.0  # seconds to end, once it is asked to
POLL = 0.1  # seconds
LONGEST_REASON = 200  # characters


@dataclass(frozen=True)
class Server:
    """A running server. ``name`` is how people start it: "mlx_lm.server"."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        return HOST, self.port

    def check(self) -> None:
        """Raise ValueError where its process has ended."""
        code = self.process.poll()
        if code is not None:
            raise _failed(self, f"ended with code {code}")


def free_ports(count: int) -> list[int]:
    """Ports of this machine that are free."""
    with ExitStack() as stack:
        probes = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def running(commands: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Server]]:
    """Servers by their names, given as a module and its flags each, while they answer.

    Afterwards they have ended, however the block was left; SIGTERM and a closed terminal leave
    it like Ctrl-C. Raises ValueError where one does not start.
    """
    with ExitStack() as stack:
        stack.enter_context(interrupted_by(signal.SIGTERM, signal.SIGHUP))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlx-eagle-")))
        servers = {
            name: stack.enter_context(_started(name, command, port, folder / f"{port}.log"))
            for (name, command), port in zip(
                commands.items(), free_ports(len(commands)), strict=True
            )
        }
        wait_until_they_answer(servers.values())
        yield servers


@contextmanager
def interrupted_by(*numbers: signal.Signals) -> Iterator[None]:
    """Within, these signals do what Ctrl-C does, where it is the main thread that waits."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _started(name: str, command: Sequence[str], port: int, log: Path) -> Iterator[Server]:
    module, *flags = command
    # -P: the folder of that script is no place to import from.
    line = [sys.executable, "-P", __file__, module, *flags, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is for us
        )
    try:
        yield Server(name, port, process, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # at which it ends
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_they_answer(servers: Collection[Server]) -> None:
    """Raise ValueError where one of them does not."""
    end = time.monotonic() + START_LIMIT
    left = list(servers)
    while left := [server for server in left if not answers(server)]:
        for server in servers:
            server.check()
        if time.monotonic() > end:
            raise _failed(left[0], f"did not answer within {START_LIMIT:.0f} s")
        time.sleep(POLL)


def answers(server: Server) -> bool:
    """Whether it does yet; ValueError where it says itself that it cannot."""
    with closing(HTTPConnection(*server.address, timeout=1.0)) as connection:
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
        except (OSError, HTTPException):
            return False
    if status == 503:
        raise _failed(server, "cannot answer")
    return status == 200


def _failed(server: Server, how: str) -> ValueError:
    return ValueError(
        f"{server.name} {how} ({last_line(server.log)}): start it by itself to see why."
    )


def last_line(log: Path) -> str:
    """The last thing that a log says, as the reason why it has ended."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")[:LONGEST_REASON]


def end_with_parent() -> None:
    """Wait for the end of standard input, and then leave without ado."""
    # Not through sys.stdin, whose lock the interpreter would miss when it ends by itself.
    while os.read(0, 1):
        pass
    os._exit(0)


def serve() -> None:
    """Run the server that the arguments name."""
    module, *flags = sys.argv[1:]
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.argv = [module, *flags]
    importlib.import_module(module).main()


if __name__ == "__main__":
    serve()
