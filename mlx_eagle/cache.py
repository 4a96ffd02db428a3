"""Cutting a forward pass back to the rows that were kept, for each cache type.

Knows mlx-lm's caches; knows nothing of tokens or drafts.
"""

from mlx_lm.models.cache import KVCache

SUPPORTED = (KVCache,)
"""Cache types whose rollback is proved by tests. Matched exactly: a subclass may keep more."""


def check_supported(caches: list, whose: str) -> None:
    """Raise ValueError naming the first cache that cannot be rolled back exactly."""
    for cache in caches:
        if type(cache) not in SUPPORTED:
            names = ", ".join(kind.__name__ for kind in SUPPORTED)
            raise ValueError(
                f"the {whose} uses a {type(cache).__name__}, which speculative decoding cannot "
                f"roll back exactly yet (it can: {names}); generate without a draft model."
            )


class Window:
    """What comes on top of a list of caches from now on, to be cut to its first rows."""

    def __init__(self, caches: list):
        self._caches = caches
        self._starts = [cache.offset for cache in caches]

    def keep(self, num_rows: int) -> None:
        """Drop every row after the first ``num_rows``; rows cut before stay cut.

        Works also when the pass broke off half-way, with some caches updated and some not.
        """
        for cache, start in zip(self._caches, self._starts):
            surplus = cache.offset - (start + num_rows)
            if surplus > 0:
                cache.trim(surplus)
