"""Drafts of a block whose tokens are chosen one after the other: DSpark.

A DFlash head, and a small matrix by which the logits of each slot depend on the token before it.
So a draft is one forward of the head, and as many rows of that matrix.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn

from ..system.fields import one_of, whole
from .block_config import BlockConfig, fields_from, known_tensors, merged
from .dflash import BlockAttention, BlockLayer, DFlashDrafter, DFlashHead, Sublayer, block_kind
from .kind import Tensor, Tensors

CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """DFlash config plus the rank and kind of the head that reads the token before.

    ``confidence`` says what the head's own estimates of acceptance are made from: the "state" of
    a slot, the token before it besides ("markov"), or "none" where it makes none.

    Where ``is_gemma``, layers are those of Gemma 4's global attention; with ``values_are_keys``,
    values are the keys before their norm.
    """

    markov_rank: Annotated[int, whole(1, 2**16)] = 1
    markov_kind: Annotated[str, one_of("vanilla", "gated", "rnn")] = "vanilla"
    confidence: Annotated[str, one_of("none", "state", "markov")] = "none"
    is_gemma: bool = False
    values_are_keys: bool = False


class MarkovHead(nn.Module):
    """Head that adds to the logits of a slot by the token before."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        c = config
        rank = config.markov_rank
        self.markov_kind = c.markov_kind
        self.markov_w1 = nn.Embedding(c.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, c.draft_vocab_size, bias=False)
        if self.markov_kind == "gated":
            self.gate_proj = nn.Linear(c.hidden_size + rank, rank)
        if self.markov_kind == "rnn":
            self.joint_proj = nn.Linear(c.hidden_size + 2 * rank, 3 * rank)

    def __call__(
        self, tokens: mx.array, hidden: mx.array, carried: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Input (B, r) of ``markov_w2``, whose logits (B, Vd) are added, and what is carried.

        After tokens (B,), in a slot of hidden states (B, h).
        """
        own = self.markov_w1(tokens)
        if self.markov_kind == "gated":
            gate = mx.sigmoid(self.gate_proj(mx.concatenate([hidden, own], axis=-1)))
            own = gate * own
        elif self.markov_kind == "rnn":
            joint = self.joint_proj(mx.concatenate([carried.astype(own.dtype), own, hidden], -1))
            gate, new, out = mx.split(joint, 3, axis=-1)
            gate = mx.sigmoid(gate)
            carried = gate * carried + (1 - gate) * mx.tanh(new)
            own = mx.tanh(out)
        return own, carried


class ConfidenceHead(nn.Module):
    """Estimates of how likely each slot's token is kept if those before it are."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        rank = config.markov_rank if config.confidence == "markov" else 0
        self.proj = nn.Linear(config.hidden_size + rank, 1)

    def __call__(self, hidden: mx.array, before: mx.array | None) -> mx.array:
        """Logits (...) of these chances, of states (..., h), and tokens before, embedded (..., r).

        DeepSpec, modeling/dspark/markov_head.py: w [h, w1[y]] + b. Not every head asks for tokens.
        """
        rows = hidden if before is None else mx.concatenate([hidden, before], axis=-1)
        return self.proj(rows)[..., 0].astype(mx.float32)


class GemmaAttention(BlockAttention):
    """Gemma 4's global attention: values are normed too, and scores are not scaled."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.scale = 1.0
        self.eps = config.rms_norm_eps
        if config.values_are_keys:
            self.pop("v_proj")

    def keys_and_values(self, x: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        k = self._to_heads(self.k_proj(x), self.num_kv_heads)
        v = self._to_heads(self.v_proj(x), self.num_kv_heads) if "v_proj" in self else k
        return self.rope(self.k_norm(k), offset=offset), mx.fast.rms_norm(v, None, self.eps)


class GemmaLayer(BlockLayer):
    """Layer of Gemma 4: what attention and MLP add is normed as well, the sum multiplied."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        h = config.hidden_size
        eps = config.rms_norm_eps
        self.self_attn = GemmaAttention(config)
        self.pre_feedforward_layernorm = nn.RMSNorm(h, eps)
        self.post_feedforward_layernorm = nn.RMSNorm(h, eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(self, x: mx.array, attend: Sublayer) -> mx.array:
        x = x + self.post_attention_layernorm(attend(self.input_layernorm(x)))
        added = self.mlp(self.pre_feedforward_layernorm(x))
        x = x + self.post_feedforward_layernorm(added)
        scalar: mx.array = self.layer_scalar
        return x * scalar


class DSparkHead(DFlashHead):
    """Weights of a DSpark head."""

    config: DSparkConfig
    never_quantized = ("confidence_head.proj",)

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        if config.confidence != "none":
            self.confidence_head = ConfidenceHead(config)

    def make_layer(self) -> nn.Module:
        return GemmaLayer(self.config) if self.config.is_gemma else BlockLayer(self.config)


class DSparkDrafter(DFlashDrafter):
    """A ``Drafter`` around a DSpark head."""

    head: DSparkHead

    def slots(self, hidden: mx.array) -> list[mx.array]:
        return [self.logits(hidden), hidden]

    def start(self, num_requests: int) -> mx.array:
        return mx.zeros((num_requests, self.head.config.markov_rank))

    def after(
        self, before: mx.array, carried: mx.array, *slot: mx.array
    ) -> tuple[mx.array, mx.array]:
        logits, hidden = slot
        markov = self.head.markov_head
        own, carried = markov(before, hidden, carried)
        return logits + self.project(markov.markov_w2, own), carried

    def confidence_logits(self, hidden: mx.array, before: mx.array) -> mx.array | None:
        head = self.head
        if head.config.confidence == "none":
            return None
        is_told = head.config.confidence == "markov"
        known = head.markov_head.markov_w1(before) if is_told else None
        logits: mx.array = head.confidence_head(hidden, known)
        return logits


def tensors_of(tensors: Tensors) -> dict[str, Tensor]:
    """The tensors under the names of our modules; of a confidence head, all or none.

    Checkpoints are by DeepSpec, speculators, SpecForge, LiquidAI or NVIDIA.
    """
    found = known_tensors(tensors)
    if all(name in found for name in CONFIDENCE):
        return found
    return {name: found[name] for name in found if not name.startswith("confidence_head.")}


def config_from(tensors: Tensors, config: Mapping[str, Any]) -> DSparkConfig:
    """The config of a published checkpoint."""
    settings = dict(merged(config))
    inside = config.get("dflash_config") or {}
    if inside.get("projector_type") != "dspark":  # elsewhere copied off the target
        for key in ("rope_scaling", "rope_type"):
            settings.pop(key, None)
        rope = settings.get("rope_parameters") or {}
        settings["rope_parameters"] = {k: rope[k] for k in ("rope_theta",) if k in rope}
    fields = fields_from(tensors, settings, int("transformer_layer_config" in settings))
    if fields["embed_source"] == "file":
        fields["scales_as_target"] = False
    if "layers.0.pre_feedforward_layernorm.weight" in tensors:
        fields |= _gemma_fields(tensors, settings, config, fields)
    markov_kind = "gated" if "markov_head.gate_proj.weight" in tensors else "vanilla"
    markov_kind = "rnn" if "markov_head.joint_proj.weight" in tensors else markov_kind
    w1 = tensors.get("markov_head.markov_w1.weight")
    estimates = "none"
    if CONFIDENCE[0] in tensors:
        takes_hidden = tensors[CONFIDENCE[0]].shape[-1] == fields["hidden_size"]
        estimates = "state" if takes_hidden else "markov"
    made = fields | {
        "markov_rank": w1.shape[-1] if w1 is not None else 0,
        "markov_kind": markov_kind,
        "confidence": estimates,
    }
    return DSparkConfig.from_dict(made, "config.json")


def _gemma_fields(
    tensors: Tensors,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """The fields of Gemma 4's layers, all of which attend globally."""
    ropes = config.get("rope_parameters") or {}
    rope = ropes.get("full_attention") or ropes
    partial = rope.get("partial_rotary_factor", 0.25)
    owns_embedding = fields["embed_source"] == "file"
    return {
        "is_gemma": True,
        "values_are_keys": "layers.0.self_attn.v_proj.weight" not in tensors,
        "hidden_act": settings.get("hidden_activation", "gelu_pytorch_tanh"),
        "embed_scale": fields["hidden_size"] ** 0.5 if owns_embedding else 1.0,
        "rope_theta": rope.get("rope_theta", 1e6),
        "rope_scaling": {"type": "proportional", "partial_rotary_factor": partial, "factor": 1.0},
        "windows": (),
        "causal_layers": (),
    }


KIND = block_kind(
    "a DSpark head",
    (DSparkConfig, DSparkHead, DSparkDrafter),
    config_from,
    having="markov_head.markov_w1.",
    tensors_of=tensors_of,
)
