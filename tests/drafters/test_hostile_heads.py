"""Converted heads whose files hold what they should not, and drafters used as they cannot be."""

import json
from copy import deepcopy
from dataclasses import MISSING, fields

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from helpers import PROMPT, byte_tokenizer, plain, speculative, tiny_llama
from safetensors.numpy import load_file, save_file

from mlx_eagle.convert import convert
from mlx_eagle.drafters.config import Eagle3Config, read_nested
from mlx_eagle.drafters.kind import LoadOptions
from mlx_eagle.drafters.kinds import load_drafter
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.drafters.model_drafter import load


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocab_size=128, num_hidden_layers=6)


@pytest.fixture
def head(source):
    convert(str(source), str(source.parent / "head"))
    return source.parent / "head"


def edit(head, **changes):
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


ROPE = {"type": "default", "theta": 10000.0, "dims": 16}
WRONG = {
    "text": ({"hidden_size": "64"}, 'hidden_size is "64", expected a whole number'),
    "missing": ({"num_heads": None}, "has no num_heads"),
    "layers": ({"num_layers": 1000}, r"the head lacks layers\.1\."),
    "many layers": ({"num_layers": 10**9}, "num_layers is 1000000000, expected"),
    "no heads": ({"num_heads": 0}, "num_heads is 0"),
    "heads": ({"num_heads": 3}, "gives num_heads 3, num_kv_heads 2, which no head has"),
    "wide": (
        {"num_aux": 1000, "target_hidden_size": 2**24},
        "gives num_aux 1000, target_h",
    ),
    "taps": ({"aux_boundary_ids": "2,3,4"}, "aux_boundary_ids is"),
    "deep taps": ({"aux_boundary_ids": [2, 3, 40]}, "--target MODEL.*--aux-layers"),
    "no taps": ({"aux_boundary_ids": []}, "taps layers"),
    "activation": ({"hidden_act": "relu"}, "expected one of silu"),
    "source": ({"lm_head_source": "other"}, "expected one of file, target, target_rows"),
    "rope": ({"rope": "default"}, "rope is"),
    "base": ({"rope": ROPE | {"theta": -1}}, "rope.theta is -1"),
    "no base": ({"rope": ROPE | {"theta": None}}, r"gives rope .*, which no head has"),
    "channels": ({"rope": ROPE | {"dims": 15}}, r"gives head_dim 16, rope .*15"),
    "scaling": ({"rope": ROPE | {"scaling": {"type": "yarn", "factor": "x"}}}, "factor is"),
    "half a scaling": ({"rope": ROPE | {"scaling": {"type": "linear"}}}, "no head can be built"),
    "bits": ({"quantization": {"bits": 99, "group_size": 64}}, "quantization.bits is 99"),
    "no bits": ({"quantization": {"group_size": 64}}, "no head can be built"),
    "a part": ({"quantization": {"bits": 4, "group_size": 64, "fc": 3}}, "quantization: fc is 3"),
    "window": ({"sliding_window": "all"}, "sliding_window is"),
    "half a scale": (
        {"position_scale": {"beta": 1.0}},
        r"gives position_scale {.beta",
    ),
    "no scale": ({"position_scale": {}}, "gives position_scale {}, which no head has"),
    "nan": ({"rms_norm_eps": float("nan")}, "numbers that are finite"),
    "deep": ({"a": eval("[" * 60 + "]" * 60)}, "more than 32 levels"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_of_a_converted_config(model, head, case):
    changes, words = WRONG[case]
    edit(head, **changes)
    with pytest.raises(ValueError, match=words) as caught:
        load_drafter(head, model)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("d2t", np.zeros(48, np.float32), "d2t table is"),
        ("d2t", np.zeros((1, 48), np.int32), "d2t table is"),
        ("d2t", np.zeros(3, np.int32), "d2t table is"),
        ("d2t", np.full(48, 2**40), "reaches token"),
        ("norm.weight", np.ones(64, np.int32), "is stored as"),
        ("fc.weight", np.ones((64, 36), np.float32), "is stored as"),
    ],
)
def test_wrong_arrays_of_a_converted_head(model, head, name, value, words):
    path = head / "model.safetensors"
    arrays = {key: np.array(a.astype(mx.float32)) if a.dtype == mx.bfloat16 else np.array(a)
              for key, a in mx.load(str(path)).items()}  # fmt: skip
    save_file(arrays | {name: value}, path)
    assert load_file(path)
    with pytest.raises(ValueError, match=words):
        load_drafter(head, model)


def test_a_config_without_its_fields(model, head):
    for text in ('{"model_type": "eagle3"}', "{}", "[]", "", '{"a":' * 10**5):
        (head / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config.json|converted EAGLE-3 head"):
            load_drafter(head, model)


# Taps that the target's depth settles


@pytest.mark.parametrize(
    "ids, depth, expected",
    [
        ((24, 30, 36), 36, (24, 30, 36)),
        ((24, 30, 36), 48, (25, 31, 37)),
        ((1, 15, 28), 32, (2, 16, 29)),
        ((2, 30, 58), 61, (2, 30, 58)),
        ((4, 20, 40), 45, (5, 21, 41)),
    ],
)
def test_nested_ids_by_depth(ids, depth, expected):
    assert read_nested(ids, depth).ids == expected
    found = fields(Eagle3Config)
    sizes = [f.name for f in found if f.default is MISSING and f.default_factory is MISSING]
    values = dict.fromkeys(sizes, 64) | {"head_dim": 16}
    config = Eagle3Config.from_dict(values | {"num_layers": 1, "aux_nested_ids": ids})
    assert config.taps(depth) == expected


# Drafters used otherwise


def test_a_target_of_another_width(model, head):
    drafter = load_drafter(head, model)
    other = tiny_llama(vocab_size=128, num_hidden_layers=6, hidden_size=32)
    with pytest.raises(ValueError, match="192 wide, and this target's are 96 wide"):
        speculative(other, drafter, PROMPT, 8, num_draft_tokens=2)


def test_drafters_can_be_copied(model, head):
    drafter = deepcopy(load_drafter(head, model))
    tokens, stats = speculative(model, drafter, PROMPT, 20, num_draft_tokens=3)
    assert tokens == plain(model, PROMPT, 20) and stats.num_drafted > 0
    assert deepcopy(LookupDrafter()).begin().taps == ()


def test_mlx_lm_is_told_what_is_missing(model, head):
    for drafter in (load_drafter(head, model), LookupDrafter()):
        with pytest.raises(ValueError, match=r"call mlx_eagle.install\(\) before"):
            list(mlx_lm.stream_generate(model, byte_tokenizer(), "abc", draft_model=drafter))


def test_what_is_neither_head_nor_model(model, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"neither a draft head .* nor a model that mlx-lm loads"):
        load(tmp_path, {}, model, LoadOptions())
