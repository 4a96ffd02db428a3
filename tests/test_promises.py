"""The promise: whatever is combined, the text is mlx-lm's, and so is what its caches go on with.

One table: targets, drafters, rules, shapes of drafts, sizes of batches, caches. ``make test``
tries each pair of values once, but those of ``SLOW``, ``make test-all`` each three of all. What
cannot be combined is a row of ``REFUSED``, with the sentence that it must give, or of
``PAST_MLX_LM``. Sliding windows, rotating caches and quantizing begin within the texts.
"""

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from itertools import combinations, product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from architecture_configs import FULL, SLIDING
from architectures import build
from assistants import tiny_assistant, tiny_gemma4
from block_twin import tiny_dflash, tiny_dflash2, tiny_dspark
from covering import Row, covering
from drafter_pairs import nudged, tiny_lfm2, tiny_mtp
from helpers import (
    PROMPT,
    VOCAB,
    byte_tokenizer,
    plain,
    speculative,
    tiny_head,
    tiny_llama,
)
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from tree_drafters import ScriptedStaticDrafter, ScriptedTreeDrafter

import mlx_eagle
from mlx_eagle.decoding.sampling import Sampler, Sampling
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.assistant import AssistantDrafter
from mlx_eagle.drafters.base import Draft, Drafter, NullDrafter
from mlx_eagle.drafters.copies import Copies, CopySource
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.drafters.model_drafter import ModelDrafter
from mlx_eagle.drafters.seen_text import SeenText, TextMatch
from mlx_eagle.drafters.tree import StaticTree, TreeShape

PROMPTS = [PROMPT, [9], [70, 71, 72] * 4, [33, 4, 25, 8]]
LENGTHS = [16, 6, 11, 1]
BEFORE, AFTER = [61, 12, 44, 90, 7], [3, 4]  # a conversation until then, and a question after
LONGEST = 8  # draft tokens


FEW = {"num_hidden_layers": 2, "head_dim": 32}  # one layer of each type that a target has


def llama() -> nn.Module:
    return tiny_llama(**FEW)


def packed() -> nn.Module:
    model = llama()
    nn.quantize(model, group_size=32, bits=4)
    return model


TARGETS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama, quantized": packed,
    "qwen3_moe": lambda: build("qwen3_moe", **FEW),
    "glm4_moe": lambda: build("glm4_moe", **FEW),
    "gemma2": lambda: build("gemma2", **FEW),
    "gemma3_text": lambda: build("gemma3_text", **FEW),
    "gpt_oss": lambda: build("gpt_oss (20b)", **FEW, layer_types=[SLIDING, FULL]),
    "qwen3_next": lambda: build("qwen3_next", **FEW),
    "mamba2": lambda: build("mamba2", num_hidden_layers=2),
    "falcon_h1": lambda: build("falcon_h1", **FEW),
    "gemma4_text": lambda: tiny_gemma4(head_dim=32),
    "lfm2": lambda: tiny_lfm2(num_attention_heads=2, num_key_value_heads=1),
}
WITH_MTP, WITH_ASSISTANT = ("qwen3_next", "glm4_moe"), ("gemma4_text",)
MTP, ASSISTANTS = ("mtp", "mtp, few tokens", "mtp+lookup"), ("assistant", "assistant+lookup")
WITHOUT_TREES = ("p-eagle", "lookup", "draft model")
STATES = ("qwen3_next", "mamba2", "falcon_h1", "lfm2")  # recurrent, with or without attention


@lru_cache
def target(name: str) -> nn.Module:
    return TARGETS[name]()


SCRIPTS = {"right": lambda r, size: size, "wrong": lambda r, size: 0} | {
    "right to a length": lambda r, size: r % (size + 1)
}


class ScriptedCopies(Copies):
    """Copies the true text as far as a script says, whatever stands in the text."""

    def __init__(self, text: SeenText, truth: list[int], script: Callable[[int, int], int]):
        super().__init__(text)
        self.truth, self.script, self.num_copied = truth, script, 0
        self.start = len(text)

    @property
    def match(self) -> TextMatch:
        return TextMatch(LONGEST, (0,) * LONGEST)

    def tokens(self, size: int) -> list[int]:
        at = len(self.text) - self.start + self.num_unread
        right = self.script(self.num_copied, size)
        self.num_copied += 1
        tokens = (self.truth[at:] + [0] * size)[:size]
        if right < size:
            tokens[right] = (tokens[right] + 1) % VOCAB
        return tokens


class ScriptedSource(CopySource):
    def __init__(self, texts: list[list[int]], script: str):
        super().__init__()
        self.texts = {text[0]: text for text in texts}
        self.script = SCRIPTS[script]

    def begin(self, known, prompt, scope=()) -> Copies:
        text = SeenText(prompt)
        truth = self.texts.get(int(text.tokens[0]), [])
        return ScriptedCopies(text, truth[len(text) :], self.script)


