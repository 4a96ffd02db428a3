"""The version of this package, and the flag with which every command says it."""

import argparse

import mlx.core as mx
import mlx_lm

__version__ = "0.2.0"


def add_version_flag(parser: argparse.ArgumentParser) -> None:
    """``--version``: ours, and those of what we stand on."""
    versions = f"{__version__} (mlx {mx.__version__}, mlx-lm {mlx_lm.__version__})"
    parser.add_argument("--version", action="version", version=f"%(prog)s {versions}")
