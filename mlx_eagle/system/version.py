"""The version of this package, and the flag with which every command says it."""

import argparse
from importlib.metadata import version

__version__ = "0.2.0"


def add_version_flag(parser: argparse.ArgumentParser) -> None:
    """``--version``: ours, and those of what we stand on."""
    parser.add_argument("--version", action="version", version=f"%(prog)s {versions()}")


def versions() -> str:
    """Ours, then MLX's and mlx-lm's: "0.2.0 (mlx 0.32.4, mlx-lm 0.32.2)"."""
    return f"{__version__} (mlx {version('mlx')}, mlx-lm {version('mlx-lm')})"
