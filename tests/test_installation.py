"""Our loop inside mlx-lm: the same calls as a user's own, before and after ``install()``."""

import importlib
import inspect
import json
import sys
import threading
import time
import tomllib
import warnings
from http.server import HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Literal
from urllib.request import Request, urlopen

import mlx.core as mx
import mlx_lm
import mlx_lm.chat
import mlx_lm.server
import numpy as np
import pydantic
import pytest
from grids import thorough
from helpers import (
    PROMPT,
    SCRIPTS,
    ScriptedDrafter,
    byte_tokenizer,
    caches_equal,
    demo_pair,
    plain,
    plain_with_cache,
    tiny_head,
    tiny_llama,
)
from mlx_lm import generate as generate_before
from mlx_lm import stream_generate as stream_generate_before
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_eagle
from mlx_eagle.decoding.decoder import Decoder
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.drafters.model_drafter import ModelDrafter
from mlx_eagle.drafters.tree import TreeShape
from mlx_eagle.installation import NAME, WORKS_WITH

MODULE = importlib.import_module("mlx_lm.generate")
MLX_LMS = [MODULE.speculative_generate_step]  # in a list, where install() does not replace it
VOCAB = 258
MODEL = tiny_llama(vocab_size=VOCAB, head_dim=32)  # wide enough for quantized caches
DRAFTER = tiny_head(MODEL)
PERFECT = ModelDrafter(MODEL)
TOKENIZER = byte_tokenizer()
SMALL = tiny_llama(seed=3, vocab_size=VOCAB, num_hidden_layers=2)
NUM_CACHES = len(make_prompt_cache(MODEL))


@pytest.fixture
def installation():
    with mlx_eagle.installed() as installation:
        yield installation
    assert MODULE.speculative_generate_step is MLX_LMS[0]


def with_stop(token: int):
    """The tokenizer, with one of its letters as the end of a text."""
    tokenizer = byte_tokenizer()
    tokenizer.eos_token_ids = {token}
    return tokenizer


def said(response) -> tuple:
    """What a response says, but for times and memory."""
    return (
        response.text,
        response.token,
        response.from_draft,
        response.prompt_tokens,
        response.generation_tokens,
        response.finish_reason,
    )


def counts(stats: Stats) -> dict:
    timed = ("prompt_time", "generation_time", "generation_tps")
    return {name: value for name, value in stats.to_dict().items() if name not in timed}


# --- in and out ---------------------------------------------------------------------------


def test_out_again_is_as_before():
    installation = mlx_eagle.install()
    assert MODULE.speculative_generate_step is installation
    assert mlx_eagle.install() is installation and installation.original is MLX_LMS[0]
    for _ in range(2):
        mlx_eagle.uninstall()
        assert MODULE.speculative_generate_step is MLX_LMS[0]


def test_the_context_manager_leaves_what_it_found():
    with pytest.raises(KeyError), mlx_eagle.installed():
        raise KeyError
    assert MODULE.speculative_generate_step is MLX_LMS[0]
    installation = mlx_eagle.install()
    try:
        with mlx_eagle.installed() as inner:
            assert inner is installation
        assert MODULE.speculative_generate_step is installation
    finally:
        mlx_eagle.uninstall()


def other_step(prompt, model, draft_model, stream=None, *, depth=1):
    pass


def other_stream_generate(model, tokenizer, prompt, draft_model=None, **kwargs):
    pass


@pytest.mark.parametrize(
    "name, other",
    [(NAME, other_step), (NAME, None), ("stream_generate", other_stream_generate)],
)
def test_another_mlx_lm_is_refused(monkeypatch, name, other):
    if other is None:
        monkeypatch.delattr(MODULE, name)
    else:
        monkeypatch.setattr(MODULE, name, other)
    with pytest.raises(RuntimeError) as refused:
        mlx_eagle.install()
    sentence = str(refused.value)
    assert f"mlx-lm {mlx_lm.__version__} has another {name}" in sentence
    assert f"install {WORKS_WITH}." in sentence and "\n" not in sentence
    assert getattr(MODULE, name, None) is other
    mlx_eagle.uninstall()


