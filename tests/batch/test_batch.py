"""``batch_generate``: every text as it is alone, and as mlx-lm's own batch gives it."""

import warnings
from copy import copy

import mlx.core as mx
import mlx_lm
import pytest
from architectures import build
from costs import FLAT, LINEAR, ScriptedController, SettledCosts
from drafter_pairs import tiny_lfm2
from grids import thorough
from helpers import (
    FUSED,
    ScriptedDrafter,
    byte_tokenizer,
    plain,
    randomize,
    tiny_head,
    tiny_llama,
    tiny_qwen3,
)
from mlx_lm.models import gemma3_text
from mlx_lm.models.cache import make_prompt_cache

import mlx_eagle
from mlx_eagle.batch import generate as batch
from mlx_eagle.batch import requests, rounds
from mlx_eagle.batch.rounds import Batch
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.decoding.stats import OFF, ON
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.drafters.tree import DraftShape
from mlx_eagle.target_model.target import Target

VOCAB = 258
WINDOW = 12  # smaller than prompt and text together
TOKENIZER = byte_tokenizer()
END = next(iter(TOKENIZER.eos_token_ids))
PROMPTS = [[5, 17, 3, 88, 41, 2, 60], [9], [70, 71, 72] * 7, [33, 4, 250, 8]]
LENGTHS = [40, 7, 23, 1]


def windowed_gemma3():
    """Three layers in four see a few positions only, crossed by some prompts and every text."""
    args = gemma3_text.ModelArgs(
        "gemma3_text",
        hidden_size=64,
        num_hidden_layers=4,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCAB,
        sliding_window=WINDOW,
        sliding_window_pattern=4,
    )
    return randomize(gemma3_text.Model(args), 9)


MODELS = {
    "llama": lambda: tiny_llama(vocab_size=VOCAB, **FUSED),
    "gemma3, windowed": windowed_gemma3,
}
SCRIPTS = [
    lambda r, size: size,
    lambda r, size: 0,
    lambda r, size: r % (size + 1),
    lambda r, size: size if r % 2 else 0,
]


@pytest.fixture(scope="module", params=thorough(MODELS, "llama"))
def model(request):
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def scripted(model):
    return ScriptedTexts(model)


class ScriptedTexts(ScriptedDrafter):
    """Knows every text by the first token of its prompt, and follows another script in each."""

    def __init__(self, model, num_tokens: int = 60):
        self.texts = [prompt + plain(model, prompt, num_tokens) for prompt in PROMPTS]
        self.known = {
            text[0]: (text, script) for text, script in zip(self.texts, SCRIPTS, strict=True)
        }
        super().__init__([], SCRIPTS[0], VOCAB)

    def propose(self, size, pick=None):
        self.text, self.script = self.known[self.absorbed[0][0][0].item()]
        return super().propose(size, pick)


def together(model, drafter, prompts=PROMPTS, **kwargs):
    kwargs = {"max_tokens": LENGTHS, "return_token_ids": True, "num_draft_tokens": 3} | kwargs
    return mlx_eagle.batch_generate(model, TOKENIZER, prompts, draft_model=drafter, **kwargs)


def theirs(model, prompts=PROMPTS, **kwargs):
    kwargs = {"max_tokens": LENGTHS, "return_token_ids": True} | kwargs
    return mlx_lm.batch_generate(model, TOKENIZER, prompts, **kwargs)


@pytest.mark.parametrize("k", thorough([1, 3, 6], 3))
def test_ragged_accept_lengths(model, scripted, k):
    response = together(model, scripted, num_draft_tokens=k, max_tokens=40)
    expected = theirs(model, max_tokens=40)
    assert response.token_ids == expected.token_ids
    assert response.texts == expected.texts
    assert response.token_ids == [
        text[len(p) :][:40] for p, text in zip(PROMPTS, scripted.texts, strict=True)
    ]
    perfect, wrong, *_ = response.stats
    assert perfect.acceptance_rate == 1.0 and wrong.acceptance_rate == 0.0
    assert wrong.num_emitted == perfect.num_emitted == 39


