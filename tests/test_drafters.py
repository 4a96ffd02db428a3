"""Four methods, one loop: lookup, a draft model and an MTP layer beside the EAGLE head.

Each drafter is compared with a naive twin that starts from the committed text every time,
while a script decides how many of its draft tokens are kept.
"""

import random
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers import (
    PROMPT,
    SCRIPTS,
    SIZES,
    VOCAB,
    caches_equal,
    plain,
    randomize,
    speculative,
    tiny_head,
    tiny_llama,
)
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import gemma3_text, lfm2, llama, mamba2, qwen3_5, qwen3_next
from mlx_lm.models.cache import (
    BatchKVCache,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.utils import save_config, save_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mlx_eagle.drafter import Draft, Drafter
from mlx_eagle.lookup import LookupDrafter, NgramIndex
from mlx_eagle.loop import speculative_generate_step
from mlx_eagle.model_drafter import ModelDrafter, load_model_drafter
from mlx_eagle.mtp import MTPDrafter, load_mtp, make_mtp_head
from mlx_eagle.sampling import Sampling
from mlx_eagle.target import Target

WINDOW = 8  # of the rotating caches: crossed by every prompt and text below


def tiny_gemma3(seed: int = 5) -> nn.Module:
    sizes = {**SIZES, "num_hidden_layers": 3, "sliding_window": WINDOW}
    args = gemma3_text.ModelArgs("gemma3_text", sliding_window_pattern=3, **sizes)
    return randomize(gemma3_text.Model(args), seed)


def tiny_mamba2(seed: int = 6) -> nn.Module:
    args = mamba2.ModelArgs(
        model_type="mamba2",
        num_heads=4,
        head_dim=16,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        state_size=16,
        num_hidden_layers=2,
        layer_norm_epsilon=1e-5,
        conv_kernel=4,
        n_groups=1,
        use_bias=False,
        use_conv_bias=True,
        tie_word_embeddings=True,
        time_step_limit=(0.0, 10.0),
        time_step_rank="auto",
    )
    return randomize(mamba2.Model(args), seed)


def tiny_lfm2(seed: int = 7) -> nn.Module:
    args = lfm2.ModelArgs(
        model_type="lfm2",
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        norm_eps=1e-5,
        conv_bias=False,
        conv_L_cache=3,
        block_dim=64,
        block_ff_dim=96,
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention", "conv"],
    )
    return randomize(lfm2.Model(args), seed)


QWEN = {
    **SIZES,
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "num_experts": 0,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
}


def tiny_qwen3_next(seed: int = 8, **changes) -> nn.Module:
    args = {**QWEN, "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mlp_only_layers": []}
    args = qwen3_next.ModelArgs("qwen3_next", **{**args, **changes})
    return randomize(qwen3_next.Model(args), seed)


def tiny_qwen3_5(seed: int = 9, **changes) -> nn.Module:
    text = {**QWEN, "model_type": "qwen3_5_text", **changes}
    return randomize(qwen3_5.Model(qwen3_5.ModelArgs("qwen3_5", text)), seed)


def nudged(model: nn.Module, by: float = 0.03) -> nn.Module:
    """A model that agrees with ``model`` often, but not always."""
    other = type(model)(model.args)
    mx.random.seed(77)
    other.update(tree_map(lambda w: w + by * mx.random.normal(w.shape), model.parameters()))
    mx.eval(other.parameters())
    return other


def tiny_mtp(model: nn.Module, seed: int = 10) -> MTPDrafter:
    return MTPDrafter(randomize(make_mtp_head(model), seed), model)


LLAMA = tiny_llama()
QWEN3_NEXT = tiny_qwen3_next()
QWEN3_5_MOE = tiny_qwen3_5(num_experts=4, tie_word_embeddings=True)

PAIRS: dict[str, tuple[nn.Module, Drafter]] = {
    "lookup": (LLAMA, LookupDrafter()),
    "draft model": (LLAMA, ModelDrafter(nudged(LLAMA))),
    "draft model, rotating": (LLAMA, ModelDrafter(tiny_gemma3())),
    "draft model, recurrent": (LLAMA, ModelDrafter(tiny_mamba2())),
    "draft model, hybrid": (LLAMA, ModelDrafter(tiny_lfm2())),
    "mtp, qwen3-next": (QWEN3_NEXT, tiny_mtp(QWEN3_NEXT)),
    "mtp, qwen3.5 moe, tied": (QWEN3_5_MOE, tiny_mtp(QWEN3_5_MOE)),
    "eagle-3": (LLAMA, tiny_head(LLAMA)),
}
SHOWN = [name for name in PAIRS if "recurrent" not in name and "hybrid" not in name]


@pytest.fixture(params=PAIRS)
def pair(request) -> tuple[nn.Module, Drafter]:
    return PAIRS[request.param]


# What each drafter proposes after a text, from that text alone.


def naive_lookup(text: list[int], size: int, max_ngram: int = 3, min_ngram: int = 1) -> list[int]:
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[len(text) - n :]:
                copied = list(text)
                for i in range(size):
                    copied.append(copied[start + n + i])
                return copied[len(text) :]
    return []


def naive_mtp(drafter: MTPDrafter, target: nn.Module, text: list[int], size: int) -> list[int]:
    """Slot by slot from the features of the whole text, without a cache."""
    head, num_layers = drafter.head, len(target.layers)
    _, features = Target(target, (num_layers,))(mx.array(text), make_prompt_cache(target))
    states = target.model.norm(features)[None, :-1]
    tokens = list(text[1:])
    for _ in range(size):
        embeddings = target.model.embed_tokens(mx.array([tokens]))
        # As the published code has it: the embedding first, and a norm at the end, whose
        # output goes to the vocabulary and back into the layer.
        x = [head.pre_fc_norm_embedding(embeddings), head.pre_fc_norm_hidden(states)]
        x = mx.concatenate(x, axis=-1) @ head.fc.weight.T
        out = head.norm(head.layers[0](x, "causal", None))[:, -1:]
        tied = "lm_head" not in getattr(target, "language_model", target)
        project = target.model.embed_tokens.as_linear if tied else target.lm_head
        tokens.append(mx.argmax(project(out)[0, -1]).item())
        states = mx.concatenate([states, out], axis=1)
    return tokens[-size:]


def naive_twin(drafter: Drafter, target: nn.Module) -> Callable[[list[int], int], list[int]]:
    if isinstance(drafter, LookupDrafter):
        return naive_lookup
    if isinstance(drafter, ModelDrafter):
        return lambda text, size: plain(drafter.model, text, size)
    return lambda text, size: naive_mtp(drafter, target, text, size)


class Steered:
    """Runs a drafter, checks each draft against its twin, and hands on what the script says."""

    def __init__(self, inner, twin, text, script):
        self.inner, self.twin, self.text, self.script = inner, twin, text, script
        self.num_rounds, self.absorbed = 0, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def begin(self, cache=None):
        self.begun = Steered(self.inner.begin(cache), self.twin, self.text, self.script)
        return self.begun

    def extend(self, tokens, features, last=None):
        self.absorbed.append((tokens, last))
        self.inner.extend(tokens, features, last)

    def propose(self, size, pick):
        committed = []
        for tokens, last in self.absorbed:
            committed += tokens.tolist()[: None if last is None else last.item() + 1]
        assert committed == self.text[: len(committed)]
        drafted = self.inner.propose(size, pick)
        assert drafted.tokens.tolist() == self.twin(committed, size)
        right = self.script(self.num_rounds, size)
        self.num_rounds += 1
        tokens = self.text[len(committed) : len(committed) + size]
        if right < size:
            tokens[right] = (tokens[right] + 1) % VOCAB
        return Draft(mx.array(tokens, dtype=mx.int32))


def test_the_interface(pair):
    assert isinstance(pair[1], Drafter)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_same_text(pair, k):
    model, drafter = pair
    tokens, stats = speculative(model, drafter, PROMPT, 30, num_draft_tokens=k)
    assert tokens == plain(model, PROMPT, 30)
    assert stats.num_emitted == 29
    assert stats.num_emitted == stats.num_accepted + stats.num_target_forwards


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("name", [name for name in PAIRS if name != "eagle-3"])
def test_every_draft_equals_the_naive_one(name, k, script):
    model, inner = PAIRS[name]
    text = PROMPT + plain(model, PROMPT, 24)
    drafter = Steered(inner, naive_twin(inner, model), text, SCRIPTS[script])
    tokens, _ = speculative(
        model, drafter, PROMPT, 18, num_draft_tokens=k, prefill_step_size=3
    )
    assert tokens == text[len(PROMPT) :][:18]
    assert drafter.begun.num_rounds > 3


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("k", [1, 3])
def test_k_forwards_a_round(name, k):
    model, drafter = PAIRS[name]
    _, stats = speculative(model, drafter, PROMPT, 25, num_draft_tokens=k)
    assert stats.num_head_forwards == (0 if name == "lookup" else stats.num_drafted)


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


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "model",
    [LLAMA, tiny_gemma3(), tiny_mamba2(), tiny_lfm2(), QWEN3_NEXT],
    ids=lambda model: model.model_type,
)
def test_the_target_as_its_own_draft_model(model, k):
    max_tokens = 1 + 6 * (k + 1)
    tokens, stats = speculative(
        model, ModelDrafter(model), PROMPT, max_tokens, num_draft_tokens=k
    )
    assert tokens == plain(model, PROMPT, max_tokens)
    assert stats.tau == k + 1


