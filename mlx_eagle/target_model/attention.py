"""Attention of a verify pass, in parts that stay on fast kernels."""

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention as attend

from .masks_and_ropes import named_modules

NAME = attend.__name__
# Metal's vector kernel for attention (mlx/backend/metal/scaled_dot_product_attention.cpp).
MOST_ROWS = 8  # of a pass
MOST_QUERIES = 32  # rows times query heads per key head
HEAD_DIMS = (64, 96, 128, 256)  # sizes of a head that it takes
LEAST_KEYS = 1024  # from which on Metal has a kernel for one row of head dimension 512
MOST_CUT = 8  # rows that are cut into single ones there
MOST_FORCED_ROWS = 8  # above, MLX takes a fused kernel by itself wherever one is worth it


@dataclass
class AttentionOptions:
    """Whether rows are cut, and a kernel forced, in a generation; whether there was reason to."""

    is_on: bool = False
    is_forced: bool = False
    matters: bool = False  # a pass that the kernel would take with fewer heads is cut
    falls_off: bool = False  # a short pass goes through plain operations
    _masks: dict[tuple[int, int], tuple[mx.array, mx.array]] = field(default_factory=dict)

    def use(self, is_on: bool, is_forced: bool) -> None:
        """Set the options for attention from now on."""
        self.is_on = is_on
        self.is_forced = is_forced

    def begin(self) -> None:
        """Let go of the masks of a pass, when one begins or has ended."""
        self._masks.clear()

    def for_heads(self, mask: mx.array, num_heads: int) -> mx.array:
        """A mask (B, 1, R, S) as (B, H, R, S), contiguous, made once for all layers of a pass.

        For several texts MLX's kernels take no other: they would copy it in every layer.
        """
        if mask.ndim != 4 or mask.shape[0] == 1 or mask.shape[1] != 1 or num_heads == 1:
            return mask
        key = id(mask), num_heads  # the mask is kept with it: no other gets its id meanwhile
        if key not in self._masks:
            spread = mx.broadcast_to(mask, (mask.shape[0], num_heads, *mask.shape[2:]))
            self._masks[key] = mask, mx.contiguous(spread)
        return self._masks[key][1]


def find_attention(model: nn.Module) -> list[nn.Module]:
    """The modules of a model's layers that call mlx-lm's attention function themselves."""
    found: dict[int, nn.Module] = {}
    for layer in model.layers:
        for _, module in named_modules(layer):
            call = type(module).__call__
            if not isinstance(call, FunctionType) or NAME not in call.__code__.co_names:
                continue
            if call.__globals__.get(NAME) is attend:
                found[id(module)] = module
    return list(found.values())


def fused_rows(head_dim: int, heads_per_key: int) -> int:
    """The most rows of a pass for which Metal's vector attention kernel takes a short pass.

    Beyond it, up to 8 rows, the scores of all query heads go through memory. 0 where the kernel
    does not exist for that head dimension. Llama-3.1-8B (128, 4) -> 8; Qwen3-32B (128, 8) -> 4
    """
    if head_dim == 512:  # Gemma 4's full layers: a single row, from 1024 keys on (MLX 0.32.4)
        return int(heads_per_key == 8)
    return min(MOST_ROWS, MOST_QUERIES // heads_per_key) if head_dim in HEAD_DIMS else 0


def attend_with_options(
    options: AttentionOptions,
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's function of queries (B, H, R, D), keys and values (B, Hk, S, D), in parts of R.

    ``mask`` is an array, "causal" or None.
    """
    attend_to = partial(attend, cache=cache, scale=scale, sinks=sinks)
    batch, num_heads, num_rows, head_dim = queries.shape
    # There is no kernel for quantized keys, or for a head of two widths.
    has_kernel = isinstance(keys, mx.array) and values.shape[-1] == head_dim
    if batch == num_rows == 1 or not has_kernel:
        return attend_to(queries, keys, values, mask=mask)
    if isinstance(mask, mx.array):
        mask = options.for_heads(mask, num_heads)
    num_keys = keys.shape[2]
    limit = fused_rows(head_dim, 1)
    most = fused_rows(head_dim, num_heads // keys.shape[1])
    if limit == 0 < most and num_keys >= LEAST_KEYS:
        limit = MOST_CUT
    options.matters |= 0 < most < limit
    options.falls_off |= most < MOST_FORCED_ROWS
    if options.is_forced and max(most, 1) < num_rows <= MOST_FORCED_ROWS:
        # Before parts: tried after them, it has to be faster than they are.
        with suppress(ValueError):  # there is none for these heads
            return mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=scale, mask=mask, sinks=sinks, force_fused=True
            )
    if not options.is_on or not 0 < most < num_rows <= limit:
        return attend_to(queries, keys, values, mask=mask)
    out = []
    for start in range(0, num_rows, most):
        end = min(start + most, num_rows)
        seen = num_keys
        rows_mask = mask
        if isinstance(mask, str):  # causal: what comes after the last row of the part is not seen
            seen = num_keys - num_rows + end
            rows_mask = mask if end - start > 1 else None
        elif mask is not None and mask.shape[-2] > 1:
            rows_mask = mask[..., start:end, :]
        rows = queries[:, :, start:end]
        out.append(attend_to(rows, keys[:, :, :seen], values[:, :, :seen], mask=rows_mask))
    return mx.concatenate(out, axis=2)