def test_the_sentence_names_the_versions_of_the_requirement():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert WORKS_WITH in project["project"]["dependencies"]


def test_it_looks_like_what_it_replaces(installation):
    assert inspect.signature(installation) == inspect.signature(MLX_LMS[0])
    assert installation.__name__ == NAME


# --- whoever calls ------------------------------------------------------------------------


DOORS = {
    "mlx_lm.stream_generate": lambda *a, **k: mlx_lm.stream_generate(*a, **k),
    "imported before": stream_generate_before,
    "mlx_lm.chat": mlx_lm.chat.stream_generate,
    "mlx_lm.server": mlx_lm.server.stream_generate,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("max_tokens", thorough([1, 2, 18], 2))
def test_every_door_leads_to_our_loop(installation, door, max_tokens):
    options = {"max_tokens": max_tokens, "draft_model": DRAFTER, "num_draft_tokens": 2}
    theirs = list(DOORS[door](MODEL, TOKENIZER, PROMPT, **options))
    ours = list(mlx_eagle.stream_generate(MODEL, TOKENIZER, PROMPT, **options))
    assert [said(r) for r in theirs] == [said(r) for r in ours]
    assert [r.token for r in theirs] == plain(MODEL, PROMPT, max_tokens)
    assert counts(installation.stats) == counts(ours[-1].stats)
    assert (installation.stats.num_rounds > 0) == (max_tokens > 2)


def test_generate(installation, capsys):
    expected = mlx_lm.generate(MODEL, TOKENIZER, "Hello", max_tokens=20)
    assert installation.stats is None
    for generate in (mlx_lm.generate, generate_before):
        assert generate(MODEL, TOKENIZER, "Hello", max_tokens=20, draft_model=DRAFTER) == expected
        assert installation.stats.num_drafted > 0
        installation.stats = None
    generate_before(MODEL, TOKENIZER, "Hello", True, max_tokens=20, draft_model=DRAFTER)
    assert expected in capsys.readouterr().out


def test_the_step_itself(installation):
    step = MODULE.speculative_generate_step
    for arguments, named in (((DRAFTER,), {}), ((), {"draft_model": DRAFTER})):
        steps = step(mx.array(PROMPT), MODEL, *arguments, max_tokens=12, **named)
        assert [token for token, _, _ in steps] == plain(MODEL, PROMPT, 12)


def test_an_ordinary_draft_model_keeps_its_own_path(installation, monkeypatch):
    options = {"max_tokens": 15, "num_draft_tokens": 3}
    with monkeypatch.context() as patch:
        patch.setattr(MODULE, NAME, MLX_LMS[0])
        responses = mlx_lm.stream_generate(MODEL, TOKENIZER, PROMPT, draft_model=SMALL, **options)
        before = list(responses)
    calls = []

    def original(*args, **kwargs):
        calls.append(kwargs)
        return MLX_LMS[0](*args, **kwargs)

    monkeypatch.setattr(installation, "original", original)
    after = list(mlx_lm.stream_generate(MODEL, TOKENIZER, PROMPT, draft_model=SMALL, **options))
    assert [said(r) for r in after] == [said(r) for r in before]
    assert calls == [options] and installation.stats is None
    monkeypatch.undo()


# --- what mlx-lm does around the loop -------------------------------------------------------


@pytest.mark.parametrize("drafter", [DRAFTER, PERFECT], ids=["head", "perfect"])
@pytest.mark.parametrize("stop_at", thorough([0, 1, 4, 5, 6, 7], 0, 5))
def test_a_stop_token_anywhere_in_a_round(installation, drafter, stop_at):
    text = plain(MODEL, PROMPT, 30)
    tokenizer = with_stop(text[stop_at])
    end = text.index(text[stop_at])
    cache = make_prompt_cache(MODEL) + drafter.make_cache()
    options = {"max_tokens": 30, "draft_model": drafter, "num_draft_tokens": 3}
    theirs = list(mlx_lm.stream_generate(MODEL, tokenizer, PROMPT, prompt_cache=cache, **options))
    ours = list(mlx_eagle.stream_generate(MODEL, tokenizer, PROMPT, **options))
    assert [said(r) for r in theirs] == [said(r) for r in ours]
    assert theirs[-1].finish_reason == "stop" and theirs[-1].generation_tokens == end + 1
    assert caches_equal(cache[:NUM_CACHES], plain_with_cache(MODEL, PROMPT, end + 1)[1])
    expected = counts(ours[-1].stats)
    # Here the loop was not told of the stop token: it may have drafted beyond it, no more.
    found = counts(installation.stats)
    assert found["num_emitted"] == expected["num_emitted"] == end
    for name in ("num_rounds", "num_plain_steps", "num_accepted", "accepted_histogram", "tau"):
        assert found[name] == expected[name], name


@pytest.mark.parametrize("num_taken", thorough([1, 2, 3, 4, 5, 7], 2, 5))
@pytest.mark.parametrize("script", ["all", "every length"])
def test_leaving_early(installation, num_taken, script):
    text = plain(MODEL, PROMPT, 40)
    drafter = ScriptedDrafter(PROMPT + text, SCRIPTS[script], VOCAB)
    cache = make_prompt_cache(MODEL)
    options = {"max_tokens": -1, "draft_model": drafter, "prompt_cache": cache}
    responses = mlx_lm.stream_generate(MODEL, TOKENIZER, PROMPT, **options)
    taken = [next(responses).token for _ in range(num_taken)]
    del responses
    assert taken == text[:num_taken]
    assert caches_equal(cache, plain_with_cache(MODEL, PROMPT, num_taken)[1])
    assert installation.stats.num_emitted == num_taken - 1
    histogram = installation.stats.accepted_histogram
    assert sum(histogram) == installation.stats.num_rounds
    assert sum(n * c for n, c in enumerate(histogram)) == installation.stats.num_accepted


def test_turns_on_one_cache(installation):
    cache = make_prompt_cache(MODEL) + make_prompt_cache(DRAFTER)
    reference = make_prompt_cache(MODEL)
    for turn in ("Hello there", "And then?", "!"):
        prompt = TOKENIZER.encode(turn)
        responses = mlx_lm.stream_generate(
            MODEL, TOKENIZER, prompt, max_tokens=9, draft_model=DRAFTER, prompt_cache=cache
        )
        assert [r.token for r in responses] == plain(MODEL, prompt, 9, prompt_cache=reference)
        assert caches_equal(cache[:NUM_CACHES], reference)
        assert cache[NUM_CACHES].offset == cache[0].offset - 1


OPTIONS = {
    "sampler": {"sampler": make_sampler(temp=0.0, top_k=5)},
    "processors": {"logits_processors": make_logits_processors({7: 3.0}, 1.3, 8)},
    "quantized cache": {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0},
    "chunks": {"prefill_step_size": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_mlx_lm(installation, name):
    drafted, alone = (
        [
            r.token
            for r in mlx_lm.stream_generate(
                MODEL, TOKENIZER, PROMPT, max_tokens=15, draft_model=draft_model, **OPTIONS[name]
            )
        ]
        for draft_model in (DRAFTER, None)
    )
    assert drafted == alone and installation.stats.num_rounds > 0


def test_options_of_ours(installation):
    stats = Stats()
    tree = {"tree": TreeShape.parse("3x3:6"), "stats": stats}
    responses = mlx_lm.stream_generate(
        MODEL, TOKENIZER, PROMPT, max_tokens=12, draft_model=DRAFTER, **tree
    )
    assert [r.token for r in responses] == plain(MODEL, PROMPT, 12)
    assert installation.stats is stats and stats.num_drafted > 3 * stats.num_rounds
    own = Stats()
    options = {"max_tokens": 12, "draft_model": DRAFTER, "num_draft_tokens": 3, "stats": own}
    (*_, last) = mlx_eagle.stream_generate(MODEL, TOKENIZER, PROMPT, **options)
    assert last.stats is own and own.num_rounds > 0
    texts = {
        mlx_lm.generate(
            MODEL,
            TOKENIZER,
            PROMPT,
            max_tokens=12,
            draft_model=draft_model,
            sampler=mlx_eagle.Sampling(temp=0.7, seed=2),
        )
        for draft_model in (None, DRAFTER)
    }
    assert len(texts) == 1


def test_no_round_is_left_out_of_the_speed(monkeypatch):
    """The first token is given when the round after it is launched, and on a CPU nearly done."""
    clock, launch = [0.0], Decoder.launch

    def takes_a_second(*args, **options):
        clock[0] += 1.0
        return launch(*args, **options)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Decoder, "launch", takes_a_second)
    options = {"max_tokens": 12, "draft_model": DRAFTER, "num_draft_tokens": 3}
    (*_, last) = mlx_eagle.stream_generate(MODEL, TOKENIZER, PROMPT, **options)
    assert last.prompt_tps == len(PROMPT) and last.stats.num_target_forwards > 1
    assert last.generation_tps == 12 / last.stats.num_target_forwards


def test_what_mlx_lm_keeps_from_a_draft_model(installation):
    dropped = {"max_kv_size": 4, "prompt_progress_callback": None, "input_embeddings": None}
    options = {"max_tokens": 15, "draft_model": DRAFTER}
    responses = mlx_lm.stream_generate(MODEL, TOKENIZER, PROMPT, **options, **dropped)
    assert [r.token for r in responses] == plain(MODEL, PROMPT, 15)
    embedded = {"input_embeddings": mx.zeros((7, 64))}
    with pytest.raises(ValueError, match="does not support input embeddings"):
        next(mlx_lm.stream_generate(MODEL, TOKENIZER, PROMPT, **options, **embedded))


# --- the server -----------------------------------------------------------------------------


FLAGS = {
    "adapter_path": None,
    "allowed_origins": ["*"],
    "chat_template_args": {},
    "decode_concurrency": 4,
    "kv_bits": None,
    "kv_group_size": 64,
    "max_tokens": 32,
    "min_p": 0.0,
    "model": None,
    "num_draft_tokens": 3,
    "prefill_step_size": 2048,
    "prompt_cache_bytes": None,
    "prompt_cache_size": 10,
    "prompt_concurrency": 4,
    "quantized_kv_start": 0,
    "temp": 0.0,
    "top_k": 0,
    "top_p": 1.0,
}


class Provider(SimpleNamespace):
    """What ``mlx_lm.server`` asks for models."""

    def __init__(self, draft_model):
        flags = SimpleNamespace(**FLAGS)
        pair = {"model": MODEL, "tokenizer": TOKENIZER, "draft_model": draft_model}
        super().__init__(cli_args=flags, model_key=("tiny", None, None), processor=None, **pair)
        self.is_batchable = False

    def load(self, *_):
        return self.model, self.tokenizer

    load_default = load

    def reset(self):
        self.model = self.tokenizer = self.draft_model = None


@pytest.fixture
def chat(request):
    """A running server: (messages, max_tokens) -> text, finish reason, cached tokens."""
    server = mlx_lm.server
    generator = server.ResponseGenerator(Provider(request.param), server.LRUPromptCache())
    httpd = HTTPServer(
        ("localhost", 0), lambda *arguments: server.APIHandler(generator, *arguments)
    )
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()

    def ask(messages: list[dict], max_tokens: int) -> tuple[str, str, int]:
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0.0}
        address = f"http://localhost:{httpd.server_port}/v1/chat/completions"
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(address, json.dumps(body).encode(), headers), timeout=60) as reply:
            answer = json.load(reply)
        num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        choice = answer["choices"][0]
        return choice["message"]["content"], choice["finish_reason"], num_cached

    yield ask
    httpd.shutdown()
    httpd.server_close()
    thread.join()
    generator.stop_and_join()