def copying(texts: list[list[int]], script: str, inner: Drafter) -> Drafter:
    drafter = inner.with_copies()
    drafter.copies = ScriptedSource(texts, script)
    return drafter


COPIED = {f"copies {name}": name for name in SCRIPTS}


class Scripted(ScriptedTreeDrafter, ScriptedStaticDrafter):
    """Drafts the true text of whichever prompt it absorbed, as far as the script says."""

    def __init__(self, texts: list[list[int]], script: str):
        self.texts = {text[0]: text for text in texts}
        super().__init__([], SCRIPTS[script], VOCAB)

    def propose(self, size: int, pick=None) -> Draft:
        first = self.absorbed[0][0][0].item()
        if first not in self.texts:  # rounds that are only timed
            return Draft(mx.zeros((size,), mx.int32))
        self.text = self.texts[first]
        return super().propose(size, pick)

    def propose_tree(self, shape: TreeShape | StaticTree, pick) -> Draft:
        kind = ScriptedTreeDrafter if isinstance(shape, TreeShape) else ScriptedStaticDrafter
        return kind.propose_tree(self, shape, pick)


def assistant_for(model: nn.Module) -> Drafter:
    return AssistantDrafter(tiny_assistant(target("gemma4_text")).head, model)


THIRD = np.arange(0, VOCAB, 3)  # of the tokens: a draft vocabulary
DRAFTERS: dict[str, Callable[[nn.Module], Drafter]] = {
    "head": tiny_head,
    "lagging head": lambda model: tiny_head(model).with_draft_cache("lagging"),
    "head, window": lambda model: tiny_head(model).with_draft_window(12),
    "head+lookup": lambda model: tiny_head(model).with_copies(),
    "p-eagle": lambda model: tiny_head(model, seed=4, num_layers=2, mask_token_id=9),
    "lookup": lambda model: LookupDrafter(),
    "draft model": lambda model: ModelDrafter(nudged(llama())),
    "mtp": tiny_mtp,
    "dflash": tiny_dflash,
    "dspark": tiny_dspark,
    "dflash2": tiny_dflash2,
    "assistant": assistant_for,
    "dspark+lookup": lambda model: tiny_dspark(model).with_copies(),
    "mtp, few tokens": lambda model: tiny_mtp(model).with_draft_vocab(THIRD),
    "dflash, few tokens": lambda model: tiny_dflash(model).with_draft_vocab(THIRD),
    "mtp+lookup": lambda model: tiny_mtp(model).with_copies(),
    "assistant+lookup": lambda model: assistant_for(model).with_copies(),
}


@lru_cache
def drafter(name: str, of: str) -> Drafter:
    return DRAFTERS[name](target(of))


def second_best(logprobs: mx.array) -> mx.array:
    return mx.argsort(logprobs, axis=-1)[..., -2]


def penalties() -> list[Callable]:
    return make_logits_processors({3: 4.0}, repetition_penalty=1.8, repetition_context_size=6)


def sampling(row: int, **options) -> Sampling:
    return Sampling(0.9, seed=5, row=row, **options)


# How a run chooses tokens, and a sampler with which mlx-lm chooses the same in that row.
RULES: dict[str, tuple[dict, Callable[[int], Sampler | None]]] = {
    "greedy": ({}, lambda row: None),
    "coupled": ({"sampler": sampling(0)}, sampling),
    "match": ({"sampler": sampling(0), "acceptance": "match"}, sampling),
    "reject": ({"sampler": sampling(0, top_k=1), "acceptance": "reject"}, lambda row: None),
    "any sampler": ({"sampler": second_best}, lambda row: second_best),
    "processors": ({}, lambda row: None),
}
SHAPES: dict[str, dict] = {
    "1": {"num_draft_tokens": 1},
    "3": {"num_draft_tokens": 3},
    "7": {"num_draft_tokens": 7},
    "auto": {"num_draft_tokens": "auto"},
    "3, exact": {"num_draft_tokens": 3, "exact": True},
    "tree": {"tree": "2x3:6"},
    "tree, exact": {"tree": "2x3:6", "exact": True},
    "static tree": {"tree": "3/2+0+1"},
    "tree auto": {"tree": "auto"},
}
TREES = ("tree", "tree, exact", "static tree", "tree auto")


KINDS: dict[str, Callable[[KVCache], Any]] = {
    "rotating": lambda cache: RotatingKVCache(12, keep=4),  # as a max_kv_size gives some models
    "quantized": lambda cache: cache.to_quantized(32, 8),
}


