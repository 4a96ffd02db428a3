"""Copies beside a drafter through the whole server: later turns, failures, counts, forms."""

import string
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
from automaton import write_automaton
from grids import thorough
from openai.types import Completion
from serving import ENDLESS, ask_json, ours
from test_server_drafted import metrics_of
from test_server_sharing import ask_all
from test_server_tools import calls_of, streamed

from mlx_eagle.batch.rounds import Batch

WORDS = [f"w{a}{b} " for a in "ab" for b in string.ascii_lowercase[:20]]
CITY = "".join(f"c{a}{b}" for a in "ab" for b in string.ascii_lowercase[:16])
CALL = [
    '{"name": "find", ',
    '"arguments": {"city": "',
    *[CITY[i : i + 3] for i in range(0, 96, 3)],
]
SCRIPTS = {
    "!": ["Hel", "lo ", "there."],
    "@": WORDS,
    "#": ["Let me ", "<tool_call>", *CALL, '"}}', "</tool_call>"],
    "~": [
        "<think>",
        *[f"t{a}{b} " for a in "ab" for b in string.ascii_lowercase[:20]],
        "</think>",
        "So.",
    ],
}
K = 3  # draft tokens of a round
COUNTS = ("drafted_tokens", "accepted_tokens", "copied_tokens", "accepted_copied_tokens")


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> tuple[str, ...]:
    """A target that says the scripts, and a draft model whose every third token is wrong."""
    folder = tmp_path_factory.mktemp("automata")
    target = write_automaton(folder / "target", SCRIPTS)
    draft = write_automaton(folder / "draft", SCRIPTS, mistakes=3)
    pair = ("--model", target, "--draft-model", f"{draft}+lookup")
    return *pair, "--num-draft-tokens", str(K), "--usage-stats"


@pytest.fixture(scope="module")
def server(flags):
    """Without answers to others: what is copied stands in the conversation."""
    with ours(*flags) as asked:
        yield asked


@pytest.fixture(scope="module")
def copying(flags):
    with ours(*flags, "--copy-answers", "10000") as asked:
        yield asked


@pytest.fixture(scope="module")
def heeding(pair) -> tuple[str, ...]:
    """A target that heeds each token and its place, and a draft model of nearly its mind."""
    return "--model", pair["target"], "--draft-model", pair["model"] + "+lookup"


@pytest.fixture(scope="module")
def talker(heeding):
    with ours(*heeding) as asked:
        yield asked


def tokens(server, text: str) -> list[int]:
    return server.generator.model_provider.tokenizer.encode(text)


def say(server, prompt: str | list, **more) -> Completion:
    return server.complete(**{"prompt": prompt, "max_tokens": 80, "include_draft": True} | more)


def said(answer) -> list[int]:
    """The tokens of an answer, and of its chunks."""
    chunks = answer if isinstance(answer, list) else [answer]
    return [token["id"] for chunk in chunks for token in chunk.draft["tokens"]]


def counts_of(answer: Completion) -> dict[str, int]:
    return {name: answer.draft["counts"][name] for name in COUNTS}


def num_cached(answer) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def wait_until_idle(server) -> None:
    until = time.monotonic() + 30
    while server.generator.open_answers:
        assert time.monotonic() < until, "the server still generates for somebody"
        time.sleep(0.01)


# --- later turns ------------------------------------------------------------------------------


FEW = {str(token): 30 for token in range(5)}
"""A bias to few letters: the text does not end, and repeats itself."""


def read_all(server, prompt: list[int]) -> list[int]:
    return said(say(server, prompt, logit_bias=FEW))


def stopped(server, prompt: list[int]) -> Completion:
    """A word of the client's, all that was said, ends the answer within a round.

    Behind a token that was drafted and kept there is another of its round.
    """
    told = say(server, prompt, cache_salt="to look", logit_bias=FEW).draft["tokens"]
    length = next(i for i in range(24, len(told)) if told[i]["depth"] > 0) + 1
    word = "".join(token["text"] for token in told[:length])
    answer = say(server, prompt, stop=word, logit_bias=FEW)
    assert said(answer) == [token["id"] for token in told[:length]]
    assert answer.choices[0].finish_reason == "stop"
    return answer


def stop_within_a_round(server, prompt: list[int]) -> list[int]:
    return said(stopped(server, prompt))


