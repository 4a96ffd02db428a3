"""Who may ask, how much one client may take, what is counted, and how the server stops."""

import http.client
import json
import logging
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from serving import ENDLESS, ours, parse

from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.earlier_answers import EarlierAnswers
from mlx_eagle.server import __main__ as command
from mlx_eagle.server import listener
from mlx_eagle.server.access import admits, is_loopback, read_key
from mlx_eagle.server.handler import PairHandler
from mlx_eagle.server.listener import PairServer
from mlx_eagle.server.metrics import CacheCounts, Metrics, RequestOutcome
from mlx_eagle.system.stop_signals import StopSignals

TEXT = {"prompt": "Once upon a time", "max_tokens": 20, "logit_bias": ENDLESS}
KEY = "sk-local-0123456789"


def ask(asked, method: str, path: str, body: bytes | None = None, **head: str) -> tuple:
    """Status, headers and content."""
    connection = http.client.HTTPConnection(*asked.address, timeout=30)
    try:
        connection.request(method, path, body, head)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def test_an_api_key_is_asked_for(flags):
    raw = json.dumps(TEXT).encode()
    with ours(*flags, "--api-key", KEY) as asked:
        wrong = ({}, *({"Authorization": value} for value in (
            "", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY,
            "Bearer \u00e9", f"Bearer {KEY} {KEY}",
        )))  # fmt: skip
        paths = [("POST", "/v1/completions", raw), ("GET", "/v1/models", None)]
        paths += [("GET", "/metrics", None), ("POST", "/v1/completions", b"x" * 10**7)]
        for method, path, body in paths:
            for head in wrong if body == raw else wrong[:1]:
                status, found, content = ask(asked, method, path, body, **head)
                assert status == 401 and found["WWW-Authenticate"].startswith("Bearer"), head
                assert "API key is missing or wrong" in json.loads(content)["error"]["message"]
        right = {"Authorization": f"bearer {KEY}"}
        assert [ask(asked, *path, **right)[0] for path in paths[:3]] == [200] * 3
        assert ask(asked, "GET", "/health")[0] == 200
        with OpenAI(base_url=asked.url, api_key=KEY, max_retries=0, timeout=30) as client:
            assert client.models.list().data


def test_keys_and_where_they_come_from(tmp_path):
    def found(*given: str) -> str | None:
        return read_key(parse(*given))

    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert found() is None and found("--host", "localhost") is None
    assert found("--host", "0.0.0.0", "--no-api-key") is None
    for key in (found("--api-key", KEY), found("--host", "0.0.0.0", "--api-key-file", str(file))):
        assert key is not None and admits(key, f"Bearer {KEY}") and not admits(key, "Bearer x")
        assert not admits(key, None)
    mistakes = {
        "other machines can reach --host 0.0.0.0": ("--host", "0.0.0.0"),
        "other machines can reach --host ::": ("--host", "::"),
        "give only one of": ("--api-key", KEY, "--no-api-key"),
        "could not be read (No such file": ("--api-key-file", str(tmp_path / "none")),
        "is empty, too long": ("--api-key", ""),
        "has characters that no header": ("--api-key", "two words"),
    }
    for sentence, given in mistakes.items():
        with pytest.raises(ValueError, match=re.escape(sentence)):
            found(*given)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="it is not text"):
        found("--api-key-file", str(file))
    file.write_text("x" * 5000)
    with pytest.raises(ValueError, match="too long"):
        found("--api-key-file", str(file))
    assert is_loopback("127.0.0.1") and is_loopback("::1")
    assert not is_loopback("0.0.0.0") and not is_loopback("10.0.0.1")


def test_keys_are_compared_in_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "hmac.compare_digest", lambda *both: compared.append(both) or both[0] == both[1]
    )
    assert admits(KEY, f"Bearer {KEY}") and not admits(KEY, "Bearer x") and not admits(KEY, None)
    assert compared == [(given, KEY.encode()) for given in (KEY.encode(), b"x", b"")]


