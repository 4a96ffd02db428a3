"""Prompt lookup: a drafter that has no model, and only copies from the text."""

from .base import NullDrafter
from .copies import CopySource


class LookupDrafter(NullDrafter):
    """A ``Drafter`` that drafts nothing itself; see ``copies.py`` for what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = CopySource()
