"""Recipe: how drafters of one kind are trained; each kind has a file of its own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import dequantize_model

from ..convert.checkpoint import DraftCheckpoint
from ..convert.layouts import HeadFiles, places_of
from ..drafters.folder import read_weights
from ..drafters.kinds import KINDS, kind_of
from ..drafters.quantize import Quantization, packed
from .batches import TokenBatch
from .given import Given
from .settings import TrainSettings
from .student import Student


class Recipe(ABC):
    """A student, what its target tells of a batch, and its losses.

    ``depth`` is the length of its drafts in evaluations, ``weights`` (terms,) are those of its
    losses. ``given`` is the drafter to begin with, if any; the ``teacher`` is the frozen target.
    """

    teacher: Any

    def __init__(
        self, settings: TrainSettings, student: Student, model: nn.Module, given: Given | None
    ):
        packing = (settings.q_bits, settings.q_group_size)
        self.quantization = Quantization(*packing) if settings.quantize else None
        self.settings = settings
        self.student = student
        self.model = model
        self.given = given
        self.depth = settings.num_steps
        self.weights = settings.step_weights

    @abstractmethod
    def teach(self, batch: TokenBatch, epoch: int) -> tuple[mx.array, Any]:
        """Return features (B, T, F) and the target's other answers, with ``counts`` by term."""

    @abstractmethod
    def losses(
        self, head: Any, embeddings: mx.array, features: mx.array, targets: Any
    ) -> mx.array:
        """Compute the losses (terms,) of a batch, given the embeddings (B, T, h) of its tokens."""

    @abstractmethod
    def drafts(self, tokens: np.ndarray, rows: mx.array) -> np.ndarray:
        """Draft greedily along tokens (B, T): target ids (depth, K), as if earlier ones were kept.

        ``rows`` (K,) are the slots, numbered b * T + i; slot i drafts what follows token i + 1.
        """

    @abstractmethod
    def files(self, notes: Mapping[str, Any], is_final: bool = False) -> HeadFiles:
        """Return ``config.json``, with ``notes``, and the arrays of the converted folder.

        What is learnt is in float32, but in the ``is_final`` head in the type that it is used in,
        and quantized if that is asked for.
        """

    @abstractmethod
    def published(self) -> HeadFiles | None:
        """Return config and tensors in the layout that the drafter came in, None without one."""


class GivenRecipe(Recipe):
    """A recipe of drafters that are given, and written again in the forms that they came in."""

    given: Given

    def published_names(self, checkpoint: DraftCheckpoint) -> Mapping[str, str]:
        """Return the published name of each parameter that is trained."""
        _, own = KINDS[self.given.kind].convert(checkpoint.tensors, checkpoint.config)
        return places_of(checkpoint, own)

    def published_parts(
        self, names: Mapping[str, str], own: str, change: mx.array
    ) -> dict[str, mx.array]:
        """Return the changes of the published tensors that a parameter is made of, by name."""
        return {names[own]: change}

    def to_write(self, config: Mapping[str, Any], arrays: dict[str, mx.array]) -> HeadFiles:
        """Return what is written of a config and arrays, converted or as published."""
        return dict(config), arrays

    def _changes(self) -> dict[str, mx.array]:
        """Return how much each parameter has changed, by its name before LoRA, in float32."""
        head = self.student.head
        added = {
            f"{path}.weight": module.scale * (module.lora_b.T @ module.lora_a.T)
            for path, module in head.named_modules()
            if isinstance(module, LoRALinear)
        }
        if added:
            return added
        before = self.given.load(self.model, mx.float32).head
        dequantize_model(before)
        initial = dict(tree_flatten(before.parameters()))
        trained = tree_flatten(head.trainable_parameters())
        return {name: array - initial[name] for name, array in trained}

    def files(self, notes: Mapping[str, Any], is_final: bool = False) -> HeadFiles:
        """Return the given drafter's files with what was learnt; what was not is as it was."""
        _, config = kind_of(self.given.folder)
        arrays = read_weights(self.given.folder)
        default = config.get("quantization") or {}
        for name, change in self._changes().items():
            stored = arrays[name]
            path = name.removesuffix(".weight")
            if f"{path}.scales" in arrays:
                parts = [arrays.pop(f"{path}.{part}") for part in ("scales", "biases")]
                entry = default.get(path, default)
                stored = mx.dequantize(stored, *parts, entry["group_size"], entry["bits"])
            array = stored.astype(mx.float32) + change
            arrays[name] = array.astype(stored.dtype) if is_final else array
        config, arrays = self.to_write(config, arrays)
        if is_final:
            never = KINDS[self.given.kind].never_quantized
            config, arrays = packed(config, arrays, self.quantization, never)
        return config | dict(notes), arrays

    def published(self) -> HeadFiles | None:
        """Return what the drafter was published as, every tensor under its name and in its type.

        Its values stay where nothing was learnt.
        """
        checkpoint = self.given.published
        if checkpoint is None:
            return None
        arrays = checkpoint.arrays()
        names = self.published_names(checkpoint)
        for own, change in self._changes().items():
            if not mx.any(change != 0).item():
                continue
            for name, part in self.published_parts(names, own, change).items():
                stored = arrays[name]
                arrays[name] = (stored.astype(mx.float32) + part).astype(stored.dtype)
        return self.to_write(checkpoint.config, arrays)