MISTAKES = {
    "port": (("--port", "99999"), "--port is 99999: give 1 to 65535"),
    "negative port": (("--port", "-1"), "--port is -1"),
    "top p": (("--top-p", "2"), "--top-p is 2.0: give a number from 0 to 1"),
    "top k": (("--top-k", "-5"), "--top-k is -5"),
    "hot": (("--temp", "1e30"), "--temp is 1e+30"),
    "tokens": (("--max-tokens", str(2**40)), "--max-tokens is 1099511627776"),
    "body": (("--max-body-size", "0"), "--max-body-size is 0: give 1 or more"),
    "time": (("--time-limit", "nan"), "--time-limit is nan: give seconds"),
    "long drafts": (("--num-draft-tokens", "65"), "--num-draft-tokens is 65: give at most 64"),
    "timeout": (("--request-timeout", "0"), "--request-timeout is 0.0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_flags_that_make_no_sense(name):
    given, sentence = MISTAKES[name]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        command.check_arguments(parse(*given))


@pytest.mark.parametrize("size", ["x", "1XB", "-5", "1e", "NaN", "Infinity", ""])
@pytest.mark.parametrize("flag", ["--max-body-size", "--prompt-cache-bytes"])
def test_sizes_that_are_none(flag, size, capsys):
    with pytest.raises(SystemExit):
        parse(f"{flag}={size}")
    assert f"{size!r} is no size: give bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag, value, sentence",
    [
        ("--chat-template-args", "{", "{ is no JSON object: give one"),
        ("--chat-template-args", "[1]", "[1] is no JSON object: give one"),
        ("--chat-template-args", "3", "3 is no JSON object: give one"),
        ("--chat-template-args", "null", "null is no JSON object: give one"),
        ("--kv-bits", "7", "there is no 7: give 2, 3, 4, 5, 6 or 8"),
        ("--kv-group-size", "5", "there is no 5: give 32, 64 or 128"),
    ],
)
def test_values_that_are_none_of_the_flag(capsys, flag, value, sentence):
    with pytest.raises(SystemExit):
        parse(flag, value)
    assert f"{flag}: {sentence}" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["a" * 300, "\udcff"])
def test_hosts_that_cannot_be_named(host):
    assert not is_loopback(host)
    flags = SimpleNamespace(host=host, port=0)
    generator = SimpleNamespace(metrics=None, cli_args=flags)
    with pytest.raises(ValueError, match=r"cannot listen at .* \(no name of a host\): choose"):
        PairServer(PairHandler, {}, {}, generator)


def test_the_limits_are_stated_in_help():
    text = " ".join(command.build_parser().format_help().split())
    for said in ("16000000", "131072 bytes", "128", "60.0", "600.0", "Authorization: Bearer"):
        assert said in text


@pytest.mark.exhaustive
def test_limits_of_bodies_heads_and_time(flags):
    limits = ("--max-body-size", "1MB", "--request-timeout", "1")
    raw = json.dumps(TEXT).encode()
    with ours(*flags, *limits) as asked:
        status, _, content = ask(asked, "POST", "/v1/completions", b" " * 10**7)
        assert status == 413 and b"send at most 1000000" in content
        head = {f"X-{i}": "a" * 60_000 for i in range(3)}
        status, _, content = ask(asked, "GET", "/health", None, **head)
        assert status == 431 and json.loads(content)["error"]["code"] == 431
        status, *_ = ask(asked, "GET", "/health", None, **{f"X-{i}": "a" for i in range(200)})
        assert status == 431
        assert ask(asked, "PUT", "/v1/completions", raw)[0] == 501
        # Byte by byte, for ever: cut off after a second, in the head or in the body.
        begun = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(raw)}\r\n"
        for start, answer in ((begun, b""), (f"{begun}\r\n", b"HTTP/1.1 408 ")):
            with socket.create_connection(asked.address, timeout=20) as connection:
                connection.sendall(start.encode())
                began = time.monotonic()
                stop = threading.Event()
                thread = threading.Thread(target=drip, args=(connection, stop))
                thread.start()
                try:
                    found = connection.recv(100)
                except ConnectionError:
                    found = b""
                stop.set()
                thread.join(timeout=10)
            assert found.startswith(answer) and time.monotonic() - began < 8
        assert ask(asked, "POST", "/v1/completions", raw)[0] == 200


def drip(connection: socket.socket, stop: threading.Event) -> None:
    try:
        while not stop.wait(0.1):
            connection.sendall(b"x")
    except OSError:
        return


