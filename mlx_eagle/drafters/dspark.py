"""Drafts of a block whose tokens are chosen one after the other: DSpark.

A DFlash head, and a small matrix by which the logits of each slot depend on the token before it.
So a draft is one forward of the head, and as many rows of that matrix.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..system.json_schema import Table, one_of, whole
from .block_config import (
    OWN,
    BlockConfig,
    check_fit,
    fields_from,
    known_tensors,
    merged,
)
from .dflash import DFlashDrafter, DFlashHead, attach, check_tensors, is_block_head
from .folder import LoadOptions, PublishedTensor, Tensors
from .target_parts import TargetSizes

MARKOV: Table = {
    **OWN,
    "markov_rank": whole(1, 2**16),
    "markov_kind": one_of("vanilla", "gated", "rnn"),
}
CONFIDENCE = "confidence_head."
"""Estimates of acceptance: tensors that no draft depends on."""


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """That of DFlash, and the rank and kind of the head that reads the token before."""

    markov_rank: int = 1
    markov_kind: str = "vanilla"

    @classmethod
    def table(cls) -> Table:
        return MARKOV


class MarkovHead(nn.Module):
    """What the token before adds to the logits of a slot."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        c, rank = config, config.markov_rank
        self.kind = c.markov_kind
        self.markov_w1 = nn.Embedding(c.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, c.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(c.hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(c.hidden_size + 2 * rank, 3 * rank)

    def start(self, num_requests: int) -> mx.array:
        """What is carried from slot to slot, (B, r), before the first."""
        rank = self.markov_w1(mx.array([0])).shape[-1]
        return mx.zeros((num_requests, rank))

    def __call__(
        self, tokens: mx.array, states: mx.array, carried: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Logits (B, Vd) to add after tokens (B,), in a slot of states (B, h); what is carried."""
        own = self.markov_w1(tokens)
        if self.kind == "gated":
            gate = mx.sigmoid(self.gate_proj(mx.concatenate([states, own], axis=-1)))
            own = gate * own
        elif self.kind == "rnn":
            joint = self.joint_proj(mx.concatenate([carried.astype(own.dtype), own, states], -1))
            gate, new, out = mx.split(joint, 3, axis=-1)
            gate = mx.sigmoid(gate)
            carried = gate * carried + (1 - gate) * mx.tanh(new)
            own = mx.tanh(out)
        return self.markov_w2(own), carried


class DSparkHead(DFlashHead):
    """Weights of a DSpark head."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.markov_head = MarkovHead(config)


class DSparkDrafter(DFlashDrafter):
    """A ``Drafter`` around a DSpark head."""

    head: DSparkHead

    def read(
        self, states: mx.array, anchors: mx.array, choose: Callable[[mx.array], mx.array]
    ) -> list[mx.array]:
        """Slot by slot, each with the token chosen in the slot before."""
        rows, before = self.logits(states), anchors
        carried, tokens = self.head.markov_head.start(rows.shape[0]), []
        for slot in range(rows.shape[1]):
            added, carried = self.head.markov_head(before, states[:, slot], carried)
            before = self._to_ids(choose(rows[:, slot] + added))
            tokens.append(before)
        return tokens


def recognise(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """By the matrix of the token before."""
    return is_block_head(names, having="markov_head.markov_w1.")


def convert(tensors: Tensors, config: Mapping[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """See ``Kind.convert``: files of DeepSpec, speculators, SpecForge, LiquidAI and NVIDIA."""
    found = {
        name: tensor
        for name, tensor in known_tensors(tensors).items()
        if not name.startswith(CONFIDENCE)
    }
    if "layers.0.pre_feedforward_layernorm.weight" in found:
        raise ValueError(
            "this is a DSpark head with the layers of Gemma 4, which are not converted yet; use "
            "an assistant or an EAGLE head of the same target"
        )
    made = config_from(found, config)
    check_tensors(DSparkHead(made), found)
    return made.to_dict(), found


def config_from(tensors: Mapping[str, PublishedTensor], config: Mapping[str, Any]) -> DSparkConfig:
    """The config that a published checkpoint comes to."""
    settings = dict(merged(config))
    inside = config.get("dflash_config") or {}
    if inside.get("projector_type") != "dspark":  # elsewhere copied off the target
        for key in ("rope_scaling", "rope_type"):
            settings.pop(key, None)
        rope = settings.get("rope_parameters") or {}
        settings["rope_parameters"] = {k: rope[k] for k in ("rope_theta",) if k in rope}
    fields = fields_from(tensors, settings, "transformer_layer_config" in config)
    if fields["embed_source"] == "file":
        fields["scales_as_target"] = False
    kind = "gated" if "markov_head.gate_proj.weight" in tensors else "vanilla"
    kind = "rnn" if "markov_head.joint_proj.weight" in tensors else kind
    w1 = tensors.get("markov_head.markov_w1.weight")
    made = fields | {
        "first_slot": _first_slot(config, settings, fields["block_size"]),
        "markov_rank": w1.shape[-1] if w1 is not None else 0,
        "markov_kind": kind,
    }
    return DSparkConfig.from_dict(made, "config.json")


def _first_slot(config: Mapping[str, Any], settings: Mapping[str, Any], block_size: int) -> int:
    """Which slot drafts the first token, by the surest of what a config says about it."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    drafted = methods[0].get("speculative_tokens") if isinstance(methods[0], Mapping) else None
    if isinstance(drafted, int) and block_size - drafted in (0, 1):
        return block_size - drafted
    if settings.get("sample_from_anchor") is not None:
        return 0 if settings["sample_from_anchor"] else 1
    if settings.get("dspark_bonus_anchor") is not None:
        return 1 if settings["dspark_bonus_anchor"] else 0
    return 1 if "transformer_layer_config" in config else 0


def load(
    folder: Path, config: dict[str, Any], model: nn.Module, options: LoadOptions
) -> DSparkDrafter:
    """The drafter of a converted folder; see ``Kind.load``."""
    parts = attach(DSparkHead, DSparkConfig.from_dict, folder, config, model, options)
    return DSparkDrafter(*parts)


def made_for(config: dict[str, Any], where: Path, target: TargetSizes | None) -> str:
    """The sizes of its targets; see ``Kind.made_for``."""
    c = DSparkConfig.from_dict(config, where)
    if target is not None:
        check_fit(c, target)
    return f"for targets of hidden size {c.hidden_size} with {c.vocab_size} tokens"