def kept_in(cache: list, kind: str) -> list:
    """The same with caches of that kind for those that can be."""
    make = KINDS.get(kind, lambda cache: cache)
    return [make(c) if type(c) is KVCache else c for c in cache]


@lru_cache
def begun(of: str, kind: str) -> list:
    """Caches of the target before the prompt; for copies."""
    model = target(of)
    cache = kept_in(make_prompt_cache(model), kind)
    if kind == "continued":
        plain(model, BEFORE, 3, prompt_cache=cache)
    return cache


CACHES = ("fresh", "continued", "rotating", "quantized", "quantized on the way")
ON_THE_WAY = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": len(PROMPT) + 5}


def text(of: str, rule: str, kind: str, row: int, num_tokens: int, cache: list) -> list[int]:
    """mlx-lm's, after a prompt and what the cache has."""
    return plain(
        target(of),
        PROMPTS[row],
        num_tokens,
        sampler=RULES[rule][1](row),
        logits_processors=penalties() if rule == "processors" else None,
        prompt_cache=cache,
        **options_of(kind),
    )


def options_of(kind: str) -> dict:
    return ON_THE_WAY if kind == "quantized on the way" else {}


@lru_cache
def truth(of: str, rule: str, kind: str, row: int) -> tuple[list[int], list[int]]:
    """mlx-lm's text, and its answer to the question after."""
    cache = deepcopy(begun(of, kind))
    found = text(of, rule, kind, row, LENGTHS[row], cache)
    return found, answer(target(of), cache, options_of(kind))


@lru_cache
def longer(of: str, rule: str, kind: str, row: int) -> list[int]:
    """The prompt, mlx-lm's text, and what would follow: scripts draft beyond the end."""
    found = text(of, rule, kind, row, LENGTHS[row] + LONGEST, deepcopy(begun(of, kind)))
    assert found[: LENGTHS[row]] == truth(of, rule, kind, row)[0]
    return PROMPTS[row] + found


def answer(model: nn.Module, cache: list, options: dict) -> list[int]:
    return plain(model, AFTER, 4, prompt_cache=cache[: len(make_prompt_cache(model))], **options)


AXES = {
    "target": tuple(TARGETS),
    "drafter": (*SCRIPTS, *COPIED, *DRAFTERS),
    "rule": tuple(RULES),
    "shape": tuple(SHAPES),
    "batch": (1, 2, 3, 4),
    "cache": CACHES,
}
SHARED = (2, 3, 4)
REFUSED: list[tuple[dict[str, tuple], str]] = [
    (
        {"drafter": MTP, "target": tuple(name for name in TARGETS if name not in WITH_MTP)},
        "MTP layers are known for",
    ),
    (
        {
            "drafter": ASSISTANTS,
            "target": tuple(name for name in TARGETS if name not in WITH_ASSISTANT),
        },
        "the target is a [a-z0-9_]+ model",
    ),
    (
        {"drafter": WITHOUT_TREES, "shape": TREES},
        "this drafter proposes chains only",
    ),
    (
        {"drafter": ASSISTANTS, "target": WITH_ASSISTANT, "shape": TREES},
        "this drafter proposes chains only",
    ),
    ({"drafter": ("lagging head",), "shape": TREES}, "do not support a lagging draft cache"),
    ({"target": STATES, "shape": TREES}, "tree drafts need caches whose rows can be gathered"),
    ({"batch": SHARED, "shape": TREES}, "tree is for one prompt at a time: leave it out"),
    (
        {"batch": SHARED, "cache": ("quantized on the way",)},
        "kv_bits is for one prompt at a time: leave it out",
    ),
    (
        {
            "target": ("gemma3_text", "gpt_oss", "gemma4_text"),
            "cache": ("quantized on the way",),
        },
        "RotatingKVCache, which mlx-lm cannot quantize",
    ),
]
PAST_MLX_LM: list[dict[str, tuple]] = [  # which cannot decode them by itself
    {"target": ("gemma2",), "cache": ("quantized", "quantized on the way")},
    {"target": ("gpt_oss", "gemma4_text"), "cache": ("quantized",)},
]
BROKEN: list[tuple[dict[str, tuple], str]] = []  # known, and to be mended


def holds(row: Row, condition: dict[str, tuple]) -> bool:
    return all(row.get(axis) in values for axis, values in condition.items())


def possible(row: Row) -> bool:
    return not any(holds(row, when) for when in [*PAST_MLX_LM, *(when for when, _ in REFUSED)])