def wait_for(what, seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while not what() and time.monotonic() < until:
        time.sleep(0.01)
    return what()


def begin_head(asked) -> socket.socket:
    """A connection whose request has begun to arrive."""
    connection = socket.create_connection(asked.address, timeout=20)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\n")
    return connection


def test_one_connection_too_many_is_told_so(flags, monkeypatch):
    """While all the others ask for something; the health is answered even then."""
    raw = json.dumps(TEXT).encode()
    with ours(*flags, "--max-connections", "3") as asked:
        busy = [begin_head(asked) for _ in range(3)]
        server = asked.server
        assert wait_for(lambda: len(server._connections) == 3 and not server._idle)
        status, head, content = ask(asked, "POST", "/v1/completions", raw)
        assert status == 503 and head["Retry-After"] and b"too many connections" in content
        status, _, content = ask(asked, "GET", "/health")
        assert (status, content) == (200, b'{"status": "ok"}')
        status, _, content = ask(asked, "POST", "/v1/messages", raw)
        assert status == 503 and b"overloaded_error" in content
        with socket.create_connection(asked.address, timeout=20) as silent:
            assert silent.recv(10) == b""  # soon, so that it keeps no room
        assert wait_for(lambda: not server.extra)
        monkeypatch.setattr(listener, "EXTRA", 0)
        with pytest.raises(ConnectionError):
            ask(asked, "GET", "/health")
        for connection in busy:
            connection.close()
        assert wait_for(lambda: not server._connections)
        assert ask(asked, "POST", "/v1/completions", raw)[0] == 200
        assert read_metrics(asked)["mlx_eagle_refused_connections_total"] == 5


@pytest.mark.exhaustive
def test_idle_connections_keep_nobody_out(flags, monkeypatch):
    """128 that ask for nothing: the one that is idle the longest makes room, each time.

    Its thread begins last here, as it may on a machine with other work.
    """
    setup, is_first = PairHandler.setup, threading.Semaphore(1)

    def begin_late(handler):
        if is_first.acquire(blocking=False):
            wait_for(lambda: len(handler.server._connections) == 128)
        setup(handler)

    monkeypatch.setattr(PairHandler, "setup", begin_late)
    with ours(*flags) as asked:
        idle = [socket.create_connection(asked.address, timeout=20) for _ in range(128)]
        assert wait_for(lambda: len(asked.server._idle) == 128)
        assert ask(asked, "GET", "/health")[0] == 200  # also within their first second
        time.sleep(1.1)
        began = time.monotonic()
        assert ask(asked, "POST", "/v1/completions", json.dumps(TEXT).encode())[0] == 200
        assert ask(asked, "GET", "/health")[0] == 200 and time.monotonic() - began < 10
        assert idle[0].recv(10) == b""  # the first to come was the first to go
        assert len(asked.server._connections) <= 128
        idle[-1].sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert idle[-1].recv(15) == b"HTTP/1.1 200 OK"
        for connection in idle:
            connection.close()


def test_a_connection_is_kept_for_the_next_request(flags):
    """Also after a request that was refused, for streams and for clients of HTTP/1.0 it is not."""
    with ours(*flags) as asked:
        connection = http.client.HTTPConnection(*asked.address, timeout=30)
        texts = set()
        for body, expected in ((TEXT, 200), ({"prompt": ""}, 400), (TEXT, 200), ({}, 400)):
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            document = json.loads(response.read())
            assert response.status == expected and response.version == 11
            texts |= {choice["text"] for choice in document.get("choices", [])}
            address = connection.sock.getsockname()
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status": "ok"}'
            assert connection.sock.getsockname() == address
        assert len(texts) == 1
        connection.request("HEAD", "/v1/models")
        response = connection.getresponse()
        assert response.status == 200 and response.read() == b""
        assert int(response.headers["Content-Length"]) > 10
        connection.request("POST", "/v1/completions", json.dumps(TEXT | {"stream": True}))
        response = connection.getresponse()
        assert response.headers["Connection"] == "close"
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        raw = json.dumps(TEXT).encode()
        line = f"Content-Length: {len(raw)}\r\n"
        for head, closes in (("", True), ("Connection: keep-alive\r\n", False)):
            with socket.create_connection(asked.address, timeout=30) as old:
                request = f"POST /v1/completions HTTP/1.0\r\n{head}{line}\r\n".encode() + raw
                old.sendall(request)
                assert b"200 OK" in old.recv(15)
                old.sendall(b"" if closes else request)
                rest = old.recv(2**16)
                while rest.count(b"200 OK") < 1 and (found := old.recv(2**16)):
                    rest += found
                assert (b"200 OK" in rest) is not closes
        with socket.create_connection(asked.address, timeout=30) as eager:
            expect = f"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\n{line}\r\n"
            eager.sendall(expect.encode())
            assert eager.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            eager.sendall(raw)
            assert eager.recv(15) == b"HTTP/1.1 200 OK"
        # Two requests in one go are answered one after the other.
        with socket.create_connection(asked.address, timeout=30) as both:
            both.sendall(b"GET /health HTTP/1.1\r\n\r\n" * 2)
            both.settimeout(5)
            got = b""
            while got.count(b'"ok"') < 2:
                got += both.recv(2**16)


def test_every_request_is_a_line_in_the_log(flags, caplog):
    with ours(*flags) as asked, caplog.at_level(logging.DEBUG):
        asked.complete(**TEXT)
        ask(asked, "POST", "/v1/completions", b'{"prompt": "a", "temperature": -1}')
        ask(asked, "GET", "/v1/models")
        ask(asked, "GET", "/health")
        with socket.create_connection(asked.address, timeout=30) as raw:
            raw.sendall(b"GET /x\x1b[31m HTTP/1.1\r\n\r\n")
            assert b" 404 " in raw.recv(100)
        with asked.complete(**TEXT | {"max_tokens": 1900}, stream=True) as stream:
            next(stream)
        assert wait_for(lambda: not asked.server.answering)
    records = [r for r in caplog.records if r.getMessage().startswith("127.0.0.1 ")]
    lines = {r.getMessage() for r in records}
    assert len(records) == 6
    (whole,) = [line for line in lines if " answered" in line]
    assert re.fullmatch(
        r"127\.0\.0\.1 POST /v1/completions 200 answered: 16 prompt tokens, 0 of them cached, "
        r"20 generated in \d+\.\d\d s, \d+\.\d tokens/s, mean acceptance length \d\.\d\d",
        whole,
    )
    (refused,) = [line for line in lines if " 400 " in line]
    assert refused.startswith("127.0.0.1 POST /v1/completions 400 refused: temperature is -1: ")
    assert any(" 200 left: 16 prompt tokens" in line for line in lines)
    assert any(line.endswith("GET /v1/models 200") for line in lines)
    assert [r.levelname for r in records if "/health" in r.getMessage()] == ["DEBUG"]
    assert not any("\x1b" in line for line in lines)
    ours_ = [r for r in caplog.records if r.name == "root" and r.levelno >= logging.INFO]
    assert [r.getMessage() for r in ours_ if r not in records] == []


def read_metrics(asked) -> dict[str, float]:
    """Every sample, by its name and labels, as Prometheus's own parser reads them."""
    status, head, content = ask(asked, "GET", "/metrics")
    assert status == 200 and head["Content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(content.decode()):
        assert family.documentation and family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            name = ",".join([sample.name, *sample.labels.values()])
            assert name not in samples
            samples[name] = sample.value
    return samples


def test_metrics_add_up_to_what_clients_saw(flags):
    with ours(*flags) as asked:
        usages = [asked.complete(**TEXT, num_draft_tokens=k).usage for k in (3, 3, 0)]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        usages.append(list(asked.complete(**TEXT | {"max_tokens": 7}, **options))[-1].usage)
        for raw in (b"{", b'{"prompt": ""}'):
            assert ask(asked, "POST", "/v1/completions", raw)[0] == 400
        with asked.complete(**TEXT | {"max_tokens": 1900}, stream=True) as stream:
            next(stream)
        until = time.monotonic() + 10
        while asked.server.answering and time.monotonic() < until:
            time.sleep(0.02)
        found = read_metrics(asked)

    def of(name: str) -> float:
        return found[f"mlx_eagle_{name}"]

    assert of("requests_total,answered") == 4 and of("requests_total,refused") == 2
    assert of("requests_total,left") == 1 and of("requests_total,failed") == 0
    assert of("prompt_tokens_total,answered") == sum(u.prompt_tokens for u in usages)
    assert of("generated_tokens_total,answered") == sum(u.completion_tokens for u in usages)
    cached = sum(u.prompt_tokens_details.cached_tokens for u in usages)
    assert of("cached_prompt_tokens_total,answered") == cached > 0
    assert of("drafted_tokens_total") >= sum(u.drafted_tokens for u in usages) > 0
    assert of("accepted_tokens_total") >= sum(u.accepted_tokens for u in usages)
    by_position = [of(f"accepted_by_position_total,{i}") for i in (1, 2, 3)]
    assert sum(by_position) == of("accepted_tokens_total")
    assert of("drafted_by_position_total,1") >= of("drafted_by_position_total,3")
    assert of("acceptance_by_position,1") == by_position[0] / of("drafted_by_position_total,1")
    passes = of("draft_target_passes_total")
    assert of("mean_acceptance_length") == of("draft_emitted_tokens_total") / passes >= 1
    assert of("requests_waiting") == of("requests_running") == 0
    assert of("time_to_first_token_seconds_count") == 5
    assert of("time_to_first_token_seconds_bucket,+Inf") == 5
    assert of("time_to_first_token_seconds_sum") > 0


def test_the_histogram_counts_each_time_under_its_bounds():
    metrics = Metrics(CacheCounts(), EarlierAnswers(0))
    for seconds in (0.01, 0.05, 0.07, 3.0, 1000.0):
        metrics.count_first_token(seconds)
    metrics.count_drafts(Stats())
    metrics.count_request(RequestOutcome.of_status(503))
    families = {f.name: f for f in text_string_to_metric_families(metrics.text(1, 2, 3))}
    samples = families["mlx_eagle_time_to_first_token_seconds"].samples
    counts = {s.labels["le"]: s.value for s in samples if s.name.endswith("_bucket")}
    expected = {"0.05": 2, "0.1": 3, "2.5": 3, "5.0": 4, "120.0": 4, "+Inf": 5}
    assert expected.items() <= counts.items()
    assert list(counts.values()) == sorted(counts.values())
    assert math.isclose(samples[-1].value + samples[-2].value, 5 + 1003.13)
    assert families["mlx_eagle_requests_waiting"].samples[0].value == 1
    assert families["mlx_eagle_requests"].samples[2].value == 1


def test_signals_that_another_thread_was_given_are_heard_at_once():
    """Also while the main thread is at something else; each counts."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(60,))
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert not signals.wait(0)
        thread.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.pthread_kill(thread.ident, number)
            assert signals.wait(10) and not signals.wait(0)
        stop.set()
        thread.join(timeout=10)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.exhaustive
def test_new_connections_are_refused_at_once_after_sigterm(pair):
    """They used to hang until the last answer was finished."""
    line = [sys.executable, "-m", "mlx_eagle.server", "--port", "0", "--model", pair["target"]]
    pipe = subprocess.PIPE
    line += ["--draft-model", "lookup", "--num-draft-tokens", "1"]
    process = subprocess.Popen(line, stdout=pipe, stderr=pipe)
    timer = threading.Timer(90, process.kill)
    timer.start()
    try:
        port = int(re.search(rb":(\d+)/v1", process.stdout.readline()).group(1))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = TEXT | {"stream": True, "max_tokens": 700}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        response.readline()
        late = socket.create_connection(("127.0.0.1", port), timeout=20)
        # Connections are taken in their order: once this one is answered, that one is open.
        after = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        after.request("GET", "/health")
        assert after.getresponse().status == 200
        process.send_signal(signal.SIGTERM)
        assert any(line.startswith(b"Waiting for 1 request") for line in process.stdout)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=20)
        late.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
        assert late.recv(100).startswith(b"HTTP/1.1 503 ")
        assert process.poll() is None, "the answer was over before this was tried"
        assert response.read().endswith(b"data: [DONE]\n\n")
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0 and b"Traceback" not in err
        late.close()
        connection.close()
    finally:
        timer.cancel()
        process.kill()
        process.communicate(timeout=30)