def test_the_device_drafts_while_the_pass_of_all_is_built(monkeypatch):
    events, model = [], tiny_llama(vocab_size=VOCAB)
    call, start = type(model).__call__, mx.async_eval

    def started(*arrays) -> None:
        if getattr(arrays[0], "shape", None) == (len(PROMPTS), 2):
            events.append("drafts")
        start(*arrays)

    def counted(self, *args, **kwargs):
        events.append("target")
        return call(self, *args, **kwargs)

    monkeypatch.setattr(mx, "async_eval", started)
    monkeypatch.setattr(type(model), "__call__", counted)
    together(model, tiny_head(model), num_draft_tokens=2, max_tokens=20)
    first = events.index("drafts")
    assert events[first : first + 8] == ["drafts", "target"] * 4


def test_counts_are_those_of_each_text_alone(model, scripted):
    response = together(model, scripted)
    for prompt, length, ids, stats in zip(
        PROMPTS, LENGTHS, response.token_ids, response.stats, strict=True
    ):
        alone = mlx_eagle.Stats()
        steps = mlx_eagle.speculative_generate_step(
            mx.array(prompt), model, scripted, max_tokens=length, stats=alone
        )
        assert ids == [token for token, _, _ in steps]
        assert stats.accepted_histogram == alone.accepted_histogram
        assert stats.num_emitted == alone.num_emitted


def test_end_tokens_end_one_text(model, scripted, monkeypatch):
    ends = set(plain(model, PROMPTS[0], 12)[-1:])
    monkeypatch.setattr(TOKENIZER, "_eos_token_ids", ends)
    response, expected = together(model, scripted), theirs(model)
    assert response.token_ids == expected.token_ids and response.texts == expected.texts
    assert len(response.token_ids[0]) < 12


def test_caches_and_logprobs(model):
    drafter = tiny_head(model)
    wanted = {"return_prompt_caches": True, "return_logprobs": True}
    response, expected = together(model, drafter, **wanted), theirs(model, **wanted)
    for ours, reference in zip(response.logprobs, expected.logprobs, strict=True):
        assert ours == pytest.approx(reference, abs=1e-4)
    # The next turn goes on from the caches, which are not changed by that.
    more = [[11, 12], [13], [14, 15, 16], [17]]
    offsets = [cache[0].offset for cache in response.caches]
    again = together(model, drafter, more, prompt_caches=response.caches)
    caches = [cache[: len(model.layers)] for cache in response.caches]
    assert again.token_ids == theirs(model, more, prompt_caches=caches).token_ids
    assert again.token_ids == theirs(model, more, prompt_caches=expected.caches).token_ids
    assert offsets == [cache[0].offset for cache in response.caches]


def test_processors_and_seeded_sampling_as_alone(model):
    def ban_even(tokens, logits):
        return mx.where(mx.arange(VOCAB) % 2 == tokens[-1] % 2, -mx.inf, logits)

    drafter, kwargs = tiny_head(model), {"sampler": Sampling(temp=0.7, seed=3)}
    kwargs["logits_processors"] = [ban_even]
    response = together(model, drafter, max_tokens=15, **kwargs)
    for row, (prompt, ids) in enumerate(zip(PROMPTS, response.token_ids, strict=True)):
        kwargs["sampler"] = Sampling(temp=0.7, seed=3, row=row)
        steps = mlx_eagle.speculative_generate_step(
            mx.array(prompt), model, drafter, max_tokens=15, **kwargs
        )
        tokens = [token for token, _, _ in steps]
        assert ids == (tokens[: tokens.index(END)] if END in tokens else tokens)


NOISY = [
    {},
    {"acceptance": "reject"},
    {"acceptance": "match"},
    {"max_speculative_batch": 1},
    {"num_draft_tokens": 0},
]