CONVERSATION = [("Hello!", 9), ("What?", 5), ("More.", 12)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("chat", [DRAFTER], indirect=True)
def test_turns_through_the_server(installation, chat):
    messages = []
    for num_turns, (question, max_tokens) in enumerate(CONVERSATION):
        messages.append({"role": "user", "content": question})
        text, reason, num_cached = chat(messages, max_tokens)
        prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)
        assert text == mlx_lm.generate(MODEL, TOKENIZER, prompt, max_tokens=max_tokens)
        assert reason == "length" and (num_cached > 0) == (num_turns > 0)
        assert installation.stats.num_rounds > 0
        installation.stats = None
        messages.append({"role": "assistant", "content": text})


# --- a default for programs that name no draft model --------------------------------------

EARLY = {"stream": mlx_lm.stream_generate, "batch": mlx_lm.batch_generate}
PLACES = [(mlx_lm, "stream_generate"), (MODULE, "stream_generate"), (mlx_lm, "batch_generate"),
          (MODULE, "batch_generate"), (mlx_lm.chat, "stream_generate")]  # fmt: skip
stream_by_another_name, batch_by_another_name = EARLY.values()
BATCH = [[1, 2, 3], [4, 5, 6, 7]]


def named(name: str):
    tokenizer = byte_tokenizer()
    tokenizer.name_or_path = name
    return tokenizer


