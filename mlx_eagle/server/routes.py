"""Paths to post to or to get a document from, and the API that answers at each."""

from functools import partial

from . import anthropic_messages as anthropic
from . import completions as openai
from . import ollama
from . import openai_responses as responses
from .body import check_body
from .handler import Route
from .provider import properties

ROUTES = {
    "/v1/chat/completions": Route(
        "chat", partial(check_body, needed="messages"), openai.answer_chat
    ),
    "/v1/completions": Route("text", partial(check_body, needed="prompt"), openai.answer_text),
    "/v1/responses": Route("responses", responses.check, responses.answer),
    "/v1/responses/input_tokens": Route(
        "responses", responses.check, responses.count_tokens, False
    ),
    "/v1/messages": Route(
        "messages", anthropic.check, anthropic.answer, True, anthropic.error_document
    ),
    "/v1/messages/count_tokens": Route(
        "messages", anthropic.check_count, anthropic.count_tokens, False, anthropic.error_document
    ),
    "/api/chat": Route("ollama", ollama.check_chat, ollama.answer, True, ollama.error_document),
    "/api/generate": Route(
        "ollama", ollama.check_generate, ollama.answer, True, ollama.error_document
    ),
    "/api/show": Route("ollama", dict, ollama.show, False, ollama.error_document),
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
