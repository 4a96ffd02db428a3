"""Write a model's checkpoint with other MTP layers in it, such as trained ones.

Bytes are copied from file to file, and files without such layers are linked where that is
possible, so that nothing of the model is loaded.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mlx_eagle.drafters.kinds import KINDS, is_converted
from mlx_eagle.drafters.target_parts import INDEX, find_shards, read_target_config, read_tensors
from mlx_eagle.system.atomic_folder import new_folder
from mlx_eagle.system.hub import locate
from mlx_eagle.system.json_file import read_object
from mlx_eagle.system.safetensors import Entry, read_header, save_arrays

from .stored import map_file

ADDED = "mtp.safetensors"  # file for layers that the checkpoint lacks; mlx-lm does not read it
PREFIX = "mtp."  # of names in a checkpoint that folders of such layers may leave out
FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.md", "LICENSE*")
Places = dict[str, tuple[Path, Entry]]


def stitch(layers: str, target: str, folder: str) -> Path:
    """Write the checkpoint ``target`` into ``folder``, with the MTP layers in ``layers``.

    Tensors that the checkpoint has are replaced in their places; where it has none, as mlx-lm
    leaves them out, they are added in a file of their own, which its index names. Raises
    ValueError, one sentence, where they do not belong together, and leaves nothing behind.
    """
    destination = Path(folder).expanduser()
    if destination.exists():
        raise ValueError(f"{folder} is there already; remove it or choose another")
    source = locate(target, FILES)
    config = read_target_config(source) if source.is_dir() else {}
    found = (kind.parts_of(config) for kind in KINDS.values())
    is_part = next((each for each in found if each is not None), None)
    if is_part is None or not any(source.glob("*.safetensors")):
        raise ValueError(
            f"{target} is no model in safetensors that has MTP layers; give the one that "
            f"{layers} was trained for"
        )
    new = _layers_in(layers, is_part)
    own = read_target_config(locate(layers, FILES))
    sizes = [(each.get("text_config") or each).get("hidden_size") for each in (own, config)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ValueError(
            f"{layers} is for a model of hidden size {sizes[0]}, and that of {target} is "
            f"{sizes[1]}; give the model that the layers were taken from"
        )
    holders = [source / name for name in find_shards(str(source), is_part)]
    old = _places(holders, is_part)
    _check(new, old, layers, target)
    if not old and (source / ADDED).exists():
        raise ValueError(f"{target} has {ADDED}, which {INDEX} does not name; remove one of them")
    with new_folder(destination) as draft:
        for path in sorted(source.rglob("*")):
            to = draft / path.relative_to(source)
            if path.is_file() and not any(x.startswith(".") for x in to.relative_to(draft).parts):
                to.parent.mkdir(parents=True, exist_ok=True)
                _copy(path, to, is_changed=path in holders or path.name == INDEX)
        if old:
            for name, (path, entry) in new.items():
                shard, place = old[name]
                with (draft / shard.name).open("r+b") as file:
                    file.seek(place.start)
                    file.write(map_file(path)[entry.start : entry.end].data)
        else:
            _add(new, draft)
    return destination


def _layers_in(layers: str, is_part: Callable[[str], bool]) -> Places:
    """Find the tensors of a folder of MTP layers, by their names in the model's checkpoint."""
    folder = locate(layers, FILES)
    stored = _places(sorted(folder.glob("*.safetensors")), lambda name: True)
    named = {name if is_part(name) else PREFIX + name: place for name, place in stored.items()}
    # Converted layers may be packed, and their norms are others than those that are published.
    if not named or not all(map(is_part, named)) or is_converted(folder):
        raise ValueError(
            f"{layers} is no folder of this model's MTP layers; give what mlx_eagle.train wrote "
            "under published, for --init mtp"
        )
    return named


def _places(files: list[Path], is_wanted: Callable[[str], bool]) -> Places:
    return {
        name: (file, entry)
        for file in files
        for name, entry in read_header(file).items()
        if is_wanted(name)
    }


def _check(new: Places, old: Places, layers: str, target: str) -> None:
    """Raise ValueError where tensors that are there are not of the same names, types and sizes."""
    for name, (_, entry) in new.items() if old else ():
        there = old[name][1] if name in old else None
        if there is None or (there.dtype, there.shape) != (entry.dtype, entry.shape):
            has = "none" if there is None else f"{there.dtype} {list(there.shape)}"
            raise ValueError(
                f"{layers} has {name} as {entry.dtype} {list(entry.shape)}, and {target} has "
                f"{has}; give the model that the layers were taken from"
            )


def _copy(path: Path, to: Path, is_changed: bool) -> None:
    """Link a file, or copy it where it is changed afterwards or there are no links."""
    with suppress(OSError):  # another disk, or one without links
        if not is_changed:
            os.link(path.resolve(), to)
            return
    shutil.copyfile(path, to)


def _add(new: Places, draft: Path) -> None:
    """Add these tensors in a file of their own, and name all tensors in the index."""
    index = draft / INDEX
    values = read_object(index) if index.exists() else {}
    if not values.get("weight_map"):
        there = _places(sorted(draft.glob("*.safetensors")), lambda name: True)
        values["weight_map"] = {name: path.name for name, (path, _) in there.items()}
    values["weight_map"] |= dict.fromkeys(new, ADDED)
    size = (values.get("metadata") or {}).get("total_size")
    if isinstance(size, int):
        added = sum(entry.end - entry.start for _, entry in new.values())
        values["metadata"]["total_size"] = size + added
    arrays = read_tensors({path for path, _ in new.values()}, lambda name: True)
    named = {name if name in new else PREFIX + name: array for name, array in arrays.items()}
    save_arrays(draft / ADDED, named, layout="pt")
    index.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
