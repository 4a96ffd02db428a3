"""Logits processors that keep a state: the text of plain mlx-lm, in chains, trees and batches."""

from copy import copy

import mlx.core as mx
import pytest
from grids import thorough
from helpers import PROMPT, SCRIPTS, VOCAB, ScriptedDrafter, plain, speculative, tiny_llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from tree_drafters import TREE_SCRIPTS, ScriptedTreeDrafter

from mlx_eagle.batch.requests import Options, Request, first_token, prefill
from mlx_eagle.batch.rounds import Batch
from mlx_eagle.decoding.auto import FixedController
from mlx_eagle.decoding.decoder import Limits
from mlx_eagle.decoding.processors import LogitsProcessors
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.base import Draft
from mlx_eagle.drafters.tree import DraftShape, TreeShape

NUM_TOKENS = 24


class Guide:
    """As the guides of grammars: it follows the text call by call, and takes no other order.

    Each third token is one that its state decides on.
    """

    def __init__(self):
        self.text: list[int] = []

    def __call__(self, tokens, logits):
        text = tokens.tolist()
        if self.text and text[:-1] != self.text:
            raise ValueError(f"this does not continue the text: {text[len(self.text) - 1 :]}")
        self.text = text
        if len(text) % 3:
            return logits
        return logits.at[:, sum(text) % VOCAB].add(100.0)


class Copied(Guide):
    def copy(self):
        return copy(self)


class RolledBack(Guide):
    def rollback(self, n):
        self.text = self.text[: len(self.text) - n]


GUIDES = [Guide, Copied, RolledBack]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def text_of(model, prompt=PROMPT, more=20, **options) -> list[int]:
    return prompt + plain(model, prompt, NUM_TOKENS + more, logits_processors=[Guide()], **options)


@pytest.mark.parametrize("script", thorough(SCRIPTS, "every length"))
@pytest.mark.parametrize("guide", GUIDES)
def test_chains(model, guide, script):
    text, processor = text_of(model), guide()
    drafter = ScriptedDrafter(text, SCRIPTS[script])
    found, _ = speculative(
        model, drafter, PROMPT, NUM_TOKENS, num_draft_tokens=3, logits_processors=[processor]
    )
    assert found == text[len(PROMPT) :][:NUM_TOKENS]


@pytest.mark.parametrize("script", thorough(TREE_SCRIPTS, "every length"))
@pytest.mark.parametrize("guide", GUIDES)
def test_trees(model, guide, script):
    text = text_of(model)
    drafter = ScriptedTreeDrafter(text, TREE_SCRIPTS[script], VOCAB)
    tree = TreeShape.parse("2x3:6")
    found, _ = speculative(
        model, drafter, PROMPT, NUM_TOKENS, tree=tree, logits_processors=[guide()]
    )
    assert found == text[len(PROMPT) :][:NUM_TOKENS]


@pytest.mark.parametrize("guide", GUIDES)
def test_sampled_text(model, guide):
    text = text_of(model, sampler=Sampling(seed=3))
    for acceptance in ("coupled", "match"):
        drafter = ScriptedDrafter(text, SCRIPTS["every length"])
        found, _ = speculative(
            model, drafter, PROMPT, NUM_TOKENS, num_draft_tokens=3, acceptance=acceptance,
            sampler=Sampling(seed=3), logits_processors=[guide()],
        )  # fmt: skip
        assert found == text[len(PROMPT) :][:NUM_TOKENS]


def test_another_sampler_draws_for_kept_rows_alone(model):
    """A closure that keeps a state of its own: the likeliest token and the next one in turn."""

    def sampler():
        calls = []

        def draw(logprobs):
            calls.append(None)
            return mx.argsort(-logprobs, axis=-1)[:, len(calls) % 2]

        return draw

    text = text_of(model, sampler=sampler())
    drafter = ScriptedDrafter(text, SCRIPTS["every length"])
    found, _ = speculative(
        model, drafter, PROMPT, NUM_TOKENS, num_draft_tokens=3, sampler=sampler(),
        logits_processors=[Guide()],
    )  # fmt: skip
    assert found == text[len(PROMPT) :][:NUM_TOKENS]


class Texts(ScriptedDrafter):
    def __init__(self, texts):
        self.texts = {text[0]: text for text in texts}
        super().__init__([], SCRIPTS["every length"], VOCAB)

    def propose(self, size, pick=None):
        self.text = self.texts[self.absorbed[0][0][0].item()]
        return super().propose(size, pick)


@pytest.mark.parametrize("guide", GUIDES)
def test_batches(model, guide):
    prompts = [PROMPT, [9], [7, 11, 30] * 4]
    texts = [text_of(model, prompt) for prompt in prompts]
    drafter = Texts(texts)
    batch = Batch(model, drafter, FixedController(DraftShape(3)))
    options, requests = Options(logits_processors=[guide()]), []
    for prompt in prompts:
        request = Request(prompt, Limits(NUM_TOKENS, ()), make_prompt_cache(model))
        for _ in prefill(model, drafter, request, options):
            pass
        first_token(request)
        requests.append(request)
        batch.join(request)
    while batch.round() is not None:
        pass
    for request, text in zip(requests, texts, strict=True):
        assert request.tokens == text[len(request.prompt) :][:NUM_TOKENS]


def test_which_run_at_once():
    chain = Draft(mx.array([1, 2]))
    tree = Draft(mx.array([1, 2]), mx.array([0, 0]), 1)
    pure = make_logits_processors({3: 4.0}, repetition_penalty=1.3)
    for processors, expected in (
        (pure, (True, True)),
        ([*pure, Copied()], (True, True)),
        ([RolledBack()], (True, False)),
        ([*pure, Guide()], (False, False)),
    ):
        found = LogitsProcessors(processors)
        assert (found.run_at_once(chain), found.run_at_once(tree)) == expected
        assert found.run_at_once(Draft(mx.zeros((0,), mx.int32)))
