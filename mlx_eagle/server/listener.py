"""Who may connect: the listening socket, its limits, and how it stops."""

import json
import logging
import socket
import sys
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from mlx_lm.server import get_system_fingerprint

from .access import ApiKey
from .answers import RequestError
from .collect import Collector
from .engine import PairGenerator

BODY_BYTES = 16_000_000
CONNECTIONS = 128
REQUEST_SECONDS = 60.0
ACCEPT_POLL = 0.05  # seconds until the listening thread sees that it is to stop
TOO_MANY = {"message": "the server has too many connections: try again later."}


@dataclass(frozen=True)
class Limits:
    """What one client, and all of them, may take.

    ``request_seconds`` is the time that a request may take to arrive, and an answer that is
    complete to be read.
    """

    body_bytes: int = BODY_BYTES
    num_connections: int = CONNECTIONS
    request_seconds: float = REQUEST_SECONDS


class PairServer(ThreadingHTTPServer):
    """A thread per client; ``answering`` are those whose request is not answered yet."""

    request_queue_size = 128
    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        generator: PairGenerator,
        limits: Limits = Limits(),
        key: ApiKey | None = None,
        collector: Collector | None = None,
    ):
        """Listens at once. Raises ValueError where the address cannot be had."""
        self.generator, self.limits, self.key = generator, limits, key
        self.collector = collector
        self.metrics = generator.metrics
        self.answering: set[BaseHTTPRequestHandler] = set()
        self.large_bodies = Lock()
        self.is_stopping = False
        self._fingerprint = get_system_fingerprint()
        self._connections: set[socket.socket] = set()
        host, port = address
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

    def finish_request(self, request: Any, client_address: Any) -> None:
        # Not as the base class does it: this handler takes the server first.
        self.RequestHandlerClass(
            self, request, client_address, self, system_fingerprint=self._fingerprint
        )

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, unless there are too many."""
        if len(self._connections) >= self.limits.num_connections:
            self.metrics.count_refused_connection()
            self._refuse(request)
            return
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def serve_forever(self, poll_interval: float = ACCEPT_POLL) -> None:
        super().serve_forever(poll_interval)

    def stop_listening(self) -> None:
        """Refuse new connections from now on; requests that were read are still answered."""
        self.is_stopping = True
        self.shutdown()
        self.server_close()

    def check_open(self) -> None:
        """Raise RequestError where a request comes too late."""
        if self.is_stopping:
            raise RequestError("the server is stopping.", 503)

    def wait_until_answered(self, seconds: float) -> bool:
        """Whether all requests are answered after at most so long."""
        until = time.monotonic() + seconds
        while self.answering and time.monotonic() < until:
            time.sleep(0.01)
        return not self.answering

    def metrics_text(self) -> str:
        """What ``/metrics`` shows."""
        num_waiting, num_running = self.generator.count_open()
        return self.metrics.text(num_waiting, num_running, len(self._connections))

    def page_settings(self) -> dict[str, Any]:
        """What the page at ``/`` is told. Nobody is asked for a key there: then no names."""
        args = self.generator.cli_args
        return {
            "needs_key": self.key is not None,
            "model": self.generator.model_provider.name if self.key is None else None,
            "temperature": args.temp,
            "max_tokens": args.max_tokens,
            "num_draft_tokens": args.num_draft_tokens,
            "tree": args.tree,
        }

    def _refuse(self, request: Any) -> None:
        """Say so without waiting: this is the thread that accepts connections for everybody."""
        content = json.dumps({"error": TOO_MANY | {"type": "server_error", "code": 503}})
        head = (
            f"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: {len(content)}"
        )
        try:
            request.setblocking(False)
            request.send(f"{head}\r\nContent-type: application/json\r\n\r\n{content}".encode())
            request.shutdown(socket.SHUT_WR)
            request.recv(2**16)  # a connection with bytes unread is reset, and loses its answer
        except OSError:
            logging.debug("A connection that was one too many could not be told so.")
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error of ours."""
        if isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            logging.info("A client left before it was answered.")
        else:
            super().handle_error(request, client_address)
