"""Drafters that training starts from: opened in every form, and written again as they came in."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from ..convert import convert
from ..convert.checkpoint import DraftCheckpoint
from ..convert.pipeline import open_published
from ..drafters.feature_drafter import FeatureDrafter
from ..drafters.folder import read_weights
from ..drafters.kind import LoadOptions
from ..drafters.kinds import KINDS, is_converted, kind_of, own_kind
from ..drafters.pairs import pairs_for
from ..drafters.quantize import Quantization, pack
from ..drafters.target_parts import MOST_STEPS, holder_of, made_from, read_target_config
from ..system.atomic_folder import new_file
from ..system.hub import locate, snapshot_of
from ..system.safetensors import save_arrays
from .lora import changes
from .recipe import HeadFiles, Recipe
from .settings import TrainSettings
from .student import Student

AUTO = "auto"
PUBLISHED = "published"  # folder in the output with the drafter in the layout that it came in
FILES = ("*.json", "*.safetensors", "*.bin", "*.gguf")


def known_drafter(target: str, kinds: Mapping[str, Any]) -> str:
    """Name the drafter that is known for a target, or for the model that it was made from.

    Raises ValueError if none is.
    """
    place: str | None = snapshot_of(target)[0]
    looked: list[str] = []
    while place is not None and place not in looked and len(looked) <= MOST_STEPS:
        looked.append(place)
        fitting = [pair.head for pair in pairs_for(place) if pair.is_seen and pair.kind in kinds]
        if fitting:
            return fitting[0]
        own = own_kind(place)
        if own in kinds:
            return own
        place = made_from(place)[0]
    raise ValueError(
        f"no drafter is known that could be trained for {' or '.join(looked)}: name one with "
        "--init, or leave it out for a fresh one."
    )


@dataclass
class Given:
    """A drafter to begin with: its kind, its converted ``folder``, and how it was published.

    ``published`` is None if it came converted. ``scratch`` keeps folders that were made for it.
    """

    source: str
    kind: str
    folder: Path
    published: DraftCheckpoint | None
    scratch: Any = None

    def load(self, model: nn.Module, dtype: mx.Dtype | None) -> FeatureDrafter:
        """Load it for ``model``, computing in ``dtype``."""
        kind, config = kind_of(self.folder)
        drafter: Any = kind.load(self.folder, config, model, LoadOptions(dtype=dtype))
        found: FeatureDrafter = drafter
        return found

    def arrays(self) -> tuple[dict[str, Any], dict[str, mx.array]]:
        """Return the config and the arrays of the converted folder."""
        _, config = kind_of(self.folder)
        return config, read_weights(self.folder)


def source_of(name: str, target: str) -> str:
    """Return the checkpoint that ``name`` stands for: that of the target's layers for "mtp"."""
    if name not in KINDS:
        return name
    is_part = KINDS[name].parts_of(read_target_config(target))
    place = None if is_part is None else holder_of(target, is_part)
    if place is None:
        raise ValueError(
            f"{target} has no {name} layers of its own, nor has the model that it was made from: "
            "name another drafter with --init."
        )
    return place


def open_given(name: str, target: str) -> Given:
    """Open what ``--init`` names, without its weights; see ``Given``.

    It is a folder or repository of a drafter, converted or as published, or the name of a kind
    that the target brings itself. Raises ValueError for anything else.
    """
    source = source_of(name, target)
    path = locate(source, FILES)
    if is_converted(path):
        _, config = kind_of(path)
        return Given(name, str(config.get("kind", "eagle3")), path, None)
    kind, checkpoint = open_published(source, None, target)
    return Given(name, kind, path, checkpoint)


def converted(given: Given, target: str) -> Given:
    """Return it with the folder of its converted form, which lives as long as the result does."""
    if given.published is None:
        return given
    scratch = tempfile.TemporaryDirectory(prefix="mlx-eagle-")
    folder = Path(scratch.name) / "drafter"
    convert(given.published.source, str(folder), quantize=False, target=target)
    return replace(given, folder=folder, scratch=(given.scratch, scratch))


def same_tensors(checkpoint: DraftCheckpoint, kind: str) -> dict[str, str]:
    """Find the parameters that are published as they are: their names there."""
    make = KINDS[kind].convert
    assert make is not None
    _, own = make(checkpoint.tensors, checkpoint.config)
    names = {id(tensor): name for name, tensor in checkpoint.tensors.items()}
    return {name: names[id(tensor)] for name, tensor in own.items() if id(tensor) in names}


