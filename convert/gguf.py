"""Read a head, or the MTP layers of a model, out of a llama.cpp GGUF file (versions 2 and 3).

Metadata and tensors get the names of published checkpoints, by ``gguf_layouts.py``. Quantized
blocks are decoded by the package ``gguf`` when they are read. Its reader of files is not used,
for it trusts them, and MLX's fails on the 64-bit integers of ``d2t``.
"""

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlx_eagle.drafters.kind import Tensor
from mlx_eagle.system.fields import LARGEST, is_whole, shown
from mlx_eagle.system.safetensors import check_name, is_shape

from .gguf_layouts import LAYOUTS, Layout, layout_of
from .published_config import renamed
from .stored import FORMATS, CutOff, Refused, Stored, map_file

SCALING_KEYS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
TOKENS = "tokenizer.ggml.tokens"
ARCHITECTURE = "general.architecture"
KEYS = {ARCHITECTURE, "general.alignment", TOKENS, "tokenizer.ggml.mask_token_id"}
KEYS |= {f"{a}.{key}" for a, own in LAYOUTS.items() for key in (*own.keys, *SCALING_KEYS)}
"""The metadata that is used; everything else is skipped."""
# The codes in struct for the value types 0 to 12; strings (8) and arrays (9) have none.
SCALARS = {kind: code for kind, code in enumerate("BbHhIif?  Qqd") if code != " "}
STRING = 8
ARRAY = 9
PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
MAX_DIMS = 4
MAX_ENTRIES = 1 << 16
MAX_LISTED = 1024
MAX_ALIGNMENT = 1 << 16
MAX_STRING = 1 << 10  # bytes of a string that are read; as text they may take four times that

Block = tuple[str, int, int, Callable[[np.ndarray], np.ndarray] | None]
"""Name, values per block, bytes per block, and what decodes bytes (None: plain numbers)."""


class _Reader:
    """A cursor over the file's bytes, (n,) uint8."""

    def __init__(self, data: np.ndarray):
        self.data = data
        self.at = 0

    def take(self, size: int, what: str = "a value") -> np.ndarray:
        """The next ``size`` bytes, not copied; CutOff if the file has fewer."""
        if self.at + size > len(self.data):
            raise CutOff(f"{what} runs past the end")
        self.at += size
        return self.data[self.at - size : self.at]

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize(code)).tobytes())
        # The shortest decimal of a float32: 1e-05 and not 9.99999974e-06.
        return float(str(np.float32(value))) if code == "f" else value

    def string(self) -> str:
        """A string, cut if it is longer than any that a head's config depends on."""
        data = self.take(self.scalar("Q"), "a string")
        return data[:MAX_STRING].tobytes().decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        return self.scalar(_code(kind))

    def array(self) -> list[Any] | range:
        """A short array of numbers; of a longer one, or of strings, only a range as long."""
        kind = self.scalar("I")
        count = self.scalar("Q")
        if kind == STRING:
            for _ in range(count):
                self.take(self.scalar("Q"), "a string")
            return range(count)
        code = _code(kind)
        numbers = self.take(count * struct.calcsize(code), "an array")
        if count > MAX_LISTED:
            return range(count)
        values = np.frombuffer(numbers, np.dtype(code).newbyteorder("<")).tolist()
        return [float(str(np.float32(v))) for v in values] if code == "f" else values


def _code(kind: int) -> str:
    """The code in struct for a type of numbers."""
    if kind == ARRAY:
        raise Refused("it holds arrays of arrays, which no head has")
    if kind not in SCALARS:
        raise Refused(f"it holds a value of the unknown type {kind}")
    return SCALARS[kind]


def _tensor(name: str, shape: tuple[int, ...], kind: int, data: np.ndarray) -> Stored:
    """A tensor whose bytes begin at ``data[0]``."""
    form, width, num_bytes, decode = _block_format(name, kind)
    if not is_shape(shape) or max(shape, default=0) > LARGEST or (shape and shape[-1] % width):
        raise Refused(f"{name} is {form} {shown(shape)}, which cannot be")
    size = math.prod(shape) // width * num_bytes
    if size > len(data):
        raise CutOff(f"{name} runs past the end")
    return Stored(form, shape, data[:size], decode=decode)


