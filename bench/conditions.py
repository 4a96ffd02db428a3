"""Conditions of a benchmark: machine, versions, target and drafters."""

import os
import platform
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.utils import get_total_parameters

from mlx_eagle import __version__
from mlx_eagle.system.device import blas_name, weight_bytes

from .runner import Models

DEMO_NAMES = {"model": "SmolLM2-135M-Instruct (demo)", "head": "demo head"}


def machine() -> dict[str, Any]:
    """Chip, system, versions, and the BLAS that multiplies on a CPU."""
    on_gpu = mx.default_device() == mx.gpu
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "chip": str(mx.device_info().get("device_name", platform.processor())),
        "device": "gpu" if on_gpu else "cpu",
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "os": platform.platform(),
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx-lm": mlx_lm.__version__,
        "mlx-eagle": __version__,
        "blas": "not used (GPU)" if on_gpu else blas_name(),
    }


def describe(models: Models, names: dict[str, str]) -> dict[str, Any]:
    """Target, drafters and template; ``names`` are those that the user gave."""
    drafters = models.drafters.items()
    result = {
        "model": names["model"],
        **{f"model_{key}": value for key, value in facts_of([models.target]).items()},
        "head": names["head"],
        "drafters": [{"name": name} | facts_of(drafter.modules()) for name, drafter in drafters],
        "chat_template": "on" if models.tokenizer.has_chat_template else "none in the tokenizer",
    }
    if models.compared is not None:
        result["compared_draft_model"] = names["compared"]
        result["compared_draft_bytes"] = weight_bytes(models.compared)
    return result


def facts_of(modules: Sequence[nn.Module]) -> dict[str, Any]:
    """Precision and size of a model's modules."""
    return {
        "precision": ", ".join(map(precision, modules)) or "no weights",
        "parameters": sum(map(get_total_parameters, modules)),
        "bytes": sum(map(weight_bytes, modules)),
    }


def precision(module: nn.Module) -> str:
    """Types that weights are stored in, the most bytes first: "4-bit (groups of 64), float16"."""
    sizes: Counter[str] = Counter()
    for child in module.modules():
        is_packed = "scales" in child and "weight" in child
        for name, array in child.items():
            if isinstance(array, mx.array) and not name.startswith("_"):
                packed = is_packed and f"{child.bits}-bit (groups of {child.group_size})"
                sizes[packed or str(array.dtype).removeprefix("mlx.core.")] += array.nbytes
    return ", ".join(kind for kind, _ in sizes.most_common())
