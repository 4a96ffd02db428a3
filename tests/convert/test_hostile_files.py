"""Thousands of hostile files, in a process of its own: a head or a sentence, and little memory."""

import json
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest


def run(folder: Path, *args: object, limit: float) -> dict:
    """What ``fuzz.py`` found."""
    done = subprocess.run(
        [sys.executable, fuzz.__file__, str(folder), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=limit,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert not found["failures"], "\n".join(found["failures"])
    return found["outcomes"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed, seconds", [(1, 4), (10_000, 150)])
def test_fuzzed_files(tmp_path, seed, seconds):
    outcomes = run(tmp_path, seed, seconds, limit=seconds + 120)
    for kind in fuzz.KINDS:
        assert outcomes.get(f"{kind}: sentences"), "each kind was reached"
    assert any("heads" in name for name in outcomes), "not all are refused"


@pytest.mark.exhaustive
def test_bombs(tmp_path):
    """Small files that want to become large: the writing is done here, the reading there."""
    from bombs import BOMBS  # a second and 100 MB, for this test alone

    (tmp_path / "bombs").mkdir()
    for name, write in BOMBS.items():
        write(tmp_path / "bombs" / name.replace(" ", "-"))
    outcomes = run(tmp_path, "bombs", limit=200)
    assert sum(outcomes.values()) == len(BOMBS)
