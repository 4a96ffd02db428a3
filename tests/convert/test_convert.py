"""The converter from tensors to folder: quantizing, saving, the target, failing cleanly."""

import hashlib
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    CONFIG,
    assert_same,
    config_of,
    eagle3_tensors,
    fails,
    refused,
    weights_of,
    write_safetensors,
    write_target,
)

from mlx_eagle.convert import convert, pipeline
from mlx_eagle.convert.__main__ import main
from mlx_eagle.convert.checkpoint import open_checkpoint
from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.head import Eagle3Head
from mlx_eagle.drafters.head_weights import fuse_weights
from mlx_eagle.drafters.quantize import Quantization

DEMO = Path(__file__).parents[1] / "data" / "eagle3-smollm2-135m-instruct"

# Quantization


def test_default_is_mixed_bits(source, out, capsys):
    convert(str(source), str(out))
    weights, tensors = weights_of(out), eagle3_tensors()
    said = capsys.readouterr().out
    quantization = config_of(out)["quantization"]
    own = {"fc": packed(6), "lm_head": packed(6), "layers.0.mlp.down_proj": packed(4, 32)}
    assert quantization == packed(4) | own
    assert "4 to 6 bits, groups of 64" in said
    assert "layers.0.mlp.down_proj" in said and "groups of 32" in said
    for name, value in tensors.items():
        if name == "t2d":
            continue
        path = name.removesuffix(".weight")
        if value.ndim == 2:
            chosen = quantization.get(path, packed(4))
            parts = [weights.pop(f"{path}.{kind}") for kind in ("weight", "scales", "biases")]
            back = np.array(mx.dequantize(*parts, **chosen))
            assert np.abs(back - value).max() < 0.1 * np.abs(value).max()
        else:
            assert np.array_equal(np.array(weights.pop(name)), value)
    assert not weights


def packed(bits: int, group_size: int = 64) -> dict[str, int]:
    return {"group_size": group_size, "bits": bits}


@pytest.mark.parametrize("flags, bits", [("--q-bits 4 --q-group-size 64", 4), ("--q-bits 5", 5)])
def test_the_same_bits_for_all(source, out, flags, bits):
    main(f"--hf-path {source} --mlx-path {out} {flags}".split())
    smaller = {"layers.0.mlp.down_proj": packed(bits, 32)}
    assert config_of(out)["quantization"] == packed(bits) | smaller
    assert weights_of(out)["lm_head.weight"].shape[1] == 64 * bits // 32


def llama_shapes(hidden, drafted, inner, heads, kv_heads, width=128, layers=1) -> dict:
    """The matrices of a head for a llama of that shape, by their paths."""
    shapes = {"fc": (hidden, 3 * hidden), "lm_head": (drafted, hidden)}
    for i in range(layers):
        seen = 2 * hidden if i == 0 else hidden
        rows = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
        shapes |= {f"layers.{i}.self_attn.{n}_proj": (r, seen) for n, r in rows.items()}
        shapes[f"layers.{i}.self_attn.o_proj"] = (hidden, heads * width)
        shapes |= {f"layers.{i}.mlp.{n}_proj": (inner, hidden) for n in ("gate", "up")}
        shapes[f"layers.{i}.mlp.down_proj"] = (hidden, inner)
    return shapes


SHAPES = {
    "Llama-3.1-8B": (llama_shapes(4096, 32000, 14336, 32, 8), "66 66 66"),
    "Llama-3.3-70B": (llama_shapes(8192, 32000, 28672, 64, 8), "66 66 66"),
    "the demo's first": (llama_shapes(576, 8192, 1536, 9, 3, 64), "66 66 66"),
    "the demo's second": (llama_shapes(576, 4096, 1536, 9, 3, 64), "66 66 66"),
    "many tokens": (llama_shapes(576, 14336, 1536, 9, 3, 64), "66 65 65"),
    "two layers": (llama_shapes(2048, 32000, 8192, 32, 8, 64, layers=2), "66 66 66"),
    "all tokens": (llama_shapes(1024, 151936, 3072, 16, 8), "55 55 55"),
}
"""With the bits of output matrix and fusion in groups of 32, 64 and at most 128."""


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_mixed_bits_take_at_most_1_3_times_what_four_take(name, group_size):
    """By arithmetic: bits, and for each group a scale and a bias of 16."""
    shapes, fine_bits = SHAPES[name]
    expected = dict(zip([32, 64, 128], fine_bits.split(), strict=True))[group_size]
    chosen = Quantization(group_size=group_size).choose(shapes)
    four = Quantization(4, group_size).choose(shapes)
    stored = [
        sum(r * c * (how[path]["bits"] + 32 / how[path]["group_size"])
            for path, (r, c) in shapes.items())
        for how in (chosen, four)
    ]  # fmt: skip
    assert 1.03 < stored[0] / stored[1] <= 1.3
    assert f"{chosen['lm_head']['bits']}{chosen['fc']['bits']}" == expected


