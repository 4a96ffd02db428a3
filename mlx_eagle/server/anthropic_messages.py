"""Anthropic API: /v1/messages, translated to a chat and back.

A request becomes a body of Chat Completions, which is checked and answered as any other; pieces
of its answer become blocks and events. No HTTP in here.
"""

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from ..system.fields import check_kind
from .answer_stream import Document, RequestError
from .body import SCOPE, check_body, read_arguments, shortened
from .client_session import ClientSession, Piece
from .completions import asked_draft_usage, chat_request, model_name
from .handler import Reply, event_text
from .prompt import as_request_errors, encoded, with_one_system

ATTRIBUTION = "x-anthropic-billing-header:"
"""Start of a system block for billing, which changes with every request: not in the prompt."""
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
SAME = (
    "temperature", "top_p", "top_k", "stream", "model",
    # ours, besides Anthropic's
    "num_draft_tokens", "tree", "acceptance", "seed", "reuse_caches", "chat_template_kwargs",
    "store", "exact", *SCOPE,
)  # fmt: skip
OMITTED = "thoughts_omitted"  # in a translated body: their blocks stay empty


def error_document(error: RequestError) -> Document:
    """Return an error in the form of the Anthropic API."""
    otherwise = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ERRORS.get(error.status, otherwise)
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def check(body: Document) -> Document:
    """Translate a request for a message to the body of a chat. Raises ValueError."""
    if "max_tokens" not in body:
        raise ValueError("the request has no max_tokens.")
    return translated(body)


def answer(reply: Reply, body: Document) -> None:
    """Answer a translated body. Raises RequestError."""
    model = model_name(reply, body)
    with as_request_errors():
        args = read_arguments(body, reply.provider.cli_args, is_chat=True)
    session = reply.new_session(chat_request(body), args)
    session.submit()
    session.open()
    message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
    message |= {"model": model}
    if body.get("stream"):
        for event in _events(reply, session, message, bool(body.get(OMITTED))):
            reply.write(event)
        return
    piece = session.whole()
    blocks: list[Document] = []
    if piece.reasoning:
        thoughts = "" if body.get(OMITTED) else piece.reasoning
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": ""})
    if piece.text:
        blocks.append({"type": "text", "text": piece.text})
    blocks += [
        _call_block(call, json.loads(call["function"]["arguments"])) for call in piece.calls
    ]
    message |= {"content": blocks, "usage": _usage(session)}
    reply.send_json(message | _end(session, piece))


def count_tokens(reply: Reply, body: Document) -> None:
    """Answer with the number of prompt tokens of a translated body. Raises RequestError."""
    with as_request_errors():
        args = read_arguments(body, reply.provider.cli_args, is_chat=True)
        tokens = encoded(chat_request(body), args, reply.provider)
    reply.send_json({"input_tokens": len(tokens)})


def translated(body: Document) -> Document:
    """Translate a request whose tokens are counted; ``max_tokens`` may be missing."""
    if body.get("mcp_servers"):
        raise ValueError("mcp_servers are not supported: let the client call them.")
    chat: Document = {name: body[name] for name in SAME if name in body}
    chat["max_tokens"] = body.get("max_tokens", 1)
    user = check_kind("metadata", body.get("metadata") or {}, dict).get("user_id")
    if user is not None:
        chat["user"] = check_kind("metadata.user_id", user, str)
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    said = _system(body.get("system", []))
    for message in check_kind("messages", body.get("messages", []), list):
        said += _messages(message)
    chat["messages"] = with_one_system(said)
    if all(message["role"] == "system" for message in chat["messages"]):
        raise ValueError("the request has no messages.")
    if chat["messages"][-1]["role"] == "assistant":
        raise ValueError("the last message is not the user's: an answer cannot be gone on with.")
    if tools := check_kind("tools", body.get("tools", []), list):
        chat["tools"] = [_tool(tool) for tool in tools]
    chat |= _choice(body.get("tool_choice", {"type": "auto"})) | _form(body)
    chat |= _thinking(body.get("thinking", {"type": "adaptive"}))
    check_body(chat, "messages")
    return chat


def _blocks(content: Any, what: str) -> list[Document]:
    """Return the blocks of a content, which may be a text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ValueError(f"{what} is something else than a text or a list of blocks.")
    return content


def _text(block: Document, what: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        kind = shortened(str(block.get("type")))
        raise ValueError(f"{what} has a block of type {kind!r}: only text can be read here.")
    return str(block["text"])


def _system(content: Any) -> list[Document]:
    texts = [_text(block, "system") for block in _blocks(content, "system")]
    text = "\n\n".join(t for t in texts if t and not t.startswith(ATTRIBUTION))
    return [{"role": "system", "content": text}] if text else []


def _messages(message: Any) -> list[Document]:
    """Translate a message to those of a chat: each tool result becomes a message of its own."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise ValueError("a message is no object with a role: give user, assistant or system.")
    if role == "system":
        return _system(message.get("content"))
    blocks = _blocks(message.get("content"), "a message's content")
    return [_assistant(blocks)] if role == "assistant" else _user(blocks)


