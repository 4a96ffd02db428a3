"""The server: mlx_lm.server's answers, with drafts, caches of earlier turns and many clients."""

import itertools
import json
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from grids import thorough
from openai import APIError
from serving import ENDLESS, ours, theirs, write_model, write_tokenizer

from mlx_eagle.batch.rounds import Batch
from mlx_eagle.drafters.model_drafter import ModelDrafter
from mlx_eagle.target_model.target import Target

DRAFTS = ("model", "head")


@pytest.fixture(scope="module")
def reference(pair):
    with theirs(pair["target"]) as asked:
        yield asked


@pytest.fixture(scope="module", params=thorough(DRAFTS, "head"))
def drafted(request, pair):
    flags = ("--model", pair["target"], "--draft-model", pair[request.param])
    with ours(*flags, "--usage-stats") as asked:
        yield asked


@pytest.fixture(scope="module")
def server(pair):
    flags = ("--model", pair["target"], "--draft-model", pair["model"])
    with ours(*flags, "--usage-stats") as asked:
        yield asked


REQUESTS = {
    "chat": {"messages": [{"role": "user", "content": "How are you?"}]},
    "system": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Name a colour."}]},
        ]
    },
    "text": {"prompt": "Once upon a time"},
    "long": {"prompt": "Once upon a time", "max_tokens": 60, "logit_bias": ENDLESS},
    "one token": {"prompt": "Once", "max_tokens": 1},
    "no drafts": {"prompt": "Once upon", "num_draft_tokens": 0},
    "many drafts": {"prompt": "Once upon", "num_draft_tokens": 9},
    "penalty": {"prompt": "aaaaaa", "repetition_penalty": 1.8, "frequency_penalty": 0.5},
    "nulls": {"prompt": "Once", "stop": None, "seed": None, "logit_bias": None},
}


def counts(usage) -> tuple:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_of_mlx_lm_server(drafted, reference, name):
    got = drafted.complete(**REQUESTS[name])
    expected = reference.complete(**REQUESTS[name])
    assert got.choices == expected.choices
    assert counts(got.usage) == counts(expected.usage)
    assert got.usage.accepted_tokens <= got.usage.drafted_tokens
    assert got.usage.mean_acceptance_length >= 1


@pytest.mark.parametrize("name", thorough(["chat", "long"], "chat"))
def test_streams_are_those_of_mlx_lm_server(server, reference, name):
    options = REQUESTS[name] | {"stream": True, "stream_options": {"include_usage": True}}

    def read(asked) -> tuple[str, list, tuple]:
        *chunks, last = list(asked.complete(**options))
        pieces = [c.choices[0] for c in chunks]
        text = "".join((p.delta.content if name == "chat" else p.text) or "" for p in pieces)
        return text, [p.finish_reason for p in pieces if p.finish_reason], counts(last.usage)

    assert read(server) == read(reference)
    assert server.complete(**REQUESTS[name]).choices[0].finish_reason in read(server)[1]


def test_stop_words_end_the_text_before_them(server, reference):
    prompt = {"prompt": "Once upon a time", "max_tokens": 40, "logit_bias": ENDLESS}
    text = reference.complete(**prompt).choices[0].text
    for stop in (text[20:22], [text[31:34], "not in it"], text[0:3]):
        got = server.complete(**prompt, stop=stop)
        assert got.choices == reference.complete(**prompt, stop=stop).choices
        assert got.choices[0].finish_reason == "stop"
        assert len(got.choices[0].text) < 40


