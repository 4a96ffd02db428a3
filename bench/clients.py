"""Clients of a server: so many at once, who send prompts and note when each piece arrives."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from typing import Any

LONGEST_SILENCE = 600.0  # seconds until a client gives up
POLL = 0.05  # seconds
TO_END = 2.0  # seconds that a process may take to end, once its connections are broken
Address = tuple[str, int]


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
    left = deque(enumerate(bodies))
    answers: list[Answer] = [Answer()] * len(bodies)
    ends: list[float] = []
    errors: list[Exception] = []

    def client() -> None:
        while not errors:
            try:
                number, body = left.popleft()
            except IndexError:
                return
            try:
                answers[number] = ask(address, body)
                ends.append(time.perf_counter())
            except (ValueError, OSError, HTTPException) as err:
                errors.append(err)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(num_clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    while not errors and any(thread.is_alive() for thread in threads):
        time.sleep(POLL)
        check()
    if errors:
        _explain(errors[0], check)
    return Load(answers, max(ends) - start)


def _explain(error: Exception, check: Callable[[], None]) -> None:
    """Raise ValueError with what went wrong: the server's end, before what followed from it."""
    end = time.monotonic() + TO_END
    while not isinstance(error, ValueError) and time.monotonic() < end:
        check()
        time.sleep(POLL)
    if isinstance(error, ValueError):
        raise error
    raise ValueError(f"the connection to the server broke ({error}): run it again.") from error