class GivenRecipe(Recipe):
    """A recipe of drafters that are given, and written again in the forms that they came in."""

    def __init__(self, settings: TrainSettings, student: Student, model: nn.Module, given: Given):
        super().__init__(settings, student)
        self.model = model
        self.given = given

    def published_names(self, checkpoint: DraftCheckpoint) -> Mapping[str, str]:
        """Return the published name of each parameter that is trained."""
        return same_tensors(checkpoint, self.given.kind)

    def as_published(self, name: str, change: mx.array) -> mx.array:
        """Return the change of the published tensor that a parameter is."""
        return change

    def published_parts(
        self, names: Mapping[str, str], own: str, change: mx.array
    ) -> dict[str, mx.array]:
        """Return the changes of the published tensors that a parameter is made of, by name."""
        return {names[own]: self.as_published(own, change)}

    def to_write(self, config: Mapping[str, Any], arrays: dict[str, mx.array]) -> HeadFiles:
        """Return what is written of a config and arrays, converted or as published."""
        return dict(config), arrays

    def given_folder(self, scratch: Path) -> Path | None:
        return self.given.folder

    def _changes(self) -> dict[str, mx.array]:
        return changes(self.student.head, self._initial)

    def _initial(self) -> dict[str, mx.array]:
        head = self.given.load(self.model, mx.float32).head
        dequantize_model(head)
        return dict(tree_flatten(head.parameters()))

    def files(
        self,
        notes: Mapping[str, Any],
        dtype: mx.Dtype | None = None,
        quantization: Quantization | None = None,
    ) -> HeadFiles:
        """Return the given drafter's files with what was learnt; see ``Recipe.files``.

        What was not trained stays as it was, and so do types, but that learnt arrays are in
        float32 without ``dtype``.
        """
        config, arrays = self.given.arrays()
        default = config.get("quantization") or {}
        for name, change in self._changes().items():
            stored = arrays[name]
            path = name.removesuffix(".weight")
            if f"{path}.scales" in arrays:
                parts = [arrays.pop(f"{path}.{part}") for part in ("scales", "biases")]
                entry = default.get(path, default)
                stored = mx.dequantize(stored, *parts, entry["group_size"], entry["bits"])
            array = stored.astype(mx.float32) + change
            arrays[name] = array if dtype is None else array.astype(stored.dtype)
        config, arrays = self.to_write(config, arrays)
        if quantization is not None:
            never = KINDS[self.given.kind].never_quantized
            config["quantization"], arrays = quantized(arrays, quantization, never)
        return config | dict(notes), arrays

    def write_published(self, folder: Path) -> str:
        """Write the drafter in the layout that it was published in.

        Every tensor keeps its name and type, and its values where nothing was learnt.
        """
        checkpoint = self.given.published
        if checkpoint is None:
            return ""
        arrays = stored_arrays(checkpoint)
        names = self.published_names(checkpoint)
        for own, change in self._changes().items():
            if not mx.any(change != 0).item():
                continue
            for name, part in self.published_parts(names, own, change).items():
                stored = arrays[name]
                arrays[name] = (stored.astype(mx.float32) + part).astype(stored.dtype)
        return write_layout(folder, *self.to_write(checkpoint.config, arrays))


def write_layout(folder: Path, config: Mapping[str, Any], arrays: dict[str, mx.array]) -> str:
    """Write a drafter as it is published into a part of ``folder``, and return where it is."""
    to = folder / PUBLISHED
    to.mkdir(exist_ok=True)
    with new_file(to / "model.safetensors") as draft:
        save_arrays(draft, arrays, layout="pt")
    with new_file(to / "config.json") as draft:
        draft.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return str(to)


def stored_arrays(checkpoint: DraftCheckpoint) -> dict[str, mx.array]:
    """Read the tensors of a checkpoint in their own types."""
    arrays: dict[str, mx.array] = {}
    for file in checkpoint.files:
        loaded: Any = mx.load(str(file)) if file.suffix == ".safetensors" else {}
        arrays |= {name: loaded[name] for name in checkpoint.tensors if name in loaded}
    for name, tensor in checkpoint.tensors.items():
        if name not in arrays:
            arrays[name] = tensor.read()
    return arrays


def quantized(
    arrays: Mapping[str, mx.array], quantization: Quantization, never: tuple[str, ...]
) -> HeadFiles:
    """Quantize the matrices among these arrays; return the entry of the config, and all arrays."""
    shapes = {
        name.removesuffix(".weight"): array.shape
        for name, array in arrays.items()
        if array.ndim in (2, 3) and name.endswith(".weight") and not name.endswith(never or "/")
    }
    chosen = quantization.choose(shapes)
    packed: dict[str, mx.array] = {}
    for name, array in arrays.items():
        packing = chosen.get(name.removesuffix(".weight"))
        packed |= pack(name, array, packing) if packing else {name: array}
    return quantization.entry(chosen), packed