def test_a_program_that_names_no_draft_model_drafts():
    expected = mlx_lm.generate(MODEL, TOKENIZER, PROMPT, max_tokens=20)
    with mlx_eagle.installed(draft_model=PERFECT) as installation:
        assert mlx_lm.generate(MODEL, TOKENIZER, PROMPT, max_tokens=20) == expected
        assert installation.stats.num_accepted > 0
        options = {"max_tokens": 20, "num_draft_tokens": 3}  # auto may find that none pays
        responses = list(stream_by_another_name(MODEL, TOKENIZER, PROMPT, **options))
        assert "".join(r.text for r in responses) == expected
        assert any(r.from_draft for r in responses)
    assert not any(
        r.from_draft for r in stream_by_another_name(MODEL, TOKENIZER, PROMPT, max_tokens=20)
    )


def test_everything_is_put_back_wherever_it_was_imported_to():
    before = [getattr(place, name) for place, name in PLACES]
    assert before == [*[EARLY["stream"]] * 2, *[EARLY["batch"]] * 2, EARLY["stream"]]
    with mlx_eagle.installed():
        assert not any(getattr(place, name) in before for place, name in PLACES)
        assert stream_by_another_name not in before
    assert [getattr(place, name) for place, name in PLACES] == before


def test_batches_draft_by_default_and_by_name():
    expected = mlx_lm.batch_generate(MODEL, TOKENIZER, BATCH, max_tokens=12).texts
    with mlx_eagle.installed():
        found = mlx_lm.batch_generate(MODEL, TOKENIZER, BATCH, max_tokens=12, draft_model=PERFECT)
        assert found.texts == expected and found.stats[0].num_accepted > 0
        with pytest.raises(ValueError, match="mlx-lm drafts for no batch"):
            mlx_lm.batch_generate(MODEL, TOKENIZER, BATCH, max_tokens=12, draft_model=SMALL)
        assert mlx_lm.batch_generate(MODEL, TOKENIZER, BATCH, max_tokens=12).texts == expected
    with mlx_eagle.installed(draft_model=PERFECT):
        found = batch_by_another_name(MODEL, TOKENIZER, BATCH, max_tokens=12)
        assert found.texts == expected and hasattr(found.stats, "__len__")
        many = mlx_lm.batch_generate(MODEL, TOKENIZER, BATCH * 20, max_tokens=4)
        assert [text[:2] for text in many.texts[:2]] == [text[:2] for text in expected]


