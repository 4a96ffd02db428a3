"""A converted head back in PyTorch's layout: the same weights when it is converted again."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    CONFIG,
    as_midlayer,
    config_of,
    eagle3_tensors,
    weights_of,
    write_safetensors,
)
from golden import frozen
from numpy_head import eagle3_extend

from mlx_eagle.convert import convert
from mlx_eagle.convert.__main__ import main

HEADS = ["specforge-plain", "specforge-fc-norm", "specforge-target-hidden-size"]
HEADS += ["specforge-linear-rope", "specforge-yarn-rope"]


@pytest.mark.parametrize("name", HEADS)
def test_there_and_back(tmp_path, name):
    first, back, second = (tmp_path / part for part in ("first", "back", "second"))
    convert(str(frozen.FOLDER / name), str(first), quantize=False, dtype="float32")
    main(["--to-pytorch", str(first), str(back)])
    convert(str(back), str(second), quantize=False)
    ours, theirs = weights_of(first), weights_of(second)
    assert ours.keys() == theirs.keys()
    for key in ours:
        assert mx.array_equal(ours[key], theirs[key]), key
    left, right = config_of(first), config_of(second)
    for key in ("source", "family", "rope"):
        left.pop(key), right.pop(key)
    assert left == right
    # The names and maps are the library's own.
    original = mx.load(str(frozen.FOLDER / name / "model.safetensors"))
    written = mx.load(str(back / "model.safetensors"))
    assert {k: v.shape for k, v in written.items()} == {k: v.shape for k, v in original.items()}
    for key in ("d2t", "t2d"):
        assert written[key].dtype == original[key].dtype
        assert mx.array_equal(written[key], original[key])


@pytest.mark.parametrize("name", HEADS)
def test_it_gives_the_librarys_logits(tmp_path, name):
    """Read by the NumPy head under the official names; no code of the converter's."""
    golden = frozen.load(name)
    convert(str(frozen.FOLDER / name), str(tmp_path / "head"), quantize=False, dtype="float32")
    main(["--to-pytorch", str(tmp_path / "head"), str(tmp_path / "back")])
    written = mx.load(str(tmp_path / "back" / "model.safetensors"))
    weights = {
        key.replace("midlayer.", "layers.0."): np.array(value)
        for key, value in written.items()
        if key not in ("d2t", "t2d", "embed_tokens.weight")
    }
    config = replace(golden.config, embed_source="target")
    embed = np.array(written["embed_tokens.weight"])
    _, logits = eagle3_extend(weights, config, golden.tokens, golden.features, embed)
    assert frozen.relative(logits, golden.logits[0]) < 1e-5


def test_other_taps_and_residuals_come_back(tmp_path):
    taps = {"eagle_aux_hidden_state_layer_ids": [3, 9, 20]}
    config = CONFIG | taps | {"norm_before_residual": True}
    write_safetensors(tmp_path / "source", config, as_midlayer(eagle3_tensors()))
    convert(str(tmp_path / "source"), str(tmp_path / "head"), quantize=False)
    main(["--to-pytorch", str(tmp_path / "head"), str(tmp_path / "back")])
    convert(str(tmp_path / "back"), str(tmp_path / "again"), quantize=False)
    for key in ("aux_boundary_ids", "norm_before_residual"):
        assert config_of(tmp_path / "again")[key] == config_of(tmp_path / "head")[key]


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "is quantized"),
        ({"num_layers": 2}, "has num_layers 2, which the flat PyTorch layout cannot say"),
        ({"kind": "llama"}, "not a converted EAGLE-3 head"),
        ({"lm_head_source": "target"}, "takes its output matrix from the target"),
    ],
)
def test_what_the_layout_cannot_say_is_refused(source, tmp_path, capsys, change, sentence):
    convert(str(source), str(tmp_path / "head"), quantize=False)
    file = tmp_path / "head" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(SystemExit) as stop:
        main(["--to-pytorch", str(tmp_path / "head"), str(tmp_path / "back")])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "back").exists()
