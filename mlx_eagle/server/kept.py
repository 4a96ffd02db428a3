"""Responses kept in memory for clients that show, delete or continue them."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl

from .answer_stream import Document, RequestError
from .body import shortened

KEPT_SECONDS = 3600.0  # for a client to come back
KEPT_BYTES = 100_000_000  # of JSON: a thousand turns of 100 kB
PAGE = 20  # items, as OpenAI's server has them
MOST_SHOWN = 100  # items, as there


class Kept:
    """Documents by name, each for ``seconds`` and all in ``max_bytes``: the oldest leave first.

    Any thread may ask.
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
        self._kept: dict[str, tuple[float, bytes]] = {}
        self._lock = Lock()

    @property
    def terms(self) -> str:
        """Time for which a document is kept, in words."""
        return f"for {self._seconds / 60:.0f} minutes, until the server stops"

    def put(self, name: str, document: Any) -> None:
        """Keep a document, which is JSON."""
        content = json.dumps(document).encode()
        with self._lock:
            self._kept[name] = (self._clock(), content)
            self._drop()

    def get(self, name: str) -> Any:
        """Return a copy of a document; None if it is not kept."""
        with self._lock:
            self._drop()
            found = self._kept.get(name)
        return None if found is None else json.loads(found[1])

    def remove(self, name: str) -> None:
        """Keep a document no longer."""
        with self._lock:
            self._kept.pop(name, None)

    def _drop(self) -> None:
        size = sum(len(content) for _, content in self._kept.values())
        oldest = self._clock() - self._seconds
        for name, (since, content) in list(self._kept.items()):
            if since > oldest and size <= self._max_bytes:
                return
            size -= len(content)
            del self._kept[name]


class StoredResponses(Kept):
    """Responses with their conversations."""

    _holders: Mapping[str, str] = MappingProxyType({})
    """By the name of an item, the last response that has it."""

    def keep(self, response: Document, items: Sequence[Document]) -> None:
        """Keep a response with all items of the conversation that it answers."""
        name = response["id"]
        complete = [_complete(item) for item in items]
        self.put(name, [response, complete])
        with self._lock:
            there = (each["id"] for each in (*complete, *response["output"]))
            here = {item: name for item in there if isinstance(item, str)}  # clients name theirs
            known = {item: own for item, own in self._holders.items() if own in self._kept}
            self._holders = known | here

    def resolve(self, items: Sequence[Document]) -> list[Document]:
        """Return the items, each reference replaced by what it means. Raises RequestError."""
        return [self._item(each["id"]) if is_reference(each) else each for each in items]

    def _item(self, name: str) -> Document:
        response, items = self.get(self._holders.get(name, "")) or ({"output": []}, [])
        for item in (*response["output"], *items):
            if item["id"] == name:
                return dict(item)
        raise RequestError(
            f"there is no item {shortened(name)}: those of responses are kept {self.terms}, "
            "unless store is false.",
            404,
        )

    def find(self, name: str, status: int = 404) -> tuple[Document, list[Document]]:
        """Return copies of a response and the items it answers. Raises RequestError."""
        found: tuple[Document, list[Document]] | None = self.get(name)
        if found is None:
            raise RequestError(
                f"there is no response {shortened(name)}: each is kept {self.terms}, unless store "
                "is false.",
                status,
            )
        return found

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
        self.remove(name)
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
