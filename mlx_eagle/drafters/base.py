"""Interface between the loop and drafters, with its invariants.

EAGLE heads, MTP layers, a small model and prompt lookup all implement it, and the loop treats them
alike: members say what a drafter can do, so the loop never asks for its class.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from os import PathLike
from typing import Any, NoReturn, Protocol, Self, TypeGuard, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..target_model.cache_view import CacheView
from ..target_model.rollback import Checkpoint
from ..target_model.tree_rows import ancestors
from .copies import CopySource
from .tree import Tree

LONG_DRAFT = 3  # tokens, from which on each one is started as soon as it is built

Pick = Callable[[mx.array, mx.array | None], mx.array]
"""Chooses a draft token from logits (1, Vd): see ``accept.Choice.pick``."""

PickChildren = Callable[[mx.array, mx.array | None, int], tuple[mx.array, mx.array]]
"""Chooses several tokens from logits (m, Vd): see ``accept.Choice.pick_children``."""


@dataclass(frozen=True)
class Draft:
    """Proposed tokens (k,) int32 in the target's vocabulary; k may be 0.

    ``parents`` (k,) makes them a tree, whose deepest token is ``depth`` levels below the root:
    ``parents[i]`` is the row of the verify pass that token i continues. None: a chain.
    ``static_parents`` are the same on the host, for a static tree. ``draw_index`` (k,) is that of
    ``tree.TreeNodes``; None if no rule chose the tokens. ``confidence`` (k,) is the
    drafter's own estimate of how likely each token of a chain is kept if all before it are, made
    before the token was chosen; None if it has none.
    """

    tokens: mx.array
    parents: mx.array | None = None
    depth: int = 0
    static_parents: tuple[int, ...] | None = None
    draw_index: mx.array | None = None
    confidence: mx.array | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_levels(self) -> int:
        """The greatest number of tokens that can be kept."""
        return len(self) if self.parents is None else self.depth

    def known_parents(self) -> Sequence[int] | None:
        """``parents`` on the host; waits for the device if it has to."""
        if self.static_parents or self.parents is None:
            return self.static_parents
        waited: Any = self.parents.tolist()
        return [int(parent) for parent in waited]

    def tree_mask(self) -> mx.array | None:
        """Rows of the verify pass that each row sees, itself included; None for a chain.

        See ``tree_rows.ancestors``.
        """
        return None if self.parents is None else ancestors(self.parents, self.depth)

    def worth(self, prices: Mapping[int, float]) -> "Draft":
        """Cut the draft where more tokens promise less than they cost; waits for ``confidence``.

        ``prices`` are the tokens that a round of each length must emit to pay. Whether a token
        stays depends on nothing known after it was chosen, as rejection sampling requires.
        """
        if self.confidence is None or not prices:
            return self
        waited: Any = self.confidence.tolist()
        reached = 1.0
        size = min(prices)
        for done, chance in enumerate(waited):
            further = [n for n in prices if done < n <= len(self)]
            if done == size and further:
                left = (sum(reached * chance**i for i in range(1, n - done + 1)) for n in further)
                gains = (tokens - prices[n] for tokens, n in zip(left, further, strict=True))
                if max(gains) <= -prices[done]:
                    break
                size = min(further)
            reached *= chance
        return self if size >= len(self) else Draft(self.tokens[:size])


def empty_draft() -> Draft:
    return Draft(mx.zeros((0,), mx.int32))


def start_early(token: mx.array, size: int) -> None:
    """Start computing ``token`` (1,) before the rest of a draft of ``size`` tokens is built.

    A short draft is built as a whole before the device has finished the previous round. The first
    token of a long one is chosen from logits that are queued after the accept pass already: the
    device computes it while the next step is built.
    """
    if size >= LONG_DRAFT:
        mx.async_eval(token)


def index_of(array: mx.array) -> int:
    """Read a whole number from the device; waits for it."""
    found: Any = array.item()
    return int(found)


def row_at(rows: mx.array, last: mx.array | None) -> mx.array:
    """The row at ``last`` () of rows (m, ...), by default the last one, as (1, ...)."""
    return rows[-1:] if last is None else rows[last.reshape(1)]


def check_width(features: mx.array, width: int) -> None:
    """Raise ValueError unless features (m, F) have the width that a drafter was made for."""
    if features.shape[-1] != width:
        raise ValueError(
            f"the drafter takes features {width} wide, and this target's are "
            f"{features.shape[-1]} wide: load it anew for the model it is used with."
        )


class Picks(Protocol):
    """The way draft tokens are chosen in one round of a batch."""

    def pick(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        """The ``Pick`` of all requests at once: logits (B, Vd) -> indices (B,)."""

    def of_request(self, index: int) -> Pick:
        """The ``Pick`` of one request."""


@runtime_checkable
class Drafter(Protocol):
    """Absorbs committed tokens and proposes tokens that may follow.

    A pair is the features of position P and the token at P + 1. With N tokens committed, a
    drafter has absorbed N - 1 pairs and nothing else: anything that ``propose`` changes is
    overwritten by the next ``extend``.

    Every drafter implements the members up to ``propose``. The members after it say what else a
    drafter can do; the defaults here answer that it cannot, so derive from this class.
    """

    taps: tuple[int, ...]
    """Layers whose activations ``extend`` needs; () for none."""

    cache: list[Any]
    """mlx-lm caches with one slot per pair; the loop cuts surplus rows from them."""

    num_forwards: int
    """Forward passes of the draft model since ``begin`` (prefill included)."""

    copies: CopySource | None = None
    """Texts to copy from when a copy promises more than a draft; None: no copies."""

    @abstractmethod
    def begin(self, cache: list[Any] | None = None) -> "Drafter":
        """A drafter for one request, with this one's weights and ``cache`` (None: fresh ones)."""

    @abstractmethod
    def make_cache(self) -> list[Any]:
        """Fresh caches; mlx-lm's ``make_prompt_cache`` calls a model's method of this name."""

    @abstractmethod
    def extend(
        self, tokens: mx.array, features: mx.array | None, last: mx.array | None = None
    ) -> None:
        """Absorb pairs: tokens (m,) with the features (m, F) of the position before each.

        ``last`` () is the index of the last valid row, perhaps still on the device; rows
        after it are garbage that the loop cuts from ``cache`` later. None means m - 1.
        If there are taps, ``features`` None marks the first token (1,) of a request. The position
        before it, if any, is in ``cache``; so are its features if ``save_last_features`` was
        called.
        """

    @abstractmethod
    def propose(self, size: int, pick: Pick) -> Draft:
        """Draft at most ``size`` >= 1 tokens to follow the last absorbed token."""

    def __repr__(self) -> str:
        """The class, the size of the weights in MB, and the taps, where there are any."""
        weights: list[Any] = [tree_flatten(module.parameters()) for module in self.modules()]
        size = sum(array.nbytes for arrays in weights for _, array in arrays)
        words = [f"{size / 1e6:.1f} MB" if size else "no weights"]
        words += [f"taps={self.taps}"] if self.taps else []
        words += ["copies"] if self.copies is not None else []
        return f"{type(self).__name__}({', '.join(words)})"

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise ValueError(
            "mlx-lm runs one of our drafters as a model of its own: call mlx_eagle.install() "
            "before, or use mlx_eagle.generate."
        )

    def modules(self) -> list[nn.Module]:
        """The modules whose weights are the drafter's own, for the memory report."""
        return []

    def save_last_features(self, features: mx.array) -> None:
        """Keep the features (1, F) of the last position in ``cache`` for the next request."""
        return

    def pending(self) -> list[mx.array]:
        """Arrays that the next ``propose`` starts from, for the loop to compute early."""
        return []

    @property
    def longest_draft(self) -> int | None:
        """The greatest number of tokens it drafts: 0 if it drafts none, None for no limit."""
        return None

    @property
    def cost_key(self) -> str:
        """Key for the cost of its rounds, which depends only on this and on ``modules``."""
        return type(self).__name__

    def see_target(self, caches: CacheView) -> None:
        """Read the target's caches before ``propose``; they have one slot per pair then.

        ``caches`` is valid until ``propose`` returns, and must not be changed.
        """
        return

    @property
    def supports_trees(self) -> bool:
        """Whether the drafter can propose trees."""
        return False

    def check_tree(self, shape: Tree) -> None:
        """Raise ValueError if it cannot draft that tree; called before anything is drafted."""
        raise ValueError("this drafter proposes chains only: leave the tree out.")

    def propose_tree(self, shape: Tree, pick: PickChildren) -> Draft:
        """Draft a tree to follow the last absorbed token."""
        self.check_tree(shape)
        raise NotImplementedError

    def check_embeddings(self, embeddings: mx.array) -> None:
        """Raise ValueError unless ``extend`` takes embeddings (m, h) instead of tokens."""
        raise ValueError(
            "this drafter reads tokens, and input_embeddings have none: use an EAGLE head or an "
            "MTP layer alone, or no draft model."
        )

    @property
    def supports_overlay(self) -> bool:
        """Whether it can keep drafted slots outside its caches (see ``head_cache.py``)."""
        return False

    def use_overlay(self, is_used: bool) -> None:
        """Keep drafted slots outside the caches from now on, or inside; drafts do not change."""
        return

    def batch_drafter(self) -> "BatchDrafter | None":
        """A drafter that serves several requests in shared passes; None if there is none."""
        return None

    def with_copies(self) -> Self:
        """The same drafter, except that copies from the text may replace its drafts."""
        made = copy(self)
        made.copies = CopySource()
        return made

    def with_draft_window(self, size: int | None) -> "Drafter":
        """The same weights with caches of only the newest ``size`` slots; None: of all."""
        if size is not None:
            raise ValueError(
                "a draft window is for EAGLE heads and heads of blocks, and this is another "
                "drafter: leave it out."
            )
        return self

    def with_draft_vocab(self, ids: np.ndarray) -> "Drafter":
        """The same weights, drafting only the tokens ``ids`` (n,), sorted, and its prompt's."""
        raise ValueError(
            "a draft vocabulary is for heads, MTP layers and assistants, and this is another "
            "drafter: leave it out."
        )

    def see_text(self, tokens: Callable[[], np.ndarray]) -> None:
        """Read the tokens (n,) that a request begins with, before the first ``extend``."""
        return

    def with_draft_cache(self, draft_cache: str) -> "Drafter":
        """The same weights with another way of absorbing pairs: "exact" or "lagging"."""
        if draft_cache != "exact":
            raise ValueError(
                "a lagging draft cache is for EAGLE heads that draft step by step: leave it out "
                "here."
            )
        return self