class Steered:
    """A logits processor of outlines' kind: each call but the first has the next token's.

    It knows its text by these calls alone, refuses any other order, and is reset for a new text.
    """

    def reset(self) -> None:
        self.said = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        assert tokens.ndim == 1 and logits.shape == (1, VOCAB)
        if self.said is None:
            self.said = 0
        elif (last := tokens[-1].item()) % 3 != self.said % 3:
            raise ValueError(f"no next state is known for token {last}")
        else:
            self.said += 1 + last
        return mx.where(mx.arange(VOCAB) % 3 == self.said % 3, logits, -mx.inf)


@pytest.mark.exhaustive
def test_processors_that_outlines_makes_are_reset_and_asked_once_per_token():
    processor = Steered()

    def text(**options) -> str:
        processor.reset()
        responses = mlx_lm.stream_generate(
            MODEL, TOKENIZER, "Say it", max_tokens=20, logits_processors=[processor], **options
        )
        return "".join(response.text for response in responses)

    expected = text()
    for drafter in (PERFECT, DRAFTER, LookupDrafter()):
        with mlx_eagle.installed(draft_model=drafter) as installation:
            assert text() == text(num_draft_tokens=3) == expected
            assert installation.stats.num_rounds > 0


class Town(pydantic.BaseModel, extra="forbid"):
    name: Literal["Bergen", "Oslo", "Trondheim"]
    lies_by_the_sea: bool


