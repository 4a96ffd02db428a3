"""Framing of a request: where its header lines and its body begin and end.

Whoever sits between a client and this server (a proxy, a load balancer) has to see the same
requests in the same bytes. So what RFC 9112 leaves open, or tells servers to repair, is refused.
"""

import re
from email.message import Message
from typing import BinaryIO

from .answer_stream import RequestError

FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:")  # RFC 9110, section 5.1: no blank in it
CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[^\r\n\0]*)?\r\n")
LONGEST_LINE = 2**12  # bytes: the size of a chunk with its extensions, or a trailer
FRAMING_BYTES = 2**20  # between the pieces of a body: 200,000 pieces of any size


class HeadLines:
    """Lines of a request's head as ``http.client`` reads them, each checked before."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def readline(self, limit: int = -1) -> bytes:
        """Raises RequestError for a line that others could read differently."""
        line = self._file.readline(limit)
        check_line(line)
        return line


def check_line(line: bytes) -> None:
    """Check one header line, its end included (RFC 9112, sections 2.2, 5.1 and 5.2)."""
    text = line.removesuffix(b"\n").removesuffix(b"\r")
    if not text:
        return
    if b"\r" in text or b"\0" in text:
        raise RequestError("a header line holds a bare CR or a NUL: send lines of text.")
    if text[:1] in (b" ", b"\t"):
        raise RequestError("a header line begins with a blank: send each header in one line.")
    if FIELD.match(text) is None:
        raise RequestError("a header line has no name right before its colon: send 'Name: value'.")


def check_head(request_line: bytes, headers: Message) -> None:
    """Check a head as a whole. Raises RequestError."""
    if b"\r" in request_line.removesuffix(b"\n").removesuffix(b"\r") or b"\0" in request_line:
        raise RequestError("the request line holds a bare CR or a NUL: send a line of text.")
    if len(headers.get_all("Host", [])) > 1:
        raise RequestError("the request has several Hosts: give one.")


def has_body(headers: Message) -> bool:
    """Whether a body follows, or may follow, a head."""
    lengths = headers.get_all("Content-Length", [])
    return "Transfer-Encoding" in headers or any(each.strip(" \t") != "0" for each in lengths)


def read_body_of(file: BinaryIO, headers: Message, version: str, limit: int) -> bytes:
    """Read the body of at most ``limit`` bytes behind a head.

    Raises RequestError where its length is not clear or too large, TimeoutError, and
    ConnectionError if the client leaves meanwhile.
    """
    if "Transfer-Encoding" in headers:
        encodings = [each.strip(" \t").lower() for each in headers.get_all("Transfer-Encoding")]
        if encodings != ["chunked"] or version == "HTTP/1.0":
            raise RequestError(
                "the request's Transfer-Encoding is another than chunked: send the body as it "
                "is, in chunks or with its Content-Length."
            )
        if "Content-Length" in headers:
            raise RequestError("Transfer-Encoding and Content-Length are both given: give one.")
        return _read_chunks(file, limit)
    if len(set(headers.get_all("Content-Length", []))) > 1:
        raise RequestError("the request has several Content-Lengths: give one.")
    if "Content-Length" not in headers:
        raise RequestError("the request has no Content-Length: give one.", 411)
    text = headers["Content-Length"].strip(" \t")
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise RequestError(f"Content-Length is {text[:40]!r}: give a number of bytes.")
    length = int(text)
    if length > limit:
        raise RequestError(f"the body has {length} bytes: send at most {limit}.", 413)
    return _read_exactly(file, length)


def _read_chunks(file: BinaryIO, limit: int) -> bytes:
    """Read a body in chunks, and the trailers behind it, which are ignored (section 7.1)."""
    chunks = []
    num_bytes = 0
    framing = FRAMING_BYTES
    size = -1
    while size:
        line = _read_line(file)
        found = CHUNK.fullmatch(line)
        if found is None:
            raise RequestError("a chunk of the body does not begin with its size: send it again.")
        size = int(found[1], 16)
        num_bytes += size
        framing -= len(line)
        if num_bytes > limit:
            raise RequestError(f"the body has over {limit} bytes: send at most {limit}.", 413)
        if framing < 0:
            raise RequestError("the body comes in too many chunks: send larger ones.", 413)
        if size:
            chunks.append(_read_exactly(file, size))
            if _read_exactly(file, 2) != b"\r\n":
                raise RequestError("a chunk of the body has another size than it says.")
    while (line := _read_line(file)).strip(b"\r\n"):
        check_line(line)
        framing -= len(line)
        if framing < 0:
            raise RequestError("the trailers of the body are too long: leave them out.", 413)
    return b"".join(chunks)


def _read_line(file: BinaryIO) -> bytes:
    line = file.readline(LONGEST_LINE)
    if not line.endswith(b"\n"):
        if len(line) == LONGEST_LINE:
            raise RequestError("a line between the chunks of the body is too long.")
        raise ConnectionAbortedError("the client left before its request was complete.")
    return line


def _read_exactly(file: BinaryIO, length: int) -> bytes:
    raw = file.read(length)
    if len(raw) < length:
        raise ConnectionAbortedError("the client left before its request was complete.")
    return raw
