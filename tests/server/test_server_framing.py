"""Beginnings and ends of requests: chunks, unread bodies, heads that two could read as two."""

import json
import socket

import pytest
from serving import ours

from mlx_eagle.server import request_framing

HEAD = b"Host: localhost\r\nContent-Type: application/json\r\n"
POST = b"POST /tokenize HTTP/1.1\r\n" + HEAD
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = json.dumps({"content": "abc" * 50}).encode()
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def server(pair):
    with ours(
        "--model", pair["target"], "--num-draft-tokens", "0", "--max-body-size", "4000"
    ) as a:
        yield a


def exchange(asked, raw: bytes) -> list[tuple[int, bytes]]:
    """Status and content of every answer that comes over one connection."""
    with socket.create_connection(asked.address, timeout=20) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        read = b"".join(iter(lambda: connection.recv(2**16), b""))
    answers = []
    while read:
        head, _, rest = read.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        size = int(fields.get(b"content-length", 0))
        answers.append((int(head.split()[1]), rest[:size]))
        read = rest[size:]
    return answers


def chunks(body: bytes, size: int, line: bytes = b"%x\r\n") -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(line % len(piece) + piece + b"\r\n" for piece in pieces)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("line", [b"%x\r\n", b"%04X;a=b\r\n"])
def test_a_body_in_chunks_is_read_as_one_with_a_length(server, size, line):
    whole = exchange(server, POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    body = chunks(BODY, size, line) + b"0\r\nX-Checksum: 5\r\n\r\n"
    found = exchange(server, POST + CHUNKED + body + HEALTH)
    assert whole[0][0] == 200 and found[0] == whole[0]
    assert [status for status, _ in found] == [200, 200]  # and the connection goes on


WRONG = {
    "a length besides": (b"Content-Length: 5\r\n" + CHUNKED + b"0\r\n\r\n", 400),
    "another encoding": (b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    "two of them": (b"Transfer-Encoding: chunked\r\n" + CHUNKED + b"0\r\n\r\n", 400),
    "no size": (CHUNKED + b"x\r\n\r\n", 400),
    "a sign": (CHUNKED + b"+2\r\n{}\r\n0\r\n\r\n", 400),
    "another size": (CHUNKED + b"1\r\n{}\r\n0\r\n\r\n", 400),
    "bare line ends": (CHUNKED + b"2\n{}\n0\n\n", 400),
    "over the limit": (CHUNKED + chunks(b" " * 4001, 1000) + b"0\r\n\r\n", 413),
    "over the limit by its size": (CHUNKED + b"FFFFFFFFFFFFFF\r\n", 413),
    "a long line": (CHUNKED + b"2;" + b"a" * 5000 + b"\r\n{}\r\n0\r\n\r\n", 400),
    "a trailer of two lines": (CHUNKED + b"2\r\n{}\r\n0\r\na: b\r\n c\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", WRONG)
def test_chunks_that_are_refused(server, name):
    rest, status = WRONG[name]
    ((found, content),) = exchange(server, POST + rest + HEALTH)
    assert found == status, content
    assert json.loads(content)["error"]["message"].endswith(".")


def test_too_many_chunks_are_refused(server, monkeypatch):
    monkeypatch.setattr(request_framing, "FRAMING_BYTES", 100)
    ((found, _),) = exchange(server, POST + CHUNKED + chunks(BODY, 1) + b"0\r\n\r\n")
    assert found == 413


HIDDEN = b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"DELETE", b"OPTIONS"])
@pytest.mark.parametrize(
    "head, body",
    [
        (b"Content-Length: %d\r\n\r\n" % len(HIDDEN), HIDDEN),
        (CHUNKED, b"%x\r\n" % len(HIDDEN) + HIDDEN + b"\r\n0\r\n\r\n"),
        (CHUNKED, HIDDEN),
        (b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(HIDDEN), HIDDEN),
    ],
)
def test_the_body_of_a_request_is_never_another_request(server, method, head, body):
    raw = method + b" /health HTTP/1.1\r\nHost: localhost\r\n" + head + body
    with socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        read = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert read.count(b"HTTP/1.1 ") == 1 and b"n_ctx" not in read


def test_no_body_leaves_a_connection_open(server):
    raw = HEALTH.replace(b"\r\n\r\n", b"\r\nContent-Length: 0\r\n\r\n")
    assert [status for status, _ in exchange(server, raw + HEALTH)] == [200, 200]


@pytest.mark.parametrize(
    "line",
    [
        b"Transfer-Encoding : chunked\r\n",
        b" Transfer-Encoding: chunked\r\n",
        b"A: b\r\n c: d\r\n",
        b"A: b\r\n\tContent-Length: 5\r\n",
        b"Host: localhost\r\n",
        b"A: b\0c\r\n",
        b"A: b\rContent-Length: 50\r\n",
        b"A\r\n",
        b": b\r\n",
    ],
)
def test_heads_that_two_could_read_as_two_are_refused(server, line):
    raw = HEALTH.replace(b"\r\n\r\n", b"\r\n" + line + b"\r\n")
    ((status, content),) = exchange(server, raw + HEALTH)
    assert status == 400, content
    assert json.loads(content)["error"]["message"].endswith(".")


def test_a_request_line_with_a_bare_end_is_refused(server):
    ((status, _),) = exchange(server, HEALTH.replace(b" /health", b"\r/health") + HEALTH)
    assert status == 400
