"""Several clients at once: shared rounds with drafts, and to each the text that it gets alone."""

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mlx_lm
import pytest
from mlx_lm.sample_utils import make_logits_processors
from openai import APIError
from serving import ENDLESS, ours

from mlx_eagle.batch.group import Group
from mlx_eagle.decoding.decoder import Decoder
from mlx_eagle.target_model.target import Target

LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "logit_bias": ENDLESS, "stream": True}
CHUNK = 8


@pytest.fixture(scope="module")
def server(flags):
    with ours(*flags, "--prefill-step-size", str(CHUNK)) as asked:
        yield asked


def requests(num: int) -> list[dict]:
    """Prompts and answers of many lengths."""
    dice = random.Random(num)
    return [
        {"prompt": f"Client {i} says {'so ' * dice.randrange(30)}", "max_tokens": n}
        for i, n in enumerate(dice.choices(range(1, 40), k=num))
    ]


def texts_of_mlx_lm(pair: dict[str, str], asked: list[dict]) -> list[str]:
    model, tokenizer = mlx_lm.load(pair["target"])
    bias = {int(token): value for token, value in ENDLESS.items()}
    return [
        mlx_lm.generate(
            model, tokenizer, logits_processors=make_logits_processors(bias), **request
        )
        for request in asked
    ]


def ask_all(
    pair, flags, num_requests: int, num_clients: int, num_draft_tokens: str = "auto"
) -> list[dict]:
    """Greedy requests beside sampled ones, and beside clients that leave in mid-stream.

    Their texts are checked; returns the counts of each.
    """
    asked = requests(num_requests)
    expected = texts_of_mlx_lm(pair, asked)
    sampled = {"prompt": "Draw", "temperature": 0.9, "seed": 5, "max_tokens": 30}
    flags = (*flags, "--num-draft-tokens", num_draft_tokens, "--prompt-cache-size", "4")
    with ours(*flags) as server:
        drawn = server.complete(**sampled, logit_bias=ENDLESS).choices[0].text
        done = threading.Event()
        others: list[bool] = []

        def draw() -> None:
            while not done.is_set():
                text = server.complete(**sampled, logit_bias=ENDLESS).choices[0].text
                others.append(text == drawn)

        def leave() -> None:
            while not done.is_set():
                with server.complete(**LONG) as stream:
                    for _ in range(5):
                        next(stream)

        visitors = [threading.Thread(target=work) for work in (draw, leave)]
        for visitor in visitors:
            visitor.start()
        try:
            with ThreadPoolExecutor(num_clients) as pool:
                answers = list(
                    pool.map(
                        lambda r: server.complete(**r, logit_bias=ENDLESS, include_draft=True),
                        asked,
                    )
                )
        finally:
            done.set()
            for visitor in visitors:
                visitor.join(timeout=60)
        until = time.monotonic() + 10
        while server.generator.open_answers:
            assert time.monotonic() < until, "the server still generates for somebody"
            time.sleep(0.01)
    # mlx-lm takes the space away that a text begins with.
    assert [answer.choices[0].text.removeprefix(" ") for answer in answers] == expected
    assert all(others) and others
    counts = [answer.draft["counts"] for answer in answers]
    shared = sum(count["batched_tokens"] for count in counts)
    assert shared > sum(len(answer.draft["tokens"]) for answer in answers) / 2
    return counts


@pytest.mark.parametrize(
    "num_requests, num_clients", [(8, 4), pytest.param(64, 8, marks=pytest.mark.exhaustive)]
)
def test_texts_are_those_of_mlx_lm(pair, flags, num_requests, num_clients):
    counts = ask_all(pair, flags, num_requests, num_clients)
    assert sum(count["drafted_tokens"] for count in counts) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_requests, num_clients", [(6, 3), (40, 8)])
def test_recurrent_targets_are_drafted_for(pair, recurrent, num_requests, num_clients):
    flags = ("--model", recurrent, "--draft-model", pair["head"], "--usage-stats")
    counts = ask_all({"target": recurrent}, flags, num_requests, num_clients, "3")
    # What was drafted for it alone, 3 tokens a round at most, is not all.
    alone = [3 * (count["emitted_tokens"] - count["batched_tokens"]) for count in counts]
    drafted = [count["drafted_tokens"] for count in counts]
    assert sum(drafted) > sum(alone), counts


def watch(monkeypatch) -> list[str]:
    """What the generating thread does: "chunk" and "round", in order."""
    seen: list[str] = []
    chunk, run = Decoder._prefill_chunk, Group.round

    def prefill(self, tokens, embeddings) -> None:
        assert len(tokens) <= CHUNK
        seen.append("chunk")
        chunk(self, tokens, embeddings)

    def round_(self) -> list:
        made = run(self)
        seen.extend(["round"] * bool(made))
        return made

    monkeypatch.setattr(Decoder, "_prefill_chunk", prefill)
    monkeypatch.setattr(Group, "round", round_)
    return seen


