"""Student: the head that is trained; and drafters that are made anew for a target."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..convert.layouts import dflash2_values, dflash_values, dspark_values
from ..drafters.block_config import BlockConfig
from ..drafters.config import Eagle3Config, default_ids
from ..drafters.dflash import DFlashHead
from ..drafters.dflash2 import DFlash2Config, DFlash2Head
from ..drafters.dspark import DSparkConfig, DSparkHead
from ..drafters.folder import write_files
from ..drafters.head import Eagle3Head
from ..drafters.target_parts import activation_dtype, find_embedding, rows_of_lm_head, sizes_of
from .settings import TrainSettings

LAYERS = 5  # of a fresh drafter of blocks, and of the target that it taps
BLOCK = 16  # slots of its block
RANK = 256  # of its Markov head or its codebooks, at most
SPREAD = 0.02  # standard deviation of its matrices
FRESH: dict[str, tuple[Any, Any, Callable[..., dict[str, Any]], Callable[[int], dict]]] = {
    "dflash": (BlockConfig, DFlashHead, dflash_values, lambda rank: {}),
    "dflash2": (DFlash2Config, DFlash2Head, dflash2_values, lambda rank: {"selector_rank": rank}),
    "dspark": (
        DSparkConfig,
        DSparkHead,
        dspark_values,
        lambda rank: {"first_slot": 0, "markov_rank": rank, "confidence": "markov"},
    ),
}
"""Drafters of blocks that are made anew: config, head, published config, and fields by rank."""


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
    embedding, _ = find_embedding(model)
    num_layers = len(model.layers)
    ids = mx.array(drafted)
    own_taps = tuple(settings.aux_layers or ()) or fitting_taps(num_layers)
    sizes = target_sizes(settings, model, model_config, num_layers=1)
    rope = {"type": "default", "theta": sizes.pop("rope_theta"), "dims": None, "scaling": None}
    config = Eagle3Config(
        **sizes,
        target_hidden_size=sizes["hidden_size"],
        draft_vocab_size=len(drafted),
        max_position_embeddings=max(2048, settings.max_seq_length),
        num_aux=len(own_taps) if own_taps else 3,
        aux_boundary_ids=own_taps,
        aux_ids_source="mlx_eagle.train" if own_taps else "default",
        rope=rope,
        has_d2t=len(drafted) < sizes["vocab_size"],
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
    settings: TrainSettings, model: nn.Module, config: Mapping[str, Any], num_layers: int
) -> dict[str, Any]:
    """Return the sizes that fresh drafters take from a target, of its ``config.json``.

    They have ``num_layers``, if the settings do not say otherwise.
    """
    text = config.get("text_config") or config
    own = sizes_of(model)
    size = own.hidden_size
    num_heads = text.get("num_attention_heads") or max(1, size // 64)
    rope = text.get("rope_parameters") or {}
    width = settings.intermediate_size or text.get("intermediate_size") or 4 * size
    return {
        "num_layers": settings.num_layers or num_layers,
        "vocab_size": own.vocab_size,
        "hidden_size": size,
        "num_heads": num_heads,
        "num_kv_heads": text.get("num_key_value_heads") or num_heads,
        "head_dim": text.get("head_dim") or size // num_heads,
        "intermediate_size": width,
        "rms_norm_eps": text.get("rms_norm_eps") or 1e-6,
        "rope_theta": float(text.get("rope_theta") or rope.get("rope_theta") or 10000.0),
    }


def fresh_block(
    settings: TrainSettings, model: nn.Module, model_config: Mapping[str, Any]
) -> DFlashHead:
    """Make a drafter of blocks with the target's sizes, whose arrays say nothing yet."""
    make_config, make_head, _, more = FRESH[str(settings.kind)]
    sizes = target_sizes(settings, model, model_config, num_layers=LAYERS)
    depth = len(model.layers)
    layers = [round(1 + i * max(0, depth - 4) / (LAYERS - 1)) for i in range(LAYERS)]
    config = make_config(
        **sizes,
        **more(min(RANK, sizes["hidden_size"])),
        draft_vocab_size=sizes["vocab_size"],
        taps=tuple(sorted({min(layer, depth - 1) + 1 for layer in layers})),
        mask_token_id=settings.mask_token_id,
        block_size=settings.block_size or BLOCK,
    )
    head: DFlashHead = make_head(config)
    return head


def write_fresh(folder: Path, kind: str, head: DFlashHead, seed: int) -> None:
    """Write a new drafter of blocks into ``folder``, as it would be published.

    Its matrices are random, its norms 1, and its convolutions change nothing.
    """
    keys = mx.random.split(mx.random.key(seed), 1000)
    arrays = {}
    for key, (name, array) in zip(keys, tree_flatten(head.parameters()), strict=False):
        own = mx.ones(array.shape)
        if name.endswith("base_kernel"):
            own = own * (mx.arange(array.shape[1]) == 0)[:, None]
        elif "kernel_projection" in name:
            own = mx.zeros(array.shape)
        elif array.ndim > 1:
            own = SPREAD * mx.random.normal(array.shape, key=key)
        arrays[name] = own
    folder.mkdir()
    write_files(folder, FRESH[kind][2](head.config), arrays, "pt")