@pytest.mark.parametrize("keep", [0, 4])
def test_a_draft_model_with_a_full_window(keep, monkeypatch):
    make_cache = lambda self: [RotatingKVCache(WINDOW, keep) for _ in self.layers]
    monkeypatch.setattr(llama.Model, "make_cache", make_cache)
    text = PROMPT + plain(LLAMA, PROMPT, 60)
    tokens, stats = speculative(LLAMA, ModelDrafter(LLAMA), PROMPT, 25, num_draft_tokens=3)
    assert tokens == text[len(PROMPT) :][:25]
    assert stats.tau == 4
    true_text = lambda committed, size: text[len(committed) :][:size]
    for script in SCRIPTS:
        drafter = Steered(ModelDrafter(LLAMA), true_text, text, SCRIPTS[script])
        tokens, _ = speculative(LLAMA, drafter, PROMPT, 25, num_draft_tokens=3)
        assert tokens == text[len(PROMPT) :][:25]


def test_lookup_equals_its_naive_twin():
    dice = random.Random(3)
    for _ in range(150):
        max_ngram = dice.randint(1, 4)
        min_ngram = dice.randint(1, max_ngram)
        index, text = NgramIndex(max_ngram, min_ngram), []
        for _ in range(40):
            size = dice.randint(1, 6)
            assert index.continuation(size) == naive_lookup(text, size, max_ngram, min_ngram)
            token = dice.randrange(5)
            index.append(token)
            text.append(token)


