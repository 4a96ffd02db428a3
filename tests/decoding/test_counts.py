"""Counts that the design promises: evals, forwards, and a tap that adds its taps only."""

from contextlib import nullcontext
from dataclasses import fields

import mlx.core as mx
import mlx.nn as nn
import pytest
from graph import fused, graph_of_a_round, primitives
from helpers import (
    PROMPT,
    SCRIPTS,
    VOCAB,
    ScriptedDrafter,
    num_primitives,
    plain,
    speculative,
    tiny_head,
    tiny_llama,
)
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from tolerances import tolerance

from mlx_eagle import Sampling
from mlx_eagle.decoding.accept import Match
from mlx_eagle.decoding.auto import DraftingEvent
from mlx_eagle.decoding.decoder import Round
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.tree import parse_tree
from mlx_eagle.target_model.target import Target


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_hidden_layers=4)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_one_eval_and_k_head_forwards_a_round(model, monkeypatch, k):
    drafter, waits = tiny_head(model), []
    mx_eval = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *args: (waits.append(1), mx_eval(*args)))
    _, stats = speculative(model, drafter, PROMPT, 25, num_draft_tokens=k)
    prefill_waits = 2  # one chunk, and the first token
    assert len(waits) == stats.num_evals + prefill_waits
    assert stats.num_evals == stats.num_target_forwards
    assert stats.num_head_forwards == stats.num_drafted
    assert stats.num_target_forwards == stats.num_rounds + stats.num_plain_steps


def test_the_model_runs_once_a_round(model, monkeypatch):
    calls = []
    call = type(model).__call__

    def counted(self, *args, **kwargs):
        return (calls.append(1), call(self, *args, **kwargs))[1]

    text = PROMPT + plain(model, PROMPT, 60)
    monkeypatch.setattr(type(model), "__call__", counted)
    for script in SCRIPTS.values():
        calls.clear()
        _, stats = speculative(
            model, ScriptedDrafter(text, script), PROMPT, 25, num_draft_tokens=3
        )
        prefill = 2  # one chunk, and the prompt's last token
        assert len(calls) == stats.num_target_forwards + prefill


CHAIN_AND_TREE = [{"num_draft_tokens": 3}, {"tree": parse_tree("2x2:4")}]


@pytest.mark.parametrize("options", CHAIN_AND_TREE, ids=str)
def test_the_device_drafts_while_the_target_s_pass_is_built(model, monkeypatch, options):
    events, call, start = [], type(model).__call__, mx.async_eval
    size = options.get("num_draft_tokens", 4)

    def started(*arrays) -> None:
        if isinstance(arrays[0], mx.array) and arrays[0].shape == (size,):
            events.append("draft")
        start(*arrays)

    def counted(self, *args, **kwargs):
        events.append("target")
        return call(self, *args, **kwargs)

    monkeypatch.setattr(mx, "async_eval", started)
    monkeypatch.setattr(type(model), "__call__", counted)
    _, stats = speculative(model, tiny_head(model), PROMPT, 25, **options)
    first_draft = events.index("draft")
    assert stats.num_rounds > 10  # the last ones are cut to max_tokens
    assert events[first_draft : first_draft + 16] == ["draft", "target"] * 8


def test_a_draft_starts_from_logits_that_are_computed_with_the_round_before(model):
    """What is left to do for the first token: the best of them, as an id of the target."""
    drafter = tiny_head(model).begin()
    drafter.extend(mx.array(PROMPT), mx.random.normal((len(PROMPT), drafter.width)))
    whole = num_primitives(drafter.propose(1, Match().pick).tokens)
    mx.eval(drafter.pending())
    left = num_primitives(drafter.propose(1, Match().pick).tokens)
    assert left <= 4 < whole - 4


def test_the_operations_of_a_round():
    """A plain step asks no more of the device than mlx-lm's; greedy rounds take no log-softmax."""
    model = tiny_llama(num_hidden_layers=16)
    drafter, noisy = tiny_head(model), Sampling(temp=0.8, seed=1)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array(PROMPT)[None], cache=cache), [c.state for c in cache])
    with fused():
        logits = model(mx.array([[1]]), cache=cache)[:, -1, :]
        theirs = primitives(mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1))
    count = lambda *args: graph_of_a_round(model, drafter, PROMPT, *args)  # noqa: E731
    plain_step, greedy = count(0), count(3)
    assert plain_step.total() <= theirs.total()
    assert "LogSumExp" in theirs and not {"LogSumExp", "Softmax"} & {*plain_step, *greedy}
    draft_step = (greedy.total() - count(1).total()) / 2
    assert greedy.total() <= 905 and draft_step <= 36
    coupled = count(3, noisy)
    assert coupled.total() <= 951 and coupled["LogSumExp"] == coupled["RandomBits"] == 1
    assert count(0, noisy).total() <= 804