def stop_within_a_copy(server, prompt: list[int]) -> list[int]:
    """The same where the round was copied from the turn before; returns both answers."""
    first = read_all(server, prompt)
    question = tokens(server, " or once more")
    return first + question + stop_within_a_round(server, prompt + first + question)


def leave(server, prompt: list[int]) -> list[int]:
    """The client leaves behind some token."""
    stream = say(server, prompt, stream=True, logit_bias=FEW, max_tokens=1500)
    with closing(stream):
        chunks = [next(stream) for _ in range(40)]
    wait_until_idle(server)
    return said(chunks)


def share_rounds(server, prompt: list[int]) -> list[int]:
    """Another client is there all the time; a word ends the answer."""
    long = {"logit_bias": FEW, "max_tokens": 1500, "stream": True}
    with closing(say(server, "A long story", **long)) as stream:
        next(stream)
        answer = stopped(server, prompt)
    assert answer.draft["counts"]["batched_tokens"] > 5
    wait_until_idle(server)
    return said(answer)


TURNS = {
    "read": read_all,
    "stopped": stop_within_a_round,
    "stopped in a copy": stop_within_a_copy,
    "left": leave,
    "shared": share_rounds,
}


def first_turn(server, name: str) -> list[int]:
    """Prompt and answer."""
    prompt = tokens(server, f"Once {name}")
    return prompt + TURNS[name](server, prompt)


def check_next_turn(server, before: list[int], place: str) -> None:
    """It is decoded as if no cache had held the turn before."""
    prompt = before + tokens(server, " and once more")
    hits = metrics_of(server)[f"prompt_cache_hits_total:{place}"]
    cached, anew = (
        say(server, prompt, reuse_caches=reuse, logit_bias=FEW) for reuse in (True, False)
    )
    assert metrics_of(server)[f"prompt_cache_hits_total:{place}"] == hits + 1
    assert num_cached(cached) >= len(before) - 1 and num_cached(anew) == 0
    assert said(cached) == said(anew)
    assert cached.draft["counts"] == anew.draft["counts"]
    assert counts_of(cached)["accepted_copied_tokens"] > 15


@pytest.mark.parametrize("name", TURNS)
def test_a_turn_on_caches_in_memory_copies_what_lies_in_them(talker, name):
    check_next_turn(talker, first_turn(talker, name), "memory")


def test_a_turn_on_caches_from_disk_copies_what_lies_in_them(heeding, tmp_path):
    flags = (*heeding, "--prompt-cache-dir", tmp_path)
    with ours(*flags) as asked:
        before = [first_turn(asked, name) for name in TURNS]
    with ours(*flags) as asked:
        for each in before:
            check_next_turn(asked, each, "disk")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["full", "recurrent"])
def test_turns_of_a_chat_with_a_head(pair, recurrent, kind):
    """Of states that cannot be trimmed, a turn finds those at the end of a message."""
    target = {"full": pair["target"], "recurrent": recurrent}[kind]
    flags = ("--model", target, "--draft-model", pair["head"] + "+lookup")
    with ours(*flags) as asked:
        texts = ["Say a b c d e f g h i j, a b c d e f g h i j"]
        num_copied = 0
        for turn in range(3):
            options = {"max_tokens": 40, "logit_bias": ENDLESS, "include_draft": True}
            cached, anew = (
                asked.chat(*texts, reuse_caches=reuse, **options) for reuse in (True, False)
            )
            assert (num_cached(cached) > 0) == (turn > 0) and num_cached(anew) == 0
            assert cached.draft == anew.draft
            num_copied += counts_of(cached)["accepted_copied_tokens"]
            texts += [cached.choices[0].message.content, f"a b c d e f{turn}"]
    assert num_copied > 0


def test_copies_go_on_where_a_shared_round_has_failed(server, monkeypatch):
    """Each request goes on by itself, and sees what it had seen, and what it has said."""
    asked = tokens(server, "Begin @\n")
    before = asked + said(say(server, asked))
    prompts = [before + tokens(server, f" and for {who} @\n") for who in ("one", "two")]
    num_calls, run = 0, Batch.round

    def failing(self):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise RuntimeError("injected")
        return run(self)

    monkeypatch.setattr(Batch, "round", failing)
    got = say(server, prompts)
    assert num_calls >= 3
    for choice in got.choices:
        assert choice.text == "".join(WORDS)
        told = choice.draft["tokens"]
        behind = max(i for i, token in enumerate(told) if token.get("batched")) + 1
        # The first is a step by itself; all that follows is copied.
        depths = [token["depth"] for token in told[behind + 1 :]]
        assert len(depths) > 15
        assert depths == [(i + 1) % (K + 1) for i in range(len(depths))]


