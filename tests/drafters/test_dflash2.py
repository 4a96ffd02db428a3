"""DFlash2: drafts against the NumPy twin, both packagings, float16 targets."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from block_twin import (
    PROMPTS,
    TOLERANCE,
    compare_rounds,
    drafted_logits,
    features_of,
    learned_head,
    published,
    relative,
    tiny_dflash2,
    twin_logits,
)
from helpers import PROMPT, byte_tokenizer, plain, speculative, tiny_llama
from mlx.utils import tree_flatten
from test_dflash import FLAT, NESTED

import mlx_eagle
from mlx_eagle.convert import convert
from mlx_eagle.drafters.kind import LoadOptions
from mlx_eagle.drafters.kinds import kind_of, load_drafter, recognise
from mlx_eagle.system.hub import locate

LLAMA, TOKENIZER = tiny_llama(num_hidden_layers=6), byte_tokenizer()
FORMS = {
    "plain": {},
    "longer kernels": {"kernel_size": 4, "group_size": 8},
    "a multiplier and a cap": {"output_multiplier": 0.2, "logit_softcap": 3.0},
    "all candidates": {"top_k": 96},
    "from the anchor": {"first_slot": 0},
    "windows": {"windows": (5, 5)},
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_after_a_prompt_and_after_acceptance(form):
    compare_rounds(tiny_dflash2(LLAMA, **FORMS[form]), LLAMA)


@pytest.fixture(scope="module")
def learned():
    return learned_head(LLAMA, "dflash2")


@pytest.mark.parametrize("k", [2, 6])
def test_a_head_that_knows_the_text(learned, k):
    tokens, stats = speculative(LLAMA, learned, PROMPT, 22, num_draft_tokens=k)
    assert tokens == plain(LLAMA, PROMPT, 22)
    assert stats.tau >= 0.9 * (k + 1)
    assert stats.num_head_forwards == stats.num_rounds


@pytest.mark.exhaustive
def test_batches_share_forwards_and_accept_as_each_request_alone(learned):
    options = {"draft_model": learned, "num_draft_tokens": 4, "max_tokens": 20}
    made = mlx_eagle.batch_generate(LLAMA, TOKENIZER, PROMPTS, return_token_ids=True, **options)
    for prompt, tokens, stats in zip(PROMPTS, made.token_ids, made.stats, strict=True):
        alone, own = speculative(LLAMA, learned, prompt, 20, num_draft_tokens=4)
        assert tokens == alone == plain(LLAMA, prompt, 20)
        assert stats.num_accepted >= own.num_accepted - 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", ["match", "coupled", "reject"])
def test_sampled_texts(learned, rule):
    """Drafts are drawn among the candidates only: q is 0 for all other tokens."""
    sampler = mlx_eagle.Sampling(temp=0.8, seed=5)
    tokens, stats = speculative(
        LLAMA, learned, PROMPT, 15, num_draft_tokens=4, sampler=sampler, acceptance=rule
    )
    assert len(tokens) == 15 and stats.num_drafted > 0


INSIDE = FLAT["dflash_config"] | {"selector_top_k": 5, "output_multiplier": 0.5}
TWO = FLAT | {"architectures": ["DFlash2DraftModel"], "dflash_config": INSIDE}
SPECULATORS = NESTED | {
    "speculators_model_type": "dflash2",
    "selector_top_k": 5,
    "output_multiplier": 0.5,
}


@pytest.mark.parametrize("config", [TWO, SPECULATORS], ids=["flat", "nested"])
def test_packagings_convert(tmp_path, config):
    drafter = tiny_dflash2(LLAMA, output_multiplier=0.5)
    source = published(tmp_path / "source", drafter, config)
    written = convert(str(source), str(tmp_path / "head"), quantize=False)
    assert written["kind"] == "dflash2" and written["kernel_size"] == 2
    loaded, text = load_drafter(tmp_path / "head", LLAMA).begin(), [*PROMPT, 5]
    features = mx.array(features_of(LLAMA, loaded.taps, text).astype(np.float32))
    loaded.extend(mx.array(text[1:]), features[:-1])
    assert relative(drafted_logits(loaded, 6), twin_logits(drafter, LLAMA, text, 6)) < TOLERANCE


@pytest.mark.parametrize("when", ["converted", "loaded"])
def test_what_stays_floats_in_four_bits(tmp_path, when):
    source = published(tmp_path / "source", tiny_dflash2(LLAMA), TWO)
    options = {"q_group_size": 32} if when == "converted" else {"quantize": False}
    convert(str(source), str(tmp_path / "head"), **options)
    bits = {"quantize_bits": 4, "quantize_group_size": 32} if when == "loaded" else {}
    folder = locate(str(tmp_path / "head"), ())
    kind, config = kind_of(folder)
    loaded = kind.load(folder, config, LLAMA, LoadOptions(**bits))
    layer = loaded.head.layers[0]
    assert isinstance(layer.mlp.up_proj, nn.QuantizedLinear)
    assert type(layer.mlp_conv.kernel_projection) is nn.Linear
    assert type(loaded.head.candidate_selector.hidden_projection) is nn.Linear
    tokens, _ = speculative(LLAMA, loaded, PROMPT, 20, num_draft_tokens=4)
    assert tokens == plain(LLAMA, PROMPT, 20)


def test_not_in_float16(tmp_path):
    """Published heads exceed its largest number between their layers."""
    source = published(tmp_path / "source", tiny_dflash2(LLAMA), TWO)
    convert(str(source), str(tmp_path / "head"), quantize=False)
    half = tiny_llama(num_hidden_layers=6)
    half.set_dtype(mx.float16)
    assert load_drafter(tmp_path / "head", half).dtype == mx.bfloat16
    assert load_drafter(tmp_path / "head", LLAMA).dtype == mx.float32


def test_it_is_told_by_its_codebooks():
    names = [name for name, _ in tree_flatten(tiny_dflash2(LLAMA).head.parameters())]
    assert recognise(names, TWO) == "dflash2"
