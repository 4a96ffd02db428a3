"""Fixtures of the tests that convert: where a checkpoint lies, and where it is converted to."""

from pathlib import Path

import pytest
from checkpoints import CONFIG, as_midlayer, eagle3_tensors, write_safetensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny EAGLE-3 head as the original files have it."""
    return write_safetensors(tmp_path / "source", CONFIG, as_midlayer(eagle3_tensors()))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder that does not exist, in a parent that does not exist."""
    return tmp_path / "results" / "head"