def _block_format(name: str, kind: int) -> Block:
    """The block format of a type, as the package ``gguf`` knows it if it is not plain."""
    if kind in PLAIN:
        return PLAIN[kind], 1, np.dtype(FORMATS[PLAIN[kind]]).itemsize, None
    try:
        import gguf
    except ImportError:
        raise Refused(
            f"{name} has GGUF tensor type {kind}, which takes the package gguf to read: install "
            "it with pip install 'mlx-eagle[gguf]', or convert the head to GGUF as F16"
        ) from None
    try:
        form = gguf.GGMLQuantizationType(kind)
        width, num_bytes = gguf.GGML_QUANT_SIZES[form]
        gguf.quants.dequantize(np.zeros((1, num_bytes), np.uint8), form)
    except (KeyError, NotImplementedError, ValueError):
        raise Refused(
            f"{name} has GGUF tensor type {kind}, which nobody here knows to read; convert the "
            "head to GGUF as F16"
        ) from None
    decode = gguf.quants.dequantize
    return form.name, width, num_bytes, lambda data: decode(data.reshape(-1, num_bytes), form)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of the file; ValueError if it is cut off or holds no drafter."""
    try:
        return _read(_Reader(map_file(path)))
    except CutOff as err:
        raise ValueError(f"{path.name} is cut off ({err}); download it again") from err
    except Refused as err:
        raise ValueError(f"{path.name} was not read: {err}") from err


def _read(reader: _Reader) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if reader.take(4).tobytes() != b"GGUF":
        raise Refused("it is no GGUF file")
    version = reader.scalar("I")
    if version not in (2, 3):
        raise Refused(f"it is GGUF version {version}; versions 2 and 3 are read")
    num_tensors = reader.scalar("Q")
    num_values = reader.scalar("Q")
    if max(num_tensors, num_values) > MAX_ENTRIES:
        raise Refused(f"it has {max(num_tensors, num_values)} entries, more than any draft head")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.string()
        value = reader.value(reader.scalar("I"))
        if key in KEYS:
            metadata[key] = value
    architecture = metadata.get(ARCHITECTURE)
    layout = layout_of(architecture)
    prefix = f"{architecture}."
    said = _config({key.removeprefix(prefix): v for key, v in metadata.items()}, layout)
    first = layout.first_block(architecture, said)
    entries = [_entry(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not is_whole(alignment) or not 0 < alignment <= MAX_ALIGNMENT:
        raise Refused(
            f"its general.alignment is {shown(alignment)}, expected 1 to {MAX_ALIGNMENT}"
        )
    start = -(-reader.at // alignment) * alignment
    tensors = {}
    for tensor, shape, kind, offset in entries:
        new = layout.new_name(tensor, first)
        if new is not None:
            tensors[new] = _tensor(tensor, shape, kind, reader.data[start + offset :])
    return layout.config(said), layout.undone(tensors)


def _entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """The name, shape, type and offset of a tensor."""
    name = reader.string()
    dims = reader.scalar("I")
    check_name(name, "the file")
    if dims > MAX_DIMS:
        raise Refused(f"{name} has {dims} dimensions")
    shape = tuple(reader.scalar("Q") for _ in range(dims))[::-1]
    return name, shape, reader.scalar("I"), reader.scalar("Q")


def _config(said: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The metadata ``said``, without the architecture in their keys, in the keys of a config."""
    config = renamed(said, {ARCHITECTURE: ARCHITECTURE, **layout.keys})
    scaling = renamed(said, SCALING_KEYS)
    for name, value in (config | scaling).items():
        if isinstance(value, range):
            raise Refused(f"its {name} is a list of {len(value)} values, which no head has")
    tokens = said.get(TOKENS)
    if isinstance(tokens, range):
        config.setdefault("vocab_size", len(tokens))
    if scaling.get("rope_type", "none") != "none":
        config["rope_scaling"] = scaling
    return config
