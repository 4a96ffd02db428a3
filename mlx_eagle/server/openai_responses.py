"""OpenAI's Responses API: /v1/responses, translated to a chat and back.

A request becomes a body of Chat Completions, which is checked and answered as any other; pieces
of its answer become items, which grow with the events of a stream. No HTTP in here.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from mlx_lm.server import CompletionRequest

from ..system.fields import check_type
from ..system.progress import silent
from .answer_stream import Document, RequestError, as_request_errors
from .body import PairArguments, check_body, read_arguments, shortened
from .client_session import ClientSession
from .completions import asked_draft_usage, chat_request, logprob_of, model_name
from .handler import Reply, event_text
from .prompt import encoded, with_one_system, without_oldest
from .request_fields import OWN, check_fields, is_search
from .stored_responses import is_reference

SAME = (
    *OWN, "parallel_tool_calls", "top_logprobs", "chat_template_kwargs", "stop", "thinking_budget",
)  # fmt: skip
"""Fields with the same meaning as in a chat."""
OTHER_NAMES = {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort",
    "n": "several requests", "prompt": "input",
}  # fmt: skip
"""Fields of a chat, with the fields that this API has instead."""
IN = "__"  # between a namespace of tools and the name of one
ECHOED: Document = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "metadata", "user")),
    **dict.fromkeys(("previous_response_id", "prompt_cache_key", "safety_identifier")),
    "parallel_tool_calls": True, "store": True, "tool_choice": "auto", "tools": [],
    "truncation": "disabled",
}  # fmt: skip
"""Fields that a response repeats, with their defaults."""
TYPES = {
    str: ("instructions", "previous_response_id"),
    dict: ("metadata", "reasoning", "text"),
    int: ("max_tool_calls",),
    bool: ("store",),
    list: ("include",),
}


def check(body: Document) -> Document:
    """Translate a request to the body of a chat; return both. Raises ValueError."""
    for name, instead in OTHER_NAMES.items():
        if name in body:
            raise ValueError(f"{name} is not a field of /v1/responses: give {instead}.")
    for json_type, names in TYPES.items():
        for name in names:
            check_type(name, body.get(name, json_type()), json_type)
    if body.get("truncation", "disabled") not in ("auto", "disabled"):
        raise ValueError("truncation is unknown: give 'auto' or 'disabled'.")
    chat: Document = {name: body[name] for name in SAME if name in body}
    own = [item for item in _items(body.get("input")) if not is_reference(item)]
    chat["messages"] = _messages(own) or [{"role": "user", "content": ""}]
    if "max_output_tokens" in body:
        chat["max_tokens"] = body["max_output_tokens"]
    if "message.output_text.logprobs" in body.get("include", []) or "top_logprobs" in body:
        chat["logprobs"] = True
    if "effort" in body.get("reasoning", {}):
        chat["reasoning_effort"] = body["reasoning"]["effort"]
    chat |= _response_format(body.get("text", {})) | _tools(body)
    check_fields(body, "responses", chat)
    check_body(chat, "messages")
    return {"asked": body, "chat": chat}


def _objects(given: Any, what: str) -> list[Document]:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise ValueError(f"{what} is something else than a list of objects.")
    return given


def _items(given: Any) -> list[Document]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise ValueError("the request has no input: give a string, or a list of items.")
    return _objects(given, "input")


def _text(content: Any, what: str) -> str:
    """Return the text of a content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    texts = []
    for part in _objects(content, what):
        text = part.get("refusal" if part.get("type") == "refusal" else "text")
        if part.get("type") in ("input_image", "input_file") or not isinstance(text, str):
            part_type = shortened(part.get("type"))
            raise ValueError(f"{what} has a part of type {part_type!r}: only text can be read.")
        texts.append(text)
    return "\n\n".join(texts)


def _messages(items: Sequence[Document]) -> list[Document]:
    """Translate items to messages; thoughts, text and calls of an answer become one message."""
    messages: list[Document] = []
    for item in items:
        item_type = item.get("type", "message")
        if item_type == "reasoning":
            found = (
                _text(item.get(name) or [], f"the {name} of a reasoning item")
                for name in ("summary", "content")
            )
            if thoughts := "\n\n".join(filter(None, found)):
                answer = _answer_for(messages, ("content", "tool_calls"))
                known = answer.get("reasoning_content")
                answer["reasoning_content"] = f"{known}\n\n{thoughts}" if known else thoughts
        elif item_type == "function_call":
            answer = _answer_for(messages, ())
            answer.setdefault("tool_calls", []).append(_call(item))
        elif item_type == "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise ValueError("a function_call_output has no call_id.")
            result = _text(item.get("output"), "a function_call_output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": result})
        elif item_type == "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise ValueError("a message has no role: give user, assistant, system, developer.")
            text = _text(item.get("content"), "a message's content")
            if role == "assistant":
                _answer_for(messages, ("content", "tool_calls"))["content"] = text
            else:
                role = "system" if role == "developer" else role
                messages.append({"role": role, "content": text})
        else:
            raise ValueError(f"input has an item of type {shortened(item_type)!r}: leave it out.")
    return messages


