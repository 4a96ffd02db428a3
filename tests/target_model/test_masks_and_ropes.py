"""Every rope of mlx-lm: rows of a window rotate as each would alone, or trees are refused."""

import mlx.core as mx
import pytest
from architecture_configs import LLAMA4_ROPE
from architectures import build
from grids import thorough
from helpers import (
    PROMPT,
    SCRIPTS,
    ScriptedDrafter,
    plain,
    speculative,
    tiny_head,
    tiny_llama,
)
from mlx_lm.models.cache import make_prompt_cache
from tolerances import tolerance
from tree_drafters import TREE_SCRIPTS, ScriptedTreeDrafter

from mlx_eagle.drafters.head import DraftAttention
from mlx_eagle.drafters.tree import TreeShape
from mlx_eagle.target_model.masks_and_ropes import named_modules
from mlx_eagle.target_model.probe import check_trees

LIMIT = 24  # positions the tiny models say they were trained for; texts run past it
ROPES = {
    "default": None,
    "linear": {"type": "linear", "factor": 2.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "llama3": {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "type": "longrope",
        "factor": 1.5,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + 0.3 * i for i in range(8)],
    },
    "proportional": {"type": "proportional", "factor": 1.0, "partial_rotary_factor": 0.5},
    "mrope": {"type": "mrope", "factor": 1.0, "mrope_section": [2, 3, 3]},
}
REFUSED = ("dynamic",)
TREE = TreeShape.parse("3x4:12")


def model_with(name: str):
    return tiny_llama(rope_scaling=ROPES[name], max_position_embeddings=LIMIT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ROPES)
def test_targets_past_their_length(name):
    model = model_with(name)
    expected = plain(model, PROMPT, 52)
    text = PROMPT + expected
    assert len(text) > 2 * LIMIT
    drafters = [tiny_head(model), *(ScriptedDrafter(text, s) for s in SCRIPTS.values())]
    for drafter in drafters:
        assert speculative(model, drafter, PROMPT, 44)[0] == expected[:44]
    if name in REFUSED:
        with pytest.raises(ValueError, match="leave the tree out and draft chains"):
            speculative(model, tiny_head(model), PROMPT, 4, tree=TREE)
        return
    check_trees(model, make_prompt_cache(model))
    for drafter in (tiny_head(model), ScriptedTreeDrafter(text, SCRIPTS["every length"])):
        assert speculative(model, drafter, PROMPT, 44, tree=TREE)[0] == expected[:44]


@pytest.mark.parametrize("name", ROPES)
def test_a_heads_rows_at_any_positions(name):
    """As trees, the lagging cache and the converter's --check give them: in no order."""
    config = tiny_head(tiny_llama(), rope={"theta": 1e4, "scaling": ROPES[name]}).head.config
    attention = DraftAttention(config, 64)
    positions = [3, 3, 40, 17, 2100]  # the last is past the head's own 2048
    x = mx.random.normal((1, 2, len(positions), 16), key=mx.random.key(1))
    together = attention._rotate(x, mx.array(positions))
    alone = [attention.rope(x[:, :, i : i + 1], offset=p) for i, p in enumerate(positions)]
    assert mx.allclose(together, mx.concatenate(alone, axis=2), atol=tolerance()).item()
    assert not mx.allclose(together, attention._rotate(x, 3), atol=0.1).item()


@pytest.mark.exhaustive
def test_a_head_whose_base_follows_the_length_drafts_trees_and_lags():
    model = tiny_llama()
    rope = {"theta": 1e4, "scaling": ROPES["dynamic"]}
    drafter = tiny_head(model, rope=rope, max_position_embeddings=LIMIT)
    expected = plain(model, PROMPT, 40)
    with pytest.warns(UserWarning, match="trained for"):
        assert speculative(model, drafter, PROMPT, 40, tree=TREE)[0] == expected
    with pytest.warns(UserWarning, match="trained for"):
        lagging = drafter.with_draft_cache("lagging")
        assert speculative(model, lagging, PROMPT, 40)[0] == expected


@pytest.mark.parametrize("draft", [{"num_draft_tokens": 3}, {"tree": "2x2:3"}], ids=str)
def test_a_window_as_long_as_a_cache_that_keeps_its_first_tokens(draft):
    """The layers of mistral3 ask any cache for a mask of their own window, here of 8 tokens."""
    model, prompt = build("mistral3"), PROMPT * 2

    def texts(size: int) -> tuple[list[int], list[int]]:
        expected = plain(model, prompt, 30, prompt_cache=make_prompt_cache(model, size))
        drafter = ScriptedTreeDrafter(prompt + expected + PROMPT, TREE_SCRIPTS["every length"])
        cache = make_prompt_cache(model, size)
        assert {c.keep for c in cache} == {4}
        return speculative(model, drafter, prompt, 30, prompt_cache=cache, **draft)[0], expected

    found, expected = texts(8)
    assert found == expected
    with pytest.raises(ValueError, match="looks back 8 tokens, but its cache holds 12"):
        texts(12)


@pytest.mark.parametrize("name", thorough(["mistral4", "ministral3"], "ministral3"))
def test_trees_where_the_scale_of_attention_grows_with_the_position(name):
    """Every 8 positions, and much: rows of a tree stand elsewhere than their numbers say."""
    model = build(name, rope_parameters={**LLAMA4_ROPE, "llama_4_scaling_beta": 4.0})
    expected = plain(model, PROMPT, 40)
    drafter = ScriptedTreeDrafter(PROMPT + expected + PROMPT, TREE_SCRIPTS["every length"])
    for draft in ({"tree": "2x3:6"}, {"num_draft_tokens": 3}):
        found, stats = speculative(model, drafter, PROMPT, 40, **draft)
        assert found == expected and stats.num_accepted > 0
    assert stats.num_plain_steps <= 1  # the last: chains need no such care


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma3n", "nemotron_h", "qwen3_next"])
def test_modules_are_those_that_mlx_finds(name):
    model = build(name)
    theirs = [(path.split(".")[-1], id(module)) for path, module in model.named_modules()]
    assert sorted((key, id(module)) for key, module in named_modules(model)) == sorted(theirs)
