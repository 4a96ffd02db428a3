"""Anthropic API: /v1/messages, translated to a chat and back.

A request becomes a body of Chat Completions, which is checked and answered as any other; pieces
of its answer become blocks and events. No HTTP in here.
"""

import json
import uuid
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ..system.fields import check_type
from ..system.progress import silent
from .answer_stream import Document, RequestError
from .body import check_body, read_arguments, shortened
from .client_session import ClientSession, Piece
from .completions import asked_draft_usage, chat_request, model_name
from .handler import Reply, event_text
from .prompt import encoded, with_one_system
from .request_fields import OWN, check_fields, is_search

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
EMPTY: dict[str, Document] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
"""Blocks when they begin, by their type."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
SAME = (*OWN, "chat_template_kwargs", "thinking_budget")
OMITTED = "thoughts_omitted"  # in a translated body: their blocks stay empty


def error_document(error: RequestError) -> Document:
    """Return an error in the form of the Anthropic API."""
    otherwise = "invalid_request_error" if error.status < 500 else "api_error"
    found: Document = {"type": ERRORS.get(error.status, otherwise), "message": str(error)}
    if error.code is not None:
        found["details"] = {"error_code": error.code}
    return {"type": "error", "error": found}


def check(body: Document) -> Document:
    """Translate a request for a message to the body of a chat. Raises ValueError."""
    if "max_tokens" not in body:
        raise ValueError("the request has no max_tokens.")
    return check_count(body)


def answer(reply: Reply, chat: Document) -> None:
    """Answer a translated body. Raises RequestError."""
    model = model_name(reply, chat)
    session = reply.begin(chat_request(chat), read_arguments(chat, reply.provider.cli_args))
    message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
    message |= {"model": model, "content": [], "stop_reason": None, "stop_sequence": None}
    message["usage"] = _usage(session)
    events = _events(reply, session, message, bool(chat.get(OMITTED)))
    reply.send_events(events, message, bool(chat.get("stream")))


def count_tokens(reply: Reply, chat: Document) -> None:
    """Answer with the number of prompt tokens of a translated body. Raises RequestError."""
    args = read_arguments(chat, reply.provider.cli_args)
    tokens = encoded(chat_request(chat), args, reply.provider)
    reply.send_json({"input_tokens": len(tokens)})


def check_count(body: Document) -> Document:
    """Translate a request whose tokens are counted; ``max_tokens`` may be missing.

    Raises ValueError. Raises RequestError for a thread that goes on: none is kept here, and
    Anthropic's libraries, told so, send the whole conversation.
    """
    if check_type("thread", body.get("thread", {}), dict).get("type", "create") != "create":
        sentence = "threads are not kept here: send the whole conversation."
        raise RequestError(sentence, 404, "thread_not_found")
    chat: Document = {name: body[name] for name in SAME if name in body}
    chat["max_tokens"] = body.get("max_tokens", 1)
    user = check_type("metadata", body.get("metadata") or {}, dict).get("user_id")
    if user is not None:
        chat["user"] = check_type("metadata.user_id", user, str)
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    said = _system(body.get("system", []))
    for message in check_type("messages", body.get("messages", []), list):
        said += _messages(message)
    chat["messages"] = with_one_system(said)
    if all(message["role"] == "system" for message in chat["messages"]):
        raise ValueError("the request has no messages.")
    if chat["messages"][-1]["role"] == "assistant":
        raise ValueError("the last message is not the user's: an answer cannot be gone on with.")
    if tools := check_type("tools", body.get("tools", []), list):
        chat["tools"] = [_tool(tool) for tool in tools if not is_search(tool)]
    chat |= _choice(body.get("tool_choice", {"type": "auto"})) | _response_format(body)
    chat |= _thinking(body.get("thinking", {"type": "adaptive"}))
    check_fields(body, "messages", chat)
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
        block_type = shortened(block.get("type"))
        raise ValueError(f"{what} has a block of type {block_type!r}: only text can be read here.")
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
        block_type = block.get("type")
        if block_type == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif block_type == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            if not isinstance(function["name"], str) or not isinstance(block.get("input"), dict):
                raise ValueError("a tool_use has no name, or an input that is no object.")
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif block_type != "redacted_thinking":
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
        raise ValueError(f"the tool {shortened(tool['name'])} is not the client's: leave it out.")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if name in tool}
    return {"type": "function", "function": function}


def _response_format(body: Document) -> Document:
    """Translate ``output_config.format``, or its older name ``output_format``."""
    config = body.get("output_config") or {}
    output_format = body.get("output_format") or (
        isinstance(config, dict) and config.get("format")
    )
    if not output_format:
        return {}
    if not isinstance(output_format, dict) or output_format.get("type") != "json_schema":
        raise ValueError("output_config.format is no object of type json_schema: give one.")
    schema = {"schema": output_format.get("schema"), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _choice(choice: Any) -> Document:
    name = check_type("tool_choice", choice, dict).get("name")
    named = {"type": "function", "function": {"name": name}}
    choices = {"any": "required", "tool": named}
    found: Document = {"tool_choice": choices.get(str(choice.get("type")), choice.get("type"))}
    if choice.get("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found


def _thinking(thinking: Any) -> Document:
    """Translate ``thinking``: a budget in tokens after which thoughts end; 0 if disabled."""
    mode = check_type("thinking", thinking, dict).get("type")
    if mode == "disabled":
        return {"thinking_budget": 0}
    if mode not in ("enabled", "adaptive"):
        raise ValueError(f"thinking is {shortened(mode)}: enable or disable it.")
    budget = thinking.get("budget_tokens")
    found: Document = {} if budget is None else {"thinking_budget": budget}
    return found | ({OMITTED: True} if thinking.get("display") == "omitted" else {})


def _usage(session: ClientSession) -> Document:
    return {
        "input_tokens": len(session.prompt.tokens) - session.num_cached,
        "cache_read_input_tokens": session.num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": session.num_generated,
        **asked_draft_usage([session]),
    }


def _event(event_type: str, **fields: Any) -> str:
    return event_text({"type": event_type} | fields, event_type)


def _events(
    reply: Reply, session: ClientSession, message: Document, omits_thoughts: bool
) -> Iterator[str]:
    """Yield the events of an answer; ``message`` is whole before the last two."""
    yield _event("message_start", message=message)
    ping = _event("ping")
    yield ping
    progress = (lambda done, total: reply.write(ping)) if reply.is_streaming else silent
    pieces = session.pieces(progress, is_stream=True)
    yield from _block_events(pieces, message["content"], omits_thoughts)
    word = session.stop_word if session.finish_reason == "stop" else None
    reason = STOP_REASONS[str(session.finish_reason)] if word is None else "stop_sequence"
    end = {"stop_reason": reason, "stop_sequence": word}
    message |= end | {"usage": _usage(session)}
    yield _event("message_delta", delta=end, usage=message["usage"])
    yield _event("message_stop")


def _block_events(
    pieces: Iterator[Piece], content: list[Document], omits_thoughts: bool
) -> Iterator[str]:
    """Yield the events of the blocks, which grow in ``content`` with them, one after the other."""
    for _, parts in groupby(_parts(pieces), key=lambda part: part[:2]):
        index = len(content)
        for kind, _, said in parts:
            if len(content) == index:
                content.append({"type": kind} | EMPTY[kind])
                if kind == "tool_use":
                    content[index] |= {"id": said["id"], "name": said["function"]["name"]}
                yield _event("content_block_start", index=index, content_block=content[index])
            if kind == "tool_use":
                arguments = said["function"]["arguments"]
                content[index]["input"] = json.loads(arguments)
                delta = {"type": "input_json_delta", "partial_json": arguments}
            elif kind == "thinking" and omits_thoughts:
                continue
            else:
                content[index][kind] += said
                delta = {"type": f"{kind}_delta", kind: said}
            yield _event("content_block_delta", index=index, delta=delta)
        if kind == "thinking":
            delta = {"type": "signature_delta", "signature": ""}
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)


def _parts(pieces: Iterator[Piece]) -> Iterator[tuple[str, str, Any]]:
    """Yield the type of a block, the name of a call, and the text or the call."""
    for piece in pieces:
        if piece.reasoning:
            yield "thinking", "", piece.reasoning
        if piece.text:
            yield "text", "", piece.text
        for call in piece.calls:
            yield "tool_use", call["id"], call
