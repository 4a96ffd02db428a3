"""Values of the wrong kind in each file that the converter reads: a sentence that says which."""

import json
import os
import struct
import threading
import time

import gguf
import numpy as np
import pytest
from checkpoints import (
    CONFIG,
    SPECULATORS,
    as_midlayer,
    eagle3_tensors,
    refused,
    weights_of,
    without,
    write_gguf,
    write_safetensors,
    write_target,
)

from mlx_eagle.convert import convert
from mlx_eagle.convert.gguf import read_gguf
from mlx_eagle.convert.published_config import CONFIG as CONFIG_TYPES
from mlx_eagle.drafters.block_config import PUBLISHED
from mlx_eagle.drafters.block_config import PUBLISHED as BLOCK_TYPES
from mlx_eagle.drafters.kinds import is_converted, published_kind
from mlx_eagle.system.fields import FieldType

PLAIN = eagle3_tensors()
NESTED = {"eagle_aux_hidden_state_layer_ids": "2,16,29"}
WRONG = {
    "rope_scaling": ({"rope_scaling": "x"}, 'rope_scaling is "x", expected an object'),
    "rope type": ({"rope_scaling": {"type": 3}}, "rope_scaling.type is 3, expected a string"),
    "factor": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is"),
    "no factor": ({"rope_scaling": {"type": "linear", "factor": 0}}, "expected a number above"),
    "theta": ({"rope_theta": -5}, "rope_theta is -5, expected a number above 1"),
    "head_dim": ({"head_dim": "x"}, 'head_dim is "x", expected a whole number'),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    "key heads": ({"num_key_value_heads": True}, "num_key_value_heads is true"),
    "odd heads": ({"num_key_value_heads": 3}, "whole number of heads per key head"),
    "channels": ({"rotary_dim": 17}, "17 of 16 channels"),
    "activation": ({"hidden_act": ["silu"]}, 'hidden_act is ["silu"], expected a string'),
    "taps": ({"eagle_config": NESTED}, "eagle_config.eagle_aux_hidden_state_layer_ids is"),
    "a deep tap": ({"target_layer_ids": [[2]]}, "expected a list of whole numbers"),
    "layer types": ({"layer_types": "full_attention"}, "layer_types is"),
    "nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN, expected a number"),
    "infinity": ({"rope_theta": float("inf")}, "rope_theta is Infinity, expected a number"),
    "a huge number": ({"vocab_size": 10**300}, "vocab_size is 1000"),
    "a large number": ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
    "a flag": ({"norm_before_residual": "false"}, "expected true or false"),
    "depth": ({"a": eval("[" * 40 + "]" * 40)}, "more than 32 levels"),
    "a size in the layer": (
        SPECULATORS | {"transformer_layer_config": {"target_hidden_size": [64]}},
        "transformer_layer_config.target_hidden_size is [64], expected a whole number",
    ),
    "a layer": (SPECULATORS | {"transformer_layer_config": [1]}, "expected an object"),
}


LONG = "x" * 5000
IDS = "eagle_aux_hidden_state_layer_ids"
OVERSIZED = {
    "taps": {IDS: list(range(9000))},
    "nested taps": {"eagle_config": {IDS: list(range(1, 900))}},
    "taps backwards": {"target_layer_ids": [10**9, 5, 10**8]},
    "activation": {"hidden_act": LONG},
    "rope": {"rope_scaling": {"rope_type": LONG, "factor": 2}},
    "sizes": {"hidden_size": 2**24, "num_attention_heads": 2**24},
    "factors": {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.5] * 9000}},
}


@pytest.mark.parametrize("case", OVERSIZED)
def test_values_are_shortened_in_messages(tmp_path, out, capsys, case):
    source = write_safetensors(tmp_path / "source", CONFIG | OVERSIZED[case], as_midlayer(PLAIN))
    said = refused(capsys, source, out)
    assert said.count("\n") == 1 and len(said) - len(str(tmp_path)) < 400


def test_names_are_shortened_in_messages(tmp_path, out, capsys):
    surplus = {f"layers.0.{'y' * 240}{i}": np.ones(2, np.float32) for i in range(9)}
    for number, tensors in enumerate((as_midlayer(PLAIN) | surplus, surplus)):
        source = write_safetensors(tmp_path / f"source{number}", CONFIG, tensors)
        assert len(refused(capsys, source, out)) - len(str(tmp_path)) < 600


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_of_a_config(tmp_path, out, capsys, case):
    changes, words = WRONG[case]
    folder = write_safetensors(tmp_path / "source", CONFIG | changes, PLAIN)
    sentence = refused(capsys, folder, out)
    assert words in sentence and len(sentence) < 400