@pytest.mark.parametrize("options", thorough(NOISY, NOISY[0], NOISY[-1]), ids=str)
def test_rows_of_a_batch_have_noise_of_their_own(options):
    """Equal prompts get different texts, each that of its row alone; drafted, or by mlx-lm."""
    model = MODELS["llama"]()
    drafter, prompts, num = tiny_head(model), [PROMPTS[0]] * 4, 12

    def texts(**sampling):
        kwargs = {"max_tokens": num, "sampler": Sampling(temp=1.0, **sampling), **options}
        return together(model, drafter, prompts, return_logprobs=True, **kwargs)

    response, again = texts(seed=3), texts(seed=3)
    assert response.token_ids == again.token_ids
    assert len(set(map(tuple, response.token_ids))) == 4
    assert [len(row) for row in response.logprobs] == [len(ids) for ids in response.token_ids]
    assert len(set(map(tuple, texts().token_ids + texts().token_ids))) == 8
    rule = {key: value for key, value in options.items() if key == "acceptance"}
    if rule != {"acceptance": "reject"}:  # whose random numbers follow the drafts
        rule["num_draft_tokens"] = 0
    for row, ids in enumerate(response.token_ids):
        alone = Sampling(temp=1.0, seed=3, row=row)
        steps = mlx_eagle.speculative_generate_step(
            mx.array(PROMPTS[0]), model, drafter, max_tokens=num, sampler=alone, **rule
        )
        tokens = [token for token, _, _ in steps]
        assert ids == (tokens[: tokens.index(END)] if END in tokens else tokens)


@pytest.mark.parametrize("make", [MODELS["llama"], tiny_lfm2], ids=["together", "in turn"])
@pytest.mark.parametrize("num_draft_tokens", [0, 2])
def test_stats_are_a_list_and_have_mlx_lms_names(make, num_draft_tokens):
    model = make()
    prompts, lengths = [[5, 17, 3], [9], [70, 71]], [9, 4, 6]
    options = {"max_tokens": lengths, "num_draft_tokens": num_draft_tokens}
    stats = together(model, tiny_head(model), prompts, **options).stats
    expected = theirs(model, prompts, max_tokens=lengths).stats
    assert isinstance(stats, list) and len(stats) == 3
    is_ours = num_draft_tokens > 0 or make is tiny_lfm2
    assert stats.prompt_tokens == (6 if is_ours else expected.prompt_tokens)
    assert stats.generation_tokens == expected.generation_tokens == sum(lengths)
    assert 0 < stats.prompt_time < stats.wall_time and stats.generation_tps > 0
    assert stats.generation_time == pytest.approx(stats.wall_time - stats.prompt_time)
    assert stats.peak_memory > 0
    assert stats.total.num_emitted == sum(counts.num_emitted for counts in stats)
    assert stats[0].mean_acceptance_length >= 1


@pytest.mark.parametrize("num_draft_tokens", [0, 2])
def test_verbose_batches_say_counts_and_rates(num_draft_tokens, capsys):
    """Drafted or not: a line for each prompt, and one for all."""
    options = {"max_tokens": 3, "num_draft_tokens": num_draft_tokens, "verbose": True}
    together(MODELS["llama"](), LookupDrafter(), [[5, 17, 3], [9]], **options)
    first, second, whole = capsys.readouterr().out.splitlines()
    assert "Prompt 0: " in first and "Prompt 1: " in second and "tokens-per-sec" in whole


SMALL = [[token % 90 for token in prompt] for prompt in PROMPTS]  # of a smaller vocabulary


@pytest.mark.parametrize("k", [3, "auto"])
def test_recurrent_targets_are_drafted_for_together(k, recwarn):
    model = tiny_lfm2()
    response = together(
        model, tiny_head(model), SMALL, num_draft_tokens=k, return_prompt_caches=True
    )
    assert response.token_ids == [plain(model, p, n) for p, n in zip(SMALL, LENGTHS, strict=True)]
    assert not [str(warning.message) for warning in recwarn]
    assert len(response.caches[0]) > len(make_prompt_cache(model))


@pytest.fixture
def uncut_states(monkeypatch) -> None:
    """As where a target reads its recurrent states in a way that is not seen."""
    monkeypatch.setattr(requests, "cuts_states_by_text", lambda model: False)


@pytest.mark.usefixtures("uncut_states")
def test_states_that_are_not_seen_go_one_after_the_other():
    model = tiny_lfm2()
    with pytest.warns(UserWarning, match=r"each text by itself: the prompts are decoded one"):
        response = together(model, tiny_head(model), SMALL)
    assert response.token_ids == [plain(model, p, n) for p, n in zip(SMALL, LENGTHS, strict=True)]
    assert sum(stats.num_rounds for stats in response.stats) > 0


