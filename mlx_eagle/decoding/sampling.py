"""A sampler whose noise belongs to a position: temperature, top-p, min-p, top-k.

Log-probabilities in, log-probabilities or tokens out. The target's p and the draft's q are both
made here, in float32, so that they are the same function of the logits.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from math import isfinite
from numbers import Integral, Real
from typing import Any, Protocol, TypeGuard, cast

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..drafters.base import Draft

Sampler = Callable[[mx.array], mx.array]
"""Draws from log-probabilities (B, V), as mlx-lm's samplers do: tokens (B,)."""

OTHER_ROW = 4  # sets the keys of other rows apart from the kinds of noise, which are smaller


@dataclass
class Sampling:
    """A sampler for ``sampler=``: the same seed gives the same text, drafted or not.

    The token at the n-th generated position is ``argmax(log p + g_n)`` with Gumbel noise g_n
    that depends on ``seed``, ``row`` and n alone, which is an exact draw from p (Gumbel 1954;
    Maddison et al. 2014, arXiv:1411.0030). A draft that adds the same noise to its own log q
    agrees with the target nearly as often as any coupling can.

    Without a ``seed`` every generation draws fresh noise. It follows mlx's global random state,
    so that ``mx.random.seed`` makes it repeatable in the main thread. ``row`` is the place in a
    batch: ``batch_generate`` gives prompt b the noise of row b, so that equal prompts get
    different texts, and a text can be had again alone with the same seed and ``row=b``.

    Called like an mlx-lm sampler, on log-probabilities (B, V), it draws for position 0, 1, 2 and
    so on, row by row; ``begin`` gives one that starts at 0. Both work in any thread.

    Raises ValueError for a temperature that is not above 0, or a seed out of range.
    """

    temp: float = 1.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    seed: int | None = None
    row: int = 0
    _calls: int = field(default=0, init=False, repr=False, compare=False)
    base_key: mx.array = field(init=False, repr=False, compare=False)  # of all positions' keys

    def __post_init__(self) -> None:
        if not isinstance(self.temp, Real) or not self.temp > 0 or not isfinite(self.temp):
            raise ValueError(
                f"the temperature is {self.temp}: sampling needs a number above 0 (greedy "
                "decoding needs no sampler)."
            )
        if self.seed is not None and not _is_seed(self.seed):
            raise ValueError(
                f"the seed is {self.seed}: give a whole number from 0 to 2**64 - 1, or None."
            )
        base = _fresh_key() if self.seed is None else mx.random.split(mx.random.key(self.seed))[0]
        self.base_key = base if self.row == 0 else _key_of_row(base, self.row)
        # In the thread that made it: another one could not compute what is still to be done.
        mx.eval(self.base_key)

    def begin(self, row: int = 0) -> "Sampling":
        """The sampler of one generation: at position 0, with fresh noise unless a seed was given.

        ``row`` counts from this sampler's own.
        """
        return replace(self, row=self.row + row)

    def log_probabilities(self, logprobs: mx.array) -> mx.array:
        """Log-probabilities (R, V) of a model -> those that tokens are drawn from, float32.

        Filters in mlx-lm's order, temperature last; -inf where a token was filtered out.
        """
        x = self.scores(logprobs, is_normalized=True)
        return x - mx.logsumexp(x, axis=-1, keepdims=True)

    def scores(self, logits: mx.array, is_normalized: bool = False) -> mx.array:
        """The same up to a constant per row, which is enough to draw by noise; of any logits.

        ``is_normalized``: they are log-probabilities.
        """
        x = logits.astype(mx.float32)
        if 0 < self.top_p < 1.0:
            if not is_normalized:
                x = x - mx.logsumexp(x, axis=-1, keepdims=True)
            x = apply_top_p(x, self.top_p)
        if self.min_p != 0.0:
            x = apply_min_p(x, self.min_p, self.min_tokens_to_keep)
        if self.top_k > 0:
            x = apply_top_k(x, self.top_k)
        return x if self.temp == 1 else x / float(self.temp)

    @property
    def filters(self) -> str:
        """The names of those that are in use."""
        in_use = {"top_p": 0 < self.top_p < 1, "min_p": self.min_p != 0, "top_k": self.top_k > 0}
        return " ".join(name for name, is_used in in_use.items() if is_used) or "without filters"

    def noise(self, position: int, size: int, kind: int = 0) -> mx.array:
        """Gumbel noise (size,) of a generated position; ``kind``, 0 to 3, separates uses."""
        return mx.random.gumbel((size,), key=self.key(position, kind))

    def noises(self, position: int, num: int, size: int) -> mx.array:
        """``noise`` (num, size) of that position and those after it, in one go."""
        if num == 1:
            return self.noise(position, size)[None]
        numbers = mx.array([[0, position + i] for i in range(num)], dtype=mx.uint32)
        return mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(self.base_key ^ numbers)

    def key(self, position: int, kind: int = 0) -> mx.array:
        """The random key of a generated position; ``kind``, 0 to 3, separates uses."""
        return _mixed(self.base_key, kind, position)

    @property
    def parameters(self) -> tuple[float, ...]:
        """All that ``log_probabilities`` depends on."""
        return self.temp, self.top_p, self.min_p, self.min_tokens_to_keep, self.top_k

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draw the next token of each row, (B, V) -> (B,)."""
        num_rows, size = logprobs.shape
        noise = self.noise(self._calls, size)
        if num_rows > 1:
            keys = [_key_of_row(self.base_key, row) for row in range(1, num_rows)]
            others = [mx.random.gumbel((size,), key=_mixed(key, 0, self._calls)) for key in keys]
            noise = mx.stack([noise, *others])
        self._calls += 1
        return mx.argmax(self.scores(logprobs, is_normalized=True) + noise, axis=-1)


def noise_of_rows(keys: mx.array, positions: mx.array, size: int) -> mx.array:
    """Noise (n, R, size) of positions (n, R), row by row that of a ``Sampling``.

    ``keys`` (n, 2) are their ``base_key``. All in a few operations, however many there are.
    """
    numbers = mx.stack([mx.zeros_like(positions), positions], axis=-1).astype(mx.uint32)
    draw = mx.vmap(mx.vmap(lambda key: mx.random.gumbel((size,), key=key)))
    return draw(keys[:, None] ^ numbers)


def _is_seed(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**64


def _mixed(key: mx.array, kind: int, number: int) -> mx.array:
    return key ^ mx.array([kind, number], dtype=mx.uint32)


def _key_of_row(key: mx.array, row: int) -> mx.array:
    return mx.random.split(_mixed(key, OTHER_ROW, row))[0]


def _fresh_key() -> mx.array:
    """A key from mlx's global random state, whose every thread starts at the same numbers."""
    key = mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)
    if threading.current_thread() is threading.main_thread():
        return key
    return _mixed(key, 0, next(_draws_of_threads()) % 2**32)


