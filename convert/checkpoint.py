"""Open folders of weights without building a model: a published head, and its target.

Shards and file formats are handled here, and Mistral's ``params.json`` is translated to the usual
keys (as vLLM reads it); the meaning of a tensor is decided elsewhere.
"""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from mlx_eagle.drafters import target_parts
from mlx_eagle.drafters.config import LATENT
from mlx_eagle.drafters.kind import Tensor
from mlx_eagle.drafters.kinds import names_in
from mlx_eagle.drafters.target_parts import TargetSizes
from mlx_eagle.system.fields import check
from mlx_eagle.system.hub import locate, refuse_eagle_4
from mlx_eagle.system.json_file import read_published, read_weight_map
from mlx_eagle.system.safetensors import check_name, read_header

from .dequantize import FLOATS, MLXPacked, unpacked
from .gguf import read_gguf
from .published_config import CONFIG, TARGET, renamed
from .stored import Stored, map_file
from .torch_file import read_bin

MISTRAL_MARK = "mistral_params"
"""A key of configs made from a params.json: rows of q and k are in Mistral's order then."""
MISTRAL_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
    **{key: key for key in ("head_dim", "vocab_size", "rope_theta", "max_position_embeddings")},
    **{key: key for key in (*LATENT, "llama_4_scaling")},
}
MISTRAL_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
    "apply_scale": "apply_yarn_scaling",
}
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
)
PART = 4096  # rows to compare at once
CONFIG_FILES = ("*.json",)
MOST_SHARED = 2
"""Tensors that may share the bytes of a file: two, where embedding and lm_head are tied."""


@dataclass(frozen=True)
class DraftCheckpoint:
    """A published checkpoint: its config, and its tensors by the names in its files, unread.

    ``source`` is the path or repository id as the user gave it.
    """

    source: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def arrays(self) -> dict[str, mx.array]:
        """Read all of its tensors, each in its own type."""
        return {name: tensor.read() for name, tensor in self.tensors.items()}

    def provenance(self) -> dict[str, Any]:
        """Its origin, for a config: the sha256 of each file; a folder here by its name only."""
        sums = {}
        for path in self.files:
            with path.open("rb") as file:
                sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        place = Path(self.source)
        return {"path": place.name if place.exists() else self.source, "files": sums}


def mistral_config(params: Mapping[str, Any]) -> dict[str, Any]:
    """The config that a ``params.json`` amounts to."""
    config = renamed(params, MISTRAL_KEYS)
    if isinstance(params.get("yarn"), Mapping):
        scaling = renamed(params["yarn"], MISTRAL_YARN)
        # apply_scale lengthens queries and keys; latent attention scales its scores instead.
        in_rope = scaling.get("apply_yarn_scaling", True) and "kv_lora_rank" not in config
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "mscale": 1.0,
            "mscale_all_dim": 0.0 if in_rope else 1.0,
            **scaling,
        }
    return config | {MISTRAL_MARK: True}


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's ``config.json``, or Mistral's ``params.json`` in its keys.

    Raises ValueError if both are missing, or the file holds no JSON object.
    """
    path = folder / "config.json"
    if not path.exists() and (folder / "params.json").exists():
        return mistral_config(read_published(folder / "params.json"))
    if not path.exists():
        raise ValueError(f"{folder} has no {path.name}, which a checkpoint needs")
    return read_published(path)


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of one shard; ValueError if it is cut off or no safetensors file."""
    header = read_header(path)
    data = map_file(path)
    return {
        name: Stored(entry.dtype, entry.shape, data[entry.start : entry.end])
        for name, entry in header.items()
    }


FORMATS = (
    (("model.safetensors", "consolidated.safetensors", "*.safetensors"), read_safetensors),
    (("pytorch_model.bin", "pytorch_model*.bin"), read_bin),
)
"""Patterns of file names, and what reads one file, in order of preference if a folder has both."""


