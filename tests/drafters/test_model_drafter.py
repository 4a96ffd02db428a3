"""An ordinary model as the drafter: its caches, its vocabulary, loading it."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from drafter_pairs import LLAMA, PAIRS, WINDOW, Steered, naive_twin
from helpers import PROMPT, SCRIPTS, VOCAB, plain, speculative, tiny_llama
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import BatchKVCache, RotatingKVCache
from mlx_lm.utils import save_config, save_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.kind import LoadOptions
from mlx_eagle.drafters.model_drafter import ModelDrafter, load


@pytest.mark.parametrize("k", [1, 3])
def test_a_recurrent_draft_model_runs_again_where_a_draft_fails(k):
    model, inner = PAIRS["draft model, recurrent"]
    text = PROMPT + plain(model, PROMPT, 60)
    for script in ("all", "none"):
        drafter = Steered(inner, naive_twin(inner, model), text, SCRIPTS[script])
        _, stats = speculative(model, drafter, PROMPT, 1 + 4 * (k + 1), num_draft_tokens=k)
        num_reruns = stats.num_head_forwards - stats.num_drafted
        # Lazily, so not after the last draft.
        assert num_reruns == (0 if script == "all" else stats.num_rounds - 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("keep", [0, 4])
def test_a_draft_model_with_a_full_window(keep, monkeypatch):
    def make_cache(self):
        return [RotatingKVCache(WINDOW, keep) for _ in self.layers]

    monkeypatch.setattr(llama.Model, "make_cache", make_cache)
    text = PROMPT + plain(LLAMA, PROMPT, 60)
    tokens, stats = speculative(LLAMA, ModelDrafter(LLAMA), PROMPT, 25, num_draft_tokens=3)
    assert tokens == text[len(PROMPT) :][:25]
    assert stats.tau == 4

    def true_text(committed, size):
        return text[len(committed) :][:size]

    for script in SCRIPTS:
        drafter = Steered(ModelDrafter(LLAMA), true_text, text, SCRIPTS[script])
        tokens, _ = speculative(LLAMA, drafter, PROMPT, 25, num_draft_tokens=3)
        assert tokens == text[len(PROMPT) :][:25]


@pytest.mark.parametrize("acceptance", ["coupled", "reject"])
def test_the_same_law_is_always_accepted(acceptance):
    sampler = Sampling(temp=1.0, seed=3)
    _, stats = speculative(
        LLAMA,
        ModelDrafter(LLAMA),
        PROMPT,
        25,
        num_draft_tokens=3,
        sampler=sampler,
        acceptance=acceptance,
    )
    assert stats.tau == 4


@pytest.mark.exhaustive
def test_tables_padded_differently():
    for draft_size, target_size in ((VOCAB, VOCAB + 8), (VOCAB + 8, VOCAB)):
        target = tiny_llama(vocab_size=target_size)
        drafter = ModelDrafter(tiny_llama(1, vocab_size=draft_size), target_size)
        tokens, _ = speculative(target, drafter, PROMPT, 25, num_draft_tokens=3)
        assert tokens == plain(target, PROMPT, 25)
        for acceptance in ("coupled", "reject"):
            tokens, stats = speculative(
                target,
                drafter,
                PROMPT,
                12,
                num_draft_tokens=3,
                sampler=Sampling(temp=1.0, seed=1),
                acceptance=acceptance,
            )
            assert stats.num_drafted > 0 and max(tokens) < target_size


def write_model(folder, model: nn.Module, words: list[str]) -> str:
    """A folder that mlx-lm can load: weights, config and a tokenizer of whole words."""
    save_model(folder, model)
    config = {k: v for k, v in vars(model.args).items() if v is not None}
    save_config(config, folder / "config.json")
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return str(folder)


def test_loading_a_draft_model(tmp_path):
    words = [f"w{i}" for i in range(VOCAB)]
    path = write_model(tmp_path / "draft", LLAMA, words)

    def vocabulary(words):
        own = models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0])
        return LoadOptions(tokenizer=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(own)))

    drafter = load(path, {}, LLAMA, vocabulary(words))
    _, stats = speculative(LLAMA, drafter, PROMPT, 25, num_draft_tokens=3)
    assert stats.tau == 4
    with pytest.raises(ValueError, match="gives only 0 of the target's 96 tokens"):
        load(path, {}, LLAMA, vocabulary(words[::-1]))
    with pytest.raises(ValueError, match="vocabulary of 96 tokens, but the target's has 4000"):
        load(path, {}, tiny_llama(vocab_size=4000), LoadOptions())


def test_a_draft_model_with_an_unknown_cache_is_refused(monkeypatch):
    def make_cache(self):
        return [BatchKVCache([0]) for _ in self.layers]

    monkeypatch.setattr(llama.Model, "make_cache", make_cache, raising=False)
    with pytest.raises(ValueError, match="the draft model uses a BatchKVCache"):
        ModelDrafter(LLAMA)


def test_a_draft_model_in_half_precision_becomes_float32_on_a_cpu(tmp_path, monkeypatch, capsys):
    """Its drafts took longer than the target's own tokens."""
    half = tiny_llama()
    half.set_dtype(mx.float16)
    path = write_model(tmp_path / "draft", half, [f"w{i}" for i in range(VOCAB)])
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    drafter = load(path, {}, LLAMA, LoadOptions())
    found = {array.dtype for _, array in tree_flatten(drafter.model.parameters())}
    assert found == {mx.float32}
    assert capsys.readouterr().err.startswith("Note: on a CPU the draft model's weights are")
