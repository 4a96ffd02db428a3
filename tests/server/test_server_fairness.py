"""One client and the others: what nobody may do to anybody else, and clients as they are."""

import http.client
import json
import socket
import threading
import time

import pytest
from grids import thorough
from openai import BadRequestError
from serving import ENDLESS, ours, theirs

from mlx_eagle.server.answer_stream import RequestError
from mlx_eagle.server.prompt import check_text_length

TEXT = {"prompt": "Once upon a time", "max_tokens": 30, "logit_bias": ENDLESS}
HUGE = 2**70


@pytest.fixture(scope="module")
def expected(pair):
    with theirs(pair["target"]) as asked:
        yield asked.complete(**TEXT).choices


@pytest.fixture(scope="module")
def server(flags):
    with ours(*flags) as asked:
        yield asked


EXTREMES = [
    *({name: HUGE} for name in (
        "temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens",
        "repetition_context_size", "presence_context_size", "frequency_context_size", "seed",
        "top_k", "top_p", "min_p", "xtc_probability", "max_completion_tokens", "top_logprobs",
    )),
    {"temperature": 1e300}, {"temperature": 1e-300}, {"temperature": float("nan")},
    {"temperature": True}, {"presence_penalty": -1e30}, {"repetition_penalty": 1e-30},
    {"logit_bias": {"1": HUGE}}, {"logit_bias": {"1": float("inf")}},
    {"logit_bias": {"9" * 5000: 1}},
    {"max_tokens": False}, {"seed": float("-inf")}, {"stop": ["word"] * 65}, {"stop": "x" * 1001},
]  # fmt: skip


def test_extreme_numbers_are_refused_and_fail_nobody(server, expected):
    """They used to end the batch they were in."""
    found, others = [], []

    def ask() -> None:
        while not found or not found[-1]:
            others.append(server.complete(**TEXT).choices == expected)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for extreme in EXTREMES:
            for stream in (False, True):
                status = post(server, TEXT | {"temperature": 1.0, "stream": stream} | extreme)[0]
                assert status == 400, extreme
    finally:
        found.append(True)
        thread.join(timeout=60)
    assert all(others) and others


def test_numbers_at_their_bounds_are_answered(server):
    most = {"temperature": 100, "top_p": 1, "min_p": 1, "repetition_penalty": 100}
    most |= {"presence_penalty": 100, "frequency_penalty": -100, "seed": 2**64 - 1}
    least = {"temperature": 1e-20, "top_p": 0, "min_p": 0, "repetition_penalty": 0.01}
    least |= {"presence_penalty": -100, "frequency_penalty": 100, "seed": 0}
    xtc = {"xtc_probability": 1, "xtc_threshold": 0, "temperature": 1}
    for fields in (most, least, xtc, {"presence_context_size": 2**20, "presence_penalty": 1}):
        for rule in ({}, {"acceptance": "match"}):
            status, document = post(server, TEXT | {"max_tokens": 3} | fields | rule)
            assert status == 200, document


def post(asked, fields: dict, path: str = "/v1/completions", head: dict | None = None):
    connection = http.client.HTTPConnection(*asked.address, timeout=30)
    try:
        raw = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        connection.request("POST", path, raw, head or {})
        response = connection.getresponse()
        content = response.read()
        streamed = content.startswith((b":", b"data"))
        return response.status, content if streamed else json.loads(content)
    finally:
        connection.close()


PROMISES = {
    "several": ({"n": 65}, "asks for 65 answers: ask for at most 64"),
    "best": ({"best_of": 3}, "best_of is not supported: leave it out"),
    "schema": ({"response_format": {"type": "json_schema"}}, "response_format has no json_schema"),
    "xml": ({"response_format": {"type": "xml"}}, "an unknown type: give text, json_object"),
    "forced": ({"tool_choice": "required"}, "forces a call, but the tool is not among tools"),
    "named": ({"tool_choice": {"type": "function"}}, "tool_choice is unknown: give 'auto'"),
    "functions": ({"functions": [{}]}, "functions is not supported: leave it out"),
    "echo": ({"echo": True, "logprobs": True}, "echo and logprobs together"),
    "suffix": ({"suffix": "end"}, "suffix is not supported"),
    "template": ({"chat_template_kwargs": {"chat_template": "x"}}, "kwargs names"),
    "self": ({"chat_template_kwargs": {"self": 1}}, "kwargs names"),
    "truncation": ({"chat_template_kwargs": {"max_length": 3}}, "kwargs names"),
}


@pytest.mark.parametrize("name", PROMISES)
def test_what_would_be_ignored_is_refused(server, name):
    fields, sentence = PROMISES[name]
    status, document = post(server, TEXT | fields)
    assert status == 400 and sentence in document["error"]["message"]


def test_what_a_user_expects(server, expected):
    fields = {"model": "", "draft_model": "", "n": 1, "response_format": {"type": "text"}}
    fields |= {"tool_choice": "auto", "echo": False, "xtc_threshold": 0, "xtc_probability": 0}
    for path in ("/v1/completions", "/v1/completions?api-version=1#part"):
        raw = b"\xef\xbb\xbf" + json.dumps(TEXT | {"temperature": 0} | fields).encode()
        status, document = post(server, raw, path)
        assert status == 200, document
        assert document["choices"][0]["text"] == expected[0].text
    connection = http.client.HTTPConnection(*server.address, timeout=10)
    connection.request("GET", "/v1/models?limit=1")
    assert json.load(connection.getresponse())["object"] == "list"
    connection.close()


