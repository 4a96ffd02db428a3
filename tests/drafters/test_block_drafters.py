"""DFlash, DFlash2 and DSpark: drafts against the NumPy twin, and every published packaging.

First what the three promise alike, then what is special to each.
"""

from copy import copy
from dataclasses import replace
from functools import cache, partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from block_twin import (
    DFLASH2,
    FLAT,
    INSIDE,
    LAYERS,
    NESTED,
    PROMPTS,
    TOLERANCE,
    Twin,
    after,
    compare_rounds,
    features_of,
    is_as_twin,
    learned_head,
    published,
    relative,
    sigmoid,
    tiny_dflash,
    tiny_dflash2,
    tiny_dspark,
    twin_logits,
)
from checkpoints import config_of, without, write_target
from costs import SettledCosts, curve
from drafter_pairs import tiny_gemma3
from grids import thorough
from helpers import PROMPT, VOCAB, byte_tokenizer, plain, speculative, tiny_llama
from mlx.utils import tree_flatten

import mlx_eagle
from mlx_eagle.convert import convert, pipeline
from mlx_eagle.convert.check import measure_acceptance
from mlx_eagle.decoding import generate_step
from mlx_eagle.drafters import dspark
from mlx_eagle.drafters.base import Draft
from mlx_eagle.drafters.block_config import BlockConfig, config_from, known_tensors
from mlx_eagle.drafters.kind import LoadOptions
from mlx_eagle.drafters.kinds import kind_of, load_drafter, recognise
from mlx_eagle.drafters.tree import CHAINS, chains_for
from mlx_eagle.system.hub import locate

LLAMA, TOKENIZER = tiny_llama(num_hidden_layers=6), byte_tokenizer()
TEXT = [*PROMPT, 5]
TINY = {"dflash": tiny_dflash, "dflash2": tiny_dflash2, "dspark": tiny_dspark}
GEMMA = {
    "is_gemma": True,
    "values_are_keys": True,
    "hidden_act": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_scaling": {"type": "proportional", "partial_rotary_factor": 0.25, "factor": 1.0},
    "logit_softcap": 30.0,
}
SHAPES = {
    "dflash": {
        "plain": {},
        "three layers, five taps": {"num_layers": 3, "taps": (0, 1, 2, 3, 3)},
        "window from each query": {"windows": (5, 0)},
        "window before the anchor": {"windows": (5, 3), "window_from": "anchor"},
        "causal window": {"windows": (6, 6), "causal_layers": (0, 1)},
        "causal window before the anchor": {
            "windows": (4, 0),
            "window_from": "anchor",
            "causal_layers": (0,),
        },
        "causal everywhere": {"causal_layers": (0, 1)},
        "biases": {"attention_bias": True},
        "sinks": {"has_sinks": True},
        "neighbouring channels turned": {"rope_traditional": True, "rope_theta": 500.0},
        "capped logits": {"logit_softcap": 2.0},
        "a token from the anchor's slot": {"first_slot": 0},
    },
    "dflash2": {
        "plain": {},
        "longer kernels": {"kernel_size": 4, "group_size": 8},
        "a multiplier and a cap": {"output_multiplier": 0.2, "logit_softcap": 3.0},
        "all candidates": {"top_k": 96},
        "from the anchor": {"first_slot": 0},
        "windows": {"windows": (5, 5)},
    },
    "dspark": {
        "vanilla": {},
        "gated": {"markov_kind": "gated"},
        "rnn": {"markov_kind": "rnn"},
        "the anchor's slot not used": {"first_slot": 1},
        "windows and sinks": {"windows": (5, 0), "causal_layers": (0,), "has_sinks": True},
        "Gemma 4": GEMMA,
        "Gemma 4, values of their own": GEMMA | {"values_are_keys": False},
        "capped before the correction": {"logit_softcap": 2.0},
    },
}
EVERY_SHAPE = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]


