"""The reference against the real loop, round by round; and the simplification by hand."""

from dataclasses import fields
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import demo_pair, plain, tiny_head, tiny_llama, tiny_qwen3
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_eagle import reference
from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.eagle3 import Eagle3Drafter, EagleDrafter
from mlx_eagle.reference import EagleHead, eagle_draft_forward, run_target, speculative_rounds

ROOT = Path(__file__).parents[1]
MOST_LINES = 200  # read in ten minutes
QUESTIONS = (
    "Name three colours.",
    "What is 7 times 8?",
    "List the days of the week.",
    "Say hello in French.",
    "Write a haiku about rain.",
    "Count from one to ten.",
    "What is a prime number?",
    "def add(a, b):",
)
PROMPTS = [[5 + i, 17, 3 * i, 88 - i, 41, 2, 60][: 3 + i // 2] for i in range(8)]
NUM_TOKENS = 24


def train(model: nn.Module, drafter: EagleDrafter, texts: list[list[int]], num_steps: int) -> None:
    """Let a head learn texts by heart, so that most of what it drafts of them is accepted."""
    taps, to_target = drafter.taps, drafter.to_target
    features = [run_target(model, text, make_prompt_cache(model), taps)[1] for text in texts]
    draft_ids = mx.argsort(to_target)

    def loss(head: nn.Module, index: int) -> mx.array:
        text = mx.array(texts[index])
        states = head.fuse(features[index][:-2])
        losses = []
        for step in range(3):  # on the head's own states from the second on, as drafts are
            states = head(model.model.embed_tokens(text[step + 1 : -1]), states, [KVCache()])
            wanted = draft_ids[text[step + 2 :]]
            losses.append(mx.mean(nn.losses.cross_entropy(head.logits(states), wanted)))
            states = states[:-1]
        return sum(losses)

    optimizer = optim.Adam(5e-3)
    step = nn.value_and_grad(drafter.head, loss)
    for i in range(num_steps):
        _, grads = step(drafter.head, i % len(texts))
        optimizer.update(drafter.head, grads)
        mx.eval(drafter.head.parameters(), optimizer.state)


@cache
def tiny_pair() -> tuple[nn.Module, Eagle3Drafter]:
    """A target and a head that knows its texts; draft ids count tokens from the last one."""
    model = tiny_llama()
    vocab = model.args.vocab_size
    random = tiny_head(model, draft_vocab_size=vocab)
    drafter = Eagle3Drafter(
        random.head, model.model.embed_tokens, random.taps, mx.arange(vocab - 1, -1, -1)
    )
    train(model, drafter, [prompt + plain(model, prompt, NUM_TOKENS) for prompt in PROMPTS], 96)
    return model, drafter


class RecordedHead(EagleHead):
    """The reference's head, which notes what it drafts."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.drafted: list[int] = []

    def best_token(self, estimate):
        self.drafted.append(super().best_token(estimate))
        return self.drafted[-1]


class RecordedDrafter(Eagle3Drafter):
    """The real drafter, which notes what it drafts; that may be more, rounds being pipelined."""

    def __init__(self, drafter: Eagle3Drafter):
        super().__init__(drafter.head, drafter._embed, drafter.taps, drafter.to_target)
        self.drafted: list[mx.array] = []

    def propose(self, size, pick):
        draft = super().propose(size, pick)
        self.drafted.append(draft.tokens)
        return draft


def real_rounds(model: nn.Module, drafter, prompt: list[int], **options) -> list[list[int]]:
    """The rounds of the real loop, each of which ends with a token that was not drafted."""
    rounds: list[list[int]] = [[]]
    steps = speculative_generate_step(mx.array(prompt), model, drafter, **options)
    for token, _, from_draft in steps:
        rounds[-1].append(token)
        if not from_draft:
            rounds.append([])
    return [tokens for tokens in rounds if tokens]


def check_rounds(model: nn.Module, drafter, prompt: list[int], **options) -> list[int]:
    """Compare all rounds and all drafts; how many tokens of each round were accepted."""
    head = RecordedHead(drafter, model)
    rounds = list(speculative_rounds(prompt, model, head, **options))
    real = RecordedDrafter(drafter)
    assert rounds == real_rounds(model, real, prompt, **options)
    drafted = [token for tokens in real.drafted for token in tokens.tolist()]
    assert head.drafted == drafted[: len(head.drafted)]
    return [len(tokens) - 1 for tokens in rounds]


def test_it_is_as_short_as_the_pages_say():
    num_lines = len(Path(reference.__file__).read_text().splitlines())
    assert MOST_LINES - 10 <= num_lines <= MOST_LINES
    for name in ("README.md", "docs/pages/how-it-works.md"):
        assert f"in {MOST_LINES} lines" in (ROOT / name).read_text(), name


def test_rounds_are_those_of_the_real_loop():
    model, drafter = tiny_pair()
    accepted = set()
    for prompt in PROMPTS:
        accepted.update(check_rounds(model, drafter, prompt, max_tokens=NUM_TOKENS))
        rounds = speculative_rounds(prompt, model, EagleHead(drafter, model), 3, NUM_TOKENS)
        assert [token for tokens in rounds for token in tokens] == plain(model, prompt, NUM_TOKENS)
    assert accepted == {0, 1, 2, 3}


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 5])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 20])
def test_lengths_of_drafts_and_texts(num_draft_tokens, max_tokens):
    options = {"num_draft_tokens": num_draft_tokens, "max_tokens": max_tokens}
    check_rounds(*tiny_pair(), PROMPTS[5], **options)


@pytest.mark.parametrize("index", [0, 3, 4, 5, 6, 7])
def test_a_stop_token_ends_the_text(index):
    """Wherever in a round it stands, drafted or not; the real loop says that it was drafted."""
    model, drafter = tiny_pair()
    text = plain(model, PROMPTS[5], NUM_TOKENS)
    head = EagleHead(drafter, model)
    stop = text[index]
    rounds = list(speculative_rounds(PROMPTS[5], model, head, stop_tokens=[stop]))
    assert rounds == real_rounds(model, drafter, PROMPTS[5], stop_tokens=[stop])
    assert [token for tokens in rounds for token in tokens] == text[: text.index(stop) + 1]


def test_a_model_with_an_output_matrix_and_a_head_of_all_tokens():
    model = tiny_qwen3()
    random = tiny_head(model, draft_vocab_size=model.args.vocab_size)
    drafter = Eagle3Drafter(random.head, model.model.embed_tokens, random.taps)
    check_rounds(model, drafter, PROMPTS[0], max_tokens=NUM_TOKENS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("question", QUESTIONS)
def test_rounds_of_the_demo_pair(question):
    model, tokenizer, drafter = demo_pair()
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    stop = tokenizer.eos_token_ids
    check_rounds(model, drafter, prompt, max_tokens=24, stop_tokens=stop)


SIZES = {
    "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
    "draft_vocab_size", "target_hidden_size", "num_aux", "rms_norm_eps",
    "max_position_embeddings", "rope",
}  # fmt: skip
IN_THE_WEIGHTS = {
    "attention_bias", "attention_out_bias", "mlp_bias", "fc_bias",  # modules that are called
    "lm_head_source", "has_d2t", "aux_boundary_ids", "aux_nested_ids", "full_attention_layers",
}  # fmt: skip
OF_OTHER_FIELDS = {"parallel_head_layers", "parallel_head_bias", "parallel_outputs"}
SAID = {"model_type", "family", "aux_ids_source", "speculative_tokens_hint"}


def test_heads_that_are_more_than_a_llama_layer_are_refused():
    known = SIZES | IN_THE_WEIGHTS | OF_OTHER_FIELDS | SAID
    assert {field.name for field in fields(Eagle3Config)} == known | set(reference.LLAMA_LIKE)
    model = tiny_llama()
    for change in ({"norm_output": True}, {"num_layers": 2}, {"mask_token_id": 3}):
        ((name, value),) = change.items()
        with pytest.raises(ValueError, match=f"head's {name} is {value}, and the reference needs"):
            EagleHead(tiny_head(model, **change), model)


# Two dimensions, three tokens. The fusion adds state and embedding, the draft head swaps the
# two dimensions and takes 1 from the second, and the rows of lm_head point along x, y and x + y.
BY_HAND = {
    "embed_matrix": [[1.0, 0.0], [0.0, 2.0], [-3.0, 1.0]],
    "fc_fuse_weight": [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]],
    "fc_fuse_bias": [0.0, 0.0],
    "draft_head_weight": [[0.0, 1.0], [1.0, 0.0]],
    "draft_head_bias": [0.0, -1.0],
    "lm_head_weight": [[1.0, 0.0], [0.0, 1.0], [0.8, 0.8]],
}


def test_eagle_draft_forward_by_hand():
    # state (2, 1), token 1: fused (2, 3), swapped (3, 2), less 1: (3, 1). logits 3, 1, 3.2: 2.
    # state (3, 1), token 2: fused (0, 2), swapped (2, 0), less 1: (2, 0). logits 2, 0, 1.6: 0.
    # state (2, 0), token 0: fused (3, 0), swapped (0, 3), less 1: (0, 2). logits 0, 2, 1.6: 1.
    # state (0, 2), token 1: fused (0, 4), swapped (4, 0), less 1: (4, 0). logits 4, 0, 3.2: 0.
    assert eagle_draft_forward([2.0, 1.0], 1, **BY_HAND, num_draft_tokens=4) == [2, 0, 1, 0]
    assert eagle_draft_forward([2.0, 1.0], 1, **BY_HAND, num_draft_tokens=0) == []


def test_eagle_draft_forward_takes_the_state_first():
    swapped = {**BY_HAND, "fc_fuse_weight": [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]}
    # Only the embedding counts: (0, 2), swapped (2, 0), less 1: (2, 0). logits 2, 0, 1.6: 0.
    assert eagle_draft_forward([9.0, 9.0], 1, **swapped, num_draft_tokens=1) == [0]


def test_eagle_draft_forward_takes_the_lowest_of_equal_logits():
    dead = {**BY_HAND, "draft_head_bias": [-100.0, -100.0]}
    assert eagle_draft_forward([2.0, 1.0], 1, **dead, num_draft_tokens=2) == [0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_eagle_draft_forward_equals_an_element_by_element_loop(seed):
    d, vocab_size, num_draft_tokens = 6, 11, 8
    rng = np.random.default_rng(seed)
    state = rng.standard_normal(d)
    embed, lm_head = rng.standard_normal((2, vocab_size, d))
    fuse, fuse_bias = rng.standard_normal((d, 2 * d)), rng.standard_normal(d)
    head, head_bias = rng.standard_normal((d, d)), rng.standard_normal(d)
    found = eagle_draft_forward(
        state, 3, embed, fuse, fuse_bias, head, head_bias, lm_head, num_draft_tokens
    )

    token, wanted, hidden = 3, [], [float(x) for x in state]
    for _ in range(num_draft_tokens):
        joined = hidden + [float(x) for x in embed[token]]
        fused = []
        for i in range(d):
            total = float(fuse_bias[i])
            for j in range(2 * d):
                total += float(fuse[i, j]) * joined[j]
            fused.append(max(total, 0.0))
        hidden = []
        for i in range(d):
            total = float(head_bias[i])
            for j in range(d):
                total += float(head[i, j]) * fused[j]
            hidden.append(max(total, 0.0))
        logits = [
            sum(float(lm_head[v, i]) * hidden[i] for i in range(d)) for v in range(vocab_size)
        ]
        token = logits.index(max(logits))
        wanted.append(token)
    assert found == wanted
    assert all(type(token) is int for token in found)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"hidden_state": [[1.0, 2.0]]},
            r"hidden_state has shape \(1, 2\), but \(any\) is needed",
        ),
        ({"embed_matrix": [[1.0]] * 3}, r"embed_matrix has shape \(3, 1\), but \(any, 2\)"),
        ({"fc_fuse_weight": [[1.0, 0.0]] * 2}, r"fc_fuse_weight .* \(2, 4\) is needed"),
        ({"fc_fuse_bias": [0.0]}, r"fc_fuse_bias .* \(2\) is needed"),
        ({"draft_head_weight": [[0.0, 1.0]]}, r"draft_head_weight .* \(2, 2\) is needed"),
        ({"draft_head_bias": 1.0}, r"draft_head_bias .* \(2\) is needed"),
        ({"lm_head_weight": [[1.0, 0.0]] * 2}, r"lm_head_weight .* \(3, 2\) is needed"),
        ({"last_token": 3}, "last_token is 3, but embed_matrix has 3 rows"),
        ({"last_token": -1}, "last_token is -1"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1, but cannot be negative"),
    ],
)
def test_eagle_draft_forward_names_what_does_not_fit(change, message):
    arguments = {"hidden_state": [2.0, 1.0], "last_token": 1, **BY_HAND, "num_draft_tokens": 2}
    with pytest.raises(ValueError, match=message):
        eagle_draft_forward(**{**arguments, **change})
