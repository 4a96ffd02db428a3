"""Tensors out of a target's own checkpoint: only the shards that hold them are read or fetched.

mlx-lm drops the layers that predict further tokens when it converts a model, so a converted target
sends back to the one that it was made from, by its card.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError

from ..system.hub import REPO_ID, fetch
from ..system.json_schema import read_weight_map
from ..system.safetensors import read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CARD = "README.md"
CONFIG = "config.json"
FRONT = re.compile(r"\A---\s*\n(.*?)\n---", re.DOTALL)
MLX = re.compile(r"^(?:library_name: *|- *)mlx *$", re.MULTILINE)
BASE_MODEL = re.compile(r"^base_model: *(?:\n *- *)?[\"']?([\w.-]+/[\w.-]+)", re.MULTILINE)
MOST_CONVERSIONS = 3  # a quantized copy of a copy is followed that far

IsWanted = Callable[[str], bool]


def take_tensors(source: str, is_wanted: IsWanted) -> tuple[dict[str, mx.array], str]:
    """The tensors that are wanted, and the checkpoint that had them.

    ``source`` is the target's folder or repository id. Where it has none and is a conversion, the
    model that its card names is looked into. Raises ValueError where no one has any.
    """
    looked: list[str] = []
    found = _search(source, is_wanted, looked)
    if found is None:
        raise ValueError(
            f"{' and '.join(looked)} {'holds' if len(looked) == 1 else 'hold'} no MTP layers: "
            "mlx-lm leaves them out where it converts a model, so give the checkpoint as "
            "published as --model, or name a folder of MTP layers or another drafter."
        )
    place, names = found
    return read_tensors(_files(place, names), is_wanted), place


def holder_of(source: str, is_wanted: IsWanted) -> str | None:
    """The checkpoint that ``take_tensors`` would take from; no weights are read or fetched."""
    found = _search(source, is_wanted, [])
    return None if found is None else found[0]


def _search(source: str, is_wanted: IsWanted, looked: list[str]) -> tuple[str, list[str]] | None:
    """The checkpoint that has wanted tensors, and the names of its files that hold them."""
    place: str | None = source
    while place is not None and place not in looked and len(looked) <= MOST_CONVERSIONS:
        looked.append(place)
        if names := find_shards(place, is_wanted):
            return place, names
        place = made_from(place)
    return None


def find_shards(source: str, is_wanted: IsWanted) -> list[str]:
    """The names of the files of a folder or repository that hold wanted tensors."""
    folder = Path(source).expanduser()
    is_local = folder.is_dir()
    if not is_local:
        if not REPO_ID.fullmatch(source):
            raise ValueError(f"{source} does not exist, and it is not a repository id either")
        folder = fetch(source, (INDEX, CONFIG))
    if (folder / INDEX).is_file():
        places = read_weight_map(folder / INDEX)
        return sorted({file for name, file in places.items() if is_wanted(name)})
    if is_local:
        shards = sorted(folder.glob("*.safetensors"))
        return [shard.name for shard in shards if any(map(is_wanted, read_header(shard)))]
    return [SINGLE] if any(map(is_wanted, _names_in_single(source))) else []


def _names_in_single(repo: str) -> Iterable[str]:
    """The tensors of a repository of one file, by its first bytes."""
    try:
        return HfApi().parse_safetensors_file_metadata(repo, SINGLE).tensors
    except (NotASafetensorsRepoError, HfHubHTTPError):
        return ()  # it has none, or is another format


def _files(source: str, names: list[str]) -> list[Path]:
    """These files of a folder or repository, fetched where need be."""
    folder = Path(source).expanduser()
    is_local = folder.is_dir()
    if not is_local:
        folder = fetch(source, tuple(names))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        way_out = "fetch it again." if is_local else "check the connection and try again."
        raise ValueError(
            f"{source} has {missing[0]} in its index, but the file is missing: {way_out}"
        )
    return [folder / name for name in names]


def read_target_config(source: str) -> dict[str, Any]:
    """The ``config.json`` of a folder or repository; {} where there is none."""
    folder = Path(source).expanduser()
    folder = folder if folder.is_dir() else fetch(source, (CONFIG,))
    found: Any = json.loads(_text(folder / CONFIG) or "{}")
    return found if isinstance(found, dict) else {}


def read_tensors(files: Iterable[Path], is_wanted: IsWanted) -> dict[str, mx.array]:
    """The wanted tensors of these files; the others are not read."""
    found: dict[str, mx.array] = {}
    for file in files:
        read_header(file)  # a sentence where it is damaged
        loaded: Any = mx.load(str(file))
        found |= {name: array for name, array in loaded.items() if is_wanted(name)}
    return found


def made_from(source: str) -> str | None:
    """The model that a conversion was made from, by its card; None where it is no conversion."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = fetch(source, (CARD, CONFIG))
    config, card = (_text(folder / name) for name in (CONFIG, CARD))
    front = FRONT.match(card)
    if front is None or not (MLX.search(front[1]) or '"quantization"' in config):
        return None
    base = BASE_MODEL.search(front[1])
    return base[1] if base is not None and base[1] != source else None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