def masked(logits: mx.array, bits: mx.array) -> mx.array:
    """What the Metal kernels of outlines do, for a device without Metal."""
    bytes_of = np.array(bits).view(np.uint8)
    allowed = np.unpackbits(bytes_of, axis=-1, bitorder="little")[:, : logits.shape[-1]]
    return mx.where(mx.array(allowed == 1), logits, -mx.inf)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["outlines_core", "llguidance"])
def test_outlines_own_calls_on_the_demo_pair(backend, monkeypatch):
    outlines = pytest.importorskip("outlines", reason="outlines is not installed to be tried")
    if not mx.metal.is_available():
        monkeypatch.setattr("outlines_core.kernels.mlx._apply_token_bitmask_kernel", masked)
        monkeypatch.setattr("llguidance.mlx.apply_token_bitmask_kernel", masked)
    model, tokenizer, drafter = demo_pair()
    ask = outlines.Generator(outlines.from_mlxlm(model, tokenizer), Town, backend=backend)
    question = "Describe a town in one line of JSON."
    expected = ask(question, max_tokens=48)
    Town.model_validate_json(expected)
    with mlx_eagle.installed(draft_model=drafter):
        assert ask(question, max_tokens=48) == expected
    with mlx_eagle.installed(draft_model=drafter.with_copies()) as installation:
        found = ask.stream(question, max_tokens=48, num_draft_tokens=3)
        assert "".join(found) == expected
        assert installation.stats.num_accepted > 0


def test_each_model_gets_a_drafter_of_its_own_once(monkeypatch):
    opened = []

    def open_drafter(name, model, tokenizer):
        opened.append((name, model, tokenizer.name_or_path))
        return ModelDrafter(model)

    monkeypatch.setattr("mlx_eagle.installation.open_drafter", open_drafter)
    with mlx_eagle.installed(draft_model="auto"):
        for _ in range(2):
            mlx_lm.generate(MODEL, named("some/target"), PROMPT, max_tokens=4)
            mlx_lm.generate(SMALL, named("Qwen/Qwen3-8B"), PROMPT, max_tokens=4)
    assert opened == [("auto", MODEL, "some/target"), ("auto", SMALL, "Qwen/Qwen3-8B")]


def test_without_a_known_head_it_copies_and_says_so_once(capsys):
    """As the commands do with ``--draft-model auto``."""
    expected = mlx_lm.generate(MODEL, TOKENIZER, PROMPT, max_tokens=8)
    with mlx_eagle.installed(draft_model="auto") as installation:
        for _ in range(2):
            found = mlx_lm.generate(MODEL, named("some/model"), PROMPT, max_tokens=8)
            assert found == expected and installation.stats is not None
    said = capsys.readouterr().err
    assert said.startswith("Note: no public head is known here for some/model, so drafts are cop")
    assert said.count("\n") == 1


