"""Table of the kinds of drafters: how each is recognised, converted and loaded, or why not.

A new kind is a file beside this one and a row here; docs/pages/add-a-drafter.md shows how.
"""

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..system.fields import LONGEST_NAME, check
from ..system.hub import locate
from ..system.json_file import read_published
from ..system.safetensors import read_header
from . import assistant, dflash, dflash2, dspark, eagle3, model_drafter, mtp
from .base import Drafter
from .config import Eagle3Config
from .folder import kind_in, read_config
from .kind import Kind, LoadOptions
from .lookup import LookupDrafter
from .output_rows import STORED, DraftVocab
from .pairs import drafters_for
from .target_parts import holder_of, read_target_config

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
    ),
    "dspark": dspark.KIND,
    "dflash2": dflash2.KIND,
    "dflash": dflash.KIND,  # after those two, which have all that it has
    "assistant": Kind(
        "a Gemma 4 assistant",
        assistant.load,
        assistant.recognise,
        assistant.convert,
        made_for=assistant.AssistantConfig.made_for,
        readings=assistant.readings,
    ),
    "eagle3": Kind("an EAGLE head", eagle3.load, eagle3.recognise, made_for=Eagle3Config.made_for),
    "lookup": Kind(
        "prompt lookup",
        lambda *_: LookupDrafter(),  # a folder has nothing to add
        by_name=lambda *_: LookupDrafter(),
    ),
    "model": Kind("a draft model", model_drafter.load, loads_published=True),
}
"""Kinds by their names in converted folders."""

OTHERWISE = "model"
"""Kind of a checkpoint that no other kind knows: mlx-lm says whether it is a model."""


def recognise(
    names: Collection[str],
    config: Mapping[str, Any],
    source: str = "the checkpoint",
    target: str | None = None,
) -> str:
    """The kind of a checkpoint as published, by its tensors' names: the first row to know it.

    ``target`` is the model's name, where it is known; else ``source`` or the config may tell it.
    Raises ValueError for a kind that is known and not read.
    """
    kinds = (name for name, kind in KINDS.items() if kind.recognise(names, config))
    found = next(kinds, OTHERWISE)
    if found not in ("eagle3", OTHERWISE):  # what is taken for one of these may be another drafter
        return found
    has_trunk = any(TRUNK.search(name) and "mtp" not in name for name in names)
    if has_trunk and any(APPENDED.search(name) for name in names):
        return OTHERWISE
    text = _said_in(config)
    for kind in UNREAD:
        if kind.is_head and found == OTHERWISE:
            continue
        others = [name for name in names if not re.search(kind.tensors, name)]
        by_tensor = len(others) < len(names)
        if kind.is_appended and has_trunk:
            # A whole model with its MTP layers, which mlx-lm leaves out.
            if by_tensor and not KINDS["eagle3"].recognise(others, config):
                return OTHERWISE
            continue
        if by_tensor or re.search(kind.config, text, re.MULTILINE):
            works = kind.way_out or what_works(config, source, target)
            raise ValueError(f"{source} is {kind.title}, which is not read; {works}")
    return found


def published_kind(path: Path, source: str) -> str:
    """The kind of a local checkpoint, a folder or a file; ValueError as from ``recognise``."""
    shards = [] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not shards or not (path / "config.json").is_file():
        return "eagle3"  # a GGUF, or nothing mlx-lm could load: the converter says what it is
    names = [name for shard in shards for name in read_header(shard)]
    return recognise(names, read_published(path / "config.json"), source)


def own_kind(target: str) -> str | None:
    """The name that opens what a target has itself, or what it was converted from; None: none."""
    with suppress(OSError, ValueError):  # opening the target says why
        config = read_target_config(target)
        for name, kind in KINDS.items():
            is_part = kind.parts_of(config)
            if is_part is not None and holder_of(target, is_part) is not None:
                return name
    return None


def is_converted(folder: Path) -> bool:
    """Whether it is the folder of a converted drafter."""
    path = folder / "config.json"
    return path.is_file() and kind_in(read_published(path)) in KINDS


def kind_of(folder: Path) -> tuple[Kind, dict[str, Any]]:
    """The kind of a converted folder, and its config; ValueError where it is not converted."""
    config = read_config(folder, KINDS)
    return KINDS[kind_in(config)], config