def test_what_no_group_divides_stays_whole(tmp_path, out, capsys):
    sizes = {"h": 40, "heads": 1, "kv": 1, "dim": 64, "mlp": 64}
    config = CONFIG | {"hidden_size": 40, "num_attention_heads": 1, "num_key_value_heads": 1}
    folder = write_safetensors(tmp_path / "source", config, eagle3_tensors(**sizes))
    convert(str(folder), str(out))
    quantization = config_of(out)["quantization"]
    assert quantization["layers.0.self_attn.q_proj"] is False  # 80 columns
    assert quantization["layers.0.mlp.gate_proj"] is False  # 40
    assert "layers.0.mlp.down_proj" not in quantization  # 64
    assert weights_of(out)["layers.0.self_attn.q_proj.weight"].dtype == mx.float32
    assert "q_proj: 80 columns" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args, words",
    [
        (("--q-bits", 7), "7 bits"),
        (("--q-bits", 0), "0 bits"),
        (("--q-group-size", 48), "groups of 48"),
    ],
)
def test_bad_quantization(source, out, capsys, args, words):
    assert words in refused(capsys, source, out, *args)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtype(source, out, dtype):
    main(f"--hf-path {source} --mlx-path {out} --no-quantize --dtype {dtype}".split())
    weights = weights_of(out)
    assert weights.pop("d2t").dtype == mx.int32
    assert {array.dtype for array in weights.values()} == {getattr(mx, dtype)}


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_the_demo_head(out, bits):
    """The real head: right values, and the runtime loads what was written."""
    convert(str(DEMO), str(out), quantize=bits is not None, q_bits=bits)
    original = open_checkpoint(str(DEMO)).tensors
    weights, config = weights_of(out), config_of(out)
    tolerance = {None: 0.0, 4: 0.2, 8: 0.01}[bits]
    for name, tensor in original.items():
        if name in ("d2t", "t2d"):
            continue
        path = name.replace("midlayer.", "layers.0.").removesuffix(".weight")
        value, new = tensor.read().astype(mx.float32), weights[f"{path}.weight"]
        if f"{path}.scales" in weights:
            new = mx.dequantize(
                new, weights[f"{path}.scales"], weights[f"{path}.biases"], group_size=64, bits=bits
            )
        error = mx.linalg.norm(new.astype(mx.float32) - value) / mx.linalg.norm(value)
        assert error.item() <= tolerance, name
    assert np.array_equal(np.array(weights["d2t"]), original["d2t"].numpy())
    assert config["rope"]["theta"] == 100000 and config["vocab_size"] == 49152
    assert config["aux_boundary_ids"] is None and config["family"] == "specforge"
    if bits is None:
        head = Eagle3Head(Eagle3Config.from_dict(config))
        weights.pop("d2t")
        head.load_weights(list(fuse_weights(weights, 1).items()))


# Saving


def test_the_folder(source, out, capsys):
    convert(str(source), str(out))
    config, said = config_of(out), capsys.readouterr().out
    assert config["model_type"] == "eagle3"
    assert (
        Eagle3Config.from_dict(config).to_dict().items()
        <= {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}.items()
    )
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert config["source"] == {"path": source.name, "files": {"model.safetensors": digest}}
    for word in ("SpecForge", "layers", "taps", "default", "parameters", "MB ->"):
        assert word in said
    assert [p.name for p in out.parent.iterdir()] == [out.name]


