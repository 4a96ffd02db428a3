"""Attaching a converted head to a target: what fits loads, what does not says why."""

import json

import mlx.core as mx
import pytest
from architectures import build
from helpers import PROMPT, plain, speculative, tiny_llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import get_total_parameters

from mlx_eagle.convert import convert
from mlx_eagle.drafters.kinds import load_drafter
from mlx_eagle.drafters.target_parts import find_embedding, lm_head_of


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocab_size=128, num_hidden_layers=6)


def converted(source, **options):
    destination = source.parent / "head"
    convert(str(source), str(destination), **options)
    return destination


@pytest.mark.parametrize("options", [{}, {"q_bits": 8}, {"quantize": False}])
def test_a_converted_head_loads_and_drafts(model, source, options):
    drafter = load_drafter(converted(source, **options), model)
    assert drafter.taps == (2, 3, 3)
    tokens, stats = speculative(model, drafter, PROMPT, 20, num_draft_tokens=3)
    assert tokens == plain(model, PROMPT, 20)
    assert stats.num_drafted > 0


def test_mixed_bits_load_as_they_are_stored(model, source):
    folder = converted(source)
    stored = mx.load(str(folder / "model.safetensors"))
    head = load_drafter(folder, model).head
    layer, attention = head.layers[0], "layers.0.self_attn"
    for module, parts, bits, group in (
        (head.fc, ["fc"], 6, 64),
        (head.lm_head, ["lm_head"], 6, 64),
        (layer.self_attn.qkv_proj, [f"{attention}.{x}_proj" for x in "qkv"], 4, 64),
        (layer.self_attn.o_proj, [f"{attention}.o_proj"], 4, 64),
        (layer.mlp.gate_up_proj, ["layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"], 4, 64),
        (layer.mlp.down_proj, ["layers.0.mlp.down_proj"], 4, 32),
    ):
        assert (module.bits, module.group_size) == (bits, group)
        kinds = ("weight", "scales", "biases")
        rows = [mx.dequantize(*(stored[f"{p}.{k}"] for k in kinds), group, bits) for p in parts]
        x = mx.random.normal((3, rows[0].shape[1]))
        wanted = x @ mx.concatenate(rows).T
        assert mx.allclose(module(x), wanted, rtol=1e-4, atol=1e-4 * mx.abs(wanted).max().item())


def test_quantize_while_loading(model, source):
    folder = converted(source, quantize=False)
    dense = load_drafter(folder, model)
    packed = load_drafter(folder, model, quantize_bits=4, quantize_group_size=32)
    assert get_total_parameters(packed.head) == get_total_parameters(dense.head)
    assert "scales" in packed.head.lm_head and "scales" not in dense.head.lm_head
    tokens, _ = speculative(model, packed, PROMPT, 20, num_draft_tokens=3)
    assert tokens == plain(model, PROMPT, 20)


def test_the_head_takes_the_targets_dtype_unless_told(model, source):
    folder = converted(source)
    assert load_drafter(folder, model).head.dtype == mx.float32
    assert load_drafter(folder, model, dtype=mx.bfloat16).head.dtype == mx.bfloat16
    half = tiny_llama(vocab_size=128, num_hidden_layers=6)
    half.set_dtype(mx.bfloat16)
    assert load_drafter(folder, half).head.dtype == mx.bfloat16


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_any_mix_of_dtypes_runs(source, dtype):
    target = tiny_llama(vocab_size=128, num_hidden_layers=6)
    target.set_dtype(dtype)
    folder = converted(source)
    for head_dtype in (mx.float16, mx.bfloat16, mx.float32):
        drafter = load_drafter(folder, target, dtype=head_dtype)
        tokens, _ = speculative(target, drafter, PROMPT, 8, num_draft_tokens=2)
        assert len(tokens) == 8


def test_tied_and_untied_output_projections_are_found():
    tokens = mx.array([[3, 4]])
    for tied in (True, False):
        model = tiny_llama(tie_word_embeddings=tied)
        embedding, vocab_size = find_embedding(model)
        assert vocab_size == 96
        states = model.model(tokens)
        assert mx.allclose(lm_head_of(model, embedding)(states), model(tokens)).item()


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


WRONG_TARGETS = {
    "hidden size": (
        {"hidden_size": 32, "vocab_size": 128},
        "a target of hidden size 64, but this target's is 32",
    ),
    "vocabulary": ({"vocab_size": 5000}, "a vocabulary of 128 tokens, but the target's has 5000"),
    "d2t": ({"vocab_size": 60}, "but the target has 60 tokens"),
    "depth": ({"vocab_size": 128, "num_hidden_layers": 2}, "the target has 2 layers"),
}


@pytest.mark.parametrize("name", WRONG_TARGETS)
def test_the_wrong_target_is_refused(source, name):
    changes, sentence = WRONG_TARGETS[name]
    with pytest.raises(ValueError, match=sentence):
        load_drafter(converted(source), tiny_llama(**changes))


def test_a_missing_tensor_is_named(model, source):
    folder = converted(source, quantize=False)
    weights = mx.load(str(folder / "model.safetensors"))
    del weights["layers.0.mlp.down_proj.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(ValueError, match=r"lacks layers.0.mlp.down_proj.weight"):
        load_drafter(folder, model)


def test_a_wrong_shape_is_named(model, source):
    folder = converted(source, quantize=False)
    edit_config(folder, intermediate_size=128)
    with pytest.raises(ValueError, match=r"down_proj.weight of 64 x 96, expected 64 x 128"):
        load_drafter(folder, model)


def test_a_missing_d2t_is_named(model, source):
    folder = converted(source, quantize=False)
    weights = mx.load(str(folder / "model.safetensors"))
    del weights["d2t"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(ValueError, match="d2t table is missing"):
        load_drafter(folder, model)


def test_a_truncated_file_is_named(model, source):
    folder = converted(source)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged or cut short"):
        load_drafter(folder, model)


def test_what_is_no_converted_head_is_refused(model, source, tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json"):
        load_drafter(tmp_path, model)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_drafter(tmp_path, model)
    with pytest.raises(ValueError, match="is not a repository id either"):
        load_drafter("no/such/folder/at/all", model)


def test_quantizing_twice_is_refused(model, source):
    with pytest.raises(ValueError, match="already quantized to 4 to 6 bits"):
        load_drafter(converted(source), model, quantize_bits=8)
    folder = source.parent / "dense"
    convert(str(source), str(folder), quantize=False)
    with pytest.raises(ValueError, match="cannot quantize to 7 bits"):
        load_drafter(folder, model, quantize_bits=7)


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode", "longcat_flash_ngram", "gemma3n"])
def test_the_embedding_of_tokens_among_others(name):
    """Others have more rows: positions and n-grams, whose numbers are no tokens to draft."""
    model = build(name)
    embedding, vocab_size = find_embedding(model)
    logits = model(mx.array([[1]]), cache=make_prompt_cache(model))
    assert embedding.weight.shape == (vocab_size, 64) == (logits.shape[-1], 64)
