"""``batch_generate``: every text as it is alone, and as mlx-lm's own batch writes it."""

import random

import mlx.core as mx
import mlx_lm
import pytest
from helpers import ScriptedDrafter, byte_tokenizer, plain, randomize, tiny_head, tiny_llama
from mlx_lm.models import gemma3_text
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from test_caches import WINDOW
from test_drafters import tiny_lfm2
from test_pace import FLAT, LINEAR, STEEP

import mlx_eagle
from mlx_eagle import batch
from mlx_eagle.batch_cache import MOST_PADDING, BatchCache
from mlx_eagle.lookup import LookupDrafter
from mlx_eagle.pace import MOST_TEXTS, Plan
from mlx_eagle.sampling import Sampling

VOCAB = 258
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
        head_dim=16,
        vocab_size=VOCAB,
        sliding_window=WINDOW,
        sliding_window_pattern=4,
    )
    return randomize(gemma3_text.Model(args), 5)


MODELS = {"llama": lambda: tiny_llama(vocab_size=VOCAB), "gemma3, windowed": windowed_gemma3}
SCRIPTS = [
    lambda r, size: size,
    lambda r, size: 0,
    lambda r, size: r % (size + 1),
    lambda r, size: size if r % 2 else 0,
]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def scripted(model):
    return ScriptedTexts(model)


class ScriptedTexts(ScriptedDrafter):
    """Knows every text by the first token of its prompt, and follows another script in each."""

    def __init__(self, model, num_tokens: int = 60):
        self.texts = [prompt + plain(model, prompt, num_tokens) for prompt in PROMPTS]
        self.known = {text[0]: (text, script) for text, script in zip(self.texts, SCRIPTS)}
        super().__init__([], SCRIPTS[0], VOCAB)

    def propose(self, size, pick=None):
        self.text, self.script = self.known[self.absorbed[0][0][0].item()]
        return super().propose(size, pick)


def together(model, drafter, prompts=PROMPTS, **kwargs):
    kwargs = {"max_tokens": LENGTHS, "return_token_ids": True} | kwargs
    return mlx_eagle.batch_generate(model, TOKENIZER, prompts, draft_model=drafter, **kwargs)


def theirs(model, prompts=PROMPTS, **kwargs):
    kwargs = {"max_tokens": LENGTHS, "return_token_ids": True} | kwargs
    return mlx_lm.batch_generate(model, TOKENIZER, prompts, **kwargs)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_ragged_accept_lengths(model, scripted, k):
    response = together(model, scripted, num_draft_tokens=k, max_tokens=40)
    expected = theirs(model, max_tokens=40)
    assert response.token_ids == expected.token_ids
    assert response.texts == expected.texts
    assert response.token_ids == [text[len(p) :][:40] for p, text in zip(PROMPTS, scripted.texts)]
    perfect, wrong, *_ = response.stats
    assert perfect.acceptance_rate == 1.0 and wrong.acceptance_rate == 0.0
    assert wrong.num_emitted == perfect.num_emitted == 39


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


@pytest.mark.parametrize("drafter", ["head", "lagging head", "lookup"])
def test_drafters(model, drafter):
    drafter = {
        "head": lambda: tiny_head(model),
        "lagging head": lambda: tiny_head(model).with_draft_cache("lagging"),
        "lookup": LookupDrafter,
    }[drafter]()
    assert together(model, drafter).token_ids == theirs(model).token_ids


