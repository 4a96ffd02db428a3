"""A prompt given as embeddings, as images give them: the text is that of mlx-lm without us."""

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from drafter_pairs import LLAMA, PAIRS, tiny_gemma3
from grids import thorough
from helpers import PROMPT, byte_tokenizer, plain, speculative, tiny_head
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import does_model_support_input_embeddings

import mlx_eagle
from mlx_eagle.drafters.base import Drafter
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.drafters.model_drafter import ModelDrafter
from mlx_eagle.drafters.target_parts import find_embedding
from mlx_eagle.target_model.target import Target

GEMMA = tiny_gemma3()
FED = {
    name: pair
    for name, pair in PAIRS.items()
    if type(pair[1]).check_embeddings is not Drafter.check_embeddings
    and does_model_support_input_embeddings(pair[0])
}
FED["gemma 3, which scales them"] = GEMMA, tiny_head(GEMMA)
BY_TOKEN = {"assistant"}  # Gemma 4's small targets, whose layers are given something of each token
FED["lagging"] = LLAMA, tiny_head(LLAMA).with_draft_cache("lagging")


def own(model: nn.Module, prompt: list[int] = PROMPT) -> mx.array:
    return find_embedding(model)[0](mx.array(prompt))


def with_image(model: nn.Module) -> mx.array:
    """The prompt's embeddings with rows in the middle that no token has."""
    mx.random.seed(21)
    rows = own(model)
    image = rows.std() * mx.random.normal((3, rows.shape[1]))
    return mx.concatenate([rows[:2], image, rows[5:]])


GIVEN: dict[str, Callable[[nn.Module], tuple[list[int], mx.array]]] = {
    "own": lambda model: (PROMPT, own(model)),
    "an image": lambda model: (PROMPT, with_image(model)),
    "no tokens": lambda model: ([], with_image(model)),
    "one row": lambda model: ([], own(model, [5])),
}


def ours(model: nn.Module, drafter: Drafter, given: str, **options):
    prompt, embeddings = GIVEN[given](model)
    return speculative(
        model, drafter, np.array(prompt, np.int32), 20, input_embeddings=embeddings, **options
    )


def theirs(model: nn.Module, given: str, **options) -> list[int]:
    prompt, embeddings = GIVEN[given](model)
    return plain(model, np.array(prompt, np.int32), 20, input_embeddings=embeddings, **options)


@pytest.mark.parametrize("step", thorough([1, 3, 2048], 3))
@pytest.mark.parametrize("given", thorough(GIVEN, "an image", "no tokens"))
@pytest.mark.parametrize("name", thorough(FED, "eagle-3", "mtp, qwen3.5 moe, tied"))
def test_same_text(name, given, step):
    model, drafter = FED[name]
    if name in BY_TOKEN and not GIVEN[given](model)[0]:
        for generate in (partial(ours, model, drafter), partial(theirs, model)):
            with pytest.raises(ValueError, match=r"broadcast|empty array"):
                generate(given)
        return
    tokens, _ = ours(model, drafter, given, num_draft_tokens=3, prefill_step_size=step)
    assert tokens == theirs(model, given)


@pytest.mark.parametrize("name", thorough(FED, "eagle-3", "p-eagle"))
def test_its_own_embeddings_draft_what_its_tokens_do(name):
    model, drafter = FED[name]
    _, embedded = ours(model, drafter, "own", num_draft_tokens=4, prefill_step_size=3)
    _, of_tokens = speculative(model, drafter, PROMPT, 20, num_draft_tokens=4, prefill_step_size=3)
    assert embedded.num_head_forwards == of_tokens.num_head_forwards
    assert embedded.accepted_histogram == of_tokens.accepted_histogram


