"""Training against PyTorch: on the same tokens, neither head is better than the other."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "compare_trainers.py"


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not (find_spec("torch") and find_spec("specforge")), reason="needs torch and specforge"
)
def test_acceptance_is_that_of_pytorch():
    """The script runs in a process of its own, because it replaces packages by stubs."""
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lengths = {}
    for line in done.stdout.splitlines():
        name, _, figures = line.partition(": mean acceptance length ")
        lengths[name] = [float(figure) for figure in figures.split(" on ")[0].split()]
    assert lengths["ours"][-1] > 1.15 * lengths["before"][-1]
    for ours, theirs in zip(lengths["ours"], lengths["theirs"], strict=True):
        assert ours == pytest.approx(theirs, rel=0.05)
