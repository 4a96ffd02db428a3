"""Prompt caches of earlier requests: the target's with the drafter's part behind them.

mlx-lm's store files and trims them; what a drafter adds is here.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    LRUPromptCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from ..batch.requests import Request
from ..drafters.base import Drafter
from ..target.taps import Target


class Caches(list):
    """The caches of one sequence: the first ``num_target`` are the target's, others the drafter's.

    ``num_tokens`` is the length of the sequence when they were filed; trimming does not change it.
    ``is_whole``: the drafter's part had all that it keeps of the last token then.
    """

    def __init__(self, caches: list, num_target: int | None = None, is_whole: bool = True):
        super().__init__(caches)
        self.num_target = len(caches) if num_target is None else num_target
        self.num_tokens = 0
        self.is_whole = is_whole

    @property
    def target(self) -> list:
        return list(self[: self.num_target])

    @property
    def draft(self) -> list:
        return list(self[self.num_target :])


class DraftPart:
    """A drafter's caches as the store sees them: one that can always be trimmed.

    Windows that are full cannot, and are dropped: the text is still found, and the drafter starts
    cold.
    """

    def __init__(self, caches: list):
        self.caches = caches

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, num_tokens: int) -> int:
        if can_trim_prompt_cache(self.caches):
            trim_prompt_cache(self.caches, num_tokens)
        else:
            self.caches = []
        return num_tokens


def without_last(request: Request) -> Caches | None:
    """What is to be filed of a text that ended in shared rounds, up to its last token but one.

    That token was not run yet: a request that continues the text will run it, with what follows.
    None where the caches cannot be trimmed to that.
    """
    decoder = request.decoder
    target, draft = decoder.cache, decoder.drafter.cache
    if not can_trim_prompt_cache(target) or not can_trim_prompt_cache(draft):
        return None
    trim_prompt_cache(draft, 1)
    return Caches(target + draft, len(target), is_whole=False)


class PairCache(LRUPromptCache):
    """mlx-lm's store of caches, some of them with a drafter's part."""

    def insert_cache(
        self,
        model: Any,
        tokens: list[int],
        prompt_cache: list,
        *,
        cache_type: str = "assistant",
    ) -> None:
        """File the caches of the text ``tokens``."""
        caches = prompt_cache if isinstance(prompt_cache, Caches) else Caches(prompt_cache)
        part = [DraftPart(caches.draft)] if caches.draft else []
        filed = Caches(caches.target + part, caches.num_target, caches.is_whole)
        filed.num_tokens = len(tokens)
        super().insert_cache(model, tokens, filed, cache_type=cache_type)

    def fetch(self, model: Any, tokens: list[int]) -> tuple[Caches | None, list[int]]:
        """A copy of the caches that fit best, and the tokens not in them: one at least.

        mlx-lm leaves none where it knows the whole text, and then has nothing to run.
        """
        filed, rest = self.fetch_nearest_cache(model, tokens[:-1])
        rest = rest + tokens[-1:]
        if filed is None:
            return None, rest
        draft = [cache for part in filed.draft for cache in part.caches]
        caches = Caches(filed.target + draft, filed.num_target, filed.is_whole)
        caches.num_tokens = filed.num_tokens
        return caches, rest


def prepare(
    caches: Caches | None, model: nn.Module, drafter: Drafter | None, text: list[int]
) -> Caches:
    """Caches that hold ``text``, as fetched, made ready for the next request.

    Without a drafter the result has no drafter's part, which would fall behind. With one it
    has: a fresh part where there was none, so the drafter starts cold; and where the text was
    trimmed to ``text``, or they were not whole, what the drafter keeps of its last token is made.
    """
    if caches is None:
        caches = Caches(make_prompt_cache(model))
    if drafter is None:
        return Caches(caches.target)
    is_whole = caches.is_whole and caches.num_tokens == len(text)
    if not caches.draft:
        caches += drafter.make_cache()
    elif drafter.taps and text and not is_whole:
        # The pair at the seam couples the features of the last token with the token to come,
        # and the features that were held belong to a token that has been trimmed away.
        target = caches.target
        trim_prompt_cache(target, 1)
        _, features = Target(model, drafter.taps)(mx.array(text[-1:]), target)
        drafter.begin(caches.draft).save_last_features(features)
        mx.eval(features)
    return caches
