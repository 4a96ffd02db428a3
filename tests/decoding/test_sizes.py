"""Half precision, and the sizes of real models: every token is the target's own choice.

A pass of one row and one of several round differently in half precision, so two texts may part
where two tokens are nearly tied. What holds nevertheless is tested: each token of a drafted text
is the best after what stands before it, but for rounding; and so is the answer to the next
request, on the cache that was left. In float32 the texts are mlx-lm's.
"""

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import build, may_part
from grids import thorough
from helpers import (
    PROMPT,
    SCRIPTS,
    VOCAB,
    ScriptedDrafter,
    byte_tokenizer,
    plain,
    speculative,
    tiny_head,
    tiny_llama,
)
from mlx_lm.models.cache import make_prompt_cache
from near_ties import gaps, logits_of, near_tie
from tree_drafters import TREE_SCRIPTS, ScriptedTreeDrafter

import mlx_eagle
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.tree import parse_tree
from mlx_eagle.target_model import rollback

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
NUM_TOKENS, NEXT = 24, [7, 9, 11]


def attention(head_dim: int, heads: int = 4, key_heads: int = 2) -> Callable[[], nn.Module]:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    return lambda: tiny_llama(head_dim=head_dim, num_hidden_layers=4, **sizes)


TARGETS: dict[str, Callable[[], nn.Module]] = {
    f"head dimension {size}": attention(size) for size in (64, 80, 96, 128, 256)
}
TARGETS |= {
    "8 heads per key": attention(64, 8, 1),
    "16 heads per key": attention(128, 16, 1),
    "windows": lambda: build("gemma3_text", head_dim=256),
    "sinks": lambda: build("gpt_oss (20b)", head_dim=64),
}
RECURRENT = {
    "mamba2": ("state_size", (32, 64, 128)),
    "falcon_h1": ("mamba_d_state", (32, 64, 128)),
    "qwen3_next": ("linear_key_head_dim", (32, 64, 128)),
    "rwkv7": ("head_dim", (32, 64)),  # of the tiny width there is no more
}
DENSE = {"qwen3_next": {"num_experts": 0}}  # on a CPU MLX has experts in float32 only
TARGETS |= {
    f"{name}, state {size}": lambda name=name, key=key, size=size: build(
        name, **{key: size}, **DENSE.get(name, {})
    )
    for name, (key, sizes) in RECURRENT.items()
    for size in sizes
}


class Scripted(ScriptedDrafter):
    may_part = True


class ScriptedTree(ScriptedTreeDrafter):
    may_part = True


WAYS = {
    "chain": (Scripted, {"num_draft_tokens": 5}),
    "tree": (ScriptedTree, {"tree": parse_tree("3x3:9")}),
    "sampled chain": (Scripted, {"num_draft_tokens": 3}),
    "sampled tree": (ScriptedTree, {"tree": parse_tree("3x3:9")}),
    "chain of a head": (None, {"num_draft_tokens": 3}),
    "tree of a head": (None, {"tree": parse_tree("3x3:7")}),
}
QUICK = {
    "head dimension 128, sampled tree",
    "qwen3_next, state 64, chain",
}


def works(target: str, way: str) -> bool:
    """Recurrent layers take no trees; the tiny head takes its sizes from a llama."""
    is_llama, is_recurrent = "head" in target, target.partition(",")[0] in RECURRENT
    return is_llama or ("of a head" not in way and not (is_recurrent and "tree" in way))


CASES = {
    f"{target}, {way}": (target, way) for target in TARGETS for way in WAYS if works(target, way)
}


@cache
def made(target: str, dtype: str) -> nn.Module:
    model = TARGETS[target]()
    model.set_dtype(DTYPES[dtype])
    return model


def sampling(way: str) -> Sampling | None:
    """A new one for each text: it counts what it has drawn."""
    return Sampling(temp=0.9, seed=5) if way.startswith("sampled") else None


@cache
def truth(target: str, dtype: str, kind: str) -> tuple[list[int], float]:
    """mlx-lm's text, longer than what is drafted, and how near a near-tie is in it."""
    model = made(target, dtype)
    text = plain(model, PROMPT, NUM_TOKENS + 12, sampler=sampling(kind))
    return text, near_tie(model, PROMPT + text, DTYPES[dtype])


