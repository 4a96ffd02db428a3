"""Responses kept in memory for clients that show, delete or continue them."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from urllib.parse import parse_qsl

from .answer_stream import Document, RequestError
from .body import shortened

KEPT_SECONDS = 3600.0  # for a client to come back
KEPT_BYTES = 100_000_000  # of JSON: a thousand turns of 100 kB
PAGE = 20  # items, as OpenAI's server has them
MOST_SHOWN = 100  # items, as there


class StoredResponses:
    """Responses with their conversations, each for ``seconds`` and all in ``max_bytes``.

    The oldest leave first. Any thread may ask.
    """

    def __init__(
        self,
        seconds: float = KEPT_SECONDS,
        max_bytes: int = KEPT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._clock = clock
        # By their names: since when, both as JSON, and the names of the items.
        self._kept: dict[str, tuple[float, bytes, frozenset[str]]] = {}
        self._lock = Lock()

    def _missing(self, what: str, status: int = 404) -> RequestError:
        return RequestError(
            f"there is no {what}: responses and their items are kept for "
            f"{self._seconds / 60:.0f} minutes, until the server stops, unless store is false.",
            status,
        )

    def keep(self, response: Document, items: Sequence[Document]) -> None:
        """Keep a response with all items of the conversation that it answers."""
        complete = [_complete(item) for item in items]
        content = json.dumps([response, complete]).encode()
        names = (each["id"] for each in (*complete, *response["output"]))
        own = frozenset(name for name in names if isinstance(name, str))  # clients name theirs
        with self._lock:
            self._kept[response["id"]] = (self._clock(), content, own)
            self._drop()

    def _drop(self) -> None:
        size = sum(len(content) for _, content, _ in self._kept.values())
        oldest = self._clock() - self._seconds
        for name, (since, content, _) in list(self._kept.items()):
            if since > oldest and size <= self._max_bytes:
                return
            size -= len(content)
            del self._kept[name]

    def resolve(self, items: Sequence[Document]) -> list[Document]:
        """Return the items, each reference replaced by what it means. Raises RequestError."""
        return [self._item(each["id"]) if is_reference(each) else each for each in items]

    def _item(self, name: str) -> Document:
        with self._lock:
            self._drop()
            holders = [content for _, content, names in self._kept.values() if name in names]
        if not holders:
            raise self._missing(f"item {shortened(name)}")
        response, items = json.loads(holders[-1])
        found: Document = next(e for e in (*response["output"], *items) if e["id"] == name)
        return found

    def find(self, name: str, status: int = 404) -> tuple[Document, list[Document]]:
        """Return copies of a response and the items it answers. Raises RequestError."""
        with self._lock:
            self._drop()
            _, content, _ = self._kept.get(name, (0.0, b"", ()))
        if not content:
            raise self._missing(f"response {shortened(name)}", status)
        response, items = json.loads(content)
        return response, items

    def show(self, path: str, query: str) -> Document:
        """Return what ``path`` names: a response, or a page of its items. Raises RequestError."""
        name, _, part = path.partition("/")
        response, items = self.find(name)
        fields = dict(parse_qsl(query))
        if part == "input_items":
            return _page(items, fields)
        if part:
            raise RequestError(f"a response has no {shortened(part)}, only input_items.", 404)
        if fields.get("stream") == "true":
            raise RequestError("a response that is kept comes whole: leave stream out.")
        return response

    def delete(self, name: str) -> Document:
        """Delete a response. Raises RequestError."""
        self.find(name)
        with self._lock:
            self._kept.pop(name, None)
        return {"id": name, "object": "response", "deleted": True}


def is_reference(item: Document) -> bool:
    """Whether an item only names another; then it need not say its type. Raises ValueError."""
    item_type = item.get("type")
    if item_type != "item_reference" and (item_type is not None or item.keys() - {"id", "type"}):
        return False
    if not isinstance(item.get("id"), str):
        raise ValueError("an item_reference has no id.")
    return True


def _complete(item: Document) -> Document:
    """Complete an item as OpenAI's server shows it: with a name, and texts in parts."""
    item_type = item.get("type", "message")
    prefix = "msg" if item_type == "message" else "item"
    found = {"id": f"{prefix}_{uuid.uuid4().hex}"} | item | {"type": item_type}
    if item_type == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        found["content"] = [{"type": part, "text": item["content"]}]
    return found


def _page(items: list[Document], query: Mapping[str, str]) -> Document:
    """Return a page of the items, the last ones first. Raises RequestError.

    In ``query``, ``limit`` is their number, ``after`` the item before them, and ``order`` may be
    "asc".
    """
    order = query.get("order", "desc")
    limit = query.get("limit", str(PAGE))
    if order not in ("asc", "desc"):
        raise RequestError("order is unknown: give 'asc' or 'desc'.")
    if limit not in map(str, range(1, MOST_SHOWN + 1)):
        raise RequestError(f"limit is {shortened(limit)}: give 1 to {MOST_SHOWN}.")
    if order == "desc":
        items.reverse()
    if after := query.get("after"):
        names = [item["id"] for item in items]
        if after not in names:
            raise RequestError(f"there is no item {shortened(after)} before the response.")
        items = items[names.index(after) + 1 :]
    shown = items[: int(limit)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    return {"object": "list", "data": shown, "has_more": len(shown) < len(items)} | ends
