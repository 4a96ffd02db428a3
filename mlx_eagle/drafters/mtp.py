"""Drafts from a multi-token-prediction layer, which some targets are published with.

The layer of Qwen3-Next and Qwen3.5 (dense and mixture of experts): tensors ``mtp.*`` of the
original checkpoint, which mlx-lm drops when it loads or converts one.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from ..target.masks_and_ropes import evaluate_ropes
from .base import Draft, Pick, start_early
from .feature_drafter import FeatureDrafter
from .folder import LoadOptions, Tensors, read_weights
from .target_parts import TargetSizes, find_embedding, lm_head_of

LAYERS = (qwen3_next.Qwen3NextDecoderLayer, qwen3_5.DecoderLayer)


class MTPHead(nn.Module):
    """One decoder layer over (embedding of a token, state of the position before it).

    DeepSeek-AI 2024, arXiv:2412.19437, section 2.2, with the names of the Qwen checkpoints.
    """

    def __init__(self, layer: nn.Module, hidden_size: int, rms_norm_eps: float):
        """``layer`` is a decoder layer of mlx-lm, called with (x, mask, cache)."""
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, rms_norm_eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, rms_norm_eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden_size, rms_norm_eps)

    def __call__(self, embeddings: mx.array, states: mx.array, cache: KVCache) -> mx.array:
        """Advance m slots: embeddings and states (1, m, h) -> states (1, m, h).

        A state is what the output projection takes: the target's, after its final norm, or
        the head's own, which is fed back in its place.
        """
        both = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(states)]
        x = self.fc(mx.concatenate(both, axis=-1))
        states = self.norm(self.layers[0](x, create_attention_mask(x, cache), cache))
        return states


class MTPDrafter(FeatureDrafter):
    """A ``Drafter`` around an MTP layer; embedding and output projection are the target's."""

    head: MTPHead

    def __init__(self, head: MTPHead, target: nn.Module):
        """Raises ValueError where the head is not as wide as the target."""
        self._final_norm = target.model.norm
        width, target_width = (n.weight.size for n in (head.norm, self._final_norm))
        if width != target_width:
            raise ValueError(
                f"the MTP layer was made for a target of hidden size {width}, but this target's "
                f"is {target_width}: use the layer from the target's own checkpoint."
            )
        self._embed, _ = find_embedding(target)
        self._project = lm_head_of(target, self._embed)
        super().__init__(head, (len(target.layers),), num_layers=1)
        evaluate_ropes(head)

    @property
    def width(self) -> int:
        """The target's hidden size."""
        return self.head.norm.weight.size

    @property
    def dtype(self) -> mx.Dtype:
        return self.head.norm.weight.dtype

    def _absorb(self, tokens: mx.array, features: mx.array, last: mx.array | None) -> mx.array:
        """Features enter the target's final norm; the state is (1, 1, h)."""
        states = self._forward(tokens, self._final_norm(features[None]))
        return states[:, -1:] if last is None else mx.take(states, last.reshape(1), axis=1)

    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens: one forward for each but the first."""
        states, tokens = self._seed, [self._next(self._first, pick)]
        for _ in range(size - 1):
            start_early(tokens[-1], size)
            states = self._forward(tokens[-1], states)
            tokens.append(self._next(self._logits(states), pick))
        self.cache[0].trim(size - 1)
        return Draft(mx.concatenate(tokens))

    def _forward(self, tokens: mx.array, states: mx.array) -> mx.array:
        """One forward over tokens (m,) and states (1, m, h) -> (1, m, h)."""
        self.num_forwards += 1
        return self.head(self._embedded(tokens)[None], states, self.cache[0])

    def _logits(self, states: mx.array) -> mx.array:
        """States (1, m, h)."""
        logits: mx.array = self._project(states)[0]
        return logits

    def _next(self, logits: mx.array, pick: Pick) -> mx.array:
        """The choice from logits (1, V), as a token (1,) int32."""
        return pick(logits, None).astype(mx.int32)


def make_mtp_head(target: nn.Module) -> MTPHead:
    """The MTP layer that fits ``target``, with fresh weights.

    Raises ValueError where the target is not of a family whose layer is known.
    """
    kind = type(target.layers[0])
    if kind not in LAYERS:
        raise ValueError(
            f"the target is a {target.model_type} model: MTP layers are known for Qwen3-Next "
            "and Qwen3.5 (model types qwen3_next, qwen3_5, qwen3_5_moe)."
        )
    args = (target.language_model if "language_model" in target else target).args
    attends = args.full_attention_interval - 1  # the index of a layer that is not recurrent
    return MTPHead(kind(args, attends), args.hidden_size, args.rms_norm_eps)


def recognise(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Whether these are the tensors of such a layer, without the model it belongs to."""
    bare = {name.removeprefix("mtp.") for name in names}
    return {"fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"} <= bare


