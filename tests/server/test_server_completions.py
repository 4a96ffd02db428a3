"""Completions and the tokenizer as the OpenAI API and llama-server have them."""

from contextlib import nullcontext
from pathlib import Path

import openai
import pytest
from mlx_lm.utils import load_tokenizer
from serving import CHARACTERS, ENDLESS, NUM_CHARACTERS, TEMPLATE, ask_json, ours, theirs

from mlx_eagle.decoding.decoder import Decoder

TEXT = {"max_tokens": 12, "logit_bias": ENDLESS}
SPACE, HALVES = NUM_CHARACTERS - 4, (NUM_CHARACTERS - 2, NUM_CHARACTERS - 1)


@pytest.fixture(scope="module")
def server(pair):
    flags = ("--model", pair["target"], "--draft-model", pair["head"], "--usage-stats")
    with ours(*flags) as asked:
        yield asked


@pytest.fixture(scope="module")
def reference(pair):
    with theirs(pair["target"]) as asked:
        yield asked


@pytest.fixture(scope="module")
def tokenizer(pair):
    return load_tokenizer(Path(pair["target"]))


def test_several_prompts_are_answered_as_each_alone(server, reference, tokenizer):
    prompts = ["Once upon", "The end", "A"]
    alone = [reference.complete(prompt=p, **TEXT) for p in prompts]
    texts = [answer.choices[0].text for answer in alone]
    got = server.complete(prompt=prompts, **TEXT)
    assert [choice.text.removeprefix(" ") for choice in got.choices] == texts
    assert [choice.index for choice in got.choices] == [0, 1, 2]
    assert got.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    assert got.usage.completion_tokens == 36 and got.usage.drafted_tokens > 0
    chunks = list(server.complete(prompt=prompts, **TEXT, stream=True))
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in got.choices]
    ends = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
    assert ends == [0, 1, 2]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    assert server.complete(prompt=ids, **TEXT).choices == got.choices
    assert server.complete(prompt=ids[1], **TEXT).choices[0].text == got.choices[1].text


def test_several_answers_to_one_prompt(server):
    options = {"prompt": "Once", "temperature": 1.5, "seed": 5, **TEXT}
    got = server.complete(**options, n=3)
    texts = [choice.text for choice in got.choices]
    assert len(set(texts)) == 3
    assert [
        server.complete(**options | {"seed": 5 + i}).choices[0].text for i in range(3)
    ] == texts
    assert got.usage.completion_tokens == 36 and got.usage.prompt_tokens == 4
    chat = server.chat("Hello", n=2, max_tokens=5, logit_bias=ENDLESS)
    assert len(chat.choices) == 2 and chat.choices[0].message == chat.choices[1].message


