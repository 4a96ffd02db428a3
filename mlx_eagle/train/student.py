"""Student: the head that is trained, made anew or taken from another, and its converted files."""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from ..convert import convert
from ..drafters.config import Eagle3Config, default_ids
from ..drafters.head import Eagle3Head
from ..drafters.head_weights import load_head, split_weights
from ..drafters.kinds import is_converted
from ..drafters.quantize import Quantization, pack
from ..drafters.target_parts import activation_dtype, find_embedding, lm_head_of, rows_of_lm_head
from ..system.atomic_folder import new_file
from ..system.safetensors import save_arrays
from .settings import TrainSettings

TABLE = "embed_tokens"  # an embedding of the head's own, which is never quantized


@dataclass(frozen=True)
class Student:
    """A head in float32, with the parts that it takes from its target.

    ``head`` is an ``Eagle3Head``, or the module of another kind of drafter. ``embed`` maps
    tokens (...,) to (..., h); ``taps`` are the target's layers whose inputs it reads; ``ids``
    (Vd,) int32 are the target ids of the tokens that it can draft; ``dtype``, the target's, is
    the type that it computes in. ``drafter``, of other kinds, is the one around the head.
    """

    head: Any
    embed: Callable[[mx.array], mx.array]
    taps: tuple[int, ...]
    ids: mx.array
    dtype: mx.Dtype
    drafter: Any = None

    @property
    def num_parameters(self) -> int:
        return sum(w.size for _, w in tree_flatten(self.head.trainable_parameters()))


def fresh_student(
    model: nn.Module, model_config: Mapping[str, Any], drafted: np.ndarray, settings: TrainSettings
) -> Student:
    """Make a new head for ``model``, with random layers and the target's rows for its output.

    ``model_config`` is the target's ``config.json``, ``drafted`` (Vd,) are the target ids of the
    tokens that the head can draft, ascending. All that ``settings`` leave open is as in the
    target. The random numbers are MLX's: seed them first. Raises ValueError if the target is too
    shallow for the taps.
    """
    embedding, vocab_size = find_embedding(model)
    num_layers = len(model.layers)
    ids = mx.array(drafted)
    text = model_config.get("text_config") or model_config
    own_taps = tuple(settings.aux_layers or ()) or fitting_taps(num_layers)
    config = _fresh_config(text, settings, own_taps, vocab_size, len(drafted))
    taps = config.taps(num_layers)
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > num_layers:
        raise ValueError(
            f"the target has {num_layers} layers, so it cannot be tapped at {list(taps)}: name "
            "other layers with --aux-layers."
        )
    head = Eagle3Head(config)
    rows = rows_of_lm_head(model, embedding, ids)
    if rows["lm_head.weight"].shape == head.lm_head.weight.shape:
        head.load_weights(list(rows.items()), strict=False)
    head.set_dtype(mx.float32)
    mx.eval(head.parameters())
    return Student(head, embedding, taps, ids, activation_dtype(embedding))


def fitting_taps(num_layers: int) -> tuple[int, ...] | None:
    """Choose three taps for a target that is too shallow for the default ones, which are None.

    They are spread evenly up to the input of the final norm: for 4 layers 1, 2 and 4.
    """
    if list(default_ids(num_layers)) == sorted(set(default_ids(num_layers))):
        return None
    first = min(1, num_layers - 2)
    return first, (first + num_layers) // 2, num_layers


