"""Drafts of a block with convolutions over its slots, and a choice among candidates: DFlash2.

A DFlash head whose sublayers mix each slot with the ones before it, by kernels that depend on
what they are fed. In each slot the most likely tokens are scored once more, by the token before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn

from ..system.fields import POSITIVE, whole
from .block_config import BlockConfig, fields_from, known_tensors, merged
from .dflash import BlockLayer, DFlashDrafter, DFlashHead, Sublayer, block_kind
from .head import capped
from .kind import Tensor, Tensors

SELECTOR = ("predecessor_codebook", "successor_codebook")
Few = Annotated[int, whole(1, 2**16)]


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(BlockConfig):
    """DFlash config plus the sizes of the convolutions and of the selector.

    Kernels span ``kernel_size`` slots, with one coefficient for ``group_size`` channels. In
    each slot the ``top_k`` most likely tokens are scored by codebooks of ``selector_rank``.
    """

    kernel_size: Few = 2
    group_size: Few = 16
    selector_rank: Few = 1
    top_k: Few = 16
    output_multiplier: Annotated[float, POSITIVE] = 1.0


class BlockConvolution(nn.Module):
    """Two causal convolutions over the slots of a block, around a sublayer.

    Kernels are a base and what the sublayer's input adds to it, by groups of channels.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__()
        c = config
        self.base_kernel = mx.zeros((2, c.kernel_size, c.hidden_size))
        num_groups = c.hidden_size // c.group_size
        self.kernel_projection = nn.Linear(
            c.hidden_size, 2 * c.kernel_size * num_groups, bias=False
        )

    def kernels(self, x: mx.array) -> mx.array:
        """Both kernels at each slot of x (B, m, h): (B, m, 2, T, h)."""
        _, num_taps, h = self.base_kernel.shape
        added = self.kernel_projection(x).reshape(*x.shape[:2], 2, num_taps, -1)
        return self.base_kernel + mx.repeat(added, h // added.shape[-1], axis=-1)

    def __call__(self, x: mx.array, sublayer: Sublayer) -> mx.array:
        """Call a sublayer on x (B, m, h) between both convolutions."""
        kernels = self.kernels(x)
        return convolved(sublayer(convolved(x, kernels[:, :, 0])), kernels[:, :, 1])


def convolved(x: mx.array, kernel: mx.array) -> mx.array:
    """Convolve x (B, m, h) with a kernel (B, m, T, h); zeros stand before the block."""
    num_rows = x.shape[1]
    out = kernel[:, :, 0] * x
    for back in range(1, kernel.shape[2]):
        before = mx.pad(x, [(0, 0), (back, 0), (0, 0)])[:, :num_rows]
        out = out + kernel[:, :, back] * before
    return out


class ConvolvedLayer(BlockLayer):
    """Layer of DFlash2."""

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.attention_conv = BlockConvolution(config)
        self.mlp_conv = BlockConvolution(config)

    def __call__(self, x: mx.array, attend: Sublayer) -> mx.array:
        x = x + self.attention_conv(self.input_layernorm(x), attend)
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)


class CandidateSelector(nn.Module):
    """Scores of a slot's candidates, given the token before."""

    def __init__(self, config: DFlash2Config):
        super().__init__()
        c = config
        self.predecessor_codebook = mx.zeros((c.vocab_size, c.selector_rank))
        self.successor_codebook = mx.zeros((c.draft_vocab_size, c.selector_rank))
        self.hidden_projection = nn.Linear(c.hidden_size, c.selector_rank, bias=False)

    def __call__(self, tokens: mx.array, hidden: mx.array, candidates: mx.array) -> mx.array:
        """Scores to add to logits of candidates (B, n) after tokens (B,) in states (B, h)."""
        own = self.predecessor_codebook[tokens] * self.hidden_projection(hidden)
        return (self.successor_codebook[candidates] @ own[..., None])[..., 0]


class DFlash2Head(DFlashHead):
    """Weights of a DFlash2 head."""

    config: DFlash2Config
    never_quantized = ("kernel_projection", "hidden_projection")
    for_float16 = mx.bfloat16
    """A dtype wider than float16: published heads exceed its largest number between layers."""

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def make_layer(self) -> nn.Module:
        return ConvolvedLayer(self.config)


class DFlash2Drafter(DFlashDrafter):
    """A ``Drafter`` around a DFlash2 head."""

    head: DFlash2Head

    def logits(self, hidden: mx.array) -> mx.array:
        c = self.head.config
        return capped(self.project(self._project, hidden) * c.output_multiplier, c.logit_softcap)

    @property
    def num_choices(self) -> int:
        """Number of candidates."""
        return min(self.head.config.top_k, super().num_choices)

    def slots(self, hidden: mx.array) -> list[mx.array]:
        logits = self.logits(hidden).astype(mx.float32)
        order = mx.argpartition(-logits, self.num_choices - 1, axis=-1)
        return [logits, hidden, mx.stop_gradient(order[..., : self.num_choices])]

    def after(
        self, before: mx.array, carried: mx.array, *slot: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Logits of the candidates, given the token before; of all others -inf."""
        logits, _, candidates = slot
        scores = self.scores(before, *slot)
        only = mx.put_along_axis(mx.full(logits.shape, -mx.inf), candidates, scores, axis=-1)
        return only, carried

    def scores(
        self, before: mx.array, logits: mx.array, hidden: mx.array, candidates: mx.array
    ) -> mx.array:
        """Scores (m, n) of candidates (m, n) after tokens (m,), in slots as ``slots`` has them."""
        rows = candidates if self.rows is None else self.rows.index[candidates]
        own = self.head.candidate_selector(before, hidden, rows)
        return mx.take_along_axis(logits, candidates, axis=-1) + own


def tensors_of(tensors: Tensors) -> dict[str, Tensor]:
    """The tensors of a checkpoint by z-lab or speculators under the names of our modules.

    Codebooks and base kernels are no modules of their own, whatever they were saved as.
    """
    found = {}
    for name, tensor in known_tensors(tensors).items():
        bare = name.removesuffix(".weight")
        found[bare if bare.endswith((*SELECTOR, "base_kernel")) else name] = tensor
    return found


def config_from(tensors: Tensors, config: Mapping[str, Any]) -> DFlash2Config:
    """The config of a published checkpoint."""
    settings = merged(config)
    fields = fields_from(tensors, settings)
    kernel = tensors.get("layers.0.attention_conv.base_kernel")
    projected = tensors.get("layers.0.attention_conv.kernel_projection.weight")
    codebook = tensors.get("candidate_selector.predecessor_codebook")
    if kernel is None or projected is None or codebook is None or len(kernel.shape) != 3:
        raise ValueError("the checkpoint lacks convolutions or codebooks; it is incomplete")
    num_groups = max(projected.shape[0] // (2 * kernel.shape[1]), 1)
    made = fields | {
        "kernel_size": kernel.shape[1],
        "group_size": max(fields["hidden_size"] // num_groups, 1),
        "selector_rank": codebook.shape[-1],
        "top_k": settings.get("selector_top_k"),
        "output_multiplier": settings.get("output_multiplier"),
    }
    return DFlash2Config.from_dict(made, "config.json")


KIND = block_kind(
    "a DFlash2 head",
    (DFlash2Config, DFlash2Head, DFlash2Drafter),
    config_from,
    having="candidate_selector.",
    tensors_of=tensors_of,
)
