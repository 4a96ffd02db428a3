"""Caches of a draft head: an overlay for drafted slots, and a window on old ones.

Overlay: a draft step that appends to the cache writes to an array that the step before is still
reading. MLX copies the whole of it then, at 8000 tokens 67 MB per step for the head of an 8B
target. Whether a few more kernels are cheaper is measured.

Window (Xiao et al. 2023, arXiv:2309.17453, StreamingLLM): the first slots and the newest ones,
with the positions that they have in the text. So a draft costs the same on any context, and the
cache is of one size. mlx-lm's RotatingKVCache holds it: that type is saved with prompt caches and
can be rolled back. Its own mask leaves the first slots out; those of ``exact_masks`` have them.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ..target_model.cache_view import CacheView


class DraftOverlay:
    """Slots that a draft has added to ``cache``, which stays as it is.

    Where there is a ``window``, a slot sees only that many slots, itself the last of them; a
    draft is then a chain.
    """

    def __init__(self, cache: KVCache, window: int | None = None):
        self._keys, self._values = cache.keys_and_values()
        self._num_before = cache.offset
        self._added: list[tuple[mx.array, mx.array]] = []
        self._window = window
        self.offset = cache.offset

    def make_mask(self, *_args: object, **_kwargs: object) -> None:
        """Return None: a single row sees everything that ``attend`` shows it."""

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | None = None,
    ) -> mx.array:
        """Append keys and values (1, Hk, m, D); queries (1, H, m, D) attend to all slots.

        One softmax covers the scores of the cache and of the tail. ``mask`` (m, S) says which of
        all S slots each row sees, always all of the cache; None, for one row, means all.
        """
        self._added.append((keys, values))
        self.offset += keys.shape[2]
        tail_keys, tail_values = (
            mx.concatenate(list(arrays), axis=2) for arrays in zip(*self._added, strict=True)
        )
        num_added = tail_keys.shape[2]
        first = 0 if self._window is None else max(0, self.offset - self._window)
        before = min(first, self._num_before)
        after = max(0, first - self._num_before)
        sources = [
            (self._keys[:, :, before:], self._values[:, :, before:]),
            (tail_keys[:, :, after:], tail_values[:, :, after:]),
        ]
        # The query heads of one key head as rows of one product: (1, Hk, H / Hk * m, D).
        rows = scale * queries.reshape(1, keys.shape[1], -1, queries.shape[-1])
        scores = [rows @ k.swapaxes(-1, -2) for k, _ in sources]
        if mask is not None:
            by_row = scores[1].reshape(1, *queries.shape[1:3], num_added)
            seen = mask[:, self._num_before :]
            scores[1] = mx.where(seen, by_row, -mx.inf).reshape(scores[1].shape)
        weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1, precise=True)
        in_cache, in_tail = mx.split(weights, [self._num_before - before], axis=-1)
        out: mx.array = in_cache @ sources[0][1] + in_tail @ sources[1][1]
        return out.reshape(queries.shape)


SINKS = 4
"""First slots, which stay: heads learn to put surplus attention weight there."""


def check_window(size: int | None, own: int | None) -> None:
    """Raise ValueError for a window without slots, or if a head has its ``own`` window."""
    if size is None:
        return
    if size < 1:
        raise ValueError(
            f"the draft window is {size}: give the number of slots to keep, 1 or more, or leave "
            "it out."
        )
    if own is not None:
        raise ValueError(
            f"this head was trained with a window of {own} slots of its own: leave the draft "
            "window out."
        )


def as_plain_caches(caches: Sequence[RotatingKVCache]) -> list[KVCache]:
    """Plain caches with the slots of ``caches`` that a draft sees, in the order of the text.

    In the original ones a drafted row would overwrite slots that are needed if it is rejected.
    The copies are as long as the window, not as the text.
    """
    view = CacheView(caches)
    copies = [KVCache() for _ in caches]
    for index, copy in enumerate(copies):
        copy.keys, copy.values = view.rows(index)
        copy.offset = copy.keys.shape[2]
    return copies
