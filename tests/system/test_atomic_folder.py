"""Folders that several processes make at once, that are killed half-way, that do not fit."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_eagle.system import atomic_folder
from mlx_eagle.system.atomic_folder import (
    AlreadyThere,
    CannotWrite,
    discard_folder,
    locked,
    new_folder,
)

WRITER = """
import sys, time
from pathlib import Path
from mlx_eagle.system.atomic_folder import AlreadyThere, new_folder

folder, text, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
try:
    with new_folder(folder) as draft:
        (draft / "a").write_text(text)
        print("writing", flush=True)
        time.sleep(seconds)
        (draft / "b").write_text(text)
    print("won")
except AlreadyThere:
    print("there")
"""


def writer(folder: Path, text: str, seconds: float) -> subprocess.Popen[str]:
    """A process that has begun to write the folder."""
    command = [sys.executable, "-c", WRITER, str(folder), text, str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    return process


def test_of_several_processes_one_wins(tmp_path):
    processes = [writer(tmp_path / "x", str(i), 0.3) for i in range(2)]
    said = sorted(process.communicate(timeout=60)[0] for process in processes)
    assert said == ["there\n", "won\n"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x" / "a").read_text() == (tmp_path / "x" / "b").read_text()


@pytest.mark.exhaustive
def test_what_a_killed_process_left_is_removed(tmp_path):
    killed, alive = writer(tmp_path / "x", "killed", 60), writer(tmp_path / "x", "alive", 2)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(timeout=60)
    assert len(list(tmp_path.iterdir())) == 2 and not (tmp_path / "x").exists()
    with new_folder(tmp_path / "x") as draft:
        assert len(list(tmp_path.iterdir())) == 2  # ours, and that of the process still alive
        (draft / "a").write_text("ours")
    assert alive.communicate(timeout=60)[0] == "there\n"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x" / "a").read_text() == "ours"


def test_no_space_is_a_sentence_and_leaves_nothing(tmp_path):
    says = "x could not be written: No space left on device"
    with pytest.raises(CannotWrite, match=says), new_folder(tmp_path / "x") as draft:
        (draft / "a").write_text("a")
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_no_place_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    place = new_folder(tmp_path / "file" / "x")
    with pytest.raises(CannotWrite, match="could not be written"), place:
        pass


def test_a_second_one_and_other_errors(tmp_path):
    with (
        pytest.raises(AlreadyThere, match="is there by now"),
        new_folder(tmp_path / "x") as one,
        new_folder(tmp_path / "x") as other,
    ):
        (one / "a").write_text("one")
        (other / "a").write_text("other")
    assert (tmp_path / "x" / "a").read_text() == "other"
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "y"):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("call", ["open", "try_lock"])
def test_a_folder_that_another_process_took_for_an_orphan(tmp_path, monkeypatch, call):
    place = os if call == "open" else atomic_folder
    real = getattr(place, call)

    def after_another_process(*arguments):
        monkeypatch.setattr(place, call, real)
        atomic_folder.remove_orphans(tmp_path.iterdir())
        assert not list(tmp_path.iterdir())
        return real(*arguments)

    monkeypatch.setattr(place, call, after_another_process)
    with new_folder(tmp_path / "x") as draft:
        (draft / "a").write_text("a")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path, lambda: pytest.fail("it waits")), new_folder(tmp_path / "x") as draft:
        (draft / "a").write_text("a")
        atomic_folder.remove_orphans(tmp_path.glob(".*.part"))
    assert (tmp_path / "x" / "a").read_text() == "a"


def test_discarding_twice(tmp_path):
    for _ in range(2):
        (tmp_path / "x").mkdir(exist_ok=True)
        discard_folder(tmp_path / "x")
        discard_folder(tmp_path / "x")
    assert not list(tmp_path.iterdir())