@pytest.mark.parametrize("kind, shape", EVERY_SHAPE)
def test_logits_after_a_prompt_and_after_acceptance(kind, shape):
    compare_rounds(TINY[kind](LLAMA, **SHAPES[kind][shape]), LLAMA)


learned = cache(partial(learned_head, LLAMA))


@pytest.mark.parametrize("k", [2, None])
@pytest.mark.parametrize("packaging", ["dflash", "muse", "dflash2", "dspark", "liquid"])
def test_a_head_that_knows_the_text(packaging, k):
    """Drafts of two tokens, and of a whole block."""
    drafter = learned(packaging)
    num_tokens, k = 1 + 3 * (drafter.longest_draft + 1), k or drafter.longest_draft
    tokens, stats = speculative(LLAMA, drafter, PROMPT, num_tokens, num_draft_tokens=k)
    assert tokens == plain(LLAMA, PROMPT, num_tokens)
    assert stats.tau >= 0.9 * (k + 1)
    assert stats.num_head_forwards == stats.num_rounds


@pytest.mark.parametrize("kind", thorough(TINY, "dflash", "dspark"))
def test_batches_share_forwards_and_accept_as_each_request_by_itself(kind):
    options = {"draft_model": learned(kind), "num_draft_tokens": 4, "max_tokens": 20}
    made = mlx_eagle.batch_generate(LLAMA, TOKENIZER, PROMPTS, return_token_ids=True, **options)
    for prompt, tokens, stats in zip(PROMPTS, made.token_ids, made.stats, strict=True):
        single, own = speculative(LLAMA, learned(kind), prompt, 20, num_draft_tokens=4)
        assert tokens == single == plain(LLAMA, prompt, 20)
        assert stats.num_accepted >= own.num_accepted - 2


@pytest.mark.parametrize("rule", ["match", "coupled", "reject"])
@pytest.mark.parametrize("kind", thorough(["dflash2", "dspark"], "dspark"))
def test_sampled_texts(kind, rule):
    """DFlash2 draws drafts among its candidates only: q is 0 for all other tokens."""
    sampler = mlx_eagle.Sampling(temp=0.8, seed=5)
    options = {"num_draft_tokens": 4, "sampler": sampler, "acceptance": rule}
    tokens, stats = speculative(LLAMA, learned(kind), PROMPT, 15, **options)
    assert len(tokens) == 15 and stats.num_drafted > 0


DEEPSPEC = {
    **LAYERS,
    "architectures": ["Qwen3DSparkModel"],
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
    "dflash_config": INSIDE | {"projector_type": "dspark"},
}
TWO = ("dflash2", {"output_multiplier": 0.5})
TWO_NESTED = {"speculators_model_type": "dflash2", "selector_top_k": 5, "output_multiplier": 0.5}
PACKAGINGS = {
    # kind, settings of the head, published config, prefix of its tensors, what is written
    "flat": ("dflash", {}, FLAT, "", {}),
    "flat, prefixed": ("dflash", {}, FLAT, "model.", {}),
    "nested": ("dflash", {}, NESTED, "", {}),
    "nested, prefixed": ("dflash", {}, NESTED, "model.", {}),
    "DFlash2, flat": (*TWO, DFLASH2, "", {"kernel_size": 2}),
    "DFlash2, nested": (*TWO, NESTED | TWO_NESTED, "", {"kernel_size": 2}),
}
for markov in ("vanilla", "gated", "rnn"):
    said = {"markov_kind": markov}
    PACKAGINGS |= {
        f"DeepSpec, {markov}": ("dspark", said | {"first_slot": 0}, DEEPSPEC, "", said),
        f"speculators, {markov}": ("dspark", said | {"first_slot": 1}, SPECULATORS, "", said),
        f"SpecForge, {markov}": ("dspark", said | {"first_slot": 0}, SPECFORGE, "", said),
    }


