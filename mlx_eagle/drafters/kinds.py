"""Table of the kinds of drafters: how each is recognised, converted and loaded.

A new kind is a file beside this one and a row here; docs/pages/add-a-drafter.md shows how.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..system.hub import locate
from ..system.json_schema import read_object, shown
from . import (
    assistant,
    block_config,
    dflash,
    dflash2,
    dspark,
    eagle3,
    lookup,
    model_drafter,
    mtp,
)
from .base import Drafter
from .folder import Kind, LoadOptions, kind_in, read_config

KINDS: dict[str, Kind] = {
    "mtp": Kind(
        "an MTP layer",
        mtp.load,
        mtp.recognise,
        mtp.convert,
        readings=mtp.readings,
        never_quantized=mtp.NEVER_QUANTIZED,
        parts_of=mtp.parts_of,
        loads_published=True,
        made_for=mtp.made_for,
        by_name=mtp.by_name,
        comes_with=mtp.comes_with,
    ),
    "dspark": Kind(
        "a DSpark head",
        dspark.load,
        dspark.recognise,
        dspark.convert,
        made_for=dspark.DSparkConfig.made_for,
        readings=block_config.readings,
    ),
    "dflash2": Kind(
        "a DFlash2 head",
        dflash2.load,
        dflash2.recognise,
        dflash2.convert,
        never_quantized=dflash2.NEVER_QUANTIZED,
        made_for=dflash2.DFlash2Config.made_for,
        readings=block_config.readings,
    ),
    "dflash": Kind(
        "a DFlash head",
        dflash.load,
        dflash.recognise,
        dflash.convert,
        made_for=block_config.BlockConfig.made_for,
        readings=block_config.readings,
    ),
    "assistant": Kind(
        "a Gemma 4 assistant",
        assistant.load,
        assistant.recognise,
        assistant.convert,
        made_for=assistant.made_for,
        readings=assistant.readings,
    ),
    "eagle3": Kind(
        "an EAGLE head",
        eagle3.load,
        eagle3.recognise,
        is_trained=True,
        made_for=eagle3.made_for,
    ),
    "lookup": Kind("prompt lookup", lookup.load, by_name=lookup.by_name),
    "model": Kind("a draft model", model_drafter.load, loads_published=True),
}
"""By the name that ``kind`` has in a converted folder."""

OTHERWISE = "model"
"""What a checkpoint is taken for that no kind knows: mlx-lm says whether it is one."""


def recognise(names: Collection[str], config: Mapping[str, Any]) -> str:
    """The kind of a checkpoint as published: the first to know it."""
    found = (name for name, kind in KINDS.items() if kind.recognise(names, config))
    return next(found, OTHERWISE)


def own_kind(target: str) -> str | None:
    """The name that opens what the checkpoint of a target has itself; None: nothing is known."""
    return next((name for name, kind in KINDS.items() if kind.comes_with(target)), None)


def is_converted(folder: Path) -> bool:
    """Whether it is the folder of a converted drafter."""
    path = folder / "config.json"
    return path.is_file() and kind_in(read_object(path)) in KINDS


def kind_of(folder: Path) -> tuple[Kind, dict[str, Any]]:
    """The kind of a converted folder, and its config; ValueError where it is not converted."""
    config = read_config(folder)
    name = kind_in(config)
    if name not in KINDS:
        raise ValueError(
            f"{folder} holds a {shown(name)} model, not a converted EAGLE-3 head: convert the "
            "checkpoint first with mlx_eagle.convert --hf-path SRC --mlx-path DST."
        )
    return KINDS[name], config


def load_drafter(
    path_or_repo: str | Path,
    model: nn.Module,
    *,
    quantize_bits: int | None = None,
    quantize_group_size: int = 64,
    dtype: mx.Dtype | None = None,
    draft_cache: str = "exact",
    draft_window: int | None = None,
) -> Drafter:
    """Load a converted drafter (a folder or a hub repo id) for ``model``, an mlx-lm model.

    ``quantize_bits`` quantizes an unquantized one while loading. ``dtype`` is that of its
    arithmetic, by default the target's own. For EAGLE heads, ``draft_cache`` is "exact" or
    "lagging" (see ``Eagle3Drafter``), and of the head's cache only the newest ``draft_window``
    slots are kept, beside the first few (None: all).

    Raises ValueError, in one sentence, where the folder is not converted, is damaged, or does not
    belong to this target.
    """
    folder = locate(str(path_or_repo), ("*.json", "*.safetensors"))
    kind, config = kind_of(folder)
    options = LoadOptions(quantize_bits, quantize_group_size, dtype)
    drafter = kind.load(folder, config, model, options)
    return drafter.with_draft_window(draft_window).with_draft_cache(draft_cache)
