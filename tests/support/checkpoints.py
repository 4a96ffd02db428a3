"""Tiny EAGLE checkpoints in the layouts they are published in, written without torch."""

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from mlx_eagle.convert.__main__ import main

Tensors = dict[str, np.ndarray]

# Small, but with the traits of real heads: fewer key heads, a width (96) that 64 does not divide.
SIZES = {"h": 64, "heads": 4, "kv": 2, "dim": 16, "mlp": 96, "vocab": 128, "draft": 48}
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
    "draft_vocab_size": 48,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
}
FLAT = {key: value for key, value in CONFIG.items() if key != "architectures"}
LAYER_CONFIG = {
    **{key: value for key, value in FLAT.items() if key != "draft_vocab_size"},
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]},
    "transformer_layer_config": LAYER_CONFIG,
    "draft_vocab_size": 48,
    "norm_before_residual": True,
}
RNG = np.random.default_rng(7)


def speculators(layer: dict | None = None, **config: object) -> dict:
    return SPECULATORS | {"transformer_layer_config": LAYER_CONFIG | (layer or {})} | config


def ones(*shape: int) -> np.ndarray:
    return (1 + 0.1 * RNG.standard_normal(shape)).astype(np.float32)


def eagle3_tensors(
    num_layers: int = 1,
    num_aux: int = 3,
    target_size: int | None = None,
    seed: int = 0,
    **sizes: int,
) -> Tensors:
    """A random head under canonical names, with lm_head, d2t and t2d, without an embedding."""
    s = SIZES | sizes
    rng = np.random.default_rng(seed)
    h, width = s["h"], num_aux * (target_size or s["h"])

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def norm(size: int = h) -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    tensors = {"fc.weight": normal(h, width)}
    for i in range(num_layers):
        seen = 2 * h if i == 0 else h
        layer = {
            "self_attn.q_proj.weight": normal(s["heads"] * s["dim"], seen),
            "self_attn.k_proj.weight": normal(s["kv"] * s["dim"], seen),
            "self_attn.v_proj.weight": normal(s["kv"] * s["dim"], seen),
            "self_attn.o_proj.weight": normal(h, s["heads"] * s["dim"]),
            "mlp.gate_proj.weight": normal(s["mlp"], h),
            "mlp.up_proj.weight": normal(s["mlp"], h),
            "mlp.down_proj.weight": normal(h, s["mlp"]),
            "hidden_norm.weight": norm(),
            "post_attention_layernorm.weight": norm(),
        }
        if i == 0:
            layer["input_layernorm.weight"] = norm()
        tensors |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    tensors |= {"norm.weight": norm(), "lm_head.weight": normal(s["draft"], h)}
    if s["draft"] < s["vocab"]:
        kept = np.sort(rng.choice(s["vocab"], s["draft"], replace=False))
        marked = np.zeros(s["vocab"], bool)
        marked[kept] = True
        tensors |= {"d2t": kept - np.arange(s["draft"]), "t2d": marked}
    return tensors


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    """With the first of each pair that begins a name replaced by the second."""

    def new(name: str) -> str:
        for old, replacement in pairs:
            if name.startswith(old):
                return replacement + name.removeprefix(old)
        return name

    return {new(name): value for name, value in tensors.items()}


def as_midlayer(tensors: Tensors) -> Tensors:
    """The names of the original EAGLE-3 files."""
    return renamed(tensors, ("layers.0.", "midlayer."))


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: value for name, value in tensors.items() if name not in names}


def eagle1_tensors() -> Tensors:
    tensors = eagle3_tensors(num_aux=2)
    narrow = {f"layers.0.self_attn.{p}_proj.weight" for p in "qkv"}
    dropped = ("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight")
    tensors = without(tensors, *dropped, "lm_head.weight", "d2t", "t2d")
    tensors = {n: v[:, :64].copy() if n in narrow else v for n, v in tensors.items()}
    return tensors | {"fc.bias": ones(64)}


# What a torch pickle says of a dtype.
STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int8": "CharStorage",
    "bool": "BoolStorage",
    "uint16": "BFloat16Storage",  # NumPy has no bfloat16: its bits
}


