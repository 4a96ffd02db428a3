"""DFlash: drafts against the NumPy twin, both packagings converted, one forward per round."""

from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
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
    tiny_dflash,
    twin_logits,
)
from checkpoints import config_of, write_config, write_target
from drafter_pairs import tiny_gemma3
from grids import thorough
from helpers import PROMPT, VOCAB, byte_tokenizer, plain, speculative, tiny_llama
from mlx.utils import tree_flatten

import mlx_eagle
from mlx_eagle.convert import convert, pipeline
from mlx_eagle.convert.check_acceptance import measure_acceptance
from mlx_eagle.drafters.block_config import BlockConfig, config_from, known_tensors
from mlx_eagle.drafters.dflash import DFlashHead
from mlx_eagle.drafters.kinds import load_drafter, recognise
from mlx_eagle.drafters.tree import CHAINS, chains_for

LLAMA, TOKENIZER = tiny_llama(num_hidden_layers=6), byte_tokenizer()
FORMS = {
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
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_after_a_prompt_and_after_acceptance(form):
    compare_rounds(tiny_dflash(LLAMA, **FORMS[form]), LLAMA)


@pytest.mark.parametrize(
    "form",
    thorough(
        ["plain", "window from each query", "a token from the anchor's slot"],
        "window from each query",
    ),
)
def test_a_draft_window(form):
    """The newest tokens alone are seen, and a head's own window may be shorter still."""
    drafter = tiny_dflash(LLAMA, **FORMS[form])
    assert drafter.with_draft_window(None) is drafter
    narrow = drafter.with_draft_window(4)
    c = narrow.head.config
    assert c.windows == (4, 4) and c.num_layers == 2
    assert c.window_from == ("query" if form.startswith("window") else "anchor")
    compare_rounds(narrow, LLAMA)
    text = [*PROMPT, 5]
    whole, cut = (twin_logits(each, LLAMA, text, 4) for each in (drafter, narrow))
    assert relative(whole, cut) > 0.01  # and the whole one is as it was
    tokens, _ = speculative(LLAMA, narrow, PROMPT, 12, num_draft_tokens=3)
    assert tokens == plain(LLAMA, PROMPT, 12)
    made = mlx_eagle.batch_generate(
        LLAMA, TOKENIZER, PROMPTS, return_token_ids=True, draft_model=narrow, max_tokens=12
    )
    assert made.token_ids == [plain(LLAMA, prompt, 12) for prompt in PROMPTS]
    with pytest.raises(ValueError, match=r"^the draft window is 0: give"):
        drafter.with_draft_window(0)


@pytest.fixture(scope="module")
def learned():
    return learned_head(LLAMA, "dflash")


@pytest.mark.parametrize("k", [2, 6])
@pytest.mark.parametrize("packaging", ["dflash", "muse"])
def test_a_head_that_knows_the_text(packaging, k):
    learned = learned_head(LLAMA, packaging)
    tokens, stats = speculative(LLAMA, learned, PROMPT, 22, num_draft_tokens=k)
    assert tokens == plain(LLAMA, PROMPT, 22)
    assert stats.tau >= 0.9 * (k + 1)
    assert stats.num_head_forwards == stats.num_rounds


def test_auto_chooses_among_what_a_block_holds(learned):
    assert chains_for(None) == CHAINS and chains_for(0) == ()
    assert [shape.size for shape in chains_for(4)] == [1, 2, 3, 4]
    assert [shape.size for shape in chains_for(15)] == [*range(1, 8), 9, 11, 13, 15]
    tokens, stats = speculative(LLAMA, learned, PROMPT, 25, num_draft_tokens="auto")
    assert tokens == plain(LLAMA, PROMPT, 25) and stats.num_drafted > 0


def test_drafts_are_no_longer_than_a_block(learned):
    _, stats = speculative(LLAMA, learned, PROMPT, 25, num_draft_tokens=12)
    assert stats.num_drafted <= 6 * stats.num_rounds


def test_batches_share_forwards_and_accept_as_each_request_alone(learned):
    options = {"draft_model": learned, "num_draft_tokens": 4, "max_tokens": 20}
    made = mlx_eagle.batch_generate(LLAMA, TOKENIZER, PROMPTS, return_token_ids=True, **options)
    for prompt, tokens, stats in zip(PROMPTS, made.token_ids, made.stats, strict=True):
        alone, own = speculative(LLAMA, learned, prompt, 20, num_draft_tokens=4)
        assert tokens == alone == plain(LLAMA, prompt, 20)
        assert stats.num_accepted >= own.num_accepted - 2


# What --check says of it


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
def test_check_measures_acceptance(learned, target, tmp_path, capsys):
    source = published(tmp_path / "source", learned, FLAT)
    options = {"target": target, "check": True, "quantize": False}
    found = convert(str(source), str(tmp_path / "head"), **options)["check"]
    assert found["winner"] == "as resolved" and found["mean_acceptance_length"] > 4
    assert len(found["acceptance_by_position"]) == 6 and found["num_prompts"] == 2
    names = {"taps -1", "slot 0 drafts first", "causal", "raw embeddings"}
    assert names < found["readings"].keys() and "taps +1" not in found["readings"]
    assert found["readings"]["slot 0 drafts first"] < 2
    assert config_of(tmp_path / "head")["check"] == found
    assert "winner: as resolved" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_check_says_which_reading_fits_better(learned, target, tmp_path, capsys):
    config = FLAT | {"sample_from_anchor": True}
    source = published(tmp_path / "source", learned, config)
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


# As published


LAYER = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
}
FLAT = {
    **LAYER,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 7,
    "dflash_config": {"mask_token_id": 11, "target_layer_ids": [0, 5]},
    "num_target_layers": 6,
}
NESTED = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYER | {"model_type": "qwen3"},
    "aux_hidden_state_layer_ids": [1, 6],
    "mask_token_id": 11,
    "block_size": 7,
    "draft_vocab_size": VOCAB,
    "sample_from_anchor": False,
}