@pytest.mark.parametrize("packaging", PACKAGINGS)
def test_packagings_convert_to_the_same(tmp_path, packaging):
    kind, settings, config, prefix, wanted = PACKAGINGS[packaging]
    drafter = TINY[kind](LLAMA, **settings)
    source = published(tmp_path / "source", drafter, config, prefix)
    written = convert(str(source), str(tmp_path / "head"), quantize=False)
    assert written.items() >= ({"kind": kind} | wanted).items()
    loaded = load_drafter(tmp_path / "head", LLAMA)
    assert loaded.taps == drafter.taps == (1, 6)
    tokens, _ = speculative(LLAMA, loaded, PROMPT, 20, num_draft_tokens=3)
    assert tokens == plain(LLAMA, PROMPT, 20)
    assert is_as_twin(loaded, LLAMA, TEXT, 6, twin=drafter)


@pytest.mark.parametrize("kind", TINY)
def test_each_kind_is_told_by_its_tensors(kind):
    names = [name for name, _ in tree_flatten(TINY[kind](LLAMA).head.parameters())]
    assert recognise(names, FLAT) == kind
    assert recognise([f"model.{name}" for name in names], {"model_type": "qwen3"}) == kind


@pytest.mark.parametrize(
    "kind, when", [("dflash", "converted"), ("dflash2", "converted"), ("dflash2", "loaded")]
)
def test_four_bits(tmp_path, kind, when):
    """All matrices but what makes kernels, and the selector."""
    config = DFLASH2 if kind == "dflash2" else FLAT
    source = published(tmp_path / "source", TINY[kind](LLAMA), config)
    options = {"q_group_size": 32} if when == "converted" else {"quantize": False}
    written = convert(str(source), str(tmp_path / "head"), **options)
    assert when == "loaded" or written["quantization"]["bits"] == 4
    bits = {"quantize_bits": 4, "quantize_group_size": 32} if when == "loaded" else {}
    folder = locate(str(tmp_path / "head"), ())
    row, config = kind_of(folder)
    loaded = row.load(folder, config, LLAMA, LoadOptions(**bits))
    assert isinstance(loaded.head.fc, nn.QuantizedLinear)
    assert isinstance(loaded.head.layers[0].mlp.up_proj, nn.QuantizedLinear)
    if kind == "dflash2":
        assert type(loaded.head.layers[0].mlp_conv.kernel_projection) is nn.Linear
        assert type(loaded.head.candidate_selector.hidden_projection) is nn.Linear
    tokens, _ = speculative(LLAMA, loaded, PROMPT, 20, num_draft_tokens=4)
    assert tokens == plain(LLAMA, PROMPT, 20)


# DFlash: how long a draft is


@pytest.mark.parametrize(
    "shape",
    thorough(
        ["plain", "window from each query", "a token from the anchor's slot"],
        "window from each query",
    ),
)
def test_a_draft_window(shape):
    """Only the newest tokens are seen, and a head's own window may be shorter still."""
    drafter = tiny_dflash(LLAMA, **SHAPES["dflash"][shape])
    assert drafter.with_draft_window(None) is drafter
    narrow = drafter.with_draft_window(4)
    c = narrow.head.config
    assert c.windows == (4, 4) and c.num_layers == 2
    assert c.window_from == ("query" if shape.startswith("window") else "anchor")
    compare_rounds(narrow, LLAMA)
    whole, cut = (twin_logits(each, LLAMA, TEXT, 4) for each in (drafter, narrow))
    assert relative(whole, cut) > 0.01  # and the whole one is as it was
    tokens, _ = speculative(LLAMA, narrow, PROMPT, 12, num_draft_tokens=3)
    assert tokens == plain(LLAMA, PROMPT, 12)
    made = mlx_eagle.batch_generate(
        LLAMA, TOKENIZER, PROMPTS, return_token_ids=True, draft_model=narrow, max_tokens=12
    )
    assert made.token_ids == [plain(LLAMA, prompt, 12) for prompt in PROMPTS]
    with pytest.raises(ValueError, match=r"^the draft window is 0: give"):
        drafter.with_draft_window(0)