def convert(tensors: Tensors, config: Mapping[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """The tensors under names without ``mtp.``; see ``Kind.convert``."""
    return {}, {name.removeprefix("mtp."): tensor for name, tensor in tensors.items()}


def load(
    folder: Path, config: dict[str, Any], model: nn.Module, options: LoadOptions
) -> MTPDrafter:
    """The drafter of a converted folder; see ``Kind.load``."""
    weights = {f"mtp.{name}": array for name, array in read_weights(folder).items()}
    return load_mtp(weights, model)


def made_for(config: dict[str, Any], where: Path, target: TargetSizes | None) -> str:
    """The tensors tell, once they are read; see ``Kind.made_for``."""
    return "for the target it was published with"


def load_mtp(weights: dict[str, mx.array], target: nn.Module) -> MTPDrafter:
    """A drafter from the ``mtp.*`` tensors among ``weights``, the target's own checkpoint.

    The checkpoint as its makers published it, not as mlx-lm converts it; other tensors are
    ignored, so a shard can be given as ``mx.load`` reads it. Raises ValueError, in one
    sentence, where the target has no such layer or the tensors are not those of its layer.
    """
    head = make_mtp_head(target)
    weights = {k.removeprefix("mtp."): v for k, v in weights.items() if k.startswith("mtp.")}
    weights = _stack_experts(weights)
    expected = dict(tree_flatten(head.parameters()))
    missing, unknown = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    if missing or unknown:
        what = f"lacks mtp.{min(missing)}" if missing else f"has an unknown mtp.{min(unknown)}"
        raise ValueError(
            f"the checkpoint {what}: give the tensors of one MTP layer, unquantized, as "
            "published with this target."
        )
    for name, array in expected.items():
        if weights[name].shape != array.shape:
            raise ValueError(
                f"the checkpoint's mtp.{name} is {weights[name].shape}, but this target's layer "
                f"has {array.shape}: use the target's own checkpoint."
            )
    for name, array in weights.items():
        if name.endswith("norm.weight") or "_norm_" in name:
            weights[name] = array + 1.0  # published norms multiply by 1 + weight
    head.load_weights(list(weights.items()))
    head.set_dtype(target.model.norm.weight.dtype)
    mx.eval(head.parameters())
    return MTPDrafter(head, target)


def _stack_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Experts as mlx-lm holds them, (E, out, in), from one tensor each or fused ones."""
    weights, mlp, stacked = dict(weights), "layers.0.mlp", {}
    if f"{mlp}.experts.gate_up_proj" in weights:
        gate_up = weights.pop(f"{mlp}.experts.gate_up_proj")
        stacked["gate_proj"], stacked["up_proj"] = mx.split(gate_up, 2, axis=-2)
    if f"{mlp}.experts.down_proj" in weights:
        stacked["down_proj"] = weights.pop(f"{mlp}.experts.down_proj")
    for name in ("gate_proj", "up_proj", "down_proj"):
        experts: list[mx.array] = []
        while f"{mlp}.experts.{len(experts)}.{name}.weight" in weights:
            experts.append(weights.pop(f"{mlp}.experts.{len(experts)}.{name}.weight"))
        if experts:
            stacked[name] = mx.stack(experts)
    return weights | {f"{mlp}.switch_mlp.{name}.weight": w for name, w in stacked.items()}