@pytest.mark.usefixtures("uncut_states")
def test_states_that_are_not_seen_are_decoded_plainly_with_auto():
    model, prompts = tiny_lfm2(), SMALL
    with pytest.warns(UserWarning, match=r"by itself: they are decoded together, without"):
        response = together(model, tiny_head(model), prompts, num_draft_tokens="auto")
    assert response.token_ids == theirs(model, prompts).token_ids
    assert sum(stats.num_rounds for stats in response.stats) == 0
    with pytest.warns(UserWarning, match="one after the other, each with drafts"):
        alone = together(
            model, tiny_head(model), prompts[:1], num_draft_tokens="auto", max_tokens=9
        )
    assert alone.stats[0].num_rounds > 0


def test_a_drafter_for_one_text_is_said_aloud(recwarn):
    model = MODELS["llama"]()
    lagging = tiny_head(model).with_draft_cache("lagging")
    with pytest.warns(UserWarning, match="takes one text at a time: .* drafts are made prompt by"):
        together(model, lagging, max_tokens=2)
    recwarn.clear()
    together(model, tiny_head(model), max_tokens=2)
    together(model, LookupDrafter(), max_tokens=2)  # which has no passes to share
    assert not recwarn.list


def test_larger_batches_are_decoded_plainly():
    model = MODELS["llama"]()
    response = together(model, tiny_head(model), max_speculative_batch=3)
    assert response.token_ids == theirs(model).token_ids
    assert [stats.num_rounds for stats in response.stats] == [0] * 4
    assert response.batch_stats.generation_tokens == sum(LENGTHS)
    response = together(model, tiny_head(model), max_speculative_batch=4)
    assert response.stats[0].num_rounds > 0


def steep(shape: DraftShape, num_requests: int) -> float:
    """Drafts help four requests only if nearly all are accepted; two of them, as in FLAT."""
    if num_requests < 3 or shape.size == 0:
        return FLAT(shape, num_requests)
    return num_requests * (1.6 + 0.3 * shape.size)


def at_costs(monkeypatch, cost):
    """What rounds cost, whatever this machine thinks."""
    for module in (batch, rounds):
        monkeypatch.setattr(module, "costs_of", lambda *_: SettledCosts(cost))


def auto(model, drafter, **kwargs):
    return together(model, drafter, num_draft_tokens="auto", **kwargs)


@pytest.mark.parametrize("costs, speculates", [(FLAT, True), (LINEAR, False)])
def test_past_the_knee_it_is_mlx_lms_batch(model, monkeypatch, costs, speculates):
    at_costs(monkeypatch, costs)
    response = auto(model, tiny_head(model))
    assert response.token_ids == theirs(model).token_ids
    for stats, length in zip(response.stats, LENGTHS, strict=True):
        assert stats.num_emitted == length - 1
        assert (stats.num_rounds > 0) == (speculates and length > 2)
        whats = [event.what for event in stats.drafting_events]
        assert speculates or whats == [OFF]
    assert speculates or response.batch_stats.generation_tokens == sum(LENGTHS)
    assert auto(model, tiny_head(model), max_speculative_batch=3).batch_stats is not None


def test_drafting_goes_off_and_on_again_when_requests_have_ended(model, scripted, monkeypatch):
    """Three first drafts in four are right: too few for four texts, enough for two."""
    at_costs(monkeypatch, steep)
    drafter = copy(scripted)
    texts = {first: text for first, (text, _) in scripted.known.items()}
    drafter.known = {first: (text, lambda r, _: min(r % 4, 1)) for first, text in texts.items()}
    lengths = [48, 40, 22, 22]
    response = auto(model, drafter, max_tokens=lengths)
    assert response.token_ids == theirs(model, max_tokens=lengths).token_ids
    first, second, *short = response.stats
    assert [event.what for event in first.drafting_events] == [OFF, ON]
    assert [event.what for event in short[0].drafting_events] == [OFF]
    drafting_off, woken = first.drafting_events
    assert drafting_off.num_tokens < 20 and 20 <= woken.num_tokens <= 24
    assert "a round costs less now" in woken.reason
    assert short[0].num_plain_steps >= 5 and second.num_rounds > short[0].num_rounds + 5