def test_auto_chooses_among_what_a_block_holds():
    assert chains_for(None) == CHAINS and chains_for(0) == ()
    assert [shape.size for shape in chains_for(4)] == [1, 2, 3, 4]
    assert [shape.size for shape in chains_for(15)] == [*range(1, 8), 9, 11, 13, 15]
    tokens, stats = speculative(LLAMA, learned("dflash"), PROMPT, 25, num_draft_tokens="auto")
    assert tokens == plain(LLAMA, PROMPT, 25) and stats.num_drafted > 0


def test_drafts_are_no_longer_than_a_block():
    _, stats = speculative(LLAMA, learned("dflash"), PROMPT, 25, num_draft_tokens=12)
    assert stats.num_drafted <= 6 * stats.num_rounds


# DFlash: what --check says of it


class Tokenizer:
    """Reads a number as the prompt of that number."""

    has_chat_template, eos_token_ids = False, ()

    def encode(self, text: str) -> list[int]:
        return PROMPTS[int(text)]


@pytest.fixture
def target(tmp_path, monkeypatch) -> str:
    """A folder for the converter; the model is LLAMA, asked for what the head has learnt."""
    short = partial(measure_acceptance, questions=("0", "1"), num_tokens=20)
    monkeypatch.setattr(pipeline, "measure_acceptance", short)
    monkeypatch.setattr(pipeline, "load_model", lambda *_: (LLAMA, Tokenizer()))
    sizes = {"hidden_size": 64, "num_hidden_layers": 6, "vocab_size": VOCAB}
    return str(write_target(tmp_path / "target", **sizes))


@pytest.mark.exhaustive
def test_check_measures_acceptance(target, tmp_path, capsys):
    source = published(tmp_path / "source", learned("dflash"), FLAT)
    options = {"target": target, "check": True, "quantize": False}
    found = convert(str(source), str(tmp_path / "head"), **options)["check"]
    assert found["winner"] == "as resolved" and found["tau"] > 4
    assert len(found["agreement"]) == 6 and found["num_prompts"] == 2
    names = {"taps -1", "slot 0 drafts first", "causal", "raw embeddings"}
    readings = found["alternatives"]
    assert names < readings.keys() and "taps +1" not in readings
    assert readings["slot 0 drafts first"]["tau"] < 2
    assert config_of(tmp_path / "head")["check"] == found
    assert "winner: as resolved" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_check_says_which_reading_fits_better(target, tmp_path, capsys):
    config = FLAT | {"sample_from_anchor": True}
    source = published(tmp_path / "source", learned("dflash"), config)
    options = {"target": target, "check": True, "quantize": False}
    found = convert(str(source), str(tmp_path / "head"), **options)["check"]
    assert found["winner"] == "slot 1 drafts first"
    said = capsys.readouterr().out
    assert "set first_slot to 1 in the config.json of the converted folder" in said


def test_a_target_it_was_not_made_for_is_told_while_converting(target, tmp_path):
    drafter = tiny_dflash(tiny_llama(hidden_size=32))
    source = published(tmp_path / "source", drafter, FLAT | {"hidden_size": 32})
    with pytest.raises(ValueError, match="target of hidden size 32, but this target's is 64"):
        convert(str(source), str(tmp_path / "head"), target=target)
    assert not (tmp_path / "head").exists()


# DFlash: how published files are read


@pytest.mark.parametrize(
    "changes, scale",
    [
        (FLAT | {"dflash_config": INSIDE | {"target_layer_ids": [0, 2]}}, 8.0),
        (NESTED | {"aux_hidden_state_layer_ids": [0, 2]}, 1.0),
    ],
    ids=["flat", "nested"],
)
def test_embeddings_are_scaled_as_the_target_scales_its_own(tmp_path, changes, scale):
    """Gemma multiplies by sqrt(h); heads of speculators were trained on the raw rows."""
    gemma = tiny_gemma3()
    source = published(tmp_path / "source", tiny_dflash(gemma), changes)
    convert(str(source), str(tmp_path / "head"), quantize=False)
    loaded = load_drafter(tmp_path / "head", gemma)
    raw = gemma.model.embed_tokens(mx.array([5, 9]))
    assert mx.allclose(loaded._embed(mx.array([5, 9])), scale * raw, rtol=1e-4)
    tokens, _ = speculative(gemma, loaded, PROMPT, 20, num_draft_tokens=4)
    assert tokens == plain(gemma, PROMPT, 20)


