"""Token-identical to mlx-lm: chains of every length, every accept length, every way to stop."""

from functools import lru_cache

import mlx.core as mx
import pytest
from grids import thorough
from helpers import (
    CROWDED,
    PROMPT,
    SCRIPTS,
    VOCAB,
    ScriptedDrafter,
    caches_equal,
    plain,
    plain_with_cache,
    speculative,
    tiny_head,
    tiny_llama,
    tiny_qwen3,
)
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_eagle.decoding.generate_step import speculative_generate_step

MODELS = {"llama": tiny_llama, "qwen3": tiny_qwen3}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def text(model):
    """The prompt and 80 tokens of greedy continuation: the truth, by mlx-lm."""
    return PROMPT + plain(model, PROMPT, 80)


@pytest.fixture(scope="module")
def left(model):
    """What mlx-lm leaves behind, by the number of tokens: its cache, not to be changed."""
    return lru_cache(lambda num_tokens: plain_with_cache(model, PROMPT, num_tokens)[1])


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("k", thorough([1, 4], 4))
def test_scripted_drafts_and_the_cache_they_leave(model, text, left, k, script):
    drafter = ScriptedDrafter(text, SCRIPTS[script])
    cache = make_prompt_cache(model)
    tokens, _stats = speculative(
        model, drafter, PROMPT, 40, num_draft_tokens=k, prompt_cache=cache
    )
    assert tokens == text[len(PROMPT) :][:40]
    assert caches_equal(cache, left(40))


@pytest.mark.parametrize(
    "make, options",
    [(tiny_llama, {}), (tiny_qwen3, {}), (tiny_qwen3, {"max_kv_size": 12})],
    ids=["llama", "qwen3", "rotating"],
)
def test_long_drafts_of_a_target_with_many_query_heads(make, options):
    """Past 4 rows attention takes plain operations on Metal; past the window, a mask."""
    crowded = make(**CROWDED)
    truth = PROMPT + plain(crowded, PROMPT, 50, **options)
    drafter = ScriptedDrafter(truth, SCRIPTS["every length"])
    tokens, _ = speculative(crowded, drafter, PROMPT, 30, num_draft_tokens=7, **options)
    assert tokens == truth[len(PROMPT) :][:30]


def test_perfect_and_wrong_drafts_bound_tau(model, text):
    for k in (1, 2, 3, 4, 5):
        max_tokens = 1 + 6 * (k + 1)
        perfect = ScriptedDrafter(text, SCRIPTS["all"])
        _, stats = speculative(model, perfect, PROMPT, max_tokens, num_draft_tokens=k)
        assert stats.tau == k + 1
        assert stats.accepted_histogram == [0] * k + [6]
        wrong = ScriptedDrafter(text, SCRIPTS["none"])
        _, stats = speculative(model, wrong, PROMPT, 20, num_draft_tokens=k)
        assert stats.tau == 1 and stats.num_accepted == 0


@pytest.mark.parametrize("max_tokens", thorough([1, 2, 3, 5, 11], 1, 3))
@pytest.mark.parametrize("script", SCRIPTS)
def test_max_tokens_cuts_inside_an_accepted_run(model, text, left, max_tokens, script):
    cache = make_prompt_cache(model)
    tokens, _ = speculative(
        model,
        ScriptedDrafter(text, SCRIPTS[script]),
        PROMPT,
        max_tokens,
        num_draft_tokens=4,
        prompt_cache=cache,
    )
    assert tokens == text[len(PROMPT) :][:max_tokens]
    assert caches_equal(cache, left(max_tokens))


@pytest.mark.parametrize("stop_at", thorough(range(1, 9), 1, 4, 6))
def test_stop_token_inside_a_draft(model, text, left, stop_at):
    stop = text[len(PROMPT) + stop_at]
    expected = text[len(PROMPT) :]
    expected = expected[: expected.index(stop) + 1]
    cache = make_prompt_cache(model)
    tokens, _ = speculative(
        model,
        ScriptedDrafter(text, SCRIPTS["all"]),
        PROMPT,
        -1,
        num_draft_tokens=4,
        prompt_cache=cache,
        stop_tokens=[stop],
    )
    assert tokens == expected
    assert caches_equal(cache, left(len(expected)))


@pytest.mark.parametrize("num_taken", thorough(range(1, 12), 4, 6))
@pytest.mark.parametrize("script", ["all", "every length"])
def test_closing_the_generator_leaves_what_plain_decoding_leaves(model, text, num_taken, script):
    cache = make_prompt_cache(model)
    steps = speculative_generate_step(
        mx.array(PROMPT),
        model,
        ScriptedDrafter(text, SCRIPTS[script]),
        num_draft_tokens=3,
        max_tokens=-1,
        prompt_cache=cache,
    )
    tokens = [next(steps)[0] for _ in range(num_taken)]
    steps.close()
    assert tokens == text[len(PROMPT) :][:num_taken]
    reference = make_prompt_cache(model)
    theirs = generate_step(mx.array(PROMPT), model, max_tokens=-1, prompt_cache=reference)
    for _ in range(num_taken):
        next(theirs)
    theirs.close()
    assert caches_equal(cache, reference)


