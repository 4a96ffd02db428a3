"""HTTP requests: mlx-lm's handler with its edges made safe, the counts of drafting, the page.

What is generated, and when, is decided in ``engine.py``; who may connect in ``listener.py``.
"""

import base64
import hashlib
import html
import io
import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from mlx_lm.server import APIHandler, CompletionRequest

from ..decoding.setup import AUTO
from .answer_stream import RequestError
from .body import check_body, read_body, shortened, write_body
from .client_session import ClientSession
from .listener import PairServer, Presence, RequestReader, drain
from .metrics import CONTENT_TYPE, RequestOutcome

PROMPTS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/chat/completions": "messages",
}
EXTRA_HEADERS = {401: {"WWW-Authenticate": 'Bearer realm="mlx-eagle"'}, 503: {"Retry-After": "5"}}
LARGE = 2**16  # bytes of a body; larger ones are read into fields one after the other
FinishReason = Literal["length", "stop"] | None


PARTS = Path(__file__).parent / "web"
SCRIPTS = ("markdown.js", "answer.js", "stream.js", "strip.js", "settings.js", "chat.js",
           "race.js", "main.js")  # fmt: skip
PAGE_TYPE = "text/html; charset=utf-8"
TRUSTED_TYPES = "require-trusted-types-for 'script'; trusted-types 'none'"  # no text becomes HTML


def page(settings: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """The document and its headers; ``settings`` are what the page's script reads."""
    style = (PARTS / "page.css").read_text(encoding="utf-8")
    scripts = "".join((PARTS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{scripts}}})();\n'
    document = (PARTS / "page.html").read_text(encoding="utf-8")
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