def test_logprobs_are_those_of_mlx_lm_server(server, reference):
    options = REQUESTS["chat"] | {"logprobs": True, "top_logprobs": 3, "logit_bias": ENDLESS}

    def rows(asked) -> list[dict]:
        return asked.complete(**options).to_dict()["choices"][0]["logprobs"]["content"]

    got, expected = rows(server), rows(reference)
    assert len(got) == len(expected) == 24
    for ours_, theirs_ in zip(got, expected, strict=True):
        best = max(theirs_["top_logprobs"], key=lambda top: top["logprob"])
        assert ours_["id"] == best["id"]
        assert ours_["logprob"] == pytest.approx(best["logprob"], abs=1e-3)
        ids = [{top["id"] for top in row["top_logprobs"]} for row in (ours_, theirs_)]
        assert ids[0] == ids[1] and ours_["top_logprobs"][0]["id"] == best["id"]
    only = options | {"top_logprobs": -1}
    options = only
    assert [r["logprob"] for r in rows(server)] == pytest.approx(
        [r["logprob"] for r in rows(reference)], abs=1e-3
    )


def converse(asked, question: str, num_turns: int, **options) -> list:
    """The answers to turn after turn of one conversation."""
    said, answers = [question], []
    for turn in range(num_turns):
        answers.append(asked.chat(*said, max_tokens=15, logit_bias=ENDLESS, **options))
        said += [answers[-1].choices[0].message.content, f"And then {turn}?"]
    return answers


PENALTY = {"repetition_penalty": 3.0, "repetition_context_size": 200}


@pytest.mark.parametrize("question, options", [("How are you?", {}), ("Who are you?", PENALTY)])
def test_turns_reuse_the_caches_of_the_turn_before(
    drafted, reference, question, options, monkeypatch
):
    rows, forward = [], Target.__call__

    def counting(self, tokens, *args, **options):
        rows.append(tokens.shape[0])
        return forward(self, tokens, *args, **options)

    monkeypatch.setattr(Target, "__call__", counting)
    answers = converse(drafted, question, 4, **options)
    texts = [answer.choices[0].message.content for answer in answers]
    expected = converse(reference, question, 4, **options)
    assert texts == [answer.choices[0].message.content for answer in expected]
    rows.clear()
    last = converse(drafted, question, 1, **options)[0].usage  # the first turn once more
    assert last.prompt_tokens_details.cached_tokens >= last.prompt_tokens - 2
    for before, after in itertools.pairwise(answers):
        assert after.usage.prompt_tokens_details.cached_tokens == before.usage.total_tokens
    # One token to make the seam again, then what is new; nothing of the old.
    assert rows[0] <= 2 and max(rows) <= 4


def test_a_turn_taken_again_branches_off(server, reference):
    first = server.chat("Tell me", logit_bias=ENDLESS).choices[0].message.content
    for question in ("Go on", "Go off", "Go on"):
        turns = ("Tell me", first, question)
        got = server.chat(*turns, logit_bias=ENDLESS)
        assert got.choices == reference.chat(*turns, logit_bias=ENDLESS).choices
        assert got.usage.prompt_tokens_details.cached_tokens > 0


def test_eight_clients_at_once(drafted, reference):
    prompts = [f"Client {i} says" for i in range(8)]
    options = {"max_tokens": 30, "logit_bias": ENDLESS}
    expected = [reference.complete(prompt=p, **options).choices for p in prompts]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda p: drafted.complete(prompt=p, **options).choices, prompts))
    assert got == expected
    assert drafted.complete(**REQUESTS["long"]).usage.drafted_tokens > 0  # alone again


def test_a_second_request_joins_the_first(server, reference):
    """It does not wait for the first, whose text goes on as it was; both are drafted for."""
    first = {"prompt": "A long story", "max_tokens": 300, "logit_bias": ENDLESS}
    first["stop"] = ["not in it"]
    second = {"prompt": "A short one", "max_tokens": 10, "logit_bias": ENDLESS}
    expected = [reference.complete(**r).choices[0] for r in (first, second)]
    options = {"stream": True, "stream_options": {"include_usage": True, "include_draft": True}}
    stream = iter(server.complete(**first, **options))
    begun = [next(stream) for _ in range(5)]
    other = server.complete(**second, include_draft=True)
    assert other.choices[0] == expected[1]
    assert len(server.generator.open_answers) == 1, "the second client waited for the first"
    *chunks, last = [*begun, *stream]
    ending = [token for chunk in chunks[-30:] for token in chunk.draft["tokens"]]
    assert not any(token.get("batched") for token in ending), "it is alone again"
    assert any(token["depth"] > 0 for token in ending), "and drafted for"
    assert "".join(c.choices[0].text for c in chunks) == expected[0].text
    for told in ([t for chunk in chunks for t in chunk.draft["tokens"]], other.draft["tokens"]):
        batched = [token for token in told if token.get("batched")]
        assert any(token["depth"] > 0 for token in batched) and len(batched) < len(told)
    assert last.usage.drafted_tokens > 0 < other.usage.drafted_tokens