def test_a_second_request_continues_from_the_cache(model):
    question = [9, 33, 7]
    ours, theirs = make_prompt_cache(model), make_prompt_cache(model)
    drafter = tiny_head(model)
    ours += drafter.make_cache()
    for prompt in (PROMPT, question, question):
        tokens, _ = speculative(model, drafter, prompt, 9, num_draft_tokens=3, prompt_cache=ours)
        assert tokens == plain(model, prompt, 9, prompt_cache=theirs)
    assert caches_equal(ours[: len(theirs)], theirs)


def test_chunked_prefill_changes_nothing(model, text):
    for step in (1, 2, 3, 100):
        tokens, _ = speculative(
            model, tiny_head(model), PROMPT, 20, num_draft_tokens=3, prefill_step_size=step
        )
        assert tokens == text[len(PROMPT) :][:20]


def test_logits_processors_see_the_history_of_their_row(model):
    def processors():
        return make_logits_processors({3: 4.0}, repetition_penalty=1.8, repetition_context_size=6)

    seen = []

    def spy(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    expected = plain(model, PROMPT, 30, logits_processors=processors())
    drafter = ScriptedDrafter(PROMPT + expected + [0] * 8, SCRIPTS["every length"])
    tokens, _ = speculative(
        model, drafter, PROMPT, 30, num_draft_tokens=3, logits_processors=[*processors(), spy]
    )
    assert tokens == expected
    text = PROMPT + expected
    for n in range(len(PROMPT), len(text)):
        assert text[:n] in seen


def test_row_by_row_sampler_gets_one_row(model):
    shapes = set()

    def sampler(logprobs):
        shapes.add(logprobs.shape)
        return mx.argmax(logprobs, axis=-1)

    tokens, _ = speculative(
        model, tiny_head(model), PROMPT, 12, num_draft_tokens=3, sampler=sampler
    )
    assert tokens == plain(model, PROMPT, 12)
    assert shapes == {(1, VOCAB)}


def test_logprobs_are_those_of_the_position(model, text):
    theirs = [lp for _, lp in generate_step(mx.array(PROMPT), model, max_tokens=12)]
    steps = speculative_generate_step(
        mx.array(PROMPT),
        model,
        ScriptedDrafter(text, SCRIPTS["every length"]),
        num_draft_tokens=3,
        max_tokens=12,
    )
    for (token, logprobs, _), expected in zip(steps, theirs, strict=True):
        assert logprobs.shape == (VOCAB,)
        assert mx.allclose(logprobs, expected, atol=1e-4).item()
        assert mx.argmax(logprobs).item() == token


def test_from_draft_marks_exactly_the_accepted(model, text):
    drafter = ScriptedDrafter(text, lambda r, size: 2)
    steps = speculative_generate_step(
        mx.array(PROMPT), model, drafter, num_draft_tokens=3, max_tokens=10
    )
    flags = [from_draft for _, _, from_draft in steps]
    assert flags == [False] + [True, True, False] * 3


def test_two_generations_on_one_drafter_do_not_mix(model):
    drafter = tiny_head(model)
    prompts = [PROMPT, PROMPT[::-1]]
    expected = [plain(model, p, 12) for p in prompts]
    steps = [
        speculative_generate_step(mx.array(p), model, drafter, num_draft_tokens=2, max_tokens=12)
        for p in prompts
    ]
    tokens = [[], []]
    for _ in range(12):
        for out, gen in zip(tokens, steps, strict=True):
            out.append(next(gen)[0])
    assert tokens == expected


@pytest.mark.exhaustive
def test_sampled_text_has_the_targets_law():
    """match at temperature 1: first tokens and pairs, chi-square against exact probabilities."""
    model = tiny_llama(seed=3, vocab_size=6, num_hidden_layers=4)
    drafter = tiny_head(model, seed=2, draft_vocab_size=3)
    prompt, num_runs = [1, 4, 2], 600

    def probabilities(tokens):
        return mx.softmax(model(mx.array([tokens]))[0, -1]).tolist()

    exact = [0.0] * 36
    for a, pa in enumerate(probabilities(prompt)):
        for b, pb in enumerate(probabilities([*prompt, a])):
            for c, pc in enumerate(probabilities([*prompt, a, b])):
                exact[b * 6 + c] += pa * pb * pc
    counts, kept = [0] * 36, 0
    mx.random.seed(11)
    sampler = make_sampler(temp=1.0)
    for _ in range(num_runs):
        # The first token ends prefill; the pair after it comes out of drafted rounds.
        tokens, stats = speculative(model, drafter, prompt, 4, num_draft_tokens=2, sampler=sampler)
        counts[tokens[1] * 6 + tokens[2]] += 1
        kept += stats.num_accepted
    assert kept > num_runs // 10  # the drafted branch was taken
    # Pairs that are hardly ever seen count as one: of them alone the statistic has another law.
    pairs = [(num_runs * p, c) for c, p in zip(counts, exact, strict=True)]
    cells = [pair for pair in pairs if pair[0] >= 1]
    cells.append((sum(e for e, _ in pairs if e < 1), sum(c for e, c in pairs if e < 1)))
    assert len(cells) > 8
    # At most 35 degrees of freedom: 66.6 is the 0.999 quantile.
    assert sum((c - e) ** 2 / e for e, c in cells) < 66.6
