"""A target that mlx-lm has spread over several processes: what each of them must agree on.

Tensor parallelism leaves every process all layers, and the same activations between them.
Pipeline parallelism leaves each some layers: what the others saw has to be fetched. The draft
head is whole in every process, and decides the same everywhere because it is fed the same.

Whatever is exchanged must be so in one order in all processes: on the stream of the passes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed as layers
from mlx_lm.models.pipeline import PipelineMixin

from .masks_and_ropes import named_modules

SHARDED = (
    layers.AllToShardedLinear,
    layers.QuantizedAllToShardedLinear,
    layers.QuantizedShardedToAllLinear,
    layers.ShardedToAllLinear,
)

Exchange = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Stage:
    """This process's layers, ``start`` to ``end`` of ``num_layers``, perhaps all."""

    start: int
    end: int
    num_layers: int

    @property
    def is_whole(self) -> bool:
        return self.end - self.start == self.num_layers

    def sees(self, tap: int) -> bool:
        """Whether this process has that activation: a layer's output belongs to its process."""
        return self.start < tap <= self.end or tap > self.num_layers or tap == self.start == 0

    def to_fetch(self, taps: tuple[int, ...]) -> list[int]:
        """Taps that may be seen by other processes: all but what leaves the final norm.

        That, tap ``num_layers + 1``, every process computes for itself.
        """
        return [] if self.is_whole else [tap for tap in taps if tap <= self.num_layers]

    def fetch(
        self, seen: dict[int, mx.array], taps: tuple[int, ...], exchange: Exchange
    ) -> dict[int, mx.array]:
        """The activations at ``taps``, from whichever process saw them; the same everywhere.

        ``seen`` holds what this process sees, at least tap ``end``, and what leaves the final
        norm. ``exchange`` adds an array up over all processes.
        """
        shared = self.to_fetch(taps)
        if not shared:
            return seen
        last = seen[self.num_layers + 1]
        nothing = mx.zeros_like(seen[self.end])
        # After the pass's own exchanges, the last of which the final norm waited for: these
        # must come in one order in all processes. Hence also no waiting for a later need.
        mine = mx.depends(mx.stack([seen.get(tap, nothing) for tap in shared]), last)
        fetched = exchange(mine)
        mx.async_eval(fetched)
        return {self.num_layers + 1: last} | dict(zip(shared, fetched, strict=True))


def find_stage(model: nn.Module) -> Stage:
    """The layers of an mlx-lm model that this process has.

    For a pipelined model, all processes must call this at the same time.
    """
    num_here = len(model.layers)
    for pipeline in _pipelines(model):
        total = int(mx.distributed.all_sum(mx.array(num_here)))
        return Stage(pipeline.start_idx, pipeline.start_idx + num_here, total)
    return Stage(0, num_here, num_here)


def is_pipelined(model: nn.Module) -> bool:
    return bool(_pipelines(model))


def is_sharded(model: nn.Module) -> bool:
    """Whether other processes run parts of this model, and have to follow this one."""
    return is_pipelined(model) or any(
        isinstance(module, SHARDED) for _, module in named_modules(model)
    )


def in_any_process(flag: bool) -> bool:
    """Whether ``flag`` is true in any process; all must call this at the same time."""
    return int(mx.distributed.all_sum(mx.array(int(flag)))) > 0


def _pipelines(model: nn.Module) -> list[PipelineMixin]:
    modules = (m for _, m in named_modules(model) if isinstance(m, PipelineMixin))
    return [m for m in modules if m.pipeline_size > 1]