def test_lookup_reads_no_rows_after_the_last():
    drafter = LookupDrafter().begin()
    drafter.extend(mx.array([1, 2, 3]), None)
    drafter.extend(mx.array([1, 2, 9, 9]), None, last=mx.array(1))
    assert drafter.propose(4, None).tokens.tolist() == [3, 1, 2, 3]
    drafter.extend(mx.array([7, 3]), None, last=mx.array(0))
    draft = drafter.propose(4, None)
    assert draft.tokens.shape == (0,) and draft.tokens.dtype == mx.int32


class Recital(nn.Module):
    """A target that recites a text: its choice depends on the position alone."""

    def __init__(self, text: list[int]):
        super().__init__()
        self.layers = [nn.Identity()]
        self.text = text

    def __call__(self, tokens, cache):
        start = cache[0].offset
        cache[0].update_and_fetch(*[mx.zeros((1, 1, tokens.shape[1], 1))] * 2)
        following = mx.array(self.text[start + 1 : start + 1 + tokens.shape[1]])
        return 9.0 * (following[None, :, None] == mx.arange(VOCAB))

    def make_cache(self):
        return [KVCache()]


def test_lookup_on_copy_and_edit():
    dice = random.Random(5)
    original = [dice.randrange(VOCAB) for _ in range(80)]
    edited = list(original)
    for place in (12, 33, 34, 61):
        edited[place] = (edited[place] + 7) % VOCAB
    text = original + [1, 2] + edited + [0] * 10
    model, prompt = Recital(text), original + [1, 2]
    tokens, stats = speculative(model, LookupDrafter(), prompt, 80, num_draft_tokens=5)
    assert tokens == edited
    assert stats.num_head_forwards == 0
    assert stats.tau > 3.5


