"""Threads of the Anthropic API: conversations that the server holds between turns.

A request with ``{"type": "create"}`` is kept under the name of its answer, and one with
``{"type": "continue", "previous_message_id": ...}`` brings the new messages alone. So does
``tool_runner`` of Anthropic's libraries; told that a thread is not found, it sends the whole
conversation again.
"""

from .answer_stream import Document, RequestError
from .body import shortened
from .kept import Kept

OF_THREAD = ("system", "tools")
"""Fields that a thread keeps from its first request, and that later ones may not change."""


def check_thread(body: Document) -> None:
    """Raise ValueError for a field ``thread`` that is none."""
    thread = body.get("thread", {"type": "create"})
    thread_type = thread.get("type") if isinstance(thread, dict) else None
    if thread_type not in ("create", "continue"):
        raise ValueError('thread is unknown: give {"type": "create"} or "continue".')
    if thread_type == "continue" and not isinstance(thread.get("previous_message_id"), str):
        raise ValueError("thread has no previous_message_id: name the answer to continue from.")


class MessageThreads(Kept):
    """Conversations by the name of their last answer; each may be continued more than once."""

    def join(self, body: Document) -> Document:
        """Return a request that continues with all that goes before it. Raises RequestError."""
        name = body["thread"]["previous_message_id"]
        found: Document | None = self.get(name)
        if found is None:
            raise RequestError(
                f"there is no thread at {shortened(name)}: each is kept {self.terms}; send the "
                "whole conversation.",
                404,
                "thread_not_found",
            )
        for field in OF_THREAD:
            if field in body and body[field] != found.get(field):
                raise RequestError(
                    f"{field} differs from the thread's: leave it out, or create a new thread.",
                    400,
                    "thread_fingerprint_mismatch",
                )
        return body | found | {"messages": [*found["messages"], *body["messages"]]}

    def keep(self, body: Document, message: Document) -> None:
        """Keep a whole conversation under the name of its answer."""
        said = {"role": "assistant", "content": message["content"]}
        kept = {name: body[name] for name in OF_THREAD if name in body}
        self.put(message["id"], kept | {"messages": [*body["messages"], said]})
