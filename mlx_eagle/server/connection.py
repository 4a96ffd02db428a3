"""One client's connection: how long it may take to ask, and whether somebody is still there."""

import http.client
import io
import select
import socket
import time
from typing import Any

MAX_HEAD = 2**17  # bytes of a request before its body
DRAIN_SECONDS = 2.0
DRAIN_BYTES = 2**26
BEGINNING = b"HTTP/1.0 "
"""What every answer of ours begins with, whatever its status: it can be sent ahead."""


class RequestReader(io.RawIOBase):
    """Reads a request from a socket, all of it within one limit of time.

    A limit for each read alone would let a client hold its connection for days, byte by byte.
    """

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection = connection
        self._deadline = time.monotonic() + seconds
        self.in_head = True  # whose size is bounded here; the body's by Content-Length
        self._num_read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises TimeoutError, and for a head that is too large what http.server answers 431."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long to arrive")
        self._connection.settimeout(left)
        found = self._connection.recv_into(buffer)
        self._num_read += found
        if self.in_head and self._num_read > MAX_HEAD:
            raise http.client.LineTooLong("head")
        return found


class Presence:
    """Whether the client of a connection is still there.

    A client that has closed its sending side may be gone, or may wait for its answer, as
    ``nc -N`` does. Only sending tells: what is gone refuses it. So the bytes with which every
    answer begins are sent ahead, one at a time.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self.num_ahead = 0  # bytes of BEGINNING that were sent
        self._next, self._pause = 0.0, 1.0

    def check(self, is_answering: bool) -> None:
        """Raise ConnectionError where the client is gone.

        ``is_answering`` says that the head of the answer was sent: what follows it will tell.
        """
        error = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise ConnectionAbortedError(error, "the client left.")
        if self._has_said_all() and not is_answering and self.num_ahead < len(BEGINNING):
            now = time.monotonic()
            if now >= self._next:
                self._connection.sendall(BEGINNING[self.num_ahead : self.num_ahead + 1])
                self.num_ahead += 1
                self._next, self._pause = now + self._pause, 2 * self._pause

    def _has_said_all(self) -> bool:
        """Whether the client has closed its sending side."""
        closed = getattr(select, "POLLRDHUP", 0)  # Linux: even with bytes before it unread
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | closed)
        events = poll.poll(0)
        if not events:
            return False
        return bool(events[0][1] & closed) or not self._connection.recv(1, socket.MSG_PEEK)


def drain(connection: socket.socket) -> None:
    """Read what a client still sends after it was refused, for a moment.

    A connection that is closed with bytes unread is reset, and the client may lose its answer.
    """
    until, num_bytes = time.monotonic() + DRAIN_SECONDS, 0
    try:
        connection.shutdown(socket.SHUT_WR)
        while num_bytes < DRAIN_BYTES and (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            found = connection.recv(2**16)
            if not found:
                return
            num_bytes += len(found)
    except OSError:
        return  # it is gone, or takes its time