def test_lookup_on_a_repetitive_text():
    model = Recital([4, 5, 6] * 30)
    _, stats = speculative(model, LookupDrafter(), [4, 5, 6, 4], 25, num_draft_tokens=5)
    assert stats.tau == 6


def test_coupled_text_depends_on_the_seed_alone(pair):
    model, drafter = pair

    def run(num_draft_tokens):
        sampler = Sampling(temp=0.7, top_p=0.9, seed=4)
        return speculative(
            model,
            drafter,
            PROMPT,
            20,
            num_draft_tokens=num_draft_tokens,
            sampler=sampler,
            acceptance="coupled",
        )[0]

    assert run(4) == run(1) == run(0)


def test_rejection_sampling(pair):
    model, drafter = pair

    def run(seed):
        sampler = Sampling(temp=0.7, top_k=20, seed=seed)
        return speculative(
            model,
            drafter,
            PROMPT,
            12,
            num_draft_tokens=3,
            sampler=sampler,
            acceptance="reject",
        )

    tokens, stats = run(1)
    assert len(tokens) == 12 and stats.num_emitted == 11
    assert run(1)[0] == tokens and run(2)[0] != tokens


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


def test_two_generations_do_not_mix(pair):
    model, drafter = pair
    prompts = [PROMPT, PROMPT[::-1]]
    steps = [
        speculative_generate_step(mx.array(p), model, drafter, num_draft_tokens=2, max_tokens=12)
        for p in prompts
    ]
    tokens = [[], []]
    for _ in range(12):
        for out, gen in zip(tokens, steps):
            out.append(next(gen)[0])
    assert tokens == [plain(model, p, 12) for p in prompts]


TURNS = [PROMPT, [9, 33, 7], [12], [50, 51, 52, 53]]


def pair_cache(model, drafter) -> list:
    return make_prompt_cache(model) + drafter.make_cache()


def assert_drafter_missed_nothing(drafter, model, cache: list, text: list[int]) -> None:
    """The drafter's part of ``cache`` equals what it is after ``text`` in one piece."""
    num_target = len(make_prompt_cache(model))
    assert len(cache) == num_target + len(drafter.make_cache())
    ours, whole = cache[num_target:], drafter.make_cache()
    if isinstance(drafter, ModelDrafter) and whole:
        drafter.model(mx.array([text]), cache=whole)
        assert caches_equal(ours, whole)
    elif isinstance(drafter, MTPDrafter):
        _, features = Target(model, drafter.taps)(mx.array(text), make_prompt_cache(model))
        other = drafter.begin(whole)
        other.extend(mx.array(text[1:]), features[:-1])
        assert caches_equal(ours[:1], whole[:1])
        assert mx.allclose(ours[1].keys[0, 0], features[-1:], rtol=1e-3, atol=1e-3).item()