def test_tool_choice_none_takes_the_tools_away(server):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    options = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    counts = [
        server.complete(**options, **fields).usage.prompt_tokens
        for fields in ({}, {"tools": [tool], "tool_choice": "none"})
    ]
    assert counts[0] == counts[1]


def half_closed(asked, fields: dict, version: str = "1.1") -> bytes:
    """What comes back for a request after which the client has closed its sending side."""
    raw = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection(asked.address, timeout=30) as connection:
        connection.sendall(head.encode() + raw)
        connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    "stream, version",
    [(True, "1.1"), (False, "1.1"), (False, "1.0")],
)
@pytest.mark.exhaustive
def test_a_half_closed_client_gets_its_answer(server, expected, stream, version):
    """Also where it has to wait so long that the server looks several times who is there."""
    whole = TEXT | {"temperature": 0}
    for max_tokens in (30, 400):
        got = half_closed(server, whole | {"stream": stream, "max_tokens": max_tokens}, version)
        head, _, content = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n"), head
        if stream:
            assert content.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(content)["choices"][0]["text"].startswith(expected[0].text)
    refused = half_closed(server, whole | {"best_of": 2}, version)
    assert refused.startswith(b"HTTP/1.1 400 ")


def test_a_huge_prompt_is_refused_at_once_and_delays_nobody(server, expected):
    """10 MB: it used to be tokenized whole, in the thread that generates for everybody."""
    tokenized, tokenizer = [], server.generator.model_provider.tokenizer
    encode = type(tokenizer._tokenizer).encode

    def counting(self, text, *args, **kwargs):
        tokenized.append((len(text), threading.current_thread()))
        return encode(self, text, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tokenizer._tokenizer), "encode", counting)
        for options in ({"prompt": "word " * 2 * 10**6}, {"messages": [
            {"role": "user", "content": "word " * 2 * 10**6}
        ]}):  # fmt: skip
            with pytest.raises(BadRequestError, match=r"more than .* tokens.*takes texts of 2000"):
                server.complete(**options, max_tokens=5)
        assert server.complete(**TEXT).choices == expected
    lengths = [length for length, thread in tokenized]
    assert sum(lengths) < 10**5, "almost all of it was tokenized"
    assert server.generator._generation_thread not in {thread for _, thread in tokenized[:2]}


def test_texts_are_measured_as_they_are_tokenized(server):
    """A refusal is never wrong: a text has no fewer tokens than its beginning."""
    provider = server.generator.model_provider
    text = "Many words, and more. " * 4000
    num_tokens = len(provider.tokenizer.encode(text))
    check_text_length(text, provider.tokenizer.encode, num_tokens + 1)
    with pytest.raises(RequestError, match="shorten it"):
        check_text_length(text, provider.tokenizer.encode, num_tokens // 2)


@pytest.mark.exhaustive
def test_an_answer_that_others_wait_for_ends_in_time(flags):
    """One at a time: the second would wait for all of the first."""
    with ours(*flags, "--time-limit", "0.5", "--decode-concurrency", "1") as asked:
        endless = TEXT | {"seed": 1, "temperature": 1.0, "max_tokens": 10**6}
        got = []
        first = threading.Thread(target=lambda: got.append(asked.complete(**endless)))
        first.start()
        while not asked.generator.open_answers:
            time.sleep(0.01)
        assert asked.complete(**TEXT, seed=2).choices[0].finish_reason == "length"  # greedy
        assert asked.complete(**TEXT | {"temperature": 1.0}, seed=2).usage.completion_tokens == 30
        first.join(timeout=30)
        assert got[0].choices[0].finish_reason == "length"
        assert 0 < got[0].usage.completion_tokens < 10**6


@pytest.mark.exhaustive
def test_an_answer_that_nobody_waits_for_goes_on(flags):
    """Though it has had its time: who comes meanwhile joins it."""
    with ours(*flags, "--time-limit", "0.01") as asked:
        long = TEXT | {"max_tokens": 200, "stream": True}
        with asked.complete(**long) as stream:
            next(stream)
            assert asked.complete(**TEXT).usage.completion_tokens == 30
            assert sum(1 for _ in stream) > 150


SEEDED = TEXT | {"temperature": 0.9, "seed": 7}


@pytest.mark.parametrize(
    "fields",
    thorough(
        [
            {"temperature": 0},
            {},
            {"acceptance": "reject"},
            {"acceptance": "match"},
            {"xtc_probability": 0.5, "xtc_threshold": 0.1},
        ],
        {},
        {"acceptance": "match"},
    ),
    ids=str,
)
def test_a_request_with_a_seed_shares_rounds(server, fields):
    """Its text is that of its seed, whoever else draws random numbers meanwhile."""
    request = SEEDED | fields
    expected = server.complete(**request).choices
    long = TEXT | {"max_tokens": 1500, "stream": True, "temperature": 0.9}
    with server.complete(**long) as stream:
        next(stream)
        got = server.complete(**request, include_draft=True)
        assert len(server.generator.open_answers) == 1, "the second waited for the first"
    assert got.choices == expected
    assert got.draft["counts"]["batched_tokens"] > 20
