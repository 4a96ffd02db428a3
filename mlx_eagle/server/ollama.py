"""Ollama's API: /api/chat, /api/generate and what its clients ask first, translated to a chat.

Answers are lines of JSON, one for each piece. No HTTP in here.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.server import CompletionRequest
from mlx_lm.utils import get_total_parameters

from ..system.device import weight_bytes
from ..system.fields import check_type
from ..system.progress import silent
from .answer_stream import Document, RequestError, as_request_errors
from .body import check_body, check_messages, read_arguments, shortened
from .client_session import ClientSession, Piece
from .completions import chat_request, logprob_of, model_name
from .handler import Reply
from .prompt import with_one_system
from .provider import PairProvider
from .request_fields import OWN, check_fields

VERSION = "0.12.11"
"""Version of Ollama whose API this is; clients refuse those that lack what they use."""
LINES = "application/x-ndjson"
SAME = (*OWN, "tools", "logprobs", "top_logprobs")


def error_document(error: RequestError) -> Document:
    """Return an error in the form of Ollama's API."""
    return {"error": str(error)}


def check_chat(body: Document) -> Document:
    """Translate a request to /api/chat. Raises ValueError."""
    chat = _translated(body)
    if messages := check_type("messages", body.get("messages", []), list):
        chat["messages"] = with_one_system(_messages(messages))
        check_body(chat, "messages")
    return chat


def check_generate(body: Document) -> Document:
    """Translate a request to /api/generate: a chat of one question, or with ``raw`` a text."""
    chat = _translated(body)
    prompt, system = (check_type(name, body.get(name, ""), str) for name in ("prompt", "system"))
    if prompt and body.get("raw"):
        chat["prompt"] = prompt
        check_body(chat, "prompt")
    elif prompt:
        rules = [{"role": "system", "content": system}] if system else []
        chat["messages"] = [*rules, {"role": "user", "content": prompt}]
        check_body(chat, "messages")
    return chat


def _translated(body: Document) -> Document:
    """Translate all fields but those that hold the prompt."""
    chat: Document = {name: body[name] for name in SAME if name in body}
    options = check_type("options", body.get("options", {}), dict)
    options = {name: value for name, value in options.items() if value is not None}
    if isinstance(options.get("seed"), int) and options["seed"] < 0:  # any seed
        del options["seed"]
    chat |= {name: options[name] for name in (*SAME, "stop") if name in options}
    check_fields(options, "options", chat)
    check_fields(body, "ollama", chat)
    chat["stream"] = check_type("stream", body.get("stream", True), bool)
    return chat


def _messages(messages: Sequence[Any]) -> list[Document]:
    """Translate messages: calls get names, which the results that follow refer to in order."""
    check_messages(messages)
    found: list[Document] = []
    open_calls: list[str] = []
    for message in messages:
        if message.get("images"):
            raise ValueError("a message has images: only text can be read here.")
        content = check_type("a message's content", message.get("content") or "", str)
        said: Document = {"role": message["role"], "content": content}
        if isinstance(message.get("thinking"), str) and message["thinking"]:
            said["reasoning_content"] = message["thinking"]
        if calls := message.get("tool_calls"):
            open_calls = [f"call_{len(found)}_{i}" for i in range(len(calls))]
            said["tool_calls"] = [
                {"id": name, "type": "function", "function": call.get("function")}
                for name, call in zip(open_calls, calls, strict=True)
            ]
        elif message["role"] == "tool":
            name = message.get("tool_name")
            said |= {"name": name} if isinstance(name, str) else {}
            said["tool_call_id"] = open_calls.pop(0) if open_calls else "call"
        found.append(said)
    return found


def answer(reply: Reply, chat: Document, is_chat: bool) -> None:
    """Answer a translated body, line by line unless ``stream`` is false. Raises RequestError."""
    base = {"model": model_name(reply, chat)}

    def line(piece: Piece, end: Document) -> Document:
        return base | {"created_at": _now()} | _shown(reply, piece, is_chat) | end

    if not chat.keys() & {"messages", "prompt"}:  # asks for the model to be loaded, which it is
        reply.send_json(line(Piece(), {"done": True, "done_reason": "load"}))
        return
    args = read_arguments(chat, reply.provider.cli_args, is_chat="messages" in chat)
    if "messages" in chat:
        request = chat_request(chat)
    else:
        request = CompletionRequest("text", chat["prompt"], [], None, None)
    session = reply.begin(request, args)
    if not chat["stream"]:
        piece = session.whole()
        reply.send_json(line(piece, _end(reply, session, piece)))
        return
    reply.failed = lambda error: _line(error_document(error))
    reply.begin_events(LINES)
    for piece in session.pieces(silent, is_stream=False):
        if piece.text or piece.reasoning or piece.calls or piece.responses:
            reply.write(_line(line(piece, {"done": False})))
    reply.write(_line(line(Piece(), _end(reply, session, piece))))


