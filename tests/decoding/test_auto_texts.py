"""Texts with ``num_draft_tokens="auto"``: those of plain decoding, whatever was drafted."""

import re

import mlx.core as mx
import numpy as np
import pytest
from architectures import build
from costs import ScriptedController, SettledCosts
from grids import thorough
from helpers import PROMPT, plain, speculative, tiny_head, tiny_llama, tiny_qwen3
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.decoding.decoder import Decoder, Round
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.drafters.tree import PLAIN, TREES, TreeShape

TARGETS = {
    "llama": (tiny_llama, {}),
    "rotating": (tiny_qwen3, {"max_kv_size": 12}),
    "gemma3": (lambda: build("gemma3_text"), {}),
    "qwen3_next": (lambda: build("qwen3_next"), {}),
    "mamba2": (lambda: build("mamba2"), {}),
    "quantized KV": (
        lambda: tiny_llama(head_dim=32),
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": len(PROMPT) + 5},
    ),
}
SCRIPTS = {"off": [0], "off and on": [2, 0, 0, 0, 3, 3, 0], "at once": [0, 1]}


@pytest.fixture(scope="module", params=TARGETS)
def case(request):
    make, options = TARGETS[request.param]
    model = make()
    return model, tiny_head(model), options


@pytest.fixture
def scripted(monkeypatch, request):
    sizes = SCRIPTS[request.param]
    script = lambda *_, **__: ScriptedController(sizes)  # noqa: E731
    monkeypatch.setattr("mlx_eagle.decoding.generate_step.AdaptiveController", script)


@pytest.mark.parametrize(
    "sampler",
    [None, pytest.param(lambda: Sampling(0.9, seed=3), marks=pytest.mark.exhaustive)],
    ids=["greedy", "t=.9"],
)
@pytest.mark.parametrize("scripted", thorough(SCRIPTS, "off and on"), indirect=True)
def test_the_text_and_the_caches_of_plain_decoding(case, scripted, sampler):
    model, drafter, options = case
    cache, reference = make_prompt_cache(model, options.get("max_kv_size")), []
    reference = make_prompt_cache(model, options.get("max_kv_size"))
    make = sampler or (lambda: None)
    tokens, stats = speculative(
        model, drafter, PROMPT, 25, num_draft_tokens="auto", prompt_cache=cache, sampler=make(),
        **options,
    )  # fmt: skip
    assert tokens == plain(model, PROMPT, 25, prompt_cache=reference, sampler=make(), **options)
    assert stats.num_evals == stats.num_target_forwards
    follow = [plain(model, [3, 4], 8, prompt_cache=c, **options) for c in (cache, reference)]
    assert follow[0] == follow[1]


@pytest.mark.parametrize("scripted", thorough(SCRIPTS, "off and on"), indirect=True)
@pytest.mark.parametrize("num_taken", thorough([1, 2, 3, 5, 8], 3))
def test_left_early(case, scripted, num_taken):
    model, drafter, options = case
    cache = make_prompt_cache(model, options.get("max_kv_size"))
    reference = make_prompt_cache(model, options.get("max_kv_size"))
    head_cache = drafter.make_cache()
    cache += head_cache
    ours = speculative_generate_step(
        mx.array(PROMPT), model, drafter, num_draft_tokens="auto", max_tokens=-1,
        prompt_cache=cache, **options,
    )  # fmt: skip
    theirs = generate_step(
        mx.array(PROMPT), model, max_tokens=-1, prompt_cache=reference, **options
    )
    text = list(PROMPT)
    for _ in range(num_taken):
        text.append(next(ours)[0])
        assert next(theirs)[0] == text[-1]
    ours.close()
    theirs.close()
    # What the drafter holds is what a fresh one has absorbed of the same text.
    whole = make_prompt_cache(model, options.get("max_kv_size")) + drafter.make_cache()
    speculative(model, drafter, text, 1, num_draft_tokens=1, prompt_cache=whole)
    mine, other = head_cache[0].keys_and_values(), whole[-2].keys_and_values()
    for a, b in zip(mine, other, strict=True):
        assert a.shape[2] == len(text) - 1
        if not options:  # otherwise a prompt in one piece sees more than one that grew
            assert mx.allclose(a, b[..., : len(text) - 1, :], atol=1e-3).item()
    num_caches = len(reference)
    follow = [plain(model, [3, 4], 8, prompt_cache=c[:num_caches]) for c in (cache, reference)]
    assert follow[0] == follow[1]


@pytest.mark.parametrize("scripted", ["off", "off and on"], indirect=True)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 9])
def test_limits_and_stop_tokens(scripted, num_tokens):
    model = tiny_llama()
    text = plain(model, PROMPT, 12)
    options = {"num_draft_tokens": "auto"}
    assert (
        speculative(model, tiny_head(model), PROMPT, num_tokens, **options)[0]
        == (text[:num_tokens])
    )
    stop = text[num_tokens]
    tokens, stats = speculative(model, tiny_head(model), PROMPT, 12, stop_tokens=[stop], **options)
    assert tokens == text[: text.index(stop) + 1]
    assert stats.num_emitted == len(tokens) - 1