# --- counts -----------------------------------------------------------------------------------


def counted_in(server) -> Iterator[dict]:
    """The usage of requests of many kinds, which are checked by themselves."""

    def checked(usage: dict, told: list[list[dict]], counts: list[dict]) -> dict:
        assert usage["copied_tokens"] <= usage["drafted_tokens"]
        assert usage["accepted_copied_tokens"] <= usage["copied_tokens"]
        for name in COUNTS:
            assert usage[name] == sum(each[name] for each in counts)
        kept = [token for tokens in told for token in tokens if token["depth"] > 0]
        assert len(kept) == usage["accepted_tokens"]
        return usage

    def ask(**more) -> dict:
        answer = say(server, more.pop("prompt"), **more)
        told = [getattr(choice, "draft", None) or answer.draft for choice in answer.choices]
        usage = answer.usage.to_dict()
        return checked(usage, [each["tokens"] for each in told], [e["counts"] for e in told])

    def stream(**more) -> dict:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = say(server, more.pop("prompt"), **more, **options)
        told = [token for chunk in chunks for token in chunk.draft["tokens"]]
        return checked(last.usage.to_dict(), [told], [chunks[-1].draft["counts"]])

    for request in (ask, stream):
        yield request(prompt="First @\n")
        yield request(prompt="Then @\n")
        for word in WORDS[-8:-4]:  # one of them within a round, wherever that begins
            yield request(prompt="Also @\n", stop=word)
        yield request(prompt="Drawn @\n", temperature=0.5, seed=3)
        yield request(prompt="Plainly @\n", num_draft_tokens=0)
    yield ask(prompt="Twice @\n", n=2)
    yield ask(prompt=[f"At once {i} @\n" for i in range(4)])
    with ThreadPoolExecutor(3) as pool:
        yield from pool.map(lambda i: stream(prompt=f"Of many {i} @\n"), range(3))


@pytest.mark.parametrize("drafter", ["{}", "lookup"])
def test_counts_of_copies_add_up(flags, drafter):
    model, target, name, pair, *more = flags
    flags = (model, target, name, drafter.format(pair), *more, "--copy-answers", "10000")
    with ours(*flags) as asked:
        found = list(counted_in(asked))
        page = metrics_of(asked)
    total = {name: sum(usage[name] for usage in found) for name in COUNTS}
    assert {name: page[f"{name}_total"] for name in COUNTS} == total
    if drafter == "lookup":  # nothing else is drafted
        assert total["copied_tokens"] == total["drafted_tokens"]
        assert total["accepted_copied_tokens"] == total["accepted_tokens"] > 0
    else:
        assert 0 < total["accepted_copied_tokens"] < total["accepted_tokens"]
        assert total["copied_tokens"] < total["drafted_tokens"]


# --- shared rounds ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", thorough(["3", "auto"], "auto"))
def test_eight_clients_at_once(pair, num_draft_tokens):
    """Their texts are mlx-lm's; others draw, and leave in the middle."""
    flags = ("--model", pair["target"], "--draft-model", pair["head"] + "+lookup")
    flags = (*flags, "--usage-stats", "--copy-answers", "10000")
    counts = ask_all(pair, flags, 8, 8, num_draft_tokens)
    assert sum(count["copied_tokens"] for count in counts) > 0


def endless(server) -> dict:
    """The fields of a stream that goes on until its client leaves."""
    (end,) = tokens(server, "<|im_end|>")
    return {"logit_bias": {str(end): -(10**6)}, "max_tokens": 1500, "stream": True}


def test_eight_clients_copy_one_answer(copying):
    """While one who was among them leaves."""
    say(copying, "The first to hear it @\n")
    leaving = say(copying, "Somebody else @\n", **endless(copying))
    next(leaving)
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda i: say(copying, f"Client {i} @\n"), range(8))
        for _ in range(3):
            next(leaving)
        leaving.close()
        answers = list(answers)
    assert {answer.choices[0].text for answer in answers} == {"".join(WORDS)}
    for answer in answers:
        counts = counts_of(answer)
        assert 0 < counts["accepted_copied_tokens"] <= counts["copied_tokens"]
        assert answer.draft["counts"]["batched_tokens"] > 0