def _line(document: Document) -> str:
    return json.dumps(document) + "\n"


def _shown(reply: Reply, piece: Piece, is_chat: bool) -> Document:
    """Return a piece of an answer as one line has it."""
    thoughts = {"thinking": piece.reasoning} if piece.reasoning else {}
    found: Document = {"response": piece.text, **thoughts}
    if is_chat:
        message: Document = {"role": "assistant", "content": piece.text, **thoughts}
        for call in piece.calls:
            arguments = json.loads(call["function"]["arguments"])
            function = {"name": call["function"]["name"], "arguments": arguments}
            message.setdefault("tool_calls", []).append({"id": call["id"], "function": function})
        found = {"message": message}
    if piece.responses and reply.sessions[0].args.logprobs:
        found["logprobs"] = [logprob_of(reply.provider.spelling, r) for r in piece.responses]
    return found


def _end(reply: Reply, session: ClientSession, last: Piece) -> Document:
    """Return the fields of a last line: the reason to end, tokens, and times in nanoseconds."""
    now = time.monotonic()
    began = session.answer.began or now
    return {
        "done": True,
        "done_reason": "length" if last.finish_reason == "length" else "stop",
        "total_duration": _nanoseconds(now - reply.asked),
        "load_duration": 0,
        "prompt_eval_count": len(session.prompt.tokens),
        "prompt_eval_duration": _nanoseconds(began - reply.asked),
        "eval_count": session.num_generated,
        "eval_duration": _nanoseconds(now - began),
    }


def _nanoseconds(seconds: float) -> int:
    return int(1e9 * max(0.0, seconds))


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def version(provider: PairProvider) -> Document:
    """Return the version of the API."""
    return {"version": VERSION}


def tags(provider: PairProvider) -> Document:
    """Return the list with the one model."""
    digest = hashlib.sha256(provider.name.encode()).hexdigest()
    entry = {
        "name": provider.name,
        "model": provider.name,
        "modified_at": _now(),
        "size": weight_bytes(provider.model),
        "digest": digest,
        "details": _details(provider),
    }
    return {"models": [entry]}


@as_request_errors()
def show(reply: Reply, body: Document) -> None:
    """Send the properties of the model. Raises RequestError where it is not served."""
    provider = reply.provider
    asked = check_type("model", body.get("model") or body.get("name") or provider.name, str)
    model_name(reply, {"model": asked})
    family = _family(provider)
    info = {"general.architecture": family, "general.basename": provider.name}
    info["general.parameter_count"] = get_total_parameters(provider.model)
    if provider.context is not None:
        info[f"{family}.context_length"] = provider.context
    tokenizer = provider.tokenizer
    able = {"tools": tokenizer.has_tool_calling, "thinking": tokenizer.has_thinking}
    reply.send_json({
        "modelfile": f"FROM {shortened(provider.name)}",
        "parameters": "",
        "template": str(tokenizer.chat_template or ""),
        "details": _details(provider),
        "model_info": info,
        "capabilities": ["completion", *(name for name in able if able[name])],
        "modified_at": _now(),
    })  # fmt: skip


def _family(provider: PairProvider) -> str:
    return str(getattr(getattr(provider.model, "args", None), "model_type", "unknown"))


def _details(provider: PairProvider) -> Document:
    modules = provider.model.modules()
    bits = next((module.bits for module in modules if hasattr(module, "bits")), None)
    weights: Any = tree_flatten(provider.model.parameters())
    dtype = next((w.dtype for _, w in weights if mx.issubdtype(w.dtype, mx.floating)), None)
    family = _family(provider)
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family],
        "parameter_size": f"{get_total_parameters(provider.model) / 1e9:.1f}B",
        "quantization_level": f"{bits} bits" if bits else str(dtype).removeprefix("mlx.core."),
    }
