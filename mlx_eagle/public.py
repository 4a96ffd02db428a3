"""Public names of the package, imported when one of them is first asked for."""

from .batch.generate import BatchResponse, batch_generate
from .decoding.generate_step import speculative_generate_step
from .decoding.sampling import Sampling
from .decoding.stats import Stats
from .demo.pair import load_demo
from .draft_models import open_drafter
from .drafters.eagle3 import Eagle3Drafter
from .drafters.kinds import load_drafter
from .drafters.tree import StaticTree, TreeShape, parse_tree
from .generate import GenerationResponse, generate, stream_generate
from .installation import Installation, install, installed, uninstall
from .system.loading import load

__all__ = [
    "BatchResponse",
    "Eagle3Drafter",
    "GenerationResponse",
    "Installation",
    "Sampling",
    "StaticTree",
    "Stats",
    "TreeShape",
    "batch_generate",
    "generate",
    "install",
    "installed",
    "load",
    "load_demo",
    "load_drafter",
    "open_drafter",
    "parse_tree",
    "speculative_generate_step",
    "stream_generate",
    "uninstall",
]
