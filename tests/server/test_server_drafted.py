"""What a client that asks with ``include_draft`` is told: against mlx-lm's own text machine, the
Python API and the counts of the server."""

import random
import threading
from urllib.request import urlopen

import mlx_lm
import pytest
from costs import SettledCosts, curve
from grids import thorough
from mlx_lm.generate import TextStateMachine
from openai import BadRequestError
from prometheus_client.parser import text_string_to_metric_families
from serving import ENDLESS, NUM_CHARACTERS, ours

from mlx_eagle import stream_generate
from mlx_eagle.decoding import generate_step
from mlx_eagle.decoding.stats import OFF
from mlx_eagle.draft_models import open_drafter
from mlx_eagle.server.answer_stream import DraftReport, PairResponse, TextReader, TokenOrigin

ASKED = {"stream": True, "stream_options": {"include_draft": True}}
STORY = {"prompt": "Once upon a time", "max_tokens": 60, "logit_bias": ENDLESS}
# Many halves of letters, tokens of one byte each, and no end.
HALVES = ENDLESS | {str(NUM_CHARACTERS - 2 + i): 3 for i in range(2)}
ACCENTS = {"prompt": "The quick brown fox", "max_tokens": 60, "logit_bias": HALVES}
MACHINES = [
    {},
    {"normal": [("<think>", "reasoning")], "reasoning": [("</think>", "normal")]},
    {"normal": [("<t>", "tool"), ("aba", "normal")], "tool": [("</t>", "normal")]},
]


@pytest.fixture(scope="module")
def server(pair):
    with ours("--model", pair["target"], "--draft-model", pair["model"]) as asked:
        yield asked


def tokens_of(chunks) -> list[dict]:
    return [token for chunk in chunks for token in chunk.draft["tokens"]]