class PairHandler(APIHandler):
    """mlx-lm's handler. Requests it cannot answer get a sentence, and the server goes on."""

    response_generator: ClientSession
    server: PairServer

    def __init__(self, server: PairServer, *args: Any, **kwargs: Any):
        self.asked = time.monotonic()
        self.num_bytes = 0  # of the body
        self.status = 0
        self.is_streaming = self.is_answering = self.is_body_unread = False
        session = ClientSession(server.generator, server.metrics, self)
        super().__init__(session, *args, **kwargs)

    def setup(self) -> None:
        """Reads have a limit of time together, writes each."""
        self.timeout = self.server.limits.request_seconds
        super().setup()
        self.presence = Presence(self.connection)
        self.reader = RequestReader(self.connection, self.timeout)
        self.rfile = io.BufferedReader(self.reader)

    def parse_request(self) -> bool:
        """See http.server's. Leaves the path without its query."""
        if not super().parse_request():
            return False
        self.reader.in_head = False
        self.path = self.path.partition("?")[0].partition("#")[0]
        return True

    def finish(self) -> None:
        """Let a client that was refused read its answer."""
        super().finish()
        if self.is_body_unread:
            drain(self.connection)

    def do_POST(self) -> None:
        """Check who asks and the body, then answer as mlx-lm does."""
        self.server.answering.add(self)
        outcome = RequestOutcome.FAILED
        try:
            self._check_request()
            super().do_POST()
            outcome = RequestOutcome.of_status(self.status)
        except RequestError as err:
            outcome = RequestOutcome.of_status(err.status)
            self._send_error(err)
        except (ConnectionError, TimeoutError):
            outcome = RequestOutcome.LEFT
            raise
        finally:
            self.response_generator.count(outcome)
            self.server.answering.discard(self)

    def do_GET(self) -> None:
        """The page, the models, the metrics, the health."""
        try:
            self.server.access.check_page(self.headers)
            if self.path not in ("/", "/health"):
                self.server.access.check_key(self.headers)
            if self.path == "/":
                document, headers = page(self.server.page_settings())
                self._send(200, PAGE_TYPE, document, headers)
            elif self.path == "/metrics":
                self._send(200, CONTENT_TYPE, self.server.metrics_text().encode())
            elif self.path.startswith("/v1/models") or self.path == "/health":
                super().do_GET()
            else:
                raise RequestError(f"nothing is at {shortened(self.path)}.", 404)
        except RequestError as err:
            self._send_error(err)

    def do_OPTIONS(self) -> None:
        """What a browser asks before it lets a page of another origin ask."""
        try:
            self.server.access.check_page(self.headers)
            self._send(204, "text/plain", b"")
        except RequestError as err:
            self._send_error(err)

    def _set_cors_headers(self) -> None:
        origin = self.server.access.shared_with(self.headers.get("Origin"))
        if origin is not None:
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Access-Control-Allow-Methods", "GET, POST, OPTIONS")
            self.send_header("Access-Control-Allow-Headers", "*, Authorization")
        self.send_header("Vary", "Origin")

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """What http.server refuses, in the words of the others."""
        self.close_connection, self.is_body_unread = True, True
        text = message or self.responses.get(code, ("the request is not HTTP",))[0]
        self.server.metrics.count_request(RequestOutcome.REFUSED)  # also 501, "no such method"
        self.headers = getattr(self, "headers", None) or {}
        self._send_error(RequestError(f"{shortened(text.rstrip('.'))}.", code))

    def _check_request(self) -> None:
        """Read the body, and leave what was read for mlx-lm to read. Raises RequestError."""
        self.is_body_unread = True
        self.server.access.check_page(self.headers)
        self.server.access.check_key(self.headers)
        self.server.check_open()
        if self.path not in PROMPTS:
            path = shortened(self.path)
            raise RequestError(f"nothing is at {path}: post to /v1/chat/completions.", 404)
        raw = self._read()
        self.is_body_unread = False
        self.num_bytes = len(raw)
        try:
            # One at a time: hostile ones together would leave no time to generate.
            with self.server.large_bodies if len(raw) > LARGE else nullcontext():
                body = read_body(raw)
                check_body(body, PROMPTS[self.path])
                raw = write_body(body)
        except ValueError as err:
            raise RequestError(str(err)) from err
        self.headers.replace_header("Content-Length", str(len(raw)))
        self.rfile = io.BytesIO(raw)

    def _read(self) -> bytes:
        if "Transfer-Encoding" in self.headers:
            raise RequestError(
                "the request has a Transfer-Encoding: send the body whole, with its "
                "Content-Length.",
                411,
            )
        if len(set(self.headers.get_all("Content-Length", []))) > 1:
            raise RequestError("the request has several Content-Lengths: give one.")
        if "Content-Length" not in self.headers:
            raise RequestError("the request has no Content-Length: give one.", 411)
        text = self.headers["Content-Length"].strip()
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            raise RequestError(f"Content-Length is {text[:40]!r}: give a number of bytes.")
        length, limit = int(text), self.server.limits.body_bytes
        if length > limit:
            raise RequestError(f"the body has {length} bytes: send at most {limit}.", 413)
        try:
            raw = self.rfile.read(length)
        except TimeoutError as err:
            seconds = self.server.limits.request_seconds
            raise RequestError(f"the request took over {seconds:g} seconds.", 408) from err
        self.connection.settimeout(self.timeout)
        if len(raw) < length:
            raise ConnectionAbortedError("the client left before its request was complete.")
        return raw

    def validate_model_parameters(self) -> None:
        """See mlx-lm's. Raises RequestError."""
        try:
            super().validate_model_parameters()
        except ValueError as err:
            raise RequestError(f"{err}.") from err
        if self.stream_options is not None:
            self.stream_options.setdefault("include_usage", False)

    def _validate(self, name: str, *args: Any, **kwargs: Any) -> None:
        # mlx-lm knows numbers only.
        if name != "num_draft_tokens" or self.num_draft_tokens != AUTO:
            super()._validate(name, *args, **kwargs)

    def handle_completion(self, request: CompletionRequest, stop_words: list[str]) -> None:
        """See mlx-lm's; what breaks off is said, in the stream where one was begun."""
        try:
            super().handle_completion(request, stop_words)
            self._collect(request)
        except RequestError as err:
            if not self.is_streaming:
                self._headers_buffer = []  # perhaps "200 OK", not sent yet
                raise
            self.status = err.status
            self.wfile.write(f"data: {json.dumps(_document(err))}\n\n".encode())
        finally:
            self.response_generator.close()

    def _collect(self, request: CompletionRequest) -> None:
        """Keep what was asked and answered, where the server was told to."""
        if self.server.collector is not None:
            row = self.response_generator.row(request)
            if row is not None:
                self.server.collector.keep(row)

    def _set_stream_headers(self, status_code: int = 200) -> None:
        self.is_streaming = True
        super()._set_stream_headers(status_code)

    def _set_completion_headers(self, status_code: int = 200) -> None:
        # mlx-lm is about to say 404 to whatever came out of ``generate``.
        failure, self.response_generator.failure = self.response_generator.failure, None
        if failure is not None:
            raise failure
        super()._set_completion_headers(status_code)

    def send_response(self, code: int, message: str | None = None) -> None:
        self.status = code
        super().send_response(code, message)

    def flush_headers(self) -> None:
        """Send the head of the answer, without what was sent of it to see who is there."""
        head = b"".join(getattr(self, "_headers_buffer", []))
        if head:
            self._headers_buffer = [head[self.presence.num_ahead :]]
            self.is_answering = True
        super().flush_headers()

    def _send_error(self, error: RequestError) -> None:
        self._send(error.status, "application/json", json.dumps(_document(error)).encode())

    def _send_json(self, document: dict[str, Any]) -> None:
        self._send(200, "application/json", json.dumps(document).encode())

    def _send(
        self, status: int, content_type: str, content: bytes, headers: Mapping[str, str] = {}
    ) -> None:
        self.send_response(status)
        self.send_header("Content-type", content_type)
        self.send_header("Content-Length", str(len(content)))
        for name, value in {**EXTRA_HEADERS.get(status, {}), **headers}.items():
            self.send_header(name, value)
        self._set_cors_headers()
        self.end_headers()
        self.wfile.write(content)

    def check_connected(self) -> None:
        """Raise ConnectionError where the client is gone, or too slow to read its answer."""
        self.presence.check(self.is_answering)
        answer = self.response_generator.answer
        if answer is None or not answer.is_over:
            return
        if time.monotonic() - answer.ended > self.server.limits.request_seconds:
            raise TimeoutError("the client reads too slowly")

    def handle_models_request(self) -> None:
        """The one model that is served."""
        name = self.response_generator.generator.model_provider.name
        model = {"id": name, "object": "model", "created": self.created, "owned_by": "mlx-eagle"}
        wanted = unquote(self.path.removeprefix("/v1/models").strip("/"))
        if not wanted:
            self._send_json({"object": "list", "data": [model]})
        elif wanted in (name, name.strip("/")):
            self._send_json(model)
        else:
            raise RequestError(f"{shortened(wanted)} is not served here, but {name} is.", 404)

    def generate_response(
        self, text: str, finish_reason: FinishReason, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        response = super().generate_response(text, finish_reason, *args, **kwargs)
        draft = self.response_generator.draft(is_last=finish_reason is not None)
        return self._with_counts(response) | ({} if draft is None else {"draft": draft})

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._with_counts(super().completion_usage_response(*args, **kwargs))

    def _with_counts(self, response: dict[str, Any]) -> dict[str, Any]:
        """With --usage-stats, what was drafted; where nothing was, tau is 1."""
        session = self.response_generator
        if "usage" in response and session.cli_args.usage_stats and session.answer is not None:
            stats = session.answer.stats
            tau = stats.mean_acceptance_length or 1.0
            response["usage"] |= {
                "drafted_tokens": stats.num_drafted,
                "accepted_tokens": stats.num_accepted,
                "mean_acceptance_length": tau,
                "tau": tau,  # its name in version 0.1.0
            }
        return response


def _document(error: RequestError) -> dict[str, Any]:
    """An error as clients of the OpenAI API read it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "code": error.status}}
