"""Thirty JSON schemas on the demo pair: valid, the same text in every mode, passes counted.

A schema has one greedy text, by mlx-lm's own loop, and one of the modes in turn says it too; three
have a text with a seed besides. Each mode has all schemas, whole, in ``test_structured.py``.
"""

import json
from collections import Counter
from functools import cache

import mlx.core as mx
import pytest
from helpers import demo_pair, speculative
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from schemas import SCHEMAS

from mlx_eagle.batch.requests import Options, Request, first_token, prefill
from mlx_eagle.batch.rounds import Batch
from mlx_eagle.decoding.auto import FixedController
from mlx_eagle.decoding.decoder import Limits
from mlx_eagle.decoding.processors import LogitsProcessors
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.tree import DraftShape
from mlx_eagle.structured import JSONSchema

MOST = 24  # tokens of a text: a token of mlx-lm's takes 30 ms and more
SEED = 7
NAMES = list(SCHEMAS)
MODES = {
    "chains": {"num_draft_tokens": 3},
    "trees": {"tree": "3x3:7"},
    "copies": {"num_draft_tokens": 5},
}
SEEDED = NAMES[::10]
CASES = [(name, "greedy") for name in NAMES] + [(name, "seeded") for name in SEEDED]
BATCHES = {"greedy": NAMES[8:12], "seeded": NAMES[14:18]}
counted: Counter[str] = Counter()  # over all texts, by what is counted


def mode_of(name: str, sampler: str = "greedy") -> str:
    names = NAMES if sampler == "greedy" else SEEDED
    return list(MODES)[names.index(name) % 3]


@cache
def prompt() -> list[int]:
    """A short one: all tests together read it eighty times."""
    return demo_pair()[1].encode("A town in JSON:")


@cache
def grammar(name: str) -> JSONSchema:
    return JSONSchema(SCHEMAS[name], demo_pair()[1])


def sampling(sampler: str) -> Sampling | None:
    return None if sampler == "greedy" else Sampling(temp=1.0, seed=SEED)


@cache
def plain_text(name: str, sampler: str) -> list[int]:
    """mlx-lm's own text, up to its end."""
    model, tokenizer, _ = demo_pair()
    found = []
    draw = sampling(sampler)
    for token, _ in generate_step(
        mx.array(prompt()), model, max_tokens=MOST, logits_processors=[grammar(name)],
        sampler=draw and draw.begin(),
    ):  # fmt: skip
        found.append(token)
        if token in tokenizer.eos_token_ids:
            break
    return found


def draft(name: str, sampler: str, mode: str) -> tuple[list[int], Stats]:
    model, tokenizer, drafter = demo_pair()
    draw = sampling(sampler)
    rule = {} if draw is None else {"sampler": draw, "acceptance": "coupled"}
    return speculative(
        model, drafter.with_copies() if mode == "copies" else drafter, prompt(), MOST,
        logits_processors=[grammar(name)], stop_tokens=list(tokenizer.eos_token_ids),
        **rule, **MODES[mode],
    )  # fmt: skip


drafted = cache(draft)


def test_each_mode_has_ten_schemas_and_one_with_a_seed():
    assert len(NAMES) == 30 and len(SEEDED) == 3
    assert Counter(map(mode_of, NAMES)) == dict.fromkeys(MODES, 10)
    assert Counter(mode_of(name, "seeded") for name in SEEDED) == dict.fromkeys(MODES, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, sampler", CASES)
def test_the_text_is_valid_and_mlx_lms(name, sampler):
    validate = pytest.importorskip("jsonschema").validate
    tokenizer = demo_pair()[1]
    expected = plain_text(name, sampler)
    mode = mode_of(name, sampler)
    counted["texts"] += 1
    if expected[-1] in tokenizer.eos_token_ids:
        validate(json.loads(tokenizer.decode(expected[:-1])), SCHEMAS[name])
        counted["valid"] += 1
    found, stats = drafted(name, sampler, mode)
    assert found == expected
    counted[f"{mode}: tokens"] += len(expected)
    counted[f"{mode}: passes"] += stats.num_target_forwards


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in NAMES if mode_of(name) == "chains"][::3])
def test_the_same_text_without_forced_tokens(name, monkeypatch):
    expected, forced = drafted(name, "greedy", "chains")
    monkeypatch.setattr(LogitsProcessors, "forced", lambda self, most: [])
    found, stats = draft(name, "greedy", "chains")
    assert found == expected
    counted["forced: passes"] += forced.num_target_forwards
    counted["not forced: passes"] += stats.num_target_forwards
    counted["forced and not: tokens"] += len(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampler", BATCHES)
def test_batches_of_four(sampler):
    """Four texts with schemas of their own share their rounds."""
    model, tokenizer, drafter = demo_pair()
    batch = Batch(model, drafter, FixedController(DraftShape(3)))
    names = BATCHES[sampler]
    requests = []
    for name in names:
        limits = Limits(MOST, list(tokenizer.eos_token_ids))
        request = Request(prompt(), limits, make_prompt_cache(model))
        draw = sampling(sampler)
        rule = {} if draw is None else {"sampler": draw, "acceptance": "coupled"}
        for _ in prefill(
            model, drafter, request, Options(logits_processors=[grammar(name)], **rule)
        ):
            pass
        first_token(request)
        requests.append(request)
        batch.join(request)
    num_rounds = 0
    while batch.round() is not None:
        num_rounds += 1
    for name, request in zip(names, requests, strict=True):
        assert request.tokens == plain_text(name, sampler), name
    counted["batches: tokens"] += sum(len(plain_text(name, sampler)) for name in names)
    counted["batches: rounds"] += num_rounds


@pytest.mark.exhaustive
def test_how_many_passes_were_saved():
    """Counts over all of the above that has run; printed with ``-s``."""
    print("", *(f"{name}: {count}" for name, count in sorted(counted.items())), sep="\n")
    if counted["texts"] < len(CASES) or not counted["batches: rounds"]:
        pytest.skip("the tests above did not all run")
    assert counted["valid"] > len(CASES) // 2
    for mode in MODES:
        assert counted[f"{mode}: passes"] < counted[f"{mode}: tokens"] * 2 // 3, mode
    assert counted["forced: passes"] < counted["not forced: passes"] * 9 // 10
    assert counted["batches: rounds"] < counted["batches: tokens"] // 4
