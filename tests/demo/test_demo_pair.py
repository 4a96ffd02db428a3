"""Demo pair, end to end: exact text, the published acceptance, ablations that must hurt.

Slow tests on the real model, kept small; ``bench/log/`` has the same on whole prompt sets.
"""

import json
import re
from datetime import date
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from helpers import demo_pair

import mlx_eagle
from mlx_eagle.convert import convert
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.tree import TreeShape

DATA = Path(__file__).parents[1] / "data"
HEAD = DATA / "eagle3-smollm2-135m-instruct"
REFERENCE = DATA / "eagle3-smollm2-135m-instruct.reference.json"
PROMPTS = Path(__file__).parents[2] / "bench" / "prompts"


@pytest.fixture(scope="module")
def pair():
    return demo_pair()


@pytest.fixture(scope="module")
def dense_head(pair, tmp_path_factory):
    """Head as it was trained: converted from its original files, not quantized."""
    folder = tmp_path_factory.mktemp("head") / "dense"
    convert(str(HEAD), str(folder), quantize=False)
    return mlx_eagle.load_drafter(folder, pair[0])


MONTHS = [date(2026, month, 1).strftime("%B") for month in range(1, 13)]


@pytest.mark.exhaustive
def test_the_first_question_of_the_pages_is_answered_right(pair):
    """A newcomer who reads a wrong answer thinks that drafting broke the model."""
    model, tokenizer, drafter = pair
    page = (Path(__file__).parents[2] / "docs" / "pages" / "quickstart.md").read_text()
    question = re.search(r'mlx_eagle\.generate --prompt "(.*?)"', page)[1]
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    text = mlx_eagle.generate(
        model, tokenizer, prompt, draft_model=drafter, max_tokens=100, num_draft_tokens=3
    )
    assert re.findall(r"[A-Z][a-z]+(?=\n|$)", text) == MONTHS


def prompts(pair, name: str, indices) -> list[list[int]]:
    questions = [json.loads(line) for line in (PROMPTS / f"{name}.jsonl").read_text().splitlines()]
    return [
        pair[1].apply_chat_template(
            [{"role": "user", "content": questions[i]["turns"][0]}], add_generation_prompt=True
        )
        for i in indices
    ]


def decode(pair, drafter, prompt, max_tokens, **options) -> tuple[list[int], Stats]:
    stats = Stats()
    steps = speculative_generate_step(
        mx.array(prompt),
        pair[0],
        drafter,
        max_tokens=max_tokens,
        stop_tokens=pair[1].eos_token_ids,
        stats=stats,
        **options,
    )
    return [token for token, _, _ in steps], stats


SHAPES = [1, 3, 5, "3x3:8"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("index", [0, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_token_identical_to_mlx_lm(pair, index, shape):
    model, tokenizer, drafter = pair
    (prompt,) = prompts(pair, "mt_bench", (index,))
    plain = [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=20)]
    is_tree = isinstance(shape, str)
    drafts = {"tree": TreeShape.parse(shape)} if is_tree else {"num_draft_tokens": shape}
    responses = list(
        mlx_eagle.stream_generate(
            model, tokenizer, prompt, max_tokens=20, draft_model=drafter, **drafts
        )
    )
    assert [r.token for r in responses] == plain
    assert responses[-1].stats.num_emitted == len(plain) - 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("index", [0, 8])
@pytest.mark.parametrize("name", ["mt_bench", "humaneval"])
def test_tau_is_that_of_the_independent_implementation(pair, dense_head, name, index):
    reference = json.loads(REFERENCE.read_text())["sets"][name]
    (prompt,) = prompts(pair, name, (index,))
    _, stats = decode(pair, dense_head, prompt, 128, num_draft_tokens=3)
    emitted, rounds = reference[str(index)]["3"]
    assert stats.tau == pytest.approx(emitted / rounds, rel=0.02)


class Forgetful(mlx_eagle.Eagle3Drafter):
    """A drafter that keeps nothing of the prompt and the text in its cache."""

    def extend(self, tokens, features, last=None):
        self.cache = self.make_cache()
        super().extend(tokens, features, last)


class Shifted(mlx_eagle.Eagle3Drafter):
    """A drafter that joins a position's features with its token, not with the one after it."""

    def extend(self, tokens, features, last=None):
        before = mx.concatenate([self._last_token, tokens[:-1]])
        end = tokens.shape[0] - 1 if last is None else last
        self._last_token = mx.take(tokens, mx.array(end).reshape(1))
        super().extend(before, features, last)

    _last_token = mx.zeros((1,), mx.int32)


@pytest.mark.exhaustive
def test_ablations_hurt(pair):
    _, _, drafter = pair
    kept = {}
    for kind in (mlx_eagle.Eagle3Drafter, Forgetful, Shifted):
        broken = kind(drafter.head, drafter._embed, drafter.taps, drafter.to_target)
        kept[kind] = 0
        for prompt in prompts(pair, "gsm8k", (0, 1)):
            _tokens, stats = decode(pair, broken, prompt, 40, num_draft_tokens=3)
            kept[kind] += stats.num_accepted
    assert kept[Forgetful] < 0.8 * kept[mlx_eagle.Eagle3Drafter]
    assert kept[Shifted] < 0.5 * kept[mlx_eagle.Eagle3Drafter]


def test_the_shipped_head_is_what_the_converter_makes_of_the_original(tmp_path):
    """A conversion rounds on the CPU, whatever the device is."""
    folder = tmp_path / "head"
    convert(str(HEAD), str(folder))
    made = mx.load(str(folder / "model.safetensors"))
    shipped = mx.load(str(Path(mlx_eagle.__file__).parent / "demo" / "head" / "model.safetensors"))
    assert made.keys() == shipped.keys()
    assert all(mx.array_equal(made[name], shipped[name]).item() for name in made)


@pytest.mark.exhaustive
def test_same_seed_same_text(pair):
    _, _tokenizer, drafter = pair
    (prompt,) = prompts(pair, "mt_bench", (2,))
    texts = [
        decode(
            pair, drafter, prompt, 40, num_draft_tokens=k, sampler=mlx_eagle.Sampling(0.8, seed=7)
        )[0]
        for k in (0, 1, 4)
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.exhaustive
def test_five_turns_with_a_saved_cache(pair, tmp_path):
    """The conversation is plain mlx-lm's, with the cache written and read between turns."""
    model, tokenizer, drafter = pair
    from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

    file = str(tmp_path / "cache.safetensors")
    cache = make_prompt_cache(model) + drafter.make_cache()
    reference = make_prompt_cache(model)
    questions = ["Hi, I am Ada.", "What is 2 + 3?", "And times 4?", "Minus 5?", "Who am I?"]
    conversation = []
    for question in questions:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        turn = tokenizer.encode(text, add_special_tokens=False)
        tokens, stats = decode(pair, drafter, turn, 24, num_draft_tokens=3, prompt_cache=cache)
        theirs = mlx_lm.stream_generate(
            model, tokenizer, turn, max_tokens=24, prompt_cache=reference
        )
        assert tokens == [r.token for r in theirs]
        conversation += turn + tokens
        save_prompt_cache(file, cache)
        cache = load_prompt_cache(file)
    before = conversation[: len(conversation) - len(tokens)]
    cold, cold_stats = decode(pair, drafter, before, 24, num_draft_tokens=3)
    assert (tokens, stats.tau) == (cold, cold_stats.tau)
