"""Caches of earlier requests: what a drafter must find where one sequence goes on."""

import mlx.core as mx
from helpers import PROMPT, plain, speculative, tiny_head, tiny_llama
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.server.caches import Caches, PairCache, prepare


def test_the_drafter_misses_nothing_at_a_seam():
    """After reuse of a trimmed text, the head's slots are those of a head that saw it whole."""
    model = tiny_llama()
    drafter = tiny_head(model)
    num_target, store = len(make_prompt_cache(model)), PairCache()

    def slots(caches: list) -> list[mx.array]:
        return [a[..., : len(text) - 1, :] for a in caches[num_target].keys_and_values()]

    caches = prepare(None, model, drafter, [])
    tokens, _ = speculative(model, drafter, PROMPT, 10, prompt_cache=caches)
    store.insert_cache("key", PROMPT + tokens, caches)
    text = PROMPT + tokens[:6] + [50, 51, 52]
    whole = prepare(None, model, drafter, [])
    speculative(model, drafter, text, 1, prompt_cache=whole)
    for is_prepared in (False, True):
        fetched, rest = store.fetch("key", text)
        assert len(rest) == 3
        if is_prepared:
            fetched = prepare(fetched, model, drafter, text[: -len(rest)])
        speculative(model, drafter, rest, 1, prompt_cache=fetched)
        same = [
            mx.allclose(a, b, atol=1e-4).item()
            for a, b in zip(slots(fetched), slots(whole), strict=True)
        ]
        assert all(same) == is_prepared


def test_caches_without_a_drafters_part_get_one():
    model = tiny_llama()
    drafter = tiny_head(model)
    caches = make_prompt_cache(model)
    tokens = plain(model, PROMPT, 5, prompt_cache=caches)
    store = PairCache()
    store.insert_cache("key", PROMPT + tokens, caches)  # as of a plain answer
    fetched, _rest = store.fetch("key", PROMPT + tokens + [1, 2])
    pair_caches = prepare(fetched, model, drafter, PROMPT + tokens)
    assert len(pair_caches.draft) == len(drafter.make_cache())
    store.insert_cache("key", PROMPT + tokens + [1], Caches(pair_caches, len(caches)))
    assert len(store.fetch("key", PROMPT + tokens + [1, 2])[0].target) == len(caches)
    assert not prepare(pair_caches, model, None, PROMPT + tokens).draft
