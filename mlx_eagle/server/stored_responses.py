"""Stored responses: kept in memory for an hour, to be shown, deleted and continued."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from urllib.parse import parse_qsl

from .answer_stream import Document, RequestError
from .body import shortened

KEPT_SECONDS = 3600.0  # for a client to continue a response
KEPT_BYTES = 100_000_000  # of JSON: a thousand turns of 100 kB
PAGE = 20  # items, as OpenAI's server has them
MOST_SHOWN = 100  # items, as there


class StoredResponses:
    """Responses with their conversations, in memory: the oldest leave first."""

    def __init__(
        self,
        seconds: float = KEPT_SECONDS,
        max_bytes: int = KEPT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: dict[str, tuple[float, bytes]] = {}
        self._lock = Lock()

    def keep(self, response: Document, items: Sequence[Document]) -> None:
        """Keep a response with all items of the conversation that it answers."""
        content = json.dumps([response, [_complete(item) for item in items]]).encode()
        with self._lock:
            self._kept[response["id"]] = (self._clock(), content)
            self._drop()

    def find(self, name: str, status: int = 404) -> tuple[Document, list[Document]]:
        """Return copies of a response and the items it answers. Raises RequestError."""
        with self._lock:
            self._drop()
            found = self._kept.get(name)
        if found is None:
            raise RequestError(
                f"there is no response {shortened(name)}: each is kept for "
                f"{self._seconds / 60:.0f} minutes, until the server stops, unless store is "
                "false.",
                status,
            )
        response, items = json.loads(found[1])
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

    def _drop(self) -> None:
        size = sum(len(content) for _, content in self._kept.values())
        oldest = self._clock() - self._seconds
        for name, (since, content) in list(self._kept.items()):
            if since > oldest and size <= self._max_bytes:
                return
            size -= len(content)
            del self._kept[name]


def _complete(item: Document) -> Document:
    """Complete an item as OpenAI's server shows it: with a name, and texts in parts."""
    kind = item.get("type", "message")
    prefix = "msg" if kind == "message" else "item"
    found = {"id": f"{prefix}_{uuid.uuid4().hex}"} | item | {"type": kind}
    if kind == "message" and isinstance(item.get("content"), str):
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
