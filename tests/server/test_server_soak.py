"""Thirty clients at once, a third of them hostile, over all APIs, also for forms: right answers.

Memory stays flat, and their counts add up. Fifteen seconds of it are in ``make test-all``; for
more, give MLX_EAGLE_SOAK_SECONDS=300.
"""

import contextlib
import ctypes
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

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from prometheus_client.parser import text_string_to_metric_families
from serving import ENDLESS, Asked, ours, theirs, write_pair

from mlx_eagle.structured import JSONSchema, Regex

NUM_CLIENTS = 30
MOST_GROWN = 500  # MB in a short run, which may see the first crowd of long texts
SETTLE = 30.0  # seconds until the last answers are finished
HUGE = 2**70
OUTCOMES = ("answered", "refused", "failed", "left")


SECONDS = float(os.getenv("MLX_EAGLE_SOAK_SECONDS", "15"))
TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SCHEMA = {"type": "integer", "minimum": 10**5, "maximum": 10**12}  # the pair knows no quotes
INNER = {"name": "answer", "schema": SCHEMA, "strict": True}
FORMS = (
    {"response_format": {"type": "json_schema", "json_schema": INNER}},
    {"grammar": {"regex": "[a-z]{3,9}, [A-Z][a-z0-9]{20}"}},
)


@dataclass
class Case:
    """A greedy request of some API, and mlx-lm's text for what it means."""

    path: str
    body: dict
    text: str = ""
    second: str = ""  # to the same chat, gone on with


def asked_again(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]


def cases() -> list[Case]:
    """Well-formed requests of many kinds; those of the newer APIs mean one of the chats each."""
    prompts = [{"prompt": f"Client {i} says that"} for i in range(8)]
    chats = [{"messages": [{"role": "user", "content": f"Tell me {i}"}]} for i in range(4)]
    ways = [{}, {"num_draft_tokens": 0}, {"tree": "2x2:4"}, {"seed": 3}, {"stop": ["e"]}]
    ways += [{"frequency_penalty": 0.5}, {"model": ""}, {"num_draft_tokens": 7}]
    found = [
        Case(
            CHATS if "messages" in kind else TEXTS,
            {"temperature": 0, "max_tokens": 5 + 4 * i, "logit_bias": ENDLESS, **kind, **way},
        )
        for i, (kind, way) in enumerate(zip([*prompts, *chats], ways * 2, strict=False))
    ]
    for i, way in enumerate(({}, {"num_draft_tokens": 0}, {"tree": "2x2:4"}, {"stop": ["e"]})):
        common = {"temperature": 0, "messages": [{"role": "user", "content": f"Say {i}"}], **way}
        found.append(Case(MESSAGES, {"max_tokens": 20 + i, **common}))
        found.append(Case(RESPONSES, {"max_tokens": 30 + i, "logit_bias": ENDLESS, **common}))
    for i, way in enumerate(({}, {"num_draft_tokens": 7}, {"tree": "2x2:4"})):
        said = {"messages": [{"role": "user", "content": f"Count {i}"}]}
        both = [(TEXTS, {"prompt": f"Count {i} "}), (CHATS, said)]
        apis = [*((path, what | form) for path, what in both for form in FORMS)]
        apis += [(path, said | FORMS[0]) for path in (MESSAGES, RESPONSES)]
        common = {"temperature": 0, "max_tokens": 40, **way}
        found += [Case(path, common | what) for path, what in apis]
    return found


def is_held(case: Case) -> bool:
    """Whether the answer has a form."""
    return "response_format" in case.body or "grammar" in case.body


def in_its_words(case: Case) -> dict:
    """The body as its API has it."""
    body = dict(case.body)
    if case.path == RESPONSES:
        body |= {"max_output_tokens": body.pop("max_tokens"), "input": body.pop("messages")}
        if body.pop("response_format", None):
            body["text"] = {"format": {"type": "json_schema", **INNER}}
    elif case.path == MESSAGES:
        if "stop" in body:
            body["stop_sequences"] = body.pop("stop")
        if body.pop("response_format", None):
            body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    return body


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
                num_prompt, num_generated = tokens_of(usage)
                self.prompt_tokens += num_prompt
                self.completion_tokens += num_generated


def send(asked: Asked, raw: bytes, path: str = TEXTS) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*asked.address, timeout=120)
    try:
        connection.request("POST", path, raw)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def read_stream(content: bytes, path: str) -> tuple[str, dict]:
    """The text and the usage of a stream."""
    lines = [line[5:] for line in content.splitlines() if line.startswith(b"data:")]
    if path in (TEXTS, CHATS):
        assert lines.pop().strip() == b"[DONE]"
    chunks = [json.loads(line) for line in lines]
    last = chunks[-2] if path == MESSAGES else chunks[-1]
    usage = (last.get("response") or last)["usage"]
    return "".join(delta_of(chunk, path) for chunk in chunks), usage