def test_numbers_that_are_not_used_may_be_any(tmp_path, out, capsys):
    """Nemotron-H's configs say so of the time steps of their Mamba layers."""
    unused = {"time_step_limit": [0.0, float("inf")], "seed": 10**300}
    folder = write_safetensors(tmp_path / "source", CONFIG | unused, PLAIN)
    assert published_kind(folder, "it") == "eagle3" and not is_converted(folder)
    convert(str(folder), str(tmp_path / "b"))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}, "a": 1e999}')
    assert "finite" in refused(capsys, folder, out)


def test_numbers_that_are_used_are_finite():
    def kinds(table):
        for kind in table.values():
            yield from [kind] if isinstance(kind, FieldType) else kinds(kind)

    for kind in kinds({"head": CONFIG_TYPES, "blocks": BLOCK_TYPES, "published": PUBLISHED}):
        for number in (float("inf"), -float("inf"), float("nan"), 10**300):
            assert not kind.holds(number), kind.words


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "a number of thousands of digits"),
        ("[]", "expected a JSON object"),
        ("", "not valid JSON"),
        ('{"a": "\\', "not valid JSON"),
        ("\x80", "not valid UTF-8 text"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_texts_that_are_no_object(tmp_path, out, capsys, text, words, name):
    folder = write_safetensors(tmp_path / "source", CONFIG, PLAIN)
    (folder / name).write_bytes(text.encode("latin-1"))
    sentence = refused(capsys, folder, out)
    assert words in sentence and name in sentence


@pytest.mark.parametrize(
    "weight_map", [["model.safetensors"], "x", {"a": 1}, {"a": "../x"}, {"a": "/etc/passwd"},
                   {"a": ".."}, {"a": ""}, {"a": "x\ny"}, {"a": "a\\b"}, {"a": None},
                   {"a": "\u00e9" * 200}],
)  # fmt: skip
def test_an_index_names_files_of_its_folder_alone(tmp_path, out, capsys, weight_map):
    write_safetensors(tmp_path / "x", CONFIG, PLAIN)
    folder = write_safetensors(tmp_path / "source", CONFIG, PLAIN)
    (tmp_path / "x" / "model.safetensors").rename(tmp_path / "x.safetensors")
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "weight_map" in refused(capsys, folder, out)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, name):
    folder = write_safetensors(tmp_path / "source", CONFIG, PLAIN)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    errors: list[ValueError] = []

    def read() -> None:
        try:
            convert(str(folder), str(tmp_path / "out"))
        except ValueError as err:
            errors.append(err)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(30)
    assert len(errors) == 1 and f"{name} is a pipe" in str(errors[0])


def test_what_a_long_array_of_a_gguf_stands_for_is_said_in_words(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "eagle3")
    writer.add_array("eagle3.norm_before_fc", ["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="its norm_before_fc is a list of 2 values"):
        read_gguf(tmp_path / "x.gguf")


HEADERS = {
    "a number": 5,
    "no offsets": {"dtype": "F32", "shape": [64]},
    "text": {"dtype": "F32", "shape": "64", "data_offsets": [0, 256]},
    "fractions": {"dtype": "F32", "shape": [64.0], "data_offsets": [0, 256]},
    "negative": {"dtype": "F32", "shape": [-64], "data_offsets": [0, 256]},
    "backwards": {"dtype": "F32", "shape": [64], "data_offsets": [256, 0]},
    "too few bytes": {"dtype": "F32", "shape": [64], "data_offsets": [0, 128]},
    "dtype": {"dtype": 5, "shape": [64], "data_offsets": [0, 256]},
    "two lines": {"dtype": "F\n32", "shape": [64], "data_offsets": [0, 256]},
    "a long type": {"dtype": "x" * 999, "shape": [64], "data_offsets": [0, 256]},
    "monstrous": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 256]},
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_are_held_to_the_file(source, out, capsys, case):
    path = source / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length]) | {"norm.weight": HEADERS[case]}
    fresh = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(fresh)) + fresh + data[8 + length :])
    assert "norm.weight" in refused(capsys, source, out)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("d2t", PLAIN["d2t"].astype(np.float32), "d2t is stored as F32"),
        ("d2t", PLAIN["d2t"][None], "d2t is of the shape [1, 48]"),
        ("t2d", PLAIN["t2d"].astype(np.float32), "t2d is stored as F32"),
        ("fc.weight", np.zeros((64, 0), np.float32), "fc.weight is of the shape [64, 0]"),
        ("norm.weight", np.ones(64, np.int64), "norm.weight is stored as I64"),
        ("layers.7.mlp.up_proj.weight", PLAIN["fc.weight"], "without a gap"),
        ("layers.x.mlp.up_proj.weight", PLAIN["fc.weight"], "without a gap"),
        ("n" * 300, PLAIN["fc.weight"], "a tensor named"),
        ("a\nb", PLAIN["fc.weight"], "a tensor named"),
    ],
)
def test_tensors_that_no_head_has(tmp_path, out, capsys, name, value, words):
    tensors = without(PLAIN, "t2d" if name == "d2t" else "") | {name: value}
    folder = write_safetensors(tmp_path / "source", CONFIG, tensors)
    assert words in refused(capsys, folder, out)