LEADING = ["head", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in ("model", "states"))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", LEADING)
def test_several_answers_read_their_prompt_once(server, pair, recurrent, kind, monkeypatch):
    """Counted where chunks of prompts are run; the texts are those of answers by themselves."""
    rows = []
    run = Decoder._prefill_chunk

    def counted(decoder, tokens, embeddings):
        rows.append(tokens.shape[0])
        run(decoder, tokens, embeddings)

    monkeypatch.setattr(Decoder, "_prefill_chunk", counted)
    prompts = ["Quite another beginning", "Zebras end it"]
    options = {"temperature": 1.2, "seed": 5, **TEXT}
    target, draft = (recurrent, "lookup") if kind == "states" else (pair["target"], pair[kind])
    flags = ("--model", target, "--draft-model", draft, "--prefill-step-size", "8")
    with nullcontext(server) if kind == "head" else ours(*flags) as asked:
        got = asked.complete(prompt=prompts, n=3, **options)
        texts = [choice.text for choice in got.choices]
        assert sum(rows) == sum(len(prompt) - 1 for prompt in prompts)
        assert got.usage.prompt_tokens == sum(map(len, prompts))
        rows.clear()
        asked.complete(prompt="Anew", n=3, reuse_caches=False, **options)
        assert sum(rows) == 3 * 3
        for i, text in enumerate(texts):
            options |= {"seed": 5 + i, "prompt": prompts[i // 3], "reuse_caches": False}
            assert asked.complete(**options).choices[0].text == text
    assert len(set(texts)) == 6


def test_echo_begins_with_the_prompt(server, tokenizer):
    text = server.complete(prompt="Once upon", **TEXT).choices[0].text
    got = server.complete(prompt="Once upon", **TEXT, echo=True)
    assert got.choices[0].text == "Once upon" + text
    chunks = server.complete(prompt=["a", "Once upon"], **TEXT, echo=True, stream=True)
    pieces = [c.choices[0].text for c in chunks if c.choices[0].index == 1]
    assert pieces[0] == "Once upon" and "".join(pieces) == "Once upon" + text
    ids = tokenizer.encode("Once upon")
    assert server.complete(prompt=ids, **TEXT, echo=True).choices == got.choices


def test_a_text_that_goes_on_keeps_its_space(server):
    """mlx-lm takes it away from the first token, also where a prompt stands before it."""
    bias = {str(SPACE): 100}
    got = server.complete(prompt="Once", max_tokens=3, logit_bias=bias)
    assert got.choices[0].text == "   "
    chunks = server.complete(prompt="Once", max_tokens=3, logit_bias=bias, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "   "
    bias = {str(CHARACTERS.index("a")): 100}
    for prompt in ("Once ", "Once  ", " "):
        got = server.complete(prompt=prompt, max_tokens=3, logit_bias=bias)
        assert got.choices[0].text == "aaa"


def test_an_answer_that_was_cut_goes_on(server):
    """The two parts are the text of one request; what cannot go on gets a sentence."""
    question = {"role": "user", "content": "Hello"}

    def answer(num_tokens: int, *messages: dict, **options) -> str:
        body = {"messages": messages, "max_tokens": num_tokens, "logit_bias": ENDLESS} | options
        status, found = ask_json(server, "/v1/chat/completions", body)
        assert status == 200, found
        return found["choices"][0]["message"]["content"]

    whole, cut = answer(20, question), answer(8, question)
    rest = answer(12, question, {"role": "assistant", "content": cut}, continue_final_message=True)
    assert cut + rest == whole
    body = {"messages": [question], "continue_final_message": True}
    status, found = ask_json(server, "/v1/chat/completions", body)
    assert status == 400 and "the last message is no text of the assistant" in str(found)


def test_logprobs_of_completions(server):
    """A number of alternatives, in the words of the OpenAI API; streamed as well."""
    options = {"prompt": "Once", "logprobs": 3, **TEXT}
    choice = server.complete(**options).choices[0]
    found = choice.logprobs
    assert found.tokens and "".join(found.tokens) == choice.text
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(12)]
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert len(top) == 3 and max(top, key=top.get) == token
        assert top[token] == pytest.approx(logprob) and logprob < 0
    chunks = [c.choices[0] for c in server.complete(**options, stream=True)]
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    assert [token for part in parts for token in part.tokens] == found.tokens
    assert [offset for part in parts for offset in part.text_offset] == found.text_offset
    for chunk in chunks:
        if chunk.logprobs is not None:
            assert chunk.text == "".join(chunk.logprobs.tokens)
    none = server.complete(prompt="Once", logprobs=0, **TEXT).choices[0].logprobs
    assert none.tokens == found.tokens and none.top_logprobs == [{}] * 12


def test_logprobs_have_real_text_and_bytes(server):
    """A space is no letter of the vocabulary, and half a letter is its byte."""
    bias = {str(SPACE): 90, str(HALVES[0]): 60, str(HALVES[1]): 60}
    options = {"logprobs": True, "top_logprobs": 3, "logit_bias": bias, "max_tokens": 2}
    content = server.chat("Hello", **options).choices[0].logprobs.content
    for entry in content:
        assert entry.token == " " and entry.bytes == [32]
        tops = {top.id: (top.token, top.bytes) for top in entry.top_logprobs}
        assert tops == {
            SPACE: (" ", [32]),
            HALVES[0]: ("\ufffd", [0xC3]),
            HALVES[1]: ("\ufffd", [0xA9]),
        }
        assert [t.logprob for t in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
    chunks = list(server.chat("Hello", **options, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.logprob for entry in streamed] == pytest.approx([e.logprob for e in content])


def test_the_fingerprint_names_no_machine(server):
    got = server.complete(prompt="Once", **TEXT).system_fingerprint
    assert got.startswith("mlx-eagle-") and got.count("-") == 2


def test_tokens_and_back(server, tokenizer):
    ids = tokenizer.encode("Once upon")
    assert ask_json(server, "/tokenize", {"content": "Once upon"})[1]["tokens"] == ids
    found = ask_json(server, "/tokenize", {"prompt": "Once upon"})[1]
    assert found == {"tokens": ids, "count": len(ids), "max_model_len": 2000}
    pieces = ask_json(server, "/tokenize", {"content": "a \u00e9", "with_pieces": True})[1][
        "tokens"
    ]
    assert [piece["piece"] for piece in pieces] == ["a", " ", [0xC3], [0xA9]]
    messages = [{"role": "user", "content": "Hello"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ask_json(server, "/tokenize", {"messages": messages})[1]["tokens"] == list(chat)
    assert ask_json(server, "/detokenize", {"tokens": ids})[1]["content"] == "Once upon"
    for path, body, sentence in (
        ("/tokenize", {}, "give one of content, prompt and messages"),
        ("/tokenize", {"content": 5}, "content is a number: give a string"),
        ("/tokenize", {"messages": 5}, "messages is a number"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "content is a number"),
        ("/detokenize", {"tokens": "a"}, "tokens is something else than a list"),
        ("/detokenize", {"tokens": [10**6]}, "there is no token 1000000"),
        ("/detokenize", {"tokens": [-1]}, "there is no token -1"),
    ):
        status, document = ask_json(server, path, body)
        assert status == 400 and sentence in document["error"]["message"]


def test_properties(server, pair):
    status, found = ask_json(server, "/props", {}, "GET")
    assert status == 200 and found["model_path"] == pair["target"]
    assert found["chat_template"] == TEMPLATE
    assert found["default_generation_settings"]["n_ctx"] == 2000
    assert found["default_generation_settings"]["params"]["num_draft_tokens"] == 3


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
IGNORED = {
    "tools": ({"tools": [TOOL]}, "takes no tools: leave them out"),
    "a form": ({"response_format": {"type": "json_object"}}, "nothing satisfies it"),
    "a function": ({"tools": [{"function": 5}]}, "a tool's function is a number: give an object"),
}


@pytest.mark.parametrize("name", IGNORED)
def test_what_would_change_nothing_is_refused(server, name):
    fields, sentence = IGNORED[name]
    messages = [{"role": "user", "content": "Hello"}]
    status, document = ask_json(server, "/v1/chat/completions", {"messages": messages, **fields})
    assert status == 400 and sentence in document["error"]["message"]


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        ("{{ reasoning_effort | default('medium') }}", {"low": "low", "medium": "medium"}),
        ("{{ enable_thinking | default(true) }}", {"none": "False", "high": "True"}),
    ],
)
def test_the_effort_of_reasoning_goes_to_the_template(pair, template, marks):
    """And tools where it takes them, under whatever name it knows the effort."""
    flags = ("--model", pair["target"], "--draft-model", pair["head"])
    template += "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + TEMPLATE
    with ours(*flags, "--chat-template", template) as asked:
        sizes = {}
        for effort in marks:
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
            body |= {"reasoning_effort": effort, "tools": [TOOL]}
            status, document = ask_json(asked, "/v1/chat/completions", body)
            assert status == 200
            sizes[effort] = document["usage"]["prompt_tokens"] - len(marks[effort])
        assert len(set(sizes.values())) == 1


def test_strict_names_of_openais_client(server):
    with pytest.raises(openai.NotFoundError, match="leave draft_model out"):
        server.complete(prompt="Once", draft_model="another")
