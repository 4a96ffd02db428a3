"""What the loop asks of a drafter: the interface, with its invariants.

EAGLE heads, a small model and prompt lookup all fit, and the loop treats them alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeGuard, runtime_checkable

import mlx.core as mx
import mlx.nn as nn

from ..target.tree_rows import ancestors
from .tree import Tree

LONG_DRAFT = 3  # tokens: from here on each one is started when it is built

Pick = Callable[[mx.array, mx.array | None], mx.array]
"""How to choose a draft token from logits (1, Vd): see ``accept.Choice.pick``."""

PickChildren = Callable[[mx.array, mx.array | None, int], tuple[mx.array, mx.array]]
"""How to choose several from logits (m, Vd): see ``accept.Choice.pick_children``."""


@dataclass(frozen=True)
class Draft:
    """Proposed tokens (k,) int32 in the target's vocabulary; k may be 0.

    ``parents`` (k,) makes them a tree, whose deepest token is ``depth`` levels below the root:
    ``parents[i]`` is the row of the verify pass that token i continues. None: a chain. ``form``
    is the same where the host knows it, because the tree is static. ``draw_index`` (k,) is that of
    ``tree.TreeNodes``; None where no rule was asked for the tokens.
    """

    tokens: mx.array
    parents: mx.array | None = None
    depth: int = 0
    form: tuple[int, ...] | None = None
    draw_index: mx.array | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_levels(self) -> int:
        """The longest run that can be kept."""
        return len(self) if self.parents is None else self.depth

    def known_parents(self) -> Sequence[int] | None:
        """``parents`` on the host, waited for where they are on the device alone."""
        return self.form if self.form or self.parents is None else self.parents.tolist()

    def tree_mask(self) -> mx.array | None:
        """Which rows of the verify pass each one sees, itself included; None for a chain.

        See ``tree_rows.ancestors``.
        """
        return None if self.parents is None else ancestors(self.parents, self.depth)


def empty_draft() -> Draft:
    return Draft(mx.zeros((0,), mx.int32))


def start_early(token: mx.array, size: int) -> None:
    """Start computing ``token`` (1,) before the rest of a draft of ``size`` tokens is built.

    Of a short draft the whole is built sooner than the device is through with the round before.
    The first token of a long one is a choice from logits that run behind the accept pass already:
    the device makes it while the next step is built, so it need not be any earlier.
    """
    if size >= LONG_DRAFT:
        mx.async_eval(token)


def check_width(features: mx.array, width: int) -> None:
    """Raise ValueError unless features (m, F) are of the target that a drafter was made for."""
    if features.shape[-1] != width:
        raise ValueError(
            f"the drafter takes features {width} wide, and this target's are "
            f"{features.shape[-1]} wide: load it anew for the model it is used with."
        )


class DrafterBase:
    """Base of drafters: mlx-lm calls a draft model, which they are not."""

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise ValueError(
            "mlx-lm runs one of our drafters as a model of its own: call mlx_eagle.install() "
            "before, or use mlx_eagle.generate."
        )


@runtime_checkable
class Drafter(Protocol):
    """Absorbs what was committed and proposes what may follow.

    A pair couples the features of position P with the token at P + 1. With N tokens
    committed, a drafter has absorbed N - 1 pairs, and nothing that ``propose`` left behind:
    ``propose`` changes nothing that the next ``extend`` does not overwrite.
    """

    taps: tuple[int, ...]
    """Which activations ``extend`` wants; () for none."""

    cache: list
    """mlx-lm caches, one slot per pair, so that the loop can cut surplus rows as the target's."""

    @property
    def num_forwards(self) -> int:
        """Forward passes of the draft model since ``begin`` (prefill included)."""

    def begin(self, cache: list | None = None) -> "Drafter":
        """A drafter for one request, with this one's weights and ``cache`` (None: fresh ones)."""

    def make_cache(self) -> list:
        """Fresh caches, as mlx-lm's ``make_prompt_cache`` asks a model for them."""

    def extend(
        self, tokens: mx.array, features: mx.array | None, last: mx.array | None = None
    ) -> None:
        """Absorb pairs: tokens (m,) with the features (m, F) of the position before each.

        ``last`` () is the index of the last valid row, perhaps still on the device; rows
        after it are garbage that the loop cuts from ``cache`` later. None means m - 1.
        ``features`` None, where there are taps: the first token (1,) of a request. What came
        before it, if anything, is in ``cache``, and so are its features where
        ``save_last_features`` was called.
        """

    def propose(self, size: int, pick: Pick) -> Draft:
        """Draft at most ``size`` >= 1 tokens that may follow the last token absorbed."""

    def modules(self) -> list[nn.Module]:
        """The modules whose weights are the drafter's own, for the memory report."""

    def save_last_features(self, features: mx.array) -> None:
        """Keep features (1, F) of the last position in ``cache``, for the next request."""

    def pending(self) -> list[mx.array]:
        """Arrays the next ``propose`` starts from, so that the loop can have them computed."""


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    """A drafter that can also propose trees."""

    def check_tree(self, shape: Tree) -> None:
        """Raise ValueError, before anything is drafted, where it cannot draft that tree."""

    def propose_tree(self, shape: Tree, pick: PickChildren) -> Draft:
        """Draft a tree that may follow the last token absorbed."""


@runtime_checkable
class EmbeddedDrafter(Drafter, Protocol):
    """A drafter that, in the place of tokens (m,), absorbs embeddings (m, h) as well."""

    def check_embeddings(self, embeddings: mx.array) -> None:
        """Raise ValueError unless embeddings (m, h) are as wide as those of its tokens."""


class OverlayDrafter(Drafter, Protocol):
    """A drafter that can keep drafted slots beside its caches (see ``head_cache.py``)."""

    def use_overlay(self, is_kept: bool) -> None:
        """Keep them there from now on, or in the caches; the drafts are the same."""


def supports_overlay(drafter: Drafter) -> TypeGuard[OverlayDrafter]:
    """Whether it is an ``OverlayDrafter``.

    Python's own check of a protocol does not see methods that are handed on by ``__getattr__``,
    from 3.12 on.
    """
    return hasattr(drafter, "use_overlay")


class NullDrafter(DrafterBase):
    """A ``Drafter`` that absorbs nothing and proposes nothing.

    ``num_forwards`` are those of a drafter in whose place it comes.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, num_forwards: int = 0):
        self.cache: list[Any] = []
        self.num_forwards = num_forwards

    def begin(self, cache: list | None = None) -> "NullDrafter":
        """See ``Drafter.begin``."""
        return NullDrafter()

    def make_cache(self) -> list:
        """See ``Drafter.make_cache``: it needs none."""
        return []

    def extend(
        self, tokens: mx.array, features: mx.array | None, last: mx.array | None = None
    ) -> None:
        """See ``Drafter.extend``."""

    def propose(self, size: int, pick: Pick) -> Draft:
        """See ``Drafter.propose``."""
        return empty_draft()

    def modules(self) -> list[nn.Module]:
        """See ``Drafter.modules``."""
        return []

    def save_last_features(self, features: mx.array) -> None:
        """See ``Drafter.save_last_features``."""

    def pending(self) -> list[mx.array]:
        """See ``Drafter.pending``."""
        return []
