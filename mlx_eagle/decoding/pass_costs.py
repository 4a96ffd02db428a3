"""Costs of passes: what the weights of a target say before any round, and kernels chosen by time.

A row goes through some experts of each layer only, so a pass of more rows reads more weights,
however many rows a kernel multiplies at once. What a round can compute in two ways to the same
numbers is timed both ways in the rounds of a text, because which is faster depends on chip, shape
and context.
"""

from collections import Counter
from dataclasses import dataclass

import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..system.device import Machine, product_cost, tile_doubt, weight_bytes

PER_ROW = (
    "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k",
    "moe_k", "top_k",
)  # fmt: skip
"""Names that mlx-lm's models give to the number of experts a row goes through."""
EXPECTED = (
    "a pass of several tokens reads more of a mixture's experts: expect 1.0 to 1.15x, and more "
    "where copies hit, as in edits (computed from published curves of Macs; others measured 0.83 "
    "to 1.11x: mlx-lm 1485, vllm-mlx 763, omlx 1080)"
)
OUTPUTS = ("lm_head", "output", "embed_out")  # output matrices that are not the embeddings


SHARED = 0.257
"""Share of a token's experts that the next token goes through too (mlx-lm 1485, an M3 Max)."""


@dataclass(frozen=True)
class Experts:
    """A model's experts: a row goes through ``per_row`` of ``total``.

    ``share`` is the experts' share of the weights that one row reads.
    """

    total: int
    per_row: int
    share: float

    def touched(self, num_rows: int) -> float:
        """Number of experts that ``num_rows`` rows in a row of a text go through.

        Each goes through ``SHARED`` of those of the row before, or through more by chance, and
        chooses the others for itself. gpt-oss-20b (32, 4): 4 rows -> 12.0
        """
        others = self.total - self.per_row
        if others == 0:
            return self.total
        fresh = self.per_row * (1 - max(SHARED, self.per_row / self.total))
        return self.total - others * (1 - fresh / others) ** (num_rows - 1)


@dataclass(frozen=True)
class TargetWeights:
    """Weights of a target, which decide the price of a pass, apart from the machine.

    ``row_bytes`` are the bytes of the weights that one row reads. ``packing`` is how most of
    those outside experts are packed, see ``FOUR_BITS``; None if no weights are.
    """

    row_bytes: int
    packing: str | None
    experts: Experts | None

    @classmethod
    def of(cls, model: nn.Module) -> "TargetWeights":
        """Read them from a model, as it was built or loaded."""
        packing = _packing(model)
        layers = expert_layers(model)
        per_row = _per_row(model)
        if not layers or per_row is None:
            return cls(bytes_read(model), packing, None)
        whole = sum(map(weight_bytes, layers))
        total = max(m.weight.shape[0] for m in layers)
        per_row = min(per_row, total)
        read = whole * per_row // total
        row_bytes = bytes_read(model) - whole + read
        return cls(row_bytes, packing, Experts(total, per_row, read / row_bytes))

    def pass_doubt(self, machine: Machine, num_rows: int) -> float:
        """Doubt in ``pass_cost`` that passes with another kernel leave: see ``tile_doubt``."""
        share = 1.0 if self.experts is None else 1 - self.experts.share
        return share * tile_doubt(machine, num_rows, self.packing)

    def pass_cost(self, machine: Machine, num_rows: int) -> float:
        """Cost of a pass of ``num_rows`` in passes of one row, by the table of machines."""
        cost = product_cost(machine, num_rows, self.packing)
        if self.experts is None:
            return cost
        reads = self.experts.touched(num_rows) / self.experts.per_row
        return self.experts.share * reads + (1 - self.experts.share) * cost


def expert_layers(model: nn.Module) -> list[nn.Module]:
    """Layers with the weights of every expert, of which a row goes through some."""
    return [m for m in model.modules() if isinstance(m, SwitchLinear | QuantizedSwitchLinear)]


def _packing(model: nn.Module) -> str | None:
    sizes: Counter[str] = Counter()
    for module in model.modules():
        if hasattr(module, "bits"):
            mode = getattr(module, "mode", "affine")
            name = f"{module.bits} bits" if mode == "affine" else mode
            sizes[name] += 0 if isinstance(module, QuantizedSwitchLinear) else weight_bytes(module)
    return max(sizes, key=sizes.__getitem__, default=None)


def _per_row(model: nn.Module) -> int | None:
    """Number of experts a row goes through, from a layer or its arguments."""
    for module in model.modules():
        for holder in (module, getattr(module, "args", None), getattr(module, "config", None)):
            for name in PER_ROW:
                value = getattr(holder, name, None)
                if isinstance(value, int) and value > 0:
                    return value
    return None


def bytes_read(model: nn.Module) -> int:
    """The weights that a pass multiplies with, all experts counted: no table of embeddings.

    A tied table is the output matrix, and so it is read.
    """
    names = dict(model.named_modules())
    tables = [m for m in names.values() if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]
    has_output = any(name.rpartition(".")[2] in OUTPUTS for name in names)
    return weight_bytes(model) - (sum(map(weight_bytes, tables)) if has_output else 0)
