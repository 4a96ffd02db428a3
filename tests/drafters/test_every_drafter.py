"""Four methods, one loop: lookup, a draft model and an MTP layer beside the EAGLE head.

Whoever drafts, the text is the target's own; and what is drafted is what a naive twin drafts.
"""

import mlx.core as mx
import pytest
from block_twin import learned_head, tiny_block
from drafter_pairs import (
    BLOCKS,
    LLAMA,
    PAIRS,
    PARALLEL,
    QWEN3_NEXT,
    SHOWN,
    Steered,
    naive_twin,
    tiny_gemma3,
    tiny_lfm2,
    tiny_mamba2,
)
from grids import thorough
from helpers import PROMPT, SCRIPTS, plain, speculative, tiny_llama

from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.base import Drafter
from mlx_eagle.drafters.model_drafter import ModelDrafter
from mlx_eagle.drafters.tree import TreeShape

LONG = {"dflash": {}, "dspark": {"markov_rank": 8, "first_slot": 0}, "dflash2": {"group_size": 16}}
COPYING = "eagle-3, lookup"  # its drafts have a naive twin in test_copying.py


@pytest.mark.parametrize("name", PAIRS)
def test_the_interface(name):
    assert isinstance(PAIRS[name][1], Drafter)


@pytest.mark.parametrize("script", thorough(SCRIPTS, "every length"))
@pytest.mark.parametrize("k", thorough([1, 4], 4))
@pytest.mark.parametrize("name", [n for n in PAIRS if n not in ("eagle-3", "lookup", COPYING)])
def test_every_draft_equals_the_naive_one(name, k, script):
    model, inner = PAIRS[name]
    text = PROMPT + plain(model, PROMPT, 24)
    drafter = Steered(inner, naive_twin(inner, model), text, SCRIPTS[script])
    tokens, _ = speculative(model, drafter, PROMPT, 18, num_draft_tokens=k, prefill_step_size=3)
    assert tokens == text[len(PROMPT) :][:18]
    assert drafter.begun.num_rounds > 3


@pytest.mark.parametrize("name", [n for n in SHOWN if n not in ("lookup", COPYING, *PARALLEL)])
@pytest.mark.parametrize("k", thorough([1, 3], 3))
def test_k_forwards_a_round(name, k):
    model, drafter = PAIRS[name]
    _, stats = speculative(model, drafter, PROMPT, 25, num_draft_tokens=k)
    assert stats.num_head_forwards == stats.num_drafted


@pytest.mark.exhaustive
@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_drafters_that_need_fewer(k):
    def run(name):
        return speculative(*PAIRS[name], PROMPT, 20, num_draft_tokens=k)[1]

    assert run("lookup").num_head_forwards == 0
    masked = run("p-eagle")
    assert masked.num_head_forwards == masked.num_rounds
    for name in BLOCKS:
        block = run(name)
        assert block.num_head_forwards == block.num_rounds
    heads = run("eagle-3, parallel heads")
    # Two tokens of a draft, where it has as many, cost no forward of their own.
    assert heads.num_head_forwards <= heads.num_drafted - min(k - 1, 2) * (heads.num_rounds - 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", LONG)
def test_blocks_of_16(kind):
    """Every number of 15 or 16 drafts is kept in turn."""
    inner = tiny_block(LLAMA, kind, block_size=16, **LONG[kind])
    k = inner.longest_draft
    text = PROMPT + plain(LLAMA, PROMPT, 180)
    drafter = Steered(inner, naive_twin(inner, LLAMA), text, SCRIPTS["every length"])
    tokens, _ = speculative(LLAMA, drafter, PROMPT, 150, num_draft_tokens=k)
    assert tokens == text[len(PROMPT) :][:150]
    assert k == (16 if kind == "dspark" else 15) and drafter.begun.num_rounds > k


@pytest.mark.parametrize("depth, tree", [(2, None), (5, None), (4, TreeShape.parse("3x4:12"))])
def test_an_eagle_head_that_knows_the_text(depth, tree):
    """Trained by speculators, in tools/golden/learn_eagle.py; each kind has such a test."""
    target = tiny_llama(num_hidden_layers=6)
    learned = learned_head(target, "eagle3")
    assert learned.head.config.draft_vocab_size < learned.head.config.vocab_size
    options = {"num_draft_tokens": depth} if tree is None else {"tree": tree}
    tokens, stats = speculative(target, learned, PROMPT, 25, **options)
    assert tokens == plain(target, PROMPT, 25)
    assert stats.tau >= 0.9 * (depth + 1)


@pytest.mark.parametrize("k", thorough([1, 2, 3, 4, 5], 2))
@pytest.mark.parametrize(
    "model",
    [LLAMA, tiny_gemma3(), tiny_mamba2(), tiny_lfm2(), QWEN3_NEXT],
    ids=lambda model: model.model_type,
)
def test_the_target_as_its_own_draft_model(model, k):
    max_tokens = 1 + 6 * (k + 1)
    tokens, stats = speculative(model, ModelDrafter(model), PROMPT, max_tokens, num_draft_tokens=k)
    assert tokens == plain(model, PROMPT, max_tokens)
    assert stats.tau == k + 1


@pytest.mark.parametrize("name", thorough(PAIRS, "eagle-3"))
def test_coupled_text_depends_on_the_seed_alone(name):
    model, drafter = PAIRS[name]

    def run(num_draft_tokens):
        sampler = Sampling(temp=0.7, top_p=0.9, seed=4)
        return speculative(
            model,
            drafter,
            PROMPT,
            20,
            num_draft_tokens=num_draft_tokens,
            sampler=sampler,
            acceptance="coupled",
        )[0]

    assert run(4) == run(1) == run(0)


@pytest.mark.parametrize("name", thorough(PAIRS, "eagle-3"))
def test_rejection_sampling(name):
    model, drafter = PAIRS[name]

    def run(seed):
        sampler = Sampling(temp=0.7, top_k=20, seed=seed)
        return speculative(
            model,
            drafter,
            PROMPT,
            12,
            num_draft_tokens=3,
            sampler=sampler,
            acceptance="reject",
        )

    tokens, stats = run(1)
    assert len(tokens) == 12 and stats.num_emitted == 11
    assert run(1)[0] == tokens and run(2)[0] != tokens


@pytest.mark.parametrize("name", thorough(PAIRS, "eagle-3"))
def test_two_generations_do_not_mix(name):
    model, drafter = PAIRS[name]
    prompts = [PROMPT, PROMPT[::-1]]
    steps = [
        speculative_generate_step(mx.array(p), model, drafter, num_draft_tokens=2, max_tokens=12)
        for p in prompts
    ]
    tokens = [[], []]
    for _ in range(12):
        for out, gen in zip(tokens, steps, strict=True):
            out.append(next(gen)[0])
    assert tokens == [plain(model, p, 12) for p in prompts]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("max_tokens", thorough([1, 2, 3], 2))
def test_short_prompts_and_texts(name, max_tokens):
    model, drafter = PAIRS[name]
    for prompt in ([5], [5, 17]):
        tokens, _ = speculative(model, drafter, prompt, max_tokens, num_draft_tokens=3)
        assert tokens == plain(model, prompt, max_tokens)
