"""The caches of several requests in one, each cut back by its own number of rows.

mlx-lm's batch caches keep all sequences aligned on the right, each with padding on its left. A
sequence that keeps fewer rows than another is moved right by the difference.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, KVCache, RotatingKVCache, dynamic_roll

MOST_PADDING = 64  # columns that no sequence uses, before they are taken out


def can_batch(cache: list) -> bool:
    """Whether a request's caches can be merged with others', and cut row by row, exactly.

    Not recurrent states, which cannot be cut, and not what mlx-lm has no batch form of.
    """
    return all(type(c) is KVCache or (type(c) is RotatingKVCache and c.keep == 0) for c in cache)


class BatchCache:
    """The caches of B requests as one list of batch caches, for a model called on (B, R) tokens.

    Made from each request's own caches, which stay as they are. A window (the R rows of a pass)
    is opened, run and cut. One of a single row is kept whole; one of more leaves a
    RotatingKVCache in time order, so that its end can be cut.
    """

    def __init__(self, caches: list[list]):
        self.layers: list[Any] = [layer[0].merge(list(layer)) for layer in zip(*caches)]
        self._lengths = [max((c.offset for c in cache), default=0) for cache in caches]

    def open(self, num_rows: int) -> None:
        """Make ready for a window of ``num_rows``."""
        for layer in self.layers:
            if num_rows > 1 and type(layer) is BatchRotatingKVCache:
                # Its mask takes ``_idx`` for a length, which it is not after windows of one row.
                layer._temporal_order()

    def cut(self, num_rows: int, kept: list[int]) -> None:
        """Of the window of ``num_rows`` just run, keep the first ``kept[b]`` rows of request b."""
        most = max(kept)
        fewer = [most - n for n in kept]  # rows than the request that keeps the most
        self._lengths = [length + n for length, n in zip(self._lengths, kept)]
        for layer in self.layers:
            if layer.keys is None:
                continue  # a layer that does not attend
            _drop_last(layer, num_rows - most)
            if any(fewer):
                _move_right(layer, mx.array(fewer))
        widths = [c._idx for c in self.layers if type(c) is not BatchRotatingKVCache]
        if widths and max(widths) - max(self._lengths) > MOST_PADDING:
            self.keep_requests(list(range(len(self._lengths))))

    def keep_requests(self, index: list[int]) -> None:
        """Drop all requests but these."""
        self._lengths = [self._lengths[b] for b in index]
        for layer in self.layers:
            layer.filter(index)

    def extract(self, index: int) -> list:
        """One request's caches, as they would be had it been decoded alone."""
        return [KVCache() if c.keys is None else c.extract(index) for c in self.layers]


def _drop_last(layer: Any, num_rows: int) -> None:
    """Drop the last rows of every sequence."""
    if num_rows == 0:
        return
    if type(layer) is BatchRotatingKVCache:
        length = layer.keys.shape[2] - num_rows
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
        layer.offset = layer.offset - num_rows
        layer._offset -= num_rows
        layer._idx = length
    else:
        layer.trim(num_rows)


def _move_right(layer: Any, num_columns: mx.array) -> None:
    """Move sequence b right by ``num_columns[b]``, its last ones becoming padding on its left."""
    layer.keys = dynamic_roll(layer.keys, num_columns[:, None], axis=2)
    layer.values = dynamic_roll(layer.values, num_columns[:, None], axis=2)
    layer.offset = layer.offset - num_columns
    layer.left_padding = layer.left_padding + num_columns