def make_drafter(model: nn.Module, kind: type[ScriptedDrafter] | None, text: list[int]):
    """Scripted by ``text``; without a kind a random head in the model's type."""
    if kind is None:
        drafter = tiny_head(model)
        drafter.head.set_dtype(model.model.norm.weight.dtype)
        return drafter
    scripts = TREE_SCRIPTS if kind is ScriptedTree else SCRIPTS
    return kind([*PROMPT, *text], scripts["every length"])


def worst_gap(case: str, dtype: str) -> tuple[float, float]:
    """Of a drafted text and of the answer to the next request, and what rounding explains.

    In float32 the text is mlx-lm's.
    """
    target, way = CASES[case]
    model, (kind, options) = made(target, dtype), WAYS[way]
    text, explained = truth(target, dtype, way.split()[0] if "sampled" in way else "greedy")
    drafter, left = make_drafter(model, kind, text), make_prompt_cache(model)
    options = {**options, "prompt_cache": left, "sampler": sampling(way)}
    tokens, stats = speculative(model, drafter, PROMPT, NUM_TOKENS, **options)
    assert stats.num_drafted > 0 and (kind is None or stats.num_accepted > 0)
    if dtype == "float32":
        assert tokens == text[:NUM_TOKENS]
    after = plain(model, NEXT, 8, prompt_cache=left)
    found = gaps(model, PROMPT, tokens, sampling(way)), gaps(model, PROMPT + tokens + NEXT, after)
    return max(gap.max().item() for gap in found), explained


@pytest.mark.parametrize("dtype", thorough(DTYPES, "bfloat16"))
@pytest.mark.parametrize("case", thorough(CASES, *QUICK))
def test_every_token_is_the_target_s_choice(case, dtype):
    if may_part(case.partition(",")[0]):
        pytest.xfail("on Metal mlx-lm computes one row of it in another way than several")
    if "sinks" in case and dtype != "float32" and mx.default_device() == mx.cpu:
        pytest.xfail("on a CPU MLX multiplies experts, which gpt-oss has, in float32 only")
    gap, explained = worst_gap(case, dtype)
    assert gap <= explained


@pytest.mark.parametrize("dtype", thorough(DTYPES, "bfloat16"))
def test_batches(dtype):
    model = tiny_llama(vocab_size=258, head_dim=64, num_hidden_layers=4)
    model.set_dtype(DTYPES[dtype])
    drafter, prompts = tiny_head(model), [PROMPT, PROMPT[:3]]
    drafter.head.set_dtype(DTYPES[dtype])
    options = {"max_tokens": 16, "num_draft_tokens": 3, "return_token_ids": True}
    found = mlx_eagle.batch_generate(
        model, byte_tokenizer(), prompts, draft_model=drafter, **options
    )
    for prompt, text in zip(prompts, found.token_ids, strict=True):
        explained = near_tie(model, prompt + text, DTYPES[dtype])
        assert gaps(model, prompt, text).max().item() <= explained


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_choices_are_found(dtype):
    """Rounding explains no other token, and not many of the second best."""
    target = "head dimension 64"
    model, (text, explained) = made(target, dtype), truth(target, dtype, "greedy")
    logits = logits_of(model, PROMPT + text, 1)[len(PROMPT) - 1 : -1]
    second = mx.argsort(logits, axis=-1)[:, -2]
    others = [(token + 1) % VOCAB for token in text]

    def share(tokens: list[int]) -> float:
        found = [
            gaps(model, PROMPT + text[:i], [token]).item() > explained
            for i, token in enumerate(tokens)
        ]
        return sum(found) / len(found)

    assert share(others) > 0.9 and share(second.tolist()) > 1 / 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cache_that_is_not_cut_back_is_found(monkeypatch, dtype):
    monkeypatch.setattr(rollback.TrimRollback, "rollback", lambda self, *args: None)
    gap, explained = worst_gap("head dimension 64, chain", dtype)
    assert gap > explained