def _int(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _str(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def _tuple(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


ORDERED_DICT = _global("collections", "OrderedDict") + b")R"


def tensor_opcodes(key: str, array: np.ndarray) -> bytes:
    """The call that rebuilds the array, laid out as it lies in memory, from storage ``key``."""
    steps = [stride // array.itemsize for stride in array.strides]
    storage = _tuple(
        _str("storage"),
        _global("torch", STORAGES[array.dtype.name]),
        _str(key),
        _str("cpu"),
        _int(array.size),
    )
    return (
        _global("torch._utils", "_rebuild_tensor_v2")
        + _tuple(
            storage + b"Q",
            _int(0),
            _tuple(*map(_int, array.shape)),
            _tuple(*map(_int, steps)),
            b"\x89",  # requires_grad
            ORDERED_DICT,
        )
        + b"R"
    )


def state_dict_pickle(tensors: Tensors) -> bytes:
    items = (
        _str(name) + tensor_opcodes(str(i), array)
        for i, (name, array) in enumerate(tensors.items())
    )
    return b"\x80\x02" + ORDERED_DICT + b"(" + b"".join(items) + b"u."


def _memory(array: np.ndarray) -> bytes:
    """The bytes in the order they lie in memory."""
    return array.tobytes(order="A")


def write_bin(path: Path, tensors: Tensors, data_pkl: bytes | None = None) -> None:
    """What ``torch.save(state_dict)`` writes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data_pkl or state_dict_pickle(tensors))
        archive.writestr("archive/byteorder", "little")
        for i, array in enumerate(tensors.values()):
            archive.writestr(f"archive/data/{i}", _memory(array))
        archive.writestr("archive/version", "3\n")


def write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def write_safetensors(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A folder with ``config.json`` and ``model.safetensors``."""
    write_config(folder, config)
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(arrays, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, config: dict[str, Any], tensors: Tensors, form: str) -> Path:
    """The same in two shards with an index; ``form`` is ``safetensors`` or ``bin``."""
    write_config(folder, config)
    stem = "model" if form == "safetensors" else "pytorch_model"
    names = list(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"{stem}-{i:05}-of-00002.{form}"
        arrays = {name: tensors[name] for name in part}
        if form == "safetensors":
            save_file(arrays, folder / shard)
        else:
            write_bin(folder / shard, arrays)
        weight_map |= dict.fromkeys(part, shard)
    index = folder / f"{stem}.{form}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_target(folder: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    """A target's folder as far as the converter looks: config, tokenizer, two tables."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 32, "vocab_size": 128}
    write_config(folder, {"model_type": "llama", **sizes, **config})
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("hello")
    tensors = tensors or {"model.norm.weight": np.ones(64, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    return folder


GGUF_NAMES = (
    ("layers.0.self_attn.q_proj", "blk.0.attn_q"),
    ("layers.0.self_attn.k_proj", "blk.0.attn_k"),
    ("layers.0.self_attn.v_proj", "blk.0.attn_v"),
    ("layers.0.self_attn.o_proj", "blk.0.attn_output"),
    ("layers.0.input_layernorm", "blk.0.attn_norm"),
    ("layers.0.hidden_norm", "blk.0.attn_norm_2"),
    ("layers.0.post_attention_layernorm", "blk.0.ffn_norm"),
    ("layers.0.mlp.gate_proj", "blk.0.ffn_gate"),
    ("layers.0.mlp.up_proj", "blk.0.ffn_up"),
    ("layers.0.mlp.down_proj", "blk.0.ffn_down"),
    ("input_norm", "enc.output_norm"),
    ("norm.", "output_norm."),
    ("lm_head", "output"),
    ("embed_tokens", "token_embd"),
)


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's own order (convert_hf_to_gguf.py, LlamaModel.permute)."""
    width = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, 2, width, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path, tensors: Tensors, config: dict, kind: str = "F16", **extra: np.ndarray
) -> Path:
    """What llama.cpp's converter writes for an EAGLE-3 head."""
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim", 16))
    writer.add_block_count(1)
    writer.add_context_length(2048)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_array("eagle3.target_layers", [2, 15, 27])
    writer.add_uint32("eagle3.target_hidden_size", config["hidden_size"])
    writer.add_bool("eagle3.norm_before_residual", True)
    writer.add_token_list(["a", "b"])
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    tensors = dict(without(tensors, "t2d"))
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"] + np.arange(len(tensors["d2t"]))
    for part, count in heads.items():
        name = f"layers.0.self_attn.{part}_proj.weight"
        tensors[name] = permute(tensors[name], count)
    for name, value in (renamed(tensors, *GGUF_NAMES) | extra).items():
        if name == "d2t":
            writer.add_tensor(name, value.astype(np.int64))
        elif value.ndim == 1:
            writer.add_tensor(name, value.astype(np.float32))
        else:
            form = gguf.GGMLQuantizationType[kind]
            packed = gguf.quants.quantize(value.astype(np.float32), form)
            writer.add_tensor(name, packed, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Running the converter


def weights_of(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / "model.safetensors"))


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def fails(capsys, *args: object) -> str:
    """Run the command line, which must end with 2 and one sentence; the sentence."""
    with pytest.raises(SystemExit) as exit:
        main([str(arg) for arg in args])
    assert exit.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


def refused(capsys, source: Path, out: Path, *args: object) -> str:
    """The same for a conversion, which must also leave nothing behind."""
    sentence = fails(capsys, "--hf-path", source, "--mlx-path", out, *args)
    assert not out.exists()
    assert not out.parent.exists() or not list(out.parent.iterdir())
    return sentence


def assert_same(weights: dict[str, mx.array], tensors: dict[str, np.ndarray]) -> None:
    tensors = {name: value for name, value in tensors.items() if name != "t2d"}
    assert set(weights) == set(tensors)
    for name, value in tensors.items():
        assert np.array_equal(np.array(weights[name].astype(mx.float32)), value.astype(np.float32))
