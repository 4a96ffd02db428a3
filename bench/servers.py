"""Servers as processes on this machine, never left behind, and clients that load them.

A server ends with the process that started it: this file, run as a script with the module whose
``main`` is the server and its flags, watches the end of standard input, a pipe that nothing is
written to. It ends when the other process closes it or is gone, however it went.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any

LONGEST_SILENCE = 600.0  # seconds until a client gives up
TO_END = 2.0  # seconds that a process may take to end, once its connections are broken
Address = tuple[str, int]
HOST = "127.0.0.1"
START_LIMIT = 900.0  # seconds until a server answers: a large model may come over the network
STOP_LIMIT = 10.0  # seconds to end, once it is asked to
POLL = 0.1  # seconds
LONGEST_REASON = 200  # characters


@dataclass(frozen=True)
class Server:
    """A running server. ``name`` is how people start it: "mlx_lm.server"."""

    name: str
    address: Address
    process: subprocess.Popen[bytes]
    log: Path

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

    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
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
        yield Server(name, (HOST, port), process, log)
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


# --- clients: so many at once, who send prompts and note when each piece arrives ---


@dataclass
class Answer:
    """One streamed answer. Times are seconds since the request was sent.

    ``times`` are those of pieces with text, ``ended`` that of the last one, which has the reason
    why it ended; ``tau`` is the mean acceptance length, where the server says it.
    """

    text: str = ""
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_tokens: int = 0
    tau: float | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first text; of an answer without any, to its end."""
        return self.times[0] if self.times else self.ended

    @property
    def seconds_per_token(self) -> float | None:
        """From the first token to the last; None where there are no two."""
        if self.num_tokens < 2 or not self.times:
            return None
        return (self.ended - self.times[0]) / (self.num_tokens - 1)

    @property
    def longest_pause(self) -> float | None:
        """The most seconds between two pieces; None where there is but one."""
        pauses = [after - before for before, after in pairwise(self.times)]
        return max(pauses, default=None)

    def take(self, chunk: Mapping[str, Any], seconds: float) -> None:
        """A piece of the stream has arrived; ValueError where it says that something failed."""
        if "error" in chunk:
            raise ValueError(f"the server failed in the midst of an answer ({chunk['error']}).")
        usage = chunk.get("usage")
        if usage:
            self.num_tokens = usage["completion_tokens"]
            self.tau = usage.get("mean_acceptance_length")
        for choice in chunk.get("choices") or ():
            delta = choice["delta"]
            text = (delta.get("reasoning") or "") + (delta.get("content") or "")
            if text:
                self.text += text
                self.times.append(seconds)
            if choice.get("finish_reason") is not None:
                self.ended = seconds


@dataclass(frozen=True)
class Load:
    """What so many clients got, in the order of the questions, and how long all of it took."""

    answers: list[Answer]
    seconds: float

    @property
    def tps(self) -> float:
        """Tokens per second, all clients added up."""
        return sum(answer.num_tokens for answer in self.answers) / self.seconds


def chat_body(question: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy request for a streamed answer to one user's message."""
    return {
        "model": "default_model",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


def ask(address: Address, body: Mapping[str, Any]) -> Answer:
    """Send one request and read its stream to the end; ValueError where it is refused."""
    answer = Answer()
    headers = {"Content-Type": "application/json"}
    with closing(HTTPConnection(*address, timeout=LONGEST_SILENCE)) as connection:
        start = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"the server refused a request ({_reason(response.read())}).")
        for line in response:
            seconds = time.perf_counter() - start
            if line.startswith(b"data: {"):
                answer.take(json.loads(line.removeprefix(b"data: ")), seconds)
    if not answer.num_tokens:
        raise ConnectionError("the stream broke off")
    return answer


def _reason(content: bytes) -> str:
    """What an answer that is no stream says went wrong."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace").strip() or "it gave no reason"


def run_load(
    address: Address,
    bodies: Sequence[Mapping[str, Any]],
    num_clients: int,
    check: Callable[[], None] = lambda: None,
) -> Load:
    """Have ``num_clients`` send all requests, each the next one as soon as it has its answer.

    ``check`` is called meanwhile, and raises where there is no use in waiting. Raises ValueError
    where a request fails.
    """
    pool = ThreadPoolExecutor(num_clients)
    start = time.perf_counter()
    asked = [pool.submit(ask, address, body) for body in bodies]
    left = set(asked)
    try:
        while left:
            done, left = wait(left, POLL / 2, FIRST_EXCEPTION)
            for error in filter(None, (answer.exception() for answer in done)):
                _explain(error, check)
            check()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return Load([answer.result() for answer in asked], time.perf_counter() - start)


def _explain(error: BaseException, check: Callable[[], None]) -> None:
    """Raise what went wrong as a ValueError: the server's end, before what followed from it."""
    if not isinstance(error, (OSError, HTTPException)):
        raise error
    end = time.monotonic() + TO_END
    while time.monotonic() < end:
        check()
        time.sleep(POLL / 2)
    raise ValueError(f"the connection to the server broke ({error}): run it again.") from error


# --- the process of a server ---


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
