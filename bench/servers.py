"""Servers as processes on this machine, never left behind, and clients that load them.

A server ends with the process that started it. This file runs as a script with the module whose
``main`` is the server, and its flags; a thread waits for the end of standard input, a pipe that
nothing is written to. It ends when the other process closes it or is gone, for whatever reason.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any

Address = tuple[str, int]
HOST = "127.0.0.1"
START_LIMIT = 900.0  # seconds until a server answers: a large model may come over the network
STOP_LIMIT = 10.0  # seconds for a server to end after it was asked to
LONGEST_SILENCE = 600.0  # seconds until a client gives up
TO_END = 2.0  # seconds that a process may take to end after its connections broke
POLL = 0.1  # seconds between two looks
LONGEST_REASON = 200  # characters


@dataclass(frozen=True)
class Server:
    """A running server. ``name`` is that of its command: "mlx_lm.server"."""

    name: str
    address: Address
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise ValueError if its process has ended."""
        code = self.process.poll()
        if code is not None:
            raise self.failed(f"ended with code {code}")

    def failed(self, how: str) -> ValueError:
        """The error that the server failed in this way, with the last line of its log."""
        said = self.log.read_text(errors="replace").strip() or "it said nothing"
        said = said.splitlines()[-1].strip()
        return ValueError(
            f"{self.name} {how} ({said[:LONGEST_REASON]}): start it by itself to see why."
        )

    def answers(self) -> bool:
        """Whether it answers yet; ValueError if it says that it cannot."""
        with closing(HTTPConnection(*self.address, timeout=1.0)) as connection:
            try:
                connection.request("GET", "/health")
                status = connection.getresponse().status
            except (OSError, HTTPException):
                return False
        if status == 503:
            raise self.failed("cannot answer")
        return status == 200


@contextmanager
def running(commands: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Server]]:
    """Run servers by their names, each given as a module and its flags, once all of them answer.

    They have ended when the block is left, for whatever reason; SIGTERM and a closed terminal
    leave it like Ctrl-C. Raises ValueError if a server does not start.
    """
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGHUP):
            stack.callback(signal.signal, number, signal.getsignal(number))
            signal.signal(number, signal.default_int_handler)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlx-eagle-")))
        with ExitStack() as probing:  # all at once, so that no port is found twice
            probes = [probing.enter_context(socket.create_server((HOST, 0))) for _ in commands]
            ports = [probe.getsockname()[1] for probe in probes]
        servers = {}
        for (name, command), port in zip(commands.items(), ports, strict=True):
            log = folder / f"{port}.log"
            process = start(command, port, log)
            stack.callback(stop, process)
            servers[name] = Server(name, (HOST, port), process, log)
        end = time.monotonic() + START_LIMIT
        while left := [server for server in servers.values() if not server.answers()]:
            for server in left:
                server.check()
            if time.monotonic() > end:
                raise left[0].failed(f"did not answer within {START_LIMIT:.0f} s")
            time.sleep(POLL)
        yield servers


def start(command: Sequence[str], port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start a server."""
    # -P: the folder of this script is no place to import from. A session of its own, for Ctrl-C in
    # the terminal is not for the server.
    line = [sys.executable, "-P", __file__, *command, "--port", str(port)]
    ends = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with log.open("wb") as output:
        return subprocess.Popen(line, stdout=output, start_new_session=True, **ends)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Close the standard input of a server, at which it ends, or else kill it."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(STOP_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# --- clients: several at once, who send prompts and note when each piece arrives -----------------


@dataclass(frozen=True)
class Answer:
    """One streamed answer. Times are seconds, ``seconds`` those until the reason why it ended.

    ``ttft``: to the first text, or to the end of an answer without any; ``seconds_per_token``:
    from the first token to the last, None if there are no two; ``longest_pause``: between two
    pieces, None if there is only one; ``mean_acceptance_length``: None if the server says none.
    """

    text: str
    output_tokens: int
    ttft: float = 0.0
    seconds: float = 0.0
    seconds_per_token: float | None = None
    longest_pause: float | None = None
    mean_acceptance_length: float | None = None


def read_answer(stream: Iterable[tuple[float, Mapping[str, Any]]]) -> Answer:
    """The answer in the pieces of a stream, each with its seconds since the request was sent.

    Raises ValueError if a piece says that something failed, ConnectionError without the last.
    """
    text = ""
    times = []
    ended = 0.0
    usage: Mapping[str, Any] = {}
    for seconds, chunk in stream:
        if "error" in chunk:
            raise ValueError(f"the server failed in the midst of an answer ({chunk['error']}).")
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices") or ():
            delta = choice["delta"]
            piece = (delta.get("reasoning") or "") + (delta.get("content") or "")
            if piece:
                text += piece
                times.append(seconds)
            if choice.get("finish_reason") is not None:
                ended = seconds
    if not usage:
        raise ConnectionError("the stream broke off")
    num_tokens = usage["completion_tokens"]
    ttft = times[0] if times else ended
    per_token = (ended - ttft) / (num_tokens - 1) if times and num_tokens > 1 else None
    pause = max((after - before for before, after in pairwise(times)), default=None)
    tau = usage.get("mean_acceptance_length")
    return Answer(text, num_tokens, ttft, ended, per_token, pause, tau)


@dataclass(frozen=True)
class Load:
    """Answers to all questions, in their order, and the seconds until the last one."""

    answers: list[Answer]
    seconds: float

    @property
    def tps(self) -> float:
        """Tokens per second of all clients together."""
        return sum(answer.output_tokens for answer in self.answers) / self.seconds


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
    """Send one request and read its stream to the end; ValueError if it is refused."""
    headers = {"Content-Type": "application/json"}
    with closing(HTTPConnection(*address, timeout=LONGEST_SILENCE)) as connection:
        start = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            error = json.loads(response.read())["error"]
            reason = error["message"] if isinstance(error, dict) else error
            raise ValueError(f"the server refused a request ({reason}).")
        lines = ((time.perf_counter() - start, line) for line in response)
        found = ((at, line) for at, line in lines if line.startswith(b"data: {"))
        return read_answer((at, json.loads(line[len("data: ") :])) for at, line in found)


def run_load(server: Server, bodies: Sequence[Mapping[str, Any]], num_clients: int) -> Load:
    """Send all requests from ``num_clients``, each the next one as soon as it has its answer.

    Raises ValueError if a request fails, or if the server has ended.
    """
    pool = ThreadPoolExecutor(num_clients)
    start = time.perf_counter()
    asked = [pool.submit(ask, server.address, body) for body in bodies]
    try:
        wait(asked, return_when=FIRST_EXCEPTION)
        answers = [answer.result() for answer in asked if answer.done()]
    except (OSError, HTTPException) as err:
        # A server that is ending breaks its connections first: its end is the reason, if it ends.
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(TO_END)
        server.check()
        raise ValueError(f"the connection to the server broke ({err}): run it again.") from err
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return Load(answers, time.perf_counter() - start)


# --- the process of a server ---------------------------------------------------------------------


def end_with_parent() -> None:
    """Wait for the end of standard input, then end the process at once."""
    # Not through sys.stdin, whose lock the interpreter would miss when it ends by itself.
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    del sys.argv[0]  # the module stands in its place
    importlib.import_module(sys.argv[0]).main()
