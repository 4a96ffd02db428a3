"""``num_draft_tokens="auto"``: drafting where it is faster, plain decoding where it is not."""

import random
import re

import mlx.core as mx
import numpy as np
import pytest
from architectures import build
from costs import FLAT, LINEAR, ScriptedController
from grids import thorough
from helpers import PROMPT, plain, speculative, tiny_head, tiny_llama, tiny_qwen3
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle.decoding.accepted import expected_tokens
from mlx_eagle.decoding.controller import OFF, ON, PROBE, AdaptiveController, FixedController
from mlx_eagle.decoding.costs import DraftShape, RoundCosts
from mlx_eagle.decoding.live_costs import LiveCosts
from mlx_eagle.decoding.loop import speculative_generate_step
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.drafters.tree import TreeShape

# A round of k = 1..7 in plain steps, where verification is nearly flat, and where it is linear.
STEEP = RoundCosts(1.0, {DraftShape(k): 1.2 + 0.84 * k for k in range(1, 8)})


def automatic(costs: RoundCosts) -> AdaptiveController:
    """With costs that nobody corrects."""
    return AdaptiveController(LiveCosts(costs))


def simulate(controller, costs, alpha, num_tokens, seed) -> float:
    """Seconds a token of a text whose drafts are accepted at random; alpha by text position."""
    dice, seconds, emitted = random.Random(seed), 0.0, 0
    while emitted < num_tokens:
        shape, accepted = controller.next_shape(emitted), 0
        if shape.size == 0:
            seconds, emitted = seconds + costs.plain, emitted + 1
            continue
        while accepted < shape.size and dice.random() < alpha(emitted):
            accepted += 1
        controller.record(shape, accepted)
        seconds, emitted = seconds + costs.rounds[shape], emitted + accepted + 1
    return seconds / emitted


def mean_speedup(costs, alpha, num_tokens, size=None, runs=30) -> float:
    def controller():
        return automatic(costs) if size is None else FixedController(DraftShape(size))

    times = [simulate(controller(), costs, alpha, num_tokens, seed) for seed in range(runs)]
    return costs.plain / (sum(times) / runs)


