"""DSpark: drafts against the NumPy twin, packagings, the first slot, confidence."""

from copy import copy
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from block_twin import (
    PROMPTS,
    TOLERANCE,
    Twin,
    compare_rounds,
    drafted_logits,
    features_of,
    learned_head,
    published,
    relative,
    sigmoid,
    tiny_dspark,
    twin_logits,
)
from costs import SettledCosts, curve
from helpers import PROMPT, byte_tokenizer, plain, speculative, tiny_llama
from mlx.utils import tree_flatten
from test_dflash import FLAT, LAYER, NESTED, without

import mlx_eagle
from mlx_eagle.convert import convert
from mlx_eagle.decoding import generate_step
from mlx_eagle.drafters.base import Draft
from mlx_eagle.drafters.dspark import ConfidenceHead, config_from
from mlx_eagle.drafters.kinds import load_drafter, recognise

LLAMA, TOKENIZER = tiny_llama(num_hidden_layers=6), byte_tokenizer()
GEMMA = {
    "is_gemma": True,
    "values_are_keys": True,
    "hidden_act": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_scaling": {"type": "proportional", "partial_rotary_factor": 0.25, "factor": 1.0},
    "logit_softcap": 30.0,
}
FORMS = {
    "vanilla": {},
    "gated": {"markov_kind": "gated"},
    "rnn": {"markov_kind": "rnn"},
    "the anchor's slot not used": {"first_slot": 1},
    "windows and sinks": {"windows": (5, 0), "causal_layers": (0,), "has_sinks": True},
    "Gemma 4": GEMMA,
    "Gemma 4, values of their own": GEMMA | {"values_are_keys": False},
    "capped before the correction": {"logit_softcap": 2.0},
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_after_a_prompt_and_after_acceptance(form):
    compare_rounds(tiny_dspark(LLAMA, **FORMS[form]), LLAMA)


@pytest.fixture(scope="module")
def learned():
    return learned_head(LLAMA, "dspark")


@pytest.mark.parametrize("k", [2, 7])
@pytest.mark.parametrize("packaging", ["dspark", "liquid"])
def test_a_head_that_knows_the_text(packaging, k):
    learned = learned_head(LLAMA, packaging)
    tokens, stats = speculative(LLAMA, learned, PROMPT, 25, num_draft_tokens=k)
    assert tokens == plain(LLAMA, PROMPT, 25)
    assert stats.tau >= 0.9 * (k + 1)
    assert stats.num_head_forwards == stats.num_rounds


def test_batches_share_forwards_and_accept_as_each_request_alone(learned):
    options = {"draft_model": learned, "num_draft_tokens": 4, "max_tokens": 20}
    made = mlx_eagle.batch_generate(LLAMA, TOKENIZER, PROMPTS, return_token_ids=True, **options)
    for prompt, tokens, stats in zip(PROMPTS, made.token_ids, made.stats, strict=True):
        alone, own = speculative(LLAMA, learned, prompt, 20, num_draft_tokens=4)
        assert tokens == alone == plain(LLAMA, prompt, 20)
        assert stats.num_accepted >= own.num_accepted - 2


@pytest.mark.parametrize("rule", ["match", "coupled", "reject"])
def test_sampled_texts(learned, rule):
    sampler = mlx_eagle.Sampling(temp=0.8, seed=5)
    tokens, stats = speculative(
        LLAMA, learned, PROMPT, 15, num_draft_tokens=4, sampler=sampler, acceptance=rule
    )
    assert len(tokens) == 15 and stats.num_drafted > 0


TOP = {
    **LAYER,
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "block_size": 7,
    "mask_token_id": 11,
    "target_layer_ids": [0, 5],
    "markov_rank": 8,
    "markov_head_type": "vanilla",
}
SPECULATORS = without(NESTED, "sample_from_anchor") | {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "markov_rank": 8,
}
SPECFORGE = FLAT | {
    "architectures": ["DSparkDraftModel"],
    "dflash_config": FLAT["dflash_config"] | {"projector_type": "dspark"},
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192}


def proposing(number: int) -> dict:
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": number}]}}


SLOTS = {
    "DeepSpec": (TOP, 0),
    "SpecForge": (SPECFORGE, 0),
    "old speculators": (SPECULATORS, 1),
    "from the anchor": (SPECULATORS | {"sample_from_anchor": True}, 0),
    "not from the anchor": (TOP | {"sample_from_anchor": False}, 1),
    "the anchor is counted": (SPECFORGE | {"dspark_bonus_anchor": True}, 1),
    "as many as the block": (SPECULATORS | {"sample_from_anchor": False} | proposing(7), 0),
    "one less than the block": (SPECULATORS | {"sample_from_anchor": True} | proposing(6), 1),
    "a number that does not fit": (SPECULATORS | {"sample_from_anchor": True} | proposing(3), 0),
}


@pytest.mark.parametrize("case", SLOTS)
def test_which_slot_drafts_first(case):
    config, first = SLOTS[case]
    tensors = dict(tree_flatten(tiny_dspark(LLAMA).head.parameters()))
    made = config_from(tensors, config)
    assert made.first_slot == first and made.longest_draft == 7 - first
    assert made.taps == (1, 6) and made.markov_rank == 8


def test_yarn_is_real_in_files_of_specforge_only():
    tensors = dict(tree_flatten(tiny_dspark(LLAMA).head.parameters()))
    rope = {"rope_parameters": YARN | {"rope_theta": 1e6}}
    assert config_from(tensors, SPECFORGE | rope).rope_scaling == YARN
    other = config_from(tensors, TOP | rope)
    assert other.rope_scaling is None and other.rope_theta == 1e6


def test_liquid_turns_neighbouring_channels():
    tensors = dict(tree_flatten(tiny_dspark(LLAMA).head.parameters()))
    assert config_from(tensors, FLAT | {"rope_is_neox_style": False}).rope_traditional
    assert not config_from(tensors, FLAT).rope_traditional


@pytest.mark.parametrize("config", [TOP, SPECULATORS, SPECFORGE], ids=["deepspec", "nested", "sf"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_packagings_convert(tmp_path, config, kind):
    first = 1 if config is SPECULATORS else 0
    drafter = tiny_dspark(LLAMA, markov_kind=kind, first_slot=first)
    source = published(tmp_path / "source", drafter, config)
    written = convert(str(source), str(tmp_path / "head"), quantize=False)
    assert written["kind"] == "dspark" and written["markov_kind"] == kind
    loaded, text = load_drafter(tmp_path / "head", LLAMA).begin(), [*PROMPT, 5]
    features = mx.array(features_of(LLAMA, loaded.taps, text).astype(np.float32))
    loaded.extend(mx.array(text[1:]), features[:-1])
    assert relative(drafted_logits(loaded, 6), twin_logits(drafter, LLAMA, text, 6)) < TOLERANCE


@pytest.mark.parametrize("part", ["state", "markov"])
def test_confidence_is_kept_and_as_deepspec_has_it(tmp_path, part):
    drafter = tiny_dspark(LLAMA, confidence=part)
    source = published(tmp_path / "source", drafter, TOP)
    assert convert(str(source), str(tmp_path / "head"), q_bits=8)["confidence"] == part
    text = [*PROMPT, 5]
    begun = drafter.begin()
    features = features_of(LLAMA, drafter.taps, text)
    begun.extend(mx.array(text[1:]), mx.array(features.astype(np.float32))[:-1])
    draft = begun.propose(6, lambda logits, ids: mx.argmax(logits, axis=-1))
    twin = Twin(drafter.head)
    block = np.array(drafter._embed(mx.array([text[-1], *[11] * 5])), np.float64)
    rows = twin.states(features[:-1], block)
    if part == "markov":
        before = [text[-1], *draft.tokens.tolist()[:-1]]
        rows = np.concatenate([rows, twin.w["markov_head.markov_w1.weight"][before]], axis=1)
    weight = twin.w["confidence_head.proj.weight"][0]
    wanted = sigmoid(rows @ weight + twin.w["confidence_head.proj.bias"][0])
    assert np.abs(np.array(draft.confidence) - wanted).max() < TOLERANCE


def with_confidence(drafter, chance: float):
    """The same head, with an estimate that is always this one."""
    made = drafter.begin()
    made.head = copy(drafter.head)
    made.head.config = replace(made.head.config, confidence="state")
    head = ConfidenceHead(made.head.config)
    head.proj.weight = mx.zeros_like(head.proj.weight)
    head.proj.bias = mx.array([np.log(chance / (1 - chance))])
    made.head.confidence_head = head
    return made


@pytest.mark.parametrize("rule", ["greedy", "coupled", "reject"])
@pytest.mark.parametrize("chance", [0.01, 0.99])
def test_auto_ends_drafts_where_confidence_falls_below_the_next_rows_cost(
    learned, monkeypatch, rule, chance
):
    costs = curve(lambda k: 1.1 + 0.1 * k)
    monkeypatch.setattr(generate_step, "costs_of", lambda *_: SettledCosts(costs))
    sampling = {"top_k": 1} if rule == "reject" else {}
    sampler = None if rule == "greedy" else mlx_eagle.Sampling(temp=0.8, seed=5, **sampling)
    options = {} if rule == "greedy" else {"sampler": sampler, "acceptance": rule}
    options |= {"num_draft_tokens": "auto"}
    drafter = with_confidence(learned, chance)
    tokens, stats = speculative(LLAMA, drafter, PROMPT, 60, **options)
    _, usual = speculative(LLAMA, learned, PROMPT, 60, **options)
    assert tokens == plain(LLAMA, PROMPT, 60, sampler=sampler if rule == "coupled" else None)
    assert usual.num_drafted > 2 * usual.num_rounds or rule == "coupled"
    if chance < 0.5:
        assert 0 < stats.num_drafted < 1.5 * stats.num_rounds  # trees are tried as they are
    else:
        assert stats.num_drafted == usual.num_drafted


def test_whether_a_token_stays_depends_on_nothing_known_after_it_was_chosen():
    dice = np.random.default_rng(3)
    sizes = set()
    for _ in range(300):
        chances = dice.uniform(0, 1, 9) ** 0.3
        prices = dict(zip([1, 2, 3, 4, 5, 7, 9], np.cumsum(dice.uniform(0, 1.2, 7)), strict=True))

        def kept(chances, prices=prices):
            draft = Draft(mx.zeros((9,), mx.int32), confidence=mx.array(chances))
            return len(draft.worth(prices))

        size = kept(chances)
        sizes.add(size)
        other = np.where(np.arange(9) <= size, chances, dice.uniform(0, 1, 9))
        assert kept(other) == size
    assert sizes == {1, 2, 3, 4, 5, 7, 9}


def test_own_embedding_and_output(tmp_path):
    """As DeepSpec saves them: nothing of them is the target's, nor is their scale."""
    drafter = tiny_dspark(LLAMA, embed_source="file", lm_head_source="file")
    source = published(tmp_path / "source", drafter, TOP)
    written = convert(str(source), str(tmp_path / "head"), q_bits=8, q_group_size=32)
    assert written["embed_source"] == written["lm_head_source"] == "file"
    assert not written["scales_as_target"]
    loaded = load_drafter(tmp_path / "head", LLAMA)
    tokens, _ = speculative(LLAMA, loaded, PROMPT, 20, num_draft_tokens=5)
    assert tokens == plain(LLAMA, PROMPT, 20)


@pytest.mark.parametrize("values_are_keys", [True, False])
def test_layers_of_gemma_4(tmp_path, values_are_keys):
    """As DeepSpec saves them: a flat config of a gemma4_text model, tables of their own."""
    own = {"embed_source": "file", "lm_head_source": "file", "values_are_keys": values_are_keys}
    drafter = tiny_dspark(LLAMA, **GEMMA | own)
    ropes = {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = without(TOP, "rope_theta", "hidden_act") | {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "rope_parameters": ropes,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": 1024,
        "attention_k_eq_v": values_are_keys,
    }
    source = published(tmp_path / "source", drafter, config)
    written = convert(str(source), str(tmp_path / "head"), quantize=False)
    assert {key: written[key] for key in GEMMA if key != "values_are_keys"} == {
        key: value for key, value in GEMMA.items() if key != "values_are_keys"
    }
    assert written["values_are_keys"] == values_are_keys and written["embed_scale"] == 8.0
    loaded, text = load_drafter(tmp_path / "head", LLAMA), [*PROMPT, 5]
    begun = loaded.begin()
    features = mx.array(features_of(LLAMA, loaded.taps, text).astype(np.float32))
    begun.extend(mx.array(text[1:]), features[:-1])
    wanted = twin_logits(loaded, LLAMA, text, 6)
    assert relative(drafted_logits(begun, 6), wanted) < TOLERANCE
    table = drafter.head.embed_tokens.weight
    assert mx.allclose(loaded._embed(mx.array([7])), 8.0 * table[7])
    tokens, _ = speculative(LLAMA, loaded, PROMPT, 20, num_draft_tokens=5)
    assert tokens == plain(LLAMA, PROMPT, 20)


def test_it_is_told_by_its_matrix():
    names = [name for name, _ in tree_flatten(tiny_dspark(LLAMA).head.parameters())]
    assert recognise(names, FLAT) == "dspark"