@pytest.mark.parametrize("step", thorough([2, 2048], 2))
def test_the_head_is_given_the_same(step):
    """Its slots are those of one pass over the rows and the target's features, by hand."""
    head = tiny_head(LLAMA)
    rows, cache = with_image(LLAMA), make_prompt_cache(LLAMA) + head.make_cache()
    options = {"num_draft_tokens": 2, "prefill_step_size": step, "prompt_cache": cache}
    tokens, _ = ours(LLAMA, head, "no tokens", **options)
    text = mx.concatenate([rows, own(LLAMA, tokens)])
    target = Target(LLAMA, head.taps)
    _, features = target(mx.zeros((0,), mx.int32), make_prompt_cache(LLAMA), embeddings=text)
    by_hand = [KVCache() for _ in head.head.layers]
    head.head(text[1:], head.head.fuse(features[:-1]), by_hand)
    kept = cache[len(LLAMA.layers)]
    for a, b in zip(kept.keys_and_values(), by_hand[0].keys_and_values(), strict=True):
        assert mx.allclose(a, b[..., : a.shape[2], :], atol=1e-4).item()


@pytest.mark.parametrize("given", thorough(["an image", "no tokens"], "no tokens"))
def test_everything_else_goes_on(given):
    model, drafter = FED["eagle-3"]
    seen: list[list[int]] = []

    def spy(tokens, logits):
        seen.append(tokens.tolist())
        return logits + 3.0 * (mx.arange(logits.shape[-1]) == sum(tokens.tolist()) % 96)

    assert ours(model, drafter, given, logits_processors=[spy])[0] == theirs(
        model, given, logits_processors=[spy]
    )
    assert any(seen)
    progress: list[tuple[int, int]] = []
    options = {"prompt_progress_callback": lambda *done: progress.append(done)}
    ours(model, drafter, given, **options)
    by_us = progress.copy()
    progress.clear()
    theirs(model, given, **options)
    assert by_us == progress
    for shape in ({"tree": mlx_eagle.parse_tree("2x2:4")}, {"num_draft_tokens": 0}):
        assert ours(model, drafter, given, **shape)[0] == theirs(model, given)


def test_a_request_after_it():
    model, drafter = FED["eagle-3"]
    cache, reference = make_prompt_cache(model) + drafter.make_cache(), make_prompt_cache(model)
    for given in ("an image", "no tokens"):
        tokens, _ = ours(model, drafter, given, prompt_cache=cache, num_draft_tokens=3)
        assert tokens == theirs(model, given, prompt_cache=reference)
    tokens, _ = speculative(model, drafter, [3, 4], 9, prompt_cache=cache)
    assert tokens == plain(model, [3, 4], 9, prompt_cache=reference)


def test_text_from_python():
    model, drafter = FED["eagle-3"]
    tokenizer, options = byte_tokenizer(), {"max_tokens": 12, "prompt": []}
    texts = [
        mlx_eagle.generate(
            model, tokenizer, draft_model=draft, input_embeddings=with_image(model), **options
        )
        for draft in (drafter, None)
    ]
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize(
    ("drafter", "prompt", "shape", "message"),
    [
        (LookupDrafter(), PROMPT, (7, 64), "this drafter reads tokens"),
        (ModelDrafter(LLAMA), PROMPT, (7, 64), "this drafter reads tokens"),
        (tiny_head(LLAMA), PROMPT, (6, 64), "prompt has 7 tokens, but input_embeddings 6 rows"),
        (tiny_head(LLAMA), PROMPT, (1, 7, 64), "give one row per token"),
        (tiny_head(LLAMA), [], (0, 64), "give one row per token"),
        (tiny_head(LLAMA), PROMPT, (7, 32), "are 64 wide, but the input_embeddings 32"),
    ],
)
def test_what_cannot_be_is_said(drafter, prompt, shape, message):
    with pytest.raises(ValueError, match=message) as error:
        speculative(LLAMA, drafter, prompt, 4, input_embeddings=mx.zeros(shape))
    assert "\n" not in str(error.value)


def test_batches_and_targets_that_take_none():
    options = {"draft_model": tiny_head(LLAMA), "input_embeddings": own(LLAMA)}
    with pytest.raises(ValueError, match="input_embeddings is for one prompt"):
        mlx_eagle.batch_generate(LLAMA, byte_tokenizer(), [PROMPT], **options)
    model, drafter = PAIRS["mtp, qwen3-next"]
    with pytest.raises(ValueError, match="takes no input_embeddings"):
        speculative(model, drafter, PROMPT, 4, input_embeddings=own(model))