@pytest.mark.exhaustive
def test_a_long_prompt_delays_others_by_one_chunk(server, monkeypatch):
    with server.complete(**LONG) as stream:
        next(stream)
        seen = watch(monkeypatch)
        long = server.complete(prompt="word " * 60, max_tokens=3, logit_bias=ENDLESS)
    assert long.usage.prompt_tokens == 300
    first, last = seen.index("chunk"), len(seen) - seen[::-1].index("chunk")
    reading = seen[first:last]
    assert reading.count("chunk") == -(-299 // CHUNK)
    assert all(pair != ("chunk", "chunk") for pair in itertools.pairwise(reading))


@pytest.mark.exhaustive
def test_long_prompts_are_read_in_turn(server, monkeypatch):
    """A short one does not wait for the end of a long one."""
    monkeypatch.setattr(Decoder, "_prefill_chunk", slowly(Decoder._prefill_chunk))
    ended = []

    def ask(name: str, num_words: int) -> None:
        server.complete(prompt=f"{name} " * num_words, max_tokens=1)
        ended.append(name)

    long = threading.Thread(target=ask, args=("long", 60))
    long.start()
    while not server.generator.open_answers:
        time.sleep(0.01)
    ask("short", 4)
    long.join(timeout=60)
    assert ended == ["short", "long"]


def slowly(work):
    def wrapped(*args) -> None:
        time.sleep(0.02)
        work(*args)

    return wrapped


def test_rounds_are_shared_by_those_who_draft_alike(server):
    """Others have rounds of their own, in turn; trees and exact rows are always by themselves."""
    alone = [{"num_draft_tokens": 1}, {"tree": "2x2:4"}, {"num_draft_tokens": 0}, {"exact": True}]
    wishes = [{}, *alone, {}]
    request = {"prompt": "Once upon a time", "max_tokens": 24, "logit_bias": ENDLESS}
    with server.complete(**LONG) as stream:
        next(stream)
        with ThreadPoolExecutor(6) as pool:
            got = list(
                pool.map(lambda w: server.complete(**request, **w, include_draft=True), wishes)
            )
        assert len(server.generator.open_answers) == 1
    assert len({answer.choices[0].text for answer in got}) == 1
    lengths = [max(answer.draft["counts"]["draft_lengths"], default=0) for answer in got]
    assert lengths == [3, 1, 2, 0, 3, 3]
    shared = [answer.draft["counts"]["batched_tokens"] for answer in got]
    assert shared[1:5] == [0, 0, 0, 0] and min(shared[0], shared[5]) > 12


def test_caches_of_shared_rounds_are_used_again(server, monkeypatch):
    """Of both models: the next turn computes nothing of the turns before."""
    rows, forward = [], Target.__call__

    def counting(self, tokens, *args, **options):
        rows.append(tokens.shape[0])
        return forward(self, tokens, *args, **options)

    said, num_before = ["How are you today? " * 5], 0
    with server.complete(**LONG) as stream:
        next(stream)
        for turn in range(3):
            answer = server.chat(*said, max_tokens=15, logit_bias=ENDLESS, include_draft=True)
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert cached >= num_before - 3 * bool(turn)
            assert answer.draft["counts"]["batched_tokens"] > 5
            said += [answer.choices[0].message.content, f"And then {turn}?"]
            num_before = answer.usage.total_tokens
    monkeypatch.setattr(Target, "__call__", counting)
    answer = server.chat(*said, max_tokens=15, logit_bias=ENDLESS)
    assert answer.usage.prompt_tokens_details.cached_tokens >= num_before - 3
    assert sum(rows[: rows.index(4)]) < answer.usage.prompt_tokens - num_before + 10


def test_a_stop_word_ends_a_shared_answer(server, pair):
    request = {"prompt": "Once upon a time", "max_tokens": 40, "logit_bias": ENDLESS}
    text = server.complete(**request).choices[0].text
    with server.complete(**LONG) as stream:
        next(stream)
        stop = text[9:11]
        got = server.complete(**request, stop=stop, include_draft=True)
        assert got.choices[0].finish_reason == "stop"
        assert got.choices[0].text == text[: text.index(stop)]
        assert got.draft["counts"]["emitted_tokens"] == len(got.draft["tokens"]) - 1
        again = server.complete(**request)  # on the caches that these have left
    assert again.choices[0].text == text


def test_stopping_in_the_midst_of_shared_rounds(flags):
    """Whoever is being answered is told so at once."""
    found: list[str] = []

    def read(stream) -> None:
        try:
            for _ in stream:
                pass
        except APIError as err:
            found.append(str(err))

    with ours(*flags) as asked:
        streams = [asked.complete(**LONG) for _ in range(3)]
        for stream in streams:
            next(stream)
        threads = [threading.Thread(target=read, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        asked.generator.stop_and_join()
        for thread in threads:
            thread.join(timeout=10)
    assert len(found) == 3 and all("the server is stopping" in sentence for sentence in found)