def _user(blocks: Sequence[Document]) -> list[Document]:
    found: list[Document] = []
    texts: list[str] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(_text(block, "a message"))
            continue
        parts = _blocks(block.get("content", ""), "a tool_result")
        result = "\n".join(_text(part, "a tool_result") for part in parts)
        name = block.get("tool_use_id")
        if not isinstance(name, str):
            raise ValueError("a tool_result has no tool_use_id.")
        failed = "Error: " if block.get("is_error") is True else ""
        found.append({"role": "tool", "tool_call_id": name, "content": failed + result})
    if texts or not found:
        found.append({"role": "user", "content": "\n\n".join(texts)})
    return found


def _assistant(blocks: Sequence[Document]) -> Document:
    texts = []
    thoughts = []
    calls = []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            if not isinstance(function["name"], str) or not isinstance(block.get("input"), dict):
                raise ValueError("a tool_use has no name, or an input that is no object.")
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(_text(block, "a message"))
    message: Document = {"role": "assistant", "content": "\n\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool(tool: Any) -> Document:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise ValueError("a tool is something else than an object with a name.")
    if tool.get("type", "custom") != "custom" or "input_schema" not in tool:
        raise ValueError(
            f"the tool {shortened(tool['name'])} is none of the client's own: leave it out."
        )
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if name in tool}
    return {"type": "function", "function": function}


def _form(body: Document) -> Document:
    """Translate ``output_config.format``, or its older name ``output_format``."""
    config = body.get("output_config") or {}
    form = body.get("output_format") or (isinstance(config, dict) and config.get("format"))
    if not form:
        return {}
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise ValueError("output_config.format is no object of type json_schema: give one.")
    schema = {"schema": form.get("schema"), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _choice(choice: Any) -> Document:
    name = check_kind("tool_choice", choice, dict).get("name")
    named = {"type": "function", "function": {"name": name}}
    kind = {"any": "required", "tool": named}
    found: Document = {"tool_choice": kind.get(str(choice.get("type")), choice.get("type"))}
    if choice.get("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found


def _thinking(thinking: Any) -> Document:
    """Translate ``thinking``: a budget in tokens after which thoughts end; 0 if disabled."""
    kind = check_kind("thinking", thinking, dict).get("type")
    if kind == "disabled":
        return {"thinking_budget": 0}
    if kind not in ("enabled", "adaptive"):
        raise ValueError(f"thinking is {shortened(str(kind))}: enable or disable it.")
    budget = thinking.get("budget_tokens")
    found: Document = {} if budget is None else {"thinking_budget": budget}
    return found | ({OMITTED: True} if thinking.get("display") == "omitted" else {})


def _call_block(call: Document, arguments: Any) -> Document:
    name = call["function"]["name"]
    return {"type": "tool_use", "id": call["id"], "name": name, "input": arguments}


def _usage(session: ClientSession) -> Document:
    return {
        "input_tokens": len(session.prompt) - session.num_cached,
        "cache_read_input_tokens": session.num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": session.num_generated,
        **asked_draft_usage([session]),
    }


def _end(session: ClientSession, last: Piece) -> Document:
    """Say why an answer ended, and at which stop sequence."""
    word = session.stop_word if last.finish_reason == "stop" else None
    reason = STOP_REASONS[str(last.finish_reason)] if word is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": word}


def _event(kind: str, **fields: Any) -> str:
    return event_text({"type": kind} | fields, kind)


class _Blocks:
    """Events of an answer's blocks, one of which is open at a time."""

    def __init__(self) -> None:
        self.index = -1
        self._kind: str | None = None

    def add(self, kind: str, text: str) -> Iterator[str]:
        """Add text or thoughts to the open block if it is of this kind, else to a new one."""
        if self._kind != kind:
            empty = {"signature": ""} if kind == "thinking" else {}
            yield from self.open({"type": kind, kind: "", **empty})
        if text:
            yield self._delta(type=f"{kind}_delta", **{kind: text})

    def open(self, block: Document) -> Iterator[str]:
        """Open a new block, and end the last one."""
        yield from self.close()
        self.index += 1
        self._kind = block["type"]
        yield _event("content_block_start", index=self.index, content_block=block)

    def call(self, call: Document) -> Iterator[str]:
        """Open a block for a whole call."""
        yield from self.open(_call_block(call, {}))
        yield self._delta(type="input_json_delta", partial_json=call["function"]["arguments"])

    def close(self) -> Iterator[str]:
        """End the block that is open."""
        if self._kind is None:
            return
        if self._kind == "thinking":
            yield self._delta(type="signature_delta", signature="")
        self._kind = None
        yield _event("content_block_stop", index=self.index)

    def _delta(self, **delta: Any) -> str:
        return _event("content_block_delta", index=self.index, delta=delta)


def _events(
    reply: Reply, session: ClientSession, message: Document, omits_thoughts: bool
) -> Iterator[str]:
    reply.begin_events()
    start = message | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message=start | {"usage": _usage(session)})
    yield _event("ping")
    blocks = _Blocks()
    for piece in session.pieces(lambda done, total: reply.write(_event("ping")), is_stream=True):
        if piece.reasoning:
            yield from blocks.add("thinking", "" if omits_thoughts else piece.reasoning)
        if piece.text:
            yield from blocks.add("text", piece.text)
        for call in piece.calls:
            yield from blocks.call(call)
    yield from blocks.close()
    yield _event("message_delta", delta=_end(session, piece), usage=_usage(session))
    yield _event("message_stop")