@pytest.mark.parametrize("form", ["flat", "nested"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_both_packagings_convert_to_the_same(tmp_path, form, prefix):
    drafter = tiny_dflash(LLAMA)
    config = FLAT if form == "flat" else NESTED
    source = published(tmp_path / "source", drafter, config, prefix)
    written = convert(str(source), str(tmp_path / "head"), quantize=False)
    assert written["kind"] == "dflash"
    loaded = load_drafter(tmp_path / "head", LLAMA)
    assert loaded.taps == drafter.taps == (1, 6)
    assert speculative(LLAMA, loaded, PROMPT, 20, num_draft_tokens=3)[0] == plain(
        LLAMA, PROMPT, 20
    )
    text = [*PROMPT, 5]
    features = mx.array(features_of(LLAMA, loaded.taps, text).astype(np.float32))
    begun = loaded.begin()
    begun.extend(mx.array(text[1:]), features[:-1])
    assert relative(drafted_logits(begun, 5), twin_logits(drafter, LLAMA, text, 5)) < TOLERANCE


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_embeddings_are_scaled_as_the_target_scales_its_own(tmp_path, form):
    """Gemma multiplies by sqrt(h); heads of speculators were trained on the raw rows."""
    gemma = tiny_gemma3()
    config = FLAT if form == "flat" else NESTED
    key = "target_layer_ids" if form == "flat" else "aux_hidden_state_layer_ids"
    ids = {key: [0, 2]}
    config = config | ({"dflash_config": FLAT["dflash_config"] | ids} if form == "flat" else ids)
    drafter = tiny_dflash(gemma)
    source = published(tmp_path / "source", drafter, config)
    convert(str(source), str(tmp_path / "head"), quantize=False)
    loaded = load_drafter(tmp_path / "head", gemma)
    raw = gemma.model.embed_tokens(mx.array([5, 9]))
    scale = 8.0 if form == "flat" else 1.0
    assert mx.allclose(loaded._embed(mx.array([5, 9])), scale * raw, rtol=1e-4)
    assert mx.allclose(
        load_embed(tmp_path, LLAMA)(mx.array([3])), LLAMA.model.embed_tokens.weight[3]
    )
    tokens, _ = speculative(gemma, loaded, PROMPT, 20, num_draft_tokens=4)
    assert tokens == plain(gemma, PROMPT, 20)


def load_embed(folder: Path, target):
    """The embedding of a flat head for a target that scales nothing."""
    source = published(folder / "other", tiny_dflash(target), FLAT)
    convert(str(source), str(folder / "other head"), quantize=False)
    return load_drafter(folder / "other head", target)._embed


def test_an_assistant_of_muse_is_one(tmp_path):
    """Other names for two tensors, defaults that its config leaves out, a window to both sides."""
    drafter = tiny_dflash(LLAMA)
    weights = {
        n: a for n, a in tree_flatten(drafter.head.parameters()) if n[:2] not in ("fc", "hi")
    }
    weights["encoder.fc.weight"] = drafter.head.fc.weight
    weights["encoder.output_norm_enc.weight"] = drafter.head.hidden_norm.weight
    source = tmp_path / "source"
    source.mkdir()
    mx.save_safetensors(str(source / "model.safetensors"), weights)
    said = {"target_layer_ids": [0, 5], "mask_token_id": 11, "sliding_window": 9}
    write_config(source, {"model_type": "muse_glimmer_assistant", "vocab_size": VOCAB} | said)
    written = convert(str(source), str(tmp_path / "head"), quantize=False)
    assert written["windows"] == (10, 10) and written["causal_layers"] == ()
    assert written["block_size"] == 16 and written["rope_theta"] == 5e5
    assert not written["scales_as_target"]
    loaded, text = load_drafter(tmp_path / "head", LLAMA).begin(), [*PROMPT, 5, 7, 1, 4, 9, 30]
    features = mx.array(features_of(LLAMA, loaded.taps, text).astype(np.float32))
    loaded.extend(mx.array(text[1:]), features[:-1])
    assert relative(drafted_logits(loaded, 9), twin_logits(loaded, LLAMA, text, 9)) < TOLERANCE


def test_four_bits(tmp_path):
    drafter = tiny_dflash(LLAMA)
    source = published(tmp_path / "source", drafter, FLAT)
    written = convert(str(source), str(tmp_path / "head"), q_group_size=32)
    assert written["quantization"]["bits"] == 4
    loaded = load_drafter(tmp_path / "head", LLAMA)
    assert isinstance(loaded.head.fc, nn.QuantizedLinear)
    tokens, _ = speculative(LLAMA, loaded, PROMPT, 20, num_draft_tokens=4)
    assert tokens == plain(LLAMA, PROMPT, 20)


def test_a_reduced_vocabulary(tmp_path):
    """Every second token can be drafted; d2t holds offsets."""
    drafter = tiny_dflash(LLAMA, lm_head_source="file", draft_vocab_size=VOCAB // 2)
    offsets = mx.arange(VOCAB // 2, dtype=mx.int64)
    marked = mx.arange(VOCAB) % 2 == 0
    source = published(tmp_path / "source", drafter, NESTED, more={"d2t": offsets, "t2d": marked})
    convert(str(source), str(tmp_path / "head"), quantize=False)
    loaded = load_drafter(tmp_path / "head", LLAMA).begin()
    features = mx.array(features_of(LLAMA, loaded.taps, PROMPT).astype(np.float32))
    loaded.extend(mx.array(PROMPT[1:]), features[:-1])
    drafted = loaded.propose(6, lambda logits, ids: mx.argmax(logits, axis=-1)).tokens
    states = Twin(loaded.head).states(
        np.array(features[:-1], np.float64),
        np.array(loaded._embed(mx.array([PROMPT[-1], *[11] * 6])), np.float64),
    )
    head = np.array(loaded.head.lm_head.weight, np.float64)
    assert drafted.tolist() == (2 * (states[1:] @ head.T).argmax(axis=-1)).tolist()


RULES = {
    # config keys -> windows, where from, causal layers
    "nothing said": (FLAT, {}, ((), "query", ())),
    "z-lab, sliding": (
        FLAT,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
        ((9, 0), "query", (0,)),
    ),
    "z-lab, not causal": (
        FLAT,
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "is_causal": False},
        ((9, 9), "query", ()),
    ),
    "z-lab, causal": (FLAT, {"is_causal": True}, ((), "query", (0, 1))),
    "a window that is turned off": (
        FLAT,
        {
            "layer_types": ["sliding_attention"] * 2,
            "sliding_window": 9,
            "use_sliding_window": False,
        },
        ((), "query", ()),
    ),
    "ModelOpt": (
        FLAT,
        {"dflash_config": FLAT["dflash_config"] | {"use_swa": True, "swa_window_size": 8}},
        ((8, 8), "query", ()),
    ),
    "speculators, sliding": (
        NESTED,
        {
            "transformer_layer_config": NESTED["transformer_layer_config"]
            | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}
        },
        ((0, 9), "anchor", (1,)),
    ),
    "speculators, not causal": (
        NESTED,
        {
            "sliding_window_non_causal": True,
            "transformer_layer_config": NESTED["transformer_layer_config"]
            | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9},
        },
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
    base, changes, wanted = RULES[rule]
    made = config_from(known_tensors(tensors_of(tiny_dflash(LLAMA))), base | changes)
    assert (made.windows, made.window_from, made.causal_layers) == wanted


def test_what_packagings_say_otherwise():
    tensors = tensors_of(tiny_dflash(LLAMA))
    flat, nested = config_from(tensors, FLAT), config_from(tensors, NESTED)
    assert flat.taps == nested.taps == (1, 6)
    assert flat.scales_as_target and not nested.scales_as_target
    assert flat.longest_draft == nested.longest_draft == 6
    assert config_from(tensors, NESTED | {"sample_from_anchor": True}).longest_draft == 7
    for number, longest in ((7, 7), (6, 6), (3, 6)):  # what it was evaluated with, if it can be
        said = {"proposal_methods": [{"speculative_tokens": number}]}
        made = config_from(tensors, NESTED | {"speculators_config": said})
        assert made.longest_draft == longest
    scaled = FLAT["dflash_config"] | {"input_embedding_scale": 0.5, "target_layer_ids": [-1, 2]}
    made = config_from(tensors, FLAT | {"dflash_config": scaled})
    assert made.embed_scale == 0.5 and made.taps == (0, 3)
    noise = {
        "rope_parameters": {"rope_theta": 5e5, "mrope_section": [1, 2], "rope_type": "default"}
    }
    assert config_from(tensors, FLAT | noise | {"partial_rotary_factor": 0.25}).rope_theta == 5e5
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192}
    assert config_from(tensors, FLAT | {"rope_scaling": yarn}).rope_scaling == yarn


def without(config: dict, *keys: str) -> dict:
    return {key: value for key, value in config.items() if key not in keys}


REFUSED = {
    "no mask": (
        without(FLAT, "dflash_config") | {"target_layer_ids": [0, 5]},
        {},
        "mask_token_id",
    ),
    "no taps": (FLAT | {"dflash_config": {"mask_token_id": 11}}, {}, "target_layer_ids"),
    "another number of taps": (
        FLAT | {"dflash_config": {"mask_token_id": 11, "target_layer_ids": [0, 1, 2]}},
        {},
        "fc.weight of 64 x 128, expected 64 x 192",
    ),
    "no blocks": (without(FLAT, "block_size"), {}, "block_size"),
    "a mask beyond the vocabulary": (
        FLAT | {"dflash_config": {"mask_token_id": VOCAB, "target_layer_ids": [0, 5]}},
        {},
        f"masks with token {VOCAB}",
    ),
    "a mask that is none": (
        FLAT | {"dflash_config": {"mask_token_id": "x", "target_layer_ids": [0, 5]}},
        {},
        'dflash_config.mask_token_id is "x"',
    ),
    "a rope of its own": (FLAT | {"rope_scaling": {"type": "spiral", "factor": 2}}, {}, "spiral"),
    "a tensor more": (FLAT, {"layers.0.self_attn.g_proj.weight": mx.ones((4, 4))}, "g_proj"),
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


def test_a_missing_tensor(tmp_path):
    drafter = tiny_dflash(LLAMA)
    source = published(tmp_path / "source", drafter, FLAT)
    weights = mx.load(str(source / "model.safetensors"))
    del weights["layers.1.mlp.up_proj.weight"]
    mx.save_safetensors(str(source / "model.safetensors"), weights)
    with pytest.raises(ValueError, match=r"lacks layers\.1\.mlp\.up_proj\.weight"):
        convert(str(source), str(tmp_path / "head"))


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
    folder = tmp_path / "head"
    folder.mkdir()
    weights = dict(tree_flatten(drafter.head.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    write_config(folder, config.to_dict() | {"kind": "dflash"})
    target = tiny_llama(num_hidden_layers=1) if "num_hidden_layers" in changes else LLAMA
    with pytest.raises(ValueError, match=words):
        load_drafter(folder, target)


def test_it_is_told_from_eagle():
    names = [name for name, _ in tree_flatten(tiny_dflash(LLAMA).head.parameters())]
    assert recognise(names, FLAT) == "dflash"
    assert recognise([f"model.{name}" for name in names], {"model_type": "qwen3"}) == "dflash"
    assert isinstance(tiny_dflash(LLAMA).head, DFlashHead)