@pytest.mark.parametrize("scripted", ["off"], indirect=True)
def test_plain_decoding_is_pipelined_and_the_head_does_not_run(scripted, monkeypatch):
    """The next step is launched before the token of this one is read; the head never runs."""

    order = []
    launch, read = Decoder.launch, Round.read
    monkeypatch.setattr(Decoder, "launch", lambda *a, **k: order.append("L") or launch(*a, **k))
    monkeypatch.setattr(Round, "read", lambda *a: order.append("R") or read(*a))
    model = tiny_llama()
    _, stats = speculative(model, tiny_head(model), PROMPT, 10, num_draft_tokens="auto")
    assert "".join(order) == "LR" + "L" + "LR" * 8 + "R"
    assert stats.num_head_forwards == 0


@pytest.mark.parametrize(
    "value, found",
    [
        ("automatic", "'automatic' (text)"),
        ("3", "'3' (text)"),
        (None, "None (nothing)"),
        (2.0, "2.0 (a decimal number)"),
        (True, "True (yes or no, not a number)"),
        (-1, "-1"),
        ([3], "a list"),
    ],
)
def test_numbers_of_draft_tokens_that_are_none_are_refused(value, found):
    with pytest.raises(ValueError, match=re.escape(f"num_draft_tokens is {found}: give a whole")):
        speculative(tiny_llama(), LookupDrafter(), PROMPT, 3, num_draft_tokens=value)


@pytest.mark.parametrize("value", [5, True, ["2x2:3"], "4x4", ""])
def test_trees_that_are_none_are_refused(value):
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"give .*WIDTHxDEPTH:NODES"):
        speculative(model, tiny_head(model), PROMPT, 3, tree=value)


def test_a_tree_may_be_given_as_text():
    model = tiny_llama()
    drafter, shape = tiny_head(model), TreeShape(2, 2, 3)
    made, stats = speculative(model, drafter, PROMPT, 12, tree="2x2:3")
    same, expected = speculative(model, drafter, PROMPT, 12, tree=shape)
    assert made == same == plain(model, PROMPT, 12) and stats.num_rounds == expected.num_rounds
    assert stats.num_drafted == expected.num_drafted > stats.num_rounds


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("value", [-5, 0, None, 2.5, True, "7"])
def test_limits_that_are_none_are_refused(value, k):
    with pytest.raises(ValueError, match=r"max_tokens is .*: give 1 or more, or -1 for no limit"):
        speculative(tiny_llama(), LookupDrafter(), PROMPT, value, num_draft_tokens=k)


def test_whole_numbers_of_other_libraries_are_taken():
    model = tiny_llama()
    tokens, _ = speculative(
        model, LookupDrafter(), PROMPT, np.int64(4), num_draft_tokens=np.int32(2)
    )
    assert tokens == plain(model, PROMPT, 4)


def test_a_fixed_tree_is_drafted_whatever_the_length_says():
    model, tree = tiny_llama(), TreeShape.parse("2x2:4")
    options = {"num_draft_tokens": "auto", "tree": tree}
    tokens, stats = speculative(model, tiny_head(model), PROMPT, 20, **options)
    assert tokens == plain(model, PROMPT, 20)
    full = stats.num_rounds - 1  # the last may be cut to the tokens that are left
    assert stats.num_drafted >= 4 * full > 0 and stats.num_plain_steps <= 1


def test_tree_auto_is_refused_where_trees_are():
    model = build("mamba2")
    with pytest.raises(ValueError, match="leave the tree out"):
        speculative(model, tiny_head(model), PROMPT, 4, tree="auto")


@pytest.mark.parametrize(
    "make", [tiny_llama, lambda: build("gemma3_text"), lambda: build("mamba2")]
)
@pytest.mark.parametrize(
    "options",
    thorough([{"num_draft_tokens": "auto"}, {"tree": "auto"}], {"num_draft_tokens": "auto"}),
    ids=str,
)
def test_trees_are_among_what_is_drafted_where_they_can_be(make, options, monkeypatch):
    """On a machine on which 8 rows are the cheapest; recurrent targets go on with chains."""
    cost = lambda shape, num: 1.0 if shape == PLAIN or shape == TREES[1] else 3.0  # noqa: E731
    known = SettledCosts(cost)
    monkeypatch.setattr("mlx_eagle.decoding.generate_step.costs_of", lambda *_: known)
    shapes, launch = [], Decoder.launch
    monkeypatch.setattr(
        Decoder,
        "launch",
        lambda d, shape, *a, **k: shapes.append(shape) or launch(d, shape, *a, **k),
    )
    model = make()
    can = "mamba" not in type(model).__module__
    if not can and "tree" in options:
        return
    tokens, _ = speculative(model, tiny_head(model), PROMPT, 40, **options)
    assert tokens == plain(model, PROMPT, 40)
    assert any(shape.tree is not None for shape in shapes) == can