def test_embeddings_are_raw_where_the_target_scales_nothing(tmp_path):
    source = published(tmp_path / "source", tiny_dflash(LLAMA), FLAT)
    convert(str(source), str(tmp_path / "head"), quantize=False)
    embed = load_drafter(tmp_path / "head", LLAMA)._embed
    assert mx.allclose(embed(mx.array([3])), LLAMA.model.embed_tokens.weight[3])


def test_an_assistant_of_muse_is_one(tmp_path):
    """Other names for two tensors, defaults that its config leaves out, a window to both sides."""
    drafter = tiny_dflash(LLAMA)
    renamed = {
        "fc.weight": None,
        "hidden_norm.weight": None,
        "encoder.fc.weight": drafter.head.fc.weight,
        "encoder.output_norm_enc.weight": drafter.head.hidden_norm.weight,
    }
    said = {"target_layer_ids": [0, 5], "mask_token_id": 11, "sliding_window": 9}
    config = {"model_type": "muse_glimmer_assistant", "vocab_size": VOCAB} | said
    source = published(tmp_path / "source", drafter, config, more=renamed)
    written = convert(str(source), str(tmp_path / "head"), quantize=False)
    assert written["windows"] == (10, 10) and written["causal_layers"] == ()
    assert written["block_size"] == 16 and written["rope_theta"] == 5e5
    assert not written["scales_as_target"]
    loaded = load_drafter(tmp_path / "head", LLAMA)
    assert is_as_twin(loaded, LLAMA, [*TEXT, 7, 1, 4, 9, 30], 9)


