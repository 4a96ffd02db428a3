"""Student: the head that is trained, made anew or taken from another, and its converted files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from ..drafters.config import Eagle3Config, default_ids
from ..drafters.head import Eagle3Head
from ..drafters.head_weights import load_head
from ..drafters.quantize import Quantization, pack, shapes_of_matrices
from ..drafters.target_parts import activation_dtype, find_embedding, lm_head_of, rows_of_lm_head
from .given import converted, open_given
from .settings import TrainSettings

HeadFiles = tuple[dict[str, Any], dict[str, mx.array]]
"""A ``config.json``, and the arrays beside it."""


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
    own_taps = tuple(settings.aux_layers or ()) or fitting_taps(num_layers)
    sizes = target_sizes(model_config, embedding, settings)
    rope = {"type": "default", "theta": sizes.pop("rope_theta"), "dims": None, "scaling": None}
    config = Eagle3Config(
        **sizes,
        target_hidden_size=sizes["hidden_size"],
        num_layers=settings.num_layers or 1,
        vocab_size=vocab_size,
        draft_vocab_size=len(drafted),
        max_position_embeddings=max(2048, settings.max_seq_length),
        num_aux=len(own_taps) if own_taps else 3,
        aux_boundary_ids=own_taps,
        aux_ids_source="mlx_eagle.train" if own_taps else "default",
        rope=rope,
        has_d2t=len(drafted) < vocab_size,
        family="mlx-eagle",
    )
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


def target_sizes(
    config: Mapping[str, Any], embed: Callable[[mx.array], mx.array], settings: TrainSettings
) -> dict[str, Any]:
    """Return the sizes that fresh drafters take from a target, of its ``config.json``."""
    text = config.get("text_config") or config
    size = int(embed(mx.array([0])).shape[-1])
    num_heads = text.get("num_attention_heads") or max(1, size // 64)
    rope = text.get("rope_parameters") or {}
    width = settings.intermediate_size or text.get("intermediate_size") or 4 * size
    return {
        "hidden_size": size,
        "num_heads": num_heads,
        "num_kv_heads": text.get("num_key_value_heads") or num_heads,
        "head_dim": text.get("head_dim") or size // num_heads,
        "intermediate_size": width,
        "rms_norm_eps": text.get("rms_norm_eps") or 1e-6,
        "rope_theta": float(text.get("rope_theta") or rope.get("rope_theta") or 10000.0),
    }


def student_from(source: str, model: nn.Module, target: str) -> Student:
    """Take the head in ``source``, converted already or in any form that the converter reads.

    Its shape and vocabulary stay as they are; a quantized head is dequantized. ``target`` is the
    target's folder or repository id, for the converter. Raises ValueError for a head that is more
    than llama layers.
    """
    given = converted(open_given(source, target), target)
    attached = load_head(given.folder, model, dtype=mx.float32)
    head = attached.head
    embedding, _ = find_embedding(model)
    c = head.config
    features = {
        "has parallel heads": c.num_parallel_heads > 0,
        "attends to a latent (MLA)": c.latent is not None,
        "scales queries by their position": c.position_scale is not None,
        "has layers of Gemma-4": c.branch_norms or c.values != "projected",
    }
    for feature in (name for name, holds in features.items() if holds):
        raise ValueError(
            f"{source} {feature}, and only heads of llama layers are trained here: start from "
            "another head, or from none."
        )
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


def packed(
    arrays: dict[str, mx.array], settings: TrainSettings, never: tuple[str, ...]
) -> HeadFiles:
    """Quantize the matrices among arrays if that is asked for, but those that end in ``never``.

    Returns the entry of ``config.json``, if there is one, and all arrays.
    """
    if not settings.quantize:
        return {}, arrays
    quantization = Quantization(settings.q_bits, settings.q_group_size)
    chosen = quantization.choose(shapes_of_matrices(arrays, never))
    stored: dict[str, mx.array] = {}
    for name, array in arrays.items():
        packing = chosen.get(name.removesuffix(".weight"))
        stored |= pack(name, array, packing) if packing else {name: array}
    return {"quantization": quantization.entry(chosen)}, stored
