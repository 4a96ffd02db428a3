"""What several test files share: tiny models, scripted drafters, plain decoding."""

import io
import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import llama, qwen3
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tolerances import tolerance
from transformers import PreTrainedTokenizerFast

import mlx_eagle
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.base import Draft, Drafter
from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.eagle3 import Eagle3Drafter, EagleDrafter, ParallelDrafter
from mlx_eagle.drafters.head import Eagle3Head
from mlx_eagle.drafters.target_parts import find_embedding

VOCAB = 96
PROMPT = [5, 17, 3, 88, 41, 2, 60]

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}

FUSED = {"head_dim": 64}
"""Sizes with which MLX's attention is one kernel on a GPU, with two query heads per key head."""
CROWDED = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 1}
"""Eight query heads per key head: one kernel up to 4 rows, and plain operations from 5 to 8."""

TEMPLATE = (
    "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<reply>{% endif %}"
)


def randomize(model: nn.Module, seed: int, scale: float = 0.25) -> nn.Module:
    """Give a model lively random weights in float32: varied text, no repetition loops."""
    mx.random.seed(seed)
    weights = tree_map(
        lambda w: (1.0 if w.ndim == 1 else 0.0) + scale * mx.random.normal(w.shape),
        model.parameters(),
    )
    model.update(weights)
    mx.eval(model.parameters())
    return model


def tiny_llama(seed: int = 0, **changes) -> nn.Module:
    args = llama.ModelArgs(model_type="llama", **{**SIZES, **changes})
    return randomize(llama.Model(args), seed)


