"""Drafted slots beside a head's cache, so that a draft step writes a few rows and nothing else.

A draft step that appends to the cache writes to an array that the step before is still reading:
MLX copies the whole of it then, at 8000 tokens 67 MB per step for the head of an 8B target.
Whether a few more kernels are cheaper is measured (``decoding/calibrate.py``).
"""

import mlx.core as mx
from mlx_lm.models.cache import KVCache


class Tail:
    """What a draft has added to ``cache``, which stays as it is.

    Where there is a ``window``, a slot sees the last so many only, itself included; a draft is
    then a chain.
    """

    def __init__(self, cache: KVCache, window: int | None = None):
        self._keys, self._values = cache.keys_and_values()
        self._num_before = cache.offset
        self._added: list[tuple[mx.array, mx.array]] = []
        self._window = window
        self.offset = cache.offset

    def make_mask(self, *_args: object, **_kwargs: object) -> None:
        """None: a row alone sees all that ``attend`` lets it see."""

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | None = None,
    ) -> mx.array:
        """Append keys and values (1, Hk, m, D); queries (1, H, m, D) attend to all there is.

        One softmax over the scores in the cache and those in the tail. ``mask`` (m, S) says which
        of all S slots each row sees, of those in the cache all; None, for one row, is all.
        """
        self._added.append((keys, values))
        self.offset += keys.shape[2]
        tail_keys, tail_values = (mx.concatenate(list(part), axis=2) for part in zip(*self._added))
        num_added = tail_keys.shape[2]
        first = 0 if self._window is None else max(0, self.offset - self._window)
        before, after = min(first, self._num_before), max(0, first - self._num_before)
        parts = [
            (self._keys[:, :, before:], self._values[:, :, before:]),
            (tail_keys[:, :, after:], tail_values[:, :, after:]),
        ]
        # The query heads of one key head as rows of one product: (1, Hk, H / Hk * m, D).
        rows = scale * queries.reshape(1, keys.shape[1], -1, queries.shape[-1])
        scores = [rows @ k.swapaxes(-1, -2) for k, _ in parts]
        if mask is not None:
            by_row = scores[1].reshape(1, *queries.shape[1:3], num_added)
            seen = mask[:, self._num_before :]
            scores[1] = mx.where(seen, by_row, -mx.inf).reshape(scores[1].shape)
        weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1, precise=True)
        in_cache, in_tail = mx.split(weights, [self._num_before - before], axis=-1)
        out = in_cache @ parts[0][1] + in_tail @ parts[1][1]
        return out.reshape(queries.shape)
