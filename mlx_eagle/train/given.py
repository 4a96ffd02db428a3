"""Drafters that training starts from: opened in every form that there is of them."""

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..convert import convert
from ..convert.checkpoint import DraftCheckpoint
from ..convert.layouts import MASKED_FEATURES
from ..convert.pipeline import open_published
from ..drafters.feature_drafter import FeatureDrafter
from ..drafters.folder import kind_in
from ..drafters.kind import LoadOptions
from ..drafters.kinds import KINDS, is_converted, kind_of
from ..drafters.target_parts import holder_of, read_target_config
from ..system.hub import locate

FILES = ("*.json", "*.safetensors", "*.bin", "*.gguf")


@dataclass
class Given:
    """A drafter to begin with: its kind, and how it was ``published``, None if it came converted.

    ``kind`` is "peagle" of an EAGLE head that drafts in one pass. ``path`` is where it was found,
    ``target`` the folder or repository of its target. ``scratch`` keeps folders that were made
    for it.
    """

    source: str
    kind: str
    path: Path
    published: DraftCheckpoint | None
    target: str
    scratch: Any = None

    @cached_property
    def folder(self) -> Path:
        """Folder of its converted form, which lives as long as this object does."""
        if self.published is None:
            return self.path
        made = tempfile.TemporaryDirectory(prefix="mlx-eagle-")
        folder = Path(made.name) / "drafter"
        convert(self.published.source, str(folder), quantize=False, target=self.target)
        self.scratch = (self.scratch, made)
        return folder

    def load(self, model: nn.Module, dtype: mx.Dtype | None) -> FeatureDrafter:
        """Load it for ``model``, computing in ``dtype``."""
        kind, config = kind_of(self.folder)
        return kind.load(self.folder, config, model, LoadOptions(dtype=dtype))


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
    checkpoint = None
    if is_converted(path):
        _, config = kind_of(path)
        kind = kind_in(config)
        is_parallel = config.get("mask_token_id") is not None
    else:
        kind, checkpoint = open_published(source, None, target)
        is_parallel = any(name.endswith(MASKED_FEATURES) for name in checkpoint.tensors)
    kind = "peagle" if kind == "eagle3" and is_parallel else kind
    return Given(name, kind, path, checkpoint, target)