def test_expected_tokens():
    assert expected_tokens([0.8, 0.5], 3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    assert expected_tokens([], 3) == 1.0


@pytest.mark.parametrize("alpha", thorough([0.05, 0.3, 0.5, 0.77, 0.95], 0.05, 0.77))
@pytest.mark.parametrize("costs", [FLAT, STEEP, LINEAR], ids=["flat", "steep", "linear"])
def test_close_to_the_best_fixed_length(costs, alpha):
    best = max(mean_speedup(costs, lambda _: alpha, 600, size) for size in range(8))
    assert mean_speedup(costs, lambda _: alpha, 600) > 0.98 * best


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("costs", [FLAT, STEEP, LINEAR], ids=["flat", "steep", "linear"])
def test_never_much_slower_than_plain_even_on_short_texts(costs, alpha):
    for seed in range(30):
        assert simulate(automatic(costs), costs, lambda _: alpha, 100, seed) < 1.035


def test_it_follows_a_text_that_changes():
    def alpha(position):
        return 0.8 if (position // 500) % 2 else 0.02

    best = max(mean_speedup(FLAT, alpha, 2000, size) for size in range(8))
    assert mean_speedup(FLAT, alpha, 2000) > 1.02 * best


def test_hopeless_costs_turn_drafting_off_with_the_reason():
    controller = automatic(LINEAR)
    assert controller.drafting_off and controller.is_hopeless
    assert [controller.next_shape(n) for n in range(5000)] == [DraftShape(0)] * 5000
    (event,) = controller.events
    assert event.what == OFF and "would be slower even with 90% accepted" in event.reason


def test_drafting_off_probes_and_drafting_on_are_noted():
    controller = automatic(FLAT)
    simulate(controller, FLAT, lambda n: 0.9 if n > 600 else 0.0, 1500, seed=1)
    whats = [event.what for event in controller.events]
    assert whats[0] == OFF and whats[-1] == ON
    assert whats.count(PROBE) == whats.count(OFF)
    positions = [event.num_tokens for event in controller.events]
    assert positions == sorted(positions) and positions[-1] > 600
    reason = controller.events[-3].reason
    assert re.search(r"with \d+% of first drafts accepted, the best length", reason)


def test_requests_of_a_batch_share_what_is_known():
    """Three requests that accept alike teach three times as much as one, in as many rounds."""
    alone, shared = automatic(FLAT), automatic(FLAT)
    for kept in (3, 0, 1, 3):
        alone.record(DraftShape(3), kept)
        shared.record(DraftShape(3), kept, kept, kept)
    assert shared.alphas[0] > 0.5 > alone.alphas[0] > 0.45 > automatic(FLAT).alphas[0]
    mixed = automatic(FLAT)
    for _ in range(200):
        mixed.record(DraftShape(2), 2, 0)
    assert mixed.alphas[0] == pytest.approx(0.5, abs=0.02) and mixed.alphas[1] > 0.9
    # A trial loses what the mean request loses, in so many rounds: 6 of them, not 6 requests.
    drafting_off = automatic(FLAT)
    for _ in range(2):
        assert not drafting_off.drafting_off
        drafting_off.next_shape(1)
        drafting_off.record(DraftShape(1), 0, 0, 0, 0, 1)
    drafting_off.next_shape(1)
    assert not drafting_off.drafting_off


def test_other_costs_turn_drafting_on_again():
    controller = automatic(STEEP)
    assert controller.drafting_off and controller.is_hopeless
    controller.update_costs(LiveCosts(LINEAR))
    assert controller.drafting_off and len(controller.events) == 1
    controller.update_costs(LiveCosts(FLAT))
    assert not controller.drafting_off and controller.next_shape(7).size > 0
    assert [event.what for event in controller.events] == [OFF, ON]
    # What is known of acceptance stays: where nothing is accepted, drafting stays off.
    controller = automatic(FLAT)
    simulate(controller, FLAT, lambda n: 0.0, 200, seed=1)
    assert controller.drafting_off
    cheaper = {shape: 0.99 * cost for shape, cost in FLAT.rounds.items()}
    controller.update_costs(LiveCosts(RoundCosts(1.0, cheaper)))
    assert controller.drafting_off


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
    monkeypatch.setattr("mlx_eagle.decoding.loop.round_costs", lambda *_: None)
    sizes = SCRIPTS[request.param]
    monkeypatch.setattr(
        "mlx_eagle.decoding.loop.AdaptiveController", lambda costs: ScriptedController(sizes)
    )


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
    from mlx_eagle.decoding.decoder import Decoder, Round

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


def test_a_tree_is_taken_where_it_is_faster_and_not_elsewhere():
    """Trees of 2 levels whose rounds bring 2.2 tokens, at two costs, beside chains at 50 %."""
    tree = DraftShape(2, TreeShape.parse("3x2:9"))

    def tokens_per_second(cost: float) -> tuple[float, int]:
        costs = RoundCosts(1.0, {**FLAT.rounds, tree: cost})
        controller, dice = automatic(costs), random.Random(7)
        seconds, emitted, num_trees = 0.0, 0, 0
        for _ in range(400):
            shape = controller.next_shape(emitted)
            if shape.tree is not None:
                num_trees += 1
                accepted = dice.choice([0, 1, 1, 2, 2])
            else:
                accepted = 0
                while accepted < shape.size and dice.random() < 0.5:
                    accepted += 1
            controller.record(shape, accepted)
            seconds, emitted = seconds + costs.rounds[shape], emitted + accepted + 1
        return emitted / seconds, num_trees

    fast, num_used = tokens_per_second(1.4)
    slow, num_tried = tokens_per_second(1.9)
    assert num_used > 350 and fast > 1.5
    assert num_tried < 100 and slow > 0.97 * mean_speedup(FLAT, lambda _: 0.5, 800, 2)


def test_a_fixed_tree_is_drafted_whatever_the_length_says(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_eagle.decoding.calibrate.user_cache", lambda: tmp_path)
    model, tree = tiny_llama(), TreeShape.parse("2x2:4")
    options = {"num_draft_tokens": "auto", "tree": tree}
    tokens, stats = speculative(model, tiny_head(model), PROMPT, 20, **options)
    assert tokens == plain(model, PROMPT, 20)
    full = stats.num_rounds - 1  # the last may be cut to the tokens that are left
    assert stats.num_drafted >= 4 * full > 0 and stats.num_plain_steps <= 1
    assert not (tmp_path / "calibration.json").exists()


def test_tree_auto_is_refused_where_trees_are():
    model = build("mamba2")
    with pytest.raises(ValueError, match="leave the tree out"):
        speculative(model, tiny_head(model), PROMPT, 4, tree="auto")
