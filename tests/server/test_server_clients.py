"""Clients of the server as they are: long conversations, crowds, huge prompts, and leaving."""

import asyncio
import itertools
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import APITimeoutError, AsyncOpenAI, BadRequestError
from serving import ENDLESS, ours, theirs, write_pair

CONTEXT = 1000
ENDLESSLY = 10**5  # tokens: until somebody leaves
STORY = {"messages": [{"role": "user", "content": "Tell a story"}], "logit_bias": ENDLESS}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> dict[str, str]:
    return write_pair(tmp_path_factory.mktemp("pair"), CONTEXT)


@pytest.fixture(scope="module")
def reference(pair):
    with theirs(pair["target"]) as asked:
        yield asked


@pytest.fixture(scope="module")
def server(pair):
    flags = ("--model", pair["target"], "--draft-model", pair["head"])
    with ours(*flags, "--usage-stats", "--prefill-step-size", "512") as asked:
        yield asked


@pytest.fixture(scope="module")
def expected(reference):
    return reference.complete(**STORY).choices


@pytest.fixture
def serves_on(server, expected):
    """Afterwards the server is soon idle, and answers as it should."""
    yield
    until = time.monotonic() + 3
    while server.generator.open_answers:
        assert time.monotonic() < until, "the server still generates for a client that left"
        time.sleep(0.01)
    assert server.complete(**STORY).choices == expected


def text_of(chunks) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.exhaustive
def test_a_conversation_of_ten_turns(server, reference):
    """Every second answer is streamed; from the second turn on, nothing is computed twice."""

    def converse(asked) -> tuple[list[str], list[tuple[int, int]]]:
        said, texts, usages = ["How are you?"], [], []
        for turn in range(10):
            options = {"max_tokens": 12 + turn, "logit_bias": ENDLESS}
            if turn % 2:
                counted = {"stream": True, "stream_options": {"include_usage": True}}
                *chunks, last = asked.chat(*said, **options, **counted)
                texts.append(text_of(chunks))
            else:
                last = asked.chat(*said, **options)
                texts.append(last.choices[0].message.content)
            usages.append(last.usage)
            said += [texts[-1], f"And then {turn}?"]
        return texts, usages

    (got, usages), (expected, _) = converse(server), converse(reference)
    assert got == expected and len(set(got)) == 10
    for before, after in itertools.pairwise(usages):
        assert after.prompt_tokens_details.cached_tokens == before.total_tokens
    assert all(usage.drafted_tokens > 0 for usage in usages)


@pytest.mark.exhaustive
def test_eight_clients_in_their_own_ways(server, reference):
    """Chats and texts, whole and streamed, greedy and sampled, with stop words and logprobs."""
    requests = [
        {"prompt": "Client one says"},
        {"prompt": "Client two says", "stop": ["e"]},
        {"prompt": "Client three says", "num_draft_tokens": 0},
        {"prompt": "Client four says", "logprobs": True, "max_tokens": 5},
        {**STORY, "max_tokens": 60},
        {**STORY, "tree": "2x2:4"},
        {**STORY, "temperature": 0.8, "seed": 7},
        {**STORY, "max_tokens": 1},
    ]

    def answer(asked, stream: bool):
        def ask(request: dict):
            options = {"logit_bias": ENDLESS} | request
            if not stream or "prompt" in request:
                choice = asked.complete(**options).choices[0]
                return choice.text if "prompt" in request else choice.message.content
            return text_of(asked.complete(**options, stream=True))

        return ask

    alone = [answer(server, False)(request) for request in requests]
    greedy = [answer(reference, False)(r) for r in requests if "seed" not in r]
    assert [text for r, text in zip(requests, alone, strict=True) if "seed" not in r] == greedy
    for stream in (False, True):
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(answer(server, stream), requests)) == alone


CLIENT = """
import json, sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1], api_key="none")
options = json.loads(sys.argv[2])
stream = client.chat.completions.create(**options, model="default_model", stream=True)
for chunk in stream:
    print(chunk.choices[0].delta.content, flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_clients", [1, 2])
def test_clients_killed_in_the_midst_of_a_stream(server, serves_on, num_clients):
    options = json.dumps(STORY | {"max_tokens": ENDLESSLY, "temperature": 0})
    line = [sys.executable, "-c", CLIENT, server.url, options]
    clients = [subprocess.Popen(line, stdout=subprocess.PIPE) for _ in range(num_clients)]
    try:
        assert all(client.stdout.readline() for client in clients)
        assert len(server.generator.open_answers) == num_clients
    finally:
        for client in clients:
            client.kill()  # kill -9
            client.communicate(timeout=30)


def test_a_stream_that_is_closed(server, expected, serves_on):
    said = expected[0].message.content
    with server.complete(**STORY, max_tokens=ENDLESSLY, stream=True) as stream:
        got = "".join(next(stream).choices[0].delta.content for _ in range(5))
    assert said.startswith(got) and len(got) == 5


def test_a_client_that_has_waited_long_enough(server, serves_on):
    impatient = server.client.with_options(timeout=0.2)
    with pytest.raises(APITimeoutError):
        impatient.chat.completions.create(
            messages=STORY["messages"],
            model="default_model",
            max_tokens=ENDLESSLY,
            extra_body={"logit_bias": ENDLESS},
        )


def test_requests_that_are_cancelled(server, serves_on):
    """One while it is answered, others while they wait for it."""

    async def cancel() -> None:
        async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            options = {"model": "default_model", "max_tokens": ENDLESSLY, "temperature": 0}
            create = client.chat.completions.create
            bias = {"extra_body": {"logit_bias": ENDLESS}}
            tasks = [
                asyncio.create_task(create(messages=STORY["messages"], seed=i, **options, **bias))
                for i in range(3)
            ]
            while len(server.generator.open_answers) < 3:
                await asyncio.sleep(0.01)
            for task in reversed(tasks):
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(error, asyncio.CancelledError) for error in found)

    asyncio.run(cancel())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_huge_prompts_are_refused(server, serves_on, stream):
    for num_words in (200, 10**5):
        with pytest.raises(BadRequestError, match=f"takes texts of {CONTEXT}, the") as err:
            server.complete(prompt="word " * num_words, stream=stream)
        found = re.search(r"has (more than )?(\d+) tokens", err.value.body["message"])
        if found[1]:  # the rest of it was not looked at
            assert CONTEXT < int(found[2]) < 5 * num_words
        else:
            assert int(found[2]) == 5 * num_words
        content = [{"role": "user", "content": "word " * num_words}]
        with pytest.raises(BadRequestError, match="shorten it"):
            server.complete(messages=content, stream=stream)


@pytest.mark.exhaustive
def test_prompts_of_almost_the_context(server, reference, serves_on):
    """As mlx_lm.server answers them, past the context too; the second is in the caches."""
    options = {"prompt": ("Many long words. " * 60)[: CONTEXT - 5], "logit_bias": ENDLESS}
    expected = reference.complete(**options).choices
    for _ in range(2):
        got = server.complete(**options)
        assert got.usage.prompt_tokens == CONTEXT - 5
        assert got.choices == expected
