"""A sampler whose noise depends on the position: temperature, top-p, min-p, top-k.

Log-probabilities in, log-probabilities or tokens out. The target's p and the draft's q are both
made here, in float32, so that they are the same function of the logits.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from math import isfinite
from numbers import Integral, Real
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

Sampler = Callable[[mx.array], mx.array]
"""Draws from log-probabilities (B, V), as mlx-lm's samplers do: tokens (B,)."""

OTHER_ROW = 4  # sets the keys of other rows apart from the purposes, which are smaller


@dataclass
class Sampling:
    """A sampler for ``sampler=``: the same seed gives the same text, drafted or not.

    The token at the n-th generated position is ``argmax(log p + g_n)`` with Gumbel noise g_n
    that depends only on ``seed``, ``row`` and n, which is an exact draw from p (Gumbel 1954;
    Maddison et al. 2014, arXiv:1411.0030). A draft that adds the same noise to its own log q
    agrees with the target nearly as often as any coupling can.

    Without a ``seed`` every generation draws fresh noise. It follows mlx's global random state,
    so that ``mx.random.seed`` makes it repeatable in the main thread. ``row`` is the place in a
    batch: ``batch_generate`` gives prompt b the noise of row b, so that equal prompts get
    different texts, and one text can be made again by itself with the same seed and ``row=b``.

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
        # In the thread that made it, since another thread could not compute it.
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
        """``log_probabilities`` up to a constant per row, enough to draw by noise; of any logits.

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
        """The names of the filters that are in use."""
        in_use = {"top_p": 0 < self.top_p < 1, "min_p": self.min_p != 0, "top_k": self.top_k > 0}
        return " ".join(name for name, is_used in in_use.items() if is_used) or "without filters"

    def noise(self, position: int, size: int, purpose: int = 0) -> mx.array:
        """Gumbel noise (size,) of a generated position; ``purpose``, 0 to 3, separates uses."""
        return mx.random.gumbel((size,), key=self.key(position, purpose))

    def noises(self, position: int, num: int, size: int, purpose: int = 0) -> mx.array:
        """``noise`` (num, size) of that position and the next ones, in one call."""
        if num == 1:
            return self.noise(position, size, purpose)[None]
        keys = self.keys(position, num, purpose)
        return mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)

    def keys(self, position: int, num: int, purpose: int = 0) -> mx.array:
        """``key`` (num, 2) of that position and the next ones."""
        numbers = mx.array([[purpose, position + i] for i in range(num)], dtype=mx.uint32)
        return self.base_key ^ numbers

    def key(self, position: int, purpose: int = 0) -> mx.array:
        """The random key of a generated position; ``purpose``, 0 to 3, separates uses."""
        return _mixed(self.base_key, purpose, position)

    @property
    def parameters(self) -> tuple[float, ...]:
        """Everything that ``log_probabilities`` depends on."""
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
    """Noise (n, R, size) of positions (n, R), the same numbers as each ``Sampling`` makes.

    ``keys`` (n, 2) are their ``base_key``. Takes a few operations, whatever n and R are.
    """
    numbers = mx.stack([mx.zeros_like(positions), positions], axis=-1).astype(mx.uint32)
    draw = mx.vmap(mx.vmap(lambda key: mx.random.gumbel((size,), key=key)))
    return draw(keys[:, None] ^ numbers)


def _is_seed(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**64


def _mixed(key: mx.array, purpose: int, number: int) -> mx.array:
    return key ^ mx.array([purpose, number], dtype=mx.uint32)


def _key_of_row(key: mx.array, row: int) -> mx.array:
    return mx.random.split(_mixed(key, OTHER_ROW, row))[0]


def _fresh_key() -> mx.array:
    """A key from mlx's global random state, whose every thread starts at the same numbers."""
    key = mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)
    if threading.current_thread() is threading.main_thread():
        return key
    return _mixed(key, 0, next(_thread_draws) % 2**32)


_thread_draws = count(1)
"""Number of the next key that a thread other than the main one draws.

A count, and no other source of chance: the processes of a sharded model draw alike.
"""


@dataclass(frozen=True)
class SamplingOptions:
    """Arguments of mlx-lm's ``make_sampler``, and the acceptance rule (None: the best one)."""

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