@pytest.mark.parametrize(
    "config, words",
    [
        ({"hidden_size": "64"}, "hidden_size is"),
        ({"text_config": "x"}, "text_config is"),
        ({"quantization": 4}, "quantization is 4, expected an object"),
    ],
)
def test_wrong_values_of_a_target(source, tmp_path, out, capsys, config, words):
    target = write_target(tmp_path / "target", **config)
    sentence = refused(capsys, source, out, "--target", target)
    assert words in sentence and "target" in sentence


def test_a_damaged_target(source, tmp_path, out, capsys):
    """Tables that are packed otherwise than the config says, and a file that is cut off."""
    tables = {
        "model.embed_tokens.weight": np.ones((128, 8), np.uint32),
        "model.embed_tokens.scales": np.ones((128, 3), np.float32),
    }
    own = as_midlayer(PLAIN) | {"embed_tokens.weight": np.ones((128, 64), np.float32)}
    source = write_safetensors(source.parent / "own", CONFIG, own)
    target = write_target(tmp_path / "target", tables, quantization={"bits": 4, "group_size": 64})
    assert "unpacked" in refused(capsys, source, out, "--target", target)
    path = target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "cut off" in refused(capsys, source, out, "--target", target)


# GGUF


def test_gguf_of_wrong_values(tmp_path, out, capsys):
    path = write_gguf(tmp_path / "head.gguf", PLAIN, CONFIG)
    data = path.read_bytes()
    key = b"eagle3.norm_before_residual"
    at = data.index(key) + len(key)
    for kind, words in ((9, "unknown type"), (13, "unknown type 13"), (0, "true or false")):
        path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
        assert words in refused(capsys, path, out)


@pytest.mark.parametrize("alignment", [0, 2**31])
def test_gguf_alignment(tmp_path, out, capsys, alignment):
    path = tmp_path / "head.gguf"
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_uint32("general.alignment", alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "general.alignment" in refused(capsys, path, out)


def array_file(kind: int, count: int, data: bytes) -> bytes:
    name = b"general.architecture"
    text = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, 6) + b"eagle3"
    array = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, kind, count) + data
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + text + array


@pytest.mark.parametrize(
    "kind, count, data, words",
    [
        (9, 1, struct.pack("<IQ", 4, 0), "arrays of arrays"),
        (4, 2**62, bytes(64), "cut off"),
        (8, 2**62, bytes(64), "cut off"),
        (99, 1, bytes(64), "unknown type 99"),
    ],
)
def test_gguf_arrays(tmp_path, out, capsys, kind, count, data, words):
    path = tmp_path / "head.gguf"
    path.write_bytes(array_file(kind, count, data))
    assert words in refused(capsys, path, out)


def test_gguf_arrays_are_read_as_a_whole(tmp_path):
    """A million numbers one by one take seconds."""
    path = tmp_path / "head.gguf"
    path.write_bytes(array_file(4, 4_000_000, bytes(16_000_000)))
    start = time.process_time()
    read_gguf(path)
    assert time.process_time() - start < 1


def test_gguf_norms_keep_their_precision(tmp_path):
    """Norms are stored in float32 beside blocks of 8 bits, and 1 / 3 is not one in float16."""
    tensors = PLAIN | {"norm.weight": np.full(64, 1 / 3, np.float32)}
    path = write_gguf(tmp_path / "head.gguf", tensors, CONFIG, "Q8_0")
    convert(str(path), str(tmp_path / "out"), quantize=False)
    written = weights_of(tmp_path / "out")
    assert np.array_equal(np.array(written["norm.weight"]), tensors["norm.weight"])