def decoded(row: Row) -> tuple[list[list[int]], list[list], list[Stats]]:
    """Texts, caches and counts of a row of the table."""
    model, num = target(row["target"]), row["batch"]
    options = RULES[row["rule"]][0] | SHAPES[row["shape"]]
    if row["rule"] == "processors":
        options = options | {"logits_processors": penalties()}
    if row["drafter"] in (*SCRIPTS, *COPIED):
        places = row["target"], row["rule"], row["cache"]
        texts = [longer(*places, b) for b in range(num)]
        if row["drafter"] in SCRIPTS:
            draft_model = Scripted(texts, row["drafter"])
        else:
            inner = tiny_head(model) if "tree" in row["shape"] else NullDrafter()
            draft_model = copying(texts, COPIED[row["drafter"]], inner)
    else:
        draft_model = drafter(row["drafter"], row["target"])
    caches = [deepcopy(begun(row["target"], row["cache"])) for _ in range(num)]
    options = options | options_of(row["cache"])
    if num == 1:
        options["prompt_cache"] = caches[0]
        tokens, stats = speculative(model, draft_model, PROMPTS[0], LENGTHS[0], **options)
        return [tokens], caches, [stats]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # who drafts for one after the other says so
        response = mlx_eagle.batch_generate(
            model,
            byte_tokenizer(),
            PROMPTS[:num],
            caches,
            LENGTHS[:num],
            draft_model=draft_model,
            return_token_ids=True,
            return_prompt_caches=True,
            **options,
        )
    return response.token_ids, response.caches, response.stats


SLOW = {
    "target": ("gemma4_text", "lfm2", "gemma2", "glm4_moe", "falcon_h1"),
    "drafter": (
        "head, window", "p-eagle", "dspark", "dflash2", *ASSISTANTS, "dspark+lookup", "mtp+lookup",
        "mtp, few tokens",
    ),
}  # fmt: skip
QUICK = covering(
    {axis: [v for v in values if v not in SLOW.get(axis, ())] for axis, values in AXES.items()},
    2,
    possible,
)
PAIRS = QUICK + covering(AXES, 2, possible, QUICK)
TRIPLES = covering(AXES, 3, possible, PAIRS)


def marked(row: Row, *marks: pytest.MarkDecorator) -> Any:
    broken = [pytest.mark.xfail(reason=why) for when, why in BROKEN if holds(row, when)]
    return pytest.param(row, marks=[*marks, *broken], id=", ".join(map(str, row.values())))


REST = [row for row in PAIRS + TRIPLES if row not in QUICK]
ROWS = [*map(marked, QUICK), *(marked(row, pytest.mark.exhaustive) for row in REST)]


@pytest.mark.parametrize("row", ROWS)
def test_the_text_is_mlx_lms(row):
    texts, caches, counts = decoded(row)
    for b in range(row["batch"]):
        found, after = truth(row["target"], row["rule"], row["cache"], b)
        assert texts[b] == found
        assert answer(target(row["target"]), caches[b], options_of(row["cache"])) == after
        assert counts[b].num_emitted == LENGTHS[b] - 1
        if row["drafter"].endswith("right") and row["shape"].isdigit():
            assert counts[b].num_rejected == 0
        if row["drafter"].endswith("wrong") and row["shape"].isdigit():
            assert counts[b].num_accepted == 0
        if row["drafter"] in COPIED and row["shape"].isdigit():
            assert counts[b].num_copied == counts[b].num_drafted
            assert counts[b].num_copied > 0 or LENGTHS[b] == 1


USUAL = dict(zip(AXES, ("llama", "head", "greedy", "3", 1, "fresh"), strict=True))


def each(condition: dict[str, tuple]) -> list[Row]:
    """Rows that meet a condition, each of its values in turn, and are usual for the rest."""
    values = product(*condition.values())
    return [USUAL | dict(zip(condition, chosen, strict=True)) for chosen in values]


@pytest.mark.parametrize(
    "row, sentence", [(row, says) for when, says in REFUSED for row in each(when)], ids=str
)
def test_what_cannot_be_is_said(row, sentence):
    with pytest.raises(ValueError, match=sentence):
        decoded(row)


@pytest.mark.parametrize("row", [row for when in PAST_MLX_LM for row in each(when)], ids=str)
def test_mlx_lm_cannot_either(row):
    with pytest.raises((ValueError, TypeError, NotImplementedError)):
        truth(row["target"], "greedy", row["cache"], 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size, rows", [(2, PAIRS), (3, PAIRS + TRIPLES)], ids=["pairs", "threes"])
def test_nothing_possible_is_left_out(size, rows):
    """Against all rows that there can be, one by one."""
    every = (dict(zip(AXES, values, strict=True)) for values in product(*AXES.values()))
    wanted = {part for row in every if possible(row) for part in combinations(row.items(), size)}
    assert {part for row in rows for part in combinations(row.items(), size)} == wanted
    assert len(rows) < len(wanted) / 3