def test_same_seed_same_text_drafted_or_not(server):
    options = {"prompt": "Once upon", "temperature": 0.8, "top_p": 0.95, "logit_bias": ENDLESS}
    texts = [
        server.complete(**options, seed=seed, num_draft_tokens=k).choices[0].text
        for seed, k in ((3, 3), (3, 0), (3, 7), (4, 3))
    ]
    assert texts[0] == texts[1] == texts[2] != texts[3]
    assert len(server.complete(**options).choices[0].text) == 24
    assert len(server.complete(**options, xtc_probability=0.5).choices[0].text) == 24


def test_a_decode_concurrency_of_one_drafts_for_everybody(pair, reference):
    flags = ("--model", pair["target"], "--draft-model", pair["model"], "--usage-stats")
    prompts = [f"Client {i} says" for i in range(3)]
    with ours(*flags, "--decode-concurrency", "1") as asked, ThreadPoolExecutor(3) as pool:
        got = list(pool.map(lambda p: asked.complete(prompt=p, logit_bias=ENDLESS), prompts))
    for prompt, answer in zip(prompts, got, strict=True):
        expected = reference.complete(prompt=prompt, logit_bias=ENDLESS)
        assert answer.choices == expected.choices
        assert answer.usage.drafted_tokens > 15


@pytest.mark.parametrize("head", thorough(["", "{model}+"], ""))
def test_prompt_lookup(pair, reference, head):
    name = head.format(**pair) + "lookup"
    flags = ("--model", pair["target"], "--draft-model", name, "--usage-stats")
    with ours(*flags) as asked:
        for name in ("chat", "long", "penalty"):
            got = asked.complete(**REQUESTS[name])
            assert got.choices == reference.complete(**REQUESTS[name]).choices


def test_reasoning_is_told_apart_as_mlx_lm_does(tmp_path):
    num_tokens = write_tokenizer(tmp_path, thinks=True)
    write_model(tmp_path, num_tokens)
    bias = ENDLESS | {str(num_tokens - 1): 2}  # a little for the end of thinking
    options = REQUESTS["chat"] | {"max_tokens": 60, "logit_bias": bias}
    flags = ("--model", str(tmp_path), "--draft-model", "lookup")
    with theirs(str(tmp_path)) as plain_server, ours(*flags) as asked:
        expected = plain_server.complete(**options).choices[0].message
        assert expected.reasoning and expected.content, "it should think, and then speak"
        assert asked.complete(**options).choices[0].message == expected


def test_quantized_caches_share_no_rounds(pair):
    flags = ("--model", pair["target"], "--draft-model", pair["model"], "--usage-stats")
    quantized = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "20")
    with ours(*flags, *quantized) as asked, ThreadPoolExecutor(2) as pool:
        prompts = ["The same question for all"] * 2
        options = {"max_tokens": 8, "include_draft": True}
        got = list(pool.map(lambda p: asked.complete(prompt=p, **options), prompts))
    assert len({answer.choices[0].text for answer in got}) == 1
    assert all(answer.usage.drafted_tokens > 0 for answer in got)
    assert not any(answer.draft["counts"]["batched_tokens"] for answer in got)