@pytest.mark.parametrize("k", [1, 3])
def test_several_requests_on_one_cache(pair, k, tmp_path):
    model, drafter = pair
    cache, reference, text = pair_cache(model, drafter), make_prompt_cache(model), []
    num_target, file = len(reference), str(tmp_path / "cache.safetensors")
    for turn in TURNS:
        tokens, _ = speculative(model, drafter, turn, 9, num_draft_tokens=k, prompt_cache=cache)
        assert tokens == plain(model, turn, 9, prompt_cache=reference)
        text += turn + tokens
        if not isinstance(drafter, ModelDrafter) or type(drafter.model) is llama.Model:
            assert_drafter_missed_nothing(drafter, model, cache, text)
        save_prompt_cache(file, cache)
        cache = load_prompt_cache(file)
    assert len(cache) == num_target + len(drafter.make_cache())


def test_a_draft_model_with_a_full_window_carries_it_over_requests():
    model, drafter = PAIRS["draft model, rotating"]
    cache, text = pair_cache(model, drafter), []
    for turn in TURNS:
        tokens, _ = speculative(model, drafter, turn, 9, num_draft_tokens=3, prompt_cache=cache)
        text += turn + tokens
    ours = cache[len(make_prompt_cache(model)) :]
    assert [c.offset for c in ours] == [len(text)] * len(ours)
    expected = plain(drafter.model, [*text, 3, 4], 12)
    assert plain(drafter.model, [3, 4], 12, prompt_cache=ours) == expected


@pytest.mark.parametrize("num_taken", [1, 2, 4])
@pytest.mark.parametrize("name", SHOWN)
def test_left_early(name, num_taken):
    model, drafter = PAIRS[name]
    cache = pair_cache(model, drafter)
    steps = speculative_generate_step(
        mx.array(PROMPT), model, drafter, num_draft_tokens=3, max_tokens=-1, prompt_cache=cache
    )
    text = PROMPT + [next(steps)[0] for _ in range(num_taken)]
    steps.close()
    if name != "draft model, rotating":
        assert_drafter_missed_nothing(drafter, model, cache, text)
    tokens, _ = speculative(model, drafter, [3, 4], 9, num_draft_tokens=3, prompt_cache=cache)
    assert tokens == plain(model, [*text, 3, 4], 9)


@pytest.mark.parametrize("num_trimmed", [1, 4, 12])
@pytest.mark.parametrize("name", ["lookup", "draft model"])
def test_trimmed_to_a_common_prefix(name, num_trimmed):
    model, drafter = PAIRS[name]
    cache = pair_cache(model, drafter)
    text = PROMPT + speculative(model, drafter, PROMPT, 10, prompt_cache=cache)[0]
    trim_prompt_cache(cache, num_trimmed)
    text = text[:-num_trimmed]
    tokens, _ = speculative(model, drafter, [3, 4], 9, prompt_cache=cache)
    assert tokens == plain(model, [*text, 3, 4], 9)
    assert_drafter_missed_nothing(drafter, model, cache, [*text, 3, 4, *tokens])


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_short_prompts_and_texts(pair, max_tokens):
    model, drafter = pair
    for prompt in ([5], [5, 17]):
        tokens, _ = speculative(model, drafter, prompt, max_tokens, num_draft_tokens=3)
        assert tokens == plain(model, prompt, max_tokens)


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
    vocabulary = lambda words: PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(
            models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0])
        )
    )
    drafter = load_model_drafter(path, LLAMA, vocabulary(words))
    _, stats = speculative(LLAMA, drafter, PROMPT, 25, num_draft_tokens=3)
    assert stats.tau == 4
    with pytest.raises(ValueError, match="gives only 0 of the target's 96 tokens"):
        load_model_drafter(path, LLAMA, vocabulary(words[::-1]))
    with pytest.raises(ValueError, match="vocabulary of 96 tokens, but the target's has 4000"):
        load_model_drafter(path, tiny_llama(vocab_size=4000))


def test_a_draft_model_with_an_unknown_cache_is_refused(monkeypatch):
    make_cache = lambda self: [BatchKVCache([0]) for _ in self.layers]
    monkeypatch.setattr(llama.Model, "make_cache", make_cache, raising=False)
    with pytest.raises(ValueError, match="the draft model uses a BatchKVCache"):
        ModelDrafter(LLAMA)


