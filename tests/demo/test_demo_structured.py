"""Thirty JSON schemas on the demo pair: valid, the same text in every mode, passes counted.

A schema has one text, greedy or with a seed, by mlx-lm's own loop; at least two modes must say it.
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
from mlx_eagle.decoding.sampling import LogitsProcessors, Sampling
from mlx_eagle.drafters.lookup import CopyingDrafter
from mlx_eagle.drafters.tree import DraftShape
from mlx_eagle.structured import JSONSchema

MOST = 48  # tokens of a text
SEED = 7
NAMES = list(SCHEMAS)
SAMPLERS = ("greedy", "seeded")
MODES = {
    "chains": {"num_draft_tokens": 3},
    "trees": {"tree": "3x3:7"},
    "copies": {"num_draft_tokens": 5},
}
counted: Counter[str] = Counter()  # over all texts, by what is counted


def sampler_of(name: str) -> str:
    return SAMPLERS[NAMES.index(name) % 2]


def modes_of(name: str) -> list[str]:
    """Two of the modes, for each sampler in turn; batches are beside them."""
    first = NAMES.index(name) // 2
    return [list(MODES)[first % 3], list(MODES)[(first + 1) % 3]]


@cache
def prompt() -> list[int]:
    messages = [{"role": "user", "content": "Describe a town. Answer in JSON."}]
    return demo_pair()[1].apply_chat_template(messages, add_generation_prompt=True)


@cache
def grammar(name: str) -> JSONSchema:
    return JSONSchema(SCHEMAS[name], demo_pair()[1])


def sampling(name: str) -> Sampling | None:
    return None if sampler_of(name) == "greedy" else Sampling(temp=1.0, seed=SEED)


@cache
def plain_text(name: str) -> list[int]:
    """mlx-lm's own text, up to its end."""
    model, tokenizer, _ = demo_pair()
    found = []
    draw = sampling(name)
    for token, _ in generate_step(
        mx.array(prompt()), model, max_tokens=MOST, logits_processors=[grammar(name)],
        sampler=draw and draw.begin(),
    ):  # fmt: skip
        found.append(token)
        if token in tokenizer.eos_token_ids:
            break
    return found


def drafted_text(name: str, mode: str):
    model, tokenizer, drafter = demo_pair()
    draw = sampling(name)
    rule = {} if draw is None else {"sampler": draw, "acceptance": "coupled"}
    return speculative(
        model, CopyingDrafter(drafter) if mode == "copies" else drafter, prompt(), MOST,
        logits_processors=[grammar(name)], stop_tokens=list(tokenizer.eos_token_ids),
        **rule, **MODES[mode],
    )  # fmt: skip


def test_each_mode_has_eight_schemas_and_each_schema_two_modes():
    counts = Counter((mode, sampler_of(name)) for name in NAMES for mode in modes_of(name))
    counts += Counter(("batches", sampler_of(name)) for names in BATCHES for name in names)
    assert len(NAMES) == 30 and min(counts.values()) >= 8
    assert {*counts} == {(mode, name) for mode in [*MODES, "batches"] for name in SAMPLERS}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_valid_and_mlx_lms(name):
    validate = pytest.importorskip("jsonschema").validate
    tokenizer = demo_pair()[1]
    expected = plain_text(name)
    counted["tokens"] += len(expected)
    counted["texts"] += 1
    if expected[-1] in tokenizer.eos_token_ids:
        validate(json.loads(tokenizer.decode(expected[:-1])), SCHEMAS[name])
        counted["valid"] += 1
    for mode in modes_of(name):
        found, stats = drafted_text(name, mode)
        assert found == expected, mode
        counted[f"{mode}, {sampler_of(name)}: texts"] += 1
        counted[f"{mode}: tokens"] += len(expected)
        counted[f"{mode}: passes"] += stats.num_target_forwards


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in NAMES if modes_of(name)[0] == "chains"][::2])
def test_the_same_text_without_forced_tokens(name, monkeypatch):
    expected, forced = drafted_text(name, "chains")
    monkeypatch.setattr(LogitsProcessors, "forced", lambda self, most: [])
    found, stats = drafted_text(name, "chains")
    assert found == expected
    counted["forced: passes"] += forced.num_target_forwards
    counted["not forced: passes"] += stats.num_target_forwards
    counted["forced and not: tokens"] += len(found)


BATCHES = [NAMES[first : first + 8 : 2] for first in (0, 1, 14, 15)]  # two with each sampler


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", BATCHES, ids=lambda names: ", ".join(names))
def test_batches_of_four(names):
    """Four texts with schemas of their own share their rounds."""
    model, tokenizer, drafter = demo_pair()
    batch = Batch(model, drafter, FixedController(DraftShape(3)))
    requests = []
    for name in names:
        limits = Limits(MOST, list(tokenizer.eos_token_ids))
        request = Request(prompt(), limits, make_prompt_cache(model))
        draw = sampling(name)
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
        assert request.tokens == plain_text(name), name
    counted[f"batches, {sampler_of(names[0])}: texts"] += 4
    counted["batches: tokens"] += sum(len(plain_text(name)) for name in names)
    counted["batches: rounds"] += num_rounds


@pytest.mark.exhaustive
def test_how_many_passes_were_saved():
    """Counts over all of the above that has run; printed with ``-s``."""
    print("", *(f"{name}: {count}" for name, count in sorted(counted.items())), sep="\n")
    if counted["texts"] < len(NAMES) or not counted["batches: rounds"]:
        pytest.skip("the tests above did not all run")
    assert counted["valid"] >= 27
    for mode in MODES:
        assert counted[f"{mode}: passes"] < counted[f"{mode}: tokens"] * 2 // 3, mode
    assert counted["forced: passes"] < counted["not forced: passes"] * 9 // 10
    assert counted["batches: rounds"] < counted["batches: tokens"] // 4