@pytest.mark.parametrize(
    "make", thorough(["head", "lagging head", "lookup", "script"], "head", "script")
)
@pytest.mark.parametrize(
    "sizes", thorough([[0], [2, 0, 0, 0, 3, 3, 0], [0, 1]], [2, 0, 0, 0, 3, 3, 0]), ids=str
)
def test_plain_rounds_among_drafted_ones(model, scripted, monkeypatch, make, sizes):
    """Texts and caches are those of plain decoding, however often the head is left behind."""
    at_costs(monkeypatch, FLAT)
    monkeypatch.setattr(rounds, "AdaptiveController", lambda *_, **__: ScriptedController(sizes))
    drafter = {
        "head": lambda: tiny_head(model),
        "lagging head": lambda: tiny_head(model).with_draft_cache("lagging"),
        "lookup": LookupDrafter,
        "script": lambda: scripted,
    }[make]()
    wanted = {"return_prompt_caches": True, "return_logprobs": True}
    response, expected = auto(model, drafter, **wanted), theirs(model, **wanted)
    assert response.token_ids == expected.token_ids
    for ours, reference in zip(response.logprobs, expected.logprobs, strict=True):
        assert ours == pytest.approx(reference, abs=1e-4)
    for stats, length in zip(response.stats, LENGTHS, strict=True):
        assert stats.num_emitted == length - 1
        assert (stats.num_plain_steps > 0) == (length > 1)
    if make != "script":  # which knows one text only
        more = [[11, 12], [13], [14, 15, 16], [17]]
        again = together(model, drafter, more, prompt_caches=response.caches)
        assert again.token_ids == theirs(model, more, prompt_caches=expected.caches).token_ids


def test_stop_tokens_while_drafting_is_off(model, monkeypatch):
    """Found when the next step is under way; the caches are as if it had not been."""
    at_costs(monkeypatch, FLAT)
    monkeypatch.setattr(rounds, "AdaptiveController", lambda *_, **__: ScriptedController([0]))
    text = plain(model, PROMPTS[0], 12)
    monkeypatch.setattr(TOKENIZER, "_eos_token_ids", {text[-1]})
    response = auto(model, tiny_head(model), return_prompt_caches=True)
    assert response.token_ids == theirs(model).token_ids
    num_run = len(PROMPTS[0]) + text.index(text[-1]) + 1
    assert len(response.token_ids[0]) < 12
    # A pair of the head waits for the token that comes next.
    head_cache = response.caches[0][len(make_prompt_cache(model))]
    assert response.caches[0][0].offset == head_cache.offset + 1 == num_run
    monkeypatch.undo()
    written = PROMPTS[0] + text[: num_run - len(PROMPTS[0])]
    (again,) = together(
        model, tiny_head(model), [[9]], prompt_caches=response.caches[:1], max_tokens=9
    ).token_ids
    assert again == theirs(model, [[*written, 9]], max_tokens=9).token_ids[0]


def test_plain_rounds_are_pipelined_single_rows(monkeypatch):
    model = MODELS["llama"]()
    at_costs(monkeypatch, FLAT)
    monkeypatch.setattr(rounds, "AdaptiveController", lambda *_, **__: ScriptedController([0]))
    order, widths = [], []
    launch, finish = Batch.launch, Batch.finish
    monkeypatch.setattr(Batch, "launch", lambda *a: order.append("L") or launch(*a))
    monkeypatch.setattr(Batch, "finish", lambda *a: order.append("F") or finish(*a))
    run = Target.batch
    monkeypatch.setattr(Target, "batch", lambda *a: widths.append(a[1].shape) or run(*a))
    response = auto(model, tiny_head(model), max_tokens=[9, 9, 9, 5])
    # Not where a text reaches its limit: its row would be for nothing.
    assert "".join(order) == "L" + "LF" * 3 + "F" + "L" + "LF" * 3 + "F"
    assert widths == [(4, 1)] * 4 + [(3, 1)] * 4
    assert all(stats.num_head_forwards == 0 for stats in response.stats)


def test_auto_with_noise_for_every_prompt(model):
    """Texts with costs that nobody knows yet, and again with what the first batch has taught."""
    drafter, sampling = tiny_head(model), Sampling(0.8, seed=3)
    expected = together(model, drafter, num_draft_tokens=2, sampler=sampling).token_ids
    for _ in range(2):
        assert auto(model, drafter, sampler=sampling).token_ids == expected