def _fresh_config(
    text: Mapping[str, Any],
    settings: TrainSettings,
    taps: tuple[int, ...] | None,
    vocab_size: int,
    num_drafted: int,
) -> Eagle3Config:
    """Make a config with the target's sizes and a plain rotary embedding of the target's base."""
    size = text["hidden_size"]
    num_heads = text.get("num_attention_heads") or max(1, size // 64)
    head_dim = text.get("head_dim") or size // num_heads
    rope = text.get("rope_parameters") or {}
    theta = text.get("rope_theta") or rope.get("rope_theta") or 10000.0
    return Eagle3Config(
        hidden_size=size,
        target_hidden_size=size,
        num_layers=settings.num_layers or 1,
        num_heads=num_heads,
        num_kv_heads=text.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        intermediate_size=settings.intermediate_size or text.get("intermediate_size") or 4 * size,
        vocab_size=vocab_size,
        draft_vocab_size=num_drafted,
        rms_norm_eps=text.get("rms_norm_eps") or 1e-6,
        max_position_embeddings=max(2048, settings.max_seq_length),
        num_aux=len(taps) if taps else 3,
        aux_boundary_ids=taps,
        aux_ids_source="mlx_eagle.train" if taps else "default",
        rope={"type": "default", "theta": float(theta), "dims": None, "scaling": None},
        has_d2t=num_drafted < vocab_size,
        family="mlx-eagle",
    )


def converted_folder(source: str, scratch: Path, target: str | None) -> Path:
    """Return the converted form of a head, made in the folder ``scratch`` if it is not yet."""
    folder = Path(source).expanduser()
    if not is_converted(folder):
        folder = scratch / "head"
        convert(source, str(folder), quantize=False, target=target)
    return folder


def student_from(source: str, model: nn.Module, target: str | None) -> Student:
    """Take the head in ``source``, converted already or in any form that the converter reads.

    Its shape and vocabulary stay as they are; a quantized head is dequantized. ``target`` is the
    target's folder or repository id, for the converter. Raises ValueError for a head that is more
    than llama layers.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = converted_folder(source, Path(scratch), target)
        attached = load_head(folder, model, dtype=mx.float32)
    head = attached.head
    embedding, _ = find_embedding(model)
    _check_trainable(head.config, source)
    own = head.config.embed_source == "file"
    if head.config.lm_head_source == "target_rows":
        head.config = replace(head.config, lm_head_source="file")
    dequantize_model(head)
    head.set_dtype(mx.float32)
    if head.config.lm_head_source == "target":
        head.share_lm_head(lm_head_of(model, embedding))
    if own:
        head.embed_tokens.freeze()
    mx.eval(head.parameters())
    embed = head.embed_tokens if own else embedding
    return Student(head, embed, attached.taps, attached.ids, activation_dtype(embedding))


def _check_trainable(config: Eagle3Config, source: str) -> None:
    features = {
        "has parallel heads": config.num_parallel_heads > 0,
        "attends to a latent (MLA)": config.latent is not None,
        "scales queries by their position": config.position_scale is not None,
        "has layers of Gemma-4": config.branch_norms or config.values != "projected",
    }
    for feature, holds in features.items():
        if holds:
            raise ValueError(
                f"{source} {feature}, and only heads of llama layers are trained here: start from "
                "another head, or from none."
            )


def head_files(
    student: Student,
    notes: Mapping[str, Any],
    dtype: mx.Dtype | None = None,
    quantization: Quantization | None = None,
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Return ``config.json`` and the arrays of the head as a converted one.

    ``dtype`` is the type that the arrays are stored in (default: float32, as they are trained);
    ``notes`` are added to the configuration.
    """
    config = student.head.config
    weights = dict(tree_flatten(student.head.parameters()))
    arrays = {
        name: array.astype(dtype or mx.float32)
        for name, array in split_weights(weights, config).items()
    }
    shapes = {
        name.removesuffix(".weight"): array.shape
        for name, array in arrays.items()
        if array.ndim == 2 and TABLE not in name
    }
    chosen = quantization.choose(shapes) if quantization is not None else {}
    stored: dict[str, mx.array] = {}
    for name, array in arrays.items():
        packing = chosen.get(name.removesuffix(".weight"))
        stored |= pack(name, array, packing) if packing else {name: array}
    if config.has_d2t:
        stored["d2t"] = student.ids - mx.arange(len(student.ids), dtype=mx.int32)
    values = config.to_dict() | dict(notes)
    if quantization is not None:
        values["quantization"] = quantization.entry(chosen)
    return values, stored


def write_head(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, mx.array] | None = None
) -> None:
    """Write the files of a converted head into ``folder``, each completely or not at all.

    Without ``weights``, those that are there stay as they are.
    """
    if weights is not None:
        with new_file(folder / "model.safetensors") as draft:
            save_arrays(draft, weights)
    with new_file(folder / "config.json") as draft:
        text = json.dumps(config, indent=4, sort_keys=True) + "\n"
        draft.write_text(text, encoding="utf-8")