def test_bad_ngrams_are_refused():
    for sizes in ({"max_ngram": 2, "min_ngram": 3}, {"min_ngram": 0}):
        with pytest.raises(ValueError, match="min_ngram of 1 or more"):
            LookupDrafter(**sizes)


def checkpoint(drafter: MTPDrafter, fused: bool) -> dict[str, mx.array]:
    """The layer's tensors under the names, and with the conventions, of a published file."""
    tensors = {"model.embed_tokens.weight": mx.zeros((2, 2))}
    for name, array in tree_flatten(drafter.head.parameters()):
        if array.ndim == 1:
            array = array - 1.0
        if "switch_mlp" not in name:
            tensors[f"mtp.{name}"] = array
            continue
        mlp, projection = name.removesuffix(".weight").split(".switch_mlp.")
        for i, expert in enumerate(array):
            tensors[f"mtp.{mlp}.experts.{i}.{projection}.weight"] = expert
    if fused:
        experts = lambda name: mx.stack(
            [tensors.pop(f"mtp.layers.0.mlp.experts.{i}.{name}.weight") for i in range(4)]
        )
        gate_up = mx.concatenate([experts("gate_proj"), experts("up_proj")], axis=1)
        tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = gate_up
        tensors["mtp.layers.0.mlp.experts.down_proj"] = experts("down_proj")
    return tensors


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "target",
    [
        QWEN3_NEXT,
        tiny_qwen3_next(num_experts=4),
        tiny_qwen3_5(),
        QWEN3_5_MOE,
    ],
    ids=["qwen3_next dense", "qwen3_next", "qwen3_5", "qwen3_5_moe"],
)
def test_loading_an_mtp_layer(target, fused):
    drafter = tiny_mtp(target)
    has_experts = "switch_mlp" in drafter.head.layers[0].mlp
    loaded = load_mtp(checkpoint(drafter, fused and has_experts), target)
    ours = dict(tree_flatten(loaded.head.parameters()))
    for name, array in tree_flatten(drafter.head.parameters()):
        assert mx.allclose(ours[name], array, atol=1e-6).item(), name
    tokens, stats = speculative(target, loaded, PROMPT, 12, num_draft_tokens=2)
    assert tokens == plain(target, PROMPT, 12)
    assert stats.num_head_forwards == stats.num_drafted


def test_the_dtype_of_a_loaded_mtp_layer_is_the_targets():
    target = tiny_qwen3_5()
    weights = checkpoint(tiny_mtp(target), fused=False)
    target.set_dtype(mx.bfloat16)
    loaded = load_mtp(weights, target)
    assert {a.dtype for _, a in tree_flatten(loaded.head.parameters())} == {mx.bfloat16}
    _, stats = speculative(target, loaded, PROMPT, 12, num_draft_tokens=2)
    assert stats.num_emitted == 11


def test_bad_mtp_layers_are_refused():
    weights = checkpoint(tiny_mtp(QWEN3_NEXT), fused=False)
    with pytest.raises(ValueError, match="a llama model: MTP layers are known for Qwen3-Next"):
        load_mtp(weights, LLAMA)
    with pytest.raises(ValueError, match="lacks mtp.fc.weight"):
        load_mtp({}, QWEN3_NEXT)
    with pytest.raises(ValueError, match="has an unknown mtp.layers.1.mlp.gate_proj.weight"):
        load_mtp({**weights, "mtp.layers.1.mlp.gate_proj.weight": mx.zeros(3)}, QWEN3_NEXT)
    wide = tiny_qwen3_next(hidden_size=96)
    with pytest.raises(ValueError, match=r"mtp\..* is \(.*64.*\), but this target's"):
        load_mtp(weights, wide)
    with pytest.raises(ValueError, match="hidden size 64, but this target's is 96"):
        MTPDrafter(tiny_mtp(QWEN3_NEXT).head, wide)
