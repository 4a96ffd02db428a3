"""A kind of drafter: how it is recognised, converted and opened."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .base import Drafter
from .output_rows import DraftVocab, with_draft_vocab
from .quantize import Quantization, usual_quantization
from .target_parts import TargetSizes


class Tensor(ABC):
    """A tensor of a published checkpoint, read when it is asked for."""

    format: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @abstractmethod
    def read(self) -> mx.array:
        """The values as an array."""


Tensors = Mapping[str, Tensor]
"""The tensors of a checkpoint by the names of its files."""


@dataclass(frozen=True)
class LoadOptions:
    """Options for loading a drafter.

    ``quantize_bits`` quantizes an unquantized one, 0: it stays as it is; None: it is as it was
    converted, or, where it is opened as published, as ``usual_quantization`` says. It computes in
    ``dtype``, None for the target's own. ``tokenizer`` is the target's, where it is known, to
    compare vocabularies, and ``target`` the folder or repository that the target is from.
    ``draft_window`` and ``draft_vocab`` are as in ``open_drafter``.
    """

    quantize_bits: int | None = None
    quantize_group_size: int = 64
    dtype: mx.Dtype | None = None
    draft_window: int | None = None
    draft_vocab: DraftVocab = None
    tokenizer: Any = None
    target: str | None = None

    def limit(self, drafter: Drafter, model: nn.Module) -> Drafter:
        """A drafter for ``model`` with the window and the part of the vocabulary that it gets."""
        drafter = drafter.with_draft_window(self.draft_window)
        return with_draft_vocab(drafter, self.draft_vocab, model, self.tokenizer)

    def quantization(self, published_for: nn.Module | None = None) -> Quantization | None:
        """The quantization of a drafter while it is loaded; None: none.

        ``published_for`` is the target of one that is opened as published. Raises ValueError for
        bits that MLX does not have.
        """
        if self.quantize_bits is None:
            return None if published_for is None else usual_quantization(published_for)
        bits = self.quantize_bits
        return Quantization(bits, self.quantize_group_size) if bits else None


@dataclass(frozen=True)
class Kind:
    """A kind of drafter: one row of the table in ``kinds.py``."""

    title: str
    """Name for people, with its article: "an MTP layer"."""

    load: Callable[[Path, dict[str, Any], nn.Module, LoadOptions], Drafter]
    """Loads a drafter for a target from its folder and ``config.json``; ValueError: no fit."""

    recognise: Callable[[Collection[str], Mapping[str, Any]], bool] = lambda *_: False
    """Whether a checkpoint as published, by its tensors' names and its config, is of this kind."""

    convert: Callable[[Tensors, Mapping[str, Any]], tuple[dict[str, Any], Tensors]] | None = None
    """Config and tensors of the converted folder, from those of a published checkpoint.

    None: the converter has its own way, as for EAGLE heads, or what is published is loaded as it
    is.
    """

    readings: Callable[[Mapping[str, Any]], dict[str, dict[str, Any]]] = lambda _: {}
    """Other readings of a converted config: changes to it by name, for ``--check``."""

    never_quantized: tuple[str, ...] = ()
    """Endings of the names of matrices that are never quantized in a converted folder."""

    parts_of: Callable[[Mapping[str, Any]], Callable[[str], bool] | None] = lambda _: None
    """Picks the tensors of this kind in a model's own checkpoint, by its config; None: none."""

    loads_published: bool = False
    """Whether ``load`` takes checkpoints as published."""

    made_for: Callable[[dict[str, Any], Path, TargetSizes | None], str] = lambda *_: (
        "for any target"
    )
    """Targets that a converted folder is for, in words, by its config.

    Raises ValueError where that is damaged, or where the target of those sizes is not among them.
    """

    by_name: Callable[[nn.Module, LoadOptions], Drafter] | None = None
    """The drafter that the kind's own name opens for a target, if no folder is needed."""
