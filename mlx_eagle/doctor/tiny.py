"""Parts of the self-test on tiny random models: attention by head dimension, and every cache.

Their head dimensions and states are those of real models, so that the real kernels run.
"""

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import partial
from math import inf, isnan
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    CacheList,
    ConcatenateKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ..bench.parity import compare, parity_words
from ..decoding.loop import speculative_generate_step
from ..drafters.base import Draft, DrafterBase, Pick
from .expect import build
from .parts import Line, Part, Section

HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (4, 8)  # query heads per key head
PREFIXES = (100, 1100)  # keys before the pass: from 1024 on, Metal's kernel works in two steps
ROWS = (2, 3, 4, 5, 8, 9, 16)
NUM_HEADS = 8
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
ATTENTION_LIMITS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}
"""Of the largest logit; the rows of a pass are rounded in another order than single ones."""
VOCAB, PROMPT, NUM_TOKENS, DRAFT = 64, (5, 17, 3, 41, 2, 60), 40, 5
NEAR_TIE = 1e-3  # between the two best logits, in float32

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
GEMMA3 = LLAMA | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 64,
}
LLAMA4 = {
    "model_type": "llama4",
    "text_config": LLAMA
    | {
        "model_type": "llama4_text",
        "intermediate_size_mlp": 128,
        "num_hidden_layers": 4,
        "use_qk_norm": True,
        "attention_chunk_size": 16,
        "attention_bias": False,
        "rope_scaling": None,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
    },
}
QWEN3_NEXT = LLAMA | {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "partial_rotary_factor": 0.25,
    "norm_topk_prob": True,
}
FALCON_H1 = LLAMA | {
    "model_type": "falcon_h1",
    "mamba_d_state": 64,
    "mamba_d_ssm": 256,
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "projectors_bias": False,
}


