"""Our own sampler: temperature, top-p, min-p, top-k, with noise that belongs to a position.

Logits in, log-probabilities or tokens out; knows neither draft nor target. Both the target's
p and the draft's q are made here, in float32, so that they are the same function of logits.
"""

from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p


@dataclass
class Sampling:
    """A sampler for ``sampler=``: the same seed gives the same text, drafted or not.

    The token at the n-th generated position is ``argmax(log p + g_n)`` with Gumbel noise g_n
    that depends on ``seed`` and n alone, which is an exact draw from p (Gumbel 1954; Maddison
    et al. 2014, arXiv:1411.0030). A draft that adds the same noise to its own log q agrees
    with the target nearly as often as any coupling can.

    Called like an mlx-lm sampler, on log-probabilities (1, V), it draws for position 0, 1, 2
    and so on; ``restart`` begins again at 0. ``temp`` must be positive. ``seed`` None takes one
    from mlx's global random state.
    """

    temp: float = 1.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    seed: int | None = None
    _calls: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if not self.temp > 0:
            raise ValueError(
                f"the temperature is {self.temp}: sampling needs one above 0 (greedy decoding "
                "needs no sampler)."
            )
        if self.seed is None:
            self._key = mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)
        else:
            self._key = mx.random.split(mx.random.key(self.seed))[0]

    def log_probabilities(self, logprobs: mx.array) -> mx.array:
        """Log-probabilities (R, V) of a model -> those that tokens are drawn from, float32.

        Filters in mlx-lm's order, temperature last; -inf where a token was filtered out.
        """
        x = logprobs.astype(mx.float32)
        if 0 < self.top_p < 1.0:
            x = apply_top_p(x, self.top_p)
        if self.min_p != 0.0:
            x = apply_min_p(x, self.min_p, self.min_tokens_to_keep)
        if self.top_k > 0:
            x = apply_top_k(x, self.top_k)
        x = x / self.temp
        return x - mx.logsumexp(x, axis=-1, keepdims=True)

    def noise(self, position: int, size: int, kind: int = 0) -> mx.array:
        """Gumbel noise (size,) of a generated position; ``kind`` separates uses."""
        return mx.random.gumbel((size,), key=self.key(position, kind))

    def key(self, position: int, kind: int = 0) -> mx.array:
        """The random key of a generated position; ``kind`` separates uses."""
        return self._key ^ mx.array([kind, position], dtype=mx.uint32)

    def restart(self) -> None:
        """Begin again at position 0."""
        self._calls = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draw the next token, (1, V) -> (1,)."""
        x = self.log_probabilities(logprobs) + self.noise(self._calls, logprobs.shape[-1])
        self._calls += 1
        return mx.argmax(x, axis=-1)
