"""Convert published EAGLE checkpoints to the one form that mlx_eagle loads."""

from .pipeline import convert
from .resolve import Overrides

__all__ = ["Overrides", "convert"]