@pytest.mark.parametrize("size", [None, 10])
def test_shared_caches_against_one_list_a_text(size):
    """Random rows through a batch cache, cut at random; the truth is what lists would hold."""
    dice = random.Random(1)
    caches = [KVCache() if size is None else RotatingKVCache(size) for _ in range(3)]
    truth = []
    for cache, length in zip(caches, (4, 1, 9)):
        keys = mx.random.normal((1, 2, length, 8))
        cache.update_and_fetch(keys, keys)
        truth.append(keys)
    shared = BatchCache([[cache] for cache in caches])
    for _ in range(60):
        num_rows = dice.choice((1, 6))  # a window of one row is kept whole
        window = mx.random.normal((len(truth), 2, num_rows, 8))
        shared.open(num_rows)
        mask = shared.layers[0].make_mask(num_rows, return_array=True)
        keys, _ = shared.layers[0].update_and_fetch(window, window)
        for b, rows in enumerate(truth):  # what the window's first row may look at
            seen = mx.array([x for x in range(keys.shape[2]) if mask[b, 0, 0, x].item()])
            expected = mx.concatenate([rows, window[b : b + 1, :, :1]], axis=2)
            expected = expected[..., -(size or 9999) :, :]
            found = sorted(keys[b, 0][seen][:, 0].tolist())
            assert found == sorted(expected[0, 0, :, 0].tolist())
        kept = [dice.choice((1, num_rows)) for _ in truth]
        shared.cut(num_rows, kept)
        truth = [
            mx.concatenate([rows, window[b : b + 1, :, :n]], axis=2)
            for b, (rows, n) in enumerate(zip(truth, kept))
        ]
        if truth[0].shape[2] > 150 and len(truth) == 3:
            shared.keep_texts([0, 2])
            truth = [truth[0], truth[2]]
        for b, rows in enumerate(truth):
            (cache,) = shared.extract(b)
            assert cache.offset == rows.shape[2]
            held = cache.keys_and_values()[0][..., -min(cache.offset, size or 9999) + 1 :, :]
            assert mx.array_equal(held, rows[..., rows.shape[2] - held.shape[2] :, :])
    if size is None:
        assert shared.layers[0]._idx <= max(rows.shape[2] for rows in truth) + MOST_PADDING


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
    for prompt, ids in zip(PROMPTS, response.token_ids):
        steps = mlx_eagle.speculative_generate_step(
            mx.array(prompt), model, drafter, max_tokens=15, **kwargs
        )
        tokens = [token for token, _, _ in steps]
        assert ids == (tokens[: tokens.index(END)] if END in tokens else tokens)


def test_recurrent_targets_go_text_by_text():
    model = tiny_lfm2()
    prompts = [[token % 90 for token in prompt] for prompt in PROMPTS]
    response = together(model, tiny_head(model), prompts, return_prompt_caches=True)
    assert response.token_ids == [plain(model, p, n) for p, n in zip(prompts, LENGTHS)]
    assert sum(stats.num_rounds for stats in response.stats) > 0
    assert len(response.caches[0]) > len(make_prompt_cache(model))


def test_more_texts_than_pay_are_decoded_plainly():
    model = MODELS["llama"]()
    response = together(model, tiny_head(model), max_speculative_batch=3)
    assert response.token_ids == theirs(model).token_ids
    assert [stats.num_rounds for stats in response.stats] == [0] * 4
    assert response.batch_stats.generation_tokens == sum(LENGTHS)
    response = together(model, tiny_head(model), max_speculative_batch=4)
    assert response.stats[0].num_rounds > 0


@pytest.mark.parametrize("costs, speculates", [(FLAT, True), (LINEAR, False)])
def test_auto_chooses_from_the_costs(monkeypatch, costs, speculates):
    model = MODELS["llama"]()
    monkeypatch.setattr(batch, "round_costs", lambda decoder: costs)
    response = together(model, tiny_head(model), num_draft_tokens="auto")
    assert response.token_ids == theirs(model).token_ids
    assert (response.stats[0].num_rounds > 0) == speculates


def test_the_knee():
    assert 4 <= FLAT.most_texts() <= MOST_TEXTS
    assert STEEP.most_texts() == LINEAR.most_texts() == 0
    assert FLAT.batched(1).best_chain([0.6]) == FLAT.best_chain([0.6])
    assert FLAT.batched(2).plain == FLAT.rounds[Plan(1)]
    assert FLAT.pass_of(9) > FLAT.pass_of(8) == FLAT.rounds[Plan(7)]


def test_without_a_drafter_it_is_mlx_lm():
    model = MODELS["llama"]()
    response = mlx_eagle.batch_generate(model, TOKENIZER, PROMPTS, max_tokens=5)
    assert response.texts == theirs(model, max_tokens=5).texts
    assert together(model, tiny_head(model), [], max_tokens=5).texts == []


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"max_tokens": [1, 2]}, "max_tokens has 2 entries for 4 prompts"),
        ({"max_tokens": 0}, "max_tokens of prompt 0 is 0"),
        ({"prompts": [[1], []]}, "the prompt is empty"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
    ],
)
def test_refusals(change, reason):
    model = MODELS["llama"]()
    with pytest.raises(ValueError, match=reason):
        together(model, LookupDrafter(), **{"max_tokens": 5, **change})