def tiny_qwen3(seed: int = 0, **changes) -> nn.Module:
    sizes = {
        **SIZES,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    args = qwen3.ModelArgs(model_type="qwen3", **{**sizes, **changes})
    return randomize(qwen3.Model(args), seed)


class Recital(nn.Module):
    """A target that recites a text: what it chooses depends on the position alone."""

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


def byte_tokenizer() -> TokenizerWrapper:
    """A token a byte and an end token, 258 with the padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate([*alphabet, "<end>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE
    return TokenizerWrapper(fast)


def tiny_head(model: nn.Module, seed: int = 1, **changes) -> EagleDrafter:
    """A random EAGLE-3 drafter that fits a tiny model; half the vocabulary can be drafted.

    With a ``mask_token_id`` it is a P-EAGLE one.
    """
    size, vocab, depth = model.args.hidden_size, model.args.vocab_size, len(model.layers)
    values = {
        "hidden_size": size,
        "target_hidden_size": size,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": vocab,
        "draft_vocab_size": vocab // 2,
        "aux_boundary_ids": (0, depth // 2, depth),
    }
    config = Eagle3Config(**{**values, **changes})
    head = randomize(Eagle3Head(config), seed)
    to_target = mx.arange(0, vocab, 2, dtype=mx.int32)
    kind = Eagle3Drafter if config.mask_token_id is None else ParallelDrafter
    return kind(head, find_embedding(model)[0], config.taps(depth), to_target)


@lru_cache
def demo_pair() -> tuple:
    """The demo pair in float32, loaded once in a process: half a gigabyte, and only read."""
    return mlx_eagle.load_demo(None if mx.default_device() == mx.cpu else mx.float32)


def plain(model: nn.Module, prompt: list[int], max_tokens: int, **kwargs) -> list[int]:
    """mlx-lm's own decoding; of a text that it has written with these weights, as much of that.

    And with caches of these kinds, for tests give a model others.
    """

    def written(**options) -> list[int]:
        steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens, **options)
        return [token for token, _ in steps]

    weights = [array for _, array in tree_flatten(model.parameters())]
    if kwargs or not weights or max_tokens < 0:
        return written(**kwargs)
    known = vars(model).get("_known_texts")
    if known is None or not known.are_of(weights):
        known = model._known_texts = KnownTexts(weights)
    kinds = [(type(layer).__name__, *numbers_of(layer)) for layer in make_prompt_cache(model)]
    key = tuple(prompt), tuple(kinds)
    if len(known.texts.get(key, [])) < max_tokens:
        known.texts[key] = written()
    return known.texts[key][:max_tokens]


def numbers_of(layer: object) -> list[tuple[str, int]]:
    """What a cache that nothing was written to is made with."""
    return sorted((name, value) for name, value in vars(layer).items() if type(value) is int)


class KnownTexts:
    """What mlx-lm wrote with a model's weights, by prompt and caches; gone with the model."""

    def __init__(self, weights: list[mx.array]):
        self.weights = weights
        self.texts: dict[tuple, list[int]] = {}

    def are_of(self, weights: list[mx.array]) -> bool:
        same = len(weights) == len(self.weights)
        return same and all(a is b for a, b in zip(weights, self.weights, strict=True))


def speculative(
    model: nn.Module, drafter, prompt: list[int], max_tokens: int, **kwargs
) -> tuple[list[int], Stats]:
    """Ours: the tokens and the counts."""
    stats = Stats()
    steps = speculative_generate_step(
        mx.array(prompt), model, drafter, max_tokens=max_tokens, stats=stats, **kwargs
    )
    return [token for token, _, _ in steps], stats


def caches_equal(ours: list, theirs: list) -> bool:
    """Whether two lists of KV caches hold the same positions with the same contents."""
    most = 10 * tolerance()
    for a, b in zip(ours, theirs, strict=True):
        if a.offset != b.offset:
            return False
        for x, y in zip(a.keys_and_values(), b.keys_and_values(), strict=True):
            if not mx.allclose(x, y, rtol=most, atol=most).item():
                return False
    return True


def plain_with_cache(model: nn.Module, prompt: list[int], max_tokens: int) -> tuple[list, list]:
    """mlx-lm's tokens and the cache it leaves behind."""
    cache = make_prompt_cache(model)
    return plain(model, prompt, max_tokens, prompt_cache=cache), cache


def left_in(model: nn.Module, cache: list) -> tuple[list[type], list[int], list[int]]:
    """What tells caches apart: types, offsets, and what plain decoding says next. Uses them up."""
    types, offsets = [type(c) for c in cache], [getattr(c, "offset", 0) for c in cache]
    return types, offsets, plain(model, [7, 9, 11], 20, prompt_cache=cache)


def primitives(*arrays: mx.array) -> list[str]:
    """The operations in the graph that computes ``arrays``; in dot they are the rectangles."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return re.findall(r'label ?="(\w+)", shape=rectangle', graph.getvalue())


def num_primitives(*arrays: mx.array) -> int:
    """How many operations compute ``arrays``."""
    return len(primitives(*arrays))


@dataclass(frozen=True)
class Truth:
    """Plain decoding on one kind of cache."""

    text: list[int]  # the prompt, and more tokens than are made: no draft lacks its continuation
    made: list[int]
    left: tuple  # in the cache when these are made


def truth_of(model: nn.Module, make_cache: Callable, num_tokens: int, **options) -> Truth:
    cache = make_cache()
    made = plain(model, PROMPT, num_tokens, prompt_cache=cache, **options)
    text = plain(model, PROMPT, num_tokens + 20, prompt_cache=make_cache(), **options)
    return Truth(PROMPT + text, made, left_in(model, cache))


class ScriptedDrafter(Drafter):
    """Proposes the true continuation, broken where the script says.

    ``script(round, size)`` is the number of right tokens at the front of that round's draft.
    Every ``propose`` also asserts that exactly the committed tokens were absorbed; not so where
    ``may_part``, for a text in half precision may go another way at a tie.
    """

    taps = ()
    may_part = False

    def __init__(self, text: list[int], script: Callable[[int, int], int], vocab: int = VOCAB):
        self.text = text
        self.script = script
        self.vocab = vocab
        self.begin_state()

    def begin_state(self) -> None:
        self.cache: list = []
        self.num_forwards = 0
        self.num_rounds = 0
        self.num_prefill = 0
        self.absorbed: list[tuple[mx.array, mx.array | None]] = []

    def begin(self, cache: list | None = None) -> "ScriptedDrafter":
        drafter = copy(self)
        drafter.begin_state()
        return drafter

    def make_cache(self) -> list:
        return []

    def extend(self, tokens, features, last=None) -> None:
        self.absorbed.append((tokens, last))

    def propose(self, size: int, pick=None) -> Draft:
        committed = []
        for tokens, last in self.absorbed:
            committed += tokens.tolist()[: None if last is None else last.item() + 1]
        absorbed_text = self.may_part or committed == self.text[: len(committed)]
        assert absorbed_text, "absorbed something else than the text"
        position = len(committed)
        right = self.script(self.num_rounds, size)
        self.num_rounds += 1
        tokens = list(self.text[position : position + size])
        assert len(tokens) == size, "the script needs a longer text"
        if right < size:
            tokens[right] = (tokens[right] + 1) % self.vocab
        return Draft(mx.array(tokens, dtype=mx.int32))


SCRIPTS: dict[str, Callable[[int, int], int]] = {
    "all": lambda r, size: size,
    "none": lambda r, size: 0,
    "alternating": lambda r, size: size if r % 2 else 0,
    "every length": lambda r, size: r % (size + 1),
}
