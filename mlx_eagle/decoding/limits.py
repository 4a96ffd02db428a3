"""How far a generation may go, and the checks of what a caller asks for."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from numbers import Integral, Real

import mlx.core as mx

from ..drafters.tree import Tree, parse_tree
from .costs import DraftShape

AUTO = "auto"


@dataclass(frozen=True)
class Limits:
    """How far the generation may go; ``max_tokens`` -1 is no limit."""

    max_tokens: int
    stop_tokens: Collection[int]

    def cut(self, run: list[int], num_emitted: int) -> list[int]:
        """``run`` up to its first stop token, included, and to max_tokens in all."""
        if self.max_tokens >= 0:
            run = run[: self.max_tokens - num_emitted]
        for i, token in enumerate(run):
            if token in self.stop_tokens:
                return run[: i + 1]
        return run

    def at_most(self, shape: DraftShape, num_emitted: int) -> DraftShape:
        """As much of ``shape`` as fits after ``num_emitted`` tokens."""
        if self.max_tokens < 0:
            return shape
        # A verify pass emits one token more than it keeps.
        return replace(shape, size=max(0, min(shape.size, self.max_tokens - num_emitted - 1)))

    def has_room_after(self, num_emitted: int) -> bool:
        """Whether another token may come after so many."""
        return not 0 <= self.max_tokens <= num_emitted

    def end(self, token: int) -> bool:
        """Whether the sequence ends with this token."""
        return token in self.stop_tokens


def check_prompt(prompt: mx.array, can_be_empty: bool = False) -> None:
    """Raise ValueError for anything but one prompt, with a token or more unless told otherwise."""
    if prompt.ndim != 1:
        raise ValueError(
            f"the prompt has shape {tuple(prompt.shape)}: speculative decoding takes one prompt "
            "(n,) at a time; use mlx_eagle.batch_generate for several."
        )
    if prompt.size == 0 and not can_be_empty:
        raise ValueError("the prompt is empty: give at least one token.")


def check_num_draft_tokens(num_draft_tokens: object) -> None:
    """Raise ValueError for anything but a whole number from 0 or "auto"."""
    if num_draft_tokens == AUTO or (_is_whole(num_draft_tokens) and num_draft_tokens >= 0):
        return
    raise ValueError(
        f"num_draft_tokens is {in_words(num_draft_tokens)}: give a whole number, 0 (plain "
        "decoding) or more, or 'auto'."
    )


def check_max_tokens(max_tokens: object, *, of: str = "", least: int = -1) -> None:
    """Raise ValueError for anything but a whole number above 0, or -1 where ``least`` is that."""
    if _is_whole(max_tokens) and max_tokens >= least and max_tokens != 0:
        return
    no_limit = ", or -1 for no limit" if least < 0 else ""
    raise ValueError(f"max_tokens{of} is {in_words(max_tokens)}: give 1 or more{no_limit}.")


def read_tree(tree: object) -> Tree | str | None:
    """A tree, "auto" or None as it is, and the tree that a text stands for: see ``parse_tree``.

    Raises ValueError for anything else.
    """
    if isinstance(tree, str) and tree != AUTO:
        return parse_tree(tree)
    if tree is None or tree == AUTO or isinstance(tree, Tree):
        return tree
    raise ValueError(
        f"tree is {in_words(tree)}: give WIDTHxDEPTH:NODES, for example '4x5:16', or 'auto'."
    )


def in_words(value: object) -> str:
    """A value for a message, with what kind of thing it is where that is what is wrong with it."""
    if value is None:
        return "None (nothing)"
    if isinstance(value, bool):
        return f"{value} (yes or no, not a number)"
    if isinstance(value, str):
        return f"{value!r} (text)"
    if isinstance(value, Integral):
        return str(value)
    if isinstance(value, Real):
        return f"{value} (not a whole number)" if value % 1 else f"{value} (a decimal number)"
    return f"a {type(value).__name__}"


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
