"""Client session: one request and its answer, between mlx-lm's handler and the engine."""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    GenerationContext,
    ModelDescription,
)

from .answer_stream import AnswerStream, DraftReport, PairResponse, RequestError, checked, counts
from .body import PairArguments, shortened, wants_draft, with_drafting
from .collect import chat_row
from .engine import PairGenerator
from .metrics import Metrics, RequestOutcome


class Client(Protocol):
    """What is asked of a handler."""

    body: dict
    num_bytes: int
    asked: float

    def check_connected(self) -> None:
        """Raise ConnectionError where the client is gone."""


class ClientSession:
    """One request and its answer.

    ``answer`` is what is said to the client, ``failure`` why nothing is.
    """

    def __init__(self, generator: PairGenerator, metrics: Metrics, client: Client):
        self.generator = generator
        self.answer: AnswerStream | None = None
        self.failure: RequestError | None = None
        self._metrics, self._client = metrics, client
        self._context: GenerationContext | None = None
        self._num_generated = 0
        self._report: DraftReport | None = None
        self._prompt: list[int] = []
        self._finish_reason: str | None = None

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
    ) -> tuple[GenerationContext, Iterator[PairResponse]]:
        """See mlx-lm's ``ResponseGenerator``. Raises RequestError."""
        try:
            self._check_names(args.model)
            args = self._with_drafting(args)
            tokenized = self.generator.read_prompt(
                request, args, self._client.num_bytes, self._check
            )
            self._prompt = tokenized.tokens
            self.answer = self.generator.submit(tokenized, args)
            self._context = self.answer.context(self._check)
            self._context.tool_parser = checked(self._context.tool_parser)
        except RequestError as err:
            self.failure = err
            raise
        if wants_draft(self._client.body):
            state = self._context.text_sm.make_state(self._context.initial_state)
            self._report = DraftReport(state)
        responses = self.answer.responses(self._check, progress_callback)
        return self._context, self._counted(responses)

    def draft(self, is_last: bool) -> dict[str, Any] | None:
        """What is said of drafts beside the next piece of text; None where nobody asked."""
        if self._report is None or self.answer is None:
            return None
        reported = self._report.take()
        if is_last:
            reported["counts"] = counts(self.answer.stats, self._report.num_batched)
        return reported

    def row(self, request: CompletionRequest) -> dict[str, Any] | None:
        """A chat and its answer, to be kept; None where it is no chat, or was cut off."""
        if request.request_type != "chat" or self._finish_reason != "stop" or self.answer is None:
            return None
        body = self._client.body
        template_args = self.cli_args.chat_template_args | (body.get("chat_template_kwargs") or {})
        facts = {
            "temperature": body.get("temperature", self.cli_args.temp),
            "finish_reason": self._finish_reason,
        }
        return chat_row(
            request,
            self._prompt,
            self.answer.tokens,
            self.generator.model_provider.tokenizer,
            template_args,
            facts,
        )

    def close(self) -> None:
        """Generate no more for this client."""
        if self.answer is not None:
            self.answer.leave()

    def count(self, outcome: RequestOutcome) -> None:
        """Add this request to the server's counts, once it has ended."""
        context = self._context
        num_prompt = 0 if context is None else len(context.prompt)
        num_cached = 0 if context is None else max(0, context.prompt_cache_count)
        self._metrics.count_request(outcome, num_prompt, num_cached, self._num_generated)

    def _counted(self, responses: Iterator[PairResponse]) -> Iterator[PairResponse]:
        for response in responses:
            if self._num_generated == 0:
                self._metrics.count_first_token(time.monotonic() - self._client.asked)
            self._num_generated += 1
            self._finish_reason = response.finish_reason
            if self._report is not None:
                self._report.follow(response)
            yield response

    def _check(self) -> None:
        """Raise where waiting is in vain."""
        self._client.check_connected()
        self.generator.check_alive()

    def _with_drafting(self, args: GenerationArguments) -> PairArguments:
        try:
            return with_drafting(args, self._client.body, self.cli_args)
        except ValueError as err:
            raise RequestError(str(err)) from err

    def _check_names(self, names: ModelDescription) -> None:
        provider = self.generator.model_provider
        if names.model not in provider.model_names:
            found = shortened(names.model)
            raise RequestError(f"{found} is not served here, but {provider.name} is.", 404)
        if names.draft not in provider.draft_names:
            found = shortened(names.draft)
            raise RequestError(
                f"the draft model {found} is not served here: leave draft_model out.", 404
            )