def test_what_a_shared_round_gave_behind_a_stop_word_is_not_kept(flags):
    """Of an answer others copy what was said, whoever shared its rounds."""
    with ExitStack() as stack:
        asked = stack.enter_context(ours(*flags, "--copy-answers", "10000"))
        next(stack.enter_context(say(asked, "A long one @\n", **endless(asked))))
        for word in WORDS[-7:-3]:  # one of them within a round, wherever that begins
            before = metrics_of(asked)["copy_answers_tokens"]
            answer = say(asked, f"Up to {word} @\n", stop=word)
            assert answer.draft["counts"]["batched_tokens"] > 5
            num_kept = metrics_of(asked)["copy_answers_tokens"] - before
            assert num_kept == len(said(answer)) + 1  # and a gap


# --- forms, tools, stop words, log-probabilities ------------------------------------------------

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "pattern": "^(c[ab][a-p]){32}$"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {"type": "array", "items": {"enum": ["Paris", "Rome"]}, "minItems": 8, "maxItems": 12}
SCHEMA_FORM = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}
FORMS = {
    "text": ("@", {}),
    "call": ("#", {"tools": [TOOL]}),
    "forced call": ("#", {"tools": [TOOL], "tool_choice": "required"}),
    "thoughts": ("~", {}),
    "thoughts that are ended": ("~", {"thinking_budget": 34}),
    "stop word": ("@", {"stop": [WORDS[34].strip()]}),
    "stop word across tokens": ("@", {"stop": [WORDS[34][1:] + WORDS[35][:2]]}),
    "expression": ("@", {"grammar": {"regex": "(wa[a-t] ){40}"}}),
    "schema": ("@", {"response_format": SCHEMA_FORM}),
    "bias": ("@", {"logit_bias": {str(256 + 3 + 20): -100}}),  # the twentieth of ``WORDS``
    "seed": ("@", {"temperature": 0.7, "seed": 11}),
}


def whole(asked, **options) -> tuple:
    """Content, thoughts, calls, the reason to finish and the number of tokens."""
    answer = asked.complete(**options)
    choice = answer.choices[0]
    message = choice.message.to_dict()
    calls = calls_of(choice.message.tool_calls or [])
    told = message["content"], message.get("reasoning"), calls, choice.finish_reason
    return *told, answer.usage.completion_tokens


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_those_of_plain_decoding(copying, name):
    """Two requests of a scope, of which the second copies from the first's answer too."""
    trigger, options = FORMS[name]
    options = {"max_tokens": 90, "cache_salt": name} | options
    expected, found = [], []
    before = metrics_of(copying)["accepted_copied_tokens_total"]
    for read in (whole, streamed):
        chat = {"messages": [{"role": "user", "content": f"{read.__name__}: {trigger}"}]}
        expected.append(read(copying, **chat, **options, num_draft_tokens=0, store=False))
        found.append(read(copying, **chat, **options))
    assert found == expected
    assert metrics_of(copying)["accepted_copied_tokens_total"] > before


def test_logprobs_are_those_of_plain_decoding(copying):
    def rows(**more) -> list[dict]:
        options = {"logprobs": True, "top_logprobs": 3, "max_tokens": 80}
        return copying.chat("How likely @", **options, **more).to_dict()["choices"][0]["logprobs"]

    before = metrics_of(copying)["accepted_copied_tokens_total"]
    expected, *found = (rows(num_draft_tokens=k)["content"] for k in (0, K, K))
    assert metrics_of(copying)["accepted_copied_tokens_total"] > before + 10
    for each in found:
        assert len(each) == len(expected) == len(WORDS) + 1
        for one, other in zip(each, expected, strict=True):
            assert one["id"] == other["id"]
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
            tops = [{top["id"] for top in row["top_logprobs"]} for row in (one, other)]
            assert tops[0] == tops[1]


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/responses", {"input": "Say a b c, a b c"}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Say a b c"}], "max_tokens": 9},
        ),
    ],
)
def test_every_api_reports_what_was_drafted_where_it_is_asked_to(flags, path, body):
    usages = []
    for given in (flags, [flag for flag in flags if flag != "--usage-stats"]):
        with ours(*given) as asked:
            _, answer = ask_json(asked, path, body)
            usages.append(answer["usage"])
    assert usages[0].keys() - usages[1].keys() == {*COUNTS, "mean_acceptance_length"}
    assert usages[0]["copied_tokens"] <= usages[0]["drafted_tokens"]
