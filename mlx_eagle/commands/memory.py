"""Bytes of weights and caches, and the peak: the memory report of the commands."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import get_total_parameters

from ..drafters.base import Drafter
from ..system.precision import weight_bytes


def cache_bytes(cache: list) -> int:
    """Bytes held by mlx-lm caches."""
    return sum(entry.nbytes for entry in cache)


def memory_report(model: nn.Module, drafter: Drafter | None, cache: list) -> dict[str, int]:
    """Bytes of what is loaded and of the caches as they stand: the target's, then the head's."""
    num_target = len(make_prompt_cache(model))
    report = {
        "target_weight_bytes": weight_bytes(model),
        "target_cache_bytes": cache_bytes(cache[:num_target]),
        "peak_bytes": mx.get_peak_memory(),
    }
    if drafter is not None:
        report["head_parameters"] = sum(get_total_parameters(m) for m in drafter.modules())
        report["head_weight_bytes"] = sum(weight_bytes(m) for m in drafter.modules())
        report["head_cache_bytes"] = cache_bytes(cache[num_target:])
    return report


def memory_line(report: dict[str, int]) -> str:
    """The memory report in one line of the footer."""
    megabytes = {k: f"{v / 1e6:.1f} MB" for k, v in report.items() if k.endswith("bytes")}
    line = f"Memory: target weights {megabytes['target_weight_bytes']}"
    if "head_parameters" in report:
        line += (
            f", head {report['head_parameters'] / 1e6:.1f} M parameters in "
            f"{megabytes['head_weight_bytes']}, head cache {megabytes['head_cache_bytes']}"
        )
    return line + f", target cache {megabytes['target_cache_bytes']}"


def memory_lines(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """The memory report as a table: before and after the generation, and the increment."""
    lines = [f"{'Memory (MB)':<24}{'before':>10}{'after':>10}"]
    for name in after:
        if name.endswith("bytes"):
            label = name.removesuffix("_bytes").replace("_", " ")
            lines.append(f"{label:<24}{before[name] / 1e6:>10.1f}{after[name] / 1e6:>10.1f}")
    if "head_parameters" in after:
        added = after["head_weight_bytes"] + after["head_cache_bytes"]
        plain = after["target_weight_bytes"] + after["target_cache_bytes"]
        lines.append(
            f"Drafting adds {added / 1e6:.1f} MB ({added / plain:.1%}) to weights and caches."
        )
    return lines