def _answer_for(messages: list[Document], behind: Sequence[str]) -> Document:
    """Find the answer of an item: a new one if the last has a field of ``behind``."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in behind):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _call(item: Document) -> Document:
    function = {name: item.get(name) for name in ("name", "arguments")}
    if item.get("namespace"):
        function["name"] = _full_name({"name": item["namespace"]}, item)
    if not all(isinstance(value, str) for value in (*function.values(), item.get("call_id"))):
        raise ValueError("a function_call has no call_id, name or arguments, which are strings.")
    return {"id": item["call_id"], "type": "function", "function": function}


def _response_format(text: Document) -> Document:
    """Translate the field ``text``."""
    text_format = text.get("format")
    if isinstance(text_format, dict) and text_format.get("type") == "json_schema":
        schema = {name: value for name, value in text_format.items() if name != "type"}
        text_format = {"type": "json_schema", "json_schema": schema}
    return {} if text_format is None else {"response_format": text_format}


def _tools(body: Document) -> Document:
    """Translate the tools, and the choice of those that the model may or must call."""
    given = _objects(body.get("tools", []), "tools")
    choice = body.get("tool_choice", "auto")
    tools = [_tool(tool) for tool in _functions(given)]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = _objects(choice.get("tools") or [], "the tools of tool_choice")
        names = [tool.get("name") for tool in allowed]
        tools = [tool for tool in tools if tool["function"]["name"] in names]
        choice = choice.get("mode", "auto")
    elif isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return {"tool_choice": choice} | ({"tools": tools} if tools else {})


def _functions(tools: Sequence[Document]) -> Iterator[Document]:
    """Yield the tools; in a namespace their names begin with it."""
    for tool in tools:
        if tool.get("type") == "namespace":
            if not isinstance(tool.get("name"), str):
                raise ValueError("a namespace of tools has no name.")
            for each in _objects(tool.get("tools", []), "the tools of a namespace"):
                yield each | {"name": _full_name(tool, each)}
        elif not is_search(tool):
            yield tool


def _full_name(space: Document, function: Document) -> str:
    if not isinstance(function.get("name"), str):
        raise ValueError(f"a tool of the namespace {shortened(space.get('name'))} has no name.")
    return f"{space.get('name')}{IN}{function.get('name')}"


def _tool(tool: Document) -> Document:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        name = shortened(tool.get("name") or tool.get("type"))
        raise ValueError(f"the tool {name} is no function of the client's: leave it out.")
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    function.setdefault("parameters", {})
    return {"type": "function", "function": function}


def answer(reply: Reply, body: Document) -> None:
    """Answer a translated body. Raises RequestError."""
    asked = body["asked"]
    chat = body["chat"]
    request, args, items = _request(reply, asked, chat)
    response = _begun(reply, asked, chat, args)
    session = reply.begin(request, args)
    events = _Events(reply, response, items)
    reply.failed = events.failed
    reply.send_events(events.of(session), response, bool(chat.get("stream")))


def count_tokens(reply: Reply, body: Document) -> None:
    """Answer with the number of prompt tokens of a translated body. Raises RequestError."""
    request, args, _ = _request(reply, body["asked"], body["chat"])
    tokens = encoded(request, args, reply.provider)
    reply.send_json({"object": "response.input_tokens", "input_tokens": len(tokens)})


@as_request_errors()
def _request(
    reply: Reply, asked: Document, chat: Document
) -> tuple[CompletionRequest, PairArguments, list[Document]]:
    """Return the chat of a request, and its items behind all that are kept of those before.

    Raises RequestError. Templates may change the messages of the chat.
    """
    items = reply.server.stored.resolve(_items(asked["input"]))
    if previous := asked.get("previous_response_id"):
        before, earlier = reply.server.stored.find(previous, status=400)
        items = [*earlier, *before["output"], *items]
    rules = {"role": "system", "content": asked.get("instructions", "")}
    args = read_arguments(chat, reply.provider.cli_args)
    messages = deepcopy(with_one_system([rules, *_messages(items)]))
    request = chat_request(chat | {"messages": messages})
    if asked.get("truncation") == "auto":
        request = without_oldest(request, args, reply.provider)
    return request, args, items


def _begun(reply: Reply, asked: Document, chat: Document, args: PairArguments) -> Document:
    """Return the document of a response that has begun."""
    reasoning = asked.get("reasoning", {})
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": reply.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model_name(reply, chat),
        "output": [],
        "reasoning": {name: reasoning.get(name) for name in ("effort", "summary")},
        "temperature": args.sampling.temperature,
        "text": {"format": {"type": "text"}} | asked.get("text", {}),
        "top_p": args.sampling.top_p,
        "usage": None,
    } | {name: asked.get(name, default) for name, default in ECHOED.items()}


TEXT = "output_text"
PARTS = {
    TEXT: ("content", "response.content_part", "response.output_text"),
    "reasoning_text": ("content", "response.content_part", "response.reasoning_text"),
    "summary_text": (
        "summary", "response.reasoning_summary_part", "response.reasoning_summary_text",
    ),
}  # fmt: skip
"""By the type of a part of an item: its field, and the names of its events and of its text's."""