def delta_of(chunk: dict, path: str) -> str:
    if path in (TEXTS, CHATS):
        return text_of(chunk, path) if chunk["choices"] else ""
    if path == RESPONSES:
        return chunk["delta"] if chunk["type"] == "response.output_text.delta" else ""
    delta = chunk.get("delta", {})
    return delta["text"] if delta.get("type") == "text_delta" else ""


def text_of(document: dict, path: str) -> str:
    if path == MESSAGES:
        return "".join(block["text"] for block in document["content"])
    if path == RESPONSES:
        return "".join(part["text"] for item in document["output"] for part in item["content"])
    choice = document["choices"][0]
    said = choice.get("message") or choice.get("delta")
    return (said.get("content") or "") if said is not None else choice["text"]


def tokens_of(usage: dict) -> tuple[int, int]:
    """Of the prompt and of the answer, in whichever words."""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["completion_tokens"]
    cached = usage.get("cache_read_input_tokens", 0)  # the one API that counts them apart
    return usage["input_tokens"] + cached, usage["output_tokens"]


def friendly(asked: Asked, seen: Seen, dice: random.Random, expected: list[Case]) -> None:
    """One answer, whole or streamed; now and then a response is gone on with."""
    case = dice.choice(expected)
    body = in_its_words(case)
    is_stream = dice.random() < 0.5
    if is_stream:
        body["stream"] = True
        if case.path in (TEXTS, CHATS):
            body["stream_options"] = {"include_usage": True}
    document = answered(asked, seen, case, body, case.text)
    if case.second and document and dice.random() < 0.5:
        body |= {"input": "And then?", "previous_response_id": document["id"], "stream": False}
        answered(asked, seen, case, body, case.second)


def answered(asked: Asked, seen: Seen, case: Case, body: dict, text: str) -> dict:
    """Count an answer and compare its text; the document, where it was none in a stream."""
    status, content = send(asked, json.dumps(body).encode(), case.path)
    document, got, usage = {}, "", None
    if status == 200 and body.get("stream"):
        got, usage = read_stream(content, case.path)
    elif status == 200:
        document = json.loads(content)
        got, usage = text_of(document, case.path), document["usage"]
    seen.count("answered" if status == 200 else "failed", usage)
    if got.removeprefix(" ") != text:  # mlx-lm takes the space away that a text begins with
        seen.wrong.append(f"{status} {body}: {got!r}, not {text!r}, {content[-200:]!r}")
    return document


def begin(asked: Asked, dice: random.Random) -> socket.socket:
    """A connection on which a long answer was asked for."""
    way = dice.choice([{"seed": 1}, {"temperature": 0.9}, {"temperature": 0.9, "seed": 2}, {}])
    path = dice.choice((TEXTS, CHATS, MESSAGES, RESPONSES))
    what: dict = {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 10**6}
    if path == RESPONSES:
        what = {"input": "Go on", "max_output_tokens": 10**6}
    elif path == TEXTS:
        what = {"prompt": "Go on", "max_tokens": 10**6}
    fields = what | {"logit_bias": ENDLESS} | way
    raw = json.dumps(fields | {"stream": dice.random() < 0.7}).encode()
    connection = socket.create_connection(asked.address, timeout=60)
    head = f"POST {path} HTTP/1.1\r\nContent-Length: {len(raw)}\r\n\r\n"
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
MALFORMED_BLOCKS = tuple(
    {"role": "user", "content": content}
    for content in (5, [5], [{"type": "image"}], [{"type": "text"}], "word " * 2 * 10**5,
                    [{"type": "tool_result", "content": [[[]]]}], "\ud800")
)  # fmt: skip
MALFORMED_FIELDS = {
    TEXTS: [{"prompt": "a", "n": 5}, "presence_penalty", "max_tokens"],
    CHATS: [{"messages": [{"role": "user", "content": "a"}]}, "presence_penalty", "max_tokens"],
    MESSAGES: [
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}, "num_draft_tokens",
        "max_tokens",
    ],
    RESPONSES: [{"input": "a"}, "presence_penalty", "max_output_tokens"],
}  # fmt: skip
VALUES = (HUGE, -HUGE, float("nan"), True, 1e300, "1", [])


def malformed(path: str, dice: random.Random) -> bytes:
    """What is no request to that path, or one with an extreme value."""
    fields, *names = MALFORMED_FIELDS[path]
    if dice.random() < 0.5:
        name = dice.choice([*names, "temperature", "top_p", "seed", "top_k"])
        return json.dumps(fields | {name: dice.choice(VALUES)}).encode()
    if path in (MESSAGES, RESPONSES):
        strange = [{"input" if path == RESPONSES else "messages": [dice.choice(MALFORMED_BLOCKS)]}]
        strange += [{"tools": [{"type": "local_shell"}]}, {"tools": 5}, {"tool_choice": []}]
        strange += [{"thinking": "x", "previous_response_id": "resp_0"}]
        return json.dumps(fields | dice.choice(strange)).encode()
    return dice.choice(MALFORMED)


