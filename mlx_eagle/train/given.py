"""Drafters that training starts from: opened in every form, and written again as they came in."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..convert import convert
from ..convert.checkpoint import DraftCheckpoint
from ..convert.pipeline import open_published
from ..drafters.feature_drafter import FeatureDrafter
from ..drafters.folder import read_weights
from ..drafters.kind import LoadOptions
from ..drafters.kinds import KINDS, is_converted, kind_of, own_kind
from ..drafters.pairs import pairs_for
from ..drafters.target_parts import MOST_STEPS, holder_of, made_from, read_target_config
from ..system.atomic_folder import new_file
from ..system.hub import locate, snapshot_of
from ..system.safetensors import save_arrays

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
        return kind.load(self.folder, config, model, LoadOptions(dtype=dtype))

    def arrays(self) -> tuple[dict[str, Any], dict[str, mx.array]]:
        """Return the config and the arrays of the converted folder."""
        _, config = kind_of(self.folder)
        return config, read_weights(self.folder)


def open_given(name: str, target: str) -> Given:
    """Open what ``--init`` names, without its weights; see ``Given``.

    It is a folder or repository of a drafter, converted or as published, or the name of a kind
    that the target brings itself. Raises ValueError for anything else.
    """
    source: str | None = name
    if name in KINDS:
        is_part = KINDS[name].parts_of(read_target_config(target))
        source = None if is_part is None else holder_of(target, is_part)
    if source is None:
        raise ValueError(
            f"{target} has no {name} layers of its own, nor has the model that it was made from: "
            "name another drafter with --init."
        )
    path = locate(source, FILES)
    if is_converted(path):
        _, config = kind_of(path)
        return Given(name, str(config.get("kind", "eagle3")), path, None)
    kind, checkpoint = open_published(source, None, target)
    return Given(name, kind, path, checkpoint)


def converted(given: Given, target: str) -> Given:
    """Return it with the folder of its converted form, which lives as long as the result does."""
    if given.published is None or is_converted(given.folder):
        return given
    scratch = tempfile.TemporaryDirectory(prefix="mlx-eagle-")
    folder = Path(scratch.name) / "drafter"
    convert(given.published.source, str(folder), quantize=False, target=target)
    return replace(given, folder=folder, scratch=(given.scratch, scratch))


def same_tensors(checkpoint: DraftCheckpoint, kind: str) -> dict[str, str]:
    """Find the parameters that are published as they are: their names there."""
    _, own = KINDS[kind].convert(checkpoint.tensors, checkpoint.config)
    names = {id(tensor): name for name, tensor in checkpoint.tensors.items()}
    return {name: names[id(tensor)] for name, tensor in own.items() if id(tensor) in names}


def write_published(folder: Path, config: Mapping[str, Any], arrays: dict[str, mx.array]) -> str:
    """Write a drafter as it is published into a part of ``folder``, and return where it is."""
    to = folder / PUBLISHED
    to.mkdir(exist_ok=True)
    write_files(to, config, arrays, "pt")
    return str(to)


def write_files(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, mx.array] | None = None,
    layout: str = "mlx",
) -> None:
    """Write the files of a drafter into ``folder``, each completely or not at all.

    Without ``weights``, those that are there stay as they are; ``layout`` is as in
    ``save_arrays``.
    """
    if weights is not None:
        with new_file(folder / "model.safetensors") as draft:
            save_arrays(draft, weights, layout)
    with new_file(folder / "config.json") as draft:
        text = json.dumps(config, indent=4, sort_keys=layout == "mlx") + "\n"
        draft.write_text(text, encoding="utf-8")


def stored_arrays(checkpoint: DraftCheckpoint) -> dict[str, mx.array]:
    """Read the tensors of a checkpoint in their own types."""
    return {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