def is_drafter(draft_model: Any) -> TypeGuard[Drafter]:
    """Whether ``draft_model`` has the members of a ``Drafter``, so that our loop can use it.

    Raises ValueError for a name, which has to be opened first.
    """
    if isinstance(draft_model, str | PathLike):
        name = str(draft_model)
        raise ValueError(
            f"draft_model is the name {name!r}: give what mlx_eagle.open_drafter({name!r}, model, "
            "tokenizer) returns."
        )
    return isinstance(draft_model, Drafter)


class NullDrafter(Drafter):
    """A ``Drafter`` that absorbs and proposes nothing.

    ``num_forwards`` continues the count of the drafter that it replaces.
    """

    taps: tuple[int, ...] = ()
    longest_draft = 0

    def __init__(self, num_forwards: int = 0):
        self.cache: list[Any] = []
        self.num_forwards = num_forwards

    def begin(self, cache: list[Any] | None = None) -> "NullDrafter":
        return NullDrafter()

    def make_cache(self) -> list[Any]:
        return []

    def extend(
        self, tokens: mx.array, features: mx.array | None, last: mx.array | None = None
    ) -> None:
        """Ignore the pairs."""

    def propose(self, size: int, pick: Pick) -> Draft:
        return empty_draft()


class PendingPairs:
    """Pairs that a drafter has not absorbed yet, for one request or for several.

    Tokens are (m,), for several requests (B, m), with features (m, F) or (B, m, F) if the drafter
    takes any.
    """

    def __init__(self) -> None:
        self._rounds: list[tuple[int, mx.array, mx.array | None, Sequence[int]]] = []

    def __len__(self) -> int:
        """The greatest number of tokens of any request."""
        return max(self.lengths, default=0)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each request."""
        return [sum(counts) for counts in zip(*(r[3] for r in self._rounds), strict=True)]

    def add(
        self,
        position: int,
        tokens: mx.array,
        features: mx.array | None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Add tokens emitted from ``position`` on: the first ``lengths[b]`` of request b.

        By default all tokens.
        """
        if lengths is None:
            lengths = [tokens.shape[-1]] * (1 if tokens.ndim == 1 else tokens.shape[0])
        self._rounds.append((position, tokens, features, lengths))

    def drop_from(self, position: int) -> None:
        """Forget the tokens emitted from ``position`` on."""
        self._rounds = [each for each in self._rounds if each[0] < position]

    def keep(self, index: Sequence[int]) -> None:
        """Drop all requests except ``index``."""
        rows = mx.array([*index])
        self._rounds = [
            (at, tokens[rows], None if f is None else f[rows], [lengths[b] for b in index])
            for at, tokens, f, lengths in self._rounds
        ]

    def clear(self) -> None:
        self._rounds = []

    def flush(self, extend: Callable[[mx.array, mx.array | None], None]) -> None:
        """Give all pairs to ``extend``, and forget them once it has taken them."""
        if not self._rounds:
            return
        found = [features for _, _, features, _ in self._rounds if features is not None]
        features = mx.concatenate(found, axis=-2) if found else None
        tokens = mx.concatenate([tokens for _, tokens, _, _ in self._rounds], axis=-1)
        if tokens.ndim > 1 and sum(self.lengths) < tokens.size:
            # Of each request the rows that count, in front.
            is_kept = [np.arange(t.shape[1]) < np.array([own]).T for _, t, _, own in self._rounds]
            order = np.argsort(~np.concatenate(is_kept, axis=1), axis=1, kind="stable")
            kept_index = mx.array(order[:, : len(self)])
            tokens = mx.take_along_axis(tokens, kept_index, axis=1)
            if features is not None:
                features = mx.take_along_axis(features, kept_index[..., None], axis=1)
        extend(tokens, features)
        self.clear()


