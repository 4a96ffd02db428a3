"""Thirty clients at once, a third of them hostile: right answers, flat memory, counts that add up.

Ten seconds of it run with the other tests, five minutes in ``make test-all``.
"""

import contextlib
import http.client
import json
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import ENDLESS, Asked, ours, theirs, write_pair

NUM_CLIENTS = 30
SETTLE = 30.0  # seconds until the last answers are finished
HUGE = 2**70
OUTCOMES = ("answered", "refused", "failed", "left")


def requests() -> list[dict]:
    """Well-formed greedy requests of many kinds."""
    prompts = [{"prompt": f"Client {i} says that"} for i in range(8)]
    chats = [{"messages": [{"role": "user", "content": f"Tell me {i}"}]} for i in range(4)]
    ways = [{}, {"num_draft_tokens": 0}, {"tree": "2x2:4"}, {"seed": 3}, {"stop": ["e"]}]
    ways += [{"frequency_penalty": 0.5}, {"model": ""}, {"num_draft_tokens": 7}]
    return [
        {"temperature": 0, "max_tokens": 5 + 4 * i, "logit_bias": ENDLESS, **kind, **way}
        for i, (kind, way) in enumerate(zip([*prompts, *chats], ways * 2, strict=False))
    ]


@dataclass
class Seen:
    """What all clients together saw."""

    outcomes: Counter = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, outcome: str, usage: dict | None = None) -> None:
        with self.lock:
            self.outcomes[outcome] += 1
            if usage is not None:
                self.prompt_tokens += usage["prompt_tokens"]
                self.completion_tokens += usage["completion_tokens"]


def path_of(request: dict) -> str:
    return "/v1/chat/completions" if "messages" in request else "/v1/completions"


def send(asked: Asked, raw: bytes, path: str = "/v1/completions") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*asked.address, timeout=120)
    try:
        connection.request("POST", path, raw)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def read_stream(content: bytes) -> tuple[str, dict]:
    """The text and the usage of a stream."""
    lines = [line[6:] for line in content.split(b"\n\n") if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]"
    *chunks, last = [json.loads(line) for line in lines]
    return "".join(text_of(chunk) for chunk in chunks), last["usage"]


def text_of(document: dict) -> str:
    choice = document["choices"][0]
    said = choice.get("message") or choice.get("delta")
    return (said.get("content") or "") if said is not None else choice["text"]


def friendly(asked: Asked, seen: Seen, dice: random.Random, expected: list) -> None:
    """One answer, whole, streamed, or for a half-closed connection."""
    request, text = dice.choice(expected)
    if dice.random() < 0.5:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        status, content = send(asked, json.dumps(request | options).encode(), path_of(request))
        got, usage = read_stream(content) if status == 200 else ("", None)
    else:
        status, content = send(asked, json.dumps(request).encode(), path_of(request))
        document = json.loads(content)
        got, usage = (text_of(document), document["usage"]) if status == 200 else ("", None)
    seen.count("answered" if status == 200 else "failed", usage)
    if got.removeprefix(" ") != text:  # mlx-lm takes the space away that a text begins with
        seen.wrong.append(f"{status} {request}: {got!r}, not {text!r}, {content[-200:]!r}")


def begin(asked: Asked, dice: random.Random) -> socket.socket:
    """A connection on which a long answer was asked for."""
    way = dice.choice([{"seed": 1}, {"temperature": 0.9}, {"temperature": 0.9, "seed": 2}, {}])
    fields = {"prompt": "Go on", "logit_bias": ENDLESS, "max_tokens": 10**6} | way
    raw = json.dumps(fields | {"stream": dice.random() < 0.7}).encode()
    connection = socket.create_connection(asked.address, timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def leaves(asked: Asked, seen: Seen, dice: random.Random) -> None:
    """Asks for much, and leaves: in good order, or as one that was killed."""
    with begin(asked, dice) as connection:
        time.sleep(dice.random() * 0.5)
        if dice.random() < 0.5:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    seen.count("left")


def reads_slowly(asked: Asked, seen: Seen, dice: random.Random) -> None:
    """Takes a byte now and then, and leaves."""
    with begin(asked, dice) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.settimeout(0.3)
        for _ in range(4):
            with contextlib.suppress(TimeoutError):
                connection.recv(1)
            time.sleep(0.2)
    seen.count("left")


MALFORMED = (
    b"", b"{", b"[]", b'{"prompt": "\xff"}', b"[" * 10**5, b'{"prompt": 5}', b'{"prompt": ""}',
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800"}', b"null",
    json.dumps({"prompt": "word " * 2 * 10**5}).encode(),
    json.dumps({"prompt": "a", "tree": "1/" * 10**5}).encode(),
)  # fmt: skip
EXTREMES = tuple(
    {name: value}
    for name in ("temperature", "max_tokens", "presence_penalty", "top_p", "seed", "top_k")
    for value in (HUGE, -HUGE, float("nan"), True, 1e300, "1", [])
)


def is_malformed(asked: Asked, seen: Seen, dice: random.Random) -> None:
    """Sends what is no request, or one with extreme values."""
    extreme = {"prompt": "a", "max_tokens": 3, "top_k": 1, "n": 5} | dice.choice(EXTREMES)
    raw = dice.choice([*MALFORMED, *[json.dumps(extreme).encode()] * 5])
    status, content = send(asked, raw)
    seen.count("refused" if 400 <= status < 500 else "failed")
    if status != 400 or not json.loads(content)["error"]["message"]:
        seen.wrong.append(f"{status} for {raw[:100]!r}")


def breaks_off(asked: Asked, seen: Seen, dice: random.Random) -> None:
    """Promises a body and leaves in the midst of it."""
    with socket.create_connection(asked.address, timeout=60) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 999\r\n\r\n"
        connection.sendall(head + b"x" * dice.randrange(900))
        time.sleep(0.05)
    seen.count("left")


HOSTILE = (leaves, reads_slowly, is_malformed, breaks_off)


def run_clients(asked: Asked, expected: list, seconds: float, seen: Seen, seed: int) -> None:
    """All clients until the time is over."""
    until = time.monotonic() + seconds

    def client(number: int) -> None:
        dice = random.Random(seed * 1000 + number)
        while time.monotonic() < until:
            if number % 3 == 0:
                dice.choice(HOSTILE)(asked, seen, dice)
            else:
                friendly(asked, seen, dice, expected)
                time.sleep(dice.random() * 0.2)

    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            client(number)
        except (
            OSError,
            http.client.HTTPException,
            AssertionError,
            ValueError,
            LookupError,
        ) as err:
            failures.append(err)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=seconds + 150)
    assert not any(thread.is_alive() for thread in threads), "a client waits in vain"
    assert not failures, failures[0]


