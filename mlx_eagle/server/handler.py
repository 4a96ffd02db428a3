"""HTTP: requests read, their answers sent, and a line in the log of each.

The server's ``routes`` say which API answers; connections are accepted by ``listener.py``.
"""

import base64
import hashlib
import html
import io
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mlx_lm.server import CompletionRequest

from .answer_stream import Document, RequestError, draft_usage, error_document, on_error, told_as
from .body import PairArguments, read_body, shortened
from .client_session import LARGE, ClientSession
from .listener import EXTRA_SECONDS, PairServer, Presence, RequestReader, drain
from .metrics import CONTENT_TYPE, RequestOutcome
from .provider import PairProvider, models
from .request_fields import ignored_fields
from .request_framing import HeadLines, check_head, has_body, read_body_of

PAGE_FILES = Path(__file__).parent / "web"
SCRIPTS = ("code.js", "markdown.js", "answer.js", "stream.js", "strip.js", "settings.js",
           "conversations.js", "undo.js", "chat.js", "race.js", "main.js")  # fmt: skip
PAGE_TYPE = "text/html; charset=utf-8"
TRUSTED_TYPES = "require-trusted-types-for 'script'; trusted-types 'none'"  # no text becomes HTML


def page(settings: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers; its script reads ``settings``."""
    style = (PAGE_FILES / "page.css").read_text(encoding="utf-8")
    scripts = "".join((PAGE_FILES / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{scripts}}})();\n'
    document = (PAGE_FILES / "page.html").read_text(encoding="utf-8")
    values = html.escape(json.dumps(settings), quote=True)
    for name, text in (("style", style), ("script", script), ("settings", values)):
        document = document.replace(f"{{{{{name}}}}}", text, 1)
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; {TRUSTED_TYPES}"
    )
    return document.encode(), {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@dataclass(frozen=True)
class Route:
    """A path for POST: ``check`` gives the fields to ``answer``, or raises ValueError.

    ``fields``: the kind of its fields, a key of ``KNOWN``.
    ``generates``: it counts as a request to generate.
    """

    fields: str
    check: Callable[[dict[str, Any]], dict[str, Any]]
    answer: Callable[["Reply", dict[str, Any]], None]
    generates: bool = True
    error_document: Callable[[RequestError], dict[str, Any]] = error_document


RESPONSES = "/v1/responses/"  # and the name of one that is kept
NO_ROUTE = Route("tokens", dict, lambda reply, body: None)
RUNNING = "Ollama is running"  # at ``/``, by which clients of its API recognise a server
EXTRA_HEADERS = {401: {"WWW-Authenticate": 'Bearer realm="mlx-eagle"'}, 503: {"Retry-After": "5"}}


def known_path(path: str, routes: Mapping[str, Route]) -> str:
    """Return the path that a client means which has put its address together differently.

    With a slash too many, with ``/v1`` twice, or without it.
    """
    path = re.sub("/+", "/", path).rstrip("/") or "/"
    while path.startswith("/v1/v1/"):
        path = path.removeprefix("/v1")
    longer = f"/v1{path}"
    is_named = f"{longer}/".startswith(("/v1/models/", RESPONSES))
    return longer if longer in routes or is_named else path


def event_text(document: Document, name: str = "") -> str:
    """Format an event of a stream; some APIs give each a name."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(document)}\n\n"


class Reply(BaseHTTPRequestHandler):
    """Connection of a client, to which the APIs send an answer.

    ``created`` and ``asked`` say when the request came, by the calendar and by
    ``time.monotonic()``. ``failed`` formats the end of a stream that breaks off.
    """

    protocol_version = "HTTP/1.1"
    server: PairServer
    created: int
    asked: float
    sessions: list[ClientSession]
    failed: Callable[[RequestError], str]
    presence: Presence

    @property
    def provider(self) -> PairProvider:
        return self.server.generator.model_provider

    def new_session(self, request: CompletionRequest, args: PairArguments) -> ClientSession:
        """Add a session to the request, which closes and counts it."""
        generator = self.server.generator
        session = ClientSession(generator, request, args, self.asked, self.check_connected)
        self.sessions.append(session)
        return session

    def check_connected(self, session: ClientSession) -> None:
        """Raise ConnectionError if the client is gone, or too slow to read its answer."""
        self.presence.check(self.is_answering)
        answer = session.answer
        if not answer.is_over or not session.read_since:
            return
        complete = max(answer.ended, session.read_since)
        if time.monotonic() - complete > self.server.flags.request_timeout:
            raise TimeoutError("the client reads too slowly")

    def send_json(self, document: Document, status: int = 200) -> None:
        """Send a whole answer."""
        self.send(status, "application/json", json.dumps(document).encode())

    def begin(self, request: CompletionRequest, args: PairArguments) -> ClientSession:
        """Begin to answer one prompt. Raises RequestError."""
        session = self.new_session(request, args)
        session.submit()
        session.open()
        return session

    def begin_events(self, content_type: str = "text/event-stream") -> None:
        """Send the head of a stream."""
        self.is_streaming = self.close_connection = True
        self.send_response(200)
        self.send_header("Content-type", content_type)
        self.send_header("Cache-Control", "no-cache")
        self._end_head()

    def send_events(self, events: Iterator[str], document: Document, is_stream: bool) -> None:
        """Send the events, or the document that is whole behind the last of them."""
        if is_stream:
            self.begin_events()
        for event in events:
            if is_stream:
                self.write(event)
        if not is_stream:
            self.send_json(document)

    def write(self, text: str) -> None:
        """Send a part of a stream."""
        self.wfile.write(text.encode())

    def say_progress(self, done: int, total: int) -> None:
        """Tell the client of a stream how much of its prompt is read."""
        self.write(f": keepalive {done}/{total}\n\n")

    def send(
        self, status: int, content_type: str, content: bytes, headers: Mapping[str, str] = {}
    ) -> None:
        """Send an answer of any type; without its content for HEAD."""
        self.send_response(status)
        if status != 204:
            self.send_header("Content-type", content_type)
            self.send_header("Content-Length", str(len(content)))
        for name, value in {**EXTRA_HEADERS.get(status, {}), **headers}.items():
            self.send_header(name, value)
        self._end_head()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _end_head(self) -> None:
        origin = self.server.access.shared_with(self.headers.get("Origin"))
        if origin is not None:
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS")
            self.send_header("Access-Control-Allow-Headers", "*, Authorization")
        self.send_header("Vary", "Origin")
        if self.close_connection or self.server.is_stopping:
            self.send_header("Connection", "close")
        elif self.request_version == "HTTP/1.0":
            self.send_header("Connection", "keep-alive")
        self.end_headers()

    def send_response(self, code: int, message: str | None = None) -> None:
        self.status = code
        super().send_response(code, message)

    def flush_headers(self) -> None:
        """Send the head of the answer, except the bytes that ``Presence`` has sent already."""
        head = b"".join(getattr(self, "_headers_buffer", []))
        if head:
            self._headers_buffer = [head[self.presence.num_ahead :]]
            self.is_answering = True
        super().flush_headers()


class PairHandler(Reply):
    """Requests of one connection; those that cannot be answered get an error in one sentence."""

    def setup(self) -> None:
        """Set the time limits: one for all reads of a request, one for each write."""
        self.is_extra = self.request in self.server.extra
        self.timeout = EXTRA_SECONDS if self.is_extra else self.server.flags.request_timeout
        super().setup()
        self.reader = RequestReader(self.connection, self.timeout, self.server.note_busy)
        self._rest = self.rfile = io.BufferedReader(self.reader)
        self.is_body_unread = False

    def handle_one_request(self) -> None:
        """Answer and log the next request of the connection."""
        self.rfile = self._rest
        self.requestline = ""
        self.command = ""
        self.path = ""
        self.asked = time.monotonic()
        self.created = int(time.time())
        self.status = 0
        self.reason = ""
        self.ignored: list[str] = []  # fields of the body
        self.is_streaming = self.is_answering = self.is_body_unread = False
        self.outcome: RequestOutcome | None = None  # of a request to generate
        self.route = NO_ROUTE
        self.failed = self._error_event
        self.sessions = []
        self.presence = Presence(self.connection)
        self.reader.restart()
        self.server.note_idle(self.connection)
        try:
            with on_error(self._answer_error):
                super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        finally:
            self._end_request()

    def parse_request(self) -> bool:
        """Read the head of a request, and split its path and query."""
        self.reader.begin()
        self.asked = time.monotonic()
        self.rfile = HeadLines(self._rest)
        try:
            if not super().parse_request():
                return False
            check_head(self.raw_requestline, self.headers)
        except RequestError as err:
            self._refuse_head(err)
            return False
        finally:
            self.rfile = self._rest
        self.reader.in_head = False
        if self.is_extra or (self.command != "POST" and has_body(self.headers)):
            # Nobody reads it, and its bytes must not be taken for the next request.
            self.close_connection = self.is_body_unread = True
        self.path, _, self.query = self.path.partition("#")[0].partition("?")
        routes = self.server.routes
        self.path = known_path(self.path, routes)
        # Below these, what is not there is refused as they refuse.
        above = {"/v1/messages/": "/v1/messages", "/api/": "/api/show"}
        likes = [path for start, path in above.items() if self.path.startswith(start)]
        self.route = routes.get(self.path) or routes.get("".join(likes), NO_ROUTE)
        return True

    def finish(self) -> None:
        """Let a client that was refused read its answer."""
        super().finish()
        if self.is_body_unread:
            drain(self.connection)

    def do_POST(self) -> None:
        """Check the client and the body, then answer."""
        self.server.answering.add(self)
        self.outcome = RequestOutcome.FAILED
        try:
            closes = self.close_connection
            self.is_body_unread = self.close_connection = True  # until it was read
            self._check_access()
            if self.server.is_stopping:
                raise RequestError("the server is stopping.", 503)
            routes = self.server.routes
            if self.path not in routes:
                known = ", ".join(path for path, route in routes.items() if route.generates)
                raise RequestError(f"nothing is at {shortened(self.path)}: post to {known}.", 404)
            raw = self._read()
            self.is_body_unread = False
            self.close_connection = closes
            self.route.answer(self, self._fields_of(raw))
            if self.server.collector is not None:
                for session in self.sessions:
                    session.collect(self.server.collector)
            self.outcome = RequestOutcome.of_status(self.status)
        except (ConnectionError, TimeoutError):
            self.outcome = RequestOutcome.LEFT
            raise

    def do_GET(self) -> None:
        """Send the page, models, metrics, health, properties, or a stored response."""
        self._check_access()
        if self.path == "/" and "text/html" not in self.headers.get("Accept", ""):
            self.send(200, "text/plain; charset=utf-8", RUNNING.encode())
        elif self.path == "/":
            document, headers = page(self.server.page_settings())
            self.send(200, PAGE_TYPE, document, headers)
        elif self.path == "/metrics":
            self.send(200, CONTENT_TYPE, self.server.metrics_text().encode())
        elif self.path == "/health":
            is_healthy = self.server.generator.is_healthy
            word = "ok" if is_healthy else "unavailable"
            self.send_json({"status": word}, 200 if is_healthy else 503)
        elif self.path in self.server.documents:
            self.send_json(self.server.documents[self.path](self.provider))
        elif self.path.startswith("/v1/models"):
            wanted = unquote(self.path.removeprefix("/v1/models").strip("/"))
            self.send_json(models(self.provider, self.created, wanted))
        elif self.path.startswith(RESPONSES):
            self.send_json(self.server.stored.show(self.path.removeprefix(RESPONSES), self.query))
        else:
            raise RequestError(f"nothing is at {shortened(self.path)}.", 404)

    def do_DELETE(self) -> None:
        """Delete a stored response."""
        self._check_access()
        if not self.path.startswith(RESPONSES):
            raise RequestError(f"only responses are deleted, not {shortened(self.path)}.", 404)
        self.send_json(self.server.stored.delete(self.path.removeprefix(RESPONSES)))

    do_HEAD = do_GET  # without the content

    def do_OPTIONS(self) -> None:
        """Answer a browser's preflight request for a page of another origin."""
        self.server.access.check_page(self.headers)
        self.send(204, "text/plain", b"")

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """Send the errors of http.server in the form of our own."""
        text = message or self.responses.get(code, ("the request is not HTTP",))[0]
        self._refuse_head(RequestError(f"{shortened(text.rstrip('.'))}.", code))

    def _refuse_head(self, error: RequestError) -> None:
        """Refuse a head that is not answered (also 501, "no such method"), and what follows."""
        self.close_connection = self.is_body_unread = True
        self.outcome = RequestOutcome.REFUSED
        self.headers = getattr(self, "headers", None) or {}
        self._refuse(error)

    def _check_access(self) -> None:
        if self.is_extra and self.path != "/health":
            raise RequestError("the server has too many connections: try again later.", 503)
        self.server.access.check_page(self.headers)
        if self.command == "POST" or self.path not in ("/", "/health"):
            self.server.access.check_key(self.headers)

    def _fields_of(self, raw: bytes) -> dict[str, Any]:
        """Return the checked fields of a body. Raises RequestError."""
        try:
            # One at a time: hostile ones together would leave no time to generate.
            with self.server.generator.large_requests if len(raw) > LARGE else nullcontext():
                body = read_body(raw)
                self.ignored = ignored_fields(body, self.route.fields)
                return self.route.check(body)
        except ValueError as err:
            raise RequestError(str(err)) from err

    def _read(self) -> bytes:
        limit = self.server.flags.max_body_size
        try:
            raw = read_body_of(self.rfile, self.headers, self.request_version, limit)
        except TimeoutError as err:
            seconds = self.server.flags.request_timeout
            raise RequestError(f"the request took over {seconds:g} seconds.", 408) from err
        self.connection.settimeout(self.timeout)
        return raw

    def _answer_error(self, error: Exception) -> None:
        """Refuse a request that raised ``error``; one that nobody foresaw has status 500."""
        told = told_as(error)
        if told is not error:
            self.close_connection = True
        if self.outcome is not None:
            self.outcome = RequestOutcome.of_status(told.status)
        if self.is_streaming or not self.is_answering:
            self._refuse(told)

    def _refuse(self, error: RequestError) -> None:
        """Send the error, within the stream if one was begun."""
        self.reason = str(error)
        if self.is_streaming:
            self.status = error.status
            self.write(self.failed(error))
        else:
            self.send_json(self.route.error_document(error), error.status)

    def _error_event(self, error: RequestError) -> str:
        document = self.route.error_document(error)
        return event_text(document, document.get("type", ""))

    def _end_request(self) -> None:
        """Stop generating, count the request, and log it."""
        for session in self.sessions:
            session.close()
        num_tokens = (
            sum(len(session.prompt.tokens) for session in self.sessions),
            sum(session.num_cached for session in self.sessions),
            sum(session.num_generated for session in self.sessions),
        )
        is_bad = self.outcome is not RequestOutcome.ANSWERED
        if self.outcome is not None and (self.route.generates or is_bad):
            self.server.metrics.count_request(self.outcome, *num_tokens)
        if self.status or self.outcome is not None:
            is_poll = self.path in ("/health", "/metrics") and self.status == 200
            level = logging.DEBUG if is_poll else logging.INFO
            logging.log(level, "%s", self._log_line(*num_tokens))
        self.server.answering.discard(self)

    def _log_line(self, num_prompt: int, num_cached: int, num_generated: int) -> str:
        """Format the log line: client, request, outcome, tokens and their speed."""
        outcome = "" if self.outcome is None else f" {self.outcome.value}"
        line = f"{self.client_address[0]} {self.command or '-'} {shortened(self.path) or '-'} "
        line += f"{self.status or '-'}{outcome}"
        seconds = time.monotonic() - self.asked
        if num_generated:
            tau = draft_usage(s.answer.stats for s in self.sessions)["mean_acceptance_length"]
            began = [s.answer.began for s in self.sessions if s.answer.began]
            busy = max(1e-9, time.monotonic() - min(began, default=self.asked))
            line += (
                f": {num_prompt} prompt tokens, {num_cached} of them cached, {num_generated} "
                f"generated in {seconds:.2f} s, {num_generated / busy:.1f} tokens/s, mean "
                f"acceptance length {tau:.2f}"
            )
        if self.ignored:
            line += f", ignored {shortened(', '.join(self.ignored))}"
        if self.reason:
            line += f": {self.reason}"
        return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line)

    def version_string(self) -> str:
        return "mlx-eagle"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing here: ``_end_request`` writes one line per request."""
