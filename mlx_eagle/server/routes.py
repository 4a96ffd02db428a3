"""Paths to post to or to get a document from, and the API that answers at each."""

from functools import partial

from . import anthropic_messages as anthropic
from . import completions as openai
from . import ollama
from . import openai_responses as responses
from .body import check_body
from .handler import Route
from .provider import properties

of_anthropic = partial(Route, "messages", error_document=anthropic.error_document)
of_ollama = partial(Route, "ollama", error_document=ollama.error_document)
ROUTES = {
    "/v1/chat/completions": Route(
        "chat", partial(check_body, needed="messages"), openai.answer_chat
    ),
    "/v1/completions": Route("text", partial(check_body, needed="prompt"), openai.answer_text),
    "/v1/responses": Route("responses", responses.check, responses.answer),
    "/v1/responses/input_tokens": Route(
        "responses", responses.check, responses.count_tokens, False
    ),
    "/v1/messages": of_anthropic(anthropic.check, anthropic.answer),
    "/v1/messages/count_tokens": of_anthropic(
        anthropic.check_count, anthropic.count_tokens, False
    ),
    "/api/chat": of_ollama(ollama.check_chat, partial(ollama.answer, is_chat=True)),
    "/api/generate": of_ollama(ollama.check_generate, partial(ollama.answer, is_chat=False)),
    "/api/show": of_ollama(dict, ollama.show, False),
    "/tokenize": Route("tokens", dict, openai.tokenize, generates=False),
    "/detokenize": Route("tokens", dict, openai.detokenize, generates=False),
}
DOCUMENTS = {
    "/props": properties,
    "/api/version": ollama.version,
    "/api/tags": ollama.tags,
    "/api/ps": ollama.tags,
}
"""Paths of documents about the served pair."""