@cache
def _draws_of_threads() -> Iterator[int]:
    """How many keys threads other than the main one have drawn.

    A count, and no other source of chance: the processes of a sharded model draw alike.
    """
    return count(1)


@dataclass(frozen=True)
class SamplingOptions:
    """What mlx-lm's ``make_sampler`` takes, and the acceptance rule (None: the best there is)."""

    temp: float
    top_p: float
    min_p: float
    top_k: int
    xtc_probability: float
    xtc_threshold: float
    min_tokens_to_keep: int = 1
    acceptance: str | None = None


def sampler_for(
    options: SamplingOptions, tokenizer: TokenizerWrapper, seed: int | None
) -> Sampler | None:
    """None for greedy decoding, a ``Sampling`` where the draft can share its noise, else mlx-lm's.

    ``seed`` is the ``Sampling``'s; mlx-lm's sampler follows mlx's global random state.
    """
    if options.temp == 0:
        return None
    filters: dict[str, Any] = {
        "temp": options.temp,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "min_tokens_to_keep": options.min_tokens_to_keep,
        "top_k": options.top_k,
    }
    if options.acceptance != "match" and options.xtc_probability == 0:
        return Sampling(**filters, seed=seed)
    return make_sampler(
        **filters,
        xtc_probability=options.xtc_probability,
        xtc_threshold=options.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )


LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class GrammarText(Protocol):
    """What a grammar allows in one text; it is told the text once that is decided.

    A logits processor's ``begin_text()`` makes one, if it knows by the text alone which tokens may
    come next.
    """

    def start(self, prompt: list[int]) -> None:
        """Begin behind ``prompt``."""

    def follow(self, tokens: list[int]) -> None:
        """Go on with tokens that are part of the text now."""

    def forced(self, most: int) -> list[int]:
        """At most so many tokens that must come next."""

    def masks(self, asked: "Sequence[RowsAsked]") -> list[Any]:
        """Which tokens may follow each row of each of ``asked``: arrays (R, V / 32) of bits.

        They may be of other texts, by grammars of this class.
        """


@dataclass(frozen=True)
class RowsAsked:
    """The rows of one text's verify pass: the root's, and one for each draft token.

    ``parents`` are those of ``Draft.known_parents``.
    """

    text: GrammarText
    drafts: list[int]
    parents: Sequence[int] | None


def allowed_of(bits: mx.array, size: int) -> mx.array:
    """Booleans (R, size) from bits (R, W), 32 tokens in each; tokens beyond are not allowed."""
    spread = (bits[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = spread.reshape(bits.shape[0], -1)[:, :size].astype(mx.bool_)
    missing = size - allowed.shape[1]
    return mx.pad(allowed, [(0, 0), (0, missing)]) if missing > 0 else allowed


Pass = tuple["LogitsProcessors", list[int], Sequence[int] | None]
"""One text's rows of a verify pass: draft tokens, and parents as in ``RowsAsked``."""


def ask_grammars(passes: Sequence[Pass], size: int) -> None:
    """Ask all grammars of all texts at once which of ``size`` tokens may follow each row.

    The processors of each text keep the answer for the pass.
    """
    asked = [
        RowsAsked(text, drafts, parents)
        for processors, drafts, parents in passes
        for text in processors.grammars
    ]
    bits = asked[0].text.masks(asked)
    allowed = allowed_of(mx.array(np.concatenate(bits)), size)
    start = 0
    for processors, drafts, _ in passes:
        processors.allowed = []
        for _ in processors.grammars:
            processors.allowed.append(allowed[start : start + 1 + len(drafts)])
            start += 1 + len(drafts)


class LogitsProcessors:
    """The logits processors of one generation, over the rows of its verify passes.

    Grammars are asked before which tokens may follow each row: see ``ask_grammars``.

    A row that is rejected must leave no trace in a processor that keeps a state. Those of mlx-lm
    keep none, nor do those with a true ``is_pure``: they run over all rows of a pass. Others do
    so where each row can go on from a ``copy()`` after the row before, or, in chains, where
    ``rollback(n)`` takes the last n calls back. With any other, row r is processed only once row
    r - 1 is known to be accepted (see ``RowsInTurn``): the host waits for each row that is kept.
    """

    def __init__(self, processors: Sequence[LogitsProcessor] = ()):
        self._processors = tuple(processors)
        texts = [p.begin_text() for p in self._processors if is_grammar(p)]
        self.grammars: list[GrammarText] = texts
        self.allowed: list[mx.array] = []  # (R, V) by each of them, in the pass under way
        self._after: list[tuple[LogitsProcessor, ...]] = []  # each row of the pass under way
        self._num_called = 0

    def __len__(self) -> int:
        return len(self._processors)

    def start(self, prompt: mx.array) -> None:
        """Begin a text behind ``prompt`` (N,)."""
        for grammar in self.grammars:
            grammar.start(cast(list[int], prompt.tolist()))

    def forced(self, most: int) -> list[int]:
        """At most so many tokens that must come next, where a grammar says so."""
        return next((found for g in self.grammars if (found := g.forced(most))), [])

    def run_at_once(self, draft: Draft) -> bool:
        """Whether all rows of a pass over ``draft`` may be processed before any is accepted."""
        return len(draft) == 0 or all(
            is_pure(p)
            or is_grammar(p)
            or is_copied(p)
            or (draft.parents is None and can_roll_back(p))
            for p in self._processors
        )

    def process(self, history: mx.array, draft: Draft, logits: mx.array) -> mx.array:
        """Run logits (k + 1, V) through the processors, each row with the tokens before it.

        ``history`` (N,) ends with the root; row r sees it with the draft tokens on its path
        behind. How long the paths in a tree are has to be known here: where the tree grew on the
        device, the draft is waited for, and the device goes on with the pass meanwhile.
        """
        if len(self.grammars) == len(self._processors):
            for allowed in self.allowed:
                logits = mx.where(allowed, logits, -mx.inf)
            return logits
        if draft.parents is not None and not draft.form:
            mx.async_eval(logits)
        self._take_back(self._num_called)  # of a pass that nothing came of
        parents = draft.known_parents()
        self._after, rows = [], []
        for r in range(logits.shape[0]):
            before = self._processors
            if r > 0:
                before = self._after[r - 1 if parents is None else parents[r - 1]]
            self._after.append(tuple(p.copy() if is_copied(p) else p for p in before))
            rows.append(self._processed(self._after[r], history, draft, parents, logits, r))
        self._num_called = len(rows)
        return mx.concatenate(rows)

    def process_row(self, history: mx.array, draft: Draft, logits: mx.array, row: int) -> mx.array:
        """The same for one row alone, (1, V), which is kept."""
        parents = draft.known_parents()
        return self._processed(self._processors, history, draft, parents, logits, row)

    def commit(self, last_row: int, num_rows: int, run: list[int]) -> None:
        """Go on from the state after ``last_row``, the last of ``num_rows`` that are kept.

        ``run`` are the tokens that follow these rows; grammars need them.
        """
        if self._after:
            self._processors = self._after[last_row]
            self._take_back(self._num_called - num_rows)
        for grammar in self.grammars:
            grammar.follow(run)

    def _take_back(self, num_calls: int) -> None:
        for processor in self._processors:
            if num_calls > 0 and can_roll_back(processor):
                processor.rollback(num_calls)
        self._after, self._num_called = [], 0

    def _processed(
        self,
        processors: Sequence[LogitsProcessor],
        history: mx.array,
        draft: Draft,
        parents: Sequence[int] | None,
        logits: mx.array,
        row: int,
    ) -> mx.array:
        """One row (1, V) of logits through the processors, with the tokens before it."""
        if parents is None:
            path = draft.tokens[:row]
        else:
            above: list[int] = []
            at = row
            while at > 0:
                above.insert(0, at - 1)
                at = parents[at - 1]
            path = draft.tokens[mx.array(above, mx.int32)]
        tokens = mx.concatenate([history, path.astype(history.dtype)])
        made = logits[row : row + 1]
        allowed = iter(self.allowed)
        for processor in processors:
            if is_grammar(processor):
                made = mx.where(next(allowed)[row], made, -mx.inf)
            else:
                made = processor(tokens, made)
        return made


def is_pure(processor: LogitsProcessor) -> bool:
    """Whether it keeps no state: mlx-lm's own, and those that say so."""
    is_of_mlx_lm = getattr(processor, "__module__", None) == make_sampler.__module__
    return is_of_mlx_lm or getattr(processor, "is_pure", False) is True


def is_grammar(processor: LogitsProcessor) -> TypeGuard[Any]:
    """Whether it has a ``GrammarText``."""
    return hasattr(processor, "begin_text")


def is_copied(processor: LogitsProcessor) -> TypeGuard[Any]:
    """Whether it can be gone on from in several ways, by copies in the same state."""
    return hasattr(processor, "copy") and not is_pure(processor)


def can_roll_back(processor: LogitsProcessor) -> TypeGuard[Any]:
    """Whether it can forget its last calls."""
    is_copied_or_pure = hasattr(processor, "copy") or is_pure(processor)
    return hasattr(processor, "rollback") and not is_copied_or_pure