def test_without_a_drafter_it_is_mlx_lm():
    model = MODELS["llama"]()
    response = mlx_eagle.batch_generate(model, TOKENIZER, PROMPTS, max_tokens=5)
    assert response.texts == theirs(model, max_tokens=5).texts
    assert together(model, tiny_head(model), [], max_tokens=5).texts == []


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"max_tokens": [1, 2]}, "max_tokens has 2 entries for 4 prompts"),
        ({"max_tokens": 0}, "max_tokens of prompt 0 is 0: give 1 or more"),
        ({"max_tokens": [1, 2, 2.5, 1]}, r"max_tokens of prompt 2 is 2.5 \(not a whole number\)"),
        ({"max_tokens": None}, r"max_tokens of prompt 0 is None \(nothing\)"),
        ({"num_draft_tokens": "3"}, r"num_draft_tokens is '3' \(text\)"),
        ({"prompt_caches": [[]] * 4}, "prompt_cache holds 0 caches, but"),
        ({"prompts": [[1], []]}, "the prompt is empty"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
        ({"tree": "2x3:6"}, "tree is for one prompt at a time: leave it out"),
        ({"kv_bits": 8}, "kv_bits is for one prompt at a time: leave it out"),
        ({"depth": 2}, r"batch_generate\(\) got an unexpected keyword argument 'depth'"),
    ],
)
def test_refusals(change, reason):
    model = MODELS["llama"]()
    with pytest.raises(TypeError if "depth" in change else ValueError, match=reason):
        together(model, LookupDrafter(), **{"max_tokens": 5, **change})


def test_caches_of_the_size_that_mlx_lms_batch_takes():
    model, options = tiny_qwen3(vocab_size=VOCAB), {"max_kv_size": 12, "max_tokens": 20}
    expected = [
        plain(model, prompt, 20, prompt_cache=make_prompt_cache(model, 12)) for prompt in PROMPTS
    ]
    for k in (3, 0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = together(model, LookupDrafter(), num_draft_tokens=k, tree=None, **options)
        assert found.token_ids == expected


@pytest.mark.parametrize("name", thorough(["jamba", "mamba", "rwkv7", "nemotron_h"], "jamba"))
def test_plain_batches_of_recurrent_targets(name):
    """mlx-lm's own batch pads shorter prompts, and what it pads them with enters their states."""
    model, prompts = build(name), [[5, 17, 3, 88, 41], [9], [70, 71, 72] * 4]
    expected = [plain(model, prompt, 12) for prompt in prompts]
    if name == "jamba":  # with some, such small states happen to change no choice
        assert theirs(model, prompts, max_tokens=12).token_ids != expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = together(model, LookupDrafter(), prompts, num_draft_tokens=0, max_tokens=12)
    assert found.token_ids == expected
    assert found.stats.generation_steps == 11  # one pass for all


@pytest.mark.parametrize("num_draft_tokens", [2, 0])
def test_a_processor_that_counts_counts_for_each_prompt(num_draft_tokens):
    model = MODELS["llama"]()
    expected = [plain(model, prompt, 9, logits_processors=[Counting()]) for prompt in PROMPTS]
    options = {"num_draft_tokens": num_draft_tokens, "logits_processors": [Counting()]}
    assert together(model, LookupDrafter(), max_tokens=9, **options).token_ids == expected


class Counting:
    """A processor that goes by how often it was called."""

    num_calls = 0

    def __call__(self, tokens, logits):
        self.num_calls += 1
        return mx.where(mx.arange(VOCAB) % 3 == self.num_calls % 3, logits + 9.0, logits)


@pytest.mark.parametrize("name", thorough(["gemma2", "afm7", "gpt_bigcode"], "gemma2"))
def test_batches_of_every_size_give_each_text(name):
    """As many prompts as key heads once gave a row the mask of another one, without a word."""
    model = build(name)
    prompts = [[5, 17, 3, 88, 41, 2, 60], [9], [70, 71, 72] * 4, [33, 4, 90, 8]]
    prompts = [[token % model.args.vocab_size for token in prompt] for prompt in prompts]
    expected = [plain(model, prompt, 12) for prompt in prompts]
    for num in (2, 3, 4):
        for size in (3, 0):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = together(
                    model, LookupDrafter(), prompts[:num], num_draft_tokens=size, max_tokens=12
                )
            assert found.token_ids == expected[:num]
            in_turn = [w for w in said if "one after the other" in str(w.message)]
            assert len(in_turn) == (0 if name == "gemma2" else 1)