@pytest.mark.parametrize("options", [*CHAIN_AND_TREE, {"num_draft_tokens": 0}], ids=str)
def test_logprobs_are_there_for_whoever_reads_them(model, options):
    """mlx-lm's own, of every token, in rounds too; also when they are read at the end."""
    steps = speculative_generate_step(
        mx.array(PROMPT), model, tiny_head(model), max_tokens=20, **options
    )
    ours = [(token, logprobs) for token, logprobs, _ in steps]
    theirs = generate_step(mx.array(PROMPT), model, max_tokens=20)
    for (token, logprobs), (expected, logprobs_there) in zip(ours, theirs, strict=True):
        assert token == expected and isinstance(logprobs, mx.array)
        assert logprobs.shape == logprobs_there.shape
        assert mx.allclose(logprobs, logprobs_there, atol=10 * tolerance()).item()


@pytest.mark.parametrize("k", [1, 3, 5])
def test_what_is_built_between_a_read_and_the_first_start(model, monkeypatch, k):
    """The choice of the first token; its logits run behind the accept pass, which is in flight."""
    found, has_read, read, start = [], [], Round.read, mx.async_eval

    def started(*arrays) -> None:
        if has_read and isinstance(arrays[0], mx.array):  # a draft; a plain step starts a list
            found.append(num_primitives(*arrays))
        has_read.clear()
        start(*arrays)

    monkeypatch.setattr(Round, "read", lambda self: has_read.append(self) or read(self))
    monkeypatch.setattr(mx, "async_eval", started)
    _, stats = speculative(model, tiny_head(model), PROMPT, 20, num_draft_tokens=k)
    assert len(found) >= stats.num_rounds > 10
    assert max(found[:-k]) <= 4, "at the end drafts get too short to be started by the token"


@pytest.mark.parametrize("k, num_started", [(2, 0), (3, 2), (5, 4)])
def test_long_drafts_are_started_token_by_token(model, monkeypatch, k, num_started):
    drafter, started = tiny_head(model).begin(), []
    drafter.extend(mx.array(PROMPT), mx.random.normal((len(PROMPT), drafter.width)))
    expected = drafter.propose(k, Match().pick).tokens.tolist()
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: started.append(arrays))
    tokens = drafter.propose(k, Match().pick).tokens
    assert [array.shape for arrays in started for array in arrays] == [(1,)] * num_started
    assert tokens.tolist() == expected


@pytest.mark.parametrize("tree", ["3x3:7", "4x5:15", "2/2+1/1"])
def test_trees_are_started_level_by_level(model, monkeypatch, tree):
    """The first start is of the root's children, whose logits run behind the accept pass."""
    drafter, started = tiny_head(model).begin(), []
    drafter.extend(mx.array(PROMPT), mx.random.normal((len(PROMPT), drafter.width)))
    mx.eval(drafter.pending())
    shape = parse_tree(tree)
    expected = drafter.propose_tree(shape, Match().pick_children).tokens
    whole = num_primitives(expected)
    start = mx.async_eval

    def counted(*arrays) -> None:
        started.append(num_primitives(*arrays))
        start(*arrays)

    monkeypatch.setattr(mx, "async_eval", counted)
    tokens = drafter.propose_tree(shape, Match().pick_children).tokens
    assert len(started) == shape.depth - 1 and started[0] <= whole / 4
    assert tokens.tolist() == expected.tolist()


def test_a_draft_step_of_a_quantized_head_is_thirty_primitives(model):
    head = tiny_head(model)
    nn.quantize(head.head, group_size=32, bits=4)

    def count(size: int) -> int:
        """Of a draft of that length, built once before: compiled graphs keep no stand-ins."""
        for stand_ins in (nullcontext, fused):
            drafter = head.begin()
            drafter.extend(mx.array(PROMPT), mx.random.normal((len(PROMPT), drafter.width)))
            mx.eval(drafter.pending())
            with stand_ins():
                found = primitives(drafter.propose(size, Match().pick).tokens).total()
        return found

    assert count(2) - count(1) <= 31  # and one that puts the two tokens together


