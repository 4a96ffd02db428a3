"""Conversions to one place at the same time, killed, and on a full disk."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import weights_of

from mlx_eagle.convert import convert, pipeline
from mlx_eagle.system.atomic_folder import AlreadyThere

FULL = """
import resource, signal, sys
from mlx_eagle.convert.__main__ import main

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
main(["--hf-path", sys.argv[1], "--mlx-path", sys.argv[2]])
"""
KILLED = """
import json, os, signal, sys
from mlx_eagle.convert import convert

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

json.dumps = die
convert(sys.argv[1], sys.argv[2])
"""


def run(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_second_of_two_conversions_says_so(source, out, monkeypatch):
    """Both run to their ends; the first one's work is whole and stays."""
    save, first = pipeline.save, []

    def save_after_the_other(*args: object) -> None:
        monkeypatch.setattr(pipeline, "save", save)
        first.append(convert(str(source), str(out), q_bits=8))
        save(*args)

    monkeypatch.setattr(pipeline, "save", save_after_the_other)
    with pytest.raises(AlreadyThere, match="is there by now"):
        convert(str(source), str(out))
    assert first[0]["quantization"]["bits"] == 8 and weights_of(out)
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.exhaustive
def test_a_killed_conversion_is_no_obstacle(source, out):
    done = run(KILLED, source, out)
    assert done.returncode == -signal.SIGKILL and not out.exists()
    assert len(list(out.parent.iterdir())) == 1
    convert(str(source), str(out))
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.parametrize("limit", [0, 100, 20_000])
@pytest.mark.exhaustive
def test_a_full_disk(source, out, limit):
    """A limit on the size of files stands for it."""
    done = run(FULL, source, out, limit)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "could not be written" in done.stderr and not list(out.parent.iterdir())


def test_folders_are_as_open_as_others(source, out):
    convert(str(source), str(out))
    (Path(out.parent) / "other").mkdir()
    assert os.stat(out).st_mode == os.stat(out.parent / "other").st_mode