def metrics_of(server) -> dict[str, float]:
    page = urlopen(server.url.removesuffix("/v1") + "/metrics", timeout=10).read().decode()
    return {
        sample.name.removeprefix("mlx_eagle_")
        + "".join(f":{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


@pytest.mark.parametrize(
    "request_",
    [pytest.param(STORY, marks=pytest.mark.exhaustive), ACCENTS],
    ids=["letters", "halves of letters"],
)
def test_streams_say_what_the_python_api_says(server, pair, request_):
    model, tokenizer = mlx_lm.load(pair["target"])
    drafter = open_drafter(pair["model"], model, tokenizer)
    bias = {int(token): value for token, value in request_["logit_bias"].items()}
    responses = list(
        stream_generate(
            model,
            tokenizer,
            request_["prompt"],
            request_["max_tokens"],
            draft_model=drafter,
            num_draft_tokens=3,
            logits_processors=mlx_lm.sample_utils.make_logits_processors(bias),
        )
    )
    chunks = list(server.complete(**request_, **ASKED))
    assert [
        (token["id"], token["depth"] > 0, token["depth"], token["length"], token["text"])
        for token in tokens_of(chunks)
    ] == [(r.token, r.from_draft, r.draft_depth, r.draft_length, r.text) for r in responses]
    assert [token["index"] for token in tokens_of(chunks)] == list(range(len(responses)))
    for chunk in chunks:
        assert chunk.choices[0].text == "".join(t["text"] for t in chunk.draft["tokens"])
    assert max(r.draft_depth for r in responses) > 1
    assert any(r.from_draft and r.text == "" for r in responses) == (request_ is ACCENTS)


def test_counts_are_those_of_the_metrics(server):
    before = metrics_of(server)
    *_, last = server.complete(**STORY, **ASKED)
    counts, after = last.draft["counts"], metrics_of(server)
    found = {name: after[name] - before.get(name, 0) for name in after}
    for name, metric in {
        "drafted_tokens": "drafted_tokens_total",
        "accepted_tokens": "accepted_tokens_total",
        "target_passes": "draft_target_passes_total",
        "emitted_tokens": "draft_emitted_tokens_total",
    }.items():
        assert counts[name] == found[metric] > 0
    for kind in ("drafted", "accepted"):
        by_position = [found[f"{kind}_by_position_total:{i + 1}"] for i in range(3)]
        assert counts[f"{kind}_by_position"] == by_position
    assert counts["mean_acceptance_length"] == counts["emitted_tokens"] / counts["target_passes"]
    assert len(counts["draft_lengths"]) == counts["target_passes"]
    assert counts["batched_tokens"] == 0


def test_what_a_client_can_count_itself(server):
    """A round is what was kept of a draft and the target's token behind it."""
    chunks = list(server.complete(**STORY, max_completion_tokens=61, **ASKED))
    tokens = tokens_of(chunks)[1:]  # the first token ends prefill
    ends = [i for i, token in enumerate(tokens) if token["depth"] == 0]
    if tokens[-1]["depth"] > 0:
        ends.append(len(tokens) - 1)  # cut at the limit
    counts = chunks[-1].draft["counts"]
    assert [tokens[i]["length"] for i in ends] == counts["draft_lengths"]
    kept = [sum(t["depth"] == p for t in tokens) for p in (1, 2, 3)]
    assert kept == counts["accepted_by_position"]
    assert len(tokens) == counts["emitted_tokens"]


def test_nobody_asked(server):
    request = STORY | {"max_tokens": 20}
    usage = {"stream": True, "stream_options": {"include_usage": True, "include_draft": False}}
    *streamed, last = server.complete(**request, **usage)
    assert not any(hasattr(chunk, "draft") for chunk in [*streamed, last])
    asked = list(server.complete(**request, **ASKED))
    assert [chunk.choices for chunk in asked] == [chunk.choices for chunk in streamed]
    whole = server.complete(**request)
    assert not hasattr(whole, "draft") and not hasattr(whole.usage, "drafted_tokens")


def test_whole_answers_and_streams_that_ask_as_those_do(server):
    request = STORY | {"max_tokens": 20}
    whole = server.complete(**request, include_draft=True)
    chunks = list(server.complete(**request, include_draft=True, stream=True))
    assert whole.draft["tokens"] == tokens_of(chunks)
    assert whole.draft["counts"] == chunks[-1].draft["counts"]


def test_without_drafts(server):
    *chunks, last = server.complete(**STORY, num_draft_tokens=0, **ASKED)
    tokens = tokens_of([*chunks, last])
    assert not any(t.get("batched") or t["depth"] or t["length"] for t in tokens)
    assert len(tokens) == STORY["max_tokens"] and last.draft["counts"]["target_passes"] == 0
    assert last.draft["counts"]["batched_tokens"] == 0 == last.draft["counts"]["drafted_tokens"]
    assert last.draft["counts"]["mean_acceptance_length"] == 1


@pytest.mark.exhaustive
def test_who_shares_rounds_is_told(server):
    """In the midst of the answer; the counts are those of all of it, and no token is missing."""
    begun = server.complete(**STORY | {"max_tokens": 200}, **ASKED)
    first = next(begun)
    other = threading.Thread(target=lambda: server.complete(**STORY | {"max_tokens": 9}))
    other.start()
    chunks = [first, *begun]
    other.join(timeout=60)
    tokens, counts = tokens_of(chunks), chunks[-1].draft["counts"]
    batched = [token.get("batched", False) for token in tokens]
    assert [token["index"] for token in tokens] == list(range(200))
    assert 0 < sum(batched) == counts["batched_tokens"] < 200
    place = batched.index(True)
    assert all(batched[place : place + sum(batched)]), "one stretch of the answer"
    assert counts["emitted_tokens"] == 199
    ends = [token for token in tokens[1:-1] if token["depth"] == 0]
    assert [token["length"] for token in ends] == counts["draft_lengths"][: len(ends)]
    shared = [token for token in tokens if token.get("batched")]
    assert any(token["depth"] > 0 for token in shared)


def test_events_of_the_controller(server, monkeypatch):
    """Numbered by the tokens of the answer, and reported once, with the token after them."""
    slow_drafts = SettledCosts(curve(lambda k: 3.0))
    monkeypatch.setattr(generate_step, "costs_of", lambda *_: slow_drafts)
    chunks = list(server.complete(**STORY, num_draft_tokens="auto", **ASKED))
    (told,) = [chunk for chunk in chunks if chunk.draft["drafting_events"]]
    (event,) = told.draft["drafting_events"]
    assert set(event) == {"num_tokens", "what", "reason"} and event["what"] == OFF
    lengths, at = [token["length"] for token in tokens_of(chunks)], event["num_tokens"]
    assert at > 1 and all(lengths[1 : at + 1]) and not any(lengths[at + 1 :])
    assert [token["index"] for token in tokens_of([told])] == [at]


@pytest.mark.parametrize(
    "wish",
    [{"include_draft": "yes"}, {"stream": True, "stream_options": {"include_draft": 1}}],
    ids=["whole", "stream"],
)
def test_what_is_no_wish(server, wish):
    with pytest.raises(BadRequestError, match=r"include_draft is a \w+: give a boolean\."):
        server.complete(**STORY, **wish)


class Told:
    """What a client is told of the responses that it gets, one after the other."""

    def __init__(self, machine: TextStateMachine):
        self.report, self.reader = DraftReport(), TextReader(machine.make_state("normal"))
        self.shown = []

    def follow(self, response: PairResponse) -> None:
        self.report.follow(response)
        for state, letters in self.reader.read(response):
            self.shown += letters if state != "tool" else []

    def take(self) -> list[dict]:
        shown, self.shown = self.shown, []
        return self.report.take(shown, self.reader.num_read)["tokens"]


def handled(machine: TextStateMachine, pieces: list[str], finish_reason: str) -> list[tuple]:
    """(kind, letter) that mlx-lm's handler gives for these pieces of text."""
    state, found = machine.make_state("normal"), []
    for i, piece in enumerate(pieces):
        is_last = i + 1 == len(pieces)
        if is_last and finish_reason == "stop":
            break
        state, segments = TextStateMachine.split(state, piece)
        if is_last:
            state, flushed, name = TextStateMachine.flush(state)
            segments.append((name, flushed))
        found += [(name, letter) for name, text in segments for letter in text]
    return [(name, letter) for name, letter in found if name != "tool"]


@pytest.mark.parametrize("seed", thorough(range(60), *range(8)))
def test_letters_are_known_by_their_tokens(seed):
    """Random pieces with parts of marks in them, taken at random moments."""
    rng = random.Random(seed)
    machine = TextStateMachine(rng.choice(MACHINES) or None)
    parts = ["", "a", "b", "ab", "<", "<t", "think>", "<think>", "</think>", "t>", "</t>", "é<t>"]
    pieces = [rng.choice(parts) for _ in range(40)]
    finish_reason = rng.choice(["stop", "length"])
    report, reported = Told(machine), []
    for i, piece in enumerate(pieces):
        finish = finish_reason if i == 39 else None
        report.follow(PairResponse(piece, i, 0.0, finish, (), TokenOrigin(i % 3, 3)))
        if rng.random() < 0.3:
            reported += report.take()
    reported += report.take()
    found = [
        ("reasoning" if token.get("reasoning") else "normal", letter)
        for token in reported
        for letter in token["text"]
    ]
    assert found == handled(machine, pieces, finish_reason)
    assert sorted({token["index"] for token in reported}) == list(range(40))
    assert [token["index"] for token in reported] == sorted(token["index"] for token in reported)
    for token in reported:
        assert token["id"] == token["index"] and token["depth"] == token["index"] % 3
        assert token["text"] in pieces[token["index"]]


def test_a_letter_that_was_held_is_told_with_its_own_token():
    machine = TextStateMachine({"normal": [("stop", "normal")]})
    report = Told(machine)
    report.follow(PairResponse("a st", 7, 0.0, None, (), TokenOrigin(1, 2)))
    (first,) = report.take()
    report.follow(PairResponse("ay", 8, 0.0, None, (), TokenOrigin(0, 2)))
    second, third = report.take()
    assert [first["text"], second["text"], third["text"]] == ["a ", "st", "ay"]
    assert [first["index"], second["index"], third["index"]] == [0, 0, 1]
    report.follow(PairResponse("x", 9, 0.0, "length", (), TokenOrigin(batched=True)))
    (last,) = report.take()
    assert last["batched"] and report.report.num_batched == 1


def test_caches_need_not_be_reused(server):
    """The answer is the same; the drafter then has seen the whole prompt as well."""
    request = STORY | {"max_tokens": 8}
    first = server.complete(**request, num_draft_tokens=0)
    usage = {reuse: server.complete(**request, reuse_caches=reuse) for reuse in (True, False)}
    assert usage[True].choices == usage[False].choices == first.choices
    cached = {reuse: got.usage.prompt_tokens_details.cached_tokens for reuse, got in usage.items()}
    assert cached[True] > 0 == cached[False]
    with pytest.raises(BadRequestError, match=r"reuse_caches is a string: give a boolean\."):
        server.complete(**STORY, reuse_caches="no")