def test_a_reduced_vocabulary(tmp_path):
    """Every second token can be drafted; d2t holds offsets."""
    drafter = tiny_dflash(LLAMA, lm_head_source="file", draft_vocab_size=VOCAB // 2)
    offsets = mx.arange(VOCAB // 2, dtype=mx.int64)
    marked = mx.arange(VOCAB) % 2 == 0
    source = published(tmp_path / "source", drafter, NESTED, more={"d2t": offsets, "t2d": marked})
    convert(str(source), str(tmp_path / "head"), quantize=False)
    loaded = after(load_drafter(tmp_path / "head", LLAMA), LLAMA, PROMPT)
    drafted = loaded.propose(6, lambda logits, ids: mx.argmax(logits, axis=-1)).tokens
    hidden = Twin(loaded.head).states(
        features_of(LLAMA, loaded.taps, PROMPT)[:-1],
        np.array(loaded._embed(mx.array([PROMPT[-1], *[11] * 6])), np.float64),
    )
    head = np.array(loaded.head.lm_head.weight, np.float64)
    assert drafted.tolist() == (2 * (hidden[1:] @ head.T).argmax(axis=-1)).tolist()


def sliding(*which: str, **more: object) -> dict:
    return {"layer_types": [f"{name}_attention" for name in which], "sliding_window": 9} | more


def in_layers(**more: object) -> dict:
    return {"transformer_layer_config": LAYERS | more}


RULES = {
    # config -> windows, where from, causal layers
    "nothing said": (FLAT, ((), "query", ())),
    "z-lab, sliding": (FLAT | sliding("sliding", "full"), ((9, 0), "query", (0,))),
    "z-lab, not causal": (
        FLAT | sliding("sliding", "sliding", is_causal=False),
        ((9, 9), "query", ()),
    ),
    "z-lab, causal": (FLAT | {"is_causal": True}, ((), "query", (0, 1))),
    "a window that is turned off": (
        FLAT | sliding("sliding", "sliding", use_sliding_window=False),
        ((), "query", ()),
    ),
    "ModelOpt": (
        FLAT | {"dflash_config": INSIDE | {"use_swa": True, "swa_window_size": 8}},
        ((8, 8), "query", ()),
    ),
    "speculators, sliding": (
        NESTED | in_layers(**sliding("full", "sliding")),
        ((0, 9), "anchor", (1,)),
    ),
    "speculators, not causal": (
        NESTED | {"sliding_window_non_causal": True} | in_layers(**sliding("sliding", "sliding")),
        ((9, 9), "anchor", ()),
    ),
}


class Shaped:
    """A tensor of which only the shape is asked for."""

    def __init__(self, shape):
        self.shape = shape


def tensors_of(drafter) -> dict:
    return {n: Shaped(a.shape) for n, a in tree_flatten(drafter.head.parameters())}


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_sliding_layers(rule):
    config, wanted = RULES[rule]
    made = config_from(known_tensors(tensors_of(tiny_dflash(LLAMA))), config)
    assert (made.windows, made.window_from, made.causal_layers) == wanted


def proposing(number: int) -> dict:
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": number}]}}


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192}


def test_what_packagings_say_otherwise():
    tensors = tensors_of(tiny_dflash(LLAMA))
    flat, nested = config_from(tensors, FLAT), config_from(tensors, NESTED)
    assert flat.taps == nested.taps == (1, 6)
    assert flat.scales_as_target and not nested.scales_as_target
    assert flat.longest_draft == nested.longest_draft == 6
    assert config_from(tensors, NESTED | {"sample_from_anchor": True}).longest_draft == 7
    for number, longest in ((7, 7), (6, 6), (3, 6)):  # what it was evaluated with, if it can be
        assert config_from(tensors, NESTED | proposing(number)).longest_draft == longest
    scaled = INSIDE | {"input_embedding_scale": 0.5, "target_layer_ids": [-1, 2]}
    made = config_from(tensors, FLAT | {"dflash_config": scaled})
    assert made.embed_scale == 0.5 and made.taps == (0, 3)
    noise = {"rope_theta": 5e5, "mrope_section": [1, 2], "rope_type": "default"}
    ropes = {"rope_parameters": noise, "partial_rotary_factor": 0.25}
    assert config_from(tensors, FLAT | ropes).rope_theta == 5e5
    assert config_from(tensors, FLAT | {"rope_scaling": YARN}).rope_scaling == YARN


def inside(**changes: object) -> dict:
    return FLAT | {"dflash_config": INSIDE | changes}


REFUSED = {
    # config, tensors that are more or (None) less, words of the error
    "no mask": (
        without(FLAT, "dflash_config") | {"target_layer_ids": [0, 5]},
        {},
        "mask_token_id",
    ),
    "no taps": (FLAT | {"dflash_config": {"mask_token_id": 11}}, {}, "target_layer_ids"),
    "another number of taps": (
        inside(target_layer_ids=[0, 1, 2]),
        {},
        "fc.weight of 64 x 128, expected 64 x 192",
    ),
    "no blocks": (without(FLAT, "block_size"), {}, "block_size"),
    "a mask beyond the vocabulary": (
        inside(mask_token_id=VOCAB),
        {},
        f"mask_token_id {VOCAB}, vocab_size {VOCAB}",
    ),
    "a mask that is none": (
        inside(mask_token_id="x"),
        {},
        'mask_token_id is "x"',
    ),
    "a rope of its own": (FLAT | {"rope_scaling": {"type": "spiral", "factor": 2}}, {}, "spiral"),
    "a tensor more": (FLAT, {"layers.0.self_attn.g_proj.weight": mx.ones((4, 4))}, "g_proj"),
    "a tensor less": (
        FLAT,
        {"layers.1.mlp.up_proj.weight": None},
        r"lacks layers\.1\.mlp\.up_proj\.weight",
    ),
    "a reduced vocabulary without a map": (
        FLAT,
        {"lm_head.weight": mx.ones((8, 64))},
        "there is no d2t",
    ),
    "an activation": (FLAT | {"hidden_act": "relu"}, {}, "hidden_act"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    config, more, words = REFUSED[case]
    source = published(tmp_path / "source", tiny_dflash(LLAMA), config, more=more)
    with pytest.raises(ValueError, match=words) as caught:
        convert(str(source), str(tmp_path / "head"))
    assert "\n" not in str(caught.value) and not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_size": 32}, "hidden size 32"),
        ({"vocab_size": 9000}, "vocabulary of 9000"),
        ({"num_hidden_layers": 1}, "taps layers"),
    ],
)
def test_another_target(tmp_path, changes, words):
    drafter = tiny_dflash(tiny_llama(**without(changes, "num_hidden_layers")))
    config = BlockConfig.from_dict(drafter.head.config.to_dict(), "config.json")
    folder = published(tmp_path / "head", drafter, config.to_dict() | {"kind": "dflash"})
    target = tiny_llama(num_hidden_layers=1) if "num_hidden_layers" in changes else LLAMA
    with pytest.raises(ValueError, match=words):
        load_drafter(folder, target)


# DFlash2


def test_not_in_float16(tmp_path):
    """Published heads exceed its largest number between their layers."""
    source = published(tmp_path / "source", tiny_dflash2(LLAMA), DFLASH2)
    convert(str(source), str(tmp_path / "head"), quantize=False)
    half = tiny_llama(num_hidden_layers=6)
    half.set_dtype(mx.float16)
    assert load_drafter(tmp_path / "head", half).dtype == mx.bfloat16
    assert load_drafter(tmp_path / "head", LLAMA).dtype == mx.float32


# DSpark: how published files are read


SLOTS = {
    "DeepSpec": (DEEPSPEC, 0),
    "SpecForge": (SPECFORGE, 0),
    "old speculators": (SPECULATORS, 1),
    "from the anchor": (SPECULATORS | {"sample_from_anchor": True}, 0),
    "not from the anchor": (DEEPSPEC | {"sample_from_anchor": False}, 1),
    "the anchor is counted": (SPECFORGE | {"dspark_bonus_anchor": True}, 1),
    "as many as the block": (SPECULATORS | {"sample_from_anchor": False} | proposing(7), 0),
    "one less than the block": (SPECULATORS | {"sample_from_anchor": True} | proposing(6), 1),
    "a number that does not fit": (SPECULATORS | {"sample_from_anchor": True} | proposing(3), 0),
}


@pytest.mark.parametrize("case", SLOTS)
def test_which_slot_drafts_first(case):
    config, first = SLOTS[case]
    made = dspark.config_from(tensors_of(tiny_dspark(LLAMA)), config)
    assert made.first_slot == first and made.longest_draft == 7 - first
    assert made.taps == (1, 6) and made.markov_rank == 8


def test_ropes_of_dspark():
    """Yarn is real in files of SpecForge only; Liquid turns neighbouring channels."""
    made = partial(dspark.config_from, tensors_of(tiny_dspark(LLAMA)))
    yarn = {"rope_parameters": YARN | {"rope_theta": 1e6}}
    assert made(SPECFORGE | yarn).rope_scaling == YARN
    other = made(DEEPSPEC | yarn)
    assert other.rope_scaling is None and other.rope_theta == 1e6
    assert made(FLAT | {"rope_is_neox_style": False}).rope_traditional
    assert not made(FLAT).rope_traditional


@pytest.mark.parametrize("values_are_keys", [None, True, False])
def test_own_embedding_and_output(tmp_path, values_are_keys):
    """As DeepSpec saves them: tables of their own, and a scale of its own for Gemma 4 only."""
    own = {"embed_source": "file", "lm_head_source": "file"}
    gemma = {} if values_are_keys is None else GEMMA | {"values_are_keys": values_are_keys}
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 1e4}
    config = without(DEEPSPEC, "rope_theta") | {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "layer_types": ["full_attention"] * 2,
        "sliding_window": 1024,
        "attention_k_eq_v": values_are_keys,
    }
    drafter = tiny_dspark(LLAMA, **gemma, **own)
    source = published(tmp_path / "source", drafter, config if gemma else DEEPSPEC)
    options = {"quantize": False} if gemma else {"q_bits": 8, "q_group_size": 32}
    written = convert(str(source), str(tmp_path / "head"), **options)
    assert written.items() >= (own | gemma | {"scales_as_target": False}).items()
    loaded = load_drafter(tmp_path / "head", LLAMA)
    tokens, _ = speculative(LLAMA, loaded, PROMPT, 20, num_draft_tokens=5)
    assert tokens == plain(LLAMA, PROMPT, 20)
    if gemma:
        assert written["embed_scale"] == 8.0 and is_as_twin(loaded, LLAMA, TEXT, 6)
        table = drafter.head.embed_tokens.weight
        assert mx.allclose(loaded._embed(mx.array([7])), 8.0 * table[7])


