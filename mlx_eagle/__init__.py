"""EAGLE-3 speculative decoding on MLX, for the models of mlx-lm."""

import importlib
from types import ModuleType

from .doctor.packages import explained

with explained():
    from .batch.generate import BatchResponse, batch_generate
    from .decoding.loop import speculative_generate_step
    from .decoding.sampling import Sampling
    from .decoding.stats import Stats
    from .demo.pair import load_demo
    from .draft_models import open_drafter
    from .drafters.eagle3 import Eagle3Drafter
    from .drafters.load import load_drafter
    from .drafters.tree import StaticTree, TreeShape, parse_tree
    from .generate import GenerationResponse, generate, stream_generate
    from .installation import Installation, install, installed, uninstall
    from .system.version import __version__


def __getattr__(name: str) -> ModuleType:
    """Import ``mlx_eagle.convert`` and the like when they are first asked for."""
    if name in ("bench", "convert", "reference", "server", "train"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BatchResponse",
    "Eagle3Drafter",
    "GenerationResponse",
    "Installation",
    "Sampling",
    "StaticTree",
    "Stats",
    "TreeShape",
    "__version__",
    "batch_generate",
    "generate",
    "install",
    "installed",
    "load_demo",
    "load_drafter",
    "open_drafter",
    "parse_tree",
    "speculative_generate_step",
    "stream_generate",
    "uninstall",
]