class _Events:
    """Events of a response, whose items grow with them; one item is open at a time."""

    def __init__(self, reply: Reply, response: Document, items: Sequence[Document]):
        """``items`` are the conversation that the response answers."""
        self._reply = reply
        self._response = response
        self._items = items
        self._output: list[Document] = response["output"]
        # Thoughts go where a client looks for their summary, if it asks for one.
        self._thoughts = "summary_text" if response["reasoning"]["summary"] else "reasoning_text"
        self._names = {  # of tools within namespaces, as the client knows them
            _full_name(tool, each): {"namespace": tool["name"], "name": each["name"]}
            for tool in response["tools"] if tool["type"] == "namespace"
            for each in tool.get("tools", [])
        }  # fmt: skip
        self._number = 0
        self._part: Document = {}  # that is open

    def of(self, session: ClientSession) -> Iterator[str]:
        """Yield all events of an answer; the whole response is stored before the last."""
        reply = self._reply
        response = self._response
        progress = reply.say_progress if reply.is_streaming else silent
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        num_reasoning = 0
        for piece in session.pieces(progress, is_stream=False):
            if piece.reasoning:
                num_reasoning += len(piece.responses)
                yield from self._add(self._thoughts, piece.reasoning)
            if piece.text:
                shown = piece.responses if session.args.logprobs else []
                logprobs = [logprob_of(reply.provider.spelling, token) for token in shown]
                yield from self._add(TEXT, piece.text, logprobs)
            for call in piece.calls:
                yield from self._add_call(call)
        status = "incomplete" if piece.finish_reason == "length" else "completed"
        yield from self._close(status)
        response["status"] = status
        response["usage"] = _usage(session, num_reasoning)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        if response["store"]:
            reply.server.stored.keep(response, self._items)
        yield self._event(f"response.{status}", response=response)

    def failed(self, error: RequestError) -> str:
        """Return the last event of an answer that has broken off."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self._response["status"] = "failed"
        self._response["error"] = {"code": code, "message": str(error)}
        return self._event("response.failed", response=self._response)

    def _event(self, name: str, **fields: Any) -> str:
        data = {"type": name, "sequence_number": self._number} | fields
        self._number += 1
        return event_text(data, name)

    def _of_item(self, name: str, **fields: Any) -> str:
        """Return an event of the last item, and of the part that is open in it."""
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        place |= {f"{PARTS[self._part['type']][0]}_index": 0} if self._part else {}
        return self._event(name, **place, **fields)

    def _item_event(self, name: str) -> str:
        item = self._output[-1]
        place = len(self._output) - 1
        return self._event(f"response.output_item.{name}", output_index=place, item=item)

    def _open(self, item: Document, prefix: str) -> str:
        named = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress"}
        self._output.append(item | named)
        return self._item_event("added")

    def _add(self, kind: str, text: str, logprobs: Sequence[Document] = ()) -> Iterator[str]:
        """Add text to the open part if it is of this kind, else to a new one."""
        field, part_event, text_event = PARTS[kind]
        if self._part.get("type") != kind:
            yield from self._close()
            item: Document = {"type": "reasoning", "content": [], "summary": []}
            if kind == TEXT:
                item = {"type": "message", "content": [], "role": "assistant"}
            yield self._open(item, "msg" if kind == TEXT else "rs")
            self._part = {"type": kind, "text": ""}
            self._part |= {"annotations": [], "logprobs": []} if kind == TEXT else {}
            yield self._of_item(f"{part_event}.added", part=self._part)
            self._output[-1][field] = [self._part]
        self._part["text"] += text
        more = {"logprobs": logprobs} if kind == TEXT else {}
        self._part.get("logprobs", []).extend(logprobs)
        yield self._of_item(f"{text_event}.delta", delta=text, **more)

    def _close(self, status: str = "completed") -> Iterator[str]:
        """End the item that is open."""
        part = self._part
        if not part:
            return
        _, part_event, text_event = PARTS[part["type"]]
        self._output[-1]["status"] = status
        more = {"logprobs": part["logprobs"]} if part["type"] == TEXT else {}
        yield self._of_item(f"{text_event}.done", text=part["text"], **more)
        yield self._of_item(f"{part_event}.done", part=part)
        self._part = {}
        yield self._item_event("done")

    def _add_call(self, call: Document) -> Iterator[str]:
        """Add a whole tool call."""
        yield from self._close()
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        item = {"type": "function_call", "call_id": call["id"], "name": name, "arguments": ""}
        item |= self._names.get(name, {})
        yield self._open(item, "fc")
        yield self._of_item("response.function_call_arguments.delta", delta=arguments)
        self._output[-1] |= {"arguments": arguments, "status": "completed"}
        yield self._of_item("response.function_call_arguments.done", arguments=arguments)
        yield self._item_event("done")


def _usage(session: ClientSession, num_reasoning: int) -> Document:
    num_prompt = len(session.prompt.tokens)
    num_generated = session.num_generated
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": session.num_cached, "cache_write_tokens": 0},
        "output_tokens": num_generated,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_prompt + num_generated,
        **asked_draft_usage([session]),
    }