def load_drafter(
    path_or_repo: str | Path,
    model: nn.Module,
    *,
    quantize_bits: int | None = None,
    quantize_group_size: int = 64,
    dtype: mx.Dtype | None = None,
    draft_cache: str = "exact",
    draft_window: int | None = None,
    draft_vocab: DraftVocab = None,
    tokenizer: TokenizerWrapper | None = None,
) -> Drafter:
    """Load a converted drafter (a folder or a hub repo id) for ``model``, an mlx-lm model.

    ``quantize_bits`` quantizes an unquantized one while loading (0: as it is). ``dtype`` is that
    of its arithmetic, by default the target's own. For EAGLE heads, ``draft_cache`` is "exact" or
    "lagging" (see ``Eagle3Drafter``), and of the head's cache only the newest ``draft_window``
    slots are kept, beside the first few (None: all). ``draft_vocab`` is as in ``open_drafter``,
    by default what the folder was converted with; ``tokenizer`` is the target's, whose tokens that
    end a text are then drafted too.

    Raises ValueError, in one sentence, where the folder is not converted, is damaged, or does not
    belong to this target.
    """
    folder = locate(str(path_or_repo), ("*.json", "*.safetensors"))
    options = LoadOptions(
        quantize_bits, quantize_group_size, dtype, draft_window, draft_vocab, tokenizer
    )
    return load_folder(folder, model, options).with_draft_cache(draft_cache)


def load_folder(folder: Path, model: nn.Module, options: LoadOptions) -> Drafter:
    """The drafter of a converted folder; ValueError as from ``load_drafter``."""
    kind, config = kind_of(folder)
    check(config, {"draft_vocab": STORED}, folder / "config.json")
    if options.draft_vocab is None:
        options = replace(options, draft_vocab=config.get("draft_vocab"))
    return options.limit(kind.load(folder, config, model, options), model)


@dataclass(frozen=True)
class UnreadKind:
    """A kind of drafter that is not read: known by any tensor, else by the text of the config.

    Layers that are appended to a model are no drafter where the model is there as well. What
    only marks a head that is taken for an EAGLE head says nothing of other models.
    """

    title: str
    tensors: str
    config: str
    is_appended: bool = False
    is_head: bool = False
    way_out: str = ""  # else drafters for the same target


NONE = r"\A\b\B"
UNREAD = (
    UnreadKind("a Laguna drafter", NONE, r"laguna\w*(dflash|draft)"),
    UnreadKind(
        "an MTP layer of a form that is not known",
        r"(^|\.)(hnorm|eh_proj)\.|(^|\.)mtp_layers\.\d+\.(token_layernorm|input_proj)\."
        r"|(^|\.)mtp_(block|emb_norm|hidden_norm|linear_proj)\.\d+\.",
        r"(nemotron|mimo|deepseek|glm|step|hy|ernie)\w*mtp|^mtp$",
        is_appended=True,
    ),
    UnreadKind("an XPress drafter", NONE, r"xpress"),
    UnreadKind("a Domino drafter", NONE, r"domino"),
    UnreadKind(
        "a drafter of blocks (DFlash, DSpark) whose layers are of a kind that is not known",
        r"(^|\.)(markov_|confidence_head)",
        r"dflash|dspark|^(markov_|confidence_head|projector_type=|selector_)"
        r"|\A(?=(?s:.*)^block_size=)(?=(?s:.*)^mask_token_id=)",
        is_head=True,
    ),
    UnreadKind(
        "a multi-token-prediction (MTP) assistant",
        r"(^|\.)(hnorm|eh_proj|e_h_proj|mtp)\.",
        r"(assistant|mtp|nextn)\w*$|^(use_mtp_layernorm|eh_proj_before_attn)=",
        is_head=True,
    ),
    UnreadKind(
        "a draft head with experts or gated attention",
        r"(^|\.)(mlp\.(experts|router|gate)|self_attn\.g_proj)\.",
        NONE,
        is_head=True,
        way_out="use a dense EAGLE-3 head of the same target",
    ),
)
MOST_KEYS = 2000  # of a config, more than an honest one has
TRUNK = re.compile(r"(^|\.)layers\.0\.(self_attn|mixer|linear_attn)\.")

APPENDED = re.compile(r"(^|\.)(layers\.\d+\.eh_proj|mtp_layers\.\d+\.input_proj)\.")
"""Tensors of MTP layers that only a whole model has beside its trunk."""


def _said_in(config: Mapping[str, Any]) -> str:
    """The names that a config gives its model, and the keys that it sets, each on a line."""
    inner = config.get("eagle_config")
    levels = [config, inner if isinstance(inner, Mapping) else {}]
    keys = (key for level in levels for key, value in level.items() if value not in (None, False))
    lines = names_in(config)
    lines += [f"{key[:LONGEST_NAME]}=" for key in islice(keys, MOST_KEYS)]
    return "\n".join(lines).lower()


def what_works(config: Mapping[str, Any], source: str, target: str | None = None) -> str:
    """Drafters for the same target, as far as names tell."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    given = [target, verifier.get("name_or_path"), config.get("_name_or_path"), source]
    name, known = drafters_for([str(text) for text in given if text])
    if not known:
        return "use an EAGLE or DFlash head of the same target, or --draft-model lookup"
    return f"for {name} there is {' or '.join(known[:3])}"


def names_in(config: Mapping[str, Any]) -> list[str]:
    """The name that a config gives its model, cut where it is no name."""
    entries = config.get("architectures")
    found = [config.get("model_type"), config.get("speculators_model_type")]
    found += entries if isinstance(entries, list) else []
    return [str(entry)[:LONGEST_NAME] for entry in found if entry]
