"""Refusal of drafters that are known by their tensors and not read, with what works instead."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .pairs import drafters_for


@dataclass(frozen=True)
class UnreadKind:
    """A kind of drafter that is not read: known by any tensor, else by a name in the config.

    Layers that are appended to a model are no drafter where the model is there as well.
    """

    title: str
    tensors: str
    config: str
    is_appended: bool = False


NONE = r"$^"
UNREAD = (
    UnreadKind("a Laguna drafter", NONE, r"laguna\w*(dflash|draft)"),
    UnreadKind(
        "a Nemotron-H MTP layer",
        r"^mtp\.layers\.\d+\.(hnorm|eh_proj)\.",
        r"nemotron\w*mtp",
        is_appended=True,
    ),
    UnreadKind(
        "an MTP layer of MiMo or speculators",
        r"(^|\.)mtp_layers\.\d+\.(token_layernorm|input_proj)\.",
        r"(mimo\w*mtp|^mtp$)",
        is_appended=True,
    ),
    UnreadKind(
        "an MTP layer as DeepSeek and GLM append it",
        r"(^|\.)(hnorm|eh_proj)\.weight$",
        r"(deepseek|glm|step|hy)\w*mtp",
        is_appended=True,
    ),
    UnreadKind("an XPress drafter", NONE, r"xpress"),
    UnreadKind("a Domino drafter", NONE, r"domino"),
)
TRUNK = re.compile(r"(^|\.)layers\.0\.(self_attn|mixer|linear_attn)\.")


def refuse_unread(
    names: Collection[str], config: Mapping[str, Any], source: str, target: str | None = None
) -> None:
    """Raise ValueError where a checkpoint is of a kind that is known and not read.

    ``target`` is the model's name, where it is known; else ``source`` or the config may tell it.
    """
    has_trunk = any(TRUNK.search(name) and "mtp" not in name for name in names)
    words = [word.lower() for word in _names_in(config)]
    for kind in UNREAD:
        if kind.is_appended and has_trunk:
            continue
        by_tensor = any(re.search(kind.tensors, name) for name in names)
        if by_tensor or any(re.search(kind.config, word) for word in words):
            works = what_works(config, source, target)
            raise ValueError(f"{source} is {kind.title}, which is not read; {works}")


def what_works(config: Mapping[str, Any], source: str, target: str | None = None) -> str:
    """Which drafters there are for the same target, as far as names tell."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    given = [target, verifier.get("name_or_path"), config.get("_name_or_path"), source]
    name, known = drafters_for([str(text) for text in given if text])
    if not known:
        return "use an EAGLE or DFlash head of the same target, or --draft-model lookup"
    return f"for {name} there is {' or '.join(known[:3])}"


def _names_in(config: Mapping[str, Any]) -> list[str]:
    entries = config.get("architectures")
    found = [config.get("model_type"), config.get("speculators_model_type")]
    found += entries if isinstance(entries, list) else []
    return [str(entry)[:256] for entry in found if entry]
