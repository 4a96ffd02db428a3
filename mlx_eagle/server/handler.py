"""One HTTP request: mlx-lm's handler, with its edges made safe and the counts of drafting.

Knows HTTP and JSON; what is generated, and when, is decided in ``generator.py``.
"""

import io
import json
import logging
import select
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from mlx_lm.server import (
    APIHandler,
    CompletionRequest,
    GenerationArguments,
    GenerationContext,
    ModelDescription,
    Response,
    get_system_fingerprint,
)

from ..decoding.limits import AUTO
from .answer import Answer, RequestError, checked
from .body import PairArguments, check_body, read_body, with_drafting
from .generator import PairGenerator
from .provider import DEFAULT

MAX_BODY = 64 * 2**20  # bytes
PROMPTS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/chat/completions": "messages",
}


class Exchange:
    """The generator as one request's handler sees it.

    ``answer`` is what is said to this client, ``failure`` why nothing is.
    """

    def __init__(self, generator: PairGenerator, handler: "PairHandler"):
        self.generator = generator
        self.answer: Answer | None = None
        self.failure: RequestError | None = None
        self._handler = handler

    @property
    def cli_args(self) -> Namespace:
        return self.generator.cli_args

    @property
    def is_healthy(self) -> bool:
        return self.generator.is_healthy

    def generate(
        self,
        request: CompletionRequest,
        args: GenerationArguments,
        progress_callback: Callable[[int, int], None],
    ) -> tuple[GenerationContext, Iterator[Response]]:
        """See mlx-lm's ``ResponseGenerator``. Raises RequestError."""
        try:
            self._check_names(args.model)
            # One name for one pair, so that requests which spell it differently share a batch.
            args = replace(args, model=ModelDescription(DEFAULT, DEFAULT, None))
            args = self._with_drafting(args)
            self.answer = self.generator.submit(request, args)
            context = self.answer.context(self._check)
            context.tool_parser = checked(context.tool_parser)
        except RequestError as err:
            self.failure = err
            raise
        return context, self.answer.responses(self._check, progress_callback)

    def close(self) -> None:
        if self.answer is not None:
            self.answer.abandon()

    def _check(self) -> None:
        self._handler.check_connected()
        self.generator.check_alive()

    def _with_drafting(self, args: GenerationArguments) -> PairArguments:
        try:
            return with_drafting(args, self._handler.body, self.cli_args)
        except ValueError as err:
            raise RequestError(str(err)) from err

    def _check_names(self, names: ModelDescription) -> None:
        provider = self.generator.model_provider
        if names.model not in provider.model_names:
            raise RequestError(f"{names.model} is not served here, but {provider.name} is.", 404)
        if names.draft not in provider.draft_names:
            raise RequestError(
                f"the draft model {names.draft} is not served here: leave draft_model out.", 404
            )


class PairHandler(APIHandler):
    """mlx-lm's handler. Requests it cannot answer get a sentence, and the server goes on."""

    timeout = 60  # seconds a client may take to send its request or to read what it is sent
    response_generator: Exchange
    server: "PairServer"

    def __init__(self, generator: PairGenerator, *args: Any, **kwargs: Any):
        super().__init__(Exchange(generator, self), *args, **kwargs)

    def do_POST(self) -> None:
        """Check the body, then answer as mlx-lm does."""
        self.server.answering.add(self)
        try:
            self._check_request()
            super().do_POST()
        except RequestError as err:
            self._send_json(_document(err), err.status)
        finally:
            self.server.answering.discard(self)

    def _check_request(self) -> None:
        """Read the body, and leave what was read for mlx-lm to read. Raises RequestError."""
        if self.path not in PROMPTS:
            raise RequestError(f"nothing is at {self.path}: post to /v1/chat/completions.", 404)
        if "Content-Length" not in self.headers:
            raise RequestError("the request has no Content-Length: give one.", 411)
        try:
            body = read_body(self._read())
            check_body(body, PROMPTS[self.path])
        except ValueError as err:
            raise RequestError(str(err)) from err
        raw = json.dumps(body, ensure_ascii=False).encode()
        self.headers.replace_header("Content-Length", str(len(raw)))
        self.rfile = io.BytesIO(raw)

    def _read(self) -> bytes:
        text = self.headers["Content-Length"].strip()
        if not (text.isascii() and text.isdecimal()):
            raise ValueError(f"Content-Length is {text!r}: give a number of bytes.")
        length = int(text)
        if length > MAX_BODY:
            raise RequestError(f"the body has {length} bytes: send at most {MAX_BODY}.", 413)
        raw = self.rfile.read(length)
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
        self.is_streaming = False
        try:
            super().handle_completion(request, stop_words)
        except RequestError as err:
            if not self.is_streaming:
                self._headers_buffer = []  # perhaps "200 OK", not sent yet
                raise
            self.wfile.write(f"data: {json.dumps(_document(err))}\n\n".encode())
        finally:
            self.response_generator.close()

    def _set_stream_headers(self, status_code: int = 200) -> None:
        self.is_streaming = True
        super()._set_stream_headers(status_code)

    def _set_completion_headers(self, status_code: int = 200) -> None:
        # mlx-lm is about to say 404 to whatever came out of ``generate``.
        failure, self.response_generator.failure = self.response_generator.failure, None
        if failure is not None:
            raise failure
        super()._set_completion_headers(status_code)

    def _send_json(self, document: dict[str, Any], status: int = 200) -> None:
        self._set_completion_headers(status)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def check_connected(self) -> None:
        """Raise ConnectionAbortedError where the client has closed its side."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        if poll.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError("the client left.")

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
            err = RequestError(f"{wanted} is not served here, but {name} is.", 404)
            self._send_json(_document(err), err.status)

    def generate_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._with_counts(super().generate_response(*args, **kwargs))

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._with_counts(super().completion_usage_response(*args, **kwargs))

    def _with_counts(self, response: dict[str, Any]) -> dict[str, Any]:
        """With --usage-stats, what was drafted; in batches nothing is, and tau is 1."""
        if "usage" in response and self.response_generator.cli_args.usage_stats:
            stats = self.response_generator.answer.stats
            num_forwards = sum(s.num_target_forwards for s in stats)
            num_emitted = sum(s.num_emitted for s in stats)
            response["usage"] |= {
                "drafted_tokens": sum(s.num_drafted for s in stats),
                "accepted_tokens": sum(s.num_accepted for s in stats),
                "tau": num_emitted / num_forwards if num_forwards else 1.0,
            }
        return response


def _document(error: RequestError) -> dict[str, Any]:
    """An error as clients of the OpenAI API read it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "code": error.status}}


class PairServer(ThreadingHTTPServer):
    """A thread a client; ``answering`` are those whose request is not answered yet."""

    request_queue_size = 128

    def __init__(self, host: str, port: int, generator: PairGenerator):
        """Listens at once. Raises ValueError where the address cannot be had."""
        self.answering: set[PairHandler] = set()
        fingerprint = get_system_fingerprint()
        try:
            found = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            self.address_family, _, _, _, address = found[0]
            super().__init__(
                address,
                lambda *args: PairHandler(generator, *args, system_fingerprint=fingerprint),
            )
        except (OSError, OverflowError) as err:
            reason = err.strerror if isinstance(err, OSError) else str(err)
            raise ValueError(
                f"the server cannot listen at {host}, port {port} ({reason}): choose others with "
                "--host and --port."
            ) from err

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error of ours."""
        if isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            logging.info("A client left before it was answered.")
        else:
            super().handle_error(request, client_address)
