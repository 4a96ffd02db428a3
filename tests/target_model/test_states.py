"""Recurrent states: made again from what a pass recorded, for the rows that are kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_configs import RECURRENT
from architectures import ARCHITECTURES, PROMPT, build
from graph import fused, primitives
from grids import thorough
from helpers import SCRIPTS, ScriptedDrafter, plain, speculative
from mlx_lm.models import qwen3_next
from mlx_lm.models.cache import make_prompt_cache
from tolerances import tolerance

from mlx_eagle.decoding.decoder import Limits
from mlx_eagle.decoding.loop import SingleRunner
from mlx_eagle.decoding.setup import open_decoder
from mlx_eagle.drafters.tree import DraftPlan, DraftShape
from mlx_eagle.target_model.probe import cuts_states_by_text
from mlx_eagle.target_model.rollback import CacheQuantization, Checkpoint
from mlx_eagle.target_model.states import StateRecorder, StateUpdates, recurrent_caches
from mlx_eagle.target_model.target import Target

QUICK = ("baichuan_m1", "jamba", "longcat_flash_ngram", "qwen3_next", "rwkv7")
NUM_ROWS = 5


def states_in(cache: list) -> list[mx.array]:
    return [state for member in recurrent_caches(cache) for state in member.cache]


def alike(ours: list[mx.array], theirs: list[mx.array]) -> bool:
    """Whether states differ by the order of sums at most, which their own size goes into."""
    return all(
        a.shape == b.shape and mx.allclose(a, b, 0, 10 * tolerance() * mx.abs(b).max().item())
        for a, b in zip(ours, theirs, strict=True)
    )


@contextmanager
def no_weights(monkeypatch) -> Iterator[None]:
    """Within, no module may multiply by its weights."""

    def refused(self, *args, **kwargs):
        raise AssertionError(f"{type(self).__name__} was run")

    with monkeypatch.context() as patch:
        for kind in (nn.Linear, nn.Conv1d, nn.Embedding):
            patch.setattr(kind, "__call__", refused)
        yield


@pytest.mark.parametrize("name", thorough(RECURRENT, *QUICK))
def test_the_states_are_those_of_the_kept_rows(name, monkeypatch):
    """Whatever number is kept, then fewer of them, and without a weight being read."""
    model, rows = build(name), mx.array([33, 4, 25, 8, 71])
    target, cache = Target(model), make_prompt_cache(model)
    target(mx.array(PROMPT), cache)
    before = deepcopy(cache)
    checkpoint = Checkpoint(cache)
    with target.recording(cache, NUM_ROWS, checkpoint.keep_updates):
        target(rows, cache)
    mx.eval(states_in(cache))
    for num_kept in (4, 3, 1, 0):
        with no_weights(monkeypatch):
            checkpoint.rollback(num_kept)
        twin = deepcopy(before)
        if num_kept:
            target(rows[:num_kept], twin)
        assert alike(states_in(cache), states_in(twin)), num_kept
    assert plain(model, [7, 9], 3, prompt_cache=cache) == plain(model, [*PROMPT, 7, 9], 3)


def test_what_is_not_recorded_is_run_again(monkeypatch):
    """Here layers that are said to be somebody else's, who may read a state in any way."""
    model = build("qwen3_next")
    text = PROMPT + plain(model, PROMPT, 30)
    script = SCRIPTS["every length"]
    _, recorded = speculative(model, ScriptedDrafter(text, script), PROMPT, 20)
    monkeypatch.setattr(qwen3_next.Qwen3NextGatedDeltaNet.__call__, "__module__", "somewhere")
    made, again = speculative(model, ScriptedDrafter(text, script), PROMPT, 20)
    assert made == text[len(PROMPT) :][:20]
    assert again.num_reruns > 0 == recorded.num_reruns
    assert not cuts_states_by_text(model)
    monkeypatch.undo()
    assert cuts_states_by_text(build("qwen3_next"))


def runner(model: nn.Module, script: str) -> SingleRunner:
    """A generation that has run a few rounds."""
    text = PROMPT + plain(model, PROMPT, 13)
    decoder = open_decoder(
        model, ScriptedDrafter(text, SCRIPTS[script]), make_prompt_cache(model),
        CacheQuantization(None, 64, 0), mx.default_stream(mx.default_device()),
        sampler=None, logits_processors=None, acceptance=None,
    )  # fmt: skip
    decoder.prefill(mx.array(PROMPT), 2048, lambda *_: None)
    generation = SingleRunner(decoder, Limits(-1, ()))
    generation.finish(decoder.launch_first())
    return generation


def test_a_round_after_a_rejection_is_hardly_larger(monkeypatch):
    """As Qwen3.5, three of four layers recurrent: 5 operations for each of these."""
    num_layers = 4
    sizes = {"num_hidden_layers": num_layers, "full_attention_interval": 4}
    model = build("qwen3_5", text_config={**ARCHITECTURES["qwen3_5"]["text_config"], **sizes})
    num_recurrent = len(list(recurrent_caches(make_prompt_cache(model))))
    assert num_recurrent == num_layers * 3 // 4
    found = {}
    for script in ("all", "none", "every length"):
        generation = runner(model, script)
        for _ in range(2):
            generation.finish(generation.launch(DraftPlan(DraftShape(3))))
        mx.eval([c.state for c in generation.decoder.cache])
        with monkeypatch.context() as patch, fused():
            patch.setattr(mx, "async_eval", lambda *_: None)
            found[script] = primitives(
                *generation.launch(DraftPlan(DraftShape(3))).verification.pending
            )
    whole = found["all"].total()
    assert whole > 50 * num_layers
    for script in ("none", "every length"):
        more = found[script].total() - whole
        assert 0 < more <= 5 * num_recurrent + 8, found[script] - found["all"]
        assert more <= 0.1 * whole and found[script]["Matmul"] == found["all"]["Matmul"]


@pytest.mark.parametrize("name", thorough(["qwen3_next", "mamba2"], "mamba2"))
def test_the_next_draft_is_started_before_states_are_restored(name, monkeypatch):
    """The drafter's own rollback, the draft, its start, and only then the target's states."""
    events: list[str] = []

    def watch(owner, method: str, event: str) -> None:
        original = getattr(owner, method)
        monkeypatch.setattr(
            owner, method, lambda *args: (events.append(event), original(*args))[1]
        )

    model = build(name)
    text = PROMPT + plain(model, PROMPT, 60)
    watch(ScriptedDrafter, "propose", "draft")
    watch(StateUpdates, "states", "restore")
    watch(StateRecorder, "begin", "pass")
    start = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *a: (events.append("start"), start(*a))[1])
    drafter = ScriptedDrafter(text, SCRIPTS["none"])
    _, stats = speculative(model, drafter, PROMPT, 12, num_draft_tokens=3)
    restored = ["restore"] * len(list(recurrent_caches(make_prompt_cache(model))))
    # A recorder begins where a pass does and, with nothing, where it ends.
    a_round = ["draft", "start", *restored, "pass", "pass"]
    found = sum(events[i : i + len(a_round)] == a_round for i in range(len(events)))
    restores = [i for i, event in enumerate(events) if event == "restore" != events[i - 1]]
    # The last round drafts nothing, for one token is left to make.
    assert found == len(restores) - 1 >= stats.num_rounds - 2 > 5