def is_malformed(asked: Asked, seen: Seen, dice: random.Random) -> None:
    """Sends what is no request, or one with extreme values."""
    path = dice.choice((*MALFORMED_FIELDS,))
    raw = malformed(path, dice)
    status, content = send(asked, raw, path)
    seen.count("refused" if 400 <= status < 500 else "failed")
    if status != 400 or not json.loads(content)["error"]["message"]:
        seen.wrong.append(f"{status} for {path} {raw[:100]!r}")


def breaks_off(asked: Asked, seen: Seen, dice: random.Random) -> None:
    """Promises a body and leaves in the midst of it."""
    with socket.create_connection(asked.address, timeout=60) as connection:
        path = dice.choice((*MALFORMED_FIELDS,))
        head = f"POST {path} HTTP/1.1\r\nContent-Length: 999\r\n\r\n"
        connection.sendall(head.encode() + b"x" * dice.randrange(900))
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
    while asked.server.answering or asked.generator.open_answers or asked.server._connections:
        assert time.monotonic() < until, "the server still generates for nobody"
        time.sleep(0.05)


def resident() -> float:
    """MB of this process that it needs, where the system says so."""
    with contextlib.suppress(OSError, AttributeError):  # others than glibc give it back at once
        ctypes.CDLL(None).malloc_trim(0)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


def num_open_files() -> int:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return len(os.listdir(folder))


def held_text(model, tokenizer, case: Case) -> str:
    """mlx-lm's own text under the processor that holds it to the form."""
    if "grammar" in case.body:
        processor = Regex(case.body["grammar"]["regex"], tokenizer)
    else:
        processor = JSONSchema(SCHEMA, tokenizer)
    if case.path == TEXTS:
        prompt = tokenizer.encode(case.body["prompt"])
    else:
        prompt = tokenizer.apply_chat_template(case.body["messages"], add_generation_prompt=True)
    most = case.body["max_tokens"]
    found = []
    steps = generate_step(mx.array(prompt), model, max_tokens=most, logits_processors=[processor])
    for token, _ in steps:
        if token in tokenizer.eos_token_ids:
            break
        found.append(token)
    return tokenizer.decode(found)


def expect(reference: Asked, target: str) -> list[Case]:
    """The requests with mlx-lm's own texts."""
    pair = mlx_lm.load(target)

    def ask(case: Case, **more) -> str:
        body = case.body | {"num_draft_tokens": 0} | more
        for name in ("tree", "model"):
            body.pop(name, None)
        path = TEXTS if case.path == TEXTS else CHATS
        status, content = send(reference, json.dumps(body).encode(), path)
        assert status == 200, content
        return text_of(json.loads(content), path)

    expected = cases()
    for case in expected:
        case.text = held_text(*pair, case) if is_held(case) else ask(case)
        if case.path == RESPONSES and not is_held(case):
            case.second = ask(case, messages=case.body["messages"] + asked_again(case.text))
    return expected


@pytest.mark.exhaustive
@pytest.mark.timeout(300 + 2 * SECONDS)
def test_thirty_clients(tmp_path_factory):
    pair = write_pair(tmp_path_factory.mktemp("pair"))
    with theirs(pair["target"]) as reference:
        expected = expect(reference, pair["target"])
    flags = ("--model", pair["target"], "--draft-model", pair["head"])
    with ours(*flags, "--num-draft-tokens", "3", "--max-connections", "100") as asked:
        seen = Seen()
        run_clients(asked, expected, min(SECONDS / 3, 60), seen, seed=0)  # to grow in
        settle(asked)
        memory, files = resident(), num_open_files()
        run_clients(asked, expected, SECONDS, seen, seed=1)
        settle(asked)
        print(f"{dict(seen.outcomes)}, {memory:.0f} MB before, {resident():.0f} MB after")
        assert not seen.wrong, f"{len(seen.wrong)} answers were wrong: {seen.wrong[0]}"
        grown = resident() - memory
        assert grown < (MOST_GROWN if SECONDS < 180 else 100 + 0.1 * memory)
        assert num_open_files() <= files + 3
        _, content = get(asked, "/metrics")
        check_counts(content.decode(), seen)
        for case in expected:
            _, content = send(asked, json.dumps(in_its_words(case)).encode(), case.path)
            assert text_of(json.loads(content), case.path).removeprefix(" ") == case.text


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
