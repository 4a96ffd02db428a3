"""What the converter needs to know of the target: sizes, tokenizer files, shared weights.

Reads an mlx-lm model folder, or a transformers one, without building the model.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_eagle.drafters.load import TargetSizes
from mlx_eagle.system.hub import locate
from mlx_eagle.system.json_schema import check, read_weight_map, shown

from .checkpoint import read_config, read_safetensors
from .schema import PACKING, TARGET
from .stored import Stored

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
)
PART = 4096
INDEX = "model.safetensors.index.json"


def _first(config: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int:
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise ValueError(f"the config.json of {name} has none of {', '.join(keys)}; is it a model?")


@dataclass(frozen=True)
class TargetFolder:
    """A target by its folder and config; weights are looked at on demand."""

    name: str
    folder: Path
    config: dict[str, Any]

    @property
    def _text(self) -> dict[str, Any]:
        return self.config.get("text_config") or self.config

    @property
    def hidden_size(self) -> int:
        return _first(self._text, ("hidden_size", "n_embd", "d_model"), self.name)

    @property
    def num_layers(self) -> int:
        return _first(self._text, ("num_hidden_layers", "n_layer", "n_layers"), self.name)

    @property
    def vocab_size(self) -> int:
        return _first(self._text, ("vocab_size",), self.name)

    @cached_property
    def _weights(self) -> dict[str, Stored]:
        """The shards that hold embedding and lm_head."""
        wanted = ("embed_tokens.", "lm_head.")
        if (self.folder / INDEX).exists():
            places = read_weight_map(self.folder / INDEX)
            shards = {file for name, file in places.items() if any(w in name for w in wanted)}
        else:
            shards = {"model.safetensors"}
        if not all((self.folder / shard).exists() for shard in shards):
            locate(self.name, tuple(shards))
        tensors: dict[str, Stored] = {}
        for shard in sorted(shards):
            if (self.folder / shard).is_file():
                tensors |= read_safetensors(self.folder / shard)
        return tensors

    def table(self, module: str) -> mx.array | None:
        """The matrix (V, h) of ``embed_tokens`` or ``lm_head``, dequantized; None without one."""
        suffix = f"{module}.weight"
        name = next((n for n in self._weights if f".{n}".endswith(f".{suffix}")), None)
        if name is None:
            return None
        path = name.removesuffix(".weight")
        weight = self._weights[name].read()
        if f"{path}.scales" not in self._weights:
            return weight
        quantization = self.config.get("quantization") or {}
        own = quantization.get(path)
        chosen = own if isinstance(own, dict) else quantization
        check(chosen, PACKING, self.folder / "config.json", "quantization.")
        biases = self._weights.get(f"{path}.biases")
        try:
            return mx.dequantize(
                weight,
                self._weights[f"{path}.scales"].read(),
                biases.read() if biases is not None else None,
                group_size=chosen.get("group_size"),
                bits=chosen.get("bits"),
                mode=chosen.get("mode", "affine"),
            )
        except ValueError as err:
            raise ValueError(
                f"{name} of {self.name} cannot be unpacked as its config.json says "
                f"({shown(chosen)}): {err}"
            ) from err

    def output_table(self) -> mx.array | None:
        """The lm_head (V, h), which in tied models is the embedding."""
        head = self.table("lm_head")
        return self.table("embed_tokens") if head is None else head

    def copy_tokenizer(self, folder: Path) -> list[str]:
        """Copy the tokenizer's files there; their names."""
        files = {file for pattern in TOKENIZER_FILES for file in self.folder.glob(pattern)}
        for file in files:
            shutil.copyfile(file, folder / file.name)
        return sorted(file.name for file in files)


AnyTarget = TargetFolder | TargetSizes
"""A model's folder, or a model at hand, of which only the sizes are looked at."""


def open_target(name: str) -> TargetFolder:
    """The target in a folder or on the hub; ValueError where there is none."""
    folder = locate(name, ("*.json", *TOKENIZER_FILES))
    if folder.is_file():
        raise ValueError(f"{name} is a file; --target takes a model folder or a repository id")
    config = read_config(folder)
    check(config, TARGET, folder / "config.json")
    return TargetFolder(name, folder, config)


def same_values(ours: mx.array, theirs: mx.array | None) -> bool:
    """Whether both hold the same values, whatever their dtypes; a longer target is padded."""
    if theirs is None or theirs.ndim != 2 or theirs.shape[1] != ours.shape[1]:
        return False
    if theirs.shape[0] < ours.shape[0]:
        return False
    # In parts, since the two may be gigabytes and mostly differ in the first row.
    for start in range(0, ours.shape[0], PART):
        parts = (table[start : start + PART].astype(mx.float32) for table in (ours, theirs))
        if not mx.array_equal(*(part[: ours.shape[0] - start] for part in parts)).item():
            return False
    return True