def test_an_existing_folder_is_refused(source, out, capsys):
    out.mkdir(parents=True)
    assert "is there already" in fails(capsys, "--hf-path", source, "--mlx-path", out)
    assert not list(out.iterdir())


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt(), 130), (OSError("disk full"), 2)])
def test_an_interrupted_conversion_leaves_nothing(source, out, monkeypatch, error, code):
    save = pipeline.save

    def breaks(head, folder, target=None):
        save(head, folder, target)
        assert list(out.parent.iterdir()), "it is half done by now"
        raise error

    monkeypatch.setattr(pipeline, "save", breaks)
    with pytest.raises(SystemExit) as exit:
        main(["--hf-path", str(source), "--mlx-path", str(out)])
    assert exit.value.code == code
    assert not list(out.parent.iterdir())


@pytest.mark.exhaustive
def test_as_a_module(source, out):
    command = [sys.executable, "-m", "mlx_eagle.convert", "--mlx-path", str(out)]
    command += ["--hf-path", str(source)]
    done = subprocess.run([*command, "-q"], capture_output=True, text=True)
    assert done.returncode == 0 and "4 to 6 bits" in done.stdout and not done.stderr


# The target


def test_the_target_settles_the_taps_and_gives_its_tokenizer(source, tmp_path, out):
    target = write_target(tmp_path / "target")
    convert(str(source), str(out), target=str(target))
    config = config_of(out)
    assert config["aux_boundary_ids"] == [2, 16, 29] and config["aux_ids_source"] == "default"
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names <= {path.name for path in out.iterdir()}


@pytest.mark.parametrize(
    "config, words",
    [
        ({"hidden_size": 128}, "this target's is 128"),
        ({"hidden_size": 48}, "this target's is 48"),
        ({"vocab_size": 60}, "only 60 tokens"),
        ({"num_hidden_layers": 4}, "--aux-layers"),
    ],
)
def test_the_wrong_target(source, tmp_path, out, capsys, config, words):
    target = write_target(tmp_path / "target", **config)
    assert words in refused(capsys, source, out, "--target", target)


@pytest.mark.parametrize("quantized", [False, True])
def test_shared_tables_are_not_stored(tmp_path, out, quantized):
    """Equal in value: to a bfloat16 table, or to what a quantized one comes to."""
    tensors = eagle3_tensors()
    rng = np.random.default_rng(5)
    table = mx.array(rng.standard_normal((128, 64)), dtype=mx.bfloat16)
    theirs = {"model.embed_tokens.weight": table}
    config = {}
    if quantized:
        packed = mx.quantize(table, group_size=32, bits=8)
        table = mx.dequantize(*packed, group_size=32, bits=8)
        kinds = ("weight", "scales", "biases")
        theirs = {
            f"model.embed_tokens.{kind}": part for kind, part in zip(kinds, packed, strict=True)
        }
        own = {"group_size": 32, "bits": 8}
        config = {"quantization": {"group_size": 64, "bits": 4, "model.embed_tokens": own}}
    target = write_target(tmp_path / "target", **config)
    mx.save_safetensors(str(target / "model.safetensors"), theirs)
    ours = np.array(table.astype(mx.float32))
    tensors["embed_tokens.weight"] = ours
    kept = tensors["d2t"] + np.arange(48)
    tensors["lm_head.weight"] = ours[kept]
    folder = write_safetensors(tmp_path / "source", CONFIG, tensors)
    convert(str(folder), str(out), target=str(target))
    assert config_of(out)["embed_source"] == "target"
    assert config_of(out)["lm_head_source"] == "target_rows"  # tied: the embedding's rows
    assert not [n for n in weights_of(out) if n.startswith(("embed_tokens", "lm_head"))]


def test_own_tables_are_stored(tmp_path, out, capsys):
    tensors = eagle3_tensors()
    tensors["embed_tokens.weight"] = np.random.default_rng(0).standard_normal(
        (128, 64), np.float32
    )
    folder = write_safetensors(tmp_path / "source", CONFIG, tensors)
    table = {"model.embed_tokens.weight": tensors["embed_tokens.weight"] + 1e-3}
    target = write_target(tmp_path / "target", table)
    convert(str(folder), str(out), quantize=False, target=str(target))
    assert config_of(out)["embed_source"] == "file"
    assert_same(weights_of(out), tensors)
    assert "embedding   kept" in capsys.readouterr().out
