"""Quantized heads: floats again, exactly as the formats' own libraries make them."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import config_of, weights_of
from golden import frozen
from golden.frozen import relative
from heads import NUM_STEPS, TOLERANCE, Runner
from numpy_head import eagle3_draft, eagle3_extend
from test_convert_logits import as_example

from mlx_eagle.convert import convert
from mlx_eagle.convert.dequantize import BYTES, NIBBLES, Unpacked, unpacked
from mlx_eagle.convert.stored import Stored
from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.system.safetensors import read_header

SOURCE = "speculators-norm-before-residual"
FOLDERS = sorted(path.name for path in frozen.FOLDER.glob("quantized-*"))


def test_every_format_is_there():
    made = "w4a16 w4a16-channel w4a16-asymmetric w3a16 w8a8 fp8-tensor fp8-channel fp8-block"
    made += " nvfp4 mxfp4 modelopt-fp8 modelopt-nvfp4"
    assert set(FOLDERS) == {f"quantized-{name}" for name in made.split()}


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_are_those_of_the_library(tmp_path, name):
    convert(str(frozen.FOLDER / name), str(tmp_path / "out"), quantize=False, dtype="float32")
    found = weights_of(tmp_path / "out")
    wanted = mx.load(str(frozen.FOLDER / name / "dequantized.safetensors"))
    assert len(wanted) == 8
    for tensor, value in wanted.items():
        assert mx.array_equal(found[tensor], value.astype(mx.float32)), tensor
    native = mx.load(str(frozen.FOLDER / SOURCE / "model.safetensors"))
    for tensor in native.keys() - wanted.keys() - {"t2d"}:
        assert mx.array_equal(found[tensor], native[tensor]), tensor


def without_part(source: Path, folder: Path, part: str) -> Path:
    """A copy of the checkpoint in which q_proj lacks that part."""
    folder.mkdir()
    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    data = (source / "model.safetensors").read_bytes()
    header, body = {}, b""
    for name, entry in read_header(source / "model.safetensors").items():
        if name != f"layers.0.self_attn.q_proj.{part}":
            own = data[entry.start : entry.end]
            places = [len(body), len(body) + len(own)]
            header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": places}
            body += own
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + body
    (folder / "model.safetensors").write_bytes(whole)
    return folder


def parts_of(name: str) -> list[str]:
    """What q_proj consists of, but for what belongs to its input."""
    tensors = read_header(frozen.FOLDER / name / "model.safetensors")
    module = "layers.0.self_attn.q_proj."
    found = [tensor.removeprefix(module) for tensor in tensors if tensor.startswith(module)]
    return [part for part in found if part != "input_scale"]


@pytest.mark.parametrize(
    "name, part", [(name, part) for name in FOLDERS for part in parts_of(name)]
)
def test_every_part_must_be_there(tmp_path, name, part):
    """Scales, second scales, zero points, shapes: none is taken to be 1 or 0 for want of it."""
    source = without_part(frozen.FOLDER / name, tmp_path / "source", part)
    words = rf"q_proj.weight .*lacks its ({part}|numbers)|q_proj.weight .*without a scale"
    with pytest.raises(ValueError, match=words) as caught:
        convert(str(source), str(tmp_path / "out"))
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_group_order_that_the_config_asks_for():
    parts = {
        "weight": stored(np.ones((4, 12), np.int8)),
        "weight_scale": stored(np.ones((4, 3), np.float32)),
    }
    weights = {"num_bits": 8, "type": "int", "actorder": "group"}
    config = {"quantization_config": {"config_groups": {"group_0": {"weights": weights}}}}
    with pytest.raises(ValueError, match="lacks its weight_g_idx, which the config asks for"):
        read(parts, config)
    weights["actorder"] = "weight"
    assert np.array_equal(read(parts, config), np.ones((4, 12)))


@pytest.mark.parametrize("part", ["weight_scale_2", "weight_global_scale"])
def test_second_scales_are_one_number(part):
    numbers = "weight" if part == "weight_scale_2" else "weight_packed"
    parts = {
        numbers: stored(np.ones((4, 16), np.uint8)),
        "weight_scale": stored(np.ones((4, 2), np.uint8), "F8_E4M3"),
        part: stored(np.ones(0, np.float32)),
    }
    with pytest.raises(ValueError, match=f"{part} of fc.weight .* expected one number"):
        read(parts)


def test_zero_points_as_many_as_scales():
    parts = {
        "weight": stored(np.ones((4, 12), np.int8)),
        "weight_scale": stored(np.ones((4, 3), np.float32)),
        "weight_zero_point": stored(np.ones((4, 2), np.int8)),
    }
    with pytest.raises(ValueError, match="12 scales and zero points of the shape"):
        read(parts)


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_the_references(tmp_path, name):
    convert(str(frozen.FOLDER / name), str(tmp_path / "out"), quantize=False, dtype="float32")
    golden = frozen.load(SOURCE)
    config = Eagle3Config.from_dict(config_of(tmp_path / "out"))
    assert config.norm_before_residual
    dense = mx.load(str(frozen.FOLDER / name / "dequantized.safetensors"))
    floats = {n: np.array(value.astype(mx.float32)) for n, value in dense.items()}
    arguments = golden.weights | floats, golden.config
    inputs = golden.tokens, golden.features, golden.embed
    runner = Runner(as_example(golden, config, weights_of(tmp_path / "out")))
    _, wanted = eagle3_extend(*arguments, *inputs)
    assert relative(runner.logits(runner.extend(*inputs[:2])), wanted) < TOLERANCE
    prefix = golden.tokens[:5], golden.features[:5], golden.embed
    steps, forced = 1 + NUM_STEPS, golden.chain(4)
    _, wanted = eagle3_draft(*arguments, *prefix, steps, forced=forced)
    fresh = Runner(as_example(golden, config, weights_of(tmp_path / "out")))
    assert relative(fresh.draft(golden, 4), wanted) < TOLERANCE


def test_it_is_quantized_anew_as_asked(tmp_path):
    source = frozen.FOLDER / "quantized-nvfp4"
    convert(str(source), str(tmp_path / "out"), q_bits=8, q_group_size=32)
    packed, wanted = weights_of(tmp_path / "out"), mx.load(str(source / "dequantized.safetensors"))
    name = "layers.0.mlp.up_proj"
    parts = [packed[f"{name}.{kind}"] for kind in ("weight", "scales", "biases")]
    found = mx.dequantize(*parts, group_size=32, bits=8)
    assert mx.allclose(found, wanted[f"{name}.weight"], atol=2e-2)
    assert config_of(tmp_path / "out")["quantization"] == {"bits": 8, "group_size": 32}
    assert packed["norm.weight"].dtype == mx.bfloat16


def test_small_floats_are_those_of_their_specification():
    for name, exponent, mantissa, bias in (("F8_E4M3", 4, 3, 7), ("F8_E5M2", 5, 2, 15)):
        for bits in range(256):
            power, rest = bits >> mantissa & (1 << exponent) - 1, bits & (1 << mantissa) - 1
            value = rest / 2**mantissa * 2.0 ** (1 - bias)
            if power:
                value = (1 + rest / 2**mantissa) * 2.0 ** (power - bias)
            if name == "F8_E4M3" and bits & 127 == 127:
                value = float("nan")
            if name == "F8_E5M2" and power == 31:
                value = float("nan") if rest else float("inf")
            value = -value if bits & 128 else value
            assert np.array_equal(BYTES[name][bits], np.float32(value), equal_nan=True), bits
    assert BYTES["F8_E8M0"][120] == 2.0**-7 and BYTES["I8"][200] == -56
    assert NIBBLES.tolist()[8:] == [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


# Formats that no library at hand writes, by a naive twin

RNG = np.random.default_rng(5)


def stored(array: np.ndarray, form: str | None = None) -> Stored:
    names = {"float32": "F32", "int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8"}
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Stored(form or names[array.dtype.name], array.shape, data)


def read(parts: dict[str, Stored], config: dict | None = None) -> np.ndarray:
    found = unpacked({f"fc.{name}": part for name, part in parts.items()}, config or {})
    assert list(found) == ["fc.weight"] and isinstance(found["fc.weight"], Unpacked)
    return np.array(found["fc.weight"].read())


@pytest.mark.parametrize("scale_name", ["weight_scale_inv", "qscale_weight"])
@pytest.mark.parametrize("shape", [(300, 200), (256, 128), (64, 512)])
def test_fine_grained_fp8(scale_name, shape):
    rows, columns = shape
    bits = RNG.integers(0, 120, shape, dtype=np.uint8)
    scales = RNG.random((-(-rows // 128), -(-columns // 128)), dtype=np.float32)
    found = read(
        {"weight": stored(bits, "F8_E4M3"), scale_name: stored(scales)},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    )
    for i in range(0, rows, 37):
        for j in range(0, columns, 41):
            wanted = BYTES["F8_E4M3"][bits[i, j]] * scales[i // 128, j // 128]
            assert found[i, j] == wanted


def test_groups_in_another_order():
    values = RNG.integers(-128, 128, (4, 12), dtype=np.int8)
    scales, order = RNG.random((4, 3), dtype=np.float32), RNG.permutation(np.arange(12) // 4)
    found = read(
        {
            "weight": stored(values),
            "weight_scale": stored(scales),
            "weight_g_idx": stored(order.astype(np.int32)),
        }
    )
    assert np.array_equal(found, values.astype(np.float32) * scales[:, order])