def test_the_same_request_again_and_what_it_answered(server, reference):
    """mlx-lm has nothing to run where it knows the whole prompt."""
    options = {"prompt": "Say it again", "logit_bias": ENDLESS}
    expected = reference.complete(**options).choices
    for _ in range(2):
        assert server.complete(**options).choices == expected
    text = options["prompt"]
    for k in (3, 3, 0, 0, 3):
        got = server.complete(prompt=text, num_draft_tokens=k, max_tokens=8, logit_bias=ENDLESS)
        text += got.choices[0].text
    whole = reference.complete(**options | {"max_tokens": 40}).choices[0].text
    assert text == options["prompt"] + whole


def begin(asked, **body) -> socket.socket:
    """A connection on which a streamed answer has begun."""
    raw = json.dumps({"prompt": "Tell a story", "stream": True, "logit_bias": ENDLESS} | body)
    connection = socket.create_connection(asked.address, timeout=30)
    connection.sendall(
        f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(raw)}\r\n\r\n{raw}".encode()
    )
    return connection


def wait_until_idle(asked, seconds: float) -> None:
    """Until nothing is generated for anybody."""
    until = time.monotonic() + seconds
    while asked.generator.open_answers:
        assert time.monotonic() < until, "the server still generates for a client that left"
        time.sleep(0.02)


@pytest.mark.parametrize("stream", thorough([True, False], True))
@pytest.mark.parametrize("num_clients, is_killed", [(1, True), (1, False), (3, True)])
def test_a_client_that_leaves_costs_nobody_anything(
    server, reference, stream, num_clients, is_killed
):
    leaving = [begin(server, max_tokens=1500, stream=stream) for _ in range(num_clients)]
    if stream:
        for connection in leaving:
            assert connection.recv(1)
    else:
        time.sleep(0.1)
    for connection in leaving:
        if is_killed:  # a reset, as by kill -9 with data unread
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
    options = {"prompt": "Tell a story of", "logit_bias": ENDLESS}
    assert server.complete(**options).choices == reference.complete(**options).choices
    wait_until_idle(server, 3)


def test_a_client_that_leaves_during_a_long_prompt(pair, reference):
    flags = ("--model", pair["target"], "--draft-model", pair["head"])
    with ours(*flags, "--prefill-step-size", "8") as asked:
        connection = begin(asked, prompt="long " * 390, max_tokens=5)
        assert b"keepalive" in connection.recv(2000) + connection.recv(2000)
        connection.close()
        wait_until_idle(asked, 2)
        options = {"prompt": "long " * 20, "logit_bias": ENDLESS}
        text = asked.complete(**options).choices[0].text
        assert text.removeprefix(" ") == reference.complete(**options).choices[0].text


@pytest.mark.exhaustive
def test_a_failing_batch_costs_nobody_an_answer(server, reference, monkeypatch):
    """Those who were in it go on, each alone, from the token where they were."""
    num_calls, run = 0, Batch.round

    def failing(self):
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3 == 0:
            raise RuntimeError("injected")
        return run(self)

    requests = [{"prompt": f"Once upon {i}", "logit_bias": ENDLESS} for i in range(3)]
    requests[0] |= {"max_tokens": 60}
    requests[2] |= {"repetition_penalty": 1.8, "max_tokens": 20}
    expected = [reference.complete(**request).choices for request in requests]
    sampled = {"prompt": "Once", "temperature": 0.8, "seed": 4, "logit_bias": ENDLESS}
    sampled |= {"max_tokens": 60}
    expected.append(server.complete(**sampled).choices)
    monkeypatch.setattr(Batch, "round", failing)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda r: server.complete(**r).choices, [*requests, sampled]))
    assert num_calls >= 3 and got == expected
    assert server.complete(**requests[0]).choices == expected[0]


def test_a_failing_drafter_costs_its_request_only(server, reference, monkeypatch):
    def failing(self, size, pick):
        monkeypatch.undo()
        raise RuntimeError("injected")

    options = {"prompt": "Once upon"}
    for stream in (False, True):
        monkeypatch.setattr(ModelDrafter, "propose", failing)
        with pytest.raises(APIError, match="injected"):
            list(server.complete(**options, stream=stream))
        assert server.complete(**options).choices == reference.complete(**options).choices
