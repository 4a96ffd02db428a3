"""When rounds are launched, read and stopped; drafters with nothing to propose; threads."""

import json
import threading

import mlx.core as mx
import pytest
from costs import FLAT, SettledCosts
from helpers import PROMPT, VOCAB, Recital, plain, speculative, tiny_head, tiny_llama
from mlx_lm.models.cache import make_prompt_cache

import mlx_eagle
from mlx_eagle.decoding import generate_step
from mlx_eagle.decoding.accept import Outcome, Verification
from mlx_eagle.decoding.decoder import Decoder, Round, StopPoint, stop_point
from mlx_eagle.decoding.stats import OFF, ON, DraftingEvent, Stats
from mlx_eagle.drafters.base import Draft, empty_draft
from mlx_eagle.drafters.lookup import LookupDrafter


@pytest.fixture
def at_flat_costs(monkeypatch):
    monkeypatch.setattr(generate_step, "costs_of", lambda *_: SettledCosts(FLAT))


def test_lookup_decodes_plainly_where_nothing_is_found(at_flat_costs, monkeypatch):
    """No token comes twice, so nothing is copied, and steps are pipelined."""
    order, launch, read = [], Decoder.launch, Round.read
    monkeypatch.setattr(Decoder, "launch", lambda *a, **k: order.append("L") or launch(*a, **k))
    monkeypatch.setattr(Round, "read", lambda *a: order.append("R") or read(*a))
    text = list(range(VOCAB))
    tokens, stats = speculative(
        Recital(text), LookupDrafter(), text[:2], VOCAB - 4, num_draft_tokens="auto"
    )
    assert tokens == text[2 : VOCAB - 2]
    assert stats.num_drafted == 0 and stats.drafting_events == []
    # A step is launched before the one before it is read.
    assert "".join(order[1:41]) == "LR" * 20


def test_auto_with_lookup_drafts_where_something_is_found(at_flat_costs):
    _, stats = speculative(
        Recital([4, 5, 6] * 60), LookupDrafter(), [4, 5, 6, 4], 120, num_draft_tokens="auto"
    )
    assert stats.drafting_events == [] and stats.mean_acceptance_length > 4.9


def test_what_is_read_has_names():
    following, num_kept = mx.array([7, 8, 9]), mx.array(1)
    logprobs = mx.zeros((3, 10))
    outcome = Verification(following, num_kept, logprobs).read()
    assert outcome == Outcome(1, [7, 8, 9], None) and outcome.run == [7, 8]
    outcome = Verification(following, num_kept, logprobs, mx.array([0, 2, 1])).read()
    assert outcome == Outcome(1, [7, 8, 9], [0, 2, 1])


@pytest.mark.parametrize(
    "run, num_taken, in_flight, point",
    [
        ([], 0, False, StopPoint.INSIDE_RUN),
        ([], 0, True, StopPoint.INSIDE_RUN),
        ([1, 2], 1, False, StopPoint.INSIDE_RUN),
        ([1, 2], 0, True, StopPoint.INSIDE_RUN),
        ([1, 2], 2, False, StopPoint.AT_ROOT),
        ([1, 2], 2, True, StopPoint.NEXT_IN_FLIGHT),
    ],
)
def test_stop_points(run, num_taken, in_flight, point):
    def a_round(**values):
        return Round(0, None, empty_draft(), None, None, None, None, **values)

    last = a_round(run=run, num_taken=num_taken)
    assert stop_point(last, a_round() if in_flight else None) is point


def test_the_json_of_stats_has_new_and_old_keys():
    stats = Stats(num_rounds=2, num_emitted=5)
    stats.drafting_events = [DraftingEvent(3, what, "why") for what in (OFF, "probe", ON)]
    document = json.loads(json.dumps(stats.to_dict()))
    assert document["mean_acceptance_length"] == document["tau"] == stats.tau == 2.5
    assert stats.mean_acceptance_length == 2.5
    events = [event["what"] for event in document["drafting_events"]]
    assert events == ["drafting off", "probe", "drafting on"]
    assert "Mean acceptance length (tau): 2.500" in stats.lines()


@pytest.mark.parametrize("num_kept", [0, 1])
def test_prompt_caches_that_are_too_few_are_refused(num_kept):
    model = tiny_llama()
    cache = make_prompt_cache(model)[:num_kept]
    for k in (0, 2):
        with pytest.raises(ValueError, match=f"prompt_cache holds {num_kept} caches, but"):
            speculative(model, tiny_head(model), PROMPT, 5, prompt_cache=cache, num_draft_tokens=k)


def test_several_threads_share_a_model_and_a_drafter():
    """Each gets its own text, and the same as one after the other."""
    text = list(range(5, VOCAB)) * 3
    model, drafter = Recital(text), LookupDrafter()
    starts = [0, 20, 40]
    expected = {
        start: speculative(model, drafter, text[: start + 3], 60, num_draft_tokens=3)[0]
        for start in starts
    }
    found, errors = {}, []

    def run(start: int) -> None:
        try:
            for _ in range(3):
                steps = mlx_eagle.speculative_generate_step(
                    mx.array(text[: start + 3]), model, drafter, max_tokens=60
                )
                found.setdefault(start, []).append([token for token, _, _ in steps])
        except Exception as err:  # shown to the test
            errors.append(err)

    threads = [threading.Thread(target=run, args=(start,)) for start in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert found == {start: [tokens] * 3 for start, tokens in expected.items()}


def test_a_sampler_is_not_changed_by_a_generation():
    model = tiny_llama()
    sampler = mlx_eagle.Sampling(temp=1.0, seed=3)
    before = plain(model, PROMPT, 5, sampler=mlx_eagle.Sampling(temp=1.0, seed=3))
    speculative(model, tiny_head(model), PROMPT, 5, num_draft_tokens=2, sampler=sampler)
    assert plain(model, PROMPT, 5, sampler=sampler) == before


@pytest.mark.parametrize(
    "branch, ranks", [([0, 1, 4], [0, 1]), ([0, 1], [0, -1]), ([0, 2], [1]), ([0], [-1])]
)
def test_the_ranks_of_what_a_tree_kept(branch, ranks):
    """Rows 1 and 2 continue the root, 3 and 4 row 1, 5 row 3; a branch may end where none does."""
    draft = Draft(mx.arange(5), mx.array([0, 0, 1, 1, 3]), 3)
    rows = branch + [row for row in range(6) if row not in branch]
    a_round = Round(0, None, draft, None, None, None, None)
    a_round._outcome = Outcome(len(branch) - 1, rows, rows)
    assert a_round.ranks == ranks