def test_stats_add_up(model):
    text = PROMPT + plain(model, PROMPT, 60)
    _, stats = speculative(
        model, ScriptedDrafter(text, SCRIPTS["every length"]), PROMPT, 32, num_draft_tokens=3
    )
    assert stats.num_emitted == 31
    assert stats.num_drafted == stats.num_accepted + stats.num_rejected
    assert sum(stats.accepted_histogram) == stats.num_rounds
    assert sum(n * c for n, c in enumerate(stats.accepted_histogram)) == stats.num_accepted
    assert stats.tau == stats.num_emitted / stats.num_target_forwards
    # Rounds keep 0, 1, 2, 3 in turn: of 4 rounds 3 keep the first, of those 2 the second ...
    whole = [3 / 4, 2 / 3, 1 / 2]
    assert stats.acceptance_by_position == pytest.approx(whole, abs=0.12)
    assert stats.cumulative_acceptance_by_position == pytest.approx([3 / 4, 1 / 2, 1 / 4], abs=0.1)


def test_the_tap_adds_only_its_taps(model):
    tokens = mx.array([3, 4, 5])
    taps = (1, 2, 4)
    untapped = model(tokens[None], cache=make_prompt_cache(model))[0]
    logits, features = Target(model, taps)(tokens, make_prompt_cache(model))
    # A concatenation and a slice of the batch axis come on top of the plain graph.
    extra = num_primitives(logits, features) - num_primitives(untapped)
    assert 1 <= extra <= 4
    assert mx.array_equal(logits, untapped).item()
    assert features.shape == (3, len(taps) * model.args.hidden_size)


def test_the_model_is_untouched_during_and_after(model):
    names = [name for name, _ in tree_flatten(model.parameters())]
    classes = [type(layer) for layer in model.layers]
    target = Target(model, (1, 3, 4))
    target(mx.array([1, 2]), make_prompt_cache(model))
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    assert [type(layer) for layer in model.layers] == classes


def test_an_error_inside_the_model_leaves_it_untouched(model):
    classes = [type(layer) for layer in model.layers]
    with pytest.raises(AttributeError):
        Target(model, (1, 3))(mx.array([1, 2]), "not a cache")
    assert [type(layer) for layer in model.layers] == classes


def test_taps_are_what_enters_the_layers(model):
    tokens = mx.array([3, 4, 5, 6])
    taps = tuple(range(len(model.layers) + 1))
    _, features = Target(model, taps)(tokens, make_prompt_cache(model))
    h = model.model.embed_tokens(tokens[None])
    expected = [h]
    for layer in model.layers:
        h = layer(h, "causal", None)
        expected.append(h)
    assert mx.allclose(features, mx.concatenate(expected, axis=-1)[0], atol=tolerance()).item()


def test_a_tap_beyond_the_model_is_refused(model):
    with pytest.raises(ValueError, match=r"taps layers .* but the target has 4 layers"):
        Target(model, (2, 3, 8))


def test_every_count_is_written():
    stats = Stats(num_rounds=4, accepted_histogram=[1, 3], drafted_by_position=[4, 4])
    counts = {field.name for field in fields(Stats) if not field.name.startswith("_")}
    written = stats.to_dict()
    assert counts <= written.keys() and written["acceptance_rate"] == stats.acceptance_rate
    assert not [name for name in written if name.startswith("_")]


def test_positions_that_no_round_reached_have_no_acceptance():
    """Where no first draft was kept, nothing is known of the second and third."""
    stats = Stats(num_rounds=4, accepted_histogram=[4], drafted_by_position=[4, 4, 4])
    assert stats.acceptance_words == "0.00"
    assert "Acceptance by position: 0.00;" in "\n".join(stats.lines())
    stats = Stats(num_rounds=4, accepted_histogram=[1, 3], drafted_by_position=[4, 4, 4])
    assert stats.acceptance_words == "0.75 0.00"
    assert Stats().acceptance_words == "-"


def test_counts_without_a_round_say_why_nothing_was_drafted():
    stats = Stats(num_plain_steps=12)
    assert stats.lines() == ["Nothing was drafted (12 plain steps)"]
    stats.drafting_events.append(DraftingEvent(3, "drafting off", "a round costs too much"))
    assert stats.lines() == ["auto did not draft: a round costs too much (12 plain steps)"]
    stats.record(2, 2, 0, 1, 2)
    assert "Rounds: 1" in stats.lines()[0] and "rate 0.000" in "".join(stats.lines())


def test_the_graph_of_a_copied_round_does_not_grow_with_the_copy():
    """And it is smaller than a drafted one's: the head has no part in it."""
    model = tiny_llama()
    prompt = [*range(VOCAB)] * 2  # whatever comes next has come before
    copying = tiny_head(model).with_copies()
    sizes = [graph_of_a_round(model, copying, prompt, 0, copy=n).total() for n in (3, 15, 31)]
    assert len(set(sizes)) == 1
    assert sizes[0] < graph_of_a_round(model, tiny_head(model), prompt, 3).total()
