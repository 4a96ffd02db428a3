"""Which of Metal's kernels MLX takes, as data: a stand-in for its dispatch rules, without a Mac.

``Recorder`` notes the shapes that a run hands to products and attention, without computing
either; the rules say what those shapes would take.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_eagle.target_model.target import Target

GENERATIONS = {"M1": "g13g", "M2": "g14g", "M3": "g15g", "M4": "g16g", "M5": "g17g"}
# Of packed weights, by the end of the architecture: rows from which on the matrix kernel
# multiplies in layers no side of which is above 2048, above 4096, and in others. Source:
# get_qmv_batch_limit in MLX's mlx/backend/metal/quantized.cpp, and the library of 0.32.4's wheel.
MATRIX_FROM = {
    "g13g": (14, 10, 6), "g13s": (14, 10, 7), "g13d": (32, 18, 12),
    "g14g": (14, 10, 6), "g14s": (14, 10, 6), "g14d": (32, 18, 12),
    "g15g": (13, 15, 13), "g15s": (13, 15, 13), "g15d": (32, 18, 12),
    "g16g": (13, 15, 13), "g16s": (13, 15, 13), "g16d": (32, 18, 12),
    "g17g": (33, 25, 13), "g17p": (33, 25, 13), "g18s": (33, 25, 13), "_v27": (18, 12, 10),
}  # fmt: skip
WIDTHS = (2048, 4096)
ROWS_PER_READ = {"M1": 1, "M2": 1, "M3": 5, "M4": 5, "M5": 5}  # of the vector kernel, in 4 bits
ROWS_PER_TILE = 32  # of the matrix kernel

ATTENTION = {
    # By head dimension: the most rows of the vector kernel, the first row count of the one with
    # tiles of 32 rows. Source: ScaledDotProductAttention::use_fallback in MLX's
    # mlx/backend/metal/scaled_dot_product_attention.cpp (August 2026, and 0.32.4).
    64: (8, 9),
    80: (0, 9),
    96: (8, 9),
    128: (8, 9),
    192: (0, None),
    256: (8, 1024),
}
MOST_QUERIES = 32  # of the vector kernel: rows times query heads per key head
# By query heads per key head: a kernel for one row alone, from so many keys on; and that of heads
# of 512. Read from the compiled library of MLX 0.32.4's wheel.
GROUPED, GROUPED_KEYS = (8, 12, 16), 8192
WIDE_HEAD, WIDE_GROUP, WIDE_KEYS = 512, 8, 1024


@dataclass(frozen=True)
class Attention:
    """One call of attention: its sizes, and what masks it: "causal", "array" or nothing."""

    rows: int
    heads: int
    key_heads: int
    head_dim: int
    num_keys: int
    mask: str

    @property
    def kernel(self) -> str:
        """vector, grouped, tiles, or operations: plain ones, with the scores in memory."""
        most, first_tiled = ATTENTION.get(self.head_dim, (0, None))
        per_key = self.heads // self.key_heads
        queries = self.rows * per_key
        if self.head_dim == WIDE_HEAD:
            is_fused = self.rows == 1 and per_key == WIDE_GROUP and self.num_keys >= WIDE_KEYS
            return "vector" if is_fused else "operations"
        if most and self.rows == 1 and per_key in GROUPED and self.num_keys >= GROUPED_KEYS:
            return "grouped"
        if self.rows <= most and queries <= MOST_QUERIES:
            return "vector"
        return "tiles" if first_tiled is not None and self.rows >= first_tiled else "operations"


@dataclass(frozen=True)
class Product:
    """One product of so many rows with packed weights; of experts, so many rows are routed."""

    rows: int
    inputs: int
    outputs: int
    routed: int = 0
    sorted_rows: bool = False

    def kernel(self, generation: str) -> tuple[str, int]:
        """The kernel on a base chip of that generation, and its passes over the weights."""
        limits = MATRIX_FROM[GENERATIONS[generation]]
        is_matrix = self.rows >= limits[width_class(max(self.inputs, self.outputs))]
        size = ROWS_PER_TILE if is_matrix else ROWS_PER_READ[generation]
        return "matrix" if is_matrix else "vector", -(-self.rows // size)


def width_class(side: int) -> int:
    """The place in a line of ``MATRIX_FROM`` of a layer whose longer side this is."""
    return sum(side > width for width in WIDTHS)


@dataclass
class Calls:
    """What one pass over the target, or one of the head's, hands to MLX."""

    attention: list[Attention] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)


class Recorder:
    """Calls pass by pass, the target's in ``target`` and all others, in order, in ``head``."""

    def __init__(self) -> None:
        self.target: list[Calls] = []
        self.head = Calls()
        self._now = self.head

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, products with packed weights and attention are noted; what they give is 0."""
        with pytest.MonkeyPatch.context() as patch:
            run = Target._pass

            def target_pass(*args, **kwargs):
                self._now = Calls()
                self.target.append(self._now)
                try:
                    return run(*args, **kwargs)
                finally:
                    self._now = self.head

            patch.setattr(Target, "_pass", target_pass)
            patch.setattr(mx.fast, "scaled_dot_product_attention", self._attention)
            patch.setattr(mx, "quantized_matmul", self._product)
            patch.setattr(mx, "gather_qmm", self._expert_product)
            patch.setattr(
                nn.QuantizedEmbedding, "__call__", lambda e, x: mx.zeros((*x.shape, e.dims))
            )
            yield

    def _attention(self, q, k, v, *, scale, mask=None, sinks=None):
        kind = mask if isinstance(mask, str) else "" if mask is None else "array"
        sizes = q.shape[2], q.shape[1], k.shape[1], q.shape[3], k.shape[2]
        self._now.attention.append(Attention(*sizes, kind))
        if kind == "array":
            assert mask.dtype == mx.bool_ and mask.shape[-2:] == (q.shape[2], k.shape[2])
        return mx.zeros((*q.shape[:3], v.shape[-1]))

    def _product(self, x, w, scales, biases=None, transpose=True, **_):
        assert transpose
        self._now.products.append(Product(x.shape[-2], x.shape[-1], w.shape[0]))
        return mx.zeros((*x.shape[:-1], w.shape[0]))

    def _expert_product(self, x, w, scales, biases=None, rhs_indices=None, **options):
        outputs, is_sorted = w.shape[1], options.get("sorted_indices", False)
        routed = rhs_indices.size
        self._now.products.append(Product(x.shape[-2], x.shape[-1], outputs, routed, is_sorted))
        return mx.zeros((*rhs_indices.shape, x.shape[-2], outputs))
