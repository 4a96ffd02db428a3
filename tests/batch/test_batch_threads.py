"""All ways to generate at the same time, in threads, on one model with one drafter."""

from collections.abc import Callable

import mlx_lm
import pytest
from at_once import in_threads
from helpers import byte_tokenizer, tiny_head, tiny_llama

from mlx_eagle import Sampling, batch_generate, stream_generate
from mlx_eagle.drafters.tree import parse_tree

NUM_TOKENS = 10
PROMPTS = [[5, 17, 42, 8, 3, 77], [9, 33, 7], [50, 51, 52, 3, 200]]
SEED = 2**64 - 1
Texts = list[list[int]]


def ways() -> tuple[dict[str, Callable[[], Texts]], Callable[[], Texts]]:
    """What gives the same texts each time, by name, and what gives others each time."""
    model, tokenizer = tiny_llama(vocab_size=258), byte_tokenizer()
    drafter = tiny_head(model)

    def streamed(prompts: Texts = PROMPTS, **options) -> Texts:
        generate = stream_generate if options else mlx_lm.stream_generate
        options = {"draft_model": drafter} | options if options else {}
        return [
            [r.token for r in generate(model, tokenizer, prompt, NUM_TOKENS, **options)]
            for prompt in prompts
        ]

    def batched(**options) -> Texts:
        response = batch_generate(
            model,
            tokenizer,
            PROMPTS,
            max_tokens=NUM_TOKENS,
            return_token_ids=True,
            draft_model=drafter,
            num_draft_tokens=3,
            **options,
        )
        return response.token_ids

    def seeded() -> Texts:
        return streamed(num_draft_tokens=3, sampler=Sampling(temp=1.0, seed=SEED))

    repeatable = {
        "plain": streamed,
        "chains": lambda: streamed(num_draft_tokens=3),
        "trees": lambda: streamed(num_draft_tokens=3, tree=parse_tree("2x3:6")),
        "batches": batched,
        "seeded": seeded,
        "sampled batches": lambda: batched(sampler=Sampling(temp=1.0, seed=0)),
    }
    fresh = Sampling(temp=5.0)  # made here, used in other threads
    return repeatable, lambda: streamed(PROMPTS[:1] * 3, num_draft_tokens=3, sampler=fresh)


@pytest.mark.exhaustive
def test_all_ways_at_once_give_the_texts_of_one_after_the_other():
    repeatable, fresh = ways()
    expected = {name: work() for name, work in repeatable.items()}
    for name in ("chains", "trees", "batches"):
        assert expected[name] == expected["plain"]
    assert expected["seeded"] != expected["plain"]
    together = [*repeatable.values(), *list(repeatable.values())[::-1], fresh, fresh]
    *found, first, second = in_threads(*together)
    names = [*repeatable, *list(repeatable)[::-1]]
    for name, texts in zip(names, found, strict=True):
        assert texts == expected[name], f"{name}: {texts!r}"
    assert isinstance(first, list) and isinstance(second, list), (first, second)
    assert len({tuple(text) for text in [*first, *second]}) == 6, "fresh noise each time"
    assert {name: work() for name, work in repeatable.items()} == expected
