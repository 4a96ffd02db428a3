"""Convert published EAGLE checkpoints to the one form that mlx_eagle loads."""

from .pipeline import convert
from .published_config import Overrides
from .trim import Trim

__all__ = ["Overrides", "Trim", "convert"]