# DSpark: confidence


@pytest.mark.parametrize("fed", ["state", "markov"])
def test_confidence_is_kept_and_as_deepspec_has_it(tmp_path, fed):
    drafter = tiny_dspark(LLAMA, confidence=fed)
    source = published(tmp_path / "source", drafter, DEEPSPEC)
    assert convert(str(source), str(tmp_path / "head"), q_bits=8)["confidence"] == fed
    begun = after(drafter, LLAMA, TEXT)
    draft = begun.propose(6, lambda logits, ids: mx.argmax(logits, axis=-1))
    twin = Twin(drafter.head)
    block = np.array(drafter._embed(mx.array([TEXT[-1], *[11] * 5])), np.float64)
    rows = twin.states(features_of(LLAMA, drafter.taps, TEXT)[:-1], block)
    if fed == "markov":
        before = [TEXT[-1], *draft.tokens.tolist()[:-1]]
        rows = np.concatenate([rows, twin.w["markov_head.markov_w1.weight"][before]], axis=1)
    weight = twin.w["confidence_head.proj.weight"][0]
    wanted = sigmoid(rows @ weight + twin.w["confidence_head.proj.bias"][0])
    assert np.abs(np.array(draft.confidence) - wanted).max() < TOLERANCE


def with_confidence(drafter, chance: float):
    """The same head, with an estimate that is always this one."""
    made = drafter.begin()
    made.head = copy(drafter.head)
    made.head.config = replace(made.head.config, confidence="state")
    head = dspark.ConfidenceHead(made.head.config)
    head.proj.weight = mx.zeros_like(head.proj.weight)
    head.proj.bias = mx.array([np.log(chance / (1 - chance))])
    made.head.confidence_head = head
    return made


@pytest.mark.parametrize("rule", ["greedy", "coupled", "reject"])
@pytest.mark.parametrize("chance", [0.01, 0.99])
def test_auto_ends_drafts_where_confidence_falls_below_the_next_rows_cost(
    monkeypatch, rule, chance
):
    costs = curve(lambda k: 1.1 + 0.1 * k)
    monkeypatch.setattr(generate_step, "costs_of", lambda *_: SettledCosts(costs))
    sampling = {"top_k": 1} if rule == "reject" else {}
    sampler = None if rule == "greedy" else mlx_eagle.Sampling(temp=0.8, seed=5, **sampling)
    options = {} if rule == "greedy" else {"sampler": sampler, "acceptance": rule}
    options |= {"num_draft_tokens": "auto"}
    drafter = with_confidence(learned("dspark"), chance)
    tokens, stats = speculative(LLAMA, drafter, PROMPT, 60, **options)
    _, usual = speculative(LLAMA, learned("dspark"), PROMPT, 60, **options)
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