def test_a_model_without_a_name_decodes_plainly_and_says_so_once():
    expected = mlx_lm.generate(MODEL, TOKENIZER, PROMPT, max_tokens=8)
    with mlx_eagle.installed(draft_model="auto") as installation:
        with pytest.warns(UserWarning, match="'auto' needs the target's name"):
            found = mlx_lm.generate(MODEL, named(""), PROMPT, max_tokens=8)
        assert found == expected and installation.stats is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mlx_lm.generate(MODEL, named(""), PROMPT, max_tokens=8)


def test_a_name_in_a_call_is_refused():
    refused = pytest.raises(ValueError, match="draft_model is the name 'auto': give what")
    with mlx_eagle.installed(), refused:
        mlx_lm.generate(MODEL, TOKENIZER, PROMPT, max_tokens=8, draft_model="auto")


def test_what_our_loop_refuses_goes_to_mlx_lm():
    other = tiny_head(tiny_llama(vocab_size=VOCAB, hidden_size=128))
    expected = mlx_lm.generate(MODEL, TOKENIZER, PROMPT, max_tokens=8)
    cache = [*make_prompt_cache(MODEL), *other.make_cache(), *other.make_cache()]
    options = {"max_tokens": 8, "prompt_cache": cache[: NUM_CACHES + 2]}
    refused = pytest.warns(UserWarning, match="decoded without drafts")
    with mlx_eagle.installed(draft_model=other), refused:
        found = mlx_lm.generate(MODEL, TOKENIZER, PROMPT, **options)
    assert found == expected


def test_batches_that_ours_refuses_go_to_mlx_lm():
    other = tiny_head(tiny_llama(vocab_size=VOCAB, hidden_size=128))
    expected = mlx_lm.batch_generate(MODEL, TOKENIZER, BATCH, max_tokens=4).texts
    with mlx_eagle.installed(draft_model=other):
        with pytest.warns(UserWarning, match="decoded without drafts"):
            found = mlx_lm.batch_generate(MODEL, TOKENIZER, BATCH, max_tokens=4)
        assert found.texts == expected
        with pytest.raises(ValueError, match="the drafter takes features"):
            mlx_lm.batch_generate(MODEL, TOKENIZER, BATCH, max_tokens=4, draft_model=other)
    with mlx_eagle.installed(draft_model=DRAFTER):
        theirs = {"max_kv_size": 64, "stream": None, "sampler": None, "logits_processors": None}
        found = mlx_lm.batch_generate(MODEL, TOKENIZER, BATCH, max_tokens=4, **theirs)
        assert found.texts == expected and hasattr(found.stats, "__len__")


def test_what_was_imported_in_between_is_mlx_lms_afterwards(monkeypatch):
    """Under any name, and the step's where it was imported before."""
    early, late = ModuleType("early"), ModuleType("late")
    early.step = MLX_LMS[0]
    monkeypatch.setitem(sys.modules, "early", early)
    monkeypatch.setitem(sys.modules, "late", late)
    with mlx_eagle.installed(draft_model=PERFECT) as installation:
        assert early.step is installation
        late.text, late.batch, late.step = (
            mlx_lm.stream_generate,
            mlx_lm.batch_generate,
            early.step,
        )
        held = late.text
    assert (late.text, late.batch) == (mlx_lm.stream_generate, mlx_lm.batch_generate)
    assert late.step is early.step is MLX_LMS[0]
    assert not any(r.from_draft for r in held(MODEL, TOKENIZER, PROMPT, max_tokens=20))


def test_something_else_than_a_drafter_is_refused():
    with pytest.raises(ValueError, match="draft_model is a Model: give 'auto'"):
        mlx_eagle.install(draft_model=SMALL)
    assert MODULE.speculative_generate_step is MLX_LMS[0]


def test_a_default_within_is_gone_afterwards():
    outer = mlx_eagle.install()
    try:
        with mlx_eagle.installed(draft_model=PERFECT) as inner:
            assert inner is outer and inner.default_for(MODEL, TOKENIZER) is PERFECT
        assert outer.default_for(MODEL, TOKENIZER) is None
    finally:
        mlx_eagle.uninstall()
