"""Listening socket: connections and their limits, health, and stopping the server."""

import http.client
import io
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from .access import Access
from .collect import Collector
from .engine import PairGenerator
from .stored_responses import StoredResponses

MAX_HEAD = 2**17  # bytes of a request before its body
DRAIN_SECONDS = 2.0
DRAIN_BYTES = 2**26
BEGINNING = b"HTTP/1.1 "
"""First bytes of every answer, whatever its status: they can be sent ahead."""
BODY_BYTES = 16_000_000
CONNECTIONS = 128
REQUEST_SECONDS = 60.0
ACCEPT_POLL = 0.05  # seconds until the listening thread sees that it is to stop
IDLE_SECONDS = 1.0  # without a request, after which a connection may be closed to make room
EXTRA = 64  # connections beyond the limit that are answered at a time, each with one request
EXTRA_SECONDS = 1.0  # for this to arrive


class RequestReader(io.RawIOBase):
    """Reads a request from a socket, all of it within one time limit.

    A limit for each read only would let a client hold its connection for days, byte by byte.
    ``on_begin`` is called when the first byte of a request arrives.
    """

    def __init__(
        self, connection: socket.socket, seconds: float, on_begin: Callable[[socket.socket], None]
    ):
        self._connection = connection
        self._seconds = seconds
        self._on_begin = on_begin
        self.restart()

    def restart(self) -> None:
        """Wait for the next request of the connection."""
        self._deadline = time.monotonic() + self._seconds
        self.in_head = True  # whose size is bounded here; the body's by Content-Length
        self._has_begun = False
        self._num_read = 0

    def begin(self) -> None:
        """Start the time limit of a request that has begun to arrive."""
        if not self._has_begun:
            self._has_begun = True
            self._deadline = time.monotonic() + self._seconds
            self._on_begin(self._connection)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises TimeoutError, or the error that http.server answers with 431 for a large head."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long to arrive")
        self._connection.settimeout(left)
        found = self._connection.recv_into(buffer)
        self._num_read += found
        if found:
            self.begin()
        if self.in_head and self._num_read > MAX_HEAD:
            raise http.client.LineTooLong("head")
        return found


class Presence:
    """Whether the client of a connection is still there.

    A client that has closed its sending side may be gone, or may wait for its answer, as
    ``nc -N`` does. Only sending tells: a client that is gone refuses it. So the first bytes of
    every answer are sent ahead, one at a time.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self.num_ahead = 0  # bytes of BEGINNING that were sent
        self._next = 0.0
        self._pause = 1.0

    def check(self, is_answering: bool) -> None:
        """Raise ConnectionError if the client is gone.

        ``is_answering``: the head of the answer was sent, so sending the rest will tell.
        """
        error = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise ConnectionAbortedError(error, "the client left.")
        if self._has_said_all() and not is_answering and self.num_ahead < len(BEGINNING):
            now = time.monotonic()
            if now >= self._next:
                self._connection.sendall(BEGINNING[self.num_ahead : self.num_ahead + 1])
                self.num_ahead += 1
                self._next = now + self._pause
                self._pause = 2 * self._pause

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
    """Read for a moment what a client still sends after it was refused.

    A connection that is closed with bytes unread is reset, and the client may lose its answer.
    """
    until = time.monotonic() + DRAIN_SECONDS
    num_bytes = 0
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


class PairServer(ThreadingHTTPServer):
    """Server with a thread per client; ``answering`` holds those with an open request."""

    request_queue_size = 128
    daemon_threads = True

    def __init__(
        self,
        handler: type[BaseHTTPRequestHandler],
        routes: Mapping[str, Any],
        documents: Mapping[str, Any],
        generator: PairGenerator,
        access: Access | None = None,
        collector: Collector | None = None,
    ):
        """Listen at once, as the flags say.

        ``routes`` say which API answers what is posted to a path, ``documents`` what GET shows.

        Raises ValueError if the address is not available.
        """
        self.routes = routes
        self.documents = documents
        self.generator = generator
        self.flags = generator.cli_args
        self.access = access
        self.collector = collector
        self.metrics = generator.metrics
        self.stored = StoredResponses()
        self.answering: set[BaseHTTPRequestHandler] = set()
        self.is_stopping = False
        self._connections: set[socket.socket] = set()
        self._idle: dict[socket.socket, float] = {}  # without a request, since when
        self.extra: set[socket.socket] = set()  # beyond the limit
        self._lock = Lock()
        host = self.flags.host
        port = self.flags.port
        try:
            found = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            self.address_family, _, _, _, resolved = found[0]
            super().__init__(resolved, handler)
        except (OSError, OverflowError, UnicodeError) as err:
            reason = err.strerror if isinstance(err, OSError) else "no name of a host"
            raise ValueError(
                f"the server cannot listen at {host}, port {port} ({reason}): choose others with "
                "--host and --port."
            ) from err

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own.

        If there are too many, the connection that has been idle longest makes room. If none is
        idle, this is an extra one: it gets the health, or learns that the server is full.
        """
        if len(self._connections) >= self.flags.max_connections:
            self._close_idlest()
        if len(self._connections) < self.flags.max_connections:
            self._connections.add(request)
            self.note_idle(request)  # not in its thread: threads begin in any order
        else:
            self.metrics.refused_connections += 1
            if len(self.extra) >= EXTRA:
                self.shutdown_request(request)
                return
            self.extra.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        self.extra.discard(request)
        self.note_busy(request)
        super().shutdown_request(request)

    def note_idle(self, connection: socket.socket) -> None:
        """Note that a connection waits for a request, from now on unless it does already."""
        with self._lock:
            self._idle.setdefault(connection, time.monotonic())

    def note_busy(self, connection: socket.socket) -> None:
        """Note that a connection no longer waits for a request."""
        with self._lock:
            self._idle.pop(connection, None)

    def _close_idlest(self) -> None:
        with self._lock:
            found = min(self._idle, key=lambda each: self._idle[each], default=None)
            if found is None or time.monotonic() - self._idle[found] < IDLE_SECONDS:
                return
            del self._idle[found]
        self._connections.discard(found)
        with suppress(OSError):
            found.shutdown(socket.SHUT_RDWR)  # its thread reads an end, and closes it

    def stop_listening(self) -> None:
        """Refuse new connections from now on; requests already read are still answered."""
        self.is_stopping = True
        self.shutdown()
        self.server_close()

    def metrics_text(self) -> str:
        """Return the text of ``/metrics``."""
        num_waiting, num_running = self.generator.count_open()
        return self.metrics.text(num_waiting, num_running, len(self._connections))

    def page_settings(self) -> dict[str, Any]:
        """Settings for the page at ``/``; without names where a key is required."""
        args = self.flags
        is_open = self.access.key is None
        return {
            "needs_key": not is_open,
            "model": self.generator.model_provider.name if is_open else None,
            "draft_model": Path(args.draft_model).name if is_open and args.draft_model else None,
            "temperature": args.temp,
            "max_tokens": args.max_tokens,
            "num_draft_tokens": args.num_draft_tokens,
            "tree": args.tree,
        }

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a client that leaves."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)