def tiny(config: dict[str, Any], dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A model of that configuration with lively random weights."""
    model = build(config)
    mx.random.seed(0)
    model.update(tree_map(_random, model.parameters()))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def _random(weight: mx.array) -> mx.array:
    noise = 0.1 * mx.random.normal(weight.shape)
    return 1.0 + noise if weight.ndim == 1 else noise


def attention_section(head_dims: Sequence[int] = HEAD_DIMS) -> Section:
    """Passes of several rows against the same rows one by one."""
    return Section(
        "Attention: several rows against one by one",
        ("head dimension", "type", "largest difference", "allowed", "at", "verdict"),
        [
            Part(f"attention, head dimension {size}, {name}", partial(try_attention, size, name))
            for size in head_dims
            for name in DTYPES
        ],
        "A tiny random model; differences are shares of its largest logit.",
    )


def try_attention(head_dim: int, dtype_name: str) -> list[Line]:
    """The largest difference in logits of passes of ``ROWS`` rows, of all groups and prefixes."""
    worst, where = -1.0, ""
    for group in GROUPS:
        changes = {"head_dim": head_dim, "num_key_value_heads": NUM_HEADS // group}
        model = tiny(LLAMA | changes, DTYPES[dtype_name])
        for prefix in PREFIXES:
            for rows, found in differences(model, prefix):
                if found > worst:
                    worst, where = found, f"{rows} rows, {group} heads per key, {prefix} keys"
    limit = ATTENTION_LIMITS[dtype_name]
    ok = worst <= limit
    cells = (str(head_dim), dtype_name, f"{worst:.1e}", f"{limit:.0e}", where)
    return [Line((*cells, "ok" if ok else "FAILED"), ok)]


def differences(model: nn.Module, prefix: int) -> list[tuple[int, float]]:
    """Number of rows and difference, by the largest logit, for passes after random keys."""
    filled = make_prompt_cache(model)
    args = model.args
    shape = (1, args.num_key_value_heads, prefix, args.head_dim)
    for cache in filled:
        keys, values = (mx.random.normal(shape).astype(_dtype(model)) for _ in range(2))
        cache.update_and_fetch(keys, values)
    mx.eval([cache.state for cache in filled])
    tokens = mx.random.randint(0, VOCAB, (1, max(ROWS)))
    alone = deepcopy(filled)
    single = mx.concatenate(
        [model(tokens[:, i : i + 1], cache=alone)[0] for i in range(max(ROWS))]
    ).astype(mx.float32)
    found = []
    for rows in ROWS:
        together = model(tokens[:, :rows], cache=deepcopy(filled))[0].astype(mx.float32)
        difference = mx.abs(together - single[:rows]).max() / mx.abs(single[:rows]).max()
        number: Any = difference.item()
        found.append((rows, inf if isnan(number) else number))
    return found


def _dtype(model: nn.Module) -> mx.Dtype:
    dtype: mx.Dtype = model.layers[0].self_attn.q_proj.weight.dtype
    return dtype


MakeCache = Callable[[nn.Module], list[Any]]


def one_each(cache_type: type, **options: Any) -> MakeCache:
    """Caches of one type, whatever the model would take."""
    return lambda model: [cache_type(**options) for _ in model.layers]


@dataclass(frozen=True)
class CacheCase:
    """Caches that a tiny model runs on; ``options`` are the loop's, mlx-lm's and ours."""

    name: str
    config: dict[str, Any]
    make_cache: MakeCache = make_prompt_cache
    options: dict[str, Any] = field(default_factory=dict)


CACHE_CASES = (
    CacheCase("plain", LLAMA),
    CacheCase("rotating", LLAMA, one_each(RotatingKVCache, max_size=16, keep=4)),
    CacheCase("quantized", LLAMA, options={"kv_bits": 8, "quantized_kv_start": 0}),
    CacheCase("concatenated", LLAMA, one_each(ConcatenateKVCache)),
    CacheCase("sliding windows", GEMMA3),
    CacheCase("chunked", LLAMA4),
    CacheCase("gated delta", QWEN3_NEXT),
    CacheCase("Mamba-2", FALCON_H1),
)


def cache_section(cases: Sequence[CacheCase] = CACHE_CASES) -> Section:
    """Drafted against plain text on every kind of cache."""
    return Section(
        "Caches: drafted against plain text, float32",
        ("caches", "model", "tokens", "result", "verdict"),
        [Part(f"caches, {case.name}", partial(try_cache, case)) for case in cases],
        "Tiny random models; every other draft is wrong somewhere.",
    )


def try_cache(case: CacheCase) -> list[Line]:
    """Plain text, then the same with drafts of which every other one is wrong somewhere."""
    model = tiny(case.config)
    prompt, cache = mx.array(PROMPT), case.make_cache(model)
    options = {"prompt_cache": cache, "max_tokens": NUM_TOKENS + DRAFT, **case.options}
    text: list[Any] = [token for token, _ in generate_step(prompt, model, **options)]
    kinds = " and ".join(sorted({kind(each) for each in cache}))
    drafter = Prompter([*PROMPT, *text])
    options |= {"prompt_cache": case.make_cache(model), "max_tokens": NUM_TOKENS}
    steps = speculative_generate_step(prompt, model, drafter, num_draft_tokens=DRAFT, **options)
    result = compare(model, list(PROMPT), text[:NUM_TOKENS], [token for token, _, _ in steps])
    ok = result["identical"] or result["margin"] < NEAR_TIE
    cells = (kinds, case.config["model_type"], str(NUM_TOKENS), parity_words(result))
    return [Line((*cells, "ok" if ok else "FAILED"), ok)]


def kind(cache: Any) -> str:
    """What a cache is called: "KVCache", "CacheList of ArraysCache and KVCache"."""
    name = type(cache).__name__
    if isinstance(cache, CacheList):
        return f"{name} of {' and '.join(kind(each) for each in cache.caches)}"
    return name


class Prompter(DrafterBase):
    """A ``Drafter`` that knows the text and gets every other draft wrong, at changing places."""

    taps: tuple[int, ...] = ()

    def __init__(self, text: Sequence[int]):
        self._text = list(text)
        self._start()

    def _start(self) -> None:
        self.cache: list[Any] = []
        self.num_forwards = 0
        self._absorbed: list[tuple[int, mx.array | None]] = []
        self._num_drafts = 0

    def begin(self, cache: list[Any] | None = None) -> "Prompter":
        """See ``Drafter.begin``."""
        drafter = copy(self)
        drafter._start()
        return drafter

    def make_cache(self) -> list[Any]:
        return []

    def extend(
        self, tokens: mx.array, features: mx.array | None, last: mx.array | None = None
    ) -> None:
        """See ``Drafter.extend``: only how many were absorbed counts."""
        self._absorbed.append((tokens.shape[0], last))

    def propose(self, size: int, pick: Pick) -> Draft:
        """The next tokens of the text; of every other draft, one is another."""
        counts: list[Any] = [
            rows if last is None else last.item() + 1 for rows, last in self._absorbed
        ]
        at = sum(counts)
        tokens = self._text[at : at + size]
        if self._num_drafts % 2 and tokens:
            wrong = self._num_drafts // 2 % len(tokens)
            tokens[wrong] = (tokens[wrong] + 1) % VOCAB
        self._num_drafts += 1
        return Draft(mx.array(tokens, mx.int32))