def find_shards(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The shards of a format in a folder; [] if there are none.

    They are those that the index names, or the files of the first of ``patterns`` that has any.
    Raises ValueError if the index names a shard that is missing.
    """
    index = folder / f"{patterns[0]}.index.json"
    if index.exists():
        shards = [folder / name for name in sorted({*read_weight_map(index).values()})]
        lost = [shard.name for shard in shards if not shard.is_file()]
        if lost:
            raise ValueError(
                f"{folder} lacks {lost[0]}, which {index.name} names; download it again"
            )
        return shards
    found = ([p for p in folder.glob(pattern) if p.is_file()] for pattern in patterns)
    return sorted(next(filter(None, found), []))


def read_parts(
    source: str, is_part: Callable[[str], bool], revision: str | None = None
) -> tuple[dict[str, Stored], list[Path]]:
    """The tensors of these names in a model, unread, and the files with them; ({}, []): none.

    Of a repository only these are fetched.
    """
    names = target_parts.find_shards(source, is_part, revision)
    files = target_parts.fetch_files(source, names, is_part, revision) if names else []
    stored = {n: t for file in files for n, t in read_safetensors(file).items() if is_part(n)}
    return stored, files


def _checked(checkpoint: DraftCheckpoint, where: Path) -> DraftCheckpoint:
    """The checkpoint; ValueError for wrong types in its config, or tensors beyond its bytes."""
    check(checkpoint.config, CONFIG, where)
    for name in checkpoint.tensors:
        check_name(name, checkpoint.source)
    tensors = checkpoint.tensors.values()
    stored = sum(tensor.num_bytes for tensor in tensors if isinstance(tensor, Stored))
    if stored > MOST_SHARED * checkpoint.num_bytes:
        raise ValueError(
            f"{checkpoint.source} has tensors of {stored} bytes in files of "
            f"{checkpoint.num_bytes}: they lie over one another, and the checkpoint is damaged"
        )
    return checkpoint


def open_checkpoint(source: str, revision: str | None = None) -> DraftCheckpoint:
    """Open a folder, a ``.gguf`` file, a hub repository or a ``.gguf`` file in one.

    Raises ValueError if it is missing, cut off or no checkpoint.
    """
    folder = locate(source, CONFIG_FILES, revision)
    path = folder / "config.json"
    for name in names_in(read_published(path) if path.is_file() else {}):
        refuse_eagle_4(name, source)
    if folder.is_file() and folder.suffix != ".gguf":
        raise ValueError(f"{source} is a file; give the folder it is in, or a .gguf file")
    for patterns, read in () if folder.is_file() else FORMATS:
        # From the hub this downloads the weights, or nothing if they have another format.
        locate(source, (*CONFIG_FILES, *patterns), revision)
        shards = find_shards(folder, patterns)
        if shards:
            tensors: dict[str, Tensor] = {n: t for s in shards for n, t in read(s).items()}
            config = read_config(folder)
            return _checked(DraftCheckpoint(source, config, tensors, tuple(shards)), path)
    # The local cache may hold one of a repository's GGUF files, so that one must be named.
    is_local = folder == Path(source).expanduser()
    ggufs = [folder] if folder.is_file() else sorted(folder.glob("*.gguf")) if is_local else []
    if len(ggufs) == 1:
        return _checked(DraftCheckpoint(source, *read_gguf(ggufs[0]), (ggufs[0],)), ggufs[0])
    if ggufs:
        raise ValueError(
            f"{source} has {len(ggufs)} GGUF files ({', '.join(p.name for p in ggufs)}): "
            "give the path of one"
        )
    raise ValueError(
        f"{source} has no weights: expected model.safetensors or pytorch_model.bin (of a GGUF "
        "repository give one file, owner/name/file.gguf)"
    )


SIZE_KEYS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "vocab_size": ("vocab_size",),
}


@dataclass(frozen=True)
class TargetFolder(TargetSizes):
    """A target by its folder and config; weights are read on demand."""

    folder: Path = Path()
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, folder: Path, config: Mapping[str, Any]) -> Self:
        """The target of a config; ValueError if that lacks a size."""
        text = config.get("text_config") or config
        sizes = {}
        for size, keys in SIZE_KEYS.items():
            sizes[size] = next((text[key] for key in keys if text.get(key) is not None), None)
            if sizes[size] is None:
                raise ValueError(
                    f"the config.json of {name} has none of {', '.join(keys)}; is it a model?"
                )
        return cls(**sizes, name=name, folder=folder, config=config)

    @cached_property
    def _tables(self) -> dict[str, Tensor]:
        """The embedding and the lm_head, unread."""
        stored, _ = read_parts(
            self.name, lambda name: "embed_tokens." in name or "lm_head." in name
        )
        return unpacked(stored, self.config)

    def table(self, *modules: str) -> mx.array | None:
        """The matrix (V, h) of the first of these modules that is there, dequantized, or None."""
        found = (
            tensor
            for module in modules
            for name, tensor in self._tables.items()
            if f".{name}".endswith(f".{module}.weight")
        )
        table = next(found, None)
        if isinstance(table, MLXPacked):  # then the copy in a head was computed by MLX
            return table.read(FLOATS[table.format])
        return None if table is None else table.read()

    def copy_tokenizer(self, folder: Path) -> list[str]:
        """Copy the tokenizer's files to ``folder``, and return their names."""
        files = {file for pattern in TOKENIZER_FILES for file in self.folder.glob(pattern)}
        for file in files:
            shutil.copyfile(file, folder / file.name)
        return sorted(file.name for file in files)


def open_target(name: str) -> TargetFolder:
    """The target in a folder or on the hub; ValueError if there is none."""
    folder = locate(name, ("*.json", *TOKENIZER_FILES))
    if folder.is_file():
        raise ValueError(f"{name} is a file; --target takes a model folder or a repository id")
    config = read_config(folder)
    check(config, TARGET, folder / "config.json")
    return TargetFolder.of(name, folder, config)


def same_values(ours: mx.array, theirs: mx.array | None) -> bool:
    """True if both hold the same values in any dtypes; further rows of ``theirs`` are padding."""
    num_rows = len(ours)
    if theirs is None or theirs[:num_rows].shape != ours.shape:
        return False
    # In parts, since both may take gigabytes, and they mostly differ in the first row.
    for start in range(0, num_rows, PART):
        rows = slice(start, min(start + PART, num_rows))
        if not mx.array_equal(*(table[rows].astype(mx.float32) for table in (ours, theirs))):
            return False
    return True