class BatchDrafter:
    """Drafts for B requests that come and go, in order: here with a drafter for each.

    ``Drafter`` explains drafting and absorbing. Subclasses share passes.
    """

    def __init__(self) -> None:
        self._drafters: list[Drafter] = []
        self._joined: list[int] = []  # forwards of each before
        self._cuts: list[tuple[Checkpoint, int]] = []
        self._views: Callable[[int], CacheView] | None = None

    def num_forwards(self, index: int) -> int:
        """Forward passes since request ``index`` joined, shared ones included."""
        return self._drafters[index].num_forwards - self._joined[index]

    def join(self, drafter: Drafter) -> None:
        """Append a request, with everything that ``drafter`` has absorbed for it."""
        self._drafters.append(drafter)
        self._joined.append(drafter.num_forwards)

    def keep(self, index: list[int]) -> None:
        """Drop all requests except ``index``."""
        self._drafters = [self._drafters[b] for b in index]
        self._joined = [self._joined[b] for b in index]
        self._cuts = [self._cuts[b] for b in index if self._cuts]

    def extract(self, index: int) -> Drafter:
        """One request's drafter, as if it had never shared passes."""
        return self._drafters[index]

    def see_target(self, caches: Any) -> None:
        """See ``Drafter.see_target``; ``caches`` are the ``RaggedCaches`` of all requests."""
        self._views = caches.view

    def propose(
        self, size: int, picks: Picks, is_asked: Sequence[bool]
    ) -> tuple[mx.array, list[int]]:
        """Drafts (B, k) int32, k at most ``size``, and the number of valid tokens in each.

        Drafts for requests whose ``is_asked`` is false are ignored.
        """
        drafts = []
        for b, drafter in enumerate(self._drafters):
            if not is_asked[b]:
                drafts.append(empty_draft().tokens)
                continue
            if self._views is not None:
                drafter.see_target(self._views(b))
            drafts.append(drafter.propose(size, picks.of_request(b)).tokens)
        self._views = None
        lengths = [len(tokens) for tokens in drafts]
        rows = [mx.pad(tokens, (0, max(lengths) - len(tokens))) for tokens in drafts]
        return mx.stack(rows), lengths

    def extend(
        self,
        tokens: mx.array,
        features: mx.array | None,
        last: mx.array | None = None,
        num_rows: Sequence[int] | None = None,
    ) -> None:
        """Absorb pairs: tokens (B, m), features (B, m, F), the first ``num_rows[b]`` of request b.

        ``last`` (B,) is as in ``Drafter.extend``; ``advance`` then says how many pairs to keep.
        """
        self._cuts = []
        for b, drafter in enumerate(self._drafters):
            num = tokens.shape[1] if num_rows is None else num_rows[b]
            self._cuts.append((Checkpoint(drafter.cache), num))
            seen = None if features is None else features[b, :num]
            drafter.extend(tokens[b, :num], seen, last=None if last is None else last[b])

    def advance(self, kept: list[int]) -> None:
        """Keep the first ``kept[b]`` of the pairs that request b absorbed last."""
        for (checkpoint, num_rows), num_kept in zip(self._cuts, kept, strict=True):
            if num_kept < num_rows:
                checkpoint.rollback(num_kept)
        self._cuts = []

    def pending(self) -> list[mx.array]:
        """Arrays that the next ``propose`` starts from, as in ``Drafter.pending``."""
        return [array for drafter in self._drafters for array in drafter.pending()]
