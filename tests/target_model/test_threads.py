"""Several threads on one model and one drafter, and a model that nobody ever sees changed."""

import mlx.core as mx
import pytest
from at_once import in_threads
from drafter_pairs import tiny_qwen3_next
from helpers import PROMPT, plain, speculative, tiny_head, tiny_llama
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.convert import convert
from mlx_eagle.drafters.kinds import load_drafter
from mlx_eagle.drafters.model_drafter import ModelDrafter
from mlx_eagle.drafters.tree import parse_tree
from mlx_eagle.target_model.target import Target

NUM_TOKENS = 14
PROMPTS = [PROMPT, PROMPT[::-1], [9, 33, 7], [50, 51, 52, 3]]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "chains": (tiny_llama, {"num_draft_tokens": 3}),
    "trees": (tiny_llama, {"tree": parse_tree("2x3:6")}),
    "recurrent": (tiny_qwen3_next, {"num_draft_tokens": 3}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.exhaustive
def test_two_threads_generate_what_one_does(case):
    make, options = CASES[case]
    model = make()
    drafter = tiny_head(model)

    def texts(prompts: list[list[int]]) -> list[list[int]]:
        return [speculative(model, drafter, p, NUM_TOKENS, **options)[0] for p in prompts]

    expected = texts(PROMPTS)
    assert expected == [plain(model, p, NUM_TOKENS) for p in PROMPTS]
    found = in_threads(lambda: texts(PROMPTS), lambda: texts(PROMPTS[::-1]))
    assert found == [expected, expected[::-1]]
    assert texts(PROMPTS) == expected


def test_a_plain_thread_beside_a_drafted_one():
    model = tiny_llama()
    drafter, tree = tiny_head(model), parse_tree("2x3:6")
    expected = [plain(model, p, NUM_TOKENS) for p in PROMPTS]

    def drafted() -> list[list[int]]:
        return [speculative(model, drafter, p, NUM_TOKENS, tree=tree)[0] for p in PROMPTS]

    def alone() -> list[list[int]]:
        return [plain(model, p, NUM_TOKENS) for p in PROMPTS]

    assert in_threads(drafted, alone) == [expected, expected]
    assert [plain(model, p, NUM_TOKENS) for p in PROMPTS] == expected


@pytest.mark.parametrize("kind", ["head", "draft model"])
def test_a_drafter_drafts_in_another_thread_than_it_was_made_in(kind):
    model = tiny_llama()
    if kind == "head":
        drafter = tiny_head(model, rope={"theta": 1e4, "scaling": LLAMA3})
    else:
        smaller = tiny_llama(seed=3, rope_scaling=LLAMA3, vocab_size=90)
        drafter = ModelDrafter(smaller, vocab_size=96)
    (tokens,) = in_threads(lambda: speculative(model, drafter, PROMPT, NUM_TOKENS)[0])
    assert tokens == plain(model, PROMPT, NUM_TOKENS)


def test_a_target_generates_in_another_thread_than_its_head_was_loaded_in(source, out):
    """mlx-lm leaves the frequencies of its rope to the first pass."""
    convert(str(source), str(out))
    model = tiny_llama(vocab_size=128, rope_scaling=LLAMA3, num_hidden_layers=6)
    drafter = load_drafter(out, model)
    (tokens,) = in_threads(lambda: speculative(model, drafter, PROMPT, NUM_TOKENS)[0])
    assert tokens == plain(model, PROMPT, NUM_TOKENS)


def everything_in(model) -> list[tuple]:
    """The modules of a model, what they are and what they hold."""
    return [
        (name, id(module), type(module), sorted(module), sorted(vars(module)))
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("case", CASES)
def test_the_model_is_never_seen_changed(case, monkeypatch):
    """Not in the middle of a pass either: every layer's MLP looks at the whole model."""
    make, options = CASES[case]
    model = make()
    before, looks, mlp = everything_in(model), [], type(model.layers[1].mlp)

    def look(self, *args, original=mlp.__call__, **kwargs):
        looks.append(everything_in(model) == before)
        if len(looks) == 50:
            raise InterruptedError
        return original(self, *args, **kwargs)

    drafter = tiny_head(model)
    monkeypatch.setattr(mlp, "__call__", look)
    with pytest.raises(InterruptedError):
        speculative(model, drafter, PROMPT, 40, **options)
    assert all(looks) and everything_in(model) == before


def test_a_target_takes_the_weights_that_its_model_has():
    model, tokens = tiny_llama(), mx.array(PROMPT)
    expected, _ = Target(model, (2, 3))(tokens, make_prompt_cache(model))
    model.update({"model": {"norm": {"weight": 2 * model.model.norm.weight}}})
    doubled, _ = Target(model, (2, 3))(tokens, make_prompt_cache(model))
    assert mx.allclose(doubled, 2 * expected).item()
    assert mx.array_equal(doubled, model(tokens[None])[0]).item()
