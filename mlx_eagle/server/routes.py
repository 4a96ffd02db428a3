"""Paths to post to or to get a document from, and the API that answers at each."""

from functools import partial

from . import anthropic_messages as anthropic
from . import completions as openai
from . import openai_responses as responses
from .body import check_body
from .handler import Route
from .provider import properties

CHAT = Route("chat", partial(check_body, needed="messages"), openai.answer_chat)
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/chat/completions": CHAT,
    "/v1/completions": Route("text", partial(check_body, needed="prompt"), openai.answer_text),
    "/v1/responses": Route("responses", responses.check, responses.answer, streams_errors=False),
    "/v1/messages": Route(
        "messages", anthropic.check, anthropic.answer, True, anthropic.error_document
    ),
    "/v1/messages/count_tokens": Route(
        "messages", anthropic.check_count, anthropic.count_tokens, False, anthropic.error_document
    ),
    "/tokenize": Route("tokens", openai.check_tokenize, openai.tokenize, generates=False),
    "/detokenize": Route("tokens", openai.check_detokenize, openai.detokenize, generates=False),
}
DOCUMENTS = {"/props": properties}
"""Paths of documents about the served pair."""
