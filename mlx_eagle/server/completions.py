"""OpenAI API: chats, completions and the tokenizer, from a checked body to its answer."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlx_lm.server import CompletionRequest

from ..system.fields import check_type
from .answer_stream import Document, PairResponse, RequestError, as_request_errors, draft_usage
from .body import check_messages, read_arguments, read_prompts, shortened
from .client_session import ClientSession, Piece
from .handler import Reply, event_text
from .prompt import render
from .provider import FINGERPRINT, PairProvider


def answer_chat(reply: Reply, body: Document) -> None:
    """Answer a checked body of /v1/chat/completions. Raises RequestError."""
    Answering(reply, body, [chat_request(body)]).run()


def chat_request(body: Document) -> CompletionRequest:
    """Return the chat that a checked body asks to continue."""
    tools = body.get("tools") or None
    roles = body.get("role_mapping")
    return CompletionRequest("chat", "", body["messages"], tools, roles)


def answer_text(reply: Reply, body: Document) -> None:
    """Answer a checked body of /v1/completions. Raises RequestError."""
    prompts = read_prompts(body)
    requests = [CompletionRequest("text", prompt, [], None, None) for prompt in prompts]
    Answering(reply, body, requests).run()


class Answering:
    """Answers to one request: ``n`` to each of its prompts, in order."""

    def __init__(self, reply: Reply, body: Document, requests: Sequence[CompletionRequest]):
        self._reply = reply
        self._body = body
        self._is_chat = requests[0].request_type == "chat"
        self._is_stream = bool(body.get("stream"))
        self._num_each = body.get("n", 1)
        chat_type = "chat.completion.chunk" if self._is_stream else "chat.completion"
        self._base = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4()}",
            "system_fingerprint": FINGERPRINT,
            "object": chat_type if self._is_chat else "text_completion",
            "model": model_name(reply, body),
            "created": reply.created,
        }
        args = read_arguments(body, reply.provider.cli_args, self._is_chat)
        each = [request for request in requests for _ in range(self._num_each)]
        for i, request in enumerate(each):
            seed = None if args.seed is None else (args.seed + i) % 2**64
            reply.new_session(request, replace(args, seed=seed))
        self._sessions = reply.sessions
        self._offsets = [0] * len(self._sessions)  # letters already sent of each

    def run(self) -> None:
        """Generate all answers at the same time, and send them one after the other."""
        num_each = self._num_each
        sessions = self._sessions
        for i, leader in enumerate(sessions[::num_each]):
            leader.args.has_followers = num_each > 1 and leader.args.reuse_caches
            leader.submit()
            for session in sessions[i * num_each + 1 : (i + 1) * num_each]:
                session.submit(leader if leader.args.has_followers else None)
        sessions[0].open()
        if self._is_stream:
            self._run_stream()
            return
        pieces = [session.whole() for session in sessions]
        choices = [self._choice(i, self._echo(i) + p.text, p) for i, p in enumerate(pieces)]
        document = self._base | {"choices": choices, "usage": self._usage()}
        if len(pieces) == 1 and pieces[0].draft is not None:
            document["draft"] = choices[0].pop("draft")
        self._reply.send_json(document)

    def _run_stream(self) -> None:
        reply = self._reply
        reply.begin_events()
        for i, session in enumerate(self._sessions):
            if echoed := self._echo(i):
                self._write(choices=[self._choice(i, echoed, Piece(echoed))])
            for piece in session.pieces(reply.say_progress, is_stream=True):
                choice = self._choice(i, piece.text, piece)
                draft = {} if piece.draft is None else {"draft": choice.pop("draft")}
                self._write(choices=[choice], **draft)
        if self._body.get("stream_options", {}).get("include_usage"):
            self._write(choices=[], usage=self._usage())
        reply.write("data: [DONE]\n\n")

    def _write(self, **more: Any) -> None:
        self._reply.write(event_text(self._base | more))

    def _echo(self, i: int) -> str:
        """Return the prompt to put before a text, if the client asks for it."""
        if not self._body.get("echo"):
            return ""
        prompt = self._sessions[i].request.prompt
        return prompt if isinstance(prompt, str) else self._reply.provider.tokenizer.decode(prompt)

    def _choice(self, i: int, text: str, piece: Piece) -> Document:
        choice: Document = {"index": i, "finish_reason": piece.finish_reason}
        args = self._sessions[i].args
        if piece.responses and (args.logprobs or args.top_logprobs > 0):
            choice["logprobs"] = self._logprobs(i, piece.responses)
        if piece.draft is not None:
            choice["draft"] = piece.draft
        self._offsets[i] += len(text)
        if not self._is_chat:
            return choice | {"text": text}
        message: Document = {"role": "assistant"}
        if text or not self._is_stream:
            message["content"] = text or None
        if piece.reasoning:
            message["reasoning"] = piece.reasoning
        if piece.calls:
            message["tool_calls"] = piece.calls
        return choice | {"delta" if self._is_stream else "message": message}

    def _logprobs(self, i: int, responses: Sequence[PairResponse]) -> Document:
        spell = self._reply.provider.spelling
        entries = [logprob_of(spell, response) for response in responses]
        if self._is_chat or isinstance(self._body.get("logprobs"), bool):
            return {"content": entries}
        offsets = []
        at = self._offsets[i]
        for entry in entries:
            offsets.append(at)
            at += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _usage(self) -> Document:
        sessions = self._sessions
        leaders = self._sessions[:: self._num_each]
        num_prompt = sum(len(session.prompt.tokens) for session in leaders)
        num_generated = sum(session.num_generated for session in sessions)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(s.num_cached for s in leaders)},
            **asked_draft_usage(sessions),
        }


def asked_draft_usage(sessions: Sequence[ClientSession]) -> Document:
    """Draft statistics of some answers, if the server was started with --usage-stats."""
    is_asked = sessions[0].generator.model_provider.cli_args.usage_stats
    return draft_usage(session.answer.stats for session in sessions) if is_asked else {}


def model_name(reply: Reply, body: Document) -> str:
    """Return the name of the model that answers. Raises RequestError if it is not served.

    Without --strict-model any name of a model means the one that is served.
    """
    provider = reply.provider
    model = body.get("model", provider.name)
    draft = body.get("draft_model")
    if draft is not None and draft not in provider.draft_names:
        raise RequestError(
            f"the draft model {shortened(draft)} is not served here: leave draft_model out.", 404
        )
    if model in provider.model_names:
        return str(model)
    if provider.cli_args.strict_model:
        raise RequestError(f"{shortened(model)} is not served here, but {provider.name} is.", 404)
    return provider.name


def logprob_of(spell: Callable[[int], bytes], response: PairResponse) -> Document:
    """Return a token with its text, bytes, log-probability, and the likeliest others."""

    def entry(token: int, logprob: float) -> Document:
        spelled = spell(token)
        text = spelled.decode("utf-8", "replace")
        return {"token": text, "id": token, "logprob": logprob, "bytes": list(spelled)}

    top = [entry(token, logprob) for token, logprob in response.top_tokens]
    return entry(response.token, response.logprob) | {"top_logprobs": top}


@as_request_errors()
def tokenize(reply: Reply, body: Document) -> None:
    """Send the tokens of a ``content``, a ``prompt`` or ``messages``. Raises RequestError."""
    provider = reply.provider
    tokenizer = provider.tokenizer
    given = [name for name in ("content", "prompt", "messages") if name in body]
    if len(given) != 1:
        raise ValueError("give one of content, prompt and messages to be tokenized.")
    (name,) = given
    options = check_type("chat_template_kwargs", body.get("chat_template_kwargs", {}), dict)
    check_type("tools", body.get("tools", []), list)
    has_special = body.get("add_special", body.get("add_special_tokens", name == "prompt"))
    if name == "messages":
        check_messages(body["messages"])
        options = provider.cli_args.chat_template_args | options
        text = render(chat_request(body), tokenizer, options)
        has_special = False
    else:
        text = check_type(name, body[name], str)
    tokens = tokenizer.encode(text, add_special_tokens=has_special)
    document: Document = {"tokens": tokens, "count": len(tokens)}
    if body.get("with_pieces"):
        document["tokens"] = [{"id": token, "piece": _piece(provider, token)} for token in tokens]
    if provider.context is not None:
        document["max_model_len"] = provider.context
    reply.send_json(document)


def _piece(provider: PairProvider, token: int) -> str | list[int]:
    """Return a token's text, or its bytes if they are no whole letters."""
    spelled = provider.spelling(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)


def detokenize(reply: Reply, body: Document) -> None:
    """Send the text of ``tokens``. Raises RequestError."""
    tokens = body.get("tokens")
    size = reply.provider.vocab_size
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise RequestError("tokens is something else than a list of token ids.")
    outside = [token for token in tokens if not 0 <= token < size]
    if outside:
        raise RequestError(f"there is no token {outside[0]}: this model has {size}.")
    text = reply.provider.tokenizer.decode(tokens)
    reply.send_json({"content": text, "prompt": text})
