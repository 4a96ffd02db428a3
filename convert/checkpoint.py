"""Open a checkpoint as it was published: its config and its tensors by their own names.

Folders, shards and file formats are handled here; what a tensor means is decided elsewhere.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_eagle.system.hub import locate
from mlx_eagle.system.json_schema import check, read_object, read_weight_map
from mlx_eagle.system.safetensors import check_name, read_header

from .gguf import read_gguf
from .mistral import usual_keys
from .schema import CONFIG
from .stored import Stored, map_file
from .torch_file import read_bin

CONFIG_FILES = ("*.json",)
MOST_SHARED = 2
"""How often the bytes of a file may be used: twice, where embedding and lm_head are tied."""


@dataclass(frozen=True)
class Checkpoint:
    """``tensors`` under the names of the files; nothing of them has been read yet.

    ``source`` is the path or repository id as the user gave it.
    """

    source: str
    config: dict[str, Any]
    tensors: dict[str, Stored]
    files: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def sha256(self) -> dict[str, str]:
        """The sha256 of each weight file, by its name."""
        sums = {}
        for path in self.files:
            with path.open("rb") as file:
                sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        return sums


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's ``config.json``, or Mistral's ``params.json`` in its keys.

    Raises ValueError where both are missing or no JSON object.
    """
    path = folder / "config.json"
    if not path.exists() and (folder / "params.json").exists():
        return usual_keys(read_object(folder / "params.json"))
    if not path.exists():
        raise ValueError(f"{folder} has no {path.name}, which a checkpoint needs")
    return read_object(path)


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of one shard; ValueError where it is cut off or no safetensors file."""
    header, data = read_header(path), map_file(path)
    return {
        name: Stored(entry.dtype, entry.shape, data[entry.start : entry.end])
        for name, entry in header.items()
    }


@dataclass(frozen=True)
class Format:
    """One way to store tensors: which files, and what reads one."""

    patterns: tuple[str, ...]
    index: str
    read: Callable[[Path], dict[str, Stored]]


# In order of preference where a folder has both.
FORMATS = (
    Format(
        ("model.safetensors", "consolidated.safetensors", "*.safetensors"),
        "model.safetensors.index.json",
        read_safetensors,
    ),
    Format(("pytorch_model.bin", "pytorch_model*.bin"), "pytorch_model.bin.index.json", read_bin),
)


def find_shards(folder: Path, form: Format) -> list[Path]:
    """The shards of that format in the folder, none where it has none of it.

    Raises ValueError where the index names a shard that is not there.
    """
    index = folder / form.index
    if index.exists():
        names = sorted(set(read_weight_map(index).values()))
        for name in names:
            if not (folder / name).is_file():
                raise ValueError(
                    f"{folder} lacks {name}, which {form.index} names; download it again"
                )
        return [folder / name for name in names]
    for pattern in form.patterns:
        if shards := sorted(path for path in folder.glob(pattern) if path.is_file()):
            return shards
    return []


def _open_gguf(source: str, path: Path) -> Checkpoint:
    config, tensors = read_gguf(path)
    return _checked(Checkpoint(source, config, tensors, (path,)), path)


def _checked(checkpoint: Checkpoint, where: Path) -> Checkpoint:
    """The checkpoint, its config of the right types and its tensors no more than its files."""
    check(checkpoint.config, CONFIG, where)
    for name in checkpoint.tensors:
        check_name(name, checkpoint.source)
    stored = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    if stored > MOST_SHARED * checkpoint.num_bytes:
        raise ValueError(
            f"{checkpoint.source} has tensors of {stored} bytes in files of "
            f"{checkpoint.num_bytes}: they lie over one another, and the checkpoint is damaged"
        )
    return checkpoint


def open_checkpoint(source: str, revision: str | None = None) -> Checkpoint:
    """Open a folder, a ``.gguf`` file, a hub repository or a ``.gguf`` file in one.

    Raises ValueError for what is missing, cut off or not a checkpoint.
    """
    folder = locate(source, CONFIG_FILES, revision)
    if folder.is_file():
        if folder.suffix != ".gguf":
            raise ValueError(f"{source} is a file; give the folder it is in, or a .gguf file")
        return _open_gguf(source, folder)
    for form in FORMATS:
        # On the hub this downloads the weights, and nothing where they have another format.
        locate(source, (*CONFIG_FILES, *form.patterns), revision)
        if shards := find_shards(folder, form):
            tensors: dict[str, Stored] = {}
            for shard in shards:
                tensors |= form.read(shard)
            config = read_config(folder)
            checkpoint = Checkpoint(source, config, tensors, tuple(shards))
            return _checked(checkpoint, folder / "config.json")
    # Of a repository the local cache may hold one of several, so there it must be named.
    is_local = folder == Path(source).expanduser()
    ggufs = sorted(folder.glob("*.gguf")) if is_local else []
    if len(ggufs) == 1:
        return _open_gguf(source, ggufs[0])
    if ggufs:
        raise ValueError(
            f"{source} has {len(ggufs)} GGUF files ({', '.join(p.name for p in ggufs)}): "
            "give the path of one"
        )
    raise ValueError(
        f"{source} has no weights: expected model.safetensors or pytorch_model.bin (of a GGUF "
        "repository give one file, owner/name/file.gguf)"
    )