def settle(asked: Asked) -> None:
    until = time.monotonic() + SETTLE
    while asked.server.answering or asked.generator._open or asked.server._connections:
        assert time.monotonic() < until, "the server still generates for nobody"
        time.sleep(0.05)


def resident() -> float:
    """MB of this process, where the system says so."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


def num_open_files() -> int:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return len(os.listdir(folder))


def soak(tmp_path_factory, seconds: float) -> None:
    pair = write_pair(tmp_path_factory.mktemp("pair"))
    with theirs(pair["target"]) as reference:
        expected = []
        for request in requests():
            fields = {k: v for k, v in request.items() if k != "tree"} | {"num_draft_tokens": 0}
            fields.pop("model", None)
            status, content = send(reference, json.dumps(fields).encode(), path_of(request))
            assert status == 200, content
            expected.append((request, text_of(json.loads(content))))
    flags = ("--model", pair["target"], "--draft-model", pair["head"])
    with ours(*flags, "--num-draft-tokens", "3", "--max-connections", "100") as asked:
        seen = Seen()
        run_clients(asked, expected, min(seconds / 3, 60), seen, seed=0)  # to grow in
        settle(asked)
        memory, files = resident(), num_open_files()
        run_clients(asked, expected, seconds, seen, seed=1)
        settle(asked)
        assert not seen.wrong, f"{len(seen.wrong)} answers were wrong: {seen.wrong[0]}"
        assert resident() - memory < 100 + 0.1 * memory
        assert num_open_files() <= files + 3
        _, content = get(asked, "/metrics")
        check_counts(content.decode(), seen)
        request, text = expected[0]
        status, content = send(asked, json.dumps(request).encode(), path_of(request))
        assert text_of(json.loads(content)).removeprefix(" ") == text


def get(asked: Asked, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*asked.address, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def check_counts(text: str, seen: Seen) -> None:
    """The metrics are what the clients saw.

    One that left may have had its whole answer by then, or none: it counts as either.
    """
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    counts = {outcome: found["mlx_eagle_requests_total", outcome] for outcome in OUTCOMES}
    assert sum(counts.values()) == sum(seen.outcomes.values()), (counts, seen.outcomes)
    assert counts["refused"] == seen.outcomes["refused"] > 0
    assert counts["failed"] == seen.outcomes["failed"] == 0
    # Where the time limit ended an answer before its client left, it was answered.
    num_ended = counts["answered"] - seen.outcomes["answered"]
    assert 0 <= num_ended == seen.outcomes["left"] - counts["left"]
    for name, sent in (("prompt", seen.prompt_tokens), ("generated", seen.completion_tokens)):
        counted = found[f"mlx_eagle_{name}_tokens_total", "answered"]
        assert counted == sent if num_ended == 0 else counted > sent
    assert found["mlx_eagle_drafted_tokens_total",] >= found["mlx_eagle_accepted_tokens_total",]
    assert found["mlx_eagle_requests_waiting",] == found["mlx_eagle_requests_running",] == 0


@pytest.mark.exhaustive
def test_ten_seconds_of_thirty_clients(tmp_path_factory):
    soak(tmp_path_factory, 7)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_five_minutes_of_thirty_clients(tmp_path_factory):
    soak(tmp_path_factory, float(os.getenv("MLX_EAGLE_SOAK_SECONDS", "300")))
